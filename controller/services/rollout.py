"""The rollout of a service's MetalProcesses: which to create and which to delete next.

What an engine is started with is immutable, so most edits create and delete: the hash in the name changes, and a
process whose host is lost, or which is displaced, no longer counts. Priority, protection and drain are patched in
place. A superseded process stays until its replacement answers, and is deleted earlier only if the replacement waits
for its memory.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from controller.placement.capacity import HostCapacity, list_eligible_hosts
from controller.placement.displacement import NO_DISPLACEMENTS, REBALANCE, Displacement, list_moved
from controller.placement.node_rules import find_untolerated
from controller.placement.observed_units import read_nomination
from controller.placement.process_units import find_process_place
from controller.placement.queue_places import format_place, parse_seconds
from controller.placement.queued_service import NO_DEMANDS, HostDemands, require_host
from controller.reconcile.conditions import find
from controller.reconcile.plan import Patch, Ref, child
from crds.inferenceservice import InferenceService
from crds.meta import ENQUEUED_AT, LABEL_SERVICE, MOVES, PROCESS_FINALIZER, ObjectMeta, without_defaults
from crds.metalhost import MetalHost, MetalHostSpec
from crds.metalprocess import HOLDS_NO_MEMORY, MUTABLE_FIELDS, MetalProcess, MetalProcessSpec, with_edits, without_edits
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, Resource

AVOID_SECONDS: Final = 300.0
"""Time for which a host that rejected a process is avoided while the service still misses a replica."""
AVOID_STOPPED_SECONDS: Final = 30.0
"""The same for a host that stopped a process which is not deleted: its agent has read an outdated list, or a thief of
the Mac makes the controller create one after the other."""
LEASE_EXPIRED: Final = "LeaseExpired"
"""Reason of a MetalHost's condition Ready while no renewal of its Lease is seen."""


class MetalProcessSteps(NamedTuple):
    """MetalProcesses to create, to patch in place and to delete."""

    create: tuple[tuple[Resource, Obj], ...] = ()
    patch: tuple[Patch, ...] = ()
    delete: tuple[Ref, ...] = ()
    again_seconds: float | None = None


def process_prefix(service: str, spec: MetalProcessSpec) -> str:
    """Return the name of a service's processes with this spec, without the number at its end."""
    encoded = msgspec.json.encode(without_defaults(_select_deciding_fields(spec)), order="sorted")
    return f"{service}-{hashlib.sha256(encoded).hexdigest()[:8]}"


def _select_deciding_fields(spec: MetalProcessSpec) -> MetalProcessSpec:
    """Return a spec without the fields of which a change needs no other process.

    These are the mirrors, which have the same weights, the extent of benchmarks, and the fields that are patched in
    place, such as the priority.
    """
    further = [
        msgspec.structs.replace(
            further_artifact, artifact=msgspec.structs.replace(further_artifact.artifact, mirrors=[])
        )
        for further_artifact in spec.further_artifacts
    ]
    artifact = msgspec.structs.replace(spec.artifact, mirrors=[])
    decided = msgspec.structs.replace(spec, artifact=artifact, further_artifacts=further, benchmark=None)
    return without_edits(decided)


def is_host_lost(name: str, hosts: Mapping[str, MetalHost]) -> bool:
    """Return whether a host is not registered or its Lease has expired, so that its processes are replaced."""
    host = hosts.get(name)
    ready = find(host.status.conditions, "Ready") if host else None
    return host is None or (ready is not None and ready.status == "False" and ready.reason == LEASE_EXPIRED)


class DisplacedProcess(NamedTuple):
    """A process that leaves its host."""

    process: MetalProcess
    why: Displacement


class SortedProcesses(NamedTuple):
    """A service's processes by their next step; only those in `terminating` are being deleted."""

    kept: list[MetalProcess]
    """Processes of the wanted spec that are not lost; never more than wanted, the best first."""
    surplus: list[MetalProcess]
    superseded: list[MetalProcess]
    """Processes of an earlier spec, or on a host that is lost, or that they leave: they may still answer."""
    rejected: list[MetalProcess]
    """Processes of the wanted spec; while they exist, the host that rejected or stopped them is avoided."""
    finished: list[MetalProcess]
    terminating: list[MetalProcess]
    """Being deleted, with memory that their host has not freed yet."""

    displaced: list[DisplacedProcess]
    """Superseded processes of the wanted spec, which would be kept if they were not displaced."""

    @property
    def ready(self) -> int:
        """Number of replicas of the wanted spec that answer and need not move."""
        return sum(process.status.phase == "Ready" for process in self.kept)


def sort_processes(
    name: str | None,
    wanted: int,
    observed: Iterable[MetalProcess],
    hosts: Mapping[str, MetalHost],
    *,
    exposed: Collection[str | None],
    estimated: MetalProcessSpec | None = None,
    demands: HostDemands = NO_DEMANDS,
    displacements: Mapping[str, Displacement] = NO_DISPLACEMENTS,
) -> SortedProcesses:
    """Sort a service's processes by their next step: some are kept, and a surplus is deleted.

    Superseded ones serve until kept ones do. Rejected ones tell which host to avoid. Finished ones are deleted.

    Args:
        name: their `process_prefix`; None if it is not known: then processes of any spec are kept.
        wanted: the number of processes to keep.
        observed: all existing processes.
        hosts: all registered hosts, by name.
        exposed: hosts whose endpoint for the service is ready; what is Ready elsewhere goes before what answers.
        estimated: the wanted spec, if its memory is an estimate: then a process that has a host and differs only in its
            memory is kept, too, because a better estimate is no reason to load weights again.
        demands: the demands of the service on its hosts.
        displacements: why processes should leave their hosts, by uid.
    """
    grouped = SortedProcesses(
        kept=[], surplus=[], superseded=[], rejected=[], finished=[], terminating=[], displaced=[]
    )
    usable = []
    for process in observed:
        host = process.spec.host_name
        host_spec = hosts[host].spec if host is not None and host in hosts else MetalHostSpec()
        is_closed = host_spec.is_cordoned or find_untolerated(host_spec.taints, demands.tolerations) is not None
        is_lost = host is not None and is_host_lost(host, hosts)
        has_stopped = process.status.phase in HOLDS_NO_MEMORY
        has_spec = name is None or is_current(process, name, estimated)  # None: any spec will do
        why = displacements.get(process.metadata.uid)

        if process.metadata.deletion_timestamp is not None:
            if host is not None and not has_stopped and not is_lost:  # it still holds memory
                grouped.terminating.append(process)
        elif not has_spec and (has_stopped or host is None):
            grouped.finished.append(process)  # of an earlier spec, without memory
        elif has_stopped and is_closed:
            grouped.finished.append(process)  # its agent, which knows no cordon, would take it after all
        elif has_stopped:  # its host rejected or stopped it
            grouped.rejected.append(process)
        elif has_spec and not is_lost and why is None:
            usable.append(process)
        else:
            grouped.superseded.append(process)  # of an earlier spec, on a lost host, or to leave its host
            if has_spec and not is_lost and why is not None:
                grouped.displaced.append(DisplacedProcess(process, why))  # listed once more

    usable.sort(key=lambda process: _rank_process(process, exposed))
    grouped.superseded.sort(key=lambda process: _rank_process(process, exposed))
    grouped.kept.extend(usable[:wanted])
    grouped.surplus.extend(usable[wanted:])
    return grouped


def is_current(process: MetalProcess, name: str, estimated: MetalProcessSpec | None) -> bool:
    """Return whether a process has the wanted spec; the arguments are those of `sort_processes`."""
    if process.metadata.name.rpartition("-")[0] == name:
        return True
    return estimated is not None and process.status.phase != "Rejected" and _has_spec_but_memory(process, estimated)


def _has_spec_but_memory(process: MetalProcess, spec: MetalProcessSpec) -> bool:
    """Return whether a process is bound and differs from this spec in nothing but the memory that it reserves."""
    comparable = msgspec.structs.replace(process.spec, host_name=None, memory_bytes=spec.memory_bytes)
    fields, wanted = (without_defaults(_select_deciding_fields(process_spec)) for process_spec in (comparable, spec))
    return process.spec.host_name is not None and fields == wanted


def _rank_process(
    process: MetalProcess, exposed: Collection[str | None]
) -> tuple[bool, bool, bool, bool, bool, str, int, str]:
    """Sort key: the processes to keep come first. Each item is a reason to come later; False sorts before True."""
    name, phase = process.metadata.name, process.status.phase
    return (
        phase != "Ready",
        # A host that is lost, or whose address is refused, has no endpoint, whatever it has reported of the process.
        phase == "Ready" and process.spec.host_name not in exposed,
        process.spec.host_name is None,
        phase == "Failed",
        # Prefer the replacement over a process that is held back.
        phase == "Pending",
        # Of equal ones, the oldest and then the one with the lowest number is kept.
        process.metadata.creation_timestamp,
        len(name),  # 2 before 10
        name,
    )


def plan_steps(
    service: InferenceService,
    spec: MetalProcessSpec | None,
    wanted: int,
    grouped: SortedProcesses,
    *,
    exposed: Collection[str | None],
    taken: Collection[str],
    capacities: Sequence[HostCapacity],
    now: datetime,
) -> MetalProcessSteps:
    """Return the next steps towards `wanted` processes of `spec`; none when they exist or are on their way.

    Args:
        service: the owner.
        spec: the spec of each process; None while it is not known: then none is created.
        wanted: the number of processes.
        grouped: the existing processes, as `sort_processes` sorts them for the same spec and number.
        exposed: hosts whose endpoint for the service is ready; a Ready process elsewhere gets no request yet.
        taken: names of all processes of the service, also of those being deleted.
        capacities: the capacity that each live host has left.
        now: the wall clock.
    """
    # 1. Delete. For each replica that no client reaches yet, one superseded process (of an earlier spec, or on a host
    # that it leaves) serves on, unless its successor waits for its memory.
    reachable = sum(process.status.phase == "Ready" and process.spec.host_name in exposed for process in grouped.kept)
    superseded_to_keep = max(0, wanted - reachable)

    demands = HostDemands(frozenset(service.spec.node_selector.items()), tuple(service.spec.tolerations))
    expired, waits = _list_expired_rejections(grouped, now, has_all_ready=grouped.ready == wanted)
    delete = [
        *grouped.surplus,
        *grouped.finished,
        *grouped.superseded[superseded_to_keep:],
        *_list_blocking_processes(grouped, grouped.superseded[:superseded_to_keep], capacities, demands),
        *expired,
    ]

    # 2. Create what is missing; the first new processes inherit places in the queue, and moves to another host.
    create: tuple[tuple[Resource, Obj], ...] = ()
    if spec is not None:
        prefix, missing = process_prefix(service.metadata.name, spec), max(0, wanted - len(grouped.kept))
        # New processes take free numbers, then the places and the moves in turn, and None when these run out.
        unused = (name for number in itertools.count() if (name := f"{prefix}-{number}") not in taken)
        names = itertools.islice(unused, missing)
        created_at = parse_seconds(service.metadata.creation_timestamp) or 0.0
        places = itertools.chain(_list_inheritable_places(grouped, created_at), itertools.repeat(None))
        moves = itertools.chain(_list_unfollowed_moves(grouped), itertools.repeat(None))
        rows = zip(names, places, moves, strict=False)
        create = tuple(_build_process(service, spec, name, place, move) for name, place, move in rows)

    return MetalProcessSteps(
        create=create,
        patch=_list_edits(grouped, spec) if spec is not None else (),
        delete=tuple(process_ref(process.metadata) for process in delete),
        again_seconds=min(waits, default=None),
    )


def _list_edits(grouped: SortedProcesses, spec: MetalProcessSpec) -> tuple[Patch, ...]:
    """Return the patches of the processes of the wanted spec whose mutable fields the service has edited."""
    patches = []
    for process in (*grouped.kept, *(displaced.process for displaced in grouped.displaced)):
        # The spec of the process, with those fields (priority, protection, drain time) as the service has them now.
        wanted = with_edits(process.spec, spec)
        if wanted != process.spec:
            patches.append(_patch_spec(process, wanted))
    return tuple(patches)


def _patch_spec(process: MetalProcess, wanted: MetalProcessSpec) -> Patch:
    """Return the patch of the mutable fields that differ from `wanted`."""
    operations: list[Obj] = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": process.metadata.resource_version}
    ]

    # MUTABLE_FIELDS: priority, protection and drain, which restart no engine.
    for field in msgspec.structs.fields(MetalProcessSpec):
        value = getattr(wanted, field.name)
        if field.name in MUTABLE_FIELDS and value != getattr(process.spec, field.name):
            operations.append({"op": "add", "path": f"/spec/{field.encode_name}", "value": value})
    return Patch(process_ref(process.metadata), tuple(operations))


def _list_expired_rejections(
    grouped: SortedProcesses, now: datetime, *, has_all_ready: bool
) -> tuple[list[MetalProcess], list[float]]:
    """Return the rejected processes to delete, and the seconds after which each of the others may be deleted.

    While a process that its host rejected or stopped exists, no other one of the service goes to this host. It is
    deleted after a time, or as soon as all replicas are ready, but not then if it was to move a replica to that host:
    the same move would be chosen again.
    """
    expired, waits = list[MetalProcess](), list[float]()
    for process in grouped.rejected:
        limit_seconds = AVOID_SECONDS if process.status.phase == "Rejected" else AVOID_STOPPED_SECONDS
        left_seconds = limit_seconds - _age_seconds(process, now)

        if left_seconds <= 0 or (has_all_ready and MOVES not in process.metadata.annotations):
            expired.append(process)
        else:
            waits.append(left_seconds)
    return expired, waits


def _list_unfollowed_moves(grouped: SortedProcesses) -> list[str]:
    """Return the uids of the processes that leave for a better host and have no replacement yet."""
    followed = list_moved([*grouped.kept, *grouped.surplus])
    uids = (process.process.metadata.uid for process in grouped.displaced if process.why.cause == REBALANCE)
    return [uid for uid in uids if uid not in followed]


def _list_blocking_processes(
    grouped: SortedProcesses,
    superseded: Sequence[MetalProcess],
    capacities: Sequence[HostCapacity],
    demands: HostDemands,
) -> list[MetalProcess]:
    """Return the superseded processes to delete because a waiting successor needs their memory.

    If the queue has nominated the successor, which promises it this memory, the nomination names them as victims. For
    a successor that the queue has not decided about, they are those of one host, if it fits nowhere else. While a
    process is ending, none: its memory may be enough.
    """
    if grouped.terminating:
        return []

    undecided = []
    for process in grouped.kept:
        if process.spec.host_name is not None:
            continue

        # A nomination, the promise of the queue, names the victims, which end for it.
        nomination = read_nomination(process)
        if nomination is None:
            undecided.append(process)
        elif named := [victim for victim in superseded if victim.metadata.uid in nomination.victims]:
            return named

    # Room is made for one at a time.
    return _find_blocking_processes(undecided[0], grouped, superseded, capacities, demands) if undecided else []


def _find_blocking_processes(
    waiting: MetalProcess,
    grouped: SortedProcesses,
    superseded: Sequence[MetalProcess],
    capacities: Sequence[HostCapacity],
    demands: HostDemands,
) -> list[MetalProcess]:
    """Return the superseded processes of one host, the least useful first, whose end makes room for `waiting`.

    Empty if it fits somewhere already, or if no host would have room for it even then. Hosts that rejected or displaced
    a replica of the service do not count.
    """
    # The hosts that may take it.
    displaced_processes = (displaced.process for displaced in grouped.displaced)
    avoid = {process.spec.host_name for process in (*grouped.rejected, *displaced_processes)}
    eligible = list_eligible_hosts(require_host(waiting, demands), avoid, capacities)

    # It fits already: it needs no more than the binding.
    if any(capacity.free_bytes >= waiting.spec.memory_bytes for capacity in eligible):
        return []

    # Add up what superseded processes of one host would free, until there is room.
    for capacity in eligible:
        free_bytes, blocking = capacity.free_bytes, []
        for process in reversed(superseded):  # the least useful are last in the list
            if process.spec.host_name == capacity.host and free_bytes < waiting.spec.memory_bytes:
                blocking.append(process)
                free_bytes += process.spec.memory_bytes
        if free_bytes >= waiting.spec.memory_bytes:
            return blocking
    return []


def _list_inheritable_places(grouped: SortedProcesses, created_at: float) -> list[str]:
    """Return the places in the queue, as times, that replaced processes leave to their successors, the oldest first.

    With a new place at the end, the successor would lose the memory that its predecessor frees to any process that
    waits longer. Places that successors have inherited already are left out.
    """
    replaced = (*grouped.superseded, *grouped.rejected, *grouped.finished, *grouped.terminating)
    replaced_places = Counter(find_process_place(process, created_at) for process in replaced)
    inherited_places = Counter(find_process_place(process, created_at) for process in grouped.kept)
    # The difference has each place as often as no successor has it yet.
    return [format_place(place) for place in sorted((replaced_places - inherited_places).elements())]


def _age_seconds(process: MetalProcess, now: datetime) -> float:
    """Return the time since the host last wrote its status, such as its rejection."""
    written = (entry.time for entry in process.metadata.managed_fields if entry.subresource == "status")
    since = max(written, default=process.metadata.creation_timestamp)
    return (now - datetime.fromisoformat(since)).total_seconds()


def _build_process(
    service: InferenceService, spec: MetalProcessSpec, name: str, enqueued: str | None, moves: str | None
) -> tuple[Resource, Obj]:
    """Return a new MetalProcess, with the place in the queue and the move that it continues."""
    owner = service.metadata
    labels = {LABEL_SERVICE: owner.name}
    resource, obj = child(METAL_PROCESSES, name, INFERENCE_SERVICES, owner, labels, spec=without_defaults(spec))
    obj["metadata"]["finalizers"] = [PROCESS_FINALIZER]
    # ENQUEUED_AT is its place in the queue, MOVES the uid of the process that it replaces on a better host.
    if annotations := {key: value for key, value in ((ENQUEUED_AT, enqueued), (MOVES, moves)) if value}:
        obj["metadata"]["annotations"] = annotations
    return resource, obj


def process_ref(metadata: ObjectMeta) -> Ref:
    """Return the reference to a process by its uid, so that no successor of the same name is deleted or patched."""
    return Ref(METAL_PROCESSES, metadata.namespace, metadata.name, metadata.uid)
