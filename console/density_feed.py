"""The cluster as the density API sees it: kept by watches, or read once for a command; nothing is written."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog

from console.density_cells import DensityCell, NodeUse, build_host_cell, build_node_cell
from console.density_models import KnownModel, build_known_model, list_catalog_models
from console.density_snapshot import DensitySnapshot, PlacedReplica
from controller.placement.foreign_pods import FOREIGN, TAKES_ROOM, ForeignPods
from controller.placement.nodes import declare_nodes
from controller.placement.pod_requests import count_requests
from controller.placement.units import MEMORY
from crds.inferenceservice import InferenceService
from crds.meta import CONTROLLER_NAMESPACE, LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY
from crds.metalhost import MetalHost
from crds.metalprocess import MetalProcess
from crds.model import Model
from crds.nodefitness import NodeFitness, NodeFitnessStatus
from crds.serving import ServingOptions
from devices.vendors import Vendors
from fitness.correction_table import CorrectionGroup
from fitness.fact_freshness import FactFreshness
from fitness.performance_store import SELECTOR, PerformanceTable, find_model_hash
from kube.client import Client, Obj
from kube.errors import Forbidden
from kube.resources import (
    CONFIG_MAPS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    NODE_FITNESSES,
    NODES,
    PODS,
    Resource,
)
from kube.store import Store
from kube.watch import reflect

log = structlog.get_logger()

CONTEXT_LENGTH: Final = 8192
"""Context of the fits of all models, as by llmfit."""
_OURS: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
_BY_NODE: Final = "node"
_BY_HOST: Final = "host"
_MOST_MESSAGE: Final = 500

T = TypeVar("T")


class _Selected(NamedTuple):
    """The objects of a kind that are read."""

    resource: Resource
    namespace: str | None = None
    label_selector: str = ""
    field_selector: str = ""
    is_required: bool = False
    """Without them, a command has nothing to tell."""


_KINDS: Final[Sequence[_Selected]] = (
    _Selected(NODE_FITNESSES, is_required=True),
    _Selected(NODES, is_required=True),
    _Selected(METAL_HOSTS),
    _Selected(MODELS),
    _Selected(INFERENCE_SERVICES),
    _Selected(METAL_PROCESSES),
    _Selected(CONFIG_MAPS, CONTROLLER_NAMESPACE, SELECTOR),
    _Selected(PODS, None, _OURS, TAKES_ROOM),
)


class DensityFeed:
    """The objects, and the snapshots of them.

    Args:
        vendors: the table of vendors.
        clock: seconds that never go back.
        read_time: the time of day.
    """

    def __init__(
        self,
        vendors: Vendors,
        clock: Callable[[], float] = time.monotonic,
        read_time: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.vendors = vendors
        self.measured = PerformanceTable()
        self.store = Store()
        self.foreign = ForeignPods()
        self._freshness = FactFreshness(clock, read_time)
        self._options = ServingOptions(context_length=CONTEXT_LENGTH)
        self._cells: dict[str, DensityCell] = {}
        self._changed_nodes: set[str] = set()
        """Nodes of which something has changed since their cells were built."""
        self._stale: frozenset[str] = frozenset()
        """Nodes whose cells were built as stale."""
        self._last: tuple[tuple[object, ...], DensitySnapshot] | None = None
        self._changed_hashes: set[str] = set()
        self._has_new_corrections = False
        self._revision = 0
        self._lists = {each.resource: asyncio.Event() for each in _KINDS}
        declare_nodes(self.store, vendors)
        self.store.reduce(PODS, self._reduce_pod)
        self.store.index(PODS, _BY_NODE, lambda pod: [pod["node"]])
        self.store.index(METAL_PROCESSES, _BY_HOST, lambda each: [each["spec"].get("hostName") or ""])
        self.store.subscribe(self._take_change)
        self.measured.corrections.subscribe(self._take_corrections)
        self.foreign.subscribe(self._take_foreign_change)

    @property
    def is_complete(self) -> bool:
        """True once everything was listed."""
        return self.foreign.synced.is_set() and all(each.is_set() for each in self._lists.values())

    async def wait_until_complete(self) -> None:
        """Wait until everything was listed."""
        for each in (self.foreign.synced, *self._lists.values()):
            await each.wait()

    async def follow(self, client: Client) -> None:
        """Follow the cluster for ever."""
        async with asyncio.TaskGroup() as tasks:
            for each in _KINDS:
                tasks.create_task(
                    reflect(
                        client,
                        self.store,
                        each.resource,
                        each.namespace,
                        label_selector=each.label_selector,
                        field_selector=each.field_selector,
                        synced=self._lists[each.resource],
                    )
                )
            tasks.create_task(self.foreign.follow(client))

    async def read_once(self, client: Client) -> Sequence[Forbidden]:
        """Read the cluster once, and return what the user may not read, without which there still is an answer.

        Raises:
            ApiError: the API server refuses what is needed.
            Unreachable: the API server does not answer.
        """
        refused = list[Forbidden]()
        for each in _KINDS:
            try:
                listed = await client.list(
                    each.resource,
                    each.namespace,
                    label_selector=each.label_selector,
                    field_selector=each.field_selector,
                )
            except Forbidden as error:
                if each.is_required:
                    raise
                refused.append(error)
                continue
            self.store.replace(each.resource, listed.items)
        if not any(str(PODS) in str(error) for error in refused):
            listed = await client.list(PODS, label_selector=FOREIGN, field_selector=TAKES_ROOM, read=self.foreign.read)
            self.foreign.replace(PODS, listed.items)
        return refused

    def take_changed_hashes(self) -> frozenset[str]:
        """Return the models whose measurements have changed since the last call, by their hashes."""
        found = frozenset(self._changed_hashes)
        self._changed_hashes.clear()
        return found

    def take_corrections(self) -> bool:
        """Return whether the corrections of speeds have changed since the last call."""
        found, self._has_new_corrections = self._has_new_corrections, False
        return found

    def take_snapshot(self) -> DensitySnapshot:
        """Return the cluster as it is now: the same object until something changes."""
        stale = frozenset(
            each["metadata"]["name"]
            for each in self.store.list(NODE_FITNESSES)
            if self._freshness.is_stale(each["metadata"]["name"])
        )
        key = (self._revision, stale)
        if self._last is None or self._last[0] != key:
            self._last = key, self._build_snapshot(stale)
        return self._last[1]

    def _build_snapshot(self, stale: frozenset[str]) -> DensitySnapshot:
        cells = self._build_cells(stale)
        for raw in self.store.list(METAL_HOSTS):
            host = self._decode(METAL_HOSTS, raw, MetalHost)
            if host is not None:
                name = host.metadata.name
                # A host may have the name of a node.
                shown = f"host/{name}" if name in cells else name
                cells[shown] = build_host_cell(host, self._list_processes(name))._replace(name=shown)
        return DensitySnapshot(
            cells,
            self.store.summarize((MODELS,), "models", self._list_models),
            self._list_decoded(INFERENCE_SERVICES, InferenceService),
            tuple(self._list_placed()),
            self._list_decoded(MODELS, Model),
        )

    def _build_cells(self, stale: frozenset[str]) -> dict[str, DensityCell]:
        """Return the cells of all nodes; only those of which something has changed are built anew."""
        changed, self._changed_nodes = self._changed_nodes, set()
        for name in sorted(changed | (stale ^ self._stale)):
            node = self.store.get(NODES, name)
            if node is None:
                self._cells.pop(name, None)
                continue
            status = self._read_fitness(self.store.get(NODE_FITNESSES, name))
            use = NodeUse(self._sum_use(name))
            self._cells[name] = build_node_cell(node, status, use, self.vendors, is_stale=name in stale)
        self._stale = stale
        return dict(self._cells)

    def _sum_use(self, node: str) -> dict[str, int]:
        """Return what all pods take of the memory and devices of a node."""
        total: dict[str, int] = {}
        sums = [pod["amounts"] for pod in self.store.by_index(PODS, _BY_NODE, node)]
        for amounts in (*sums, self.foreign.sum_of(node)):
            for name, amount in amounts.items():
                if name == MEMORY or "/" in name:
                    total[name] = total.get(name, 0) + amount
        return total

    def _read_fitness(self, fitness: Obj | None) -> NodeFitnessStatus | None:
        found = self._decode(NODE_FITNESSES, fitness, NodeFitness) if fitness is not None else None
        return found.status if found is not None else None

    def _list_processes(self, host: str) -> list[MetalProcess]:
        found = (
            self._decode(METAL_PROCESSES, each, MetalProcess)
            for each in self.store.by_index(METAL_PROCESSES, _BY_HOST, host)
        )
        return [each for each in found if each is not None]

    def _list_models(self) -> tuple[KnownModel, ...]:
        accelerators = tuple(self.vendors)
        own = (
            self.store.derive(MODELS, raw, "known", lambda raw=raw: self._describe_model(raw))  # type: ignore[misc]
            for raw in self.store.list(MODELS)
        )
        return (*(each for each in own if each is not None), *list_catalog_models(accelerators))

    def _describe_model(self, raw: Obj) -> KnownModel | None:
        model = self._decode(MODELS, raw, Model)
        return build_known_model(model, self.vendors, self._options) if model is not None else None

    def _list_placed(self) -> Iterable[PlacedReplica]:
        for pod in self.store.list(PODS):
            if pod["service"]:
                memory = pod["amounts"].get(MEMORY)
                yield PlacedReplica(pod["metadata"]["namespace"], pod["service"], pod["node"], pod["devices"], memory)
        for raw in self.store.list(METAL_PROCESSES):
            process = self._decode(METAL_PROCESSES, raw, MetalProcess)
            host, service = (process.spec.host_name, process.spec.service_name) if process is not None else (None, None)
            if process is not None and host and service:
                cell = f"host/{host}" if self.store.get(NODES, host) else host
                yield PlacedReplica(process.metadata.namespace, service, cell, 0, process.spec.memory_bytes)

    def _list_decoded(self, resource: Resource, kind: type[T]) -> tuple[T, ...]:
        def decode_all() -> tuple[T, ...]:
            found = (self._decode(resource, each, kind) for each in self.store.list(resource))
            return tuple(each for each in found if each is not None)

        return self.store.summarize((resource,), "structs of " + str(resource), decode_all)

    def _decode(self, resource: Resource, obj: Obj, kind: type[T]) -> T | None:
        """Return an object as its struct; None, which is logged once: it is of a later version, or damaged."""

        def convert() -> T | None:
            try:
                return msgspec.convert(obj, kind)
            except msgspec.ValidationError as error:
                metadata = obj["metadata"]
                log.warning(
                    "object_not_read",
                    resource=str(resource),
                    namespace=metadata.get("namespace"),
                    name=metadata.get("name"),
                    error=str(error)[:_MOST_MESSAGE],
                )
                return None

        return self.store.derive(resource, obj, "struct", convert)

    def _reduce_pod(self, pod: Obj) -> Obj:
        """Return the part of one of our pods that is kept."""
        metadata, amounts = pod["metadata"], count_requests(pod["spec"])
        vendors = self.vendors.values()
        return {
            "metadata": {name: metadata.get(name, "") for name in ("namespace", "name", "uid", "resourceVersion")},
            "service": (metadata.get("labels") or {}).get(LABEL_SERVICE, ""),
            "node": pod["spec"].get("nodeName", ""),
            "amounts": amounts,
            "devices": sum(count for name, count in amounts.items() if any(each.offers(name) for each in vendors)),
        }

    def _take_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        self._count_change()
        either: dict[str, Any] = new or old or {}
        if resource in {NODES, NODE_FITNESSES}:
            self._changed_nodes.add(either["metadata"]["name"])
        elif resource is PODS:
            self._changed_nodes.update(each["node"] for each in (old, new) if each)
        if resource is NODE_FITNESSES:
            status = (new or {}).get("status") or {}
            self._freshness.note(either["metadata"]["name"], status.get("observedAt"))
        elif resource is CONFIG_MAPS:
            self._changed_hashes.add(find_model_hash(either))
            if new is None:
                self.measured.remove(either["metadata"]["name"])
                return
            for problem in self.measured.update(new):
                log.warning("measurement_ignored", problem=str(problem)[:_MOST_MESSAGE])

    def _take_corrections(self, _groups: frozenset[CorrectionGroup]) -> None:
        self._has_new_corrections = True

    def _take_foreign_change(self, nodes: Iterable[str]) -> None:
        self._changed_nodes.update(nodes)
        self._count_change()

    def _count_change(self) -> None:
        self._revision += 1
