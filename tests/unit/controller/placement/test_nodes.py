"""The devices, memory and CPU of nodes, by indexes of the few sizes that exist."""

from typing import Any

import pytest

from controller.placement.nodes import (
    declare_nodes,
    find_device_sizes,
    find_largest_memory,
    list_node_sizes,
)
from crds.size import MIB
from devices.vendor_file import parse_vendors
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import NODES
from kube.store import Store
from runtimes.registry import list_pod_engines

NPU = (
    "npu: {resource: example.com/npu, memoryLabel: example.com/npu.memory}\n"
    "intel-gaudi: {productLabel: example.com/gaudi}"
)


def node(name: str, labels: dict[str, str] | None = None, **allocatable: Any) -> Obj:
    stated = {key.replace("__", "/").replace("_", "."): str(value) for key, value in allocatable.items()}
    metadata = {
        "name": name,
        "uid": name,
        "resourceVersion": "1",
        "labels": {"kubernetes.io/arch": "a"} | (labels or {}),
    }
    return {"metadata": metadata, "spec": {"podCIDR": "a"}, "status": {"allocatable": stated, "images": [{}]}}


def nodes(*found: Obj) -> Store:
    store = Store()
    declare_nodes(store, parse_vendors(NPU, list_pod_engines()))
    for node in found:
        store.put(NODES, node)
    return store


GPU = {"nvidia.com/gpu.memory": "23034"}
LARGE = {"nvidia.com/gpu.memory": "81559"}


@pytest.mark.parametrize(
    ("accelerator", "found", "expected"),
    [
        ("nvidia", [], None),
        ("nvidia", [node("a", GPU, nvidia_com__gpu=1), node("b", LARGE, nvidia_com__gpu=8)], 81559 * MIB),
        ("nvidia", [node("a", LARGE, nvidia_com__gpu=0), node("b", GPU, nvidia_com__gpu=1)], 23034 * MIB),
        ("nvidia", [node("a", GPU, nvidia_com__gpu=1), node("b", nvidia_com__gpu=1)], None),
        ("nvidia", [node("a", {"nvidia.com/gpu.memory": "much"}, nvidia_com__gpu=1)], None),
        # All of its devices are partitioned, and the label tells the memory of a whole one.
        ("nvidia", [node("a", LARGE, nvidia_com__gpu=0, **{"nvidia_com__mig-1g.10gb": 7})], None),
        ("amd", [node("a", {"amd.com/gpu.vram": "192G"}, amd_com__gpu=1)], 192 * 1024 * MIB),
        ("npu", [node("a", {"example.com/npu.memory": "100"}, example_com__npu=1)], 100 * MIB),
        ("cpu", [node("a", cpu=4)], None),
        ("intel-gaudi", [node("a", {"example.com/gaudi": "Gaudi3"}, habana_ai__gaudi=8)], 128 * 1024 * MIB),
        ("intel-gaudi", [node("a", {"example.com/gaudi": "Gaudi9"}, habana_ai__gaudi=8)], None),
        ("intel-gaudi", [node("a", habana_ai__gaudi=8)], None),
        ("nvidia", [node("a", {"nvidia.com/gpu.product": "NVIDIA-L4"}, nvidia_com__gpu=1)], 23034 * MIB),
        (
            "nvidia",
            [node("a", {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}, nvidia_com__gpu=1)],
            None,
        ),
    ],
)
def test_largest_device_is_known_if_all_nodes_state_it(
    accelerator: str, found: list[Obj], expected: int | None
) -> None:
    assert find_device_sizes(nodes(*found), accelerator).largest_bytes == expected


def test_node_that_goes_counts_no_more() -> None:
    store = nodes(node("a", LARGE, nvidia_com__gpu=1), node("b", GPU, nvidia_com__gpu=1))
    store.remove(NODES, None, "a")
    assert find_device_sizes(store, "nvidia").largest_bytes == 23034 * MIB


def test_only_what_a_pod_selects_and_asks_for_is_kept_of_a_node() -> None:
    made = node("a", GPU, nvidia_com__gpu=1)
    made["metadata"]["annotations"] = {"a": "b"}
    made["spec"] = {"podCIDR": "10.0.0.0/24", "unschedulable": True}
    made["spec"]["taints"] = [{"key": "a", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}]
    (kept,) = nodes(made).list(NODES)
    assert kept["metadata"].keys() == {"name", "uid", "resourceVersion", "labels"}
    assert kept["metadata"]["labels"] == GPU | {"kubernetes.io/arch": "a"}
    assert kept["spec"] == {"unschedulable": True, "taints": [{"key": "a", "effect": "NoSchedule"}]}
    assert kept["status"] == {"allocatable": {"nvidia.com/gpu": "1"}, "conditions": []}


def test_sizes_are_those_of_nodes_with_the_devices_and_the_wanted_labels() -> None:
    store = nodes(
        node("a", GPU | {"zone": "x"}, nvidia_com__gpu=1, memory="7900Mi", cpu="7910m"),
        node("b", LARGE | {"zone": "y"}, nvidia_com__gpu=8, memory="64Gi", cpu=96),
        node("c", {"zone": "y"}, nvidia_com__gpu=8, memory="64Gi"),
        node("d", {"zone": "y"}, memory="32Gi", cpu=4),
    )

    def list_sizes(accelerator: str, zone: str | None = None) -> set[tuple[int | None, int, int]]:
        def admits(candidate: Obj) -> bool:
            return zone is None or candidate["metadata"]["labels"]["zone"] == zone

        sizes = list_node_sizes(store, accelerator, VENDORS[accelerator], admits)
        return {
            (size.device_bytes and size.device_bytes // MIB, size.memory_bytes >> 30, size.millicores) for size in sizes
        }

    # Each device has an equal part of the node.
    assert list_sizes("nvidia") == {(23034, 7, 7910), (81559, 8, 12_000), (None, 8, 0)}
    assert list_sizes("nvidia", "y") == {(81559, 8, 12_000), (None, 8, 0)}
    assert list_sizes("nvidia", "z") == list_sizes("amd") == set()
    assert list_sizes("cpu") == {(None, 7, 7910), (None, 64, 96_000), (None, 64, 0), (None, 32, 4000)}
    assert list_sizes("cpu", "x") == {(None, 7, 7910)}


def test_largest_memory_is_that_of_one_node() -> None:
    assert find_largest_memory(nodes()) is None
    assert find_largest_memory(nodes(node("a", memory="7900Mi"), node("b", memory="1e9"))) == 7 << 30
