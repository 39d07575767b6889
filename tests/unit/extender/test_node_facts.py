"""Facts of a node: its agent's, else those of the vendors' labels; annotations are numbers, or unknown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from devices.vendors import VENDORS
from extender.node_facts import ScoringFacts, read_node
from fitness.stated_hardware import DeviceHardware
from tests.unit.extender.extender_objects import (
    GIB,
    H100,
    H100_LABELS,
    L4,
    L4_LABELS,
    MI300_LABELS,
    SHARED,
    facts,
    fitness,
)


@pytest.mark.parametrize(
    ("labels", "vendor", "single_class", "memory_mib"),
    [
        (L4_LABELS, "nvidia", L4, 23034),
        (H100_LABELS, "nvidia", H100, 81559),
        (MI300_LABELS, "amd", "amd-instinct-mi300x-oamx1", 192 * 1024),
        (
            {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "nvidia.com/gpu.memory": "4864"},
            *("nvidia", "nvidia-a100-sxm4-40gb-1g.5gbx1", 4864),
        ),
        (L4_LABELS | SHARED | {"nvidia.com/gpu.product": "NVIDIA-L4-SHARED"}, "nvidia", L4, 23034),
    ],
)
def test_labels_of_a_labeller_say_class_and_memory(
    labels: dict[str, str], vendor: str, single_class: str, memory_mib: int
) -> None:
    hardware = facts(labels).hardware
    assert (hardware.vendor, hardware.vendors, hardware.single_class) == (vendor, frozenset({vendor}), single_class)
    assert hardware.memory_bytes == (memory_mib << 20,)
    assert hardware.is_shared == ("SHARED" in labels.get("nvidia.com/gpu.product", ""))


def test_node_without_labels_is_unknown() -> None:
    assert facts({"a": "b"}) == ScoringFacts()
    assert DeviceHardware().name_class(1) == ""


def test_class_of_labels_comes_before_that_of_the_agent() -> None:
    hardware = facts(L4_LABELS, device_class=H100).hardware
    assert (hardware.single_class, hardware.vendors, hardware.lists_devices) == (L4, frozenset({"nvidia"}), False)
    alone = facts({}, device_class=H100).hardware
    assert (alone.single_class, alone.lists_devices) == (H100, True)
    assert alone.memory_bytes == (23034 << 20,) * 2


@pytest.mark.parametrize(
    ("count", "partition", "name"),
    [
        (1, "", "nvidia-l4x1"),
        (4, "", "nvidia-l4x4"),
        (1, "1g.10gb", "nvidia-l4-1g.10gbx1"),
        (0, "", "cpu-amd-epyc-7763-64-corex8"),
    ],
)
def test_class_of_a_replica_counts_its_devices(count: int, partition: str, name: str) -> None:
    assert facts({}, device_class=L4).hardware.name_class(count, partition) == name


def test_estimate_is_given_memory_and_bandwidth_of_whole_devices_only() -> None:
    hardware = facts(L4_LABELS).hardware
    whole = hardware.describe_replica(2)
    assert (whole.device_class, whole.device_count, whole.memory_bytes) == ("nvidia-l4x2", 2, 23034 << 20)
    assert whole.bandwidth_bytes_per_second == 300_000_000_000
    part = hardware.describe_replica(1, "1g.10gb")
    assert (part.memory_bytes, part.bandwidth_bytes_per_second) == (None, None)
    processor = facts({}, device_class=L4).hardware.describe_replica(0)
    assert (processor.vendor, processor.cores, processor.memory_bytes) == ("cpu", 8, 64 * GIB)


@pytest.mark.parametrize(
    "value", ["", "nan", "inf", "-1", "1e3", "0x1", " 1", "1 ", "٣", "1,5", "9" * 13, "0." + "1" * 13, "a" * 10_000]
)
@pytest.mark.parametrize("name", ["gpu.util", "cost"])
def test_annotation_that_is_no_number_is_named_and_unknown(name: str, value: str) -> None:
    reading = read_node({}, {f"inference.pomona.dev/{name}": value}, None, VENDORS)
    assert reading.facts == ScoringFacts()
    assert reading.ignored == ((f"inference.pomona.dev/{name}", value[:64]),)


def test_utilization_above_1_is_ignored_and_a_cost_is_not() -> None:
    reading = read_node({}, {"flexinfer.ai/gpu.util": "1.5", "flexinfer.ai/cost": "1.5"}, None, VENDORS, "flexinfer.ai")
    assert (reading.facts.utilization, reading.facts.cost) == (None, 1.5)
    assert reading.ignored == (("flexinfer.ai/gpu.util", "1.5"),)
    assert read_node({}, {"flexinfer.ai/cost": "2"}, None, VENDORS).facts.cost is None


def test_utilization_is_that_of_the_annotation_else_of_the_devices() -> None:
    stated = {"inference.pomona.dev/gpu.util": "0.91"}
    assert facts({}, stated, utilization_percent=20).utilization == 0.9
    assert facts({}, utilization_percent=20).utilization == 0.2
    assert facts({}, free_bytes=1).utilization is None


def test_free_memory_counts_only_where_pods_share_devices() -> None:
    assert facts(L4_LABELS | SHARED, free_bytes=5 * GIB + 1).free_gib == (5, 5)
    assert facts(L4_LABELS, free_bytes=5 * GIB).free_gib == ()


def test_class_of_several_devices_is_not_taken_for_that_of_one() -> None:
    """An agent that reports `x8` has not the name of a single device, so that x81 would follow for one."""
    assert facts({}, device_class="nvidia-l4x8").hardware.name_class(1) == ""


def test_node_without_devices_is_known_by_its_processor() -> None:
    reported = structs.replace(fitness(), vendor="cpu", device_class="cpu-amd-epyc-7763x8", devices=[])
    hardware = read_node({}, {}, reported, VENDORS).facts.hardware
    assert (hardware.vendor, hardware.vendors, hardware.memory_bytes) == ("cpu", frozenset(), ())
    assert hardware.name_class(1) == ""


@given(st.dictionaries(st.sampled_from([*L4_LABELS, *MI300_LABELS, *SHARED]), st.text(max_size=63)))
def test_no_label_breaks_the_facts(labels: dict[str, str]) -> None:
    read_node(labels, {}, None, VENDORS).facts.hardware.describe_replica(1)


def test_nodes_of_a_kind_have_equal_facts_though_each_measures_a_little_different_processor() -> None:
    read = fitness()
    measured = (
        structs.replace(read, memory_bytes=64 * GIB - kib * 1024, memory_bandwidth_bytes_per_second=bandwidth)
        for kib, bandwidth in ((1, 200_300_000_001), (4, 201_777_000_000), (900, 203_999_999_999))
    )
    assert len({read_node({}, {}, status, VENDORS).facts for status in measured}) == 1
