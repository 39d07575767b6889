"""Units of pods: one pod each, or a gang of pods of which all or none run."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import structlog

from controller.placement.device_registry import count_need
from controller.placement.pod_requests import count_requests, find_taken_node, is_noted
from controller.placement.queue_places import ReplicaUnit, find_own_place, find_place, parse_seconds
from controller.placement.queued_service import QueuedService, demand_slices, has_device, pools_of, read_template_mark
from controller.placement.units import (
    NO_SPEEDS,
    NOTHING,
    NodeRequirement,
    Nomination,
    SliceDemand,
    Unit,
    UnitKey,
    UnitState,
)
from controller.reconcile.indexes import controller_of
from controller.reconcile.triggers import ENDED, is_gated
from crds.meta import LABEL_GANG, LABEL_GANG_SIZE, LABEL_SERVICE, LOWEST_PRIORITY, QUEUE_GATE
from devices.vendors import Vendors
from kube.client import Obj
from kube.resources import ObjectKey, object_key

MOST_IN_GANG: Final = 256
"""Pods of a gang that is admitted: the ledger has the name of each."""
_TEMPLATE: Final = "pod-template-hash"
_RULES: Final = ("nodeSelector", "affinity", "tolerations")
MOST_RULES_BYTES: Final = 4096
"""Size of the rules of a pod about its node: each node is compared with them, and tenants choose them."""
_NO_NODE: Final[Obj] = {
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
}
_NO_RULES: Final = NodeRequirement("", {})
"""Requirement of a unit that is not placed any more."""
_STATES: Final[Sequence[UnitState]] = ("waiting", "running", "ending")

log = structlog.get_logger()


class PodReplica(NamedTuple):
    """A pod that the queue knows."""

    replica: ReplicaUnit
    gang: str = ""
    """Name that the pods of its gang share; empty if it is in none."""
    gang_size: int = 1


def build_pod_replica(
    pod: Obj,
    service: QueuedService | None,
    vendors: Vendors,
    nomination: Nomination | None,
    volume_nodes: frozenset[str] | None = None,
) -> PodReplica | None:
    """Return a pod as a unit of its own, or None if the queue has nothing to do with it.

    None if no Deployment of the service made it; if it is being deleted, any Deployment will do, since others wait for
    its room. None also if it has ended and is not being deleted, or if it neither waits at the gate nor takes a device.
    """
    # 1. Leave out pods with which the queue has nothing to do.
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    deployment, template = find_template(pod)
    state = _find_state(pod)
    own_deployment = service.find_deployment(deployment) if service is not None else None
    has_ended = (pod.get("status") or {}).get("phase") in ENDED
    # A pod that has ended and is being deleted holds nothing any more, but its successor inherits its place.
    if not deployment or (state != "ending" and (own_deployment is None or has_ended)):
        return None
    need = {**count_requests(spec), **count_need(pod, is_waiting=state == "waiting")}  # requests; claimed devices
    if not is_gated(pod) and not has_device(need, vendors):
        return None

    # 2. Describe the pod as a unit.
    node = find_taken_node(pod)
    is_counted = _is_counted(pod, node, state)
    is_placed = bool(node) and state != "waiting"  # its rules about nodes do not matter any more
    slices = demand_slices(need, service, vendors)
    own_place, key = find_own_place(pod), object_key(pod)  # own place: used if it inherits none
    unit = Unit(
        key=UnitKey("pod", key.namespace, key.name),
        uid=metadata["uid"],
        service=ObjectKey(key.namespace, metadata["labels"][LABEL_SERVICE]),
        service_uid=service.uid if service is not None and own_deployment else "",
        priority=service.priority if service is not None else "normal",
        enqueued_at=find_place(pod, service.created_at) if service is not None else own_place,
        parts=(need if is_counted else NOTHING,),
        pools=pools_of("pod", need, service, vendors) if is_counted else (),
        requirement=_NO_RULES if is_placed else build_requirement(spec, volume_nodes, slices),
        state=state,
        cells=(f"node/{node}",) if node else (),
        nomination=nomination if state == "waiting" else None,
        evictable_since=_find_scheduled_at(pod),
        is_protected=service is not None and (service.is_protected or (state != "waiting" and not service.is_queued)),
        has_other_gate=any(gate["name"] != QUEUE_GATE for gate in spec.get("schedulingGates") or ()),
        speeds=service.speeds if service is not None else NO_SPEEDS,
        is_assessed=service is None or service.is_assessed,
    )
    if service is not None and service.left_cell and state == "waiting":
        unit = restrict_to_better_place(unit, service.left_cell, service.least_speed)

    # 3. Add what decides about its place in the queue, and its gang.
    ends_by = parse_seconds(metadata["deletionTimestamp"]) if state == "ending" else None
    present_mark = own_deployment.template if own_deployment is not None else ""  # empty: nothing to compare with
    is_present = read_template_mark(pod) == present_mark if present_mark else None
    replica = ReplicaUnit(unit, deployment, template, own_place, is_present=is_present, ends_by=ends_by)
    gang, gang_size = _read_gang(pod) if is_counted or state == "ending" else ("", 1)
    return PodReplica(replica, gang, gang_size)


def _find_state(pod: Obj) -> UnitState:
    """Return `ending` for a pod that is being deleted; else `waiting` if it waits for the queue, or `running`."""
    if "deletionTimestamp" in pod["metadata"]:
        return "ending"
    return "waiting" if is_gated(pod) else "running"


def _is_counted(pod: Obj, node: str, state: UnitState) -> bool:
    """Return whether the needs of a pod count; `node` is empty if it has none.

    Not counted are pods that hold nothing: one without a node that ends, which a tenant's finalizer may keep, and one
    that was made without the gate, which no scheduler need ever place. They would use up the limits of their pool.
    """
    return bool(node) or state == "waiting" or (state == "running" and is_noted(pod))


def restrict_to_better_place(unit: Unit, left_cell: str, least_speed: float) -> Unit:
    """Return the unit that replaces a slow replica: it evicts no other unit and accepts only a better cell.

    Args:
        unit: the unit, which waits.
        left_cell: `Cell.id` of the place of the slow replica.
        least_speed: least speed of its place, in tokens/s.
    """
    speeds = msgspec.structs.replace(unit.speeds, least=least_speed)
    return msgspec.structs.replace(
        unit, priority=LOWEST_PRIORITY, is_last=True, speeds=speeds, avoid=frozenset({left_cell})
    )


def build_requirement(
    pod_spec: Obj, volume_nodes: frozenset[str] | None, slices: SliceDemand | None = None
) -> NodeRequirement:
    """Return the rules of a pod about its node: selector, affinity, tolerations, volumes and shared devices.

    A pod whose rules are longer than MOST_RULES_BYTES matches no node, since each node is compared with them.

    Args:
        pod_spec: its spec.
        volume_nodes: the only nodes on which its volumes can be; None: anywhere.
        slices: its demand on devices that it might share; None: it asks for none such.
    """
    rules = {name: pod_spec[name] for name in _RULES if pod_spec.get(name)}
    # Pods with equal rules get the same digest, by which answers about nodes are shared.
    shape = [rules, None if volume_nodes is None else sorted(volume_nodes)]
    digest = hashlib.sha256(msgspec.json.encode(shape, order="deterministic")).hexdigest()

    # `_NO_NODE`: rules that admit no node.
    is_too_long = len(msgspec.json.encode(rules)) > MOST_RULES_BYTES
    return NodeRequirement(digest[:16], _NO_NODE if is_too_long else rules, volume_nodes, slices)


def find_template(pod: Obj) -> tuple[str, str]:
    """Return the name of the Deployment that made a pod, and its template; both are empty if none did."""
    owner = controller_of(pod)
    template: str = (pod["metadata"].get("labels") or {}).get(_TEMPLATE, "")
    if owner is None or owner.get("kind") != "ReplicaSet" or not template:
        return "", ""
    name: str = owner["name"]
    deployment = name.removesuffix(f"-{template}")
    return (deployment, template) if deployment != name else ("", "")


def _find_scheduled_at(pod: Obj) -> float | None:
    """Return when a pod was bound; people may edit its annotations, but not its status."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "True":
            return parse_seconds(condition.get("lastTransitionTime"))
    return None


def _read_gang(pod: Obj) -> tuple[str, int]:
    """Return name and size of the gang of a pod: no name and 1 if it is in none, or states a size that is no number."""
    labels: Mapping[str, str] = pod["metadata"].get("labels") or {}
    name, size = labels.get(LABEL_GANG, ""), labels.get(LABEL_GANG_SIZE, "")
    if not name:
        return "", 1
    if size.isascii() and size.isdecimal() and int(size) > 0:
        return name, int(size)
    log.warning("gang_size_unreadable", pod=str(object_key(pod)), gang=name, size=size)
    return "", 1


def join_gangs(pods: Sequence[PodReplica]) -> list[ReplicaUnit]:
    """Return the units of a service's pods: pods without a gang as they are, those of a gang joined.

    All pods of a gang in the same state are one unit. Those that wait are a unit only once all pods of the gang exist,
    as all or none are admitted. If the controller ended after it had admitted some, the rest waits as one unit.
    """
    replicas = [pod.replica for pod in pods if not pod.gang]
    gangs: dict[str, list[PodReplica]] = {}  # by name of the gang
    for pod in pods:
        if pod.gang:
            gangs.setdefault(pod.gang, []).append(pod)

    for name, members in gangs.items():
        # Only living pods make a gang complete; each states its size, and the largest counts.
        living = sum(member.replica.unit.state != "ending" for member in members)
        is_complete = living >= max(member.gang_size for member in members)
        # Join the pods of each state, by name.
        for state in _STATES:
            alike = [member.replica for member in members if member.replica.unit.state == state]
            may_be_admitted = is_complete and len(alike) <= MOST_IN_GANG
            if alike and (may_be_admitted or state != "waiting"):
                replicas.append(_join_pods(name, sorted(alike, key=lambda replica: replica.unit.key.name)))
    return replicas


def _join_pods(gang: str, members: Sequence[ReplicaUnit]) -> ReplicaUnit:
    """Return one unit for pods of a gang that are in the same state, by name; each pod is a part of it."""
    units = [member.unit for member in members]
    first = units[0]  # its uid stands for the gang, as its name does where a place is freed
    cells = tuple(cell for unit in units for cell in unit.cells)
    ends_by = [member.ends_by for member in members if member.ends_by is not None]
    since = [unit.evictable_since for unit in units if unit.evictable_since is not None]
    nominations = (unit.nomination for unit in units if unit.nomination is not None)

    # The unit of the first pod, with what is different for a gang.
    unit = msgspec.structs.replace(
        first,
        key=UnitKey("gang", first.key.namespace, gang),
        # The latest place of all: whoever edits labels could lend the oldest one to all others.
        enqueued_at=max(unit.enqueued_at for unit in units),
        parts=tuple(part for unit in units for part in unit.parts),
        members=tuple(unit.key.name for unit in units),
        # A pod that is not counted has no pools.
        pools=next((unit.pools for unit in units if unit.pools), ()),
        cells=cells if len(cells) == len(units) else (),
        # A nomination counts only if it has a cell for each of these pods.
        nomination=next((nomination for nomination in nominations if len(nomination.cells) == len(units)), None),
        # Since the earliest: one that joins later must not protect the others for another while.
        evictable_since=min(since, default=None),
        is_protected=any(unit.is_protected for unit in units),
        has_other_gate=any(unit.has_other_gate for unit in units),
    )

    own_place = min(member.own_place for member in members)
    return members[0]._replace(unit=unit, own_place=own_place, ends_by=max(ends_by, default=None))
