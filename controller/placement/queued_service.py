"""The facts about a service that decide how its replicas wait in the queue."""

import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from controller.placement.queue_places import parse_seconds
from controller.placement.units import Amounts, HostRequirement, UnitKind
from controller.reconcile.indexes import OWNER_INDEX, namespaced
from crds.meta import PRIORITY_RANK, Priority, Toleration
from crds.metalprocess import MetalProcess
from devices.vendors import Vendors
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, ObjectKey, object_key
from kube.store import Store

METAL: Final = "metal"


class HostDemands(NamedTuple):
    """The demands of a service on its hosts, of which no process is replaced when they change."""

    selector: frozenset[tuple[str, str]] = frozenset()
    """Labels that a host must have."""
    tolerations: tuple[Toleration, ...] = ()


NO_DEMANDS: Final = HostDemands()


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
    deployments: frozenset[str]
    """Names of its Deployments."""
    host_demands: HostDemands = NO_DEMANDS


def find_queued_service(store: Store, key: ObjectKey, *, is_queued_by_default: bool) -> QueuedService | None:
    """Return a service of the store: the same object while nothing of it has changed that the queue reads."""
    obj = store.get(INFERENCE_SERVICES, key.name, key.namespace)
    if obj is None:
        return None
    deployments = store.by_index(DEPLOYMENTS, OWNER_INDEX, namespaced(key.namespace, obj["metadata"]["uid"]))
    compute = functools.partial(_read_service, obj, deployments, is_queued_by_default=is_queued_by_default)
    return store.derive(INFERENCE_SERVICES, obj, "queued-service", compute, deployments, is_queued_by_default)


def _read_service(obj: Obj, deployments: Sequence[Obj], *, is_queued_by_default: bool) -> QueuedService:
    spec, status = obj["spec"], obj.get("status") or {}
    mode = (spec.get("scheduling") or {}).get("mode")
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
            deployments=frozenset(each["metadata"]["name"] for each in deployments),
            host_demands=read_host_demands(spec),
        )
    )


def read_host_demands(spec: Obj) -> HostDemands:
    """Return what the spec of a service demands of hosts; tolerations that only a newer version knows are none."""
    try:
        tolerations = msgspec.convert(spec.get("tolerations") or [], tuple[Toleration, ...])
    except msgspec.ValidationError:
        tolerations = ()
    return HostDemands(frozenset((spec.get("nodeSelector") or {}).items()), tolerations)


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


def pools_of(kind: UnitKind, need: Amounts, accelerator: str, vendors: Vendors) -> tuple[str, ...]:
    """Return the pools that a unit may use, the preferred one first.

    Args:
        kind: its kind.
        need: what one part of it needs.
        accelerator: the accelerator that its service states, or empty.
        vendors: the table of accelerators.
    """
    if kind == "process":
        return (METAL,)
    for name, amount in need.items():
        if amount > 0 and (found := _find_accelerator(name, vendors)):
            stated = vendors.get(accelerator)
            return (accelerator,) if stated is not None and stated.offers(name) else (found,)
    return (accelerator,) if accelerator else ()


def _find_accelerator(resource: str, vendors: Vendors) -> str:
    """Return the accelerator whose devices a resource counts; empty if it counts none."""
    if "/" not in resource:
        return ""
    return next((name for name, vendor in vendors.items() if vendor.offers(resource)), "")
