"""Decisions about an engine that the proxy suspects, from the agent's own request for a token.

The health pages of engines lie: after a Metal out-of-memory error llama.cpp answers 500 to every request and 200 to
/health, and a hung mlx_lm.server answers /health from another thread. The proxy sees every answer, so it says which
engine is suspect; but a client's request can make a sound engine fail, so only the agent's own request decides.
"""

from typing import Final, Literal

import msgspec

from runtimes.probe import ProbeResult

SuspicionReason = Literal["Failing", "Silent", "Slow"]
Verdict = Literal["healthy", "failing", "hung", "undecided"]

SILENT_SECONDS: Final = 60.0
"""Time for a suspect engine to answer the agent's own request."""
BUSY_SECONDS: Final = 300.0
"""The same for an engine that uses the processor, or is only slow: the request may wait for one with a long prompt."""
LONG_PROMPT_SECONDS: Final = 1800.0
"""The same for one that is only slow and uses the processor, or may do so in a daemon: a prompt may take so long."""
REFUTED_SECONDS: Final = 10.0
"""Least time from a check that the engine passed to the next one: a client whose requests are at fault may repeat them
without pause, and each check takes a slot of the engine."""
BUSY_SHARE: Final = 0.001
"""A share of one processor: while the GPU of a Mac reads a prompt, the engine only gives it work from time to time."""
START_FAILURE_SECONDS: Final = 60.0
"""Time that a starting engine may answer with errors; then it is taken as broken."""
_WAITING: Final = frozenset({"Loading", "TimedOut", "Unreachable"})
"""Results of a probe that a sound engine may give for a while; the exit of a process is noticed elsewhere."""


class Suspicion(msgspec.Struct, frozen=True):
    """The proxy's reason to suspect an engine; `message` has counts and statuses, never content."""

    reason: SuspicionReason
    message: str

    @property
    def is_drained(self) -> bool:
        """True if the engine gets no new request meanwhile.

        One that fails is checked in a moment, and may be sound: the requests of one client must not have those of all
        others refused. A slow one still answers.
        """
        return self.reason == "Silent"

    def outranks(self, other: "Suspicion") -> bool:
        """Return whether a check that runs for `other` goes on for this reason instead: only Slow gives way."""
        return other.reason == "Slow" and self.reason != "Slow"


def judge_check(suspicion: Suspicion, result: ProbeResult, waited_seconds: float, *, is_busy: bool | None) -> Verdict:
    """Decide whether a suspect engine works, by the agent's own request, which is repeated while it is undecided.

    A token proves that it works, an error that it fails. Without an answer it counts as hung after a limit, which is
    longer for an engine that uses the processor: it may be reading a long prompt. If that is unknown, one that is only
    slow gets the longer limit, and any other the shorter.

    Args:
        suspicion: the proxy's reason.
        result: the result of the last request.
        waited_seconds: the time since the first request.
        is_busy: True if the engine visibly works; None if unknown, as of a model in a daemon.
    """
    if result.ok:
        return "healthy"
    if is_error(result):
        return "failing"

    # A slow engine gets the shorter limit only if it is known to be idle; any other gets the longer one only if it is
    # known to be busy.
    if suspicion.reason == "Slow":
        limit_seconds = BUSY_SECONDS if is_busy is False else LONG_PROMPT_SECONDS
    else:
        limit_seconds = BUSY_SECONDS if is_busy else SILENT_SECONDS
    return "hung" if waited_seconds >= limit_seconds else "undecided"


def is_error(result: ProbeResult) -> bool:
    """Decide whether the engine answered with an error that a sound engine does not give, even while it loads."""
    return not result.ok and result.reason not in _WAITING


def is_start_problem(result: ProbeResult) -> bool:
    """Return whether the result of a starting engine is shown to the user: it says more than that the engine loads."""
    return not result.ok and result.reason not in {"Loading", "Unreachable"}


def is_busy(used_seconds: float | None, waited_seconds: float) -> bool | None:
    """Decide whether an engine visibly works, by the processor time that it used while it was waited for.

    None if that time is unknown. A hung engine also uses some: its threads wake up to see whether there is an answer.
    """
    return None if used_seconds is None else used_seconds > waited_seconds * BUSY_SHARE
