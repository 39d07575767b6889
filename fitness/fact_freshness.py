"""The freshness of facts that node agents report, by when they change and not by the clocks of their nodes."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from crds.nodefitness import STALE_SECONDS


class _Report(NamedTuple):
    observed_at: str
    seen_at: float
    """When this process has seen it first, by its own clock."""


class FactFreshness:
    """The heartbeats of all reporters.

    A heartbeat that is seen first when this process starts may be old: then the clock of its node counts.

    Args:
        clock: seconds that never go back.
        read_time: the time of day.
    """

    def __init__(self, clock: Callable[[], float], read_time: Callable[[], datetime]) -> None:
        self._clock = clock
        self._read_time = read_time
        self._reports: dict[str, _Report] = {}

    def note_heartbeat(self, name: str, observed_at: str | None) -> float | None:
        """Remember the heartbeat of a reporter, and return when it was made, by this process's `clock`.

        A heartbeat that is known already keeps its time, and a new one counts as made now. The first one of a reporter
        may be old, as this process may have just started: then the age that the node's clock states is subtracted.

        Args:
            name: the reporter, such as a node.
            observed_at: the time that the reporter states, as RFC 3339; None or empty: it has reported nothing, so it
                is forgotten, and None is returned.
        """
        if not observed_at:
            self._reports.pop(name, None)
            return None

        report = self._reports.get(name)
        if report is None:
            # The first one of this reporter, which may be old.
            report = self._reports[name] = _Report(observed_at, self._clock() - self._read_age(observed_at))
        elif report.observed_at != observed_at:
            report = self._reports[name] = _Report(observed_at, self._clock())
        return report.seen_at

    def is_stale(self, name: str) -> bool:
        """Return whether a reporter is silent; False for one that was never heard."""
        report = self._reports.get(name)
        return report is not None and self._clock() - report.seen_at > STALE_SECONDS

    def list_stale(self) -> frozenset[str]:
        """Return all reporters that are silent."""
        now = self._clock()
        return frozenset(name for name, report in self._reports.items() if now - report.seen_at > STALE_SECONDS)

    def _read_age(self, observed_at: str) -> float:
        """Return the age in seconds of a heartbeat by the time of day.

        A time in the future has age 0, and one that cannot be read counts as stale.
        """
        try:
            moment = datetime.fromisoformat(observed_at)
        except ValueError:
            return STALE_SECONDS + 1
        age = (self._read_time() - moment.replace(tzinfo=moment.tzinfo or UTC)).total_seconds()
        return max(0.0, age)
