"""One view of the cluster for all that read it: nodes and hosts, what is free there, models, services, measurements.

A reader names the kinds that it may list. The view keeps them by watches, or reads them once; what is free on a machine
is counted by the registry of cells in either case, so that the density API, `pomona fit` and `pomona simulate` say of a
machine what the queue does with it.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from controller.placement.cell_registry import CellRegistry
from controller.placement.machines import ViewedMachine, build_host, build_node
from controller.placement.nodes import declare_nodes
from controller.placement.units import Cell
from controller.reconcile.conditions import has_condition
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.partial_objects import declare_partial_objects
from controller.reconcile.plan import decode_stored
from crds.meta import CONTROLLER_NAMESPACE, OURS
from crds.metalhost import MetalHost
from crds.nodefitness import NodeFitness, NodeFitnessStatus
from devices.vendors import Vendors
from fitness.fact_freshness import FactFreshness
from fitness.performance_store import SELECTOR, follow_measurements
from fitness.stated_hardware import describe_node
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.resources import (
    CONFIG_MAPS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    NODE_FITNESSES,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Resource,
)
from kube.store import Store
from kube.watch import Selection, load, reflect

_LIVE: Final = "status.phase!=Succeeded,status.phase!=Failed"
_OPTIONAL_KINDS: Final = frozenset({RESOURCE_SLICES, RESOURCE_CLAIMS})
"""Kinds that some clusters do not have."""


MEASUREMENTS: Final = Selection(CONFIG_MAPS, CONTROLLER_NAMESPACE, SELECTOR)
OUR_PODS: Final = Selection(PODS, None, OURS, _LIVE)
MACHINE_KINDS: Final[Sequence[Selection]] = (
    *map(Selection, (NODE_FITNESSES, NODES, METAL_HOSTS, MODELS, INFERENCE_SERVICES, METAL_PROCESSES)),
    MEASUREMENTS,
    OUR_PODS,
)
"""All from which it follows what fits where, and at what cost."""


class ClusterView:
    """The objects of some kinds, and what follows from them.

    Args:
        vendors: the table of accelerators.
        kinds: the kinds that the reader may list. With pods among them, all pods that are not ours are counted, too.
        clock: seconds that never go back.
        read_time: the time of day.
        is_alive: returns whether a host, by its name, is alive; None: its condition Ready says it.
        parts: by kind, a function that returns which part of each object is stored; else it is as in the controller.
    """

    def __init__(
        self,
        vendors: Vendors,
        kinds: Sequence[Selection] = MACHINE_KINDS,
        clock: Callable[[], float] = time.monotonic,
        read_time: Callable[[], datetime] = lambda: datetime.now(UTC),
        *,
        is_alive: Callable[[str], bool] | None = None,
        parts: Mapping[Resource, Callable[[Obj], Obj]] = {},
    ) -> None:
        """Make an empty view; `follow` or `read_once` fills its store. The arguments are those of the class."""
        self.vendors = vendors
        self.kinds = kinds
        self._clock = clock
        self._is_alive = is_alive or self._is_ready

        self.store = Store()
        self.measured = follow_measurements(self.store)  # the speeds that benchmarks have measured
        self.freshness = FactFreshness(clock, read_time)  # tells which node agents are silent
        # By kind: set once all its objects are in the store.
        self._listed = {kind.resource: asyncio.Event() for kind in kinds}

        # The machines (nodes and hosts), as `list_machines` built them last.
        self._machines: dict[str, ViewedMachine] = {}
        """By `Cell.id`."""
        self._changed_names: set[str] = set()
        """Names of nodes and hosts whose reports have changed since their machines were built."""
        self._built_as_stale: frozenset[str] = frozenset()
        """Nodes whose machines were built as stale: their agents were silent."""

        declare_indexes(self.store)
        declare_partial_objects(self.store)
        # The store keeps a part of each object: that of nodes is the default one unless `parts` names another.
        if NODES not in parts:
            declare_nodes(self.store, vendors)
        for resource, keep_part in parts.items():
            self.store.set_reduction(resource, keep_part)

        self.store.subscribe(self._take_change)

    @functools.cached_property
    def registry(self) -> CellRegistry:
        """The cells of nodes and hosts. A reader that asks for none pays for none."""
        return CellRegistry(
            self.store,
            self.vendors,
            self._is_alive,
            clock=self._clock,
            is_stale=self.freshness.is_stale,
            is_copy=bool(self.kinds),  # the controller names no kinds: it fills the store by its own watches
        )

    @property
    def _lists(self) -> Sequence[asyncio.Event]:
        """Return the events that are set once the first list of a kind is in the store."""
        foreign = [self.registry.foreign.synced] if PODS in self._listed else []
        return [*self._listed.values(), *foreign]

    @property
    def is_complete(self) -> bool:
        """True once everything was listed."""
        return all(listed.is_set() for listed in self._lists)

    async def wait_until_complete(self) -> None:
        """Wait until everything was listed."""
        for listed in self._lists:
            await listed.wait()

    async def follow(self, client: Client) -> None:
        """Keep the store equal to the cluster by watches, for ever."""
        async with asyncio.TaskGroup() as tasks:
            for kind in self.kinds:
                tasks.create_task(reflect(client, self.store, kind, self._listed[kind.resource]))
            if PODS in self._listed:
                tasks.create_task(self.registry.foreign.follow(client))

    async def read_once(self, client: Client) -> Mapping[Resource, Forbidden]:
        """Read the cluster into the store once, and return the refusals by kind of what the user may not read.

        Raises:
            ApiError: the API server refuses for another reason.
            Unreachable: the API server does not answer.
        """
        refusals = dict[Resource, Forbidden]()
        for kind in self.kinds:
            try:
                await load(client, self.store, kind)
            except Forbidden as error:
                refusals[kind.resource] = error
            except NotFound:
                if kind.resource not in _OPTIONAL_KINDS:  # those that some clusters do not have
                    raise

        # Pods that are not ours are counted apart, and not kept in the store.
        if PODS in self._listed and PODS not in refusals:
            await self.registry.foreign.read_once(client)
        return refusals

    @property
    def revision(self) -> object:
        """A key that is equal as long as nothing has changed."""
        return self.store.revision, self.registry.revision, self.freshness.list_stale()

    def list_machines(self) -> Mapping[str, ViewedMachine]:
        """Return all nodes and hosts by name; a host that has the name of a node is named `host/NAME`.

        Building a machine is costly: it is kept unless its cell or the report of its agent has changed, or the agent
        has become silent or is back.
        """
        # 1. Find what has changed since the last call: reports, and agents that have become silent (stale) or are back.
        stale = self.freshness.list_stale()
        changed_names = self._changed_names | (stale ^ self._built_as_stale)
        self._changed_names, self._built_as_stale = set(), stale

        # 2. Build these machines, and those whose cell has changed. Those of cells that are gone are left out.
        machines = dict[str, ViewedMachine]()
        for cell_id, cell in self.registry.cells.items():
            machine = self._machines.get(cell_id)
            if machine is None or machine.cell is not cell or cell.name in changed_names:
                machine = self._build_machine(cell, is_stale=cell.name in stale)
            machines[cell_id] = machine
        self._machines = machines
        return {self._name_machine(machine.cell): machine for machine in machines.values()}

    def _name_machine(self, cell: Cell) -> str:
        """Return the name under which `list_machines` has the machine of a cell."""
        return cell.id if cell.kind == "host" and f"node/{cell.name}" in self._machines else cell.name

    def find_report(self, node: str) -> NodeFitnessStatus | None:
        """Return what a node agent reports; None: nothing."""
        stored = self.store.get(NODE_FITNESSES, node)
        decoded = decode_stored(self.store, NODE_FITNESSES, [stored] if stored is not None else [], NodeFitness)
        return decoded[0].status if decoded else None

    def _build_machine(self, cell: Cell, *, is_stale: bool) -> ViewedMachine:
        """Return the machine of a cell with what its agent reports; `is_stale` is of nodes only."""
        if cell.node is not None:
            report = self.find_report(cell.name)
            hardware = describe_node(cell.node["metadata"]["labels"], report, self.vendors)
            return build_node(cell, hardware, report, self.vendors, is_stale=is_stale)
        # A cell without a node is that of a host.
        stored = self.store.get(METAL_HOSTS, cell.name)
        (host,) = decode_stored(self.store, METAL_HOSTS, [stored] if stored is not None else [], MetalHost)
        return build_host(cell, host.status, is_stale=not self._is_ready(cell.name))

    def _is_ready(self, host: str) -> bool:
        """Return whether the controller has found a host alive: only it sees the Leases all the time."""
        return has_condition(self.store.get(METAL_HOSTS, host) or {}, "Ready")

    def _take_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Note which machines have new reports, and how fresh the facts of a node are."""
        obj = new or old or {}
        if resource in {NODE_FITNESSES, METAL_HOSTS}:
            self._changed_names.add(obj["metadata"]["name"])
        if resource == NODE_FITNESSES:
            status = (new or {}).get("status") or {}
            self.freshness.note_heartbeat(obj["metadata"]["name"], status.get("observedAt"))
