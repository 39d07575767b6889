"""Leases: one leader among replicas, and the heartbeat of a host.

Clocks of two machines are never compared: a holder is dead when its lease was seen unchanged for its whole duration
on our own monotonic clock. The leader gives up before others may take over, and its work is cancelled first.
"""

from collections.abc import Awaitable, Callable

from kube.client import Client


class LeadershipLost(Exception):  # noqa: N818 - what happened, as client-go calls it
    """The lease could not be renewed in time, or somebody else holds it. The led work has been cancelled."""


class Elector:
    """Leader election on the Lease `namespace/name` as `identity`, which no other process may have."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration_seconds: float = 15.0,
        renew_deadline_seconds: float = 10.0,
        retry_seconds: float = 2.0,
    ) -> None:
        raise NotImplementedError

    @property
    def is_leader(self) -> bool:
        """Whether we hold the lease and our work may run."""
        raise NotImplementedError

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait until we lead, run `work`, release the lease when it ended, failed or was cancelled.

        Raises:
            LeadershipLost: after `work` was cancelled because the lease was lost.
        """
        raise NotImplementedError


async def renew(
    client: Client,
    namespace: str,
    name: str,
    *,
    field_manager: str,
    duration_seconds: int = 40,
    interval_seconds: float = 10.0,
    on_renewed: Callable[[], None] | None = None,
) -> None:
    """Keep the Lease of a host alive for ever: created if absent, every failure logged and tried again.

    `on_renewed` is called after each renewal that the server confirmed.
    """
    raise NotImplementedError
