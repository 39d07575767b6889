"""The replacement of a replica whose speed has fallen: the decision, and what follows for a simulated service."""

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.placement.actions import Action, Admit, EvictUnit
from controller.placement.planner import PlanRules, plan
from controller.placement.pod_units import restrict_to_better_place
from controller.placement.pool_limits import PoolQuota, PoolRules
from controller.placement.replacement import (
    LEAST_PAUSE,
    PLACE_SECONDS,
    START_SECONDS,
    DegradedReplica,
    PresentReplica,
    ReplacementRules,
    ServiceFacts,
    begin_replacement,
    continue_replacement,
    count_surge,
    find_hold,
    find_replica,
    is_active,
    least_speed,
    pick_worst,
    record_recovery,
)
from controller.placement.units import Unit
from crds.meta import Priority
from crds.placement import SpeedReplacement
from kube.time import rfc3339
from tests.support.waiting_units import GPU, gpu_cell, running_unit, waiting_unit

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RULES = ReplacementRules(is_on=True)
SLOW = DegradedReplica("node/a", "", 40.0, 140.0)
COOL = RULES.cool_down_seconds


def replica(name: str, *, is_ready: bool = True, place: str | None = None, is_marked: bool = False) -> PresentReplica:
    place = f"node/{name}" if place is None else place
    return PresentReplica(f"uid-{name}", place, is_ready, is_marked, name, ("10.0.0.1",))


def facts(*replicas: PresentReplica, wanted: int = 1, **fields: Any) -> ServiceFacts:
    return ServiceFacts(wanted, replicas, **fields)


def begun(**fields: Any) -> SpeedReplacement:
    made = begin_replacement(SLOW, replica("a"), least_speed(SLOW, RULES), "node/b", NOW)
    return msgspec.structs.replace(made, **fields)


def ended(seconds_ago: float, **fields: Any) -> SpeedReplacement:
    given: dict[str, Any] = {"outcome": "Moved", "to_place": "node/a", "helped": True}
    return begun(ended_at=rfc3339(NOW - timedelta(seconds=seconds_ago)), **(given | fields))


@pytest.mark.parametrize(
    ("last", "service", "beside", "reason"),
    [
        (None, facts(replica("a")), [], None),
        (None, facts(replica("a"), is_protected=True), [], "Protected"),
        (None, facts(replica("a"), obstacle="its volume is on one node"), [], "NotMovable"),
        (None, facts(replica("a"), replica("b", is_ready=False), wanted=2), [], "NotReady"),
        (None, facts(replica("a"), is_settled=False), [], "NotReady"),
        (None, facts(replica("a"), replica("b")), [], "NotReady"),
        (None, facts(replica("a")), [ended(COOL - 1)], "CoolDown"),
        (None, facts(replica("a")), [ended(COOL), begun()], None),
        (ended(COOL - 1), facts(replica("a")), [], "CoolDown"),
        (ended(-3600), facts(replica("a")), [], "CoolDown"),
        (ended(COOL), facts(replica("a")), [], None),
        (ended(COOL, helped=False), facts(replica("a")), [], "DidNotHelp"),
        (ended(COOL, helped=False), facts(replica("c")), [], None),
        (ended(COOL, outcome="GivenUp", to_place="", helped=False), facts(replica("a")), [], None),
    ],
)
def test_slow_replica_stays_for_these_reasons(
    last: SpeedReplacement | None, service: ServiceFacts, beside: list[SpeedReplacement], reason: str | None
) -> None:
    hold = find_hold(last, service, beside, NOW, RULES)
    assert (hold.reason if hold is not None else None) == reason


def test_nothing_is_replaced_beside_another_replacement_or_without_the_option() -> None:
    for hold, reason in (
        (find_hold(None, facts(replica("a")), [], NOW, RULES, is_other_moving=True), "TooManyMoves"),
        (find_hold(None, facts(replica("a")), [], NOW, ReplacementRules()), "ReplacementOff"),
    ):
        assert hold is not None
        assert hold.reason == reason


def test_place_is_better_only_if_it_is_faster_than_what_is_observed_by_a_margin() -> None:
    assert least_speed(SLOW, RULES) == pytest.approx(57.1, abs=0.1)
    assert begun().least_tokens_per_second == "57.1"
    assert "replica a on node/a gives a single request 40.0 of 140 tokens/s" in begun().message


def test_replica_that_does_not_fit_goes_first_and_then_the_slowest_in_relation_to_its_hardware() -> None:
    other = DegradedReplica("node/b", "", 20.0, 30.0)
    misfit = DegradedReplica("node/c", misfit="too little memory")
    assert pick_worst([other, SLOW]) == SLOW
    assert pick_worst([other, SLOW, misfit]) == misfit
    assert least_speed(misfit, RULES) == 0.0
    made = begin_replacement(misfit, replica("c"), 0.0, "node/d", NOW)
    assert (made.observed, made.expected) == ("", "")
    assert made.message.startswith("replica c on node/c does not fit there any more: too little memory")


@pytest.mark.parametrize(
    ("seconds", "service", "outcome", "words"),
    [
        (1, facts(replica("a")), None, ""),
        (PLACE_SECONDS, facts(replica("a"), replica("b", is_ready=False, place="")), "GivenUp", "was taken"),
        (PLACE_SECONDS, facts(replica("a"), replica("b", is_ready=False)), None, ""),
        (START_SECONDS, facts(replica("a"), replica("b", is_ready=False)), "GivenUp", "not ready within 3600 s"),
        (START_SECONDS, facts(replica("a"), replica("b")), None, ""),
        (START_SECONDS + PLACE_SECONDS, facts(replica("a"), replica("b")), "GivenUp", "did not end within 3720 s"),
        (9, facts(replica("b")), "Moved", "node/b"),
        (9, facts(), "GivenUp", "ended before another"),
        (9, facts(replica("a", is_ready=False), replica("b", is_ready=False)), "GivenUp", "not ready any more"),
        (9, facts(replica("a"), is_settled=False), "GivenUp", "edited"),
        (9, facts(replica("a"), obstacle="its volume is on one node"), "GivenUp", "one node"),
    ],
)
def test_replacement_goes_on_until_it_is_over(
    seconds: float, service: ServiceFacts, outcome: str | None, words: str
) -> None:
    progress = continue_replacement(begun(), service, NOW + timedelta(seconds=seconds))
    assert progress.replacement.outcome == outcome
    assert words in progress.replacement.message
    assert (progress.replacement.ended_at is None) == (outcome is None)
    assert (progress.again_seconds is None) == (outcome is not None)


@pytest.mark.parametrize("started_at", ["9999-12-31T23:59:59Z", "2026-01-01T03:00:00Z", "soon", ""])
@pytest.mark.parametrize("service", [facts(replica("a")), facts(replica("a"), replica("b"))])
def test_replacement_that_was_forged_to_begin_in_the_future_is_over(started_at: str, service: ServiceFacts) -> None:
    assert continue_replacement(begun(started_at=started_at), service, NOW).replacement.outcome == "GivenUp"


def test_replacement_helped_once_its_new_place_is_as_fast_as_expected() -> None:
    moved = ended(1, to_place="node/b", helped=False)
    assert not record_recovery(moved, ["node/a"]).helped
    assert record_recovery(moved, ["node/b"]).helped
    assert not record_recovery(ended(1, outcome="GivenUp", helped=False), ["node/a"]).helped


class SimulatedService:
    """A service whose Deployment and ReplicaSet do as Kubernetes documents, and whose decisions are the real ones."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.now = wanted, NOW
        self.pods = [replica(f"first{number}") for number in range(wanted)]
        self.last: SpeedReplacement | None = None
        self.begun_at: list[datetime] = []
        self.has_slow = False
        self._made = 0

    def reconcile(self) -> None:
        service = facts(*self.pods, wanted=self.wanted)
        if self.last is not None and is_active(self.last):
            self.last = continue_replacement(self.last, service, self.now).replacement
        elif self.has_slow and self.pods and find_hold(self.last, service, [], self.now, RULES) is None:
            slow = SLOW._replace(place=self.pods[0].place)
            self.last = begin_replacement(slow, self.pods[0], 57.0, "node/better", self.now)
            self.begun_at.append(self.now)
        leaving = self.last.uid if self.last is not None and is_active(self.last) else ""
        surge = count_surge(self.last, self.pods, self.wanted)
        # The number is decided by what was seen before the mark was written.
        self._scale(self.wanted + surge)
        self.pods = [pod._replace(is_marked=pod.uid == leaving) for pod in self.pods]

    def _scale(self, count: int) -> None:
        while len(self.pods) < count:
            self._made += 1
            self.pods.append(replica(f"made{self._made}", is_ready=False, place=""))
        ranked = sorted(self.pods, key=lambda replica: (bool(replica.place), replica.is_ready, not replica.is_marked))
        gone = ranked[: max(0, len(self.pods) - count)]
        assert all(present_replica.is_marked for present_replica in gone if present_replica.is_ready), (
            "Kubernetes would end any of them"
        )
        self.pods = [pod for pod in self.pods if pod not in gone]

    def place(self) -> None:
        self._change(lambda pod: not pod.place, lambda pod: pod._replace(place=f"node/{pod.uid}"))

    def start(self) -> None:
        self._change(lambda pod: bool(pod.place) and not pod.is_ready, lambda pod: pod._replace(is_ready=True))

    def _change(self, concerns: Any, change: Any) -> None:
        index = next((index for index, pod in enumerate(self.pods) if concerns(pod)), None)
        if index is not None:
            self.pods[index] = change(self.pods[index])

    @property
    def ready(self) -> int:
        return sum(pod.is_ready for pod in self.pods)


STEPS = st.lists(
    st.sampled_from(["reconcile", "place", "start", "slow", "fine", "minute", "half an hour", "helped"]), max_size=60
)


def take_step(service: SimulatedService, step: str) -> None:
    match step:
        case "reconcile":
            service.reconcile()
        case "place":
            service.place()
        case "start":
            service.start()
        case "slow" | "fine":
            service.has_slow = step == "slow"
        case "helped" if service.last is not None:
            service.last = record_recovery(service.last, [service.last.to_place])
        case "minute" | "half an hour":
            service.now += timedelta(seconds=60 if step == "minute" else COOL)


@given(wanted=st.integers(1, 3), steps=STEPS)
def test_no_replica_is_missing_and_replacements_are_rare_whatever_happens(wanted: int, steps: list[str]) -> None:
    service = SimulatedService(wanted)
    for step in steps:
        take_step(service, step)
        assert service.ready >= wanted
        assert len(service.pods) <= wanted + 1
    pauses = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(service.begun_at)]
    assert all(pause >= COOL for pause in pauses)


def test_simulated_service_moves_its_slow_replica() -> None:
    service = SimulatedService(2)
    for step in ("slow", "reconcile", "place", "reconcile", "start", "reconcile", "reconcile"):
        take_step(service, step)
    assert [pod.uid for pod in service.pods] == ["uid-first1", "uid-made1"]
    assert service.last is not None
    assert (service.last.outcome, service.last.to_place) == ("Moved", "node/uid-made1")


@given(
    wanted=st.integers(1, 3),
    steps=st.lists(st.sampled_from(["slow", "reconcile", "place", "start", "kill", "minute"]), max_size=60),
)
def test_pods_that_die_meanwhile_are_replaced(wanted: int, steps: list[str]) -> None:
    service = SimulatedService(wanted)
    for step in steps:
        if step == "kill" and service.pods:
            service.pods.pop(0)
        else:
            take_step(service, step)
    service.has_slow = False
    service.now += timedelta(seconds=2 * START_SECONDS)
    for _ in range(4):
        for step in ("reconcile", "place", "start"):
            take_step(service, step)
    service.reconcile()
    assert (service.ready, len(service.pods), is_active(service.last)) == (wanted, wanted, False)


@pytest.mark.parametrize(
    ("last", "replicas", "surge"),
    [
        (begun(), [replica("a", is_marked=True)], 1),
        (begun(), [replica("a", is_marked=True), replica("b", is_ready=False)], 1),
        (begun(), [replica("a"), replica("b")], 1),
        (begun(), [replica("a", is_marked=True), replica("b")], 0),
        (begun(), [replica("b")], 0),
        (ended(0), [replica("a")], 0),
        (None, [replica("a")], 0),
    ],
    ids=["begun", "starting", "not marked", "ready", "gone", "over", "none"],
)
def test_slow_replica_ends_only_when_another_is_ready_and_it_is_marked(
    last: SpeedReplacement | None, replicas: list[PresentReplica], surge: int
) -> None:
    assert count_surge(last, replicas, 1) == surge


def test_second_place_is_held_for_a_tenth_of_the_time_at_most() -> None:
    slow_start = begun(
        started_at=rfc3339(NOW - timedelta(seconds=2 * START_SECONDS)),
        ended_at=rfc3339(NOW - timedelta(seconds=START_SECONDS)),
        outcome="GivenUp",
    )
    last = NOW + timedelta(seconds=(LEAST_PAUSE - 1) * START_SECONDS)
    hold = find_hold(slow_start, facts(replica("a")), [], last - timedelta(seconds=1), RULES)
    assert (hold.reason if hold is not None else None) == "CoolDown"
    assert find_hold(slow_start, facts(replica("a")), [], last, RULES) is None


def test_slow_replica_is_found_among_others_on_its_node() -> None:
    first, second = replica("a"), replica("b", place="node/a")._replace(addresses=("fd00::2", "10.0.0.2"))
    assert find_replica(SLOW._replace(address="10.0.0.2"), [first, second]) == second
    assert find_replica(SLOW._replace(address="10.0.0.3"), [first, second]) is None


CELLS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.sampled_from(["", "x"])), min_size=1, max_size=4)
WAITING = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(get_args(Priority)), st.integers(0, 99), st.sampled_from(["", "x"])),
    max_size=5,
)

RULES_OF_QUEUE = st.builds(
    lambda quota, elastic: PlanRules(
        quotas={} if quota is None else {("team", "nvidia"): PoolQuota(devices=quota)},
        pools={"nvidia": PoolRules(elastic=elastic)},
    ),
    st.none() | st.integers(0, 6),
    st.integers(0, 2),
)


@given(cells=CELLS, waiting=WAITING, own=st.sampled_from(get_args(Priority)), rules=RULES_OF_QUEUE)
def test_replica_for_a_better_place_takes_nothing_that_another_would_get(
    cells: list[tuple[int, int, str]], waiting: list[tuple[int, Priority, int, str]], own: Priority, rules: PlanRules
) -> None:
    nodes = [
        gpu_cell(f"n{number}", 4, min(free, total), closed="Cordoned" if closed else "")
        for number, (total, free, closed) in enumerate(cells)
    ]
    running = [
        running_unit(waiting_unit(f"r{number}", 4 - cell.free[GPU], priority="batch"), cell.id)
        for number, cell in enumerate(nodes)
        if cell.free[GPU] < 4
    ]
    others = [
        waiting_unit(f"w{number}", need, priority=priority, enqueued_at=float(at), is_protected=bool(protected))
        for number, (need, priority, at, protected) in enumerate(waiting)
    ]
    # Its place in the queue is that of a replica that has gone, and so is before all others.
    surge = restrict_to_better_place(waiting_unit("surge", priority=own, enqueued_at=-1.0), "node/n9", 0.0)
    without = plan(nodes, [*running, *others], rules, 10_000.0)
    beside = plan(nodes, [*running, *others, surge], rules, 10_000.0)
    ours = [action for action in beside.actions if unit_of(action).uid == surge.uid]
    assert [action for action in beside.actions if action not in ours] == list(without.actions)
    assert {uid: block for uid, block in beside.blocked.items() if uid != surge.uid} == without.blocked
    for our in ours:
        assert isinstance(our, Admit)
        (cell,) = our.cells
        closure = without.closed.get(cell)
        assert closure is None, "no other one waits for this node"
        assert without.left[cell][GPU] >= 1


def unit_of(action: Action) -> Unit:
    return action.preemptor if isinstance(action, EvictUnit) else action.unit
