"""The registry of cells: nodes with an accelerator and hosts, each with what is free there, kept event by event.

An event costs the same whatever the size of the cluster: it changes the sums of its node, and marks the cell. A marked
cell is built anew when cells are read next, so that a burst of events builds each once.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from controller.placement.capacity import Closure, list_capacities
from controller.placement.cell_costs import CellCosts, read_cost
from controller.placement.cell_facts import NodeFacts, find_host_closure, read_node
from controller.placement.device_classes import DeviceClasses
from controller.placement.device_registry import DeviceRegistry, is_whole
from controller.placement.foreign_pods import ForeignPods
from controller.placement.pod_requests import count_requests, find_taken_node
from controller.placement.pool_table import METAL, labels_of, read_pools
from controller.placement.taken_room import TakenRoom
from controller.placement.units import MEMORY, Cell
from controller.reconcile.indexes import OWNER_INDEX, controller_of, namespaced
from controller.reconcile.plan import decode_stored
from crds.metalhost import MetalHost
from crds.nodefitness import NodeFitness, NodeFitnessStatus
from devices.vendors import Vendors
from fitness.performance_store import LABEL_BENCHMARK
from fitness.serving_devices import ServingDevices
from fitness.stated_hardware import describe_host, describe_node
from kube.client import Obj
from kube.resources import (
    ACCELERATOR_POOLS,
    METAL_HOSTS,
    METAL_PROCESSES,
    NODE_FITNESSES,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    ObjectKey,
    Resource,
    object_key,
)
from kube.store import Store


class _Suspicion(NamedTuple):
    closure: Closure
    until: float
    """On the clock of the registry."""


class CellRegistry:
    """All cells.

    Args:
        store: the store, whose changes are followed from now on.
        vendors: the table of accelerators.
        is_alive: returns whether a host, by its name, is alive.
        foreign: all pods that are not ours; none are counted before it has listed them (`ForeignPods.synced`).
        clock: a monotonic clock in seconds.
        is_stale: returns whether the agent of a node is silent.
        is_copy: the registry of a reader, not of the controller. Nodes without an accelerator have a cell, in no pool,
            and a pod is of a benchmark if its label says so: a reader does not know the controller's benchmark Jobs.
    """

    def __init__(
        self,
        store: Store,
        vendors: Vendors,
        is_alive: Callable[[str], bool],
        foreign: ForeignPods | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_stale: Callable[[str], bool] = lambda _node: False,
        is_copy: bool = False,
    ) -> None:
        """Take in what the store has, and follow its changes from now on; see the class for the arguments."""
        self._store = store
        self._is_copy = is_copy
        self._vendors = vendors
        self._is_alive = is_alive
        self._clock = clock
        self._is_stale = is_stale
        self.foreign = foreign if foreign is not None else ForeignPods()
        self.devices = DeviceRegistry(vendors)  # devices that pods get by a ResourceClaim
        self.classes = DeviceClasses()  # the device classes of each accelerator
        self._costs = CellCosts()  # what administrators state as the cost of each cell

        # Facts from which cells are built; each event changes a few of them.
        self._pools = read_pools(store, vendors)  # the pools that administrators define
        self._taken_by_ours: TakenRoom[ObjectKey] = TakenRoom()  # what our pods hold of nodes; `foreign` has the others
        self._benchmarks: Mapping[str, str] = {}
        """The node of each Job whose pod holds no room, by its key in `OWNER_INDEX`."""
        self._nodes: dict[str, NodeFacts] = {}  # of each node that has a cell
        self._suspicions: dict[str, _Suspicion] = {}
        """Cells that are closed for a while since they refused pods, by `Cell.id`."""

        # The cells, as they were built last.
        self._was_silent: dict[str, bool] = {}  # by node whose utilization counts: its agent was silent then
        self._was_alive: dict[str, bool] = {}  # by host: it was alive then
        self._marked: dict[str, None] = {}  # ids of cells that may have changed since, in this order
        self._cells: dict[str, Cell] = {}  # by `Cell.id`
        self._listed: tuple[Cell, ...] = ()  # those that are in a pool
        self._revision = 0  # grows with each change of a cell
        self._node_revision = 0  # grows when nodes, their labels or their taints change
        self._listeners: list[Callable[[], None]] = []  # called when a cell may have changed

        for resource in (NODES, NODE_FITNESSES, PODS, METAL_HOSTS, RESOURCE_SLICES, RESOURCE_CLAIMS):
            for obj in store.list(resource):
                self._on_change(resource, None, obj)
        store.subscribe(self._on_change)
        self.foreign.subscribe(self._mark_nodes)

    @property
    def revision(self) -> int:
        """A number that grows with each change of a cell: while it is the same, so is every cell."""
        self._update()
        return self._revision

    @property
    def node_revision(self) -> int:
        """A number that grows with each change of the labels or taints of nodes, and as they come and go."""
        self._update()
        return self._node_revision

    def list_cells(self) -> Sequence[Cell]:
        """Return all cells of the queue: the same sequence until one of them changes."""
        self._update()
        return self._listed

    @property
    def cells(self) -> Mapping[str, Cell]:
        """All cells by id, with those of nodes without an accelerator if the registry has them."""
        self._update()
        return self._cells

    def list_classes(self, accelerator: str) -> Sequence[ServingDevices]:
        """Return one device of each class of an accelerator, by the name of the class: the same until one changes."""
        self._update()
        return self.classes.list_classes(accelerator)

    def has_unknown_devices(self, accelerator: str) -> bool:
        """Return whether any node or host has devices of an accelerator of which nobody says what they are."""
        self._update()
        return self.classes.has_unknown(accelerator)

    def find_cell(self, cell_id: str) -> Cell | None:
        """Return a cell by its id, or None if its node or host is gone, or has no accelerator any more."""
        self._update()
        return self._cells.get(cell_id)

    def suspect(self, cell_id: str, reason: str, message: str, seconds: float) -> None:
        """Close a cell for some time, such as after the scheduler refused a pod that should fit there.

        `reason` is one CamelCase word, such as `SUSPECT`; `message` says what is wrong with the cell.
        """
        self._suspicions[cell_id] = _Suspicion(Closure(reason, message), self._clock() + seconds)
        self._mark(cell_id)

    def set_benchmarks(self, jobs: Mapping[str, str]) -> None:
        """Set the benchmark Jobs, whose pods hold no room: they end as soon as a unit is admitted to their node.

        Only the controller part that runs and ends these Jobs may name them. A label would not do: a tenant may give a
        pod any label, and any owner in its namespace. `jobs` has the node of each Job, by its key in `OWNER_INDEX`,
        which is namespace and uid: a pod on another node is not that of the Job.
        """
        before, self._benchmarks = self._benchmarks, jobs
        changed_jobs = [job for job in {**before, **jobs} if before.get(job) != jobs.get(job)]
        for job in changed_jobs:
            # From now on a pod of the Job holds no room, or holds room again.
            for pod in self._store.by_index(PODS, OWNER_INDEX, job):
                self._count_pod_room(pod)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener()` when a cell may have changed, once until cells are read again.

        It is not called when a host is found dead or alive, nor when a suspicion ends: these are seen when cells are
        read.
        """
        self._listeners.append(listener)

    def _on_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Take in a change of the store: update sums and facts, and mark the cells that it may change."""
        if resource == PODS:
            self._on_pod_change(old, new)
        elif resource == NODES:
            self._on_node_change(old, new)
        elif resource == NODE_FITNESSES:
            self._on_fitness_change(old, new)
        elif resource == ACCELERATOR_POOLS:
            self._on_pools_change()
        elif resource in {METAL_HOSTS, METAL_PROCESSES}:
            self._on_host_change(resource, old, new)
        elif resource == RESOURCE_SLICES:
            self._on_slice_change(old, new)
        elif resource == RESOURCE_CLAIMS:
            self._mark_nodes(self.devices.take_claim(old, new))

    def _on_pod_change(self, old: Obj | None, new: Obj | None) -> None:
        """Update the room and the claimed devices that a pod of ours holds, and mark the nodes concerned.

        A pod whose uid has changed was replaced by another one of its name: then the old one has gone as well.
        """
        # Room.
        if new is not None:
            self._count_pod_room(new)
        elif old is not None:
            self._mark_nodes(self._taken_by_ours.release(object_key(old)))
        # Devices.
        if old is not None and (new is None or old["metadata"]["uid"] != new["metadata"]["uid"]):
            self._mark_nodes(self.devices.take_pod(old, is_gone=True))
        if new is not None:
            self._mark_nodes(self.devices.take_pod(new, is_gone=False))

    def _count_pod_room(self, pod: Obj) -> None:
        """Count the room that a pod holds on its node, and mark the nodes whose sums change.

        Nothing is counted for a pod without a node, and for that of a benchmark. The controller knows these by their
        Jobs, a reader (`is_copy`) by their label.
        """
        key, node = object_key(pod), find_taken_node(pod)
        owner = controller_of(pod) if self._benchmarks else None
        is_of_job = owner is not None and self._benchmarks.get(namespaced(key.namespace, owner["uid"])) == node
        is_labelled = self._is_copy and LABEL_BENCHMARK in (pod["metadata"].get("labels") or {})
        is_benchmark = is_of_job or is_labelled
        if node and not is_benchmark:
            self._mark_nodes(self._taken_by_ours.hold(key, node, count_requests(pod["spec"])))
        else:
            self._mark_nodes(self._taken_by_ours.release(key))

    def _on_node_change(self, old: Obj | None, new: Obj | None) -> None:
        """Take over a node's facts, unless only its heartbeat has changed."""
        node = new or old
        if node is None or (old is not None and new is not None and _is_heartbeat(old, new)):
            return
        self._update_node(node["metadata"]["name"], new)

    def _on_host_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Mark the cell of a host that has changed, or of each host to which a changed process is or was bound."""
        versions = [version for version in (old, new) if version is not None]
        hosts = (
            version["metadata"]["name"] if resource == METAL_HOSTS else version["spec"].get("hostName")
            for version in versions
        )
        for host in dict.fromkeys(hosts):
            if host:
                self._mark(f"host/{host}")

    def _on_fitness_change(self, old: Obj | None, new: Obj | None) -> None:
        """Mark the cell of a node whose NodeFitness, the report of its agent, has changed.

        A report that is merely newer counts only if it states the utilization of devices, which grows old with silence.
        """
        fitness = new or old
        if fitness is None or (old is not None and new is not None and read_facts(old) == read_facts(new)):
            return
        self._mark_nodes((fitness["metadata"]["name"],))

    def _on_slice_change(self, old: Obj | None, new: Obj | None) -> None:
        """Take in a change of devices that may be claimed: they alone may make a cell of a node."""
        for name in self.devices.take_slice(old, new):
            self._update_node(name, self._store.get(NODES, name))

    def _update_node(self, name: str, node: Obj | None) -> None:
        """Keep the facts of a node that has a cell, or forget those of one that has none any more; mark the cell.

        A node without an accelerator has no cell in the controller, but one in the copy of a reader.
        """
        facts = read_node(node, self._vendors, self.devices.find_accelerator(name)) if node is not None else None
        if facts is not None and (facts.accelerator or self._is_copy):
            self._nodes[name] = facts
        elif self._nodes.pop(name, None) is None:
            return  # it had no cell before either
        self._mark(f"node/{name}")

    def _on_pools_change(self) -> None:
        """Move cells to the pools that have them now; the status of a pool moves none."""
        pools = read_pools(self._store, self._vendors)
        if pools is not self._pools:  # equal tables are the same object
            self._pools = pools
            self._mark_all()

    def _mark_all(self) -> None:
        """Mark all cells to be built anew."""
        for cell_id in self._cells:
            self._mark(cell_id)

    def _mark_nodes(self, names: Iterable[str]) -> None:
        """Mark the cells of these nodes, as far as they have one, to be built anew."""
        for name in names:
            if name in self._nodes:
                self._mark(f"node/{name}")

    def _mark(self, cell_id: str) -> None:
        """Mark a cell to be built anew when cells are read next; the first mark since then calls the listeners."""
        is_first = not self._marked
        self._marked[cell_id] = None
        if is_first:
            for listener in self._listeners:
                listener()

    def _update(self) -> None:
        """Build all cells that may have changed.

        Besides those that changes have marked, these are cells about which time decides: a suspicion is over, or an
        agent has become silent or is back.
        """
        # 1. Mark what time has changed.
        now = self._clock()
        for cell_id in [cell_id for cell_id, suspicion in self._suspicions.items() if suspicion.until <= now]:
            del self._suspicions[cell_id]
            self._mark(cell_id)
        for node, was_stale in self._was_silent.items():
            if self._is_stale(node) != was_stale:
                self._mark(f"node/{node}")
        for host, was_alive in self._was_alive.items():
            if self._is_alive(host) != was_alive:
                self._mark(f"host/{host}")

        # 2. Build. A cell that is built may mark others: their costs are compared with its own.
        before = self._revision
        while self._marked:
            self._build_marked()
        if self._revision != before:
            self._listed = tuple(cell for cell in self._cells.values() if cell.pool)

    def _build_marked(self) -> None:
        """Build the marked cells anew; those that differ, or are gone, raise the revision."""
        marked, self._marked = self._marked, {}
        for cell_id in marked:
            kind, _, name = cell_id.partition("/")
            cell = self._build_node(name) if kind == "node" else self._build_host(name)
            previous = self._cells.get(cell_id)
            if cell == previous:
                continue

            self._revision += 1
            node = cell.node if cell is not None else None
            previous_node = previous.node if previous is not None else None
            if node != previous_node:
                self._node_revision += 1

            if cell is not None:
                self._cells[cell_id] = cell
            else:
                del self._cells[cell_id]  # the node or host is gone
                self._suspicions.pop(cell_id, None)

    def _build_node(self, name: str) -> Cell | None:
        """Return the cell of a node, or None if it has none: its facts, minus what pods hold."""
        facts, cell_id = self._nodes.get(name), f"node/{name}"
        if facts is None:
            self._forget_cell(cell_id)
            return None

        # 1. Note its device class and cost. Costs are shown as a share of the highest: if that changes, all cells do.
        hardware, utilization_percent = self._read_hardware(name, facts)
        self.classes.put(cell_id, facts.accelerator, hardware)
        if self._costs.put(cell_id, facts.cost):
            self._mark_all()

        # 2. Subtract what pods hold.
        ours, others = self._taken_by_ours.sum_of(name), self.foreign.sum_of(name)
        free = {
            resource: amount - ours.get(resource, 0) - others.get(resource, 0)
            for resource, amount in facts.total.items()
        }
        claimable, unclaimed = self.devices.count_room(name)  # devices for ResourceClaims: all, and the free ones

        # 3. Find its pool, and why it is closed, if so.
        reason, message = self._find_closure(cell_id, facts.closure)
        pool = self._pools.find_pool(facts.accelerator, labels_of(facts.node))
        percent = self._pools.find_overcommit_percent(pool)
        return Cell(
            name=name,
            kind="node",
            pool=pool,
            total={**facts.total, **claimable},
            free={**free, **unclaimed},
            # Held for good by pods that are not ours: processor, memory and the like, but no devices.
            lasting={name: amount for name, amount in others.items() if name in facts.total and "/" not in name},
            closed=reason,
            closed_message=message,
            node=facts.node,
            slice_bytes=facts.share.count_bytes(percent) if facts.share is not None else None,  # None: no shares
            devices=facts.devices | frozenset(filter(is_whole, claimable)),
            device_class=hardware.device_class,
            utilization_percent=utilization_percent,
            cost_permille=self._costs.find_permille(cell_id),
        )

    def _forget_cell(self, cell_id: str) -> None:
        """Forget what was noted of a cell that is gone; if the highest cost changes, mark all cells."""
        self.classes.remove(cell_id)
        self._was_silent.pop(cell_id.removeprefix("node/"), None)
        # Costs are shown as a share of the highest: if that went, every cell changes.
        if self._costs.remove(cell_id):
            self._mark_all()

    def _read_hardware(self, name: str, facts: NodeFacts) -> tuple[ServingDevices, int | None]:
        """Return one device of a node, and the utilization of its devices in percent if pods share them.

        If labels and report describe devices of another vendor than the node offers to pods, its device is unknown.
        """
        stored = self._store.get(NODE_FITNESSES, name)
        decoded = decode_stored(self._store, NODE_FITNESSES, [stored] if stored is not None else [], NodeFitness)
        fitness = decoded[0].status if decoded else None
        # The hardware of a node does not change because its agent is silent; its utilization does.
        hardware = describe_node(labels_of(facts.node), fitness, self._vendors)
        if hardware.vendor != facts.accelerator:
            return ServingDevices(facts.accelerator, ""), None
        return hardware.describe_replica(1), self._read_utilization(name, facts, fitness)  # one device of it

    def _read_utilization(self, name: str, facts: NodeFacts, fitness: NodeFitnessStatus | None) -> int | None:
        """Return the mean utilization of a node's devices; None if pods do not share them, or it is unknown.

        Note whether its agent is silent, so that the cell is built anew when that changes.
        """
        percents = [device.utilization_percent for device in fitness.devices] if fitness is not None else []
        stated = [percent for percent in percents if percent is not None]
        if facts.share is None or not stated:
            self._was_silent.pop(name, None)
            return None
        self._was_silent[name] = is_stale = self._is_stale(name)
        return None if is_stale else sum(stated) // len(stated)

    def _build_host(self, name: str) -> Cell | None:
        """Return the cell of a host, or None if it is gone.

        A host that is being deleted takes no new processes.
        """
        stored = self._store.get(METAL_HOSTS, name)
        hosts = decode_stored(self._store, METAL_HOSTS, [stored] if stored is not None else [], MetalHost)
        cell_id = f"host/{name}"
        if not hosts:
            self._was_alive.pop(name, None)
            self._forget_cell(cell_id)
            return None
        host = hosts[0]

        # 1. Note its cost and device class, as `_build_node` does.
        if self._costs.put(cell_id, read_cost(host.metadata.annotations)):
            self._mark_all()
        hardware = describe_host(host.status)
        self.classes.put(cell_id, METAL, hardware)

        # 2. Find why it is closed, if so. The cell is built anew once the host is dead, or alive again.
        capacity = list_capacities(self._store, hosts)[0]
        is_alive = self._was_alive[name] = self._is_alive(name)
        closure = find_host_closure(capacity, is_alive=is_alive and host.metadata.deletion_timestamp is None)
        reason, message = self._find_closure(cell_id, closure)
        return Cell(
            name=name,
            kind="host",
            pool=self._pools.find_pool(METAL, host.metadata.labels),
            total={MEMORY: capacity.budget_bytes},
            free={MEMORY: capacity.free_bytes},
            closed=reason,
            closed_message=message,
            runtimes=capacity.runtimes,
            namespaces=capacity.namespaces,
            labels=capacity.labels,
            taints=capacity.taints,
            weights=capacity.weights,
            bandwidth_bytes_per_second=capacity.bandwidth_bytes_per_second,
            device_class=hardware.device_class,
            cost_permille=self._costs.find_permille(cell_id),
        )

    def _find_closure(self, cell_id: str, closure: Closure) -> Closure:
        """Return why a cell is closed: its own closure, or else a suspicion."""
        suspicion = self._suspicions.get(cell_id)
        return suspicion.closure if suspicion is not None and not closure.reason else closure


def read_facts(fitness: Obj) -> object:
    """Return the facts of a NodeFitness by which cells are scored.

    The time of the last report is one of them only if a utilization above 0 is reported: it grows old with silence.
    """
    status = fitness.get("status") or {}
    devices = [
        (device.get("product"), device.get("memoryBytes"), device.get("utilizationPercent"))
        for device in status.get("devices") or ()
    ]
    is_shared = any(percent for _, _, percent in devices)
    facts = [status.get(name) for name in ("vendor", "deviceClass", "processor", "cpuCores")]
    return facts, devices, status.get("observedAt") if is_shared else None


def _is_heartbeat(old: Obj, new: Obj) -> bool:
    """Return whether a node is as it was, apart from its version."""
    return old["spec"] == new["spec"] and old["status"] == new["status"] and _identity(old) == _identity(new)


def _identity(node: Obj) -> tuple[object, ...]:
    """Return the parts of a node that are no heartbeat and no status."""
    return node["metadata"]["uid"], node["metadata"]["labels"], node["metadata"].get("annotations")
