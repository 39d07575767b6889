"""Benchmarks are few, give way at once, end for good after some failures, and lose no result."""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from controller.benchmarks.benchmark_job import BenchmarkJob, BenchmarkKey, BenchmarkOrder
from controller.benchmarks.benchmark_plan import (
    MOST_AT_ONCE,
    MOST_ATTEMPTS,
    MOST_FOREIGN,
    MOST_PROBES,
    BenchmarkPlan,
    WantedBenchmark,
    plan_benchmarks,
)
from controller.benchmarks.probe_requests import NO_PROBES, PlannedProbes
from controller.models.jobs import JobOutcome
from controller.reconcile.plan import Ref
from fitness.performance import MeasuredPerformance
from kube.resources import JOBS, ObjectKey

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
GOING = JobOutcome(state="Going")
FAST = MeasuredPerformance(tokens_per_second=100)
CHAT = ObjectKey("team", "chat")


def wanted(
    name: str = "a", *nodes: str, accelerator: str = "nvidia", inputs: str = "1", namespace: str = "team"
) -> WantedBenchmark:
    key = BenchmarkKey(namespace, "hash", name)
    return WantedBenchmark(key, ObjectKey(namespace, "chat"), accelerator, inputs, nodes)


def failed(minutes_ago: float = 0.0, *, final: bool = False) -> JobOutcome:
    return JobOutcome(
        state="Failed" if final else "Broken",
        reason="EngineFailed",
        message="no memory",
        ended=NOW - timedelta(minutes=minutes_ago),
    )


def job(
    name: str = "a",
    outcome: JobOutcome = GOING,
    *,
    attempt: int = 0,
    inputs: str = "1",
    accelerator: str = "nvidia",
    record: MeasuredPerformance | None = None,
    trouble: JobOutcome | None = None,
    namespace: str = "team",
    is_own: bool = True,
) -> BenchmarkJob:
    order = BenchmarkOrder(
        model_hash="hash", device_class=name, accelerator=accelerator, service="chat", inputs=inputs, attempt=attempt
    )
    ref = Ref(JOBS, namespace, f"job-{name}-{attempt}", f"uid-{name}-{attempt}")
    key = BenchmarkKey(namespace, "hash", name)
    return BenchmarkJob(ref, key, order, outcome, record, trouble, is_own)


def plan(
    wants: Sequence[WantedBenchmark],
    jobs: Sequence[BenchmarkJob] = (),
    busy: Collection[str] = (),
    turns: Mapping[str, int] = {},
    probes: PlannedProbes = NO_PROBES,
) -> BenchmarkPlan:
    return plan_benchmarks(wants, jobs, busy, NOW, turns, probes=probes)


def started(made: BenchmarkPlan) -> list[tuple[str, str, int]]:
    return [(each.wanted.key.device_class, each.node, each.attempt) for each in made.start]


def ended(made: BenchmarkPlan) -> list[tuple[str, str]]:
    return [(each.job.ref.name, each.cause) for each in made.end]


def test_unknown_pair_is_measured_on_an_idle_node() -> None:
    assert started(plan([wanted("a", "n1", "n2")])) == [("a", "n1", 0)]
    assert plan([wanted("a")]) == BenchmarkPlan()


def test_nothing_starts_while_anything_waits_for_the_accelerator() -> None:
    made = plan([wanted("a", "n1"), wanted("b", "n2", accelerator="amd")], busy={"nvidia"})
    assert started(made) == [("b", "n2", 0)]


def test_benchmark_gives_way_without_being_a_failure() -> None:
    made = plan([wanted("a", "n1"), wanted("b", "n2")], [job("a"), job("b", accelerator="amd")], busy={"nvidia"})
    assert ended(made) == [("job-a-0", "gives_way")]
    assert made.problems == {}
    assert made.failed == ()
    assert started(made) == []


def test_result_is_stored_though_something_waits() -> None:
    done = job("a", JobOutcome(state="Succeeded"), record=FAST)
    made = plan([wanted("a", "n1")], [done], busy={"nvidia"})
    assert made.store == ((done.key, FAST),)
    assert (started(made), ended(made)) == ([], [])


def test_job_that_nobody_wants_any_more_is_deleted_and_stores_nothing() -> None:
    done = job("a", JobOutcome(state="Succeeded"), record=FAST)
    made = plan([], [done, job("b")])
    assert ended(made) == [("job-a-0", "unwanted"), ("job-b-0", "unwanted")]
    assert made.store == ()


def test_few_run_at_once_and_each_on_a_node_of_its_own() -> None:
    wants = [wanted(each, "n1", "n2", "n3") for each in "abcd"]
    assert started(plan(wants)) == [("a", "n1", 0), ("b", "n2", 0)]
    assert started(plan(wants, [job("a")])) == [("b", "n1", 0)]
    assert started(plan(wants, [job("a"), job("b")])) == []


def test_failure_is_tried_again_after_a_back_off() -> None:
    early = plan([wanted("a", "n1")], [job("a", failed(0.5))])
    assert (started(early), early.again_seconds) == ([], 30.0)
    late = plan([wanted("a", "n1")], [job("a", failed(1.5))])
    assert started(late) == [("a", "n1", 1)]
    second = plan([wanted("a", "n1")], [job("a", failed(1.5), attempt=1)])
    assert second.again_seconds == 30.0
    for made in (early, late, second):
        assert made.problems[CHAT].reason == "EngineFailed"
        assert "speed on a could not be measured: no memory; try" in made.problems[CHAT].message


def test_earlier_attempt_is_deleted_once_the_next_exists() -> None:
    made = plan([wanted("a", "n1")], [job("a", attempt=1), job("a", failed(2))])
    assert ended(made) == [("job-a-0", "superseded")]
    assert made.problems == {}


def test_no_failure_is_tried_for_ever() -> None:
    last = job("a", failed(1e6), attempt=MOST_ATTEMPTS - 1)
    made = plan([wanted("a", "n1")], [last])
    assert (started(made), ended(made), made.again_seconds) == ([], [], None)
    assert "not tried again before the service is edited" in made.problems[CHAT].message
    assert "kubectl -n team delete job job-a-2" in made.problems[CHAT].message
    assert started(plan([wanted("a", "n1")], [job("a", failed(1e6, final=True))])) == []


def test_edit_makes_another_try_worth_while() -> None:
    last = job("a", failed(1e6), attempt=MOST_ATTEMPTS - 1)
    made = plan([wanted("a", "n1", inputs="2")], [last])
    assert ended(made) == [("job-a-2", "outdated")]
    assert started(made) == [("a", "n1", 0)]
    assert made.problems == {}


def test_job_without_a_hope_is_ended_and_counts_as_failed() -> None:
    made = plan([wanted("a", "n1")], [job("a", trouble=failed())])
    assert ended(made) == [("job-a-0", "stopped")]
    (kept,) = made.failed
    assert (kept.outcome.reason, kept.trouble) == ("EngineFailed", None)
    assert made.problems[CHAT].reason == "EngineFailed"
    assert started(made) == []
    again = plan([wanted("a", "n1")], [kept])
    assert (ended(again), again.problems[CHAT].reason, again.again_seconds) == ([], "EngineFailed", 60.0)


def test_jobs_of_others_that_run_count_as_none_and_are_ended_a_few_at_once() -> None:
    forged = [job(f"f{each:03}", namespace="evil", is_own=False) for each in range(100)]
    made = plan([wanted("a", "n1"), wanted("b", "n2")], [*forged, job("c", accelerator="amd")], busy={"amd"})
    assert started(made) == [("a", "n1", 0), ("b", "n2", 0)]
    assert ended(made) == [
        ("job-c-0", "unwanted"),
        *[(each.ref.name, "foreign") for each in forged[:MOST_FOREIGN]],
    ]


def test_forged_job_of_a_wanted_pair_does_not_stand_in_for_it() -> None:
    made = plan([wanted("a", "n1")], [job("a", is_own=False)])
    assert (started(made), ended(made)) == ([("a", "n1", 0)], [("job-a-0", "foreign")])


def test_namespace_with_many_models_does_not_starve_another() -> None:
    many = [wanted(f"m{each}", "n1", "n2", namespace="big") for each in range(1000)]
    small = [wanted("a", "n1", "n2", namespace="small")]
    assert started(plan([*many, *small])) == [("m0", "n1", 0), ("a", "n2", 0)]
    running = [job("m0", namespace="big")]
    assert started(plan([*many, *small], running, turns={"big": 1})) == [("a", "n1", 0)]
    assert started(plan([*many, *small], running, turns={"big": 1, "small": 2})) == [("a", "n1", 0)]
    assert started(plan(many)) == [("m0", "n1", 0), ("m1", "n2", 0)]


def test_namespaces_that_wait_take_turns() -> None:
    wants = [wanted("a", "n1", namespace=each) for each in "xyz"]
    turns = dict[str, int]()
    order = list[str]()
    for number in range(6):
        (first,) = plan(wants, turns=turns).start
        turns[first.wanted.key.namespace] = number + 1
        order.append(first.wanted.key.namespace)
    assert order == [*"xyz", *"xyz"]


def test_node_that_another_takes_costs_a_namespace_no_more_than_the_pair() -> None:
    wants = [wanted("a", "n1", namespace="x"), wanted("b", "n1", namespace="y"), wanted("c", "n2", namespace="y")]
    assert started(plan(wants)) == [("a", "n1", 0), ("c", "n2", 0)]


def keys(names: str, namespace: str = "team") -> frozenset[BenchmarkKey]:
    return frozenset(wanted(each, namespace=namespace).key for each in names)


def test_pairs_for_which_a_service_waits_are_measured_first_and_beside_others() -> None:
    wants = [wanted(each, "n1", "n2", "n3") for each in "abcd"]
    assert started(plan(wants, probes=PlannedProbes(keys("d")))) == [("d", "n1", 0), ("a", "n2", 0), ("b", "n3", 0)]
    running = [job("a"), job("b")]
    assert started(plan(wants, running, probes=PlannedProbes(keys("cd")))) == [("c", "n1", 0), ("d", "n2", 0)]
    many = [wanted(each, *(f"n{number}" for number in range(9))) for each in "abcdef"]
    assert len(plan(many, probes=PlannedProbes(keys("abcdef"))).start) == MOST_PROBES


def test_probe_gives_way_and_is_not_started_where_anything_waits() -> None:
    wants, probes = [wanted("a", "n1")], PlannedProbes(keys("a"))
    assert ended(plan(wants, [job("a")], busy={"nvidia"}, probes=probes)) == [("job-a-0", "gives_way")]
    assert started(plan(wants, busy={"nvidia"}, probes=probes)) == []


def test_nobody_waits_for_a_second_try() -> None:
    assert started(plan([wanted("a", "n1")], [job("a", failed(5))], probes=PlannedProbes(keys("a")))) == []


def test_devices_of_a_wait_that_ends_are_left_to_the_service() -> None:
    wants, probes = [wanted("a", "n1"), wanted("b", "n2")], PlannedProbes(held=keys("ab"))
    made = plan(wants, [job("a")], probes=probes)
    assert (ended(made), started(made)) == ([("job-a-0", "too_late")], [])
    assert made.problems == {}
    done = job("a", JobOutcome(state="Succeeded"), record=FAST)
    assert plan(wants, [done], probes=probes).store == ((done.key, FAST),)


outcomes = st.sampled_from([GOING, failed(0), failed(1e6), failed(1e6, final=True)])
jobs = st.builds(
    job,
    st.sampled_from("abcde"),
    outcomes,
    attempt=st.integers(0, 4),
    inputs=st.sampled_from("12"),
    accelerator=st.sampled_from(["nvidia", "amd"]),
    trouble=st.none() | st.just(failed()),
    namespace=st.sampled_from(["team", "other"]),
    is_own=st.booleans(),
)
pairs = st.tuples(st.sampled_from(["team", "other"]), st.sampled_from("abcde"))
pair_keys = pairs.map(lambda found: BenchmarkKey(found[0], "hash", found[1]))
wishes = st.lists(pairs, unique=True).map(lambda found: [wanted(name, "n1", "n2", namespace=ns) for ns, name in found])


@given(
    wishes,
    st.lists(jobs, unique_by=lambda each: (each.ref.namespace, each.ref.name), max_size=8),
    st.sets(st.sampled_from(["nvidia", "amd"])),
    st.builds(PlannedProbes, st.frozensets(pair_keys), st.frozensets(pair_keys)),
)
def test_plan_keeps_its_bounds(
    wants: list[WantedBenchmark], there: list[BenchmarkJob], busy: set[str], probes: PlannedProbes
) -> None:
    probes = probes._replace(held=probes.held - probes.wanted)
    made = plan(wants, there, busy, probes=probes)
    gone = {each.job.ref for each in made.end}
    going = [each for each in there if each.ref not in gone and each.outcome.state == "Going"]
    assert all(each.is_own for each in going)
    first = [each for each in made.start if each.wanted.key in probes.wanted]
    waited = [each for each in going if each.key in probes.wanted]
    assert len(waited) + len(first) <= max(MOST_PROBES, len(waited))
    beside, others = len(going) - len(waited), len(made.start) - len(first)
    assert beside + others <= max(MOST_AT_ONCE, beside)
    assert probes.held.isdisjoint({each.wanted.key for each in made.start} | {each.key for each in going})
    assert len(gone) == len(made.end)
    assert all(each.attempt < MOST_ATTEMPTS for each in made.start)
    assert not any(each.wanted.accelerator in busy for each in made.start)
    assert not any(each.order.accelerator in busy for each in going)
    assert len({each.node for each in made.start}) == len(made.start)
    assert {each.wanted.key for each in made.start}.isdisjoint({each.key for each in going})


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("abcdefgh")), unique=True, min_size=1),
    st.lists(st.integers(0, 7), max_size=40),
)
def test_no_namespace_starts_twice_while_another_waits(pairs: list[tuple[str, str]], ends: list[int]) -> None:
    """Benchmarks end in any order; between two starts of a namespace, each other that waits has one."""
    todo = [wanted(name, "n1", "n2", namespace=namespace) for namespace, name in pairs]
    turns, going, log = dict[str, int](), list[BenchmarkJob](), list[str]()
    for end in [0, *ends, *[0] * len(pairs)]:
        made = plan(todo, going, turns=turns)
        for each in made.start:
            namespace, _, name = each.wanted.key
            waiting = {other.key.namespace for other in todo if other.key not in {job.key for job in going}}
            since = log[len(log) - log[::-1].index(namespace) :] if namespace in log else None
            running = {job.key.namespace for job in going}
            assert since is None or waiting - {namespace} - set(since) - running == set()
            turns[namespace] = len(log) + 1
            log.append(namespace)
            going.append(job(name, namespace=namespace))
        if going:
            done = going.pop(end % len(going))
            todo = [each for each in todo if each.key != done.key]
    assert (todo, going) == ([], [])
