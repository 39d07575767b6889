"""The decision about benchmarks: which to start, which to end, and which results to store.

A benchmark is worth nothing to a service that waits. So none is started, and each is ended, while anything waits in
the queue for its accelerator. One that fails is tried again after a back-off, and after three tries not before its
service or the controller's image changes; the service says why.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from controller.benchmarks.benchmark_job import BenchmarkJob, BenchmarkKey
from controller.services.performance_source import BenchmarkProblem
from fitness.performance import MeasuredPerformance
from kube.backoff import EXACT, backoff_seconds
from kube.resources import ObjectKey

MOST_AT_ONCE: Final = 2
"""Benchmarks in the whole cluster that run at once."""
MOST_ATTEMPTS: Final = 3
FIRST_RETRY_SECONDS: Final = 60.0
LAST_RETRY_SECONDS: Final = 3600.0
_BROKEN: Final = frozenset({"Broken", "Failed"})


class WantedBenchmark(NamedTuple):
    """A model on a device class that was not measured, and that a service would use."""

    key: BenchmarkKey
    service: ObjectKey
    accelerator: str
    inputs: str
    nodes: tuple[str, ...] = ()
    """Idle nodes of the class."""


class StartedBenchmark(NamedTuple):
    """A benchmark to start."""

    wanted: WantedBenchmark
    node: str
    attempt: int


class EndedBenchmark(NamedTuple):
    """A Job to delete."""

    job: BenchmarkJob
    cause: str
    """A word for the log."""


class BenchmarkPlan(NamedTuple):
    """All that is to be done."""

    start: tuple[StartedBenchmark, ...] = ()
    end: tuple[EndedBenchmark, ...] = ()
    failed: tuple[BenchmarkJob, ...] = ()
    """Those of the Jobs to delete that count as failed; they are to be among the Jobs that exist from now on."""
    store: tuple[tuple[BenchmarkKey, MeasuredPerformance], ...] = ()
    problems: Mapping[ObjectKey, BenchmarkProblem] = {}
    again_seconds: float | None = None


def plan_benchmarks(
    wanted: Sequence[WantedBenchmark], there: Sequence[BenchmarkJob], busy: Collection[str], now: datetime
) -> BenchmarkPlan:
    """Decide.

    Args:
        wanted: the benchmarks that are worth while; what is measured is none.
        there: the Jobs that exist.
        busy: the accelerators for which anything waits.
        now: the time.
    """
    by_key = {each.key: each for each in wanted}
    end = list[EndedBenchmark]()
    latest: dict[BenchmarkKey, BenchmarkJob] = {}
    for job in sorted(there, key=lambda each: (each.order.attempt, each.ref.name)):
        if cause := _find_end(job, by_key.get(job.key), busy):
            end.append(EndedBenchmark(job, cause))
            continue
        if (earlier := latest.get(job.key)) is not None:
            end.append(EndedBenchmark(earlier, "superseded"))
        latest[job.key] = job
    failed = list[BenchmarkJob]()
    for key, job in latest.items():
        if job.trouble is not None:
            end.append(EndedBenchmark(job, "stopped"))
            latest[key] = job._replace(outcome=job.trouble, trouble=None, is_gone=True)
            failed.append(latest[key])
    stored = tuple((key, job.record) for key, job in latest.items() if job.record is not None)
    start, problems, waits = _plan_starts(wanted, latest, busy, now)
    return BenchmarkPlan(tuple(start), tuple(end), tuple(failed), stored, problems, min(waits, default=None))


def _plan_starts(
    wanted: Sequence[WantedBenchmark],
    latest: Mapping[BenchmarkKey, BenchmarkJob],
    busy: Collection[str],
    now: datetime,
) -> tuple[list[StartedBenchmark], dict[ObjectKey, BenchmarkProblem], list[float]]:
    """Return the benchmarks to start, the services that could not be measured, and the pauses before further tries."""
    room = MOST_AT_ONCE - sum(job.outcome.state == "Going" for job in latest.values())
    start, problems, waits = list[StartedBenchmark](), dict[ObjectKey, BenchmarkProblem](), list[float]()
    taken = set[str]()
    for each in wanted:
        attempt = 0
        if (last := latest.get(each.key)) is not None:
            if last.outcome.state not in _BROKEN:
                continue
            problems[each.service] = describe_failure(last)
            attempt, wait = last.order.attempt + 1, _find_wait(last, now)
            if attempt >= MOST_ATTEMPTS or last.outcome.state == "Failed":
                continue
            if wait > 0:
                waits.append(wait)
                continue
        node = next((name for name in each.nodes if name not in taken), None)
        if node is None or each.accelerator in busy or len(start) >= room:
            continue
        taken.add(node)
        start.append(StartedBenchmark(each, node, attempt))
    return start, problems, waits


def _find_end(job: BenchmarkJob, wanted: WantedBenchmark | None, busy: Collection[str]) -> str:
    """Return why a Job is deleted, as one word; empty if it stays."""
    if wanted is None:
        return "unwanted"
    if wanted.inputs != job.order.inputs:
        return "outdated"
    if job.outcome.state == "Going" and job.order.accelerator in busy:
        return "gives_way"
    return ""


def _find_wait(job: BenchmarkJob, now: datetime) -> float:
    """Return the seconds until the next attempt."""
    pause = backoff_seconds(job.order.attempt + 1, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS, jitter=EXACT)
    ended = job.outcome.ended or now
    return (ended + timedelta(seconds=pause) - now).total_seconds()


def describe_failure(job: BenchmarkJob) -> BenchmarkProblem:
    """Return the failure of a benchmark for people."""
    tries, outcome = job.order.attempt + 1, job.outcome
    is_over = tries >= MOST_ATTEMPTS or outcome.state == "Failed"
    anew = f": kubectl -n {job.ref.namespace} delete job {job.ref.name} tries it anew" if not job.is_gone else ""
    further = (
        f"it is not tried again before the service is edited{anew}"
        if is_over
        else f"try {tries} of {MOST_ATTEMPTS}, and it is tried again"
    )
    message = f"the speed on {job.order.device_class} could not be measured: {outcome.message.rstrip('.')}; {further}"
    return BenchmarkProblem(outcome.reason or "BenchmarkFailed", message)
