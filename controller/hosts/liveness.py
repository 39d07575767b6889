"""The liveness of hosts, by the renewals of their Leases. Pure: the clock is passed in.

A host expires only when this process has itself seen the duration of its Lease pass without a renewal, on its own
monotonic clock, while the API server answered: an outage of the API server expires no host.

A host that expires again and again is trusted late: after each further expiry it must live for longer before it gets
new processes. Its expiries are in the status of its MetalHost, where the next leader finds them.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple

from controller.placement.queue_places import parse_time
from controller.reconcile.conditions import condition
from crds.meta import FLAPPING, STABLE
from crds.metalhost import MetalHost
from kube.backoff import EXACT, backoff_seconds
from kube.client import Obj
from kube.time import rfc3339

DURATION_SECONDS: Final = 40.0
"""Duration of a Lease that states none."""
MOST_DURATION_SECONDS: Final = 60.0
"""Longest duration that counts: a stolen host could state one that never ends."""
OUTAGE_SECONDS: Final = 10.0
"""After a longer time without an answer of the API server, each host gets its Lease duration anew: none could renew."""
SKEW_SECONDS: Final = 5.0
"""The most that a host's wall clock may be ahead of ours; a renewTime further in the future is ignored."""


FLAPPING_EXPIRIES: Final = 2
"""Expiries within `EXPIRIES_SECONDS` from which on a host is trusted late; a single one may be a restart."""
EXPIRIES_SECONDS: Final = 3600.0
FIRST_TRUST_SECONDS: Final = 60.0
LONGEST_TRUST_SECONDS: Final = 600.0
MOST_EXPIRIES: Final = 8
"""Expiries that are kept of a host; with fewer it reaches the longest time already."""


class Lease(NamedTuple):
    """The Lease of a host."""

    host: str
    renewed: str
    """The renewTime, as text: after the first observation, only a change of it counts."""
    duration_seconds: float


Liveness = Literal["Alive", "Unproven", "Expired"]
"""Alive: processes may be bound to the host. Unproven: no renewal seen yet. Expired: lost, until it renews."""


class HostDistrust(NamedTuple):
    """The reason why a host that is alive, or will be, gets no new process yet."""

    expiries: int
    """Number within the last hour."""
    seconds: float
    """Time for which it must be alive."""
    left_seconds: float | None
    """The part of it that is left; None: it is not alive."""


class _HostRecord:
    """Observations of one host, which begin anew with each renewal of its Lease.

    Args:
        lease: its Lease; None: it has none.
        now: the monotonic time of the observation.
        has_renewed: whether a renewal was seen, or the first Lease seen was fresh; else the host is not known to live.
        expiries: the times at which it has expired lately.
    """

    def __init__(
        self, lease: Lease | None, now: float, *, has_renewed: bool, expiries: Sequence[datetime] = ()
    ) -> None:
        self.lease = lease
        self.silent_since = now
        """Time from which on the host must renew within the duration of its Lease.

        It is the latest of: first observation, change of its renewTime, end of an outage of the API server.
        """
        self.alive_since = now
        """Time since which the host has been alive without a break; meaningless for one that is not alive."""
        self.has_renewed = has_renewed
        """True once a renewal or a fresh Lease was seen: before that, the host is Unproven, or Expired."""
        self.expired_at: float | None = None
        """Monotonic time at which it has expired; None: it has not."""
        self.expiries = tuple(expiries)
        """Wall clock times, the latest last."""

    @property
    def duration_seconds(self) -> float:
        return self.lease.duration_seconds if self.lease else DURATION_SECONDS

    @property
    def liveness(self) -> Liveness:
        if self.expired_at is not None:
            return "Expired"
        return "Alive" if self.has_renewed else "Unproven"


class HostLiveness:
    """The liveness of all hosts. Pure: `now` is the caller's monotonic clock in seconds, which never goes back."""

    def __init__(self) -> None:
        self._hosts: dict[str, _HostRecord] = {}
        self._last_answer_at: float | None = None

    def restart(self) -> None:
        """Forget all observations: a new leader has not watched the hosts before."""
        self._hosts = {}
        self._last_answer_at = None

    def find_liveness(self, host: str) -> Liveness:
        """Return the liveness of a host."""
        record = self._hosts.get(host)
        return record.liveness if record else "Unproven"

    def find_lease(self, host: str) -> Lease | None:
        """Return the Lease of a host as it was last observed."""
        record = self._hosts.get(host)
        return record.lease if record else None

    def wait_seconds(self, host: str, now: float) -> float | None:
        """Return the time until the processes of an expired host count as stopped; None: it has not expired.

        They have the duration of a Lease for that, from the expiry on.
        """
        record = self._hosts.get(host)
        if record is None or record.expired_at is None:
            return None
        return max(0.0, record.expired_at + record.duration_seconds - now)

    def list_expiries(self, host: str, today: datetime) -> tuple[str, ...] | None:
        """Return the times at which a host has expired lately, for its status; None: it was not observed yet."""
        record = self._hosts.get(host)
        return None if record is None else tuple(rfc3339(expiry) for expiry in _list_recent(record.expiries, today))

    def find_distrust(self, host: str, now: float, today: datetime) -> HostDistrust | None:
        """Return why a host that expires again and again gets no new process yet; None: it may get one."""
        record = self._hosts.get(host)
        if record is None:
            return None
        expiries = len(_list_recent(record.expiries, today))
        if expiries < FLAPPING_EXPIRIES:
            return None
        seconds = trust_seconds(expiries)
        if record.liveness != "Alive":
            return HostDistrust(expiries, seconds, left_seconds=None)
        left_seconds = record.alive_since + seconds - now
        return HostDistrust(expiries, seconds, left_seconds) if left_seconds > 0 else None

    def observe(
        self,
        registered: Iterable[str],
        leases: Iterable[Lease],
        now: float,
        today: datetime,
        read_expiries: Callable[[str], Iterable[str]] = lambda _host: (),
    ) -> set[str]:
        """Update the liveness of all hosts by one list of Leases; return the hosts whose liveness has changed.

        Args:
            registered: names of all hosts to observe, with or without a Lease.
            leases: all Leases of hosts.
            now: the time of the answer.
            today: the wall clock, which is compared with a renewTime at the first observation only.
            read_expiries: returns the expiries in the status of a host that is observed for the first time.
        """
        # After an outage of the API server, in which no host could renew, the duration of each Lease begins anew.
        if self._last_answer_at is not None and now - self._last_answer_at > OUTAGE_SECONDS:
            for host in self._hosts.values():
                host.silent_since = now
        self._last_answer_at = now

        lease_of = {lease.host: lease for lease in leases}
        names = {*registered, *lease_of}
        # Also of hosts that are observed no more: they are forgotten now, and count as Unproven.
        before = {name: self.find_liveness(name) for name in {*names, *self._hosts}}
        self._hosts = {name: self._observe_host(name, lease_of.get(name), now, today, read_expiries) for name in names}
        return {name for name, liveness in before.items() if self.find_liveness(name) != liveness}

    def _observe_host(
        self,
        name: str,
        lease: Lease | None,
        now: float,
        today: datetime,
        read_expiries: Callable[[str], Iterable[str]],
    ) -> _HostRecord:
        """Return the record of a host after an answer of the API server.

        A changed renewTime makes the host alive; without one for the duration of its Lease, it expires.
        """
        host = self._hosts.get(name)

        # 1. The first observation: it is Alive only if the renewTime is fresh by the wall clock.
        if host is None:
            earlier = filter(None, map(parse_time, read_expiries(name)))  # without texts that are no time
            has_renewed = lease is not None and _is_fresh(lease, today)
            return _HostRecord(lease, now, has_renewed=has_renewed, expiries=_list_recent(earlier, today))

        # 2. A renewal begins a new record, which has not expired.
        if lease is not None and (host.lease is None or lease.renewed != host.lease.renewed):
            renewed = _HostRecord(lease, now, has_renewed=True, expiries=host.expiries)
            if host.liveness == "Alive":  # it has been alive without a break
                renewed.alive_since = host.alive_since
            return renewed

        # 3. No renewal: it expires after the duration of its Lease.
        if host.expired_at is None and now - host.silent_since >= host.duration_seconds:
            # The expiry of a host that this leader has never seen alive is not counted.
            if host.has_renewed:
                host.expiries = (*_list_recent(host.expiries, today), today)[-MOST_EXPIRIES:]
            host.expired_at = now
        return host


def trust_seconds(expiries: int) -> float:
    """Return the time for which a host must be alive after so many expiries before it gets new processes."""
    doublings = expiries - FLAPPING_EXPIRIES + 1
    return backoff_seconds(doublings, first=FIRST_TRUST_SECONDS, most=LONGEST_TRUST_SECONDS, jitter=EXACT)


def _list_recent(expiries: Iterable[datetime], today: datetime) -> list[datetime]:
    """Return the expiries of the last hour, without those in the future, which a clock has stated that jumped."""
    oldest, latest = today - timedelta(seconds=EXPIRIES_SECONDS), today + timedelta(seconds=SKEW_SECONDS)
    return [expiry for expiry in expiries if oldest < expiry < latest]


def _is_fresh(lease: Lease, today: datetime) -> bool:
    """Return whether a Lease was renewed within its duration, by the wall clock."""
    try:
        age = today - datetime.fromisoformat(lease.renewed)
    except (ValueError, TypeError):  # TypeError: a time without a zone
        return False
    return -SKEW_SECONDS < age.total_seconds() < lease.duration_seconds


def read_lease(obj: Obj) -> Lease:
    """Return a Lease object as a `Lease`."""
    spec = obj.get("spec", {})
    duration_seconds = float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)
    return Lease(
        host=obj["metadata"]["name"],
        renewed=spec.get("renewTime", ""),
        duration_seconds=min(duration_seconds, MOST_DURATION_SECONDS),
    )


def build_stable_condition(host: MetalHost, expiries: Sequence[str], distrust: HostDistrust | None) -> Obj | None:
    """Return the condition Stable of a host, or None if the Lease of the host has not expired lately.

    Args:
        host: the host.
        expiries: the times at which its Lease has expired within the last hour.
        distrust: the reason why it is trusted late, or None.
    """
    if not expiries:
        return None
    generation = host.metadata.generation
    # It has expired lately, and is trusted again.
    if distrust is None:
        message = "the host takes processes"
        return condition(STABLE, true=True, reason=STABLE, message=message, generation=generation)
    # It takes no new process yet.
    message = (
        f"the Lease of host {host.metadata.name} expired {distrust.expiries} times within an hour: it takes new "
        f"processes once it has been alive for {distrust.seconds:.0f} seconds, and keeps those that run there; see "
        "that the machine stays awake and connected"
    )
    return condition(STABLE, true=False, reason=FLAPPING, message=message, generation=generation)
