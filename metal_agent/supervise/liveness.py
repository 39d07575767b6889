"""Liveness checks of a Ready engine, which distinguish an engine that hangs from one that is busy.

A long prompt keeps an engine silent for minutes, so silence alone never ends an engine: it must also use no processor
time, in several checks in a row. An engine that answers requests is not probed. An idle engine is probed at its pulse
endpoint if it has one, else for a token: with a single slot, a token would evict the cached prompt of the last
conversation.
"""

import asyncio
from typing import Final

import msgspec

from devices import footprint

CHECK_SECONDS: Final = 10.0
"""Time between checks. An engine that hangs is ended after some `HUNG_CHECKS * (CHECK_SECONDS + ANSWER_SECONDS)`."""
TOKEN_CHECK_SECONDS: Final = 60.0
"""The same for an engine without a pulse endpoint: each check generates a token, which wakes the processor."""
ANSWER_SECONDS: Final = 20.0
HUNG_CHECKS: Final = 3


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
