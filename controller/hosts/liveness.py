"""The liveness of hosts, by the renewals of their Leases. Pure: the clock is passed in.

A host expires only when this process has itself seen the duration of its Lease pass without a renewal, on its own
monotonic clock, while the API server answered: an outage of the API server expires no host.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final, Literal, NamedTuple

from kube.client import Obj

DURATION_SECONDS: Final = 40.0
"""Duration of a Lease that states none."""
MOST_DURATION_SECONDS: Final = 60.0
"""Longest duration that counts: a stolen host could state one that never ends."""
OUTAGE_SECONDS: Final = 10.0
"""After a longer time without an answer of the API server, each host gets its Lease duration anew: none could renew."""
SKEW_SECONDS: Final = 5.0
"""The most that a host's wall clock may be ahead of ours; a renewTime further in the future is ignored."""


class Lease(NamedTuple):
    """The Lease of a host."""

    host: str
    renewed: str
    """The renewTime, as text: after the first observation, only a change of it counts."""
    duration_seconds: float


Liveness = Literal["Alive", "Unproven", "Expired"]
"""Alive: processes may be bound to the host. Unproven: no renewal seen yet. Expired: lost, until it renews."""


class _Host:
    """Observations of one host."""

    def __init__(self, lease: Lease | None, now: float, *, fresh: bool) -> None:
        self.lease = lease
        self.since = now
        self.proven = fresh
        self.expired_at: float | None = None

    @property
    def duration_seconds(self) -> float:
        return self.lease.duration_seconds if self.lease else DURATION_SECONDS

    @property
    def liveness(self) -> Liveness:
        if self.expired_at is not None:
            return "Expired"
        return "Alive" if self.proven else "Unproven"


class HostLiveness:
    """The liveness of all hosts. Pure: `now` is the caller's monotonic clock in seconds, which never goes back."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._answered: float | None = None

    def restart(self) -> None:
        """Forget all observations: a new leader has not watched the hosts before."""
        self._hosts = {}
        self._answered = None

    def state(self, host: str) -> Liveness:
        """Return the liveness of a host."""
        known = self._hosts.get(host)
        return known.liveness if known else "Unproven"

    def wait_seconds(self, host: str, now: float) -> float | None:
        """Return the time until the processes of an expired host count as stopped; None: it has not expired."""
        known = self._hosts.get(host)
        if known is None or known.expired_at is None:
            return None
        return max(0.0, known.expired_at + known.duration_seconds - now)

    def observe(self, registered: Iterable[str], leases: Iterable[Lease], now: float, today: datetime) -> set[str]:
        """Take one answer of the API server; returns the hosts whose liveness has changed.

        Args:
            registered: names of all hosts to observe, with or without a Lease.
            leases: all Leases of hosts.
            now: the time of the answer.
            today: the wall clock, which is compared with a renewTime at the first observation only.
        """
        if self._answered is not None and now - self._answered > OUTAGE_SECONDS:
            for host in self._hosts.values():
                host.since = now
        self._answered = now
        seen = {lease.host: lease for lease in leases}
        names = {*registered, *seen}
        before = {name: self.state(name) for name in {*names, *self._hosts}}
        self._hosts = {name: self._look(name, seen.get(name), now, today) for name in names}
        return {name for name, liveness in before.items() if self.state(name) != liveness}

    def _look(self, name: str, lease: Lease | None, now: float, today: datetime) -> _Host:
        known = self._hosts.get(name)
        if known is None:
            return _Host(lease, now, fresh=lease is not None and _is_fresh(lease, today))
        if lease is not None and (known.lease is None or lease.renewed != known.lease.renewed):
            return _Host(lease, now, fresh=True)
        if known.expired_at is None and now - known.since >= known.duration_seconds:
            known.expired_at = now
        return known


def _is_fresh(lease: Lease, today: datetime) -> bool:
    try:
        age = today - datetime.fromisoformat(lease.renewed)
    except (ValueError, TypeError):  # TypeError: a time without a zone
        return False
    return -SKEW_SECONDS < age.total_seconds() < lease.duration_seconds


def read_lease(obj: Obj) -> Lease:
    """Return a Lease object as a `Lease`."""
    spec = obj.get("spec", {})
    return Lease(
        obj["metadata"]["name"],
        spec.get("renewTime", ""),
        min(float(spec.get("leaseDurationSeconds") or DURATION_SECONDS), MOST_DURATION_SECONDS),
    )
