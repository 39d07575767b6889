"""A check of a silent engine measures the processor time of the silence, not that of the work before it."""

from collections.abc import Iterator
from typing import cast

import aiohttp
import pytest
import structlog

from metal_agent.supervise import engine_checks
from metal_agent.supervise.engine_checks import LivenessAnswer, LivenessCheck, LivenessWatch, ProbedEngine

SESSION = cast("aiohttp.ClientSession", None)
ENGINE = ProbedEngine(SESSION, "http://127.0.0.1:1", "m", None, "chat", pid=1, pulse="/health")


@pytest.mark.parametrize(
    ("requests", "used_before", "read", "alive"),
    [
        (0, 1.0, (2.0, 2.0), False),  # it worked until it stopped
        (0, None, (2.0, 2.0), False),
        (1, 2.0, (2.0, 2.0), False),
        (0, 2.0, (2.0, 2.5), True),
        (0, 2.0, (None, None), True),  # unknown to the system
    ],
)
async def test_silence_is_judged_by_the_processor_time_that_it_took(
    monkeypatch: pytest.MonkeyPatch,
    requests: int,
    used_before: float | None,
    read: tuple[float | None, float | None],
    alive: bool,
) -> None:
    check = await check_silent(monkeypatch, requests, used_before, iter(read))
    assert check.alive is alive
    assert check.cpu_after == read[1], "the next check compares with it"


async def check_silent(
    monkeypatch: pytest.MonkeyPatch, requests: int, used_before: float | None, read: Iterator[float | None]
) -> LivenessCheck:
    """Return the check of an engine that does not answer, with the processor times that it has used when asked."""

    async def find_engine() -> ProbedEngine:
        return ENGINE

    async def probe(_engine: ProbedEngine) -> LivenessAnswer:
        return LivenessAnswer("no answer", silent=True)

    async def read_next(_pid: int) -> float | None:
        return next(read)

    monkeypatch.setattr(engine_checks, "probe_liveness", probe)
    monkeypatch.setattr(engine_checks, "read_cpu_seconds", read_next)
    watch = LivenessWatch(find_engine, lambda: requests, lambda _check: None, structlog.get_logger())
    check = await watch.check_once(used_before)
    assert check is not None
    return check
