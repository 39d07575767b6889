"""A copy of the cluster by which the queue is decided: a view that was read once. Nothing is written.

What is put into its store changes the copy alone, and the controller's own functions decide by it.
"""

import copy
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from controller.placement.bound_volumes import BoundVolumes
from controller.placement.cluster_view import MACHINE_KINDS, ClusterView
from controller.placement.device_feed import selects_devices
from controller.placement.observed_units import observe_units
from controller.placement.planner import MIN_RUN_SECONDS, PlanRules
from controller.placement.pod_units import build_requirement
from controller.placement.pool_table import read_pools
from controller.placement.queued_service import demand_slices, find_queued_service
from controller.placement.units import Cell, NodeRequirement, Unit
from controller.pod_settings import PodSettings
from crds.meta import OURS
from crds.placement import ClassSpeed
from devices.vendors import Vendors
from kube.client import Client, Obj
from kube.errors import Forbidden
from kube.resources import (
    ACCELERATOR_POOLS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    NODE_FITNESSES,
    PODS,
    PVCS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    ObjectKey,
    Resource,
)
from kube.watch import Selection

_QUEUE_KINDS: Final[Sequence[Selection]] = (
    *MACHINE_KINDS,
    *map(Selection, (ACCELERATOR_POOLS, RESOURCE_SLICES, RESOURCE_CLAIMS)),
    *(Selection(resource, label_selector=OURS) for resource in (DEPLOYMENTS, PVCS, ENDPOINT_SLICES)),
)
"""All by which the queue is decided."""
_SPEED_FACTS: Final = frozenset({NODE_FITNESSES, CONFIG_MAPS})
_DECIDES_NOTHING: Final = frozenset({PVCS, ENDPOINT_SLICES, *_SPEED_FACTS})
"""Kinds without which a plan is still made: of these, what users may not read counts as absent."""
UNKNOWN_IMAGE: Final = "pomona"
"""Image of Pomona in the pods of a plan, if that of the controller is not known."""
_READINGS_OF_VOLUMES: Final = 3
"""A claim names its volume, which is read next."""


class QueueSettings(NamedTuple):
    """The options of the controller by which the queue is decided."""

    pods: PodSettings = PodSettings(image=UNKNOWN_IMAGE)
    min_run_seconds: float = MIN_RUN_SECONDS


class QueueReading(NamedTuple):
    """The cluster as a user has read it."""

    view: ClusterView
    """A view by `open_queue_view`."""
    refusals: Mapping[Resource, Forbidden]
    """Errors of the kinds that the user may not read."""
    settings: QueueSettings


class RightsMissing(Exception):  # noqa: N818 - it names what is missing
    """The user may not read all that a plan needs."""

    def __init__(self, refusals: Sequence[Forbidden]) -> None:
        """Collect the refusals, one for each kind that may not be read."""
        super().__init__("; ".join(map(str, refusals)))
        self.refusals = tuple(refusals)
        """One for each kind."""


def open_queue_view(vendors: Vendors) -> ClusterView:
    """Return an empty view of all by which the queue is decided."""
    # Pods as a whole: the controller keeps no rules of a pod that has a node, and its successor has the same.
    return ClusterView(vendors, _QUEUE_KINDS, parts={PODS: lambda pod: pod})


class ClusterCopy:
    """The copy.

    Args:
        settings: the options of the controller.
        view: the cluster as it was read; None: nothing of it.
    """

    def __init__(self, settings: QueueSettings = QueueSettings(), view: ClusterView | None = None) -> None:  # noqa: B008
        """Make a copy from a view that has been read; without a view, an empty one."""
        self.settings = settings
        self.view = view or open_queue_view(settings.pods.vendors)
        # The objects, the cells (nodes and hosts) that follow from them, and the speeds that benchmarks have measured.
        self.store, self.registry, self.measured = self.view.store, self.view.registry, self.view.measured
        self.volumes = BoundVolumes(self.store, self.registry)
        self.unread_speeds: tuple[Forbidden, ...] = ()
        """Errors of kinds, such as NodeFitness, that the user may not read: a plan then knows fewer speeds."""

    @property
    def rules(self) -> PlanRules:
        """The rules of the plan."""
        table = read_pools(self.store, self.settings.pods.vendors)
        return PlanRules(min_run_seconds=self.settings.min_run_seconds, pools=table.rules, quotas=table.quotas)

    @property
    def _is_queued(self) -> bool:
        """True if services that state no mode are in mode Queue."""
        return self.settings.pods.scheduling_mode == "Queue"

    def list_cells(self) -> tuple[Cell, ...]:
        """Return all cells as they are now."""
        return tuple(self.registry.list_cells())

    def list_units(self, now: datetime) -> tuple[Unit, ...]:
        """Return all units as they are now, also those that run, for a plan that may move them.

        Each has its rules about nodes, and the claimed devices that its end would free for other needs.
        """
        observed = observe_units(
            self.store,
            self.settings.pods.vendors,
            now,
            is_queued_by_default=self._is_queued,
            find_volume_nodes=self.volumes.find_nodes,
        )
        return tuple(self.registry.devices.add_freed(self._add_node_rules(unit)) for unit in observed.units)

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

        Which volumes are needed is found by listing the units: each volume that is unknown is noted as wanted. A claim
        names its volume, so several readings may be needed.

        Raises ApiError, Unreachable.
        """
        for _ in range(_READINGS_OF_VOLUMES):
            # Called for its side effect: it notes the volumes that have not been read yet.
            self.list_units(datetime.now(UTC))
            if not await self.volumes.read_once(client):
                break

    def _add_node_rules(self, unit: Unit) -> Unit:
        """Return a unit with its rules about nodes, as they were before the queue pinned its pod to a node.

        The queue itself needs no rules for a pod that has its node, so a unit that runs has none. Units that wait, and
        those that are no pods, are returned as they are.
        """
        if unit.state == "waiting" or not isinstance(unit.requirement, NodeRequirement):
            return unit
        key = unit.objects[0]  # the first pod of a gang stands for all
        pod = self.store.get(PODS, key.name, key.namespace)
        if pod is None:
            return unit

        vendors = self.settings.pods.vendors
        table = read_pools(self.store, vendors)
        service = find_queued_service(self.store, unit.service, table, is_queued_by_default=self._is_queued)
        # The demand on devices that several pods may share; None: the pod requests none.
        slices = demand_slices(unit.parts[0], service, vendors)
        node_requirement = build_requirement(unpin(pod["spec"]), self.volumes.find_nodes(pod), slices)
        return msgspec.structs.replace(unit, requirement=node_requirement)


async def copy_reading(client: Client, reading: QueueReading) -> ClusterCopy:
    """Return a copy of the cluster as it was read; the volumes of its pods are read here.

    Of what the user may not read, kinds that decide nothing count as empty. Devices and claims (DRA) are needed only if
    a service selects devices.

    Raises:
        RightsMissing: the user may not read a kind without which nothing can be planned.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    copied, refusals = ClusterCopy(reading.settings, reading.view), reading.refusals

    # 1. Kinds without which a plan is still made, such as NodeFitness, by which speeds are estimated.
    unneeded_kinds = _DECIDES_NOTHING
    if not any(map(selects_devices, copied.store.list(INFERENCE_SERVICES))):
        unneeded_kinds |= {RESOURCE_SLICES, RESOURCE_CLAIMS}
    if missing := [refused for kind, refused in refusals.items() if kind not in unneeded_kinds]:
        raise RightsMissing(missing)

    # 2. Kinds without which the plan only knows fewer speeds; it says so.
    copied.unread_speeds = tuple(refused for kind, refused in refusals.items() if kind in _SPEED_FACTS)
    await copied.read_volumes(client)
    return copied


def unpin(pod_spec: Obj) -> Obj:
    """Return the spec of a pod without the node that the queue has given it."""
    spec: Obj = copy.deepcopy(
        {name: pod_spec[name] for name in ("nodeSelector", "affinity", "tolerations") if name in pod_spec}
    )
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return spec

    terms = [_unpin_term(term) for term in required["nodeSelectorTerms"]]
    if all(terms):
        required["nodeSelectorTerms"] = terms
    else:
        # An empty term stands for one that had the pin alone, which the pod did not have before.
        del node_affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    return spec


def _unpin_term(term: Obj) -> Obj:
    """Return a term without the requirements that name a node; empty if it had no other ones."""
    # The queue pins a pod by this field of a node.
    kept_fields = [field for field in term.get("matchFields") or () if field["key"] != "metadata.name"]
    unpinned = {name: value for name, value in term.items() if name != "matchFields" and value}
    if kept_fields:
        unpinned["matchFields"] = kept_fields
    return unpinned
