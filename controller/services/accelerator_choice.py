"""The accelerators of a service that may use several: chosen by its spec, its replicas and the room that there is.

The choice is kept in the status of the service, so another leader goes on with it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import msgspec

from controller.placement.candidate_room import CandidateRoom, ProspectiveReplica
from controller.placement.choice import (
    BETTER_SECONDS,
    SETTLE_SECONDS,
    Candidate,
    choose,
    describe_shares,
    list_shares,
    list_watched,
)
from controller.placement.pool_table import read_pools
from controller.pod_settings import CHOICE_OUT_OF_SCOPE, PodSettings
from controller.reconcile.conditions import MESSAGE_LENGTH
from controller.reconcile.plan import Snapshot
from controller.services.candidates import CheckedCandidate, check_candidate, list_candidates
from controller.services.checked_replica import UNKNOWN_POOL, read_models
from controller.services.class_speeds import FindSpeeds, find_no_speeds, sort_speeds
from controller.services.preconditions import ServiceProblem
from controller.services.probe_wait import ProbeSource, list_unmeasured, wait_for_probes
from controller.services.replica_counts import NO_REPLICAS, ReplicaCounts, count_replicas
from crds.accelerator_choice import AcceleratorChoice, AcceleratorShare
from crds.inferenceservice import InferenceService, InferenceServiceSpec, wanted_replicas
from crds.placement import ClassSpeed
from kube.resources import ObjectKey
from kube.time import rfc3339

_DEFAULTS: Final = InferenceServiceSpec(model_ref="")
CHOICE_INDEPENDENT_FIELDS: Final = frozenset({"replicas", "suspend", "priority", "eviction_protection"})
"""Fields of which an edit does not choose anew: it changes no replica, or only their number."""
_NO_ROOM: Final = CandidateRoom(0, could_run=True)


class RoomSource(Protocol):
    """The room of accelerators, as the queue knows it."""

    def count(self, prospect: ProspectiveReplica) -> CandidateRoom | None:
        """Return the room for replicas; None: it is not known yet."""

    def follow(self, service: ObjectKey, prospects: Mapping[str, ProspectiveReplica]) -> None:
        """Report a service when the room for one of these replicas changes; nothing more if there is none."""

    def free_seconds(self, service: ObjectKey, accelerator: str) -> float:
        """Return for how long a followed accelerator has had room."""


class ChosenAccelerators(NamedTuple):
    """The choice for one service."""

    shares: Sequence[AcceleratorShare] = ()
    """The number of replicas on each accelerator, with a reason where it is 0."""
    inputs: str = ""
    """Digest of the fields of the spec that they were chosen for: after an edit of one, the choice begins anew."""
    problem: ServiceProblem | None = None
    """Why no replica can be created anywhere now."""
    model_problem: ServiceProblem | None = None
    """The problem of a Model."""
    again_seconds: float | None = None
    """Choose again after this time."""
    speeds: tuple[ClassSpeed, ...] = ()
    """The speed of a replica on each device class of all accelerators."""
    watched: Mapping[str, ProspectiveReplica] = MappingProxyType({})
    """The replicas whose room decides, by accelerator: when it comes or goes, the service is decided again."""
    probing_since: str = ""
    """Time at which the choice has begun to wait for measurements; empty: it never did."""

    @property
    def status(self) -> AcceleratorChoice:
        """The choice in the form of `status.choice`: the replicas on each accelerator, and the same in words.

        `inputs` is the digest of the spec that it was made for; `probing_since` is when the wait for speeds began.
        """
        message = describe_shares(self.shares)
        return AcceleratorChoice(
            message=message, accelerators=list(self.shares), inputs=self.inputs, probing_since=self.probing_since
        )

    @property
    def accelerator(self) -> str:
        """The accelerators that are used."""
        return ",".join(share.accelerator for share in self.shares if share.replicas)


def choose_accelerators(
    snapshot: Snapshot,
    service: InferenceService,
    settings: PodSettings,
    rooms: RoomSource | None,
    *,
    has_claims: bool = True,
    find_speeds: FindSpeeds = find_no_speeds,
    probes: ProbeSource | None = None,
) -> ChosenAccelerators | None:
    """Return how many replicas of a service go to which accelerator; None: `list_candidates` finds no choice.

    First each accelerator is checked: could it run one replica at all? Then the free room decides, or the speed. If
    none can be chosen now, the last choice, which is in the status, is returned with the problem.

    Args:
        snapshot: the store.
        service: the service.
        settings: options of the controller.
        rooms: counts the replicas for which an accelerator has room; None: the queue is not this controller's.
        has_claims: devices can be claimed in the cluster.
        find_speeds: returns the speed of a replica on the device classes of an accelerator.
        probes: the Jobs that measure a speed before the choice; None: nothing is measured.
    """
    model, companions = read_models(snapshot, service)
    table = read_pools(snapshot.store, settings.vendors)
    names = list_candidates(service, model, table, settings.vendors)
    if not names:
        return None

    # The last choice stays, with the problem, if nothing can be chosen now.
    last = service.status.choice or AcceleratorChoice()
    last_choice = ChosenAccelerators(shares=last.accelerators, inputs=last.inputs, probing_since=last.probing_since)
    unknown_pools = [name for name in service.spec.scheduling.pools if not table.find_accelerator(name)]
    if unknown_pools:
        pool = unknown_pools[0]
        message = f"spec.scheduling.pools names {pool}, which does not exist: create AcceleratorPool {pool}"
        return last_choice._replace(problem=ServiceProblem(UNKNOWN_POOL, message, "Pending"))
    if rooms is None:
        return last_choice._replace(problem=ServiceProblem(*CHOICE_OUT_OF_SCOPE, "Failed"))

    checked = [
        check_candidate(
            snapshot.store,
            service,
            name,
            model,
            companions,
            settings=settings,
            has_claims=has_claims,
            find_speeds=find_speeds,
        )
        for name in names
    ]

    # The status lists the speeds on all accelerators, whatever is chosen.
    last_choice = last_choice._replace(speeds=sort_speeds(speed for candidate in checked for speed in candidate.speeds))
    if all(candidate.problem is not None for candidate in checked):
        return last_choice._replace(problem=_join_problems(checked), model_problem=checked[0].model_problem)
    return _choose_when_measured(snapshot, service, checked, last_choice, settings=settings, rooms=rooms, probes=probes)


def _choose_when_measured(
    snapshot: Snapshot,
    service: InferenceService,
    checked: Sequence[CheckedCandidate],
    last_choice: ChosenAccelerators,
    *,
    settings: PodSettings,
    rooms: RoomSource,
    probes: ProbeSource | None,
) -> ChosenAccelerators:
    """Return the choice among the `checked` accelerators once it can be made for good; until then the last choice.

    1. The room of each must be known: the queue counts it for a prospect, which is a replica that is not there yet.
    2. A service without replicas waits while Jobs measure the speeds by which it is going to choose.
    3. Then the room decides, and the speed.
    """
    # 1. The room of each accelerator that could run a replica; None: the queue has not counted it yet.
    prospects = {candidate.accelerator: candidate.prospect for candidate in checked if candidate.prospect is not None}
    candidate_rooms = {accelerator: rooms.count(prospect) for accelerator, prospect in prospects.items()}
    if None in candidate_rooms.values():
        # A new leader keeps to the last choice until the first round of the queue, in which all that waits is planned;
        # then each service is enqueued.
        if last_choice.shares:
            return last_choice._replace(watched=prospects)
        problem = ServiceProblem("Choosing", "waiting for the first round of the queue", "Progressing")
        return last_choice._replace(problem=problem, watched=prospects)

    # 2. The replicas that exist, by accelerator. Only a service without any waits for measurements.
    counts = count_replicas(snapshot, service, settings.vendors)
    if not counts and (wait := _find_wait(snapshot, service, last_choice, candidate_rooms, probes)) is not None:
        return wait

    # 3. Choose by the room and the speed.
    chosen = _choose_by_room(snapshot, service, checked, candidate_rooms, counts=counts, rooms=rooms)
    return chosen._replace(speeds=last_choice.speeds, probing_since=last_choice.probing_since)


def _find_wait(
    snapshot: Snapshot,
    service: InferenceService,
    last_choice: ChosenAccelerators,
    candidate_rooms: Mapping[str, CandidateRoom | None],
    probes: ProbeSource | None,
) -> ChosenAccelerators | None:
    """Return the last choice of a service without replicas, with the problem that its speeds are being measured.

    None: it does not wait, because nothing measures, it has a choice already, wants no replica, names pools, or could
    run on fewer than two device classes, or the speed on each is known, refused, or no longer waited for.
    """
    # With pools, their order decides, and no speed.
    if probes is None or last_choice.shares or not wanted_replicas(service) or service.spec.scheduling.pools:
        return None

    # Classes of the nodes and hosts, such as nvidia-l4x1, that could run a replica if nothing else ran there.
    known_rooms = (room for room in candidate_rooms.values() if room is not None)
    usable_classes = frozenset[str]().union(*(room.device_classes for room in known_rooms))
    unmeasured_classes = list_unmeasured(last_choice.speeds, usable_classes)

    # Wait while a Job measures one of them, and no longer than the limit.
    key = ObjectKey(service.metadata.namespace, service.metadata.name)
    wait = wait_for_probes(key, unmeasured_classes, last_choice.probing_since, snapshot.now, probes)
    if wait is None:
        return None
    return last_choice._replace(
        problem=ServiceProblem("MeasuringSpeed", wait.message[:MESSAGE_LENGTH], "Progressing"),
        again_seconds=(wait.until - snapshot.now).total_seconds(),  # when the wait ends at the latest
        probing_since=rfc3339(wait.since),
    )


def _choose_by_room(
    snapshot: Snapshot,
    service: InferenceService,
    checked: Sequence[CheckedCandidate],
    candidate_rooms: Mapping[str, CandidateRoom | None],
    *,
    counts: Mapping[str, ReplicaCounts],
    rooms: RoomSource,
) -> ChosenAccelerators:
    """Return how many replicas go to which accelerator, and when to choose again.

    With pools, their order decides, and replicas move to a preferred one only once it has had room for
    `BETTER_SECONDS`. Without pools, the speed decides.
    """
    key = ObjectKey(service.metadata.namespace, service.metadata.name)
    # A candidate is an accelerator with its free room, and with the replicas of the service that are there.
    candidates = [_describe_candidate(snapshot, candidate, candidate_rooms, counts) for candidate in checked]

    # 1. Sort the candidates, the preferred one first; the table of accelerators decides between equal speeds.
    has_pools = bool(service.spec.scheduling.pools)
    free_seconds: dict[str, float] = {}
    if has_pools:  # they are in the order of the pools already
        free_seconds = {item.accelerator: rooms.free_seconds(key, item.accelerator) for item in candidates}
        candidates = [
            candidate._replace(is_better=free_seconds[candidate.accelerator] >= BETTER_SECONDS)
            for candidate in candidates
        ]
    else:
        candidates.sort(key=lambda candidate: candidate.tokens_per_second, reverse=True)

    # 2. Choose the replicas on each. The last choice does not count after an edit of the spec, which its digest shows.
    last, inputs = service.status.choice or AcceleratorChoice(), _digest_spec(service)
    last_counts = {share.accelerator: share.replicas for share in last.accelerators}
    chosen = choose(wanted_replicas(service), candidates, last_counts if last.inputs == inputs else None)
    watched = list_watched(candidates, chosen, is_ordered=has_pools)  # those whose room may change the choice

    # 3. Time alone may change the choice: a waiting replica may move, and a better pool has had room for long enough.
    recheck_seconds = _list_seconds_to_move(snapshot, candidates, chosen, counts)
    recheck_seconds += [
        BETTER_SECONDS - free_seconds[candidate.accelerator]
        for candidate in candidates
        if has_pools and candidate.accelerator in watched and candidate.room and not candidate.is_better
    ]

    return ChosenAccelerators(
        shares=list_shares(candidates, chosen),
        inputs=inputs,
        again_seconds=min(recheck_seconds, default=None),
        watched={
            candidate.accelerator: candidate.prospect
            for candidate in checked
            if candidate.prospect and candidate.accelerator in watched
        },
    )


def _describe_candidate(
    snapshot: Snapshot,
    checked: CheckedCandidate,
    candidate_rooms: Mapping[str, CandidateRoom | None],
    counts: Mapping[str, ReplicaCounts],
) -> Candidate:
    """Return what `choose` reads of an accelerator: its free room, its replicas, and their speed there.

    `could_run`: one would fit there if nothing else ran. `lack`: why there is no room, in words. `settled` counts the
    replicas that have waited there for `SETTLE_SECONDS`, so that they may go elsewhere.
    """
    problem = checked.problem
    # An accelerator with a problem has no room.
    room = candidate_rooms.get(checked.accelerator) or _NO_ROOM
    replicas = counts.get(checked.accelerator, NO_REPLICAS)
    # The speeds on the device classes that the service accepts; 0: unknown.
    accepted = [float(speed.tokens_per_second or 0) for speed in checked.speeds if speed.refusal is None]
    return Candidate(
        checked.accelerator,
        refusal=problem.message[:MESSAGE_LENGTH] if problem is not None else "",
        room=room.replicas,
        could_run=room.could_run,
        lack=room.lack[:MESSAGE_LENGTH],
        running=replicas.running,
        ready=replicas.ready,
        settled=replicas.count_settled(snapshot.now, SETTLE_SECONDS),
        # If no class with room has a known speed, the fastest class counts that the service accepts.
        tokens_per_second=room.tokens_per_second or max(accepted, default=0.0),
    )


def _list_seconds_to_move(
    snapshot: Snapshot, candidates: Sequence[Candidate], chosen: Mapping[str, int], counts: Mapping[str, ReplicaCounts]
) -> list[float]:
    """Return the seconds until each waiting replica may move: after `SETTLE_SECONDS` it goes to where there is room."""
    waits: list[float] = []
    for candidate in candidates:
        is_room_elsewhere = any(other.room and not other.refusal for other in candidates if other is not candidate)
        # More replicas are chosen there than have a node or host.
        has_waiting_replicas = chosen.get(candidate.accelerator, 0) > candidate.running
        if is_room_elsewhere and has_waiting_replicas:
            waiting_since = counts.get(candidate.accelerator, NO_REPLICAS).waiting_since
            ages = ((snapshot.now - since).total_seconds() for since in waiting_since)
            waits += [SETTLE_SECONDS - age for age in ages if age < SETTLE_SECONDS]
    return waits


def _join_problems(checked: Sequence[CheckedCandidate]) -> ServiceProblem:
    """Return why no accelerator can be chosen: the problem that all have, or that of each."""
    problems = [(candidate.accelerator, candidate.problem) for candidate in checked if candidate.problem is not None]
    first = problems[0][1]
    if all(problem == first for _, problem in problems):
        return first

    message = "; ".join(f"{name}: {problem.message}" for name, problem in problems)
    is_final = all(problem.phase == "Failed" for _, problem in problems)
    return ServiceProblem(
        "NoAccelerator", f"no accelerator can serve it: {message}", "Failed" if is_final else "Pending"
    )


def _digest_spec(service: InferenceService) -> str:
    """Return a digest that changes when an edit of the spec asks for a new choice.

    A field with its default value is left out, so a field that a later version adds does not change the digest.
    """
    # CHOICE_INDEPENDENT_FIELDS, such as the number of replicas, are left out, too: their edits choose nothing anew.
    stated = {
        name: value
        for name, value in msgspec.structs.asdict(service.spec).items()
        if value != getattr(_DEFAULTS, name) and name not in CHOICE_INDEPENDENT_FIELDS
    }
    return hashlib.sha256(msgspec.json.encode(stated, order="sorted")).hexdigest()[:16]
