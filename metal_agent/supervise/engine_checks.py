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
        before: its processor time, in seconds, before its silence, else at the previous check; None if unknown.
        after: its processor time now.
    """

    answer: LivenessAnswer | None
    before: float | None
    after: float | None

    @property
    def problem(self) -> str:
        """The problem of an engine that is not alive, as a message."""
        return self.answer.problem if self.answer else "it has requests to answer and uses no processor time"

    @property
    def alive(self) -> bool:
        """True if it answered, or is silent and uses the processor, or if its use of the processor is unknown."""
        if self.answer is None or self.answer.silent:
            return self.before is None or self.after is None or self.after > self.before
        return not self.answer.problem


def count_failures(so_far: int, check: LivenessCheck) -> int:
    """Return how many checks in a row, `check` included, found the engine not alive."""
    return 0 if check.alive else so_far + 1


def pause_seconds(pulse: str | None, so_far: int) -> float:
    """Return the pause before the next check, after `so_far` failed ones in a row."""
    return CHECK_SECONDS if pulse or so_far else TOKEN_CHECK_SECONDS


def should_probe(requests: int | None, before: float | None, after: float | None) -> bool:
    """Decide whether to probe the engine: not while it has `requests` and visibly works on them."""
    return not requests or before is None or after is None or after <= before


async def read_cpu_seconds(pid: int | None) -> float | None:
    """Return the processor time that a process has used, or None if it is unknown, as for a model in a daemon."""
    return None if pid is None else await asyncio.to_thread(footprint.cpu_seconds, pid)


class ProbedEngine(msgspec.Struct, frozen=True):
    """An engine as the agent asks it."""

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

    async def ask(self, timeout_seconds: float) -> ProbeResult:
        """Request a token, or the equivalent of another mode."""
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
    """Ask a starting engine until it generates a token; return it, and the outcome for its lifecycle.

    Args:
        find_engine: returns the engine once it listens, else None.
        timeout_seconds: limit for all attempts.
        report: called with each new problem that the user should see meanwhile.
    """
    problem, pause = "it does not listen on a port", _FIRST_PAUSE_SECONDS
    failing_since: float | None = None
    engine: ProbedEngine | None = None
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                # The engine is kept once found: a query of the kernel takes longer than a request to the engine.
                engine = engine or await find_engine()
                if engine:
                    result = await engine.ask(PROBE_SECONDS)
                    if result.ok:
                        return engine, Answered()
                    # A process that answers 404 will never serve the path; a daemon may still be loading the model.
                    if result.reason == "Broken" or (result.reason == "NotFound" and engine.pid is not None):
                        return None, Failed("EngineBroken", result.message)
                    failing_since = (failing_since or time.monotonic()) if engine_health.is_error(result) else None
                    if failing_since and time.monotonic() - failing_since >= engine_health.START_FAILURE_SECONDS:
                        return None, Failed("EngineBroken", f"the engine at {result.message}")
                    if result.message != problem and engine_health.is_start_problem(result):
                        report(StartProblem(f"the engine at {result.message}; it is asked again"))
                    problem = result.message
                    if result.reason == "Unreachable":
                        engine = None
                await asyncio.sleep(pause)
                pause = min(_LAST_PAUSE_SECONDS, pause * 1.2)
    except TimeoutError:
        message = f"the engine generated no token within {timeout_seconds:.0f} s: {problem}"
        return None, Failed("StartTimeout", message)


async def probe_liveness(engine: ProbedEngine) -> LivenessAnswer:
    """Probe the pulse endpoint of the engine, or request a token if it has none. A failure raises nothing."""
    limit_seconds = ANSWER_SECONDS
    if engine.pulse is None:
        result = await engine.ask(limit_seconds)
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
    """Ask a suspect engine for a token, again and again, until it is found to be healthy or not; bounded in time."""
    began, used_before = time.monotonic(), await read_cpu_seconds(engine.pid)
    while True:
        result = await engine.ask(ANSWER_SECONDS)
        waited_seconds = time.monotonic() - began
        used = await read_cpu_seconds(engine.pid)
        used_seconds = None if used is None or used_before is None else used - used_before
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
        """Check until the engine is found to hang; None if it has ended, or is a model that its daemon watches."""
        engine = await self.find_engine()
        if engine is None or engine.pid is None:
            return None
        failures, before = 0, await read_cpu_seconds(engine.pid)
        while True:
            await asyncio.sleep(pause_seconds(engine.pulse, failures))
            try:
                check = await self.check_once(before)
            except Exception:
                self.log.exception("liveness_check_failed")
                continue
            if check is None:
                return None  # the event of its end is on its way
            failures, before = count_failures(failures, check), check.after
            if check.alive:
                continue
            self.log.warning("engine_not_alive", pid=engine.pid, checks=failures, problem=check.problem)
            if failures >= HUNG_CHECKS:
                return Hung(f"the engine hangs: {check.problem}; it is stopped and started again")

    async def check_once(self, before: float | None) -> LivenessCheck | None:
        """Check once; `before` is the processor time, in seconds, at the last check. None if the engine has ended."""
        engine = await self.find_engine()
        if engine is None or engine.pid is None:
            return None
        requests = self.count_requests()
        answer, after = None, await read_cpu_seconds(engine.pid)
        if should_probe(requests, before, after):
            answer = await probe_liveness(engine)
            if answer.silent:
                # Only what it used meanwhile shows that it works: it may have worked until it stopped.
                before = after
            if answer.silent or requests:
                after = await read_cpu_seconds(engine.pid)
        check = LivenessCheck(answer, before, after)
        self.on_check(check)
        return check


def _describe_sick(result: ProbeResult) -> str:
    """Return the message of an engine that is stopped because of a probe."""
    return f"the engine at {result.message}; it is stopped and started again"
