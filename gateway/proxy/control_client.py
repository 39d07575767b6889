"""The client of the proxy's control API, for the agent and for `pomona up`."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from gateway.http.control_client import ControlClient, ControlUnreachableError
from gateway.proxy.config import BackendHealth, Demand, ProxyConfig, ProxyState, RequestsInFlight

_WATCH_PAUSE_SECONDS = 15.0
"""The longest pause in the stream of health, which has an empty line every 5 s."""


class ProxyClient(ControlClient):
    """The client of the control API on `socket`.

    Every call raises ControlUnreachableError or ControlRefusedError, and may be repeated.
    """

    def __init__(self, socket: Path) -> None:
        super().__init__(socket, "proxy")

    async def configure(self, config: ProxyConfig) -> ProxyState:
        """Replace the whole configuration by `config` and return the new state; see `ListenerState.error`."""
        return await self.call("PUT", "/services", ProxyState, body=msgspec.json.encode(config))

    async def state(self) -> ProxyState:
        """Return the proxy's identity, its listeners, and the requests in flight per backend."""
        return await self.call("GET", "/state", ProxyState)

    async def wait_idle(self, uid: str, timeout_seconds: float) -> bool:
        """Wait until backend `uid`, configured or not, has no request in flight; return False after the time-out."""
        path = f"/backends/{uid}/idle?timeoutSeconds={timeout_seconds}"
        return (await self.call("GET", path, RequestsInFlight, wait_seconds=timeout_seconds)).in_flight == 0

    async def wait_busy(self, timeout_seconds: float) -> bool:
        """Wait until any backend has a request in flight; return False after the time-out."""
        path = f"/backends/busy?timeoutSeconds={timeout_seconds}"
        return (await self.call("GET", path, RequestsInFlight, wait_seconds=timeout_seconds)).in_flight > 0

    async def wait_demand(self, seen_changes: int, timeout_seconds: float) -> Demand:
        """Return the demand once its number of changes is another one than `seen_changes`, or after the time-out."""
        path = f"/demand?seen={seen_changes}&timeoutSeconds={timeout_seconds}"
        return await self.call("GET", path, Demand, wait_seconds=timeout_seconds)

    async def metrics(self) -> bytes:
        """Return the proxy's metrics in Prometheus' text form."""
        return await self.request("GET", "/metrics")

    async def watch_health(self) -> AsyncIterator[BackendHealth]:
        """Yield the health of every suspect backend, then each change of any backend at once, until the proxy ends."""
        # The pause is bounded here, so that a stuck proxy is noticed; the stream itself has no end.
        lines = self.stream_lines("GET", "/backends/health", pause_seconds=_WATCH_PAUSE_SECONDS)
        async with contextlib.aclosing(lines):
            async for line in lines:
                yield self.decode(line, BackendHealth)
        raise ControlUnreachableError(f"proxy at {self.socket}: it has ended the stream of health")

    async def clear_health(self, uid: str) -> BackendHealth:
        """Forget the past of backend `uid`, which was looked at and works; return its health."""
        return await self.call("POST", f"/backends/{uid}/health", BackendHealth)
