"""The facts about a service that decide how its replicas wait in the queue.

Units are built anew only when one of these facts changes, so that a change of a status costs no round anything.
"""

import bisect
import functools
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

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
from crds.meta import POD_TEMPLATE, PRIORITY_RANK, Priority, Toleration
from crds.metalprocess import MetalProcess
from devices.device_class import find_single_class
from devices.vendors import Vendors
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, ObjectKey, object_key
from kube.store import Store


class HostDemands(NamedTuple):
    """The demands of a service on its hosts, of which no process is replaced when they change."""

    selector: frozenset[tuple[str, str]] = frozenset()
    """Labels that a host must have."""
    tolerations: tuple[Toleration, ...] = ()


NO_DEMANDS: Final = HostDemands()


class OwnDeployment(NamedTuple):
    """A Deployment of a service."""

    name: str
    template: str
    """Mark of its present template; empty if an earlier version of Pomona has made it."""


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
        found = self.deployments[index : index + 1]
        return found[0] if found and found[0].name == name else None

    def list_pools(self, accelerator: str) -> tuple[str, ...]:
        """Return the pools that a replica on this accelerator may use, its home first."""
        own = [name for name in self.pools if self.table.find_accelerator(name) in {accelerator, ""}]
        # One that does not exist is no home: each home has limits, and a number of units that a round considers.
        own.sort(key=lambda name: not self.table.find_accelerator(name))
        return tuple(own) or self.pools or self.table.list_pools(accelerator)


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
    spec, status = obj["spec"], obj.get("status") or {}
    is_assessed = status.get("observedGeneration") == obj["metadata"].get("generation")
    scheduling = spec.get("scheduling") or {}
    replacement = status.get("replacement") or {}
    is_replacing = bool(replacement) and "endedAt" not in replacement
    mode = scheduling.get("mode")
    priority = spec.get("priority", "normal")
    return _share(
        QueuedService(
            key=object_key(obj),
            uid=obj["metadata"]["uid"],
            created_at=parse_seconds(obj["metadata"].get("creationTimestamp")) or 0.0,
            priority=priority if priority in PRIORITY_RANK else "normal",
            is_queued=is_queued_by_default if mode is None else mode == "Queue",
            is_protected=bool(spec.get("evictionProtection", False)),
            accelerator=status.get("accelerator") or (spec.get("hardware") or {}).get("accelerator") or "",
            replicas=count_replicas(spec),
            deployments=tuple(sorted(map(_read_deployment, deployments))),
            host_demands=read_host_demands(spec),
            pools=tuple(dict.fromkeys(scheduling.get("pools") or ())),
            table=table,
            # That of an earlier spec may be less than what the pods of this one take.
            device_bytes=status.get("deviceMemoryBytes") if is_assessed else None,
            speeds=read_speeds(status.get("speeds") or (), spec.get("placement") or {}) if is_assessed else NO_SPEEDS,
            is_assessed=is_assessed,
            left_cell=replacement["fromPlace"] if is_replacing else "",
            least_speed=float(replacement["leastTokensPerSecond"]) if is_replacing else 0.0,
        )
    )


def _read_deployment(obj: Obj) -> OwnDeployment:
    return OwnDeployment(obj["metadata"]["name"], read_template_mark(obj["spec"]["template"]))


def read_template_mark(obj: Obj) -> str:
    """Return the mark of a template, or of a pod that was made from one; empty if it has none."""
    mark: str = ((obj.get("metadata") or {}).get("annotations") or {}).get(POD_TEMPLATE, "")
    return mark


def read_host_demands(spec: Obj) -> HostDemands:
    """Return what the spec of a service demands of hosts; tolerations that only a newer version knows are none."""
    try:
        tolerations = msgspec.convert(spec.get("tolerations") or [], tuple[Toleration, ...])
    except msgspec.ValidationError:
        tolerations = ()
    return HostDemands(frozenset((spec.get("nodeSelector") or {}).items()), tolerations)


def read_speeds(classes: Iterable[Obj], demands: Obj) -> SpeedProfile:
    """Return `status.speeds` of a service as the planner reads it: by the class of a single device, as of cells.

    Args:
        classes: `status.speeds`.
        demands: `spec.placement`. A class that is not listed meets none: it came later, or the list is full.
    """
    stated = [(find_single_class(each["deviceClass"]), each) for each in classes]
    unlisted = _find_unlisted_refusal(demands)
    return SpeedProfile(
        tuple((name, float(each["tokensPerSecond"])) for name, each in stated if each.get("tokensPerSecond")),
        frozenset((name, each["refusal"]) for name, each in stated if each.get("refusal")),
        frozenset(name for name, each in stated if not each.get("refusal")) if unlisted else frozenset(),
        unlisted,
    )


def _find_unlisted_refusal(demands: Obj) -> str:
    if demands.get("minTokensPerSecond") is not None:
        return SPEED_UNKNOWN
    return "" if demands.get("minFit", "marginal") == "marginal" else TOO_TIGHT


def require_host(process: MetalProcess, demands: HostDemands) -> HostRequirement:
    """Return the demands of a process and its service on a host."""
    spec = process.spec
    return HostRequirement(
        spec.runtime, process.metadata.namespace, frozenset(spec.features), demands.selector, demands.tolerations
    )


def count_replicas(spec: Obj) -> int:
    """Return the replicas that the spec of a service asks for."""
    replicas: int = spec.get("replicas", 1)
    return 0 if spec.get("suspend") else replicas


@functools.lru_cache(maxsize=8192)
def _share(service: QueuedService) -> QueuedService:
    """Return the object that equal facts share: what is derived from it is kept while its status alone changes."""
    return service


def has_device(need: Amounts, vendors: Vendors) -> bool:
    """Return whether a pod requests a device of any vendor."""
    return any(_find_accelerator(name, vendors) for name, amount in need.items() if amount > 0)


def demand_slices(need: Amounts, service: QueuedService | None, vendors: Vendors) -> SliceDemand | None:
    """Return the demand of a pod on devices that it might share with others; None: it requests none such."""
    bytes_each = service.device_bytes if service is not None else None
    for vendor in vendors.values():
        for resource in (vendor.resource, vendor.shared_resource) if vendor.shared_label else ():
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
        return service.list_pools(accelerator) if accelerator else service.pools
    return (accelerator,) if accelerator else ()


def _accelerator_of(need: Amounts, service: QueuedService | None, vendors: Vendors) -> str:
    """Return the accelerator of a pod: that which its service states, unless the pod requests devices of another."""
    accelerator = service.accelerator if service is not None else ""
    for name, amount in need.items():
        if amount > 0 and (found := _find_accelerator(name, vendors)):
            stated = vendors.get(accelerator)
            return accelerator if stated is not None and stated.offers(name) else found
    return accelerator


def _find_accelerator(resource: str, vendors: Vendors) -> str:
    """Return the accelerator whose devices a resource counts; empty if it counts none."""
    if "/" not in resource:
        return ""
    return next((name for name, vendor in vendors.items() if vendor.offers(resource)), "")
