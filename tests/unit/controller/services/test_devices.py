"""The devices of a replica: resource and number, node affinity, and contradictions that are refused."""

from typing import Any

import pytest

from controller.services.pods.devices import build_node_affinity, find_hardware_problem, request_devices
from devices.vendors import VENDORS, Vendor
from tests.support.api_objects import as_service, service

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def affinity(vendor: Vendor, **hardware: Any) -> dict[str, Any]:
    node_affinity = build_node_affinity(as_service(service(hardware=hardware)).spec.hardware, vendor)
    assert node_affinity is not None
    inner: dict[str, Any] = node_affinity["nodeAffinity"]
    return inner


def expressions(vendor: str, **hardware: Any) -> list[dict[str, Any]]:
    requirements: list[dict[str, Any]] = affinity(VENDORS[vendor], **hardware)[REQUIRED]["nodeSelectorTerms"][0][
        "matchExpressions"
    ]
    return requirements


@pytest.mark.parametrize(
    ("vendor", "spec", "expected"),
    [
        ("cpu", {}, (None, 0)),
        ("nvidia", {}, ("nvidia.com/gpu", 1)),
        ("nvidia", {"hardware": {"count": 4}}, ("nvidia.com/gpu", 4)),
        ("amd", {"resources": {"gpu": 2}}, ("amd.com/gpu", 2)),
        ("intel-gaudi", {"resources": {"gpu": 8}, "hardware": {"count": 8}}, ("habana.ai/gaudi", 8)),
        ("nvidia", {"hardware": {"resource": "nvidia.com/mig-1g.10gb"}}, ("nvidia.com/mig-1g.10gb", 1)),
    ],
)
def test_devices_are_those_that_the_service_states(vendor: str, spec: dict[str, Any], expected: object) -> None:
    stated = as_service(service(**spec))
    assert find_hardware_problem(stated, vendor, VENDORS[vendor]) is None
    assert request_devices(stated, VENDORS[vendor])[:2] == expected


def test_no_affinity_without_a_wish() -> None:
    assert build_node_affinity(as_service(service()).spec.hardware, VENDORS["nvidia"]) is None


def test_integer_memory_label_is_compared_and_shared_devices_are_left_out() -> None:
    """An H100 of 80 GB reports 81,559 MiB, less than 80 GiB, and must fit."""
    memory, shared = expressions("nvidia", memory="80Gi")
    assert memory == {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["79461"]}
    assert shared == {
        "key": "nvidia.com/gpu.sharing-strategy",
        "operator": "NotIn",
        "values": ["time-slicing", "mps"],
    }


def test_text_memory_label_is_one_of_the_values_that_are_large_enough() -> None:
    (memory,) = expressions("amd", memory="190Gi")
    assert memory == {"key": "amd.com/gpu.vram", "operator": "In", "values": ["192G", "256G", "288G"]}


def test_products_are_required_and_preferred() -> None:
    node_affinity = affinity(VENDORS["nvidia"], products=["B", "A"], preferredProducts=["A", "B"])
    assert node_affinity[REQUIRED]["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] == ["A", "B"]
    preferred = node_affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["weight"] for term in preferred] == [100, 50]
    assert preferred[0]["preference"]["matchExpressions"][0]["values"] == ["A"]


@pytest.mark.parametrize(
    ("vendor", "spec", "says"),
    [
        ("nvidia", {"hardware": {"count": 2}, "resources": {"gpu": 1}}, "hardware.count is 2 and resources.gpu is 1"),
        ("cpu", {"hardware": {"count": 2}}, "hardware.count is 2, but accelerator cpu has no devices: remove it"),
        ("cpu", {"hardware": {"memory": "8Gi"}}, "hardware.memory is 8Gi, but accelerator cpu has no devices"),
        ("cpu", {"hardware": {"products": ["A"]}}, "hardware.products is A, but"),
        (
            "nvidia",
            {"hardware": {"resource": "amd.com/gpu"}},
            "hardware.resource amd.com/gpu is none of accelerator nvidia: use nvidia.com/gpu or nvidia.com/gpu.shared",
        ),
        ("intel-gaudi", {"hardware": {"products": ["A"]}}, "no label with the product: use nodeSelector"),
        ("intel-gaudi", {"hardware": {"memory": "96Gi"}}, "no label with the memory of a device: use nodeSelector"),
        (
            "amd",
            {"hardware": {"memory": "1Ti"}},
            "hardware.memory 1Ti is more than any amd device has: use at",
        ),
    ],
)
def test_contradiction_is_refused_with_the_way_out(vendor: str, spec: dict[str, Any], says: str) -> None:
    problem = find_hardware_problem(as_service(service(**spec)), vendor, VENDORS[vendor])
    assert problem is not None
    assert says in problem
