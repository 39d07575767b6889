"""The tokens per second of each process of a host as its status shows them, so that the API is written to rarely.

The proxy counts by service: processes of one service on one host share its tokens equally.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from crds.rate import format_rate, is_notable_change
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.token_rates import TokenRates

LEAST_SECONDS: Final = 60.0
"""Least time between two changes of a number that is shown."""
LEAST_RATE: Final = 0.1
"""Least tokens per second that are shown: less is what the questions of a starting controller take, and no load."""


class ShownRate(NamedTuple):
    """A number of a status."""

    tokens_per_second: float
    since: float
    """Time of a monotonic clock, in seconds, from which on it is shown."""


def choose_rate(shown: ShownRate | None, measured: float | None, now: float) -> ShownRate | None:
    """Return what a status shows from now on: a change of more than a tenth, at most once a minute; None: unknown.

    Args:
        shown: what it shows.
        measured: the tokens per second of the last minute; None: they are unknown.
        now: the time of the clock of `shown`.
    """
    if measured is None:
        return None
    measured = measured if measured >= LEAST_RATE else 0.0
    if shown is None:
        return ShownRate(measured, now)
    is_due = is_notable_change(shown.tokens_per_second, measured) and now - shown.since >= LEAST_SECONDS
    return ShownRate(measured, now) if is_due else shown


class ProcessTokens:
    """The numbers that the statuses of `runners`, by uid, show; `rates` are those of their services.

    `on_change` is called with the uid of each process whose number has changed.
    """

    def __init__(self, runners: Mapping[str, Runner], rates: TokenRates) -> None:
        self._runners = runners
        self._rates = rates
        self._shown: dict[str, ShownRate] = {}
        self.on_change: Callable[[str], None] = lambda _uid: None
        rates.on_read = self.update

    def find(self, uid: str) -> str:
        """Return the tokens per second of a process as its status shows them; empty if they are unknown."""
        shown = self._shown.get(uid)
        runner = self._runners.get(uid)
        is_serving = runner is not None and runner.state.phase == "Ready"
        return format_rate(shown.tokens_per_second) if shown and is_serving else ""

    def update(self, now: float) -> None:
        """Compare what is shown with what is measured at `now` of a monotonic clock."""
        ready = {uid: each for uid, each in self._runners.items() if each.state.phase == "Ready"}
        sharing = Counter(each.assignment.service for each in ready.values())
        found: dict[str, ShownRate] = {}
        for uid, runner in ready.items():
            service = runner.assignment.service
            rate = self._rates.find_rate(str(service), now) if service is not None else None
            measured = rate / sharing[service] if rate is not None else None
            if (shown := choose_rate(self._shown.get(uid), measured, now)) is not None:
                found[uid] = shown
        changed = [uid for uid in self._shown.keys() | found.keys() if self._shown.get(uid) != found.get(uid)]
        self._shown = found
        for uid in changed:
            self.on_change(uid)
