"""A copy of the cluster: all objects by which the queue is decided, read once. Nothing is written.

The copy has the controller's own store and registry, so that the same functions decide by it. What is put into the
store changes the copy alone.
"""

import copy
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from controller.placement.bound_volumes import BoundVolumes
from controller.placement.cell_registry import CellRegistry
from controller.placement.device_feed import selects_devices
from controller.placement.foreign_pods import FOREIGN, TAKES_ROOM
from controller.placement.nodes import declare_nodes
from controller.placement.observed_units import observe_units
from controller.placement.planner import MIN_RUN_SECONDS, PlanRules
from controller.placement.pod_requests import find_taken_node
from controller.placement.pod_units import build_requirement
from controller.placement.pool_table import read_pools
from controller.placement.queued_service import demand_slices, find_queued_service
from controller.placement.units import Cell, NodeRequirement, Unit
from controller.pod_settings import PodSettings
from controller.reconcile.conditions import has_condition
from controller.reconcile.indexes import ALL_BENCHMARKS, BENCHMARK_INDEX, OWNER_INDEX, declare_indexes, owner_key
from controller.reconcile.partial_objects import declare_partial_objects
from crds.meta import CONTROLLER_NAMESPACE, LABEL_MANAGED_BY, MANAGED_BY
from crds.placement import ClassSpeed
from fitness.performance_store import SELECTOR, PerformanceTable
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.resources import (
    ACCELERATOR_POOLS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    NODE_FITNESSES,
    NODES,
    PODS,
    PVCS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    ObjectKey,
    Resource,
    object_key,
)
from kube.store import Store

_OURS: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
_READ: Final[Sequence[tuple[Resource, str]]] = (
    *((each, "") for each in (INFERENCE_SERVICES, MODELS, METAL_HOSTS, METAL_PROCESSES, NODES, ACCELERATOR_POOLS)),
    *((resource, _OURS) for resource in (DEPLOYMENTS, PODS, PVCS, JOBS, ENDPOINT_SLICES)),
)
"""All kinds, with the label of the objects that are read."""
_DECIDES_NOTHING: Final = frozenset({JOBS, PVCS, ENDPOINT_SLICES})
"""Kinds without which a plan is still made: of these, what users may not read counts as absent."""
UNKNOWN_IMAGE: Final = "pomona"
"""Image of Pomona in the pods of a plan, if that of the controller is not known."""
_READINGS_OF_VOLUMES: Final = 3
"""A claim names its volume, which is read next."""


class QueueSettings(NamedTuple):
    """The options of the controller by which the queue is decided."""

    pods: PodSettings = PodSettings(image=UNKNOWN_IMAGE)
    min_run_seconds: float = MIN_RUN_SECONDS


class RightsMissing(Exception):  # noqa: N818 - it names what is missing
    """The user may not read all that a plan needs."""

    def __init__(self, refusals: Sequence[Forbidden]) -> None:
        super().__init__("; ".join(map(str, refusals)))
        self.refusals = tuple(refusals)
        """One for each kind."""


class ClusterCopy:
    """The copy.

    Args:
        settings: the options of the controller.
    """

    def __init__(self, settings: QueueSettings = QueueSettings()) -> None:  # noqa: B008 - it is immutable
        self.settings = settings
        self.store = Store()
        declare_indexes(self.store)
        declare_partial_objects(self.store)
        declare_nodes(self.store, settings.pods.vendors)
        self.registry = CellRegistry(self.store, settings.pods.vendors, self._is_alive)
        self.volumes = BoundVolumes(self.store, self.registry)
        self.measured = PerformanceTable()
        """The stored measurements."""
        self.unread_speeds: tuple[Forbidden, ...] = ()
        """Refusals of what speeds follow from: the plan then knows fewer of them."""
        self._pods: dict[ObjectKey, Obj] = {}
        """Our pods as a whole: the store keeps no rules of one that has a node, and its successor has the same."""

    @property
    def rules(self) -> PlanRules:
        """The rules of the plan."""
        table = read_pools(self.store, self.settings.pods.vendors)
        return PlanRules(self.settings.min_run_seconds, table.rules, table.quotas)

    @property
    def _is_queued(self) -> bool:
        """True if services that state no mode are in mode Queue."""
        return self.settings.pods.scheduling_mode == "Queue"

    def put(self, resource: Resource, obj: Obj) -> None:
        """Add an object to the copy, or replace it there."""
        if resource == PODS:
            self._pods[object_key(obj)] = obj
        self.store.put(resource, obj)

    def remove(self, resource: Resource, key: ObjectKey) -> None:
        """Remove an object from the copy."""
        self.store.remove(resource, key.namespace, key.name)

    def list_cells(self) -> tuple[Cell, ...]:
        """Return all cells as they are now."""
        return tuple(self.registry.list_cells())

    def list_units(self, now: datetime) -> tuple[Unit, ...]:
        """Return all units as they are now, each with its rules about nodes, also those that run."""
        observed = observe_units(
            self.store,
            self.settings.pods.vendors,
            now,
            is_queued_by_default=self._is_queued,
            find_volume_nodes=self.volumes.find_nodes,
        )
        return tuple(self.registry.devices.add_freed(self._complete(each)) for each in observed.units)

    def list_speeds(self, service: ObjectKey) -> tuple[ClassSpeed, ...]:
        """Return the speeds of a service by device class; none while its status is of an earlier spec."""
        obj = self.store.get(INFERENCE_SERVICES, service.name, service.namespace)
        status = (obj or {}).get("status") or {}
        if obj is None or status.get("observedGeneration") != obj["metadata"].get("generation"):
            return ()
        try:
            return msgspec.convert(status.get("speeds") or (), tuple[ClassSpeed, ...])
        except msgspec.ValidationError:
            return ()  # a newer controller wrote them: the planner does not know them either

    async def read_volumes(self, client: Client) -> None:
        """Read the volumes of pods, also of those that were put into the copy.

        Raises ApiError, Unreachable.
        """
        for _ in range(_READINGS_OF_VOLUMES):
            self.list_units(datetime.now(UTC))
            if not await self.volumes.read_once(client):
                break

    def _complete(self, unit: Unit) -> Unit:
        if unit.state == "waiting" or not isinstance(unit.requirement, NodeRequirement):
            return unit
        pod = self._pods.get(unit.objects[0])
        if pod is None:
            return unit
        vendors = self.settings.pods.vendors
        table = read_pools(self.store, vendors)
        service = find_queued_service(self.store, unit.service, table, is_queued_by_default=self._is_queued)
        slices = demand_slices(unit.parts[0], service, vendors)
        found = build_requirement(unpin(pod["spec"]), self.volumes.find_nodes(pod), slices)
        return msgspec.structs.replace(unit, requirement=found)

    def _is_alive(self, host: str) -> bool:
        """Return whether the controller has found a host alive: only it sees the Leases all the time."""
        return has_condition(self.store.get(METAL_HOSTS, host) or {}, "Ready")


async def read_cluster(client: Client, settings: QueueSettings = QueueSettings()) -> ClusterCopy:  # noqa: B008 - same
    """Return a copy of the whole cluster.

    Raises:
        RightsMissing: the user may not read a kind without which nothing can be planned.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    made, refused = ClusterCopy(settings), list[Forbidden]()
    for resource, label in _READ:
        try:
            for obj in (await client.list(resource, label_selector=label)).items:
                made.put(resource, obj)
        except Forbidden as error:
            if resource not in _DECIDES_NOTHING:
                refused.append(error)
    refused += await _read_devices(client, made)
    made.unread_speeds = await _read_speed_facts(client, made)
    if refused:
        raise RightsMissing(refused)
    # Nobody but the controller knows which of them are its own: a forged one misleads a forecast, and no more.
    benchmarks = made.store.by_index(JOBS, BENCHMARK_INDEX, ALL_BENCHMARKS)
    pods = {key: made.store.by_index(PODS, OWNER_INDEX, key) for key in map(owner_key, benchmarks)}
    nodes = {key: next(filter(None, map(find_taken_node, found)), "") for key, found in pods.items()}
    made.registry.set_benchmarks(nodes)
    foreign = made.registry.foreign
    listed = await client.list(PODS, label_selector=FOREIGN, field_selector=TAKES_ROOM, read=foreign.read)
    foreign.replace(PODS, listed.items)
    await made.read_volumes(client)
    return made


async def _read_devices(client: Client, made: ClusterCopy) -> Sequence[Forbidden]:
    """Read devices and claims; return the refusals, if any service selects devices. Raises ApiError, Unreachable."""
    refused: list[Forbidden] = []
    for resource in (RESOURCE_SLICES, RESOURCE_CLAIMS):
        try:
            for obj in (await client.list(resource)).items:
                made.put(resource, obj)
        except NotFound:
            break  # no device can be claimed in this cluster
        except Forbidden as error:
            refused.append(error)
    return refused if any(map(selects_devices, made.store.list(INFERENCE_SERVICES))) else ()


async def _read_speed_facts(client: Client, made: ClusterCopy) -> tuple[Forbidden, ...]:
    """Read the hardware of nodes and the measurements; return the refusals. Raises ApiError, Unreachable."""
    refused: list[Forbidden] = []
    try:
        for obj in (await client.list(NODE_FITNESSES)).items:
            made.put(NODE_FITNESSES, obj)
    except Forbidden as error:
        refused.append(error)
    try:
        for obj in (await client.list(CONFIG_MAPS, CONTROLLER_NAMESPACE, label_selector=SELECTOR)).items:
            made.measured.update(obj)
    except Forbidden as error:
        refused.append(error)
    return tuple(refused)


def unpin(pod_spec: Obj) -> Obj:
    """Return the spec of a pod without the node that the queue has given it."""
    spec: Obj = copy.deepcopy(
        {name: pod_spec[name] for name in ("nodeSelector", "affinity", "tolerations") if name in pod_spec}
    )
    of_nodes = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = of_nodes.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return spec
    terms = [_unpin_term(term) for term in required["nodeSelectorTerms"]]
    if all(terms):
        required["nodeSelectorTerms"] = terms
    else:
        # An empty term stands for one that had the pin alone, which the pod did not have before.
        del of_nodes["requiredDuringSchedulingIgnoredDuringExecution"]
    return spec


def _unpin_term(term: Obj) -> Obj:
    fields = [each for each in term.get("matchFields") or () if each["key"] != "metadata.name"]
    kept = {name: value for name, value in term.items() if name != "matchFields" and value}
    return kept | ({"matchFields": fields} if fields else {})
