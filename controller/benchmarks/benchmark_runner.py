"""The benchmarks of the cluster, while this replica leads: the shell around `benchmark_plan.py`.

All services are looked at after a change, at a pace that takes a twentieth of a processor at most; what is asked of the
API server are the few Jobs that the plan names. When anything begins to wait in the queue, the benchmarks on its
accelerator end within a second.

Which Jobs there are, and which of them this leader has started, is in `job_registry.py`. Those of an earlier leader are
ended and started again.

A service that waits for measurements gets an answer at once, by the last look at all services, and is enqueued when the
answer changes: a Job was not started, has given way, or is over and has left its device.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import structlog

from controller.benchmarks.benchmark_job import (
    BenchmarkJob,
    BenchmarkKey,
    BenchmarkOrder,
    build_benchmark_job,
)
from controller.benchmarks.benchmark_plan import (
    EndedBenchmark,
    StartedBenchmark,
    WantedBenchmark,
    is_startable,
    plan_benchmarks,
)
from controller.benchmarks.job_registry import JobRegistry
from controller.benchmarks.probe_requests import ProbeRequests
from controller.benchmarks.wanted_benchmarks import BenchmarkScope, PreparedBenchmark, open_scope, prepare_benchmarks
from controller.models.jobs import JobOutcome
from controller.placement.units import Cell
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Leading, Ref
from controller.services.performance_source import PerformanceSource
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
_LOOK_SHARE: Final = 0.05
"""Most of a processor that these looks take."""
_PAUSE_SECONDS: Final = 1.0
"""Least time between two rounds."""
_FAILED_SECONDS: Final = 5.0
"""Least time between a round that failed and the next one."""
_RETRY_SECONDS: Final = 30.0
"""Time after which a round that failed is repeated."""
_IDLE_SECONDS: Final = 600.0
_SERVICES_AT_ONCE: Final = 20
"""Services that are looked at before others get the event loop."""
_WAKING: Final = frozenset({INFERENCE_SERVICES, MODELS, NODES, ACCELERATOR_POOLS, CONFIG_MAPS, JOBS})

log = structlog.get_logger()


class BenchmarkRunner:
    """The benchmarks.

    Args:
        store: the watch cache.
        settings: options of the controller.
        measured: the stored measurements.
        list_cells: returns all cells with what is free there.
        list_classes: returns one device of each device class of an accelerator.
        set_yielding: takes the node of each Job that ends as soon as a unit waits for its room, by its key in
            `OWNER_INDEX`.
    """

    def __init__(
        self,
        store: Store,
        settings: PodSettings,
        measured: PerformanceSource,
        *,
        list_cells: Callable[[], Iterable[Cell]],
        list_classes: Callable[[str], Sequence[ServingDevices]],
        set_yielding: Callable[[Mapping[str, str]], None],
    ) -> None:
        self._store, self._settings, self._measured = store, settings, measured
        self._list_cells, self._list_classes, self._set_yielding = list_cells, list_classes, set_yielding
        self._waiting_pools: frozenset[str] = frozenset()
        """Pools for which anything waits."""
        self._wake = asyncio.Event()
        self._failed: dict[BenchmarkKey, BenchmarkJob] = {}
        """Those that were ended because they had no hope of success, or were refused; their Jobs are gone."""
        self._jobs = JobRegistry(store)
        self._requests = ProbeRequests()
        self._failing: frozenset[BenchmarkKey] = frozenset()
        """Pairs of which the last benchmark has failed."""
        self._scope: BenchmarkScope | None = None
        """The last look; None: there was none."""
        self._looks = 0
        """Number of the last look."""
        self._turns: dict[str, int] = {}
        """By namespace the number of its last start."""
        self._prepared: dict[BenchmarkKey, PreparedBenchmark] = {}
        """Results of the last look at all services."""
        self._look_at = 0.0
        """Time of the loop from which on the next look is made."""
        self._timer: asyncio.TimerHandle | None = None
        """Takes back the room of Jobs that do not leave it."""
        store.subscribe(self._take_change)

    def take_waiting_pools(self, pools: frozenset[str]) -> None:
        """Take the pools for which anything waits after a round of the queue: benchmarks there are in its way."""
        self._waiting_pools = pools
        self._jobs.note_waiting(self._find_busy(), asyncio.get_running_loop().time())
        self._show_yielding()
        if self._jobs.has_any():
            self._wake.set()

    def follow_probes(self, service: ObjectKey, classes: Collection[str], until: datetime) -> Collection[str] | None:
        """Return the device classes on which the model of a service is being measured, of these when it asks first.

        None: it is not known yet. The Jobs that are missing start with the next look at all services.
        """
        told = self._requests.find(service)
        if told is not None:
            return told
        if not classes:
            return ()
        if self._scope is None and service in self._requests:
            return None
        self._wake.set()
        if self._scope is None:
            self._requests.put(service, classes, until, look=self._looks)
            return None
        found = self._store.get(INFERENCE_SERVICES, service.name, service.namespace)
        prepared = prepare_benchmarks(self._scope, found) if found is not None else ()
        wanted = {each.wanted.key.device_class: each.wanted for each in prepared}
        measured, busy = self._jobs.list_measured() | self._jobs.list_leaving(), self._find_busy()
        told = frozenset(
            name
            for name, each in wanted.items()
            if name in classes
            and (each.key in measured or (is_startable(each, busy) and each.key not in self._failing))
        )
        if told:
            keys = {name: wanted[name].key for name in told}
            self._requests.put(service, told, until, look=self._looks, keys=keys, told=told)
        return told

    def forget(self, service: ObjectKey) -> None:
        """Measure nothing more for a service that is gone."""
        self._requests.forget(service)

    def restart(self) -> None:
        """Forget the requests of an earlier leadership."""
        self._requests.clear()
        self._scope, self._waiting_pools = None, frozenset()

    async def run(self, leading: Leading) -> None:
        """Run benchmarks for ever."""
        for each in (self._failed, self._jobs, self._turns):
            each.clear()
        self._set_yielding({})
        self._failing, self._look_at = frozenset(), 0.0
        self._wake.set()
        pause: float | None = None
        while True:
            # asyncio.wait_for may lose a cancellation that comes with the wake.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_SECONDS if pause is None else pause):
                    await self._wake.wait()
            self._wake.clear()
            has_failed = False
            try:
                pause = await self._run_round(leading)
            except (ApiError, Unreachable) as error:
                log.warning("benchmark_round_failed", error=str(error))
                pause, has_failed = _RETRY_SECONDS, True
            self._show_yielding()
            await asyncio.sleep(_FAILED_SECONDS if has_failed else _PAUSE_SECONDS)

    def _show_yielding(self) -> None:
        """Tell which Jobs yield their room, now and when the time of one of them is over."""
        loop = asyncio.get_running_loop()
        yielding, seconds = self._jobs.list_yielding(loop.time())
        self._set_yielding(yielding)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._show_yielding) if seconds is not None else None

    async def _run_round(self, leading: Leading) -> float | None:
        """Decide once and do it; return the seconds after which to look again, or None. Raises as `Client`."""
        loop_time = asyncio.get_running_loop().time
        is_look = loop_time() >= self._look_at
        if is_look:
            started_at = loop_time()
            self._jobs.note_look()
            await self._prepare()
            self._look_at = loop_time() + max(LOOK_SECONDS, (loop_time() - started_at) / _LOOK_SHARE)
        now = datetime.now(UTC)
        jobs, probes = [*self._jobs.list_jobs(now), *self._failed.values()], self._requests.plan(now)
        wanted, busy = self._list_wanted(may_start=is_look), self._find_busy()
        plan = plan_benchmarks(wanted, jobs, busy, now, self._turns, probes=probes)
        for ended in plan.end:
            self._jobs.note_end(ended.job, loop_time())
        # The steps may take long: a webhook may hang.
        self._show_yielding()
        # What waits for a device is worth more than a measurement.
        are_done = await _take_steps(functools.partial(self._end, leading, each) for each in plan.end)
        are_done &= await _take_steps(functools.partial(self._write_record, leading, *each) for each in plan.store)
        self._failed |= {job.key: job for job in plan.failed}
        are_done &= await _take_steps(functools.partial(self._start, leading, each, now) for each in plan.start)
        self._measured.report_problems(plan.problems)
        self._failing = frozenset(each.key for each in (*jobs, *self._failed.values()) if each.has_failed)
        for service in self._requests.answer(self._jobs.list_measured(), self._jobs.list_leaving(), self._looks, now):
            leading.enqueue(INFERENCE_SERVICES, service)
        until_look = max(0.0, self._look_at - loop_time())
        # A change that came since the last look is looked at with the next one.
        pauses = (
            *(plan.again_seconds, None if is_look else until_look),
            *(None if are_done else _RETRY_SECONDS, probes.again_seconds),
        )
        return min((each for each in pauses if each is not None), default=None)

    async def _prepare(self) -> None:
        self._looks += 1
        scope = open_scope(self._store, self._settings, self._measured.table, self._list_cells())
        found: dict[BenchmarkKey, PreparedBenchmark] = {}
        pairs: dict[ObjectKey, dict[str, BenchmarkKey]] = {}
        for number, service in enumerate(self._store.list(INFERENCE_SERVICES), start=1):
            for each in prepare_benchmarks(scope, service):
                # The first service of several with a model, so that the Job of one does not end for another.
                found.setdefault(each.wanted.key, each)
                pairs.setdefault(each.wanted.service, {})[each.wanted.key.device_class] = each.wanted.key
            if number % _SERVICES_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._prepared, self._scope = found, scope
        self._requests.find_keys(pairs)

    def _list_wanted(self, *, may_start: bool) -> list[WantedBenchmark]:
        """Return what is not measured yet; between two looks nobody knows which nodes are idle."""
        table = self._measured.table
        wanted = (each.wanted for each in self._prepared.values())
        unknown = [
            each for each in wanted if not table.find(each.key.model_hash, each.key.device_class, each.key.namespace)
        ]
        return unknown if may_start else [each._replace(nodes=()) for each in unknown]

    def _find_busy(self) -> set[str]:
        """Return the accelerators for which anything waits."""
        accelerators = {
            each["metadata"]["name"]: each["spec"]["accelerator"] for each in self._store.list(ACCELERATOR_POOLS)
        }
        return {accelerators.get(pool, pool) for pool in self._waiting_pools}

    async def _write_record(self, leading: Leading, key: BenchmarkKey, record: MeasuredPerformance) -> None:
        stored = RecordKey(key.device_class, key.namespace)
        await self._measured.writer.write(leading, key.model_hash, stored, record)

    async def _end(self, leading: Leading, ended: EndedBenchmark) -> None:
        """Delete a Job. Raises as `Client`: a policy of a tenant may protect it."""
        ref = ended.job.ref
        # The Job of one that has failed may still be in the watch cache: it is another than what is remembered of it.
        if ended.job.is_gone:
            self._failed = {key: each for key, each in self._failed.items() if each is not ended.job}
            return
        leading.require_leadership()
        with contextlib.suppress(NotFound, Conflict):
            await leading.client.delete(JOBS, ref.name, ref.namespace, uid=ref.uid)
            log.info("benchmark_ended", job=f"{ref.namespace}/{ref.name}", cause=ended.cause)

    async def _start(self, leading: Leading, started: StartedBenchmark, now: datetime) -> None:
        prepared = self._prepared[started.wanted.key]
        wanted, service = prepared.wanted, prepared.service
        order = BenchmarkOrder(
            model_hash=wanted.key.model_hash,
            device_class=wanted.key.device_class,
            accelerator=wanted.accelerator,
            service=service.metadata.name,
            inputs=wanted.inputs,
            attempt=started.attempt,
            runtime=prepared.choice.runtime,
            image=prepared.find_image(),
            estimated_tokens_per_second=prepared.estimate_speed(self._list_classes(wanted.accelerator)),
        )
        job = build_benchmark_job(
            service, prepared.served, prepared.choice, self._settings, order=order, node=started.node
        )
        self._turns[wanted.key.namespace] = max(self._turns.values(), default=0) + 1
        leading.require_leadership()
        try:
            created = await leading.client.create(JOBS, job)
        except Conflict:  # it exists already, and the watch brings it
            return
        except (Forbidden, Invalid, NotFound) as error:
            # A quota or a policy of this namespace refuses it: the slot is for other namespaces until the next try.
            outcome = JobOutcome(state="Broken", reason="JobRefused", message=error.message, ended=now)
            own = Ref(JOBS, wanted.key.namespace, job["metadata"]["name"], "")
            self._failed[wanted.key] = BenchmarkJob(own, wanted.key, order, outcome, is_gone=True)
            self._wake.set()
            log.warning("benchmark_refused", **wanted.key._asdict(), error=str(error))
            return
        self._jobs.add_started(created, wanted.key, order, started.node)
        log.info("benchmark_started", **wanted.key._asdict(), node=started.node, attempt=started.attempt)

    def _take_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        if resource in _WAKING or (resource == PODS and _is_of_benchmark(new or old)):
            self._wake.set()


async def _take_steps(steps: Iterable[Callable[[], Awaitable[None]]]) -> bool:
    """Take steps, of which one that the API server refuses keeps no other back; return whether all were taken."""
    are_done = True
    for step in steps:
        try:
            await step()
        except ApiError as error:
            log.warning("benchmark_step_refused", error=str(error))
            are_done = False
    return are_done


def _is_of_benchmark(pod: Obj | None) -> bool:
    return pod is not None and LABEL_BENCHMARK in pod["metadata"].get("labels", {})
