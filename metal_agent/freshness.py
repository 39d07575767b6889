"""Whether this host may make an endpoint ready: only while the cluster certainly holds it for alive.

Whoever was out of touch for long may have been declared lost, its slices taken away and its processes started
elsewhere, so after a gap the API is asked anew. Both clocks count: a Mac's monotonic clock stands still in sleep, and
a wall clock can be set.
"""

from dataclasses import dataclass
from typing import Final

RENEW_SECONDS: Final = 10.0
LEASE_SECONDS: Final = 40
_GAP_SECONDS: Final = 25.0
"""More than two renewals were missed. Well below LEASE_SECONDS, after which the controller gives a host up."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """One moment, in seconds of both clocks."""

    monotonic: float
    wall: float

    def since(self, earlier: "Clocks") -> float:
        """Seconds since `earlier`, by the clock that says more."""
        return max(self.monotonic - earlier.monotonic, abs(self.wall - earlier.wall))


@dataclass(slots=True)
class Freshness:
    """What is known of this host's Lease and of its assignments."""

    renewed_at: Clocks | None = None
    confirmed: bool = False
    """A fresh list was read since the last gap."""

    def renewed(self, now: Clocks) -> bool:
        """Note a renewal; answers whether the assignments have to be read anew."""
        if self.renewed_at is None or now.since(self.renewed_at) > _GAP_SECONDS:
            self.confirmed = False
        self.renewed_at = now
        return not self.confirmed

    def may_serve(self, now: Clocks) -> bool:
        """Whether an endpoint may be made ready."""
        return self.confirmed and self.renewed_at is not None and now.since(self.renewed_at) < LEASE_SECONDS
