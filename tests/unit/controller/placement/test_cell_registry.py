"""Cells have at any moment what a count of all pods, nodes and hosts would give them."""

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import pytest

from controller.placement.cell_registry import CellRegistry
from controller.placement.foreign_pods import ForeignPods
from controller.placement.node_rules import admits
from controller.placement.units import Cell
from crds.meta import ENQUEUED_AT, QUEUE_GATE
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import ACCELERATOR_POOLS, METAL_HOSTS, METAL_PROCESSES, NODES, PODS
from kube.store import Store
from tests.support.api_objects import GIB, condition, host, pool, process, store

DELETED = {"deletionTimestamp": "2026-11-21T12:00:00Z"}
READY = ({"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "posting"},)


def node(name: str, version: int = 1, **fields: Any) -> Obj:
    allocatable = {"nvidia.com/gpu": "8", "cpu": "64", "memory": "512Gi", "pods": "110"}
    status = {"allocatable": allocatable, "conditions": [*READY], **fields.pop("status", {})}
    labels = {"kubernetes.io/hostname": name, **fields.pop("labels", {})}
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata, "spec": fields, "status": status}


def pod(name: str, gpus: int = 1, *, version: int = 1, phase: str = "Pending", **spec: Any) -> Obj:
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": str(version)}
    metadata |= {"annotations": {ENQUEUED_AT: "2026-11-21T12:00:00Z"}} | spec.pop("metadata", {})
    requests = {"nvidia.com/gpu": str(gpus), "cpu": "500m"}
    return {
        "metadata": metadata,
        "spec": {"containers": [{"resources": {"requests": requests}}], **spec},
        "status": {"phase": phase},
    }


def pin(name: str) -> Obj:
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {"affinity": {"nodeAffinity": required}}


def as_sent(obj: Obj) -> msgspec.Raw:
    """Return an object as bytes of the API server."""
    return msgspec.Raw(msgspec.json.encode(obj))


class Registry(NamedTuple):
    """A registry, and what a test changes under it."""

    store: Store
    cells: CellRegistry
    lost: set[str]
    now: list[float]

    def find(self, cell_id: str) -> Cell:
        cell = self.cells.find_cell(cell_id)
        assert cell is not None
        return cell

    def free_gpus(self, name: str) -> int:
        return self.find(f"node/{name}").free["nvidia.com/gpu"]


def registry(*objects: tuple[Any, Obj], foreign: ForeignPods | None = None) -> Registry:
    stored, lost, now = store(*objects), set[str](), [0.0]
    cells = CellRegistry(stored, VENDORS, lambda name: name not in lost, foreign, lambda: now[0])
    return Registry(stored, cells, lost, now)


def test_node_has_what_pods_do_not_take() -> None:
    cluster = registry((NODES, node("a")), (PODS, pod("p", 3, nodeName="a", phase="Running")))
    cell = cluster.find("node/a")
    assert (cell.pool, cell.kind, cell.closed) == ("nvidia", "node", "")
    assert cell.total == {"nvidia.com/gpu": 8, "cpu": 64_000, "memory": 512 * GIB, "pods": 110}
    assert cell.free == {"nvidia.com/gpu": 5, "cpu": 63_500, "memory": 512 * GIB, "pods": 109}


def test_pinned_pod_takes_room_until_it_is_bound_elsewhere() -> None:
    cluster = registry((NODES, node("a")), (NODES, node("b")))
    cluster.store.put(PODS, pod("p", 2, schedulingGates=[{"name": QUEUE_GATE}]))
    assert (cluster.free_gpus("a"), cluster.free_gpus("b")) == (8, 8)
    cluster.store.put(PODS, pod("p", 2, version=2, **pin("a")))
    assert (cluster.free_gpus("a"), cluster.free_gpus("b")) == (6, 8)
    cluster.store.put(PODS, pod("p", 2, version=3, nodeName="b", **pin("a")))
    assert (cluster.free_gpus("a"), cluster.free_gpus("b")) == (8, 6)
    cluster.store.put(PODS, pod("p", 2, version=4, nodeName="b", metadata=DELETED))
    assert cluster.free_gpus("b") == 6
    cluster.store.put(PODS, pod("p", 2, version=5, nodeName="b", phase="Failed"))
    assert cluster.free_gpus("b") == 8


def test_relist_gives_back_what_vanished_pods_took() -> None:
    cluster = registry((NODES, node("a")), (PODS, pod("p", 2, nodeName="a")), (PODS, pod("q", 1, nodeName="a")))
    assert cluster.free_gpus("a") == 5
    cluster.store.replace(PODS, [pod("q", 1, nodeName="a")])
    assert cluster.free_gpus("a") == 7


def test_node_that_comes_after_its_pods_has_what_they_leave() -> None:
    foreign = ForeignPods()
    foreign.put(PODS, foreign.read(as_sent(pod("theirs", 3, nodeName="a"))))
    cluster = registry((PODS, pod("p", 2, nodeName="a")), foreign=foreign)
    assert cluster.cells.list_cells() == ()
    cluster.store.put(NODES, node("a"))
    assert cluster.free_gpus("a") == 3
    cluster.store.put(NODES, node("a", 2, status={"allocatable": {"nvidia.com/gpu": "4"}}))
    assert (cluster.free_gpus("a"), cluster.find("node/a").total) == (-1, {"nvidia.com/gpu": 4})
    cluster.store.remove(NODES, None, "a")
    assert cluster.cells.list_cells() == ()


def changes(found: Registry, change: Callable[[], object]) -> bool:
    before = found.cells.revision, found.cells.list_cells()
    change()
    after = found.cells.revision, found.cells.list_cells()
    assert (before[0] == after[0]) == (before[1] is after[1])
    return before[0] != after[0]


def test_heartbeat_changes_nothing() -> None:
    cluster = registry((NODES, node("a")), (PODS, pod("p", nodeName="a", phase="Running")))
    calls: list[int] = []
    cluster.cells.subscribe(lambda: calls.append(1))
    late = {"conditions": [{**READY[0], "lastHeartbeatTime": "2026-11-21T12:00:00Z", "message": "still posting"}]}
    assert not changes(cluster, lambda: cluster.store.put(NODES, node("a", 2, status=late)))
    probed = pod("p", version=2, nodeName="a", phase="Running")
    probed["status"]["conditions"] = [condition("Ready", "True")]
    assert not changes(cluster, lambda: cluster.store.put(PODS, probed))
    assert not changes(cluster, lambda: cluster.store.put(NODES, node("cpu", status={"allocatable": {"cpu": "4"}})))
    assert calls == []
    assert changes(cluster, lambda: cluster.store.put(NODES, node("a", 3, labels={"zone": "b"})))
    assert calls == [1]


def not_ready(status: str, message: str) -> Obj:
    ready = {"type": "Ready", "status": status, "reason": "KubeletNotReady", "message": message}
    return {"status": {"conditions": [{"type": "DiskPressure", "status": "False"}, ready]}}


def taint(key: str, effect: str = "NoSchedule") -> Obj:
    return {"taints": [{"key": key, "effect": effect}]}


@pytest.mark.parametrize(
    ("fields", "reason", "message"),
    [
        ({}, "", ""),
        (not_ready("False", "no network"), "NodeNotReady", "node a is not ready: no network"),
        (not_ready("Unknown", ""), "NodeNotReady", "node a is not ready: KubeletNotReady"),
        (
            {"status": {"conditions": []}},
            "NodeNotReady",
            "node a is not ready: its kubelet has reported nothing yet",
        ),
        ({"unschedulable": True}, "Cordoned", "node a is cordoned: kubectl uncordon a"),
        (taint("node.kubernetes.io/unschedulable"), "Cordoned", "node a is cordoned: kubectl uncordon a"),
        (
            taint("node.kubernetes.io/disk-pressure"),
            "NodeNotReady",
            "node a has the taint node.kubernetes.io/disk-pressure",
        ),
        (taint("node.kubernetes.io/disk-pressure", "PreferNoSchedule"), "", ""),
        (taint("example.com/reserved"), "", ""),
    ],
)
def test_node_is_closed_with_the_reason(fields: Obj, reason: str, message: str) -> None:
    cell = registry((NODES, node("a", **fields))).find("node/a")
    assert (cell.closed, cell.closed_message) == (reason, message)


def test_flapping_host_takes_nothing_new_and_has_the_labels_and_taints_of_its_object() -> None:
    flapping = host("a")
    flapping["metadata"]["labels"] = {"room": "lab"}
    flapping["spec"] = {"taints": [{"key": "dedicated", "effect": "NoExecute"}]}
    flapping["status"]["conditions"].append(condition("Stable", "False", "Flapping", "it came and went"))
    cell = registry((METAL_HOSTS, flapping)).find("host/a")
    assert (cell.closed, cell.closed_message) == ("Flapping", "it came and went")
    assert cell.labels == frozenset({("room", "lab")})
    assert [taint.text for taint in cell.taints] == ["dedicated:NoExecute"]


def test_closed_node_is_hardware_that_exists_and_a_lasting_taint_is_a_rule() -> None:
    cordoned = taint("node.kubernetes.io/unschedulable") | {"unschedulable": True}
    cluster = registry((NODES, node("a", **cordoned)), (NODES, node("b", **taint("example.com/reserved"))))
    a, b = (cluster.find(f"node/{name}").node for name in ("a", "b"))
    assert a is not None
    assert b is not None
    assert (admits(a, {}), admits(b, {})) == (True, False)


@pytest.mark.parametrize(
    ("allocatable", "pool"),
    [
        ({"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "7"}, "nvidia"),
        ({"nvidia.com/gpu.shared": "16"}, "nvidia"),
        ({"nvidia.com/gpu": "0"}, "nvidia"),
        ({"nvidia.com/gpu": "0", "amd.com/gpu": "8"}, "amd"),
        ({"habana.ai/gaudi": "8"}, "intel-gaudi"),
        ({"gpu.intel.com/xe": "2"}, "intel"),
        ({"example.com/gpu": "2"}, ""),
    ],
)
def test_pool_is_the_accelerator_that_the_node_offers(allocatable: Mapping[str, str], pool: str) -> None:
    cells = registry((NODES, node("a", status={"allocatable": allocatable}))).cells.list_cells()
    assert [cell.pool for cell in cells] == ([pool] if pool else [])


def test_suspicion_closes_a_cell_for_its_time() -> None:
    cluster = registry((NODES, node("a")))
    cluster.cells.suspect("node/a", "Suspect", "pod p was refused", 60)
    assert (cluster.find("node/a").closed, cluster.find("node/a").closed_message) == ("Suspect", "pod p was refused")
    cluster.now[0] = 59
    cluster.store.put(NODES, node("a", 2, unschedulable=True))
    assert cluster.find("node/a").closed == "Cordoned"
    cluster.store.put(NODES, node("a", 3))
    assert cluster.find("node/a").closed == "Suspect"
    before = cluster.cells.revision
    cluster.now[0] = 60
    assert (cluster.cells.revision > before, cluster.find("node/a").closed) == (True, "")
    cluster.cells.suspect("node/a", "Suspect", "pod p was refused", 60)
    cluster.store.remove(NODES, None, "a")
    assert cluster.cells.list_cells() == ()
    cluster.store.put(NODES, node("a", 4))
    assert not cluster.find("node/a").closed
    cluster.cells.suspect("node/gone", "Suspect", "nobody knows it", 60)
    assert cluster.cells.find_cell("node/gone") is None


def test_host_has_its_budget_and_what_is_free_of_it() -> None:
    observed = host("one", 60 * GIB, memoryBandwidthBytesPerSecond=400, budgetBytes=64 * GIB)
    cluster = registry((METAL_HOSTS, observed | {"spec": {"namespaces": ["team"]}}))
    cluster.store.put(METAL_PROCESSES, process("p", host="one", gib=10))
    cell = cluster.find("host/one")
    assert (cell.pool, cell.total, cell.free) == ("metal", {"memory": 64 * GIB}, {"memory": 50 * GIB})
    assert [*cell.runtimes, *cell.namespaces] == ["llama.cpp", "team"]
    assert (cell.closed, cell.bandwidth_bytes_per_second) == ("", 400)
    cluster.store.remove(METAL_PROCESSES, "team", "p")
    assert cluster.find("host/one").free == {"memory": 60 * GIB}
    cluster.store.remove(METAL_HOSTS, None, "one")
    assert cluster.cells.list_cells() == ()


def test_host_is_closed_while_it_is_lost() -> None:
    cluster = registry((METAL_HOSTS, host("one")))
    assert not cluster.find("host/one").closed
    assert changes(cluster, lambda: cluster.lost.add("one"))
    assert cluster.find("host/one").closed == "HostLost"
    assert changes(cluster, cluster.lost.clear)
    leaving = host("one")
    leaving["metadata"] |= DELETED | {"resourceVersion": "2"}
    cluster.store.put(METAL_HOSTS, leaving)
    assert cluster.find("host/one").closed == "HostLost"


@pytest.mark.parametrize(
    ("conditions", "spec", "reason"),
    [
        ([condition("Paused", "True", message="typing")], {}, "Paused"),
        ([condition("MemoryPressure", "True")], {}, "MemoryPressure"),
        ([condition("AddressAccepted", "False", message="that of a node")], {"drain": True}, "AddressRefused"),
        ([], {"unschedulable": True}, "Cordoned"),
        ([], {"drain": True}, "Cordoned"),
        ([condition("Paused", "Unknown"), condition("MemoryPressure", "False")], {}, ""),
    ],
)
def test_host_is_closed_with_the_reason(conditions: list[Obj], spec: Obj, reason: str) -> None:
    cell = registry((METAL_HOSTS, host("one", conditions=conditions) | {"spec": spec})).find("host/one")
    assert (cell.closed, bool(cell.closed_message)) == (reason, bool(reason))


class ModelPod(NamedTuple):
    """A pod as the test counts it."""

    gpus: int
    node: str = ""
    pinned: str = ""
    is_gated: bool = False
    is_deleted: bool = False
    phase: str = "Pending"

    @property
    def place(self) -> str:
        if self.phase in {"Succeeded", "Failed"}:
            return ""
        return self.node or ("" if self.is_gated or self.is_deleted else self.pinned)

    def build(self, name: str, version: int) -> Obj:
        spec: Obj = {"nodeName": self.node} if self.node else {}
        spec |= pin(self.pinned) if self.pinned else {}
        spec |= {"schedulingGates": [{"name": QUEUE_GATE}]} if self.is_gated else {}
        metadata = DELETED if self.is_deleted else {}
        return pod(name, self.gpus, version=version, phase=self.phase, metadata=metadata, **spec)


class Events:
    """Random events, which change the cluster of the test and are reported to the registry."""

    NAMES = ("a", "b", "c", "d")

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a run that can be repeated
        self.version = 1
        self.gpus: dict[str, int] = {}
        self.ours: dict[str, ModelPod] = {}
        self.theirs: dict[str, ModelPod] = {}
        self.foreign = ForeignPods()
        self.registry = registry(foreign=self.foreign)

    def happen(self) -> None:
        self.version += 1
        of_nodes = (self.change_node, self.lose_node)
        of_ours = (self.change_pod, self.change_pod, self.lose_pod, self.relist, self.relabel)
        of_theirs = (self.change_foreign, self.change_foreign, self.end_foreign, self.relist_foreign)
        self.random.choice((*of_nodes, *of_ours, *of_theirs))()

    def change_node(self) -> None:
        name = self.random.choice(self.NAMES)
        self.gpus[name] = self.random.randrange(1, 9)
        offered = {"nvidia.com/gpu": str(self.gpus[name])}
        self.registry.store.put(NODES, node(name, self.version, status={"allocatable": offered}))

    def lose_node(self) -> None:
        name = self.random.choice(self.NAMES)
        if self.gpus.pop(name, None) is not None:
            self.registry.store.remove(NODES, None, name)

    def any_pod(self) -> ModelPod:
        pick = self.random
        return ModelPod(
            pick.randrange(1, 5),
            pick.choice(("", *self.NAMES)),
            pick.choice(("", *self.NAMES)),
            is_gated=pick.random() < 0.3,
            is_deleted=pick.random() < 0.2,
            phase=pick.choice(("Pending", "Running", "Running", "Succeeded", "Failed")),
        )

    def change_pod(self) -> None:
        name = f"p{self.random.randrange(12)}"
        self.ours[name] = self.any_pod()
        self.registry.store.put(PODS, self.ours[name].build(name, self.version))

    def lose_pod(self) -> None:
        name = f"p{self.random.randrange(12)}"
        if self.ours.pop(name, None) is not None:
            self.registry.store.remove(PODS, "team", name)

    def relist(self) -> None:
        self.ours = {name: our for name, our in self.ours.items() if self.random.random() < 0.7}
        self.registry.store.replace(PODS, [our.build(name, self.version) for name, our in self.ours.items()])

    def change_foreign(self) -> None:
        self.show_foreign(f"f{self.random.randrange(12)}", self.any_pod())

    def show_foreign(self, name: str, each: ModelPod) -> None:
        """Report a pod as a watch with these selectors does: one that is not selected any more as deleted."""
        if each.node and each.phase in {"Pending", "Running"}:
            self.theirs[name] = each
            self.foreign.put(PODS, self.foreign.read(as_sent(each.build(name, self.version))))
        elif self.theirs.pop(name, None) is not None:
            self.foreign.remove(PODS, "team", name, uid=f"uid-{name}")

    def end_foreign(self) -> None:
        self.show_foreign(f"f{self.random.randrange(12)}", ModelPod(1, "a", phase="Succeeded"))

    def relist_foreign(self) -> None:
        self.theirs = {name: their for name, their in self.theirs.items() if self.random.random() < 0.7}
        items = [self.foreign.read(as_sent(their.build(name, self.version))) for name, their in self.theirs.items()]
        self.foreign.replace(PODS, items)

    def relabel(self) -> None:
        """Take our label from one of our pods."""
        if self.ours:
            name = self.random.choice(sorted(self.ours))
            pod = self.ours.pop(name)
            self.registry.store.remove(PODS, "team", name)
            self.show_foreign(name, pod)

    def count_free(self) -> dict[str, int]:
        pods = [*self.ours.values(), *self.theirs.values()]
        return {name: gpus - sum(pod.gpus for pod in pods if pod.place == name) for name, gpus in self.gpus.items()}


@pytest.mark.parametrize("seed", range(60))
def test_sums_are_right_after_any_events(seed: int) -> None:
    events = Events(seed)
    cells = events.registry.cells
    seen: tuple[int, object] = (0, ({}, {}, {}))
    for _ in range(200):
        events.happen()
        if events.random.random() < 0.3:
            continue  # several events before cells are read
        free = {cell.name: cell.free["nvidia.com/gpu"] for cell in cells.list_cells()}
        assert free == events.count_free()
        totals = {cell.name: cell.total["nvidia.com/gpu"] for cell in cells.list_cells()}
        assert totals == events.gpus
        lasting = {cell.name: dict(cell.lasting) for cell in cells.list_cells()}
        now = cells.revision, (free, totals, lasting)
        assert (seen[0] == now[0]) == (seen[1] == now[1])
        seen = now
    events.foreign.replace(PODS, [])
    events.registry.store.replace(PODS, [])
    assert {cell.name: cell.free["nvidia.com/gpu"] for cell in cells.list_cells()} == events.gpus


def test_cells_move_as_pools_come_change_and_go() -> None:
    labelled = host("h")
    labelled["metadata"]["labels"] = {"team": "a"}
    cluster = registry((NODES, node("a", labels={"team": "a"})), (NODES, node("b")), (METAL_HOSTS, labelled))
    calls: list[int] = []
    cluster.cells.subscribe(lambda: calls.append(1))

    def pools() -> dict[str, str]:
        return {cell.name: cell.pool for cell in cluster.cells.list_cells()}

    assert pools() == {"a": "nvidia", "b": "nvidia", "h": "metal"}
    team_a, macs = pool("team-a", nodeSelector={"team": "a"}), pool("macs", "metal", nodeSelector={"team": "a"})
    assert changes(cluster, lambda: [cluster.store.put(ACCELERATOR_POOLS, definition) for definition in (team_a, macs)])
    assert pools() == {"a": "team-a", "b": "nvidia", "h": "macs"}
    assert len(calls) == 1
    reported = pool("team-a", nodeSelector={"team": "a"}, status={"cells": 1})
    reported["metadata"]["resourceVersion"] = "2"
    assert not changes(cluster, lambda: cluster.store.put(ACCELERATOR_POOLS, reported))
    assert len(calls) == 1, "a status moves nothing"
    wider = pool("team-a", version=3, nodeSelector={"kubernetes.io/hostname": "b"})
    assert changes(cluster, lambda: cluster.store.put(ACCELERATOR_POOLS, wider))
    assert pools() == {"a": "nvidia", "b": "team-a", "h": "macs"}
    assert changes(cluster, lambda: cluster.store.put(NODES, node("b", 2, labels={"kubernetes.io/hostname": "c"})))
    assert pools()["b"] == "nvidia"
    assert changes(cluster, lambda: cluster.store.remove(ACCELERATOR_POOLS, None, "macs"))
    assert pools()["h"] == "metal"


def test_registry_that_begins_with_pools_has_cells_in_them() -> None:
    cluster = registry(
        (ACCELERATOR_POOLS, pool("all", nodeSelector={"team": "a"})), (NODES, node("a", labels={"team": "a"}))
    )
    assert cluster.find("node/a").pool == "all"
