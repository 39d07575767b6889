"""The traffic of each process of a host as its status shows it, so that the API is written to rarely.

The proxy counts by service: processes of one service on one host share its requests and tokens equally.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from crds.rate import is_notable_change
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.service_rates import ServiceRate, ServiceRates

LEAST_SECONDS: Final = 60.0
"""Least time between two changes of the traffic that is shown."""
LEAST_RATE: Final = 0.1
"""Least tokens per second that are shown: less is what the questions of a starting controller take, and no load."""


class ProcessTraffic(NamedTuple):
    """The traffic of a process in the last minute."""

    tokens_per_second: float
    requests_per_minute: int = 0
    average_ms: int | None = None
    """Average duration of its requests; None if it had none, or if their time is unknown."""


class ShownTraffic(NamedTuple):
    """The traffic in a status."""

    traffic: ProcessTraffic
    since: float
    """Time of a monotonic clock, in seconds, from which on it is shown."""


def share_rate(rate: ServiceRate, processes: int) -> ProcessTraffic:
    """Return the traffic of one process if `processes` share that of their service equally."""
    tokens = rate.tokens_per_second / processes
    requests = round(rate.requests_per_minute / processes)
    average = round(rate.average_seconds * 1000) if requests and rate.average_seconds is not None else None
    return ProcessTraffic(tokens if tokens >= LEAST_RATE else 0.0, requests_per_minute=requests, average_ms=average)


def choose_traffic(shown: ShownTraffic | None, measured: ProcessTraffic | None, now: float) -> ShownTraffic | None:
    """Return the traffic to show in a status: `measured` if it differs notably and the last change is a minute ago.

    Otherwise what is shown stays, so that not every small change is a write to the API.

    Args:
        shown: what the status shows; None if nothing.
        measured: the traffic of the last minute; None if it is unknown, which is then shown.
        now: the time of the clock of `shown`.
    """
    if measured is None:
        return None
    if shown is None:
        return ShownTraffic(measured, now)
    is_due = now - shown.since >= LEAST_SECONDS and _differs(shown.traffic, measured)
    return ShownTraffic(measured, now) if is_due else shown


def _differs(shown: ProcessTraffic, measured: ProcessTraffic) -> bool:
    """Return whether any number differs notably, or is None (unknown) in only one of the two."""
    return any(
        is_notable_change(old, new) if old is not None and new is not None else (old is None) != (new is None)
        for old, new in zip(shown, measured, strict=True)
    )


class TrafficReport:
    """The traffic that the statuses of `runners`, by uid, show; `rates` are those of their services.

    `on_change` is called with the uid of each process whose traffic has changed.
    """

    def __init__(self, runners: Mapping[str, Runner], rates: ServiceRates) -> None:
        """Show no traffic so far; update it after each read of the rates."""
        self._runners = runners
        self._rates = rates
        self._shown: dict[str, ShownTraffic] = {}  # by uid of the process, what its status shows
        self.on_change: Callable[[str], None] = lambda _uid: None
        rates.on_read = self.update  # called after each read of the proxy's counts

    def find(self, uid: str) -> ProcessTraffic | None:
        """Return the traffic of a process as its status shows it; None if it is unknown or the process not Ready."""
        shown = self._shown.get(uid)  # what its status shows
        runner = self._runners.get(uid)
        is_serving = runner is not None and runner.state.phase == "Ready"
        return shown.traffic if shown and is_serving else None

    def update(self, now: float) -> None:
        """Compute the traffic that each status shows at `now` of a monotonic clock, and report each change.

        Ready processes of one service share its rate equally. Others have no traffic.
        """
        ready = {uid: runner for uid, runner in self._runners.items() if runner.state.phase == "Ready"}
        # The number of processes that share the rate of a service.
        sharing = Counter(runner.assignment.service for runner in ready.values())

        current: dict[str, ShownTraffic] = {}
        for uid, runner in ready.items():
            service = runner.assignment.service
            rate = self._rates.find_rate(str(service), now)
            measured = share_rate(rate, sharing[service]) if rate is not None else None
            if (shown := choose_traffic(self._shown.get(uid), measured, now)) is not None:
                current[uid] = shown

        # _shown: what the statuses have shown so far, by uid
        changed = [uid for uid in self._shown.keys() | current.keys() if self._shown.get(uid) != current.get(uid)]
        self._shown = current
        for uid in changed:
            self.on_change(uid)
