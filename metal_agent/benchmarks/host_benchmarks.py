"""Measure the engines of this host, one after the other, while it is idle: the shell around `benchmark_policy`.

An engine is asked directly, so no traffic is counted. The proxy says at once when a client asks any process of the
host: then the measurement ends, and its stream with it, so that the engine is free for the client.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

import structlog
from msgspec import structs

from crds.metalprocess import MetalProcessSpec
from devices.pressure import PressureLevel
from fitness.bench import measurement
from fitness.bench.measurement import BenchPlan
from fitness.bench.streamed_completion import BenchError
from fitness.performance import MeasuredPerformance
from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from kube.time import rfc3339
from metal_agent.benchmarks import benchmark_policy
from metal_agent.benchmarks.measurements import Measurements
from metal_agent.holds.hold_gate import HoldGate
from metal_agent.memory.peaks import identify_serving
from metal_agent.native import engine_command
from metal_agent.supervise.engine_checks import ProbedEngine
from metal_agent.supervise.load_queue import LoadQueue
from metal_agent.supervise.runner import Runner

LOOK_SECONDS: Final = 10.0
"""Interval between two looks whether the host is idle, while a process waits to be measured."""
_CHECK_SECONDS: Final = 1.0
"""Interval between two checks, during a measurement, that the host is calm: pressure and holds are sampled as often."""

log = structlog.get_logger()


class GaveWay(Exception):  # noqa: N818 - no error: the measurement is made later
    """A measurement has given way; the message says to what."""


class _Pause(NamedTuple):
    """The pause of a process after measurements that failed, or gave way."""

    times: int
    until: float


class HostBenchmarks:
    """The measurements of the processes of a host.

    Args:
        runners: the processes by uid.
        measurements: the measurements so far.
        gate: the gate of their engines.
        read_level: returns the memory pressure of the last sample.
        idle_seconds: returns, by uid, the time that each process has been without a request.
        wait_request: waits until any process gets a request; see `HostExposure`.
        changed: called with each process that has changed, or whose speed was measured.
    """

    def __init__(
        self,
        runners: Mapping[str, Runner],
        measurements: Measurements,
        gate: HoldGate,
        *,
        read_level: Callable[[], PressureLevel | None],
        idle_seconds: Callable[[], Awaitable[Mapping[str, float | None]]],
        wait_request: Callable[[float], Awaitable[bool]],
        changed: Callable[[Runner], None],
    ) -> None:
        """Note where the facts come from, as the class describes them; nothing is measured before `run`."""
        self._runners, self.measurements, self._gate = runners, measurements, gate
        # The host is calm without memory pressure (`read_level`), a hold (`gate`) or an engine that loads (`loads`).
        self._read_level, self._idle_seconds = read_level, idle_seconds
        self._wait_request, self._on_change = wait_request, changed

        self.loads = LoadQueue()  # the slot of the one engine that may load
        self._woken = asyncio.Event()  # set by `wake`, after the change of a process
        self._pauses: dict[str, _Pause] = {}
        """By uid: the pause of a process before its next try."""
        self._engine_versions: dict[tuple[str, str], str] = {}
        """Versions of the engines, by uid and time of their start."""

    def wake(self) -> None:
        """Wake `run`, which looks whether there is a process to measure."""
        self._woken.set()

    def note_change(self, runner: Runner) -> None:
        """Report the change of a process, which may now be due for a measurement."""
        self.wake()
        self._on_change(runner)

    async def run(self) -> None:
        """Measure until cancelled."""
        pause: float | None
        while True:
            self._woken.clear()
            try:
                pause = await self._measure_due()
            except Exception:  # a defect here must not end the engines of this host
                log.exception("benchmark_look_failed")
                pause = LOOK_SECONDS
            # asyncio.wait_for may lose a cancellation that comes with the wake.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):  # None: until `wake`, however long that takes
                    await self._woken.wait()

    async def _measure_due(self) -> float | None:
        """Measure one process if it is time; return the seconds until the next look, None if there is none to measure.

        It is time if a process is not in a pause after an earlier try, and the host is calm and has been idle.
        """
        engine_versions = await self._list_unmeasured()
        if not engine_versions:
            return None

        # 1. Which processes are not in a pause?
        now = time.monotonic()
        # The seconds that are left of each pause.
        pauses = {uid: max(0.0, self._pauses[uid].until - now) for uid in engine_versions if uid in self._pauses}
        # A process may have gone while the version of another engine was read.
        due = {uid: self._runners[uid] for uid in engine_versions if uid in self._runners and not pauses.get(uid)}
        if not due:
            return min(pauses.values(), default=LOOK_SECONDS)

        # 2. Is the host calm, and for how long has it been idle?
        if not self._is_calm():
            return LOOK_SECONDS
        ready_seconds = {
            uid: now - runner.state.ready_since for uid, runner in due.items() if runner.state.ready_since is not None
        }
        picked = benchmark_policy.pick_process(ready_seconds, await self._idle_seconds())
        if picked is None:  # the proxy does not serve any of them yet
            return LOOK_SECONDS

        # 3. Measure the first of them, if it need not wait for the host to be idle for longer.
        uid, wait_seconds = picked
        if wait_seconds:
            return wait_seconds  # until the host has been idle for long enough
        runner = due[uid]
        spec, engine = runner.assignment.spec, await runner.find_engine()
        if engine is None:
            return LOOK_SECONDS
        await self._measure(runner, spec, engine, engine_versions[uid])
        return 0.0  # look for the next process at once

    async def _list_unmeasured(self) -> dict[str, str]:
        """Return, by uid, the engine's version of each process that can be measured and is not yet.

        A process is measured anew for another version of its engine, and no more after `MOST_TRIES` failures. Pauses
        of processes and versions of engines that are gone are forgotten.
        """
        measurable = {
            uid: runner for uid, runner in self._runners.items() if benchmark_policy.is_measurable_engine(runner.state)
        }
        self._pauses = {uid: pause for uid, pause in self._pauses.items() if uid in self._runners}

        # Versions by uid and time of the start of an engine, and the result.
        engine_versions, waiting = dict[tuple[str, str], str](), dict[str, str]()
        for uid, runner in measurable.items():
            spec, record = runner.assignment.spec, runner.record
            if record is None or not benchmark_policy.is_measurable_spec(spec):
                continue
            started_engine = uid, record.started_at  # one start of an engine, which has one version
            version = self._engine_versions.get(started_engine)
            if version is None:
                version = await asyncio.to_thread(engine_command.identify_engine, spec)
            engine_versions[started_engine] = version

            tries = self.measurements.count_tries(spec, version)  # None: it is measured
            if tries is not None and tries < benchmark_policy.MOST_TRIES:
                waiting[uid] = version

        self._engine_versions = engine_versions  # without those of engines that are gone
        return waiting

    def _is_calm(self) -> bool:
        """Decide whether the host has nothing else to do than to be measured."""
        is_held, is_loading = bool(self._gate.list_holds()), self.loads.is_busy
        return benchmark_policy.is_calm(self._read_level(), is_held=is_held, is_loading=is_loading)

    async def _measure(self, runner: Runner, spec: MetalProcessSpec, engine: ProbedEngine, version: str) -> None:
        """Measure the engine of one process, and keep the speed on disk.

        The try is counted on disk before it begins, so that a machine that dies of it does not try for ever. It is
        taken back if the measurement gave way to something else, or the process was stopped. After a failure, and
        after it gave way, the process is paused.
        """
        uid, process_name = runner.assignment.uid, f"{runner.assignment.namespace}/{runner.assignment.name}"
        await asyncio.to_thread(self.measurements.begin_try, spec, version)
        log.info("benchmark_started", process=process_name)

        plan = measurement.plan_one_stream(spec.benchmark, spec.context_tokens)
        try:
            speed = await self._measure_or_give_way(runner, engine, plan)
        except GaveWay as cause:  # the host had something else to do
            await asyncio.to_thread(self.measurements.take_back_try, spec)
            log.info("benchmark_gave_way", process=process_name, to=str(cause), retry_seconds=self._pause(uid))
        except BenchError as error:  # the measurement failed
            if benchmark_policy.is_stopped(runner.state):  # that is why it failed
                await asyncio.to_thread(self.measurements.take_back_try, spec)
                log.info("benchmark_gave_way", process=process_name, to="the end of the process", problem=error.message)
                return
            tries = self.measurements.count_tries(spec, version)
            fields = {"process": process_name, "reason": error.reason, "problem": error.message, "tries": tries}
            log.warning("benchmark_failed", **fields, retry_seconds=self._pause(uid))
        except asyncio.CancelledError:
            self.measurements.take_back_try(spec)  # here, because nothing is waited for any more
            raise
        else:
            await self._keep_speed(runner, spec, speed)

    async def _keep_speed(self, runner: Runner, spec: MetalProcessSpec, speed: MeasuredPerformance) -> None:
        """Write a measured speed to disk, with its origin, and report each process that has it now."""
        engine_record = runner.record
        load_seconds = None
        if engine_record:
            load_seconds = benchmark_policy.find_load_seconds(engine_record.started_at, engine_record.ready_at)
        speed = structs.replace(
            speed,
            model=spec.model_name,
            runtime=spec.runtime,
            source="host",
            measured_at=rfc3339(datetime.now(UTC)),
            load_seconds=load_seconds,
        )
        await asyncio.to_thread(self.measurements.finish, spec, speed)
        process_name = f"{runner.assignment.namespace}/{runner.assignment.name}"
        log.info("speed_measured", process=process_name, tokens_per_second=speed.tokens_per_second)
        self._pauses.pop(runner.assignment.uid, None)

        # All processes of one model with the same arguments have this speed.
        for same_model in list(self._runners.values()):
            if identify_serving(same_model.assignment.spec) == identify_serving(spec):
                self._on_change(same_model)

    def _pause(self, uid: str) -> float:
        """Pause a process before its next try, longer each time; return the seconds."""
        times = self._pauses[uid].times + 1 if uid in self._pauses else 1  # tries since the last success
        seconds = benchmark_policy.pause_seconds(times)
        self._pauses[uid] = _Pause(times=times, until=time.monotonic() + seconds)
        return seconds

    async def _measure_or_give_way(self, runner: Runner, engine: ProbedEngine, plan: BenchPlan) -> MeasuredPerformance:
        """Return the speed of an engine. Raises BenchError, and GaveWay once the host has something else to do.

        The measurement runs beside two guards, one for requests of clients and one for changes of the host: if a guard
        ends first, the measurement gives way. At the end all three are cancelled.
        """
        most_seconds = benchmark_policy.MOST_SECONDS
        requested = asyncio.create_task(self._await_request(most_seconds))
        disturbed = asyncio.create_task(self._await_disturbance(runner))
        measuring = asyncio.create_task(measurement.measure_engine(engine.url, engine.model, engine.token, plan))
        tasks = {requested, disturbed, measuring}

        try:
            await asyncio.wait(tasks, timeout=most_seconds, return_when=asyncio.FIRST_COMPLETED)
            for guard in (requested, disturbed):
                if guard.done():
                    raise GaveWay(guard.result())
            if not measuring.done():
                raise BenchError("TimedOut", f"the measurement was not over after {most_seconds:.0f} s")
            return measuring.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _await_request(self, most_seconds: float) -> str:
        """Wait until a client sends a request to any process; return the reason to give way.

        A proxy that cannot be asked is a reason too.
        """
        try:
            # It returns False after the time-out, True once there is a request.
            while not await self._wait_request(most_seconds):
                pass
        except (ControlUnreachableError, ControlRefusedError) as error:
            return f"requests that the proxy may have and does not report: {error}"
        return "a request"

    async def _await_disturbance(self, runner: Runner) -> str:
        """Wait until the host has something else to do; return the reason to give way."""
        pid = runner.state.pid  # with another one, the engine was started again
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if runner.state.pid != pid or not benchmark_policy.is_measurable_engine(runner.state):
                return "a change of the process"
            if not self._is_calm():
                return "memory pressure, a hold or a load of this host"
