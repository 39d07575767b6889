"""The benchmarks of the cluster, while this replica leads: the shell around `benchmark_plan.py`.

A model is measured on a device class once. If a replica serves there and nobody asks it, it is measured itself, by a
few requests; else a Job measures it on an idle device. After a change, all services are looked at.

To the queue, the room of these Jobs is free: each ends within seconds when a unit is admitted to its node, or waits for
its accelerator. Tenants can make Jobs with any label: so all Jobs that look like one are ended, those of an earlier
leader, too, except those that this leader has started, whose room alone counts as free.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

import structlog
from msgspec.structs import replace

from controller.benchmarks.benchmark_job import (
    BenchmarkKey,
    MeasuredEngine,
    build_benchmark_job,
    digest_start,
    read_benchmark,
)
from controller.benchmarks.benchmark_plan import BenchmarkFailure, BenchmarkStart, WantedBenchmark, choose_starts
from controller.benchmarks.pod_measurement import measure_pod
from controller.benchmarks.wanted_benchmarks import PreparedBenchmark, open_scope, prepare_benchmarks
from controller.models.jobs import JobOutcome
from controller.placement.units import NOTHING, Cell
from controller.pod_settings import PodSettings
from controller.reconcile.indexes import ALL_BENCHMARKS, BENCHMARK_INDEX, OWNER_INDEX, owner_key
from controller.reconcile.plan import Leading
from controller.services.endpoints import Endpoint
from controller.services.performance_source import PerformanceSource
from crds.inferenceservice import InferenceService
from fitness.performance import MeasuredPerformance
from fitness.performance_store import LABEL_BENCHMARK, RecordKey
from fitness.serving_devices import ServingDevices
from kube.client import Obj
from kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound, Unreachable
from kube.resources import (
    ACCELERATOR_POOLS,
    CONFIG_MAPS,
    INFERENCE_SERVICES,
    JOBS,
    MODELS,
    NODES,
    PODS,
    ObjectKey,
    Resource,
)
from kube.store import Store

LOOK_SECONDS: Final = 5.0
"""Least time between two looks at all services."""
MOST_ENDED: Final = 20
"""Jobs that are ended in one round: whoever makes many delays nothing else."""
_LOOK_SHARE: Final = 0.05
"""Most of a processor that looks take."""
_PAUSE_SECONDS: Final = 1.0
"""Least time between two rounds."""
_FAILED_SECONDS: Final = 5.0
"""The same after one that failed."""
_RETRY_SECONDS: Final = 30.0
"""Time after which a round of which a step failed is repeated."""
_IDLE_SECONDS: Final = 600.0
_SERVICES_AT_ONCE: Final = 20
"""Services that are looked at before others get the event loop."""
_WAKING: Final = frozenset({INFERENCE_SERVICES, MODELS, NODES, ACCELERATOR_POOLS, CONFIG_MAPS, JOBS})
_FINAL_PHASES: Final = frozenset({"Succeeded", "Failed"})

log = structlog.get_logger()


@dataclass(slots=True)
class _Run:
    """A benchmark that runs: the Job, if there is one, and the task that measures its pod or a replica."""

    start: BenchmarkStart
    service: InferenceService
    engine: MeasuredEngine
    job: Obj | None = None
    task: asyncio.Task[MeasuredPerformance | JobOutcome] | None = None
    is_in_the_way: bool = False
    """A unit waits for its room."""


@dataclass(slots=True)
class _MeasurementRequest:
    """A request of a service that waits for measurements before its accelerator is chosen."""

    classes: Collection[str]
    until: datetime
    answer: frozenset[str] | None = None
    """The device classes that are being measured; None: nobody has looked yet."""


class BenchmarkRunner:
    """The benchmarks.

    Args:
        store: the watch cache.
        settings: options of the controller.
        measured: the stored measurements.
        list_cells: returns all cells with what is free there.
        list_classes: returns one device of each device class of an accelerator.
        report_job_nodes: takes the node of each Job, by its key in `OWNER_INDEX`; the queue counts its room as free.
    """

    def __init__(
        self,
        store: Store,
        settings: PodSettings,
        measured: PerformanceSource,
        *,
        list_cells: Callable[[], Iterable[Cell]],
        list_classes: Callable[[str], Sequence[ServingDevices]],
        report_job_nodes: Callable[[Mapping[str, str]], None],
    ) -> None:
        self._store, self._settings, self._measured = store, settings, measured
        self._list_cells, self._list_classes = list_cells, list_classes
        self._give_job_nodes = report_job_nodes
        self._wake = asyncio.Event()  # ends the pause before the next round

        # The needs of the queue, which `mark_jobs_in_the_way` replaces after each round of it.
        self._waiting_pools: frozenset[str] = frozenset()
        """Pools for which anything waits in the queue: names of AcceleratorPools, or of accelerators."""
        self._admitting_cells: frozenset[str] = frozenset()
        """`Cell.id` of the cells (nodes and hosts) where units are being admitted."""
        # The state of the rounds of `run`; the key of a benchmark is a namespace, a model hash and a device class.
        self._prepared: dict[BenchmarkKey, PreparedBenchmark] = {}
        """The benchmarks that were worth while when all services were last looked at."""
        self._benchmarks_of: dict[ObjectKey, dict[str, BenchmarkKey]] = {}
        """The benchmarks of each service, by device class."""
        self._runs: dict[BenchmarkKey, _Run] = {}
        """Those that run now: as a Job, or on a replica that serves."""
        self._failures: dict[BenchmarkKey, BenchmarkFailure] = {}
        """The last failure of each that is to be tried again, or has failed for good."""
        self._node_of_job: dict[str, str] = {}
        """The node of each Job that was started and whose pod may be there, by the Job's namespace and uid."""
        self._requests: dict[ObjectKey, _MeasurementRequest] = {}
        """By service, its request (`request_probes`) for measurements before its accelerator is chosen."""
        self._last_turns: dict[str, int] = {}
        """By namespace the number of its last start, as starts are counted in all namespaces."""
        self._next_listing_at = 0.0
        """Time of the event loop from which on all services are looked at again."""
        store.subscribe(self._take_change)

    def mark_jobs_in_the_way(self, waiting_pools: frozenset[str], admitting_cells: frozenset[str]) -> None:
        """Mark each Job on a device that the queue needs now, so that it ends with the next round of `run`.

        The queue needs the accelerators of pools for which anything waits, and the nodes where units are admitted. A
        replica that is being measured is in nobody's way.

        Args:
            waiting_pools: the pools for which anything waits after a round of the queue.
            admitting_cells: `Cell.id` of the cells where units are admitted.
        """
        self._waiting_pools, self._admitting_cells = waiting_pools, admitting_cells
        busy = self._find_busy()  # accelerators
        for run in self._runs.values():
            start = run.start
            is_needed = start.wanted.accelerator in busy or f"node/{start.node}" in admitting_cells
            if start.wanted.replica is None and is_needed:  # a Job
                run.is_in_the_way = True
                self._wake.set()

    def request_probes(self, service: ObjectKey, classes: Collection[str], until: datetime) -> Collection[str] | None:
        """Return those of `classes` that are being measured for a service before its accelerator is chosen.

        The first call that names `classes` requests their measurement until the time `until`; later calls only read the
        answer. It is None until all services have been looked at once since the request, because only then the
        benchmarks are started; and empty without a request, or if none of the classes is being measured.
        """
        request = self._requests.get(service)
        if request is None:
            if not classes:
                return ()
            self._requests[service] = request = _MeasurementRequest(classes, until)
            self._wake.set()
        # The rounds of `run` set it, in `_answer_requests`.
        return request.answer

    def forget(self, service: ObjectKey) -> None:
        """Stop measuring for a service that is gone."""
        self._requests.pop(service, None)

    def restart(self) -> None:
        """Forget what an earlier leadership knew."""
        self._requests.clear()
        self._waiting_pools = self._admitting_cells = frozenset()

    async def run(self, leading: Leading) -> None:
        """Run benchmarks while this replica leads, in rounds: after a change, or when the last round asked for one.

        It begins with nothing: the Jobs of an earlier leader are deleted, and those that are wanted start anew. When it
        is cancelled, all measurements end.
        """
        for part in (self._prepared, self._benchmarks_of, self._failures, self._node_of_job, self._last_turns):
            part.clear()
        self._next_listing_at = 0.0
        self._wake.set()
        pause: float = _IDLE_SECONDS  # that the last round asked for; `_wake` ends it earlier
        try:
            while True:
                # asyncio.wait_for may lose a cancellation that comes with the wake.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                self._wake.clear()
                least_pause = _PAUSE_SECONDS  # which no wake shortens
                try:
                    pause = await self._run_round(leading)
                except Unreachable as error:
                    log.warning("benchmark_round_failed", error=str(error))
                    pause, least_pause = _RETRY_SECONDS, _FAILED_SECONDS
                self._update_job_nodes()
                await asyncio.sleep(least_pause)
        finally:
            for run in self._runs.values():
                if run.task is not None:
                    run.task.cancel()
            self._runs.clear()
            self._give_job_nodes({})

    async def _run_round(self, leading: Leading) -> float:
        """Follow and end benchmarks once, and start others if it is time to look at all services again.

        Returns the seconds until the next round: the shortest of the `pauses` that the steps ask for.
        """
        # 1. List the benchmarks of all services if it is time. A long listing is followed by a long pause, so that
        # listings take no more of a processor than `_LOOK_SHARE`.
        loop_time, now = asyncio.get_running_loop().time, datetime.now(UTC)
        self._requests = {service: request for service, request in self._requests.items() if now < request.until}
        has_listed = loop_time() >= self._next_listing_at
        if has_listed:
            started_at = loop_time()
            await self._list_benchmarks()
            self._next_listing_at = loop_time() + max(LOOK_SECONDS, (loop_time() - started_at) / _LOOK_SHARE)

        # 2. Follow those that run, and delete the Jobs of all others.
        wanted, busy = self._list_wanted(), self._find_busy()
        pauses = [_IDLE_SECONDS]
        if not has_listed:
            pauses.append(max(0.0, self._next_listing_at - loop_time()))
        for key in list(self._runs):
            pauses += await _try(self._follow(leading, key, wanted.get(key), now))
        wanted = self._list_wanted()  # again, without those whose results have just been stored
        self._failures = {
            key: failure
            for key, failure in self._failures.items()
            if key in wanted and wanted[key].inputs == failure.inputs
        }
        for job in self._list_jobs_to_delete():
            pauses += await _try(_delete_job(leading, job))

        # 3. Start those that are due, but only by a fresh listing: an older one may name nodes that are in use by now.
        if has_listed:
            pauses += await self._start_due(leading, wanted, busy, now)

        # 4. Report failures, and what is measured for services that wait.
        problems = {wanted[key].service: failure.describe(key) for key, failure in self._failures.items()}
        self._measured.report_problems(problems)
        self._answer_requests(leading, has_listed=has_listed)
        return min(pauses)

    async def _start_due(
        self, leading: Leading, wanted: Mapping[BenchmarkKey, WantedBenchmark], busy: Collection[str], now: datetime
    ) -> list[float]:
        """Start the wanted benchmarks that are due, within the limits, and no Job on an accelerator in `busy`.

        Returns the seconds until each next try of one that has failed, and of a start that was refused.
        """
        # The seconds until the next try; one that has failed for good has none, so it is never due.
        retry_waits = {key: failure.find_wait(now) for key, failure in self._failures.items() if not failure.is_final}
        urgent = self._list_urgent()
        due = [
            benchmark
            for key, benchmark in wanted.items()
            if (benchmark.is_ready or key in urgent)
            and (key not in self._failures or retry_waits.get(key, math.inf) <= 0)
        ]
        node_of_run = {key: run.start.node for key, run in self._runs.items()}
        pauses = [wait for wait in retry_waits.values() if wait > 0]
        for start in choose_starts(due, node_of_run, busy, self._last_turns, urgent):
            pauses += await _try(self._start(leading, start, now))
        return pauses

    async def _list_benchmarks(self) -> None:
        """List the benchmarks that are worth while: all into `_prepared`, and by service into `_benchmarks_of`.

        Several services may want the same benchmark, that of one model on one device class. It is prepared for one of
        them: the first that is Ready, else the first.
        """
        # Where a unit is being admitted, the free room of the cell (a node or a host) belongs to that unit.
        cells = [
            cell if cell.id not in self._admitting_cells else replace(cell, free=NOTHING) for cell in self._list_cells()
        ]
        scope = open_scope(self._store, self._settings, self._measured.table, cells)
        prepared: dict[BenchmarkKey, PreparedBenchmark] = {}
        benchmarks_of: dict[ObjectKey, dict[str, BenchmarkKey]] = {}
        for number, service in enumerate(self._store.list(INFERENCE_SERVICES), start=1):
            for benchmark in prepare_benchmarks(scope, service):
                wanted = benchmark.wanted
                # Always the same service, as a Job ends if its benchmark is then prepared with other inputs.
                first = prepared.setdefault(wanted.key, benchmark)
                # Only a service that is Ready may have a replica to measure in place of a Job.
                if wanted.is_ready and not first.wanted.is_ready:
                    prepared[wanted.key] = benchmark
                benchmarks_of.setdefault(wanted.service, {})[wanted.key.device_class] = wanted.key
            if number % _SERVICES_AT_ONCE == 0:
                await asyncio.sleep(0)  # lets others have the event loop
        self._prepared, self._benchmarks_of = prepared, benchmarks_of

    def _list_wanted(self) -> dict[BenchmarkKey, WantedBenchmark]:
        """Return the benchmarks that are worth while and not measured yet."""
        return {
            key: benchmark.wanted
            for key, benchmark in self._prepared.items()
            if not self._measured.table.find(key.model_hash, key.device_class, key.namespace)
        }

    def _find_busy(self) -> set[str]:
        """Return the accelerators for which anything waits in the queue."""
        pools = self._store.list(ACCELERATOR_POOLS)
        accelerators = {pool["metadata"]["name"]: pool["spec"]["accelerator"] for pool in pools}
        return {accelerators.get(pool, pool) for pool in self._waiting_pools}

    def _list_urgent(self) -> set[BenchmarkKey]:
        """Return the benchmarks that services wait for, except those that have failed once: they are not waited for."""
        return {
            key
            for service, request in self._requests.items()
            for device_class, key in self._benchmarks_of.get(service, {}).items()
            if device_class in request.classes and key not in self._failures
        }

    async def _follow(self, leading: Leading, key: BenchmarkKey, wanted: WantedBenchmark | None, now: datetime) -> None:
        """Store the result of a benchmark that has ended, or note its failure; stop one that may not go on.

        It may not go on if nothing wants it any more (`wanted` is None, or has other inputs), if its Job is gone, or if
        a unit of the queue needs its device. Raises as `Client`.
        """
        run = self._runs[key]
        result = self._read_result(leading, run, now)
        if result is None or wanted is None or wanted.inputs != run.start.wanted.inputs:
            self._drop(key)
        elif isinstance(result, MeasuredPerformance):
            stored = RecordKey(key.device_class, key.namespace)
            await self._measured.write(leading, key.model_hash, stored, result)
            self._drop(key)
        elif result.state != "Going":
            self._fail(key, run, result)
        elif run.is_in_the_way:  # only now: a result that is there already has been stored
            self._drop(key)

    def _read_result(self, leading: Leading, run: _Run, now: datetime) -> MeasuredPerformance | JobOutcome | None:
        """Return the result or the state of a benchmark; begin to measure a pod that is up. None: its Job is gone.

        A run without a Job measures a replica, and its task has begun with it; the task of a Job begins here.
        """
        if run.job is not None:
            metadata = run.job["metadata"]
            job = self._store.get(JOBS, metadata["name"], metadata["namespace"])
            if job is None or job["metadata"]["uid"] != metadata["uid"] or "deletionTimestamp" in job["metadata"]:
                return None
            if LABEL_BENCHMARK not in job["metadata"].get("labels", {}):
                return None  # without its label, no later leader would find and delete it
            if run.task is None:
                reading = read_benchmark(job, self._store.by_index(PODS, OWNER_INDEX, owner_key(job)), now)
                if isinstance(reading, JobOutcome):
                    return reading
                self._measure(leading, run, reading)  # the engine is ready: `reading` is its address
        return run.task.result() if run.task is not None and run.task.done() else JobOutcome(state="Going")

    def _measure(self, leading: Leading, run: _Run, pod: Endpoint) -> None:
        """Begin to measure a pod by a task, at whose end the loop wakes."""
        source: Literal["job", "live"] = "live" if run.job is None else "job"
        run.task = asyncio.create_task(measure_pod(leading.client, run.service, pod, run.engine, source))
        run.task.add_done_callback(lambda _: self._wake.set())

    def _drop(self, key: BenchmarkKey) -> None:
        """Stop a benchmark; its Job is deleted in this round."""
        task = self._runs.pop(key).task
        if task is not None:
            task.cancel()

    def _fail(self, key: BenchmarkKey, run: _Run, outcome: JobOutcome) -> None:
        """Stop a benchmark that has failed, and note the failure for the next try."""
        self._drop(key)
        last = self._failures.get(key)
        tries = last.tries + 1 if last is not None else 1
        self._failures[key] = BenchmarkFailure(run.start.wanted.inputs, tries, outcome)
        self._wake.set()
        log.warning("benchmark_failed", **key._asdict(), reason=outcome.reason, problem=outcome.message)

    def _list_jobs_to_delete(self) -> list[Obj]:
        """Return the Jobs to delete: all with the label of benchmarks except those that run, `MOST_ENDED` at most.

        First come those that this leader has started, because the queue already counts their room as free.
        """
        kept = {run.job["metadata"]["uid"] for run in self._runs.values() if run.job is not None}
        labelled = self._store.by_index(JOBS, BENCHMARK_INDEX, ALL_BENCHMARKS)
        others = [
            job for job in labelled if job["metadata"]["uid"] not in kept and "deletionTimestamp" not in job["metadata"]
        ]
        # False sorts first.
        return sorted(others, key=lambda job: owner_key(job) not in self._node_of_job)[:MOST_ENDED]

    async def _start(self, leading: Leading, start: BenchmarkStart, now: datetime) -> None:
        """Start a benchmark: measure a replica now, or create the Job whose pod is measured once it is ready.

        A Job that the API server refuses counts as a failed try. Raises as `Client`.
        """
        wanted, prepared = start.wanted, self._prepared[start.wanted.key]
        key, service = wanted.key, prepared.service
        run = _Run(start, service, prepared.describe_engine(self._list_classes(wanted.accelerator)))
        # The highest number of all namespaces: in `choose_starts`, this namespace has its turn after them.
        self._last_turns[key.namespace] = max(self._last_turns.values(), default=0) + 1
        # From now on, `mark_jobs_in_the_way` finds it: a unit may be admitted to the node while its Job is created.
        self._runs[key] = run
        if wanted.replica is not None:
            self._measure(leading, run, wanted.replica)
        else:  # a Job, whose pod is measured once it is ready
            # After a failure, the next try has a Job of another name.
            failure = self._failures.get(key)
            digest = digest_start(key, wanted.inputs, failure.tries if failure is not None else 0)
            job = build_benchmark_job(
                service, prepared.served, prepared.choice, self._settings, node=start.node, digest=digest
            )
            leading.require_leadership()
            try:
                run.job = await leading.client.create(JOBS, job)
            except Conflict:  # it exists already: the watch brings it, and it is ended
                self._drop(key)
                return
            except (Forbidden, Invalid, NotFound) as error:
                # A quota or a policy of this namespace refuses it: the slot is for other namespaces until the next try.
                self._fail(key, run, JobOutcome(state="Broken", reason="JobRefused", message=error.message, ended=now))
                return
            except (ApiError, Unreachable):
                self._drop(key)
                raise
            self._store.put(JOBS, run.job)
            self._node_of_job[owner_key(run.job)] = start.node
        log.info("benchmark_started", **key._asdict(), node=start.node, is_job=run.job is not None)

    def _update_job_nodes(self) -> None:
        """Report the nodes of this leader's Jobs that run or whose pods have not ended: the queue may use that room."""
        going = {owner_key(run.job) for run in self._runs.values() if run.job is not None}
        self._node_of_job = {key: node for key, node in self._node_of_job.items() if key in going or self._has_pod(key)}
        self._give_job_nodes(self._node_of_job)

    def _has_pod(self, job: str) -> bool:
        """Return whether the pod of a Job still holds its device."""
        pods = self._store.by_index(PODS, OWNER_INDEX, job)
        return any((pod.get("status") or {}).get("phase") not in _FINAL_PHASES for pod in pods)

    def _answer_requests(self, leading: Leading, *, has_listed: bool) -> None:
        """Answer each service that waits for measurements with the classes that are being measured now.

        A service whose answer changes is enqueued. A new request is answered only if this round has listed benchmarks.
        """
        for service, request in self._requests.items():
            if request.answer is None and not has_listed:
                continue  # its benchmarks are not listed yet
            benchmarks = self._benchmarks_of.get(service, {})
            answer = frozenset(name for name in request.classes if benchmarks.get(name) in self._runs)
            if answer != request.answer:
                request.answer = answer
                leading.enqueue(INFERENCE_SERVICES, service)

    def _take_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Wake the loop after a change on which benchmarks may depend."""
        obj = new or old
        if resource in _WAKING or (resource == PODS and obj and LABEL_BENCHMARK in obj["metadata"].get("labels", {})):
            self._wake.set()


async def _try(step: Awaitable[None]) -> list[float]:
    """Await a step and log a refusal of the API server; return the seconds after which to try it again, if any."""
    try:
        await step
    except ApiError as error:
        log.warning("benchmark_step_refused", error=str(error))
        return [_RETRY_SECONDS]
    return []


async def _delete_job(leading: Leading, job: Obj) -> None:
    """Delete a Job. Raises as `Client`: a policy of a tenant may protect it."""
    metadata = job["metadata"]
    leading.require_leadership()
    with contextlib.suppress(NotFound, Conflict):
        await leading.client.delete(JOBS, metadata["name"], metadata["namespace"], uid=metadata["uid"])
        log.info("benchmark_ended", job=f"{metadata['namespace']}/{metadata['name']}")
