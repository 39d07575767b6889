"""Decide from the traffic of one backend that it is sick: it only fails, falls silent within a stream, or is slow.

The health page of an engine says little: an engine can answer an error to every request, or nothing at all, while its
page says that all is well. Here an engine is measured by its answers, and its pauses by those that it made before. A
suspicion is a reason to look at the engine, no proof: one client may send what an engine cannot digest, or a prompt
that is longer than all before it.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.proxy.config import BackendHealth

_DISTINCT_FAILURES: Final = 3
"""Different requests that failed in a row; one that a client repeats counts once."""
_FAILURES: Final = 8
"""Requests that failed in a row, even if they are all alike."""
SHORTEST_SILENCE_SECONDS: Final = 10.0
SHORTEST_WAIT_SECONDS: Final = 60.0
FIRST_ANSWER_SECONDS: Final = 120.0
"""The wait that is suspicious in a backend that has answered nothing yet, so that its answers set no measure.

A sound one may take longer with a long prompt. So the agent that asks it must not take it for hung as long as it works.
"""
_SUSPICIOUS_FACTOR: Final = 5.0
_REMEMBERED_ANSWERS: Final = 20
_DIGEST_BYTES: Final = 4096


class AnswerProgress:
    """One answer of a backend, from the moment when the request is sent. Times are of the monotonic clock, in seconds.

    Args:
        request_digest: the same number for the same request body.
        size_bytes: the size of the request: a longer prompt needs more time before its first token.
        now: the time at which the request is sent.
    """

    def __init__(self, request_digest: int, size_bytes: int, now: float) -> None:
        self.request_digest = request_digest
        """A number that equal requests share, so that one which a client repeats is recognized."""
        self.size_bytes = size_bytes
        self.began = self.last_data = now  # while no data has come, both are the time of sending
        self.longest_pause = 0.0
        """The longest pause between two pieces of data for which the backend is responsible."""
        self.has_begun = False
        """The head of the answer has come."""
        self.waits_for_client = False
        """The proxy has stopped reading from the backend, because its client does not read."""


class BackendPast:
    """The last answers of one backend, those under way, and the health that they show.

    The first call that ends an answer counts. `report` is called after each change of `health`.
    """

    def __init__(self, uid: str, report: Callable[["BackendPast"], None]) -> None:
        self.health = BackendHealth(uid)
        """The suspicion that the backend is sick, if there is one: a reason for the agent to examine the engine."""
        self.under_way: set[AnswerProgress] = set()
        """The answers that have neither ended nor failed yet."""
        self._report = report  # called with this object when `health` has changed

        # The failures in a row, which a complete answer ends.
        self._failures = 0  # their number
        self._first_failure = 0.0  # the time of the first one
        self._failed_requests: set[int] = set()  # the digests of the requests that failed, three at most
        self._last_outcomes: deque[str] = deque(maxlen=_DISTINCT_FAILURES)  # kinds of the last ones, for the message

        # The measure of what is slow: the last answers.
        # The longest pause within each of the last complete answers.
        self._longest_pauses: deque[float] = deque(maxlen=_REMEMBERED_ANSWERS)
        # Seconds to the begin of an answer, with the bytes of its request.
        self._past_waits: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED_ANSWERS)

    def expect_answer(self, body: bytes | bytearray, now: float) -> AnswerProgress:
        """Observe the answer to a request with this body, which is sent now."""
        progress = AnswerProgress(_digest(body), len(body), now)
        self.under_way.add(progress)
        return progress

    def note_begin(self, progress: AnswerProgress, now: float) -> None:
        """Note that an answer has begun."""
        progress.has_begun = True
        progress.last_data = now
        self._past_waits.append((now - progress.began, progress.size_bytes))

    def note_data(self, progress: AnswerProgress, now: float) -> None:
        """Note data of a stream; it ends a suspicion that the backend is silent or slow.

        The pause before it is not counted if the client caused it by not reading. A suspicion that the backend only
        fails stays: one whose streams always break off sends data, too.
        """
        pause = now - progress.last_data
        progress.last_data = now
        if pause > progress.longest_pause and not progress.waits_for_client:
            progress.longest_pause = pause
        progress.waits_for_client = False
        if self.health.suspect and self.health.reason != "Failing":
            self._clear_suspicion()

    def note_success(self, progress: AnswerProgress) -> None:
        """Note a complete answer: whatever was suspected, the backend works."""
        if progress not in self.under_way:
            return  # this answer was noted already, or is no longer observed
        self.under_way.discard(progress)
        self._longest_pauses.append(progress.longest_pause)
        if self._failures:
            self._failures = 0
            self._failed_requests.clear()
            self._last_outcomes.clear()
        self._clear_suspicion()

    def note_failure(self, progress: AnswerProgress, outcome: str, now: float) -> None:
        """Note a request that the backend failed; `outcome` names the failure without any content of the answer.

        The backend is suspected after a few different requests, or more that may be alike, have failed in a row. It is
        not while it streams an answer of which data came since the first failure: then it works.
        """
        if progress not in self.under_way:
            return  # this answer was noted already, or is no longer observed
        self.under_way.discard(progress)

        # 1. Count it. The digest of a request tells whether a client repeats one.
        if not self._failures:
            self._first_failure = now
        self._failures += 1
        self._last_outcomes.append(outcome)
        if len(self._failed_requests) < _DISTINCT_FAILURES:
            self._failed_requests.add(progress.request_digest)

        # 2. Three different requests are enough; if they may be alike, as from one client that repeats its own, eight.
        are_enough = len(self._failed_requests) >= _DISTINCT_FAILURES or self._failures >= _FAILURES
        is_streaming = any(answer.has_begun and answer.last_data > self._first_failure for answer in self.under_way)
        if are_enough and not is_streaming:
            outcomes = ", ".join(self._last_outcomes)
            self._suspect("Failing", f"the last {self._failures} requests failed: {outcomes}")

    def note_fatal_failure(self, progress: AnswerProgress, outcome: str) -> None:
        """Note an answer which shows that the backend cannot serve any request."""
        if progress in self.under_way:
            self.under_way.discard(progress)
            self._suspect("Failing", f"its last answer, {outcome}, shows that it cannot serve any request")

    def stop_observing(self, progress: AnswerProgress) -> None:
        """Stop observing an answer that shows nothing of the backend, such as one whose client hung up."""
        self.under_way.discard(progress)

    def check_pauses(self, now: float) -> None:
        """Suspect the backend if an answer under way is silent, or late to begin, for much longer than past ones."""
        for progress in self.under_way:
            if progress.has_begun:
                self._check_silence(progress, now)
            else:
                self._check_wait(progress, now)

    def _check_silence(self, progress: AnswerProgress, now: float) -> None:
        """Suspect the backend if a stream is silent for much longer than the longest pause so far.

        A stream whose client does not read is not judged.
        """
        seconds = now - progress.last_data
        if seconds < SHORTEST_SILENCE_SECONDS or progress.waits_for_client:  # too short, or not its fault
            return
        longest = max((*self._longest_pauses, progress.longest_pause))
        if seconds > _SUSPICIOUS_FACTOR * longest:
            self._suspect(
                "Silent", f"no data for {seconds:.0f} s within a stream; the longest pause before was {longest:.1f} s"
            )

    def _check_wait(self, progress: AnswerProgress, now: float) -> None:
        """Suspect the backend if an answer begins much later than earlier ones, in proportion to their requests."""
        seconds = now - progress.began
        if not self._past_waits:
            if seconds > FIRST_ANSWER_SECONDS:
                self._suspect("Slow", f"no answer for {seconds:.0f} s, and none before")
            return
        if seconds < SHORTEST_WAIT_SECONDS:
            return
        # A request that is larger than a past one may take longer in proportion.
        longest = max(wait * max(1.0, progress.size_bytes / max(1, size)) for wait, size in self._past_waits)
        if seconds > _SUSPICIOUS_FACTOR * longest:
            self._suspect("Slow", f"no answer for {seconds:.0f} s; expected within {longest:.1f} s by earlier answers")

    def _suspect(self, reason: str, message: str) -> None:
        """Make the backend suspect, and report it; a suspicion that it has already stays, unless it begins to fail."""
        # Failing replaces Slow and Silent, which data of a stream would end.
        if not self.health.suspect or (reason == "Failing" and self.health.reason != "Failing"):
            self.health = BackendHealth(self.health.uid, suspect=True, reason=reason, message=message)
            self._report(self)

    def _clear_suspicion(self) -> None:
        """Take the backend for healthy again, and report that, if it was suspect."""
        if self.health.suspect:
            self.health = BackendHealth(self.health.uid)
            self._report(self)


class UnobservedPast(BackendPast):
    """The past of any backend whose health nobody asks for."""

    def __init__(self) -> None:
        super().__init__("", lambda _: None)
        self._progress = AnswerProgress(0, 0, 0.0)  # of all answers: not under way, so that none is judged

    def expect_answer(self, body: bytes | bytearray, now: float) -> AnswerProgress:
        """Return the progress of an answer that is not observed."""
        del body, now
        return self._progress


def _digest(body: bytes | bytearray) -> int:
    """Return the same number for the same body, from its ends only, because a body may be large."""
    if len(body) <= _DIGEST_BYTES:
        return hash(bytes(body))
    return hash((len(body), bytes(body[:_DIGEST_BYTES]), bytes(body[-_DIGEST_BYTES:])))
