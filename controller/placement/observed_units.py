"""The units of the queue as the objects of the store say: what waits, what runs, and what ends.

Each object is read once while it and the facts of its service stay as they are, and what concerns a service as a whole
only when one of its objects has changed. So a round costs as much as there are services, and as what has changed.
"""

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog

from controller.placement.displacement import HostOrders, find_displacements, list_moved, read_orders
from controller.placement.pod_units import PodReplica, build_pod_replica, join_gangs
from controller.placement.pool_table import read_pools
from controller.placement.process_units import build_process_replica, compare_siblings
from controller.placement.queue_places import (
    ReplicaUnit,
    assign_places,
    assign_predecessors,
    find_superseded,
    format_place,
    list_open_places,
    parse_seconds,
)
from controller.placement.queued_service import QueuedService, QueuedServiceObject, find_queued_service
from controller.placement.round_pacer import ProcessorMeter
from controller.placement.units import Nomination, Unit, UnitKey
from controller.reconcile.indexes import GATE_INDEX, OWNER_INDEX, SERVICE_INDEX, controller_of, namespaced
from controller.reconcile.plan import decode_stored
from crds.inferenceservice import wanted_replicas
from crds.meta import NOMINATED
from crds.metalprocess import MetalProcess
from crds.serving import DRAIN_SECONDS
from devices.vendors import Vendors
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, PODS, ObjectKey, object_key
from kube.store import Store

LATE_SECONDS: Final = 30.0
"""Time after which what should have ended makes no room any more: its node is lost, or its host does not heed."""
MOST_GRACE_SECONDS: Final = DRAIN_SECONDS + 120.0
"""Time before its end from which a unit makes room: what the queue evicts ends within it, and whoever else deletes a
pod chooses how long it may take."""
FindVolumeNodes = Callable[[Obj], frozenset[str] | None]
"""Returns the only nodes on which the volumes of a waiting pod can be; None: they hold it nowhere."""
_VolumeNodes = tuple[tuple[str, frozenset[str] | None], ...]
"""By uid of each waiting pod of a service that mounts a claim."""
_NO_ORDERS: Final[Mapping[str, HostOrders]] = MappingProxyType({})
_NO_PLACES: Final[Mapping[str, Sequence[str]]] = MappingProxyType({})

_Shared = TypeVar("_Shared", bound=tuple[object, ...])

log = structlog.get_logger()


class ObservedUnits(NamedTuple):
    """The units of the queue."""

    units: tuple[Unit, ...]
    """Units of all services, with the places that `places` gives them."""
    places: Mapping[UnitKey, str]
    """Annotations ENQUEUED_AT that waiting pods and processes are to get."""
    open_places: Mapping[str, tuple[str, ...]]
    """Freed places that are still to be inherited, by uid of the service; all others are spent."""
    again_seconds: float | None = None
    """Time after which the next unit that ends makes room, or makes none any more if it still has not ended."""


class _ServiceUnits(NamedTuple):
    """The units of one service, kept while none of its objects changes."""

    units: tuple[Unit, ...]
    """Units that wait or run."""
    ending: tuple[ReplicaUnit, ...]
    places: Mapping[UnitKey, str]
    open_places: tuple[str, ...]


class _ServiceObjects(NamedTuple):
    pods: Sequence[Obj]
    processes: Sequence[Sequence[Obj]]
    """Processes of each owner that has or had the name of the service."""
    volume_nodes: _VolumeNodes = ()
    orders: Mapping[str, HostOrders] = _NO_ORDERS


def observe_units(
    store: Store,
    vendors: Vendors,
    now: datetime,
    freed_places: Mapping[str, Sequence[str]] = _NO_PLACES,
    *,
    is_queued_by_default: bool = True,
    find_volume_nodes: FindVolumeNodes = lambda _pod: None,
) -> ObservedUnits:
    """Return the units of the store. The arguments are those of `observe_units_in_steps`."""
    steps = observe_units_in_steps(
        store,
        vendors,
        now,
        freed_places,
        is_queued_by_default=is_queued_by_default,
        find_volume_nodes=find_volume_nodes,
    )
    return next(step for step in steps if step is not None)


def observe_units_in_steps(
    store: Store,
    vendors: Vendors,
    now: datetime,
    freed_places: Mapping[str, Sequence[str]],
    *,
    is_queued_by_default: bool,
    find_volume_nodes: FindVolumeNodes,
) -> Iterator[ObservedUnits | None]:
    """Read the pods and processes of the store as units: yield None after each service, and at last the units.

    Units are kept for each service until one of its inputs changes; what is read anew is computed in the step of the
    service, so that a caller may do other things between two steps.

    Args:
        store: the watch cache.
        vendors: the table of accelerators.
        now: the wall clock.
        freed_places: queue places of units that are gone, evicted or not, by uid of the service, as texts of
            `format_place`: waiting units of the service inherit them.
        is_queued_by_default: services that state no mode are in mode Queue.
        find_volume_nodes: finds the nodes of the volumes of a waiting pod.
    """
    # What the result is made of, service by service.
    units: list[Unit] = []
    judged_at: list[float] = []  # the moments at which the queue must be planned again
    places: dict[UnitKey, str] = {}
    open_places: dict[str, tuple[str, ...]] = {}
    unvisited = dict(freed_places)  # those of services without any pod or process remain

    # `orders`: by host, what its administrator orders: to drain it, or to evict by taints.
    table, orders = read_pools(store, vendors), read_orders(store)
    for key, grouped in sorted(_group_by_service(store).items()):
        # 1. Collect what the units of this service depend on; None: the service is gone, its pods or processes are not.
        service = find_queued_service(store, key, table, is_queued_by_default=is_queued_by_default)
        freed: tuple[str, ...] = ()
        if service is not None and service.uid in unvisited:
            # `_share` returns the same object for equal texts: the store recognises unchanged inputs by identity.
            freed = _share(tuple(unvisited.pop(service.uid)))
        volume_nodes = _find_volume_nodes(store, key, find_volume_nodes)
        objects = grouped._replace(volume_nodes=volume_nodes, orders=orders)

        # 2. Read its units, or take those of the last time if nothing has changed.
        service_units = _derive_service_units(store, service, objects, vendors, freed)
        units += service_units.units
        units += [_judge_ending(replica, now.timestamp()) for replica in service_units.ending]
        ends = [replica.ends_by for replica in service_units.ending if replica.ends_by is not None]
        # `_judge_ending` decides otherwise from these moments on.
        judged_at += [moment + seconds for moment in ends for seconds in (-MOST_GRACE_SECONDS, LATE_SECONDS)]
        places.update(service_units.places)
        if service is not None and service_units.open_places:
            open_places[service.uid] = service_units.open_places
        yield None

    waits = (moment - now.timestamp() for moment in judged_at)
    again_seconds = min((seconds for seconds in waits if seconds >= 0), default=None)
    yield ObservedUnits(tuple(units), places, open_places | _keep_unvisited(store, unvisited), again_seconds)


async def take_last_step(steps: Iterable[ObservedUnits | None], seconds: float, meter: ProcessorMeter) -> ObservedUnits:
    """Return the units once they are read, in steps that block the event loop for `seconds` at most.

    The meter counts the processor time of that.
    """
    remaining = iter(steps)
    while True:
        with meter.running():
            units = _take_steps(remaining, seconds)
        if units is not None:
            return units
        await asyncio.sleep(0)


def _take_steps(steps: Iterator[ObservedUnits | None], seconds: float) -> ObservedUnits | None:
    """Take steps for some seconds; return the units, or None if there are steps left."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    for step in steps:
        if step is not None or loop.time() >= until:
            return step
    raise AssertionError("the last step returns the units")


def _keep_unvisited(store: Store, freed_places: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the freed places of services that have no pod or process now, by uid of the service.

    Their pods may still come. At most as many places are kept as the service wants replicas, the earliest ones.
    """
    if not freed_places:
        return {}
    services = decode_stored(store, INFERENCE_SERVICES, store.list(INFERENCE_SERVICES), QueuedServiceObject)
    wanted = {service.metadata.uid: wanted_replicas(service) for service in services}
    return {
        uid: tuple(sorted(freed)[: wanted[uid]]) for uid, freed in freed_places.items() if freed and wanted.get(uid)
    }


def _group_by_service(store: Store) -> dict[ObjectKey, _ServiceObjects]:
    """Return the pods and processes of the store by their service.

    The indexes group them already: pods by the name of their service, processes by the uid of their owner. So only the
    first process of each owner is looked at, for the owner's name.
    """
    # 1. The processes of each service, in one list for each owner that has or had its name.
    processes: dict[ObjectKey, list[Sequence[Obj]]] = {}
    # A value of the index is NAMESPACE/UID of the owner; `controller_of` returns the owner reference of a child.
    for owner in store.index_values(METAL_PROCESSES, OWNER_INDEX):
        children = store.by_index(METAL_PROCESSES, OWNER_INDEX, owner)
        reference = controller_of(children[0])
        if reference is not None and reference.get("kind") == "InferenceService":
            processes.setdefault(ObjectKey(owner.partition("/")[0], reference["name"]), []).append(children)

    # 2. With the pods of each service, if it has any.
    by_service = {key: _ServiceObjects((), children) for key, children in processes.items()}  # without pods so far
    for named in store.index_values(PODS, SERVICE_INDEX):
        key = _parse_key(named)
        by_service[key] = _ServiceObjects(store.by_index(PODS, SERVICE_INDEX, named), processes.get(key, ()))
    return by_service


@functools.lru_cache(maxsize=16_384)
def _parse_key(named: str) -> ObjectKey:
    """Return the key of a service by its value in an index."""
    return ObjectKey(*named.split("/", 1))


def _find_volume_nodes(store: Store, key: ObjectKey, find_volume_nodes: FindVolumeNodes) -> _VolumeNodes:
    """Return the nodes of the volumes of a service's waiting pods, by uid; equal answers are the same object.

    GATE_INDEX has the pods that wait for the queue and mount a volume claim; the nodes of others are not looked up.
    """
    waiting = store.by_index(PODS, GATE_INDEX, namespaced(key.namespace, key.name))
    if not waiting:
        return ()
    volume_nodes: _VolumeNodes = _share(tuple((pod["metadata"]["uid"], find_volume_nodes(pod)) for pod in waiting))
    return volume_nodes


def _derive_service_units(
    store: Store, service: QueuedService | None, objects: _ServiceObjects, vendors: Vendors, freed: tuple[str, ...]
) -> _ServiceUnits:
    """Return the units of a service, built anew only when one of the inputs has become another object.

    The store keeps the result with the first object of the service: its first pod, or else its first process.
    """
    pods, processes, volume_nodes, orders = objects
    resource, first = (PODS, pods[0]) if pods else (METAL_PROCESSES, processes[0][0])
    compute = functools.partial(_build_service_units, store, service, objects, vendors, freed)
    inputs = (service, vendors, freed, orders, volume_nodes, pods, *processes)
    return store.derive(resource, first, "service-units", compute, *inputs)


def _read_replicas(
    store: Store, service: QueuedService | None, objects: _ServiceObjects, vendors: Vendors
) -> list[ReplicaUnit]:
    """Return the pods and processes of a service as replicas: units, each with what decides about its place.

    The pods of a gang are one replica. Each object is read anew only if it or the facts of its service have changed.
    """
    nodes = dict(objects.volume_nodes)  # by uid of a pod, the only nodes on which its volumes can be
    derived = (
        _derive_pod_replica(store, pod, service, vendors, nodes.get(pod["metadata"]["uid"])) for pod in objects.pods
    )
    replicas = join_gangs([pod_replica for pod_replica in derived if pod_replica is not None])
    for children in objects.processes:
        replicas += _list_process_replicas(store, children, service, vendors, objects.orders)
    return replicas


def _build_service_units(
    store: Store, service: QueuedService | None, objects: _ServiceObjects, vendors: Vendors, freed: tuple[str, ...]
) -> _ServiceUnits:
    """Return the units of a service, with the queue places that they inherit and the units that they replace.

    A place is the time since when a replica waits. The successor of a pod that has ended, or that a rollout replaces,
    inherits its place. Units that wait and are not wanted any more are marked as superseded.
    """
    # 1. Decide which place each unit inherits, and which earlier units it replaces.
    replicas = _read_replicas(store, service, objects, vendors)
    freed_texts = _parse_freed(service, freed)  # places of units that are gone: texts by time
    # Pods of an earlier service of the same name may still end: no unit here inherits their places.
    of_this_service = [
        replica for replica in replicas if service is not None and replica.unit.enqueued_at >= service.created_at
    ]
    wanted = service.replicas if service is not None else 0
    assigned, replaces = assign_places(of_this_service, freed_texts, wanted), assign_predecessors(of_this_service)
    superseded = find_superseded(of_this_service, wanted)

    # 2. Note in the units that wait or run what was decided.
    units = []
    for replica in replicas:
        unit, uid = replica.unit, replica.unit.uid
        if unit.state == "ending":
            continue
        if uid in assigned or uid in replaces or uid in superseded:
            unit = msgspec.structs.replace(
                unit,
                enqueued_at=assigned.get(uid, unit.enqueued_at),
                replaces=replaces.get(uid, frozenset()),
                is_superseded=uid in superseded,
            )
        units.append(unit)

    # 3. Collect the places to be noted in annotations: each pod of a gang gets the place of its unit.
    places = {
        UnitKey("process" if unit.key.kind == "process" else "pod", *name): format_place(unit.enqueued_at)
        for unit in units
        if unit.uid in assigned
        for name in unit.objects
    }

    # 4. Collect the places of units that are gone which the ledger must keep: no unit has inherited them for good.
    still_open = list_open_places(of_this_service, freed_texts, assigned, wanted)
    open_places = tuple(freed_texts[place] for place in still_open)

    # 5. Note in the units that end when they are over at the latest.
    ending = tuple(
        replica._replace(unit=msgspec.structs.replace(replica.unit, ends_by=replica.ends_by))
        for replica in replicas
        if replica.unit.state == "ending"
    )
    return _ServiceUnits(tuple(units), ending, places, open_places)


def _parse_freed(service: QueuedService | None, freed: Iterable[str]) -> dict[float, str]:
    """Return the ledger's texts of freed places by their time, which is not before the service was created."""
    created_at = service.created_at if service is not None else 0.0
    return {max(created_at, time): text for text in freed if (time := parse_seconds(text)) is not None}


def _derive_pod_replica(
    store: Store, pod: Obj, service: QueuedService | None, vendors: Vendors, volume_nodes: frozenset[str] | None
) -> PodReplica | None:
    """Return a pod as a unit, computed anew only when one of these inputs has changed."""

    # `parse_nomination` reads an annotation of the pod, so that it is no input of its own.
    def compute() -> PodReplica | None:
        return build_pod_replica(pod, service, vendors, parse_nomination(pod), volume_nodes)

    return store.derive(PODS, pod, "pod-replica", compute, service, vendors, volume_nodes)


def _list_process_replicas(
    store: Store,
    objects: Sequence[Obj],
    service: QueuedService | None,
    vendors: Vendors,
    orders: Mapping[str, HostOrders],
) -> list[ReplicaUnit]:
    """Return the processes of one owner as units.

    From the others and from orders of administrators follows which of them are displaced (must leave their host), and
    which hosts those that wait should avoid.
    """
    decoded = decode_stored(store, METAL_PROCESSES, objects, MetalProcess)
    # The store keeps what is derived from an object with the raw object, so `derive` needs this, not the decoded one.
    stored = {object_key(obj): obj for obj in objects}

    # 1. Read each process by itself, or take the unit of the last time; None: the process is over.
    replicas = []
    for process in decoded:
        obj = stored[ObjectKey(process.metadata.namespace, process.metadata.name)]
        compute = functools.partial(_build_process, process, service, vendors)
        replica = store.derive(METAL_PROCESSES, obj, "process-replica", compute, service, vendors)
        if replica is not None:
            replicas.append(replica)

    # 2. Add what follows from the other processes and from orders.
    tolerations = service.host_demands.tolerations if service is not None else ()
    # `list_moved`: those for which a replacement on a better host was made already.
    displaced = find_displacements(decoded, orders, tolerations, list_moved(decoded))
    return compare_siblings(replicas, decoded, displaced)


def _build_process(process: MetalProcess, service: QueuedService | None, vendors: Vendors) -> ReplicaUnit | None:
    """Return a process as a unit, with the nomination of its annotation; None if it is over."""
    return build_process_replica(process, service, vendors, read_nomination(process))


def _judge_ending(replica: ReplicaUnit, now: float) -> Unit:
    """Return an ending unit; one that is overdue, or ends too late, as one that runs and is never evicted.

    So nothing waits for its room.
    """
    if replica.ends_by is None or -LATE_SECONDS <= replica.ends_by - now <= MOST_GRACE_SECONDS:
        return replica.unit
    return msgspec.structs.replace(replica.unit, state="running", is_protected=True, ends_by=None)


@functools.lru_cache(maxsize=8192)
def _share(values: _Shared) -> _Shared:
    """Return one shared object for equal values, since the store compares inputs by identity."""
    return values


class _EncodedNomination(msgspec.Struct, frozen=True):
    cells: tuple[str, ...]
    victims: tuple[str, ...] = ()


def encode_nomination(nomination: Nomination) -> str:
    """Return the value of the annotation NOMINATED."""
    encoded = _EncodedNomination(nomination.cells, tuple(sorted(nomination.victims)))
    return msgspec.json.encode(encoded).decode()


def parse_nomination(pod: Obj) -> Nomination | None:
    """Return the nomination of a pod; None if it has none, or one that people have damaged."""
    return _decode_nomination((pod["metadata"].get("annotations") or {}).get(NOMINATED), "node/", object_key(pod))


def read_nomination(process: MetalProcess) -> Nomination | None:
    """Return the nomination of a process; None if it has none, or one that people have damaged."""
    metadata = process.metadata
    key = ObjectKey(metadata.namespace, metadata.name)
    return _decode_nomination(metadata.annotations.get(NOMINATED), "host/", key)


def _decode_nomination(text: Any, prefix: str, key: ObjectKey) -> Nomination | None:
    """Return the nomination in an annotation; None if it is empty, or damaged, which is logged."""
    if not text:
        return None
    try:
        nomination = msgspec.json.decode(text, type=_EncodedNomination)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        log.warning("nomination_unreadable", object=str(key), error=str(error))
        return None
    if not nomination.cells or not _are_cells(nomination.cells, prefix):
        log.warning("nomination_unreadable", object=str(key), error=f"cells are not of the form {prefix}NAME")
        return None
    return Nomination(nomination.cells, frozenset(nomination.victims))


def _are_cells(cells: Iterable[str], prefix: str) -> bool:
    """Return whether each text is a `Cell.id` with this prefix, such as `node/`."""
    return all(cell.startswith(prefix) and cell != prefix for cell in cells)
