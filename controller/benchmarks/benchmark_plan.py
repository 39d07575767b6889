"""The decision about benchmarks: which to start, which to end, and which results to store.

A benchmark is worth nothing to a service that waits. So none is started, and each is ended, while anything waits in
the queue for its accelerator. One that fails is tried again after a back-off, and after three tries not before its
service or the controller's image changes; the service says why.

Namespaces take turns, however many models each has. A Job that runs and that this leader has not started has no part
in the number that may run: it was forged, or an earlier leader started it, and it is ended.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from controller.benchmarks.benchmark_job import BenchmarkJob, BenchmarkKey
from controller.benchmarks.probe_requests import NO_PROBES, PlannedProbes
from controller.services.performance_source import BenchmarkProblem
from fitness.performance import MeasuredPerformance
from kube.backoff import EXACT, backoff_seconds
from kube.resources import ObjectKey

MOST_AT_ONCE: Final = 2
"""Benchmarks in the whole cluster that run at once, beside those for which a service waits."""
MOST_PROBES: Final = 4
"""Benchmarks in the whole cluster that run at once and for which a service waits."""
MOST_ATTEMPTS: Final = 3
MOST_FOREIGN: Final = 20
"""Jobs of others that are ended at once: whoever makes many delays nothing else."""
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
    wanted: Sequence[WantedBenchmark],
    there: Sequence[BenchmarkJob],
    busy: Collection[str],
    now: datetime,
    turns: Mapping[str, int],
    *,
    probes: PlannedProbes = NO_PROBES,
) -> BenchmarkPlan:
    """Decide.

    Args:
        wanted: the benchmarks that are worth while; what is measured is none.
        there: the Jobs that exist.
        busy: the accelerators for which anything waits.
        now: the time.
        turns: by namespace the number of its last start, of which later ones have higher numbers.
        probes: the pairs for which services wait.
    """
    by_key = {each.key: each for each in wanted}
    end = list[EndedBenchmark]()
    foreign = [each for each in there if each.is_foreign]
    own = [each for each in there if not each.is_foreign]
    latest: dict[BenchmarkKey, BenchmarkJob] = {}
    for job in sorted(own, key=lambda each: (each.order.attempt, each.ref.name)):
        if cause := _find_end(job, by_key.get(job.key), busy, probes.held):
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
    due, problems, waits = _list_due(wanted, latest, busy, now)
    start = _choose_starts(due, [key for key, job in latest.items() if job.outcome.state == "Going"], turns, probes)
    end += [EndedBenchmark(each, "foreign") for each in foreign[:MOST_FOREIGN]]
    return BenchmarkPlan(tuple(start), tuple(end), tuple(failed), stored, problems, min(waits, default=None))


def _list_due(
    wanted: Sequence[WantedBenchmark],
    latest: Mapping[BenchmarkKey, BenchmarkJob],
    busy: Collection[str],
    now: datetime,
) -> tuple[list[StartedBenchmark], dict[ObjectKey, BenchmarkProblem], list[float]]:
    """Return the benchmarks that could start, the services that were not measured, and the pauses before other tries.

    Each that could start has the first of its nodes.
    """
    due, problems, waits = list[StartedBenchmark](), dict[ObjectKey, BenchmarkProblem](), list[float]()
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
        if is_startable(each, busy):
            due.append(StartedBenchmark(each, each.nodes[0], attempt))
    return due, problems, waits


def is_startable(wanted: WantedBenchmark, busy: Collection[str]) -> bool:
    """Return whether a device is idle, and nothing waits for its accelerator."""
    return bool(wanted.nodes) and wanted.accelerator not in busy


def _choose_starts(
    due: Sequence[StartedBenchmark], going: Sequence[BenchmarkKey], turns: Mapping[str, int], probes: PlannedProbes
) -> list[StartedBenchmark]:
    """Return the benchmarks to start: first those for which services wait, which wait for one try only."""
    urgent = [each for each in due if each.wanted.key in probes.wanted and not each.attempt]
    others = [each for each in due if each.wanted.key not in probes.wanted | probes.held]
    waited = [each.namespace for each in going if each in probes.wanted]
    beside = [each.namespace for each in going if each not in probes.wanted]
    first = _take_turns(urgent, waited, turns, MOST_PROBES)
    return first + _take_turns(others, beside, turns, MOST_AT_ONCE, {each.node for each in first})


def _take_turns(
    due: Sequence[StartedBenchmark],
    going: Sequence[str],
    turns: Mapping[str, int],
    most: int,
    used: Collection[str] = (),
) -> list[StartedBenchmark]:
    """Return the benchmarks to start: of the namespace with the fewest that run, then of that which waits longest.

    Args:
        due: those that could start.
        going: the namespace of each that runs.
        turns: by namespace the number of its last start.
        most: the number that may run at once.
        used: nodes on which others start.
    """
    queues: dict[str, list[StartedBenchmark]] = {}
    for each in reversed(due):
        queues.setdefault(each.wanted.key.namespace, []).append(each)
    running, start, taken = Counter(going), list[StartedBenchmark](), set(used)
    while queues and running.total() < most:
        namespace = min(queues, key=lambda name: (running[name], turns.get(name, 0), name))
        found = queues[namespace].pop()
        if not queues[namespace]:
            del queues[namespace]
        node = next((name for name in found.wanted.nodes if name not in taken), None)
        if node is not None:
            taken.add(node)
            running[namespace] += 1
            start.append(found._replace(node=node))
    return start


def _find_end(
    job: BenchmarkJob, wanted: WantedBenchmark | None, busy: Collection[str], held: Collection[BenchmarkKey]
) -> str:
    """Return why a Job is deleted, as one word; empty if it stays."""
    if wanted is None:
        return "unwanted"
    if wanted.inputs != job.order.inputs:
        return "outdated"
    if job.outcome.state == "Going" and job.order.accelerator in busy:
        return "gives_way"
    if job.outcome.state == "Going" and job.key in held:
        return "too_late"
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
