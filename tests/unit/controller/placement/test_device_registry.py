"""The devices of ResourceSlices are counted on cells; none is given away twice."""

import itertools
from typing import Any

import msgspec
import pytest

from controller.placement.actions import EvictUnit
from controller.placement.cell_registry import CellRegistry
from controller.placement.device_need import AttributeDemand, DeviceNeed, any_device, encode_need
from controller.placement.forecast import forecast
from controller.placement.observed_units import encode_nomination, parse_nomination
from controller.placement.planner import PlanRules, plan
from controller.placement.pod_units import build_pod_replica
from controller.placement.pool_limits import sum_of_cell
from controller.placement.queued_service import OwnDeployment, QueuedService
from controller.placement.units import CLAIM_SLOT, Cell, Nomination, Unit
from crds.meta import DEVICE_NEED, ENQUEUED_AT, LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, NOMINATED, QUEUE_GATE
from devices.vendors import VENDORS
from kube.client import Obj
from kube.kinds import Device
from kube.resources import NODES, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES, ObjectKey
from kube.store import Store
from tests.support.api_objects import store
from tests.support.device_slices import DRIVER, H100, L4, claim, device_slice, gpu
from tests.unit.controller.placement.test_cell_registry import node, pin

OURS = {LABEL_MANAGED_BY: MANAGED_BY}
ANY = DeviceNeed(driver=DRIVER, device_class=DRIVER)
LARGE = DeviceNeed(driver=DRIVER, device_class=DRIVER, memory_mib=70000)
SMALL = DeviceNeed(
    driver=DRIVER,
    device_class=DRIVER,
    demands=(AttributeDemand(name="productName", type="string", values=(L4[0],)),),
)
VERSIONS = itertools.count(1)
PLAIN = {"allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110"}}
"""A node without device plugin."""


def pod(name: str, need: DeviceNeed, on: str = "", *, priority: str = "normal", **fields: Any) -> Obj:
    gates = {} if on else {"schedulingGates": [{"name": QUEUE_GATE}]}
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-{name}",
        "resourceVersion": str(next(VERSIONS)),
        "labels": OURS | {LABEL_SERVICE: f"{priority}-{name}", "pod-template-hash": "h"},
        "annotations": {DEVICE_NEED: encode_need(need)} | ({ENQUEUED_AT: "2026-01-01T00:00:00Z"} if on else {}),
        "ownerReferences": [{"kind": "ReplicaSet", "name": f"{name}-h", "uid": "r", "controller": True}],
    }
    return {
        "metadata": metadata | fields,
        "spec": {"containers": [{}], **gates, **(pin(on) if on else {})},
        "status": {"phase": "Pending"},
    }


def registry(*slices: Obj) -> tuple[Store, CellRegistry]:
    cluster = store((NODES, node("n", status=PLAIN)), *((RESOURCE_SLICES, resource_slice) for resource_slice in slices))
    return cluster, CellRegistry(cluster, VENDORS, lambda _host: True)


def find(cells: CellRegistry) -> Cell:
    cell = cells.find_cell("node/n")
    assert cell is not None
    return cell


def free(cells: CellRegistry, *needs: DeviceNeed) -> list[int]:
    return [find(cells).free[need.name] for need in needs]


def unit_of(known: Store, cells: CellRegistry, name: str) -> Unit:
    obj = known.get(PODS, name, "team")
    assert obj is not None
    labels = obj["metadata"]["labels"]
    service = QueuedService(
        key=ObjectKey("team", labels[LABEL_SERVICE]),
        uid=labels[LABEL_SERVICE],
        created_at=0.0,
        priority=labels[LABEL_SERVICE].partition("-")[0],
        is_queued=True,
        is_protected=False,
        accelerator="nvidia",
        replicas=1,
        deployments=(OwnDeployment(name, ""),),
        pools=("nvidia",),
    )
    replica = build_pod_replica(obj, service, VENDORS, parse_nomination(obj))
    assert replica is not None
    return cells.devices.add_freed(replica.replica.unit)


def decide(known: Store, cells: CellRegistry, *names: str) -> list[tuple[str, str]]:
    """Return what one round does, each with the pod."""
    made = plan(cells.list_cells(), [unit_of(known, cells, name) for name in names], PlanRules(0.0), 1e9)
    concerned = [action.victim if isinstance(action, EvictUnit) else action.unit for action in made.actions]
    return [
        (type(evict_unit).__name__, unit.key.name) for evict_unit, unit in zip(made.actions, concerned, strict=True)
    ]


def test_node_without_device_plugin_is_a_cell_while_devices_can_be_claimed() -> None:
    store, cells = registry()
    assert cells.list_cells() == ()
    store.put(RESOURCE_SLICES, device_slice("n", gpu("a"), gpu("b", L4)))
    assert find(cells).pool == "nvidia"
    assert [sum_of_cell(cell, cell.total) for cell in cells.list_cells()] == [2]
    store.remove(RESOURCE_SLICES, "", "n-gpus")
    assert cells.list_cells() == ()


def test_need_is_counted_as_soon_as_a_pod_has_it() -> None:
    store, cells = registry(device_slice("n", gpu("a"), gpu("b"), gpu("c", L4)))
    store.put(PODS, pod("one", LARGE))
    store.put(PODS, pod("two", SMALL))
    assert (find(cells).total[LARGE.name], find(cells).total[SMALL.name]) == (2, 1)
    store.remove(PODS, "team", "two")
    assert SMALL.name not in find(cells).total


def test_another_need_is_compared_with_each_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [device_slice(name, gpu("a"), gpu("b"), gpu("c", L4)) for name in ("n", "m")]
    cluster = store(*((NODES, node(name, status=PLAIN)) for name in ("n", "m")))
    cells = CellRegistry(cluster, VENDORS, lambda _host: True)
    for resource_slice in slices:
        cluster.put(RESOURCE_SLICES, resource_slice)
    earlier = [msgspec.structs.replace(LARGE, memory_mib=number) for number in range(1, 6)]
    for number, need in enumerate(earlier):
        cluster.put(PODS, pod(f"earlier-{number}", need))
    cells.list_cells()
    compared: list[str] = []
    matches = DeviceNeed.matches

    def count(need: DeviceNeed, device: Device) -> bool:
        compared.append(need.name)
        return matches(need, device)

    monkeypatch.setattr(DeviceNeed, "matches", count)
    cluster.put(PODS, pod("one", SMALL))
    assert [cell.total[SMALL.name] for cell in cells.list_cells()] == [1, 1]
    assert compared == [SMALL.name] * 6
    cluster.remove(PODS, "team", "one")
    cluster.remove(PODS, "team", "earlier-0")
    totals = [cell.total for cell in cells.list_cells()]
    assert [(SMALL.name in total, earlier[0].name in total, total[earlier[1].name]) for total in totals] == (
        [(False, False, 3)] * 2
    )
    assert len(compared) == 6


def test_end_of_a_need_for_any_device_leaves_whole_devices_counted() -> None:
    store, cells = registry(device_slice("n", gpu("a"), gpu("b")))
    driver = VENDORS["nvidia"].driver
    assert driver is not None
    store.put(PODS, pod("one", any_device(driver)))
    assert find(cells).total[any_device(driver).name] == 2
    store.remove(PODS, "team", "one")
    assert [sum_of_cell(cell, cell.total) for cell in cells.list_cells()] == [2]
    store.put(PODS, pod("of-nobody", msgspec.structs.replace(ANY, driver="gpu.nobody.example")))
    store.remove(PODS, "team", "of-nobody")
    assert [sum_of_cell(cell, cell.total) for cell in cells.list_cells()] == [2]


def test_claims_of_others_take_devices_and_a_look_with_admin_access_takes_none() -> None:
    store, cells = registry(device_slice("n", gpu("a"), gpu("b")))
    store.put(PODS, pod("one", LARGE))
    store.put(RESOURCE_CLAIMS, claim("theirs", "n", "a"))
    assert free(cells, LARGE) == [1]
    look = claim("monitor", "n", "b")
    look["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True
    store.put(RESOURCE_CLAIMS, look)
    assert free(cells, LARGE) == [1]
    store.put(RESOURCE_CLAIMS, claim("theirs", "n", version=2))
    assert free(cells, LARGE) == [2]
    assert [sum_of_cell(cell, cell.total) for cell in cells.list_cells()] == [2]


def test_admitted_pod_takes_devices_before_and_after_its_allocation_until_it_is_gone() -> None:
    store, cells = registry(device_slice("n", gpu("a"), gpu("b", L4)))
    store.put(PODS, pod("waits", LARGE))
    store.put(PODS, pod("runs", LARGE, "n"))
    assert free(cells, LARGE) == [0]
    assert sum_of_cell(find(cells), find(cells).free) == 1, "its pool counts it as used"
    store.put(RESOURCE_CLAIMS, claim("runs-x", "n", "a", pod="uid-runs", labels=OURS))
    assert free(cells, LARGE) == [0]
    store.put(
        PODS,
        pod("runs", LARGE, "n", deletionTimestamp="2026-11-21T12:00:00Z")
        | {"spec": {"nodeName": "n", "containers": [{}]}},
    )
    assert free(cells, LARGE) == [0]
    store.remove(PODS, "team", "runs")
    # Kubernetes gives the device back a moment later, and nobody else may be evicted for that moment.
    assert free(cells, LARGE) == [1]


def test_needs_that_share_devices_are_admitted_one_after_the_other() -> None:
    """A pod that takes any device may get the only large one: until it is known, nobody is promised that."""
    store, cells = registry(device_slice("n", gpu("a"), gpu("b", L4)))
    store.put(PODS, pod("one", ANY))
    store.put(PODS, pod("two", LARGE))
    assert decide(store, cells, "one", "two") == [("Admit", "one")]
    store.put(PODS, pod("one", ANY, "n"))
    assert find(cells).free[CLAIM_SLOT] == 0
    assert decide(store, cells, "one", "two") == []
    store.put(RESOURCE_CLAIMS, claim("one-x", "n", "b", pod="uid-one", labels=OURS))
    assert decide(store, cells, "one", "two") == [("Admit", "two")]
    store.put(RESOURCE_CLAIMS, claim("one-x", "n", "a", pod="uid-one", labels=OURS, version=2))
    assert decide(store, cells, "one", "two") == []


def test_pod_that_only_says_that_it_claims_devices_takes_none() -> None:
    """Tenants make pods with the labels and annotations of ours, and bind them: only the queue notes a place."""
    store, cells = registry(device_slice("n", gpu("a"), gpu("b", L4)))
    store.put(PODS, pod("one", ANY))
    store.put(PODS, pod("two", LARGE))
    forged = pod("forged", msgspec.structs.replace(ANY, number=8), "n")
    del forged["metadata"]["annotations"][ENQUEUED_AT]
    forged["spec"]["nodeName"] = "n"
    store.put(PODS, forged)
    assert (find(cells).free[CLAIM_SLOT], *free(cells, ANY, LARGE)) == (1, 2, 1)


def test_needs_that_share_no_device_are_admitted_at_once() -> None:
    store, cells = registry(device_slice("n", gpu("a"), gpu("b"), gpu("c", L4)))
    for name, need in (("one", LARGE), ("two", LARGE), ("three", SMALL)):
        store.put(PODS, pod(name, need))
    admitted = decide(store, cells, "one", "two", "three")
    assert sorted(admitted) == [("Admit", "one"), ("Admit", "three"), ("Admit", "two")]


def test_nothing_is_evicted_for_a_moment_in_which_devices_are_being_chosen() -> None:
    store, cells = registry(device_slice("n", gpu("a"), gpu("b", L4), gpu("c")))
    store.put(PODS, pod("one", ANY, "n", priority="low"))
    store.put(PODS, pod("two", LARGE, priority="high"))
    store.put(PODS, pod("three", LARGE, "n", priority="low"))
    store.put(RESOURCE_CLAIMS, claim("three-x", "n", "c", pod="uid-three", labels=OURS))
    assert decide(store, cells, "one", "two", "three") == []
    store.put(RESOURCE_CLAIMS, claim("one-x", "n", "b", pod="uid-one", labels=OURS))
    assert decide(store, cells, "one", "two", "three") == [("Admit", "two")]


def test_only_a_pod_whose_device_would_do_is_evicted() -> None:
    store, cells = registry(device_slice("n", gpu("a"), gpu("b", L4)))
    for name, device in (("one", "a"), ("two", "b")):
        store.put(PODS, pod(name, ANY, "n", priority="low"))
        store.put(RESOURCE_CLAIMS, claim(f"{name}-x", "n", device, pod=f"uid-{name}", labels=OURS))
    store.put(PODS, pod("wants", LARGE, priority="high"))
    assert decide(store, cells, "one", "two", "wants") == [("Nominate", "wants"), ("EvictUnit", "one")]


def end(known: Store, name: str, need: DeviceNeed) -> None:
    """Begin to end a pod with a device."""
    ending = pod(name, need, "n", priority="low", deletionTimestamp="2026-11-21T12:00:00Z")
    known.put(PODS, ending | {"spec": {"nodeName": "n", "containers": [{}]}})


def test_device_that_becomes_free_is_promised_once() -> None:
    store, cells = registry(device_slice("n", gpu("a")))
    store.put(RESOURCE_CLAIMS, claim("ends-x", "n", "a", pod="uid-ends", labels=OURS))
    end(store, "ends", ANY)
    store.put(PODS, pod("one", ANY, priority="high"))
    store.put(PODS, pod("two", LARGE, priority="high"))
    assert decide(store, cells, "ends", "one", "two") == [("Nominate", "one")]


def test_promise_holds_while_devices_of_another_pod_are_being_chosen() -> None:
    store, cells = registry(device_slice("n", gpu("a"), gpu("b", L4)))
    store.put(RESOURCE_CLAIMS, claim("ends-x", "n", "a", pod="uid-ends", labels=OURS))
    end(store, "ends", ANY)
    nominated = encode_nomination(Nomination(("node/n",), frozenset({"uid-ends"})))
    annotations = {DEVICE_NEED: encode_need(LARGE), NOMINATED: nominated}
    store.put(PODS, pod("wants", LARGE, annotations=annotations))
    store.put(PODS, pod("other", ANY, "n", priority="high"))
    assert find(cells).free[CLAIM_SLOT] == 0
    assert decide(store, cells, "ends", "wants", "other") == []


def test_forecast_does_not_wait_for_the_choice_of_devices() -> None:
    store, cells = registry(device_slice("n", gpu("a"), gpu("b")))
    for name, need in (("one", ANY), ("two", LARGE), ("zero", ANY)):
        store.put(PODS, pod(name, need))
    units = [unit_of(store, cells, pod_name) for pod_name in ("one", "two", "zero")]
    queue_forecast = forecast(cells.list_cells(), units, PlanRules(), 0.0)
    assert {fate.unit.key.name: fate.state for fate in queue_forecast.fates.values()} == {
        "one": "starts",
        "two": "starts",
        "zero": "waits",
    }


def test_pool_that_is_being_rewritten_has_nothing() -> None:
    store, cells = registry(device_slice("n", gpu("a"), count=2), device_slice("n", gpu("b"), name="second", count=2))
    store.put(PODS, pod("one", LARGE))
    assert find(cells).total[LARGE.name] == 2
    store.put(RESOURCE_SLICES, device_slice("n", gpu("a"), generation=2, count=2))
    assert cells.list_cells() == ()
    store.put(RESOURCE_SLICES, device_slice("n", gpu("b"), name="second", generation=2, count=2))
    assert find(cells).total[LARGE.name] == 2


def test_sick_device_and_one_of_which_a_part_is_allocated_are_not_free() -> None:
    parts: Obj = {"consumesCounters": [{"counterSet": "chip-0", "counters": {}}]}
    partition = gpu("m", H100, **parts) | {"attributes": {"type": {"string": "mig"}}}
    sick = gpu("s", taints=[{"key": "sick", "effect": "NoSchedule"}])
    store, cells = registry(device_slice("n", gpu("a", **parts), partition, sick, gpu("b")))
    whole = DeviceNeed(
        driver=DRIVER,
        device_class=DRIVER,
        demands=(AttributeDemand(name="type", type="string", values=("gpu",)),),
    )
    store.put(PODS, pod("one", whole))
    assert free(cells, whole) == [2]
    store.put(RESOURCE_CLAIMS, claim("theirs", "n", "m"))
    assert free(cells, whole) == [1]
