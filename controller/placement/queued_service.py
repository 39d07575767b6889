"""The facts about a service that decide how its replicas wait in the queue.

Units are built anew only when one of these facts changes, so that a change of a status costs no round anything.
"""

import bisect
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from controller.placement.pool_table import METAL, NO_POOLS, PoolTable
from controller.placement.queue_places import parse_seconds
from controller.placement.units import (
    NO_SPEEDS,
    SPEED_UNKNOWN,
    TOO_TIGHT,
    Amounts,
    HostRequirement,
    SliceDemand,
    SpeedProfile,
    UnitKind,
)
from controller.reconcile.indexes import OWNER_INDEX, namespaced
from crds.inferenceservice import ReplicaDemand, ScaledService, wanted_replicas
from crds.meta import POD_TEMPLATE, PRIORITY_RANK, ApiStruct, ObjectMeta, Priority, Toleration
from crds.metalprocess import MetalProcess
from crds.placement import ClassSpeed, PlacementDemands
from devices.device_class import find_single_class
from devices.vendors import Vendors
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, ObjectKey
from kube.store import Store


class HostDemands(NamedTuple):
    """The demands of a service on its hosts, of which no process is replaced when they change."""

    selector: frozenset[tuple[str, str]] = frozenset()
    """Labels that a host must have."""
    tolerations: tuple[Toleration, ...] = ()


NO_DEMANDS: Final = HostDemands()


class _StatedHardware(ApiStruct, frozen=True):
    accelerator: str = ""


class _StatedScheduling(ApiStruct, frozen=True):
    mode: str | None = None
    pools: list[str] = []


class _StatedPlacement(ApiStruct, frozen=True):
    min_tokens_per_second: int | None = None
    min_fit: str = "marginal"


class _StatedSpeed(ApiStruct, frozen=True):
    device_class: str
    tokens_per_second: str | None = None
    refusal: str | None = None


class _ShownReplacement(ApiStruct, frozen=True):
    from_place: str = ""
    least_tokens_per_second: str = "0"
    ended_at: str | None = None


class QueuedServiceSpec(ReplicaDemand, frozen=True):
    """The part of the spec of a service that the queue reads."""

    priority: str = "normal"
    eviction_protection: bool = False
    hardware: _StatedHardware = _StatedHardware()
    scheduling: _StatedScheduling = _StatedScheduling()
    placement: _StatedPlacement = _StatedPlacement()
    node_selector: dict[str, str] = {}
    tolerations: list[Any] = []


class _QueuedServiceStatus(ApiStruct, frozen=True):
    observed_generation: int | None = None
    accelerator: str = ""
    device_memory_bytes: int | None = None
    speeds: list[_StatedSpeed] = []
    replacement: _ShownReplacement | None = None


class QueuedServiceObject(ScaledService, frozen=True, kw_only=True):
    """The part of a service that the queue reads, with any values: one of a newer version keeps its place."""

    metadata: ObjectMeta
    spec: QueuedServiceSpec = QueuedServiceSpec()
    status: _QueuedServiceStatus = _QueuedServiceStatus()


class OwnDeployment(NamedTuple):
    """A Deployment of a service."""

    name: str
    template: str
    """Mark of its present template; empty if it has none."""


class QueuedService(NamedTuple):
    """An InferenceService as the queue sees it; its other changes change no unit."""

    key: ObjectKey
    uid: str
    created_at: float
    """In seconds since 1970."""
    priority: Priority
    is_queued: bool
    """Its pods wait in the queue, and may be evicted for others of it."""
    is_protected: bool
    accelerator: str
    """Accelerator of its replicas; empty if the service does not say."""
    replicas: int
    deployments: tuple[OwnDeployment, ...]
    """Its Deployments, by name."""
    host_demands: HostDemands = NO_DEMANDS
    pools: tuple[str, ...] = ()
    """Pools that it names, in its order; none: all of its accelerator."""
    table: PoolTable = NO_POOLS
    """All pools."""
    device_bytes: int | None = None
    """Memory that a replica takes of each of its devices; None: unknown."""
    speeds: SpeedProfile = NO_SPEEDS
    """Speed of a replica by device class."""
    is_assessed: bool = True
    """Its status is of the present spec, so that the speeds are, too."""
    left_cell: str = ""
    """`Cell.id` of the place that a slow replica leaves, which a waiting one replaces; empty if none does."""
    least_speed: float = 0.0
    """Least speed of the place that it goes to, in tokens/s."""

    def find_deployment(self, name: str) -> OwnDeployment | None:
        """Return its Deployment of this name, or None."""
        index = bisect.bisect_left(self.deployments, (name,))
        candidates = self.deployments[index : index + 1]
        return candidates[0] if candidates and candidates[0].name == name else None

    def list_pools(self, accelerator: str) -> tuple[str, ...]:
        """Return the pools that a replica on this accelerator may use, its home first."""
        # A pool that does not exist has no accelerator (empty), and may yet be made.
        usable = [name for name in self.pools if self.table.find_accelerator(name) in {accelerator, ""}]
        # A pool that does not exist comes last, since it cannot be the home, by which limits count.
        usable.sort(key=lambda name: not self.table.find_accelerator(name))
        if usable:
            return tuple(usable)
        # If all pools that the service names are of other accelerators, its replica waits in these.
        return self.pools or self.table.list_pools(accelerator)


def find_queued_service(
    store: Store, key: ObjectKey, table: PoolTable, *, is_queued_by_default: bool
) -> QueuedService | None:
    """Return a service of the store: the same object while nothing of it has changed that the queue reads."""
    obj = store.get(INFERENCE_SERVICES, key.name, key.namespace)
    if obj is None:
        return None
    deployments = store.by_index(DEPLOYMENTS, OWNER_INDEX, namespaced(key.namespace, obj["metadata"]["uid"]))
    compute = functools.partial(_read_service, obj, deployments, table, is_queued_by_default=is_queued_by_default)
    return store.derive(INFERENCE_SERVICES, obj, "queued-service", compute, deployments, table, is_queued_by_default)


def _read_service(
    obj: Obj, deployments: Sequence[Obj], table: PoolTable, *, is_queued_by_default: bool
) -> QueuedService:
    """Return the facts of a service that the queue reads; equal facts are the same object.

    While the status is of an earlier spec (`is_assessed` is False), what it says of memory and speeds does not count.
    """
    service = msgspec.convert(obj, QueuedServiceObject)
    metadata, spec, status = service.metadata, service.spec, service.status
    is_assessed = status.observed_generation == metadata.generation

    # Only a replacement of a slow replica that is under way counts: an ended one leaves empty defaults.
    last = status.replacement
    replacement = last if last is not None and last.ended_at is None else _ShownReplacement()

    mode = spec.scheduling.mode
    return _share(
        QueuedService(
            key=ObjectKey(metadata.namespace, metadata.name),
            uid=metadata.uid,
            created_at=parse_seconds(metadata.creation_timestamp) or 0.0,
            # A priority that only a newer version knows counts as normal.
            priority=next((priority for priority in PRIORITY_RANK if priority == spec.priority), "normal"),
            is_queued=is_queued_by_default if mode is None else mode == "Queue",
            is_protected=spec.eviction_protection,
            accelerator=status.accelerator or spec.hardware.accelerator,
            replicas=wanted_replicas(service),
            deployments=tuple(sorted(map(_read_deployment, deployments))),
            host_demands=read_host_demands(spec),
            pools=tuple(dict.fromkeys(spec.scheduling.pools)),  # each once
            table=table,
            # That of an earlier spec may be less than what the pods of this one take.
            device_bytes=status.device_memory_bytes if is_assessed else None,
            speeds=read_speeds(status.speeds, spec.placement) if is_assessed else NO_SPEEDS,
            is_assessed=is_assessed,
            left_cell=replacement.from_place,
            least_speed=float(replacement.least_tokens_per_second or 0),
        )
    )


def _read_deployment(obj: Obj) -> OwnDeployment:
    """Return name and template mark of a Deployment."""
    return OwnDeployment(obj["metadata"]["name"], read_template_mark(obj["spec"]["template"]))


def read_template_mark(obj: Obj) -> str:
    """Return the mark of a template, or of a pod that was made from one; empty if it has none."""
    mark: str = ((obj.get("metadata") or {}).get("annotations") or {}).get(POD_TEMPLATE, "")
    return mark


def read_host_demands(spec: QueuedServiceSpec) -> HostDemands:
    """Return what the spec of a service demands of hosts; tolerations that only a newer version knows are none."""
    try:
        tolerations = msgspec.convert(spec.tolerations, tuple[Toleration, ...])
    except msgspec.ValidationError:
        tolerations = ()
    return HostDemands(frozenset(spec.node_selector.items()), tolerations)


def read_speeds(
    speeds: Iterable[_StatedSpeed | ClassSpeed], demands: _StatedPlacement | PlacementDemands
) -> SpeedProfile:
    """Return `status.speeds` of a service as the planner reads it: by the class of a single device, as of cells.

    If the service demands a speed or a fit, a class that is not listed is refused: it came later, or the list is full.

    Args:
        speeds: `status.speeds`.
        demands: `spec.placement`.
    """
    stated = [(find_single_class(speed.device_class), speed) for speed in speeds]
    unlisted = _find_unlisted_refusal(demands)  # the reason; empty: a class that is not listed is accepted
    return SpeedProfile(
        speeds=tuple((name, float(speed.tokens_per_second)) for name, speed in stated if speed.tokens_per_second),
        refused=frozenset((name, speed.refusal) for name, speed in stated if speed.refusal),
        # Only needed where unlisted classes are refused.
        accepted=frozenset(name for name, speed in stated if not speed.refusal) if unlisted else frozenset(),
        unlisted=unlisted,
    )


def _find_unlisted_refusal(demands: _StatedPlacement | PlacementDemands) -> str:
    """Return why a device class that is not listed in `status.speeds` is refused; empty if it is not."""
    if demands.min_tokens_per_second is not None:
        return SPEED_UNKNOWN
    return "" if demands.min_fit == "marginal" else TOO_TIGHT


def require_host(process: MetalProcess, demands: HostDemands) -> HostRequirement:
    """Return the demands of a process and its service on a host."""
    spec = process.spec
    return HostRequirement(spec.runtime, process.metadata.namespace, demands.selector, demands.tolerations)


@functools.lru_cache(maxsize=8192)
def _share(service: QueuedService) -> QueuedService:
    """Return one shared object for equal facts, so that what is derived from it stays cached."""
    return service


def has_device(need: Amounts, vendors: Vendors) -> bool:
    """Return whether a pod requests a device of any vendor."""
    return any(_find_accelerator(name, vendors) for name, amount in need.items() if amount > 0)


def demand_slices(need: Amounts, service: QueuedService | None, vendors: Vendors) -> SliceDemand | None:
    """Return the demand of a pod on devices that it might share with others, or None if it requests none.

    It requests a part of a device by the vendor's resource for shared devices, or whole devices, which a node may
    share.
    """
    bytes_each = service.device_bytes if service is not None else None  # None: unknown so far
    for vendor in vendors.values():
        # Only a vendor with a label for shared devices has any.
        if not vendor.shared_label:
            continue
        for resource in (vendor.resource, vendor.shared_resource):
            if resource is not None and (number := need.get(resource, 0)) > 0:
                return SliceDemand(number, bytes_each, wants_slice=resource == vendor.shared_resource)
    return None


def pools_of(kind: UnitKind, need: Amounts, service: QueuedService | None, vendors: Vendors) -> tuple[str, ...]:
    """Return the pools that a unit may use, its home first.

    Args:
        kind: its kind.
        need: what one part of it needs.
        service: its service; None: it has none any more, and waits for nothing.
        vendors: the table of accelerators.
    """
    accelerator = METAL if kind == "process" else _accelerator_of(need, service, vendors)
    if service is not None:
        # Without an accelerator it waits in all pools that the service names.
        return service.list_pools(accelerator) if accelerator else service.pools
    return (accelerator,) if accelerator else ()


def _accelerator_of(need: Amounts, service: QueuedService | None, vendors: Vendors) -> str:
    """Return the accelerator of a pod: that which its service states, unless the pod requests devices of another."""
    stated = service.accelerator if service is not None else ""
    for name, amount in need.items():
        if amount > 0 and (requested := _find_accelerator(name, vendors)):
            # Several accelerators may have devices of one resource: then the stated one counts.
            vendor = vendors.get(stated)
            return stated if vendor is not None and vendor.offers(name) else requested
    return stated


def _find_accelerator(resource: str, vendors: Vendors) -> str:
    """Return the accelerator whose devices a resource counts; empty if it counts none."""
    if "/" not in resource:
        return ""
    return next((name for name, vendor in vendors.items() if vendor.offers(resource)), "")
