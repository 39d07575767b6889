"""Benchmarks are few, give way at once, end for good after some failures, and lose no result."""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from controller.benchmarks.benchmark_job import BenchmarkJob, BenchmarkKey, BenchmarkOrder
from controller.benchmarks.benchmark_plan import (
    MOST_AT_ONCE,
    MOST_ATTEMPTS,
    BenchmarkPlan,
    WantedBenchmark,
    plan_benchmarks,
)
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
) -> BenchmarkJob:
    order = BenchmarkOrder(
        model_hash="hash", device_class=name, accelerator=accelerator, service="chat", inputs=inputs, attempt=attempt
    )
    ref = Ref(JOBS, "team", f"job-{name}-{attempt}", f"uid-{name}-{attempt}")
    return BenchmarkJob(ref, BenchmarkKey("team", "hash", name), order, outcome, record, trouble)


def plan(
    wants: Sequence[WantedBenchmark], jobs: Sequence[BenchmarkJob] = (), busy: Collection[str] = ()
) -> BenchmarkPlan:
    return plan_benchmarks(wants, jobs, busy, NOW)


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


outcomes = st.sampled_from([GOING, failed(0), failed(1e6), failed(1e6, final=True)])
jobs = st.builds(
    job,
    st.sampled_from("abcde"),
    outcomes,
    attempt=st.integers(0, 4),
    inputs=st.sampled_from("12"),
    accelerator=st.sampled_from(["nvidia", "amd"]),
    trouble=st.none() | st.just(failed()),
)
wishes = st.lists(st.sampled_from("abcde"), unique=True).map(lambda names: [wanted(each, "n1", "n2") for each in names])


@given(
    wishes,
    st.lists(jobs, unique_by=lambda each: each.ref.name, max_size=8),
    st.sets(st.sampled_from(["nvidia", "amd"])),
)
def test_plan_keeps_its_bounds(wants: list[WantedBenchmark], there: list[BenchmarkJob], busy: set[str]) -> None:
    made = plan(wants, there, busy)
    gone = {each.job.ref.name for each in made.end}
    going = [each for each in there if each.ref.name not in gone and each.outcome.state == "Going"]
    assert len({each.ref.name for each in going}) + len(made.start) <= max(MOST_AT_ONCE, len(going))
    assert len(gone) == len(made.end)
    assert all(each.attempt < MOST_ATTEMPTS for each in made.start)
    assert not any(each.wanted.accelerator in busy for each in made.start)
    assert not any(each.order.accelerator in busy for each in going)
    assert len({each.node for each in made.start}) == len(made.start)
    assert {each.wanted.key for each in made.start}.isdisjoint({each.key for each in going})
