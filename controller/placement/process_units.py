"""Units of MetalProcesses that serve."""

import hashlib
from collections.abc import Container, Iterable, Sequence
from typing import Final

import msgspec

from artifacts.source import weights_identity
from controller.placement.queue_places import ReplicaUnit, draw_place, limit_place, parse_seconds
from controller.placement.queued_service import NO_DEMANDS, QueuedService, pools_of, require_host
from controller.placement.units import MEMORY, NO_SPEEDS, Nomination, Unit, UnitKey, UnitState
from crds.meta import ADMITTED_AT, ENQUEUED_AT, MOVES, ApiStruct, without_defaults
from crds.metalprocess import HOLDS_NO_MEMORY, HostedProcess, MetalProcess
from devices.vendors import Vendors
from kube.resources import ObjectKey

MOST_ENDING_SECONDS: Final = 90.0
"""Time in which an agent ends a drained process: it has withdrawn it before, ends it, and unloads its model."""
_REPLACES_NOTHING: Final = frozenset(
    {"hostName", "memoryBytes", "artifact", "furtherArtifacts", "benchmark", "priority", "protected", "drainSeconds"}
)
"""Fields whose changes replace no process, or only in part."""


def build_process_replica(
    process: MetalProcess, service: QueuedService | None, vendors: Vendors, nomination: Nomination | None
) -> ReplicaUnit | None:
    """Return a MetalProcess as a unit; None if it has ended, so that it holds no room and waits for none.

    It waits while it has no host. A service that is not its owner decides nothing about it, even if it has the name.
    """
    if is_over(process):
        return None

    spec, metadata = process.spec, process.metadata
    host, deleted_at = spec.host_name, parse_seconds(metadata.deletion_timestamp)
    state: UnitState = "waiting" if host is None else "running"
    if metadata.deletion_timestamp is not None:
        state = "ending"
    key = ObjectKey(metadata.namespace, metadata.name)
    need = {MEMORY: spec.memory_bytes}
    own_place = draw_place(metadata.creation_timestamp, metadata.uid)  # its place in the queue if it inherits none
    # A process that was bound by hand has no annotation ADMITTED_AT: its creation (`own_place`) counts.
    admitted_at = parse_seconds(metadata.annotations.get(ADMITTED_AT)) or own_place
    # Without an owner, the process itself states its priority, and has no demands and speeds.
    is_owned = service is not None and any(reference.uid == service.uid for reference in metadata.owner_references)
    owner = service if is_owned else None

    unit = Unit(
        key=UnitKey("process", key.namespace, key.name),
        uid=metadata.uid,
        service=ObjectKey(key.namespace, spec.service_name),
        service_uid=owner.uid if owner is not None else "",
        priority=owner.priority if owner is not None else spec.priority,
        enqueued_at=find_process_place(process, owner.created_at if owner is not None else 0.0),
        parts=(need,),
        pools=pools_of("process", need, owner, vendors),
        requirement=require_host(process, owner.host_demands if owner is not None else NO_DEMANDS),
        state=state,
        cells=(f"host/{host}",) if host is not None else (),
        nomination=nomination if state == "waiting" else None,
        evictable_since=None if host is None else admitted_at,
        is_protected=owner is not None and owner.is_protected,
        weights=_identify_weights(process),
        speeds=owner.speeds if owner is not None else NO_SPEEDS,
        is_assessed=owner is None or owner.is_assessed,
    )
    return ReplicaUnit(
        unit,
        rollout="",
        template=_find_template(process),
        own_place=own_place,
        ends_by=deleted_at + spec.drain_seconds + MOST_ENDING_SECONDS if deleted_at is not None else None,
    )


def _identify_weights(process: MetalProcess) -> str:
    """Return the identity of a process's weights, so that cells which have them are preferred.

    Empty for a replica that moves to a better host: it may go where its weights must be downloaded first.
    """
    if MOVES in process.metadata.annotations:
        return ""
    artifact = process.spec.artifact
    return weights_identity(artifact.source, artifact.revision, artifact.files, artifact.sha256)


def is_over(process: MetalProcess | HostedProcess) -> bool:
    """Return whether a process holds no room and waits for none, although its object is still there."""
    is_withdrawn = process.metadata.deletion_timestamp is not None and not process.spec.host_name
    return process.status.phase in HOLDS_NO_MEMORY or is_withdrawn


def _find_template(process: MetalProcess) -> str:
    """Return a digest of the fields whose change replaces a process; a better estimate of its memory is none of them.

    Mirrors are left out, since the same weights come from all of them.
    """
    fields = without_defaults(process.spec)
    further = process.spec.further_artifacts
    shape = (
        # All but such as hostName and memoryBytes; artifacts follow below, since only a part of them counts.
        {name: value for name, value in fields.items() if name not in _REPLACES_NOTHING},
        _without_mirrors(process.spec.artifact),
        [without_defaults(artifact) | {"artifact": _without_mirrors(artifact.artifact)} for artifact in further],
    )
    return hashlib.sha256(msgspec.json.encode(shape, order="deterministic")).hexdigest()[:16]


def _without_mirrors(artifact: ApiStruct) -> dict[str, object]:
    """Return the stated fields of an artifact without its mirrors."""
    return {name: value for name, value in without_defaults(artifact).items() if name != "mirrors"}


def compare_siblings(
    replicas: Iterable[ReplicaUnit], processes: Sequence[MetalProcess], displaced: Container[str]
) -> list[ReplicaUnit]:
    """Return the units of a service's processes with what follows from the other processes.

    Args:
        replicas: the processes as units.
        processes: the processes.
        displaced: uids of processes that must leave their host; their units are marked to be replaced.

    Units that wait avoid each host on which a process of the same owner and spec was rejected, has stopped by itself,
    or is displaced.
    """
    # 1. By owner and spec (`_spec_key`): the hosts on which the other processes failed or are displaced.
    unwanted_cells: dict[tuple[str, str], set[str]] = {}
    for process in processes:
        # It was rejected, or stopped by itself: nobody has deleted it.
        is_refused = process.status.phase == "Rejected" or (
            process.status.phase == "Stopped" and process.metadata.deletion_timestamp is None
        )
        if process.spec.host_name is not None and (is_refused or process.metadata.uid in displaced):
            unwanted_cells.setdefault(_spec_key(process), set()).add(f"host/{process.spec.host_name}")
    if not unwanted_cells:
        return list(replicas)

    # 2. Note these in the units.
    spec_keys = {process.metadata.uid: _spec_key(process) for process in processes}
    compared = []
    for replica in replicas:
        unit = replica.unit
        if unit.state == "waiting" and (cells := unwanted_cells.get(spec_keys[unit.uid])):
            unit = msgspec.structs.replace(unit, avoid=frozenset(cells))
        compared.append(replica._replace(unit=unit, is_displaced=unit.uid in displaced))
    return compared


def _spec_key(process: MetalProcess) -> tuple[str, str]:
    """Return a key of the processes of one owner with the same spec: their names differ in the last number only."""
    owner = next((reference.uid for reference in process.metadata.owner_references if reference.controller), "")
    return owner, process.metadata.name.rpartition("-")[0]


def find_process_place(process: MetalProcess, service_created_at: float) -> float:
    """Return the place of a process in the queue, which its successor inherits."""
    metadata = process.metadata
    own = draw_place(metadata.creation_timestamp, metadata.uid)
    return limit_place(metadata.annotations.get(ENQUEUED_AT), own, service_created_at)
