"""The agent's own requests to an engine: until its first token, at intervals while it is Ready, and when it is suspect.

A long prompt keeps an engine silent for minutes, so silence alone never ends a Ready engine: it must also use no
processor time, in several checks in a row. An engine that answers requests is not probed. An idle engine is probed at
its pulse endpoint if it has one, else for a token: with a single slot, a token would evict the cached prompt of the
last conversation. The decisions about a suspect engine are in `engine_health`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

import aiohttp
import msgspec
import structlog

from crds.serving import Mode
from devices import footprint
from metal_agent import engine_health
from metal_agent.engine_health import Suspicion
from metal_agent.process_events import Answered, Failed, Hung, StartProblem, Trusted
from runtimes.probe import ProbeResult, generate_token

CHECK_SECONDS: Final = 10.0
"""Time between checks. An engine that hangs is ended after some `HUNG_CHECKS * (CHECK_SECONDS + ANSWER_SECONDS)`."""
TOKEN_CHECK_SECONDS: Final = 60.0
"""The same for an engine without a pulse endpoint: each check generates a token, which wakes the processor."""
ANSWER_SECONDS: Final = 20.0
HUNG_CHECKS: Final = 3
PROBE_SECONDS: Final = 60.0
"""Limit of one request to a starting engine."""
CHECK_AGAIN_SECONDS: Final = 1.0
"""Pause between two requests to a suspect engine."""
_FIRST_PAUSE_SECONDS: Final = 0.02
_LAST_PAUSE_SECONDS: Final = 0.2
"""The longest pause between two probes of a starting engine, which bounds the delay of Ready."""


class LivenessAnswer(msgspec.Struct, frozen=True):
    """The outcome of a probe; `silent` if the engine did not answer in time."""

    problem: str = ""
    silent: bool = False


class LivenessCheck(msgspec.Struct, frozen=True):
    """One check of an engine.

    Attributes:
        answer: its reaction to the probe; None if it was not probed.
        cpu_before: its processor time, in seconds, at the start of a probe without an answer, else at the previous
            check; None if unknown.
        cpu_after: its processor time after this check; None if unknown.
    """

    answer: LivenessAnswer | None
    cpu_before: float | None
    cpu_after: float | None

    @property
    def problem(self) -> str:
        """The problem of an engine that is not alive, as a message."""
        return self.answer.problem if self.answer else "it has requests to answer and uses no processor time"

    @property
    def alive(self) -> bool:
        """True if it answered, or is silent and uses the processor, or if its use of the processor is unknown."""
        if self.answer is None or self.answer.silent:
            return self.cpu_before is None or self.cpu_after is None or self.cpu_after > self.cpu_before
        return not self.answer.problem


def count_failures(failures: int, check: LivenessCheck) -> int:
    """Return the failed checks in a row, with `failures` of them before `check`; 0 if the engine is alive."""
    return 0 if check.alive else failures + 1


def pause_seconds(pulse: str | None, failures: int) -> float:
    """Return the pause before the next check of an engine, after `failures` failed checks in a row."""
    return CHECK_SECONDS if pulse or failures else TOKEN_CHECK_SECONDS


def should_probe(requests: int | None, cpu_before: float | None, cpu_after: float | None) -> bool:
    """Decide whether to probe the engine: not while it has `requests` and used processor time since the last check."""
    return not requests or cpu_before is None or cpu_after is None or cpu_after <= cpu_before


async def read_cpu_seconds(pid: int | None) -> float | None:
    """Return the processor time that a process has used, or None if it is unknown, as for a model in a daemon."""
    return None if pid is None else await asyncio.to_thread(footprint.cpu_seconds, pid)


class ProbedEngine(msgspec.Struct, frozen=True):
    """Where and how the agent sends its own requests to an engine."""

    session: aiohttp.ClientSession
    url: str
    model: str
    """Name of the model in requests."""
    token: str | None
    mode: Mode
    pid: int | None
    pulse: str | None
    engine: str | None = None
    """The runtime, by which its errors are understood."""

    async def request_token(self, timeout_seconds: float) -> ProbeResult:
        """Request one token, or the equivalent of another mode; return the outcome, also of a failure."""
        return await generate_token(
            self.session,
            self.url,
            model=self.model,
            token=self.token,
            timeout_seconds=timeout_seconds,
            mode=self.mode,
            engine=self.engine,
        )


async def await_first_token(
    find_engine: Callable[[], Awaitable[ProbedEngine | None]],
    timeout_seconds: float,
    report: Callable[[StartProblem], None],
) -> tuple[ProbedEngine | None, Answered | Failed]:
    """Request a token from a starting engine, again and again, until it generates one.

    Return the engine and Answered, or None and Failed if it is broken or the time is up. It is broken if it answers
    that it never will, or with errors only for `START_FAILURE_SECONDS`; one that is silent or loads may take its time.

    Args:
        find_engine: returns the engine once it listens, else None.
        timeout_seconds: limit for all attempts.
        report: called with each new problem that the user should see meanwhile.
    """
    # failing_since: the time of the first of the errors in a row; None: the last answer was no error
    last_problem, pause = "it does not listen on a port", _FIRST_PAUSE_SECONDS
    failing_since: float | None = None
    engine: ProbedEngine | None = None

    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                # The engine is kept once found: a query of the kernel takes longer than a request to the engine.
                engine = engine or await find_engine()
                if engine:
                    result = await engine.request_token(PROBE_SECONDS)
                    if result.ok:
                        return engine, Answered()
                    # A process that answers 404 will never serve the path; a daemon may still be loading the model.
                    is_path_missing = result.reason == "NotFound" and engine.pid is not None
                    # All messages of probes begin with the address of the engine.
                    if result.reason == "Broken" or is_path_missing:
                        return None, Failed("EngineBroken", result.message)

                    if not engine_health.is_error(result):
                        failing_since = None
                    elif failing_since is None:
                        failing_since = time.monotonic()
                    if failing_since and time.monotonic() - failing_since >= engine_health.START_FAILURE_SECONDS:
                        return None, Failed("EngineBroken", f"the engine at {result.message}")

                    if result.message != last_problem and engine_health.is_start_problem(result):
                        report(StartProblem(f"the engine at {result.message}; it is asked again"))
                    last_problem = result.message
                    if result.reason == "Unreachable":
                        engine = None  # it may have ended, or listen on another port now

                await asyncio.sleep(pause)
                pause = min(_LAST_PAUSE_SECONDS, pause * 1.2)
    except TimeoutError:
        message = f"the engine generated no token within {timeout_seconds:.0f} s: {last_problem}"
        return None, Failed("StartTimeout", message)


async def probe_liveness(engine: ProbedEngine) -> LivenessAnswer:
    """Probe the pulse endpoint of the engine, or request a token if it has none. A failure raises nothing.

    At the pulse endpoint every status but 503 counts as alive.
    """
    limit_seconds = ANSWER_SECONDS
    if engine.pulse is None:
        result = await engine.request_token(limit_seconds)
        return LivenessAnswer("" if result.ok else result.message, silent=result.reason == "TimedOut")

    url = f"{engine.url}{engine.pulse}"
    headers = {"Authorization": f"Bearer {engine.token}"} if engine.token else {}
    try:
        async with (
            asyncio.timeout(limit_seconds),
            engine.session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            await response.read()
            if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
                return LivenessAnswer(f"{url} answered {response.status:d}")
    except TimeoutError:
        return LivenessAnswer(f"{url} did not answer within {limit_seconds:g} s", silent=True)
    except (aiohttp.ClientError, OSError) as error:
        return LivenessAnswer(f"{url}: {error}")
    return LivenessAnswer()


async def check_suspect(engine: ProbedEngine, suspicion: Suspicion) -> Trusted | Hung:
    """Request a token from a suspect engine, again and again, until it is certain whether it works; bounded in time.

    Return Trusted if it works, else Hung with the problem as its message.
    """
    began, cpu_before = time.monotonic(), await read_cpu_seconds(engine.pid)
    while True:
        result = await engine.request_token(ANSWER_SECONDS)
        waited_seconds = time.monotonic() - began
        cpu_now = await read_cpu_seconds(engine.pid)
        # An engine that uses the processor is busy; None: the time that it used is not known.
        used_seconds = None if cpu_now is None or cpu_before is None else cpu_now - cpu_before
        is_busy = engine_health.is_busy(used_seconds, waited_seconds)

        match engine_health.judge_check(suspicion, result, waited_seconds, is_busy=is_busy):
            case "healthy":
                return Trusted()
            case "failing":
                return Hung(_describe_sick(result), "EngineFailing", answers=True)
            case "hung":
                return Hung(_describe_sick(result))
        await asyncio.sleep(CHECK_AGAIN_SECONDS)


class LivenessWatch(msgspec.Struct):
    """The checks of one Ready engine at intervals."""

    find_engine: Callable[[], Awaitable[ProbedEngine | None]]
    """Returns the engine; None once it has ended."""
    count_requests: Callable[[], int | None]
    """Returns the engine's requests in progress; None if unknown."""
    on_check: Callable[[LivenessCheck], None]
    """Called with the outcome of each check."""
    log: structlog.stdlib.BoundLogger

    async def watch(self) -> Hung | None:
        """Check at intervals; return Hung after `HUNG_CHECKS` failed checks in a row.

        Return None if the engine has ended, or is a model in a daemon, which is checked with the daemon.
        """
        engine = await self.find_engine()
        if engine is None or engine.pid is None:
            return None

        failures, cpu_before = 0, await read_cpu_seconds(engine.pid)  # at the last check
        while True:
            await asyncio.sleep(pause_seconds(engine.pulse, failures))
            try:
                check = await self.check_once(cpu_before)
            except Exception:
                self.log.exception("liveness_check_failed")
                continue
            if check is None:
                return None  # the event of its end is on its way

            failures, cpu_before = count_failures(failures, check), check.cpu_after
            if check.alive:
                continue
            self.log.warning("engine_not_alive", pid=engine.pid, checks=failures, problem=check.problem)
            if failures >= HUNG_CHECKS:
                return Hung(f"the engine hangs: {check.problem}; it is stopped and started again")

    async def check_once(self, cpu_before: float | None) -> LivenessCheck | None:
        """Check the engine once, pass the check to `on_check` and return it; None if the engine has ended.

        `cpu_before` is its processor time, in seconds, at the previous check. An engine that has requests and has used
        the processor since then works, and is not probed. One that is silent is alive if it uses the processor
        during the probe, or if that is unknown.
        """
        engine = await self.find_engine()
        if engine is None or engine.pid is None:
            return None

        # answer: that of the probe; None: it was not probed
        requests = self.count_requests()
        answer, cpu_after = None, await read_cpu_seconds(engine.pid)
        if should_probe(requests, cpu_before, cpu_after):
            answer = await probe_liveness(engine)
            if answer.silent:
                # Count only the time used during the silent probe: the engine may have worked until just before.
                cpu_before = cpu_after
            if answer.silent or requests:  # the probe took time in which it may have worked
                cpu_after = await read_cpu_seconds(engine.pid)

        check = LivenessCheck(answer, cpu_before, cpu_after)
        self.on_check(check)
        return check


def _describe_sick(result: ProbeResult) -> str:
    """Return the message of an engine that is stopped because of a probe."""
    return f"the engine at {result.message}; it is stopped and started again"
