"""The judgement and the schedule of readiness probes: the answer after a probe, and the time of the next.

A service that has answered once is believed: it is not ready only after errors for some time, and its silence proves
nothing, because it may be busy. Its probes that fail are repeated with back-off until one succeeds.
"""

import hashlib
import zlib
from typing import Final, NamedTuple

import msgspec

from controller.services.endpoints import Endpoint
from crds.serving import Mode
from kube.backoff import EXACT, backoff_seconds
from runtimes.probe import TIMED_OUT, ProbeResult

FIRST_RETRY_SECONDS: Final = 1.0
LAST_RETRY_SECONDS: Final = 60.0
REPEAT_SECONDS: Final = 600.0
"""Pause between two questions to a service in pods that answers: at 1,000 services, 1.7 tokens a second."""
DOUBT_SECONDS: Final = 10.0
"""Time for which a service that has answered must fail until it is not ready: a new token takes seconds to arrive."""
SILENT_SECONDS: Final = 300.0
"""Time for which a service that has answered must be silent before its message says so: it may be busy."""
TOKEN_EDITED: Final = "TokenEdited"  # noqa: S105 - a reason
TOKEN_NOT_FOUND: Final = "TokenNotFound"  # noqa: S105 - a reason
TOKEN_NOT_READ: Final = "TokenNotRead"  # noqa: S105 - a reason
UNKNOWN: Final = frozenset({TIMED_OUT, TOKEN_EDITED, TOKEN_NOT_READ})
"""Reasons of probes that prove nothing about a service that has answered before."""


class Question(NamedTuple):
    """The subject of a probe: another service, generation, replica or endpoint makes another question."""

    service_uid: str
    generation: int
    replicas: tuple[str, ...]
    """Sorted uids of the ready replicas."""
    endpoints: tuple[Endpoint, ...]
    """Sorted, never empty."""
    mode: Mode = "chat"

    @property
    def in_pods(self) -> bool:
        """True if a pod is among the endpoints."""
        return any(not endpoint.host for endpoint in self.endpoints)

    @property
    def digest(self) -> str:
        """A digest by which a later leader recognises the question."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class Probe(NamedTuple):
    """One probe of a service: its result, the endpoint that the result is of, and one that failed beside it."""

    result: ProbeResult
    endpoint: Endpoint | None = None
    failed: Endpoint | None = None
    """An endpoint that failed while `endpoint` answered; the message of the result names it, too."""


class Answer(NamedTuple):
    """The answer to a question: the result of the probe that decided it."""

    result: ProbeResult
    has_note: bool = False
    """The message of a service that answers also says that an endpoint failed, or that it is silent since."""


class ProbeTrouble(NamedTuple):
    """The failures of a service since its last probe without one; times are by the clock of `update_trouble`."""

    failures: int = 0
    error_since: float | None = None
    """When the first error came since the last answer."""
    unknown_since: float | None = None
    """When the first probe since the last answer proved nothing."""
    failed: Endpoint | None = None
    """An endpoint that failed while another one answered: it is probed until it answers, too."""

    def failing_seconds(self, reason: str, now: float) -> float:
        """Return the time since the first failure of this sort (an error, or nothing proved) after the last answer."""
        since = self.unknown_since if reason in UNKNOWN else self.error_since
        return 0.0 if since is None else now - since

    @property
    def retry_seconds(self) -> float:
        """The pause before the next probe."""
        return backoff_seconds(self.failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS, jitter=EXACT)


def update_trouble(trouble: ProbeTrouble | None, probe: Probe, now: float) -> ProbeTrouble | None:
    """Return the trouble of a service after a probe, by which it is soon probed again; None: there is none any more.

    A probe that one endpoint answered while another one failed is trouble, too, without a time since when.
    """
    probe_trouble = trouble or ProbeTrouble()

    # In a row, for the back-off of the next probe.
    failures = probe_trouble.failures + 1
    if probe.result.ok:
        return ProbeTrouble(failures, failed=probe.failed) if probe.failed else None

    # The times of the first failure of each sort stay.
    error_since, unknown_since = probe_trouble.error_since, probe_trouble.unknown_since
    # Reasons in UNKNOWN, such as a time-out, prove nothing; all others are errors.
    if probe.result.reason in UNKNOWN:
        unknown_since = now if unknown_since is None else unknown_since
    else:
        error_since = now if error_since is None else error_since
    return ProbeTrouble(failures, error_since, unknown_since)


def judge_probe(probe: Probe, last: Answer | None, failing_seconds: float, *, has_answered: bool) -> Answer | None:
    """Return the answer that follows from a probe, by which the service is ready or not; None: the last one stays.

    A service that never answered is judged by each probe. One that has answered is judged by success at once, and by
    errors once they last; silence only adds a note, since a busy service is silent, too.

    Args:
        probe: the probe.
        last: the last answer to the same question.
        failing_seconds: time since the first failure of this sort (an error, or nothing proved) after the last answer.
        has_answered: an endpoint of the service has generated a token.
    """
    result = probe.result
    # It answered, and the message had no note, such as about an endpoint that failed.
    was_well = last is not None and last.result.ok and not last.has_note
    if result.ok and probe.failed is None and was_well:
        return None  # another endpoint answered than before: that is no news

    # A success counts at once, and so does any result of a service that never answered.
    if result.ok or not has_answered:
        return Answer(result, has_note=probe.failed is not None)

    if result.reason not in UNKNOWN:
        # An error: the service is not ready once it has failed for some time.
        return Answer(result) if failing_seconds >= DOUBT_SECONDS else None

    # A probe that proves nothing leaves the service ready. After a long silence, its message says so.
    if last is None or not was_well or result.reason != TIMED_OUT or failing_seconds < SILENT_SECONDS:
        return None
    message = f"{last.result.message}; {result.message}: it is busy, or it hangs and must be restarted"
    return Answer(msgspec.structs.replace(last.result, message=message), has_note=True)


def seconds_to_repeat(service_uid: str, now: float) -> float:
    """Return the seconds from `now` to the service's next turn: one moment in each `REPEAT_SECONDS`."""
    return seconds_to_turn(service_uid, now, REPEAT_SECONDS)


def seconds_to_turn(service_uid: str, now: float, period_seconds: float) -> float:
    """Return the seconds from `now` to the service's next turn: one moment in each period, spread by its uid."""
    share = zlib.crc32(service_uid.encode()) / 2**32
    return (share * period_seconds - now) % period_seconds
