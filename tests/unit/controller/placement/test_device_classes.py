"""Device classes are those of the nodes and hosts that exist, each described by the weakest of its devices."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from controller.placement.cell_costs import CellCosts, read_cost
from controller.placement.cell_registry import CellRegistry
from controller.placement.device_classes import DeviceClasses
from controller.placement.units import Cell
from crds.meta import COST
from devices.vendors import VENDORS
from fitness.serving_devices import ServingDevices
from kube.client import Obj
from kube.resources import METAL_HOSTS, NODE_FITNESSES, NODES
from tests.support.api_objects import GIB, condition, host, store

L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"}
READY = condition("Ready", "True", "KubeletReady", "posting")
SHARED = {"nvidia.com/gpu.sharing-strategy": "time-slicing", "nvidia.com/gpu.replicas": "4"}


def node(name: str, labels: Obj, version: int = 1, cost: str = "") -> Obj:
    metadata: Obj = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version), "labels": labels}
    metadata |= {"annotations": {COST: cost}} if cost else {}
    allocatable = {"nvidia.com/gpu": "8", "cpu": "64", "memory": "512Gi", "pods": "110"}
    return {"metadata": metadata, "spec": {}, "status": {"allocatable": allocatable, "conditions": [READY]}}


def fitness(name: str, beat: str, version: int, **status: Any) -> Obj:
    report = {"vendor": "nvidia", "deviceClass": "nvidia-l4x1", "observedAt": beat, **status}
    return {"metadata": {"name": name, "uid": f"f-{name}", "resourceVersion": str(version)}, "status": report}


def device(percent: int | None = None, memory_bytes: int = 24 * GIB) -> Obj:
    return {"id": "GPU-1", "product": "NVIDIA L4", "memoryBytes": memory_bytes} | (
        {"utilizationPercent": percent} if percent is not None else {}
    )


def class_of(name: str, memory_bytes: int) -> ServingDevices:
    return ServingDevices("nvidia", name, memory_bytes=memory_bytes)


def test_class_is_described_by_its_weakest_devices_until_they_go() -> None:
    classes, told = DeviceClasses(), list[str]()
    classes.subscribe(told.append)
    classes.put("node/a", "nvidia", class_of("l4", 24))
    classes.put("node/b", "nvidia", class_of("l4", 23))
    assert classes.list_classes("nvidia") == (class_of("l4", 23),)
    before = classes.list_classes("nvidia")
    classes.put("node/c", "nvidia", class_of("l4", 24))
    classes.put("node/b", "nvidia", class_of("l4", 23))
    assert classes.list_classes("nvidia") is before
    assert told == ["nvidia", "nvidia"]
    classes.remove("node/b")
    assert classes.list_classes("nvidia") == (class_of("l4", 24),)
    classes.put("node/a", "amd", class_of("mi300x", 192))
    assert [classes.list_classes(vendor) for vendor in ("nvidia", "amd")] == [
        (class_of("l4", 24),),
        (class_of("mi300x", 192),),
    ]


_CHANGE = st.tuples(
    st.sampled_from("abcd"),
    st.sampled_from(["nvidia", "amd"]),
    st.none() | st.builds(class_of, st.sampled_from(["x", "y", ""]), st.integers(1, 3)),
)


@given(st.lists(_CHANGE, max_size=30))
def test_classes_are_those_of_the_cells_that_are_there(changes: list[tuple[str, str, ServingDevices | None]]) -> None:
    classes, cells = DeviceClasses(), dict[str, tuple[str, ServingDevices]]()
    for cell, accelerator, devices in changes:
        classes.put(cell, accelerator, devices)
        cells.pop(cell, None)
        if devices is not None and devices.device_class:
            cells[cell] = accelerator, devices
    for accelerator in ("nvidia", "amd"):
        there = [device for name, device in cells.values() if name == accelerator]
        weakest = {each.device_class: each for each in sorted(there, key=lambda device: -(device.memory_bytes or 0))}
        assert dict.fromkeys(classes.list_classes(accelerator)) == dict.fromkeys(
            weakest[name] for name in sorted(weakest)
        )


def find(registry: CellRegistry, cell_id: str) -> Cell:
    cell = registry.find_cell(cell_id)
    assert cell is not None
    return cell


def test_cell_has_the_class_of_its_labels_its_agent_or_its_chip() -> None:
    cluster = store(
        (NODES, node("labelled", L4)),
        (NODES, node("reported", {})),
        (NODE_FITNESSES, fitness("reported", "t0", 1, devices=[device()])),
        (NODES, node("unknown", {})),
        (METAL_HOSTS, host("mac", chip="Apple M4 Max", gpuCores=40, memoryBytes=128 * GIB, budgetBytes=96 * GIB)),
        (METAL_HOSTS, host("other")),
    )
    registry = CellRegistry(cluster, VENDORS, lambda _host: True)
    classes = {cell.id: cell.device_class for cell in registry.list_cells()}
    assert classes == {
        "node/labelled": "nvidia-l4x1",
        "node/reported": "nvidia-l4x1",
        "node/unknown": "",
        "host/mac": "apple-m4-max-40c-128gb",
        "host/other": "",
    }
    (l4,) = registry.classes.list_classes("nvidia")
    assert (l4.memory_bytes, l4.bandwidth_bytes_per_second) == (23034 * 2**20, 300 * 10**9)
    (mac,) = registry.classes.list_classes("metal")
    assert (mac.memory_bytes, mac.bandwidth_bytes_per_second) == (96 * GIB, 546 * 10**9)
    cluster.remove(METAL_HOSTS, None, "mac")
    assert registry.find_cell("host/mac") is None
    assert registry.classes.list_classes("metal") == ()


def test_heartbeat_of_a_node_agent_changes_no_cell_and_wakes_nobody() -> None:
    cluster = store((NODES, node("n", {})), (NODE_FITNESSES, fitness("n", "t0", 1, devices=[device()])))
    registry, calls = CellRegistry(cluster, VENDORS, lambda _host: True), list[int]()
    before = registry.revision
    registry.subscribe(lambda: calls.append(1))
    cluster.put(NODE_FITNESSES, fitness("n", "t1", 2, devices=[device()], availableBytes=5 * GIB))
    assert (registry.revision, calls) == (before, [])
    cluster.put(NODE_FITNESSES, fitness("n", "t2", 3, devices=[device(memory_bytes=16 * GIB)]))
    assert calls == [1]
    assert registry.find_cell("node/n") is not None
    assert registry.classes.list_classes("nvidia")[0].memory_bytes == 16 * GIB


def test_utilization_counts_on_shared_devices_while_its_heartbeat_is_fresh() -> None:
    silent = set[str]()
    cluster = store(
        (NODES, node("shared", {**L4, **SHARED})),
        (NODE_FITNESSES, fitness("shared", "t0", 1, devices=[device(80), device(40)])),
        (NODES, node("own", L4)),
        (NODE_FITNESSES, fitness("own", "t0", 1, devices=[device(80)])),
    )
    registry = CellRegistry(cluster, VENDORS, lambda _host: True, is_stale=silent.__contains__)
    assert find(registry, "node/shared").utilization_percent == 60
    assert find(registry, "node/own").utilization_percent is None, "nobody else gets a device of its own"
    silent.add("shared")
    assert find(registry, "node/shared").utilization_percent is None
    silent.clear()
    cluster.put(NODE_FITNESSES, fitness("shared", "t1", 2, devices=[device(20), device(20)]))
    assert find(registry, "node/shared").utilization_percent == 20


def test_silent_node_agent_is_noticed_once_and_wakes_nobody_for_ever() -> None:
    silent, calls = set[str](), list[int]()
    cluster = store(
        (NODES, node("shared", {**L4, **SHARED})),
        (NODE_FITNESSES, fitness("shared", "t0", 1, devices=[device(80)])),
    )
    registry = CellRegistry(cluster, VENDORS, lambda _host: True, is_stale=silent.__contains__)
    assert find(registry, "node/shared").utilization_percent == 80
    registry.subscribe(lambda: calls.append(1))
    silent.add("shared")
    for _ in range(5):
        assert find(registry, "node/shared").utilization_percent is None
    assert calls == [1]


def test_cost_is_that_of_the_most_expensive_cell_in_thousandths() -> None:
    cluster = store((NODES, node("a", L4, cost="2.5")), (NODES, node("b", L4)), (METAL_HOSTS, host("m")))
    registry = CellRegistry(cluster, VENDORS, lambda _host: True)
    assert {cell.name: cell.cost_permille for cell in registry.list_cells()} == {"a": 1000, "b": None, "m": None}
    cluster.put(NODES, node("b", L4, 2, cost="10"))
    assert {cell.name: cell.cost_permille for cell in registry.list_cells()} == {"a": 250, "b": 1000, "m": None}
    cluster.remove(NODES, None, "b")
    assert {cell.name: cell.cost_permille for cell in registry.list_cells()} == {"a": 1000, "m": None}


def test_cost_that_is_no_number_counts_as_unknown() -> None:
    assert [read_cost({COST: text}) for text in ("", "free", "-1", "1e9", "1" * 40, "3", "0.25")] == [
        *[None] * 5,
        3.0,
        0.25,
    ]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.sampled_from([0.0, 1.0, 2.0, 4.0])), max_size=20))
def test_ratios_are_told_to_change_when_they_do(changes: list[tuple[str, float | None]]) -> None:
    costs, latest = CellCosts(), dict[str, float | None]()
    for cell, cost in changes:
        before = {other: costs.find_permille(other) for other in latest if other != cell}
        is_told = costs.put(cell, cost)
        latest[cell] = cost
        if not is_told:
            assert {other: costs.find_permille(other) for other in latest if other != cell} == before
    highest = max((amount for amount in latest.values() if amount is not None), default=0.0)
    for cell, cost in latest.items():
        expected = round(1000 * cost / highest) if cost is not None and highest else None
        assert costs.find_permille(cell) == expected


def test_registry_of_a_fleet_lists_few_classes() -> None:
    cluster = store(*((NODES, node(f"n{number}", L4)) for number in range(200)))
    registry = CellRegistry(cluster, VENDORS, lambda _host: True)
    assert {msgspec.structs.asdict(cell)["device_class"] for cell in registry.list_cells()} == {"nvidia-l4x1"}
    assert len(registry.classes.list_classes("nvidia")) == 1


def test_classes_are_known_before_anybody_has_asked_for_cells() -> None:
    """A new leader wrote each status without speeds, and a moment later with them."""
    registry = CellRegistry(store((NODES, node("n", L4))), VENDORS, lambda _host: True)
    assert [devices.device_class for devices in registry.list_classes("nvidia")] == ["nvidia-l4x1"]
    assert registry.list_classes("nvidia") is registry.list_classes("nvidia")


def test_node_that_does_not_say_what_it_has_is_known_as_such() -> None:
    cluster = store((NODES, node("a", L4)), (NODES, node("b", {})))
    registry = CellRegistry(cluster, VENDORS, lambda _host: True)
    assert [devices.device_class for devices in registry.list_classes("nvidia")] == ["nvidia-l4x1"]
    assert registry.has_unknown_devices("nvidia")
    cluster.put(NODES, node("b", L4, version=2))
    assert not registry.has_unknown_devices("nvidia")
    cluster.put(NODES, node("b", {}, version=3))
    cluster.remove(NODES, "", "b")
    assert not registry.has_unknown_devices("nvidia")
    assert not registry.has_unknown_devices("amd")
