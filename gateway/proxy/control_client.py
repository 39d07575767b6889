"""The client of the proxy's control API, for the agent and for `pomona up`."""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from gateway.proxy.config import BackendHealth, BackendIdle, ControlRefusal, ProxyConfig, ProxyState

_TIMEOUT_SECONDS = 5.0
_WATCH_PAUSE_SECONDS = 15.0
"""The longest pause in the stream of health, which has an empty line every 5 s."""

T = TypeVar("T")


class ProxyUnreachableError(Exception):
    """No proxy answered on the socket: it is not started yet, dead, or stuck. The call may have had its effect."""


class ProxyRefusedError(Exception):
    """The proxy refused the call, or is of an incompatible version; the message says why."""


class ProxyClient:
    """The client of the control API on `socket`. It keeps no connection, so it works across restarts of the proxy.

    Every call raises ProxyUnreachableError or ProxyRefusedError, and may be repeated.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    async def configure(self, config: ProxyConfig) -> ProxyState:
        """Replace the whole configuration by `config` and return the new state; see `ListenerState.error`."""
        return await self._call("PUT", "/services", ProxyState, body=msgspec.json.encode(config))

    async def state(self) -> ProxyState:
        """Return the proxy's identity, its listeners, and the requests in flight per backend."""
        return await self._call("GET", "/state", ProxyState)

    async def wait_idle(self, uid: str, timeout_seconds: float) -> bool:
        """Wait until backend `uid`, configured or not, has no request in flight; return False after the time-out."""
        path = f"/backends/{uid}/idle?timeoutSeconds={timeout_seconds}"
        return (await self._call("GET", path, BackendIdle, wait_seconds=timeout_seconds)).in_flight == 0

    async def metrics(self) -> bytes:
        """Return the proxy's metrics in Prometheus' text form."""
        return await self._request("GET", "/metrics")

    async def watch_health(self) -> AsyncIterator[BackendHealth]:
        """Yield the health of every suspect backend, then each change of any backend at once, until the proxy ends.

        Raises ProxyRefusedError if the proxy is of a version that does not report the health of backends.
        """
        # The pause is bounded here, so that a stuck proxy is noticed; the stream itself has no end.
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_WATCH_PAUSE_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.socket)), timeout=timeout) as session,
                session.get("http://proxy/backends/health") as response,
            ):
                if response.status != HTTPStatus.OK:
                    raise ProxyRefusedError(f"proxy at {self.socket}: {_refusal_message(await response.read())}")
                async for line in response.content:
                    if not line.isspace():
                        yield self._decode(line, BackendHealth)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or f"nothing for {_WATCH_PAUSE_SECONDS:g} s"
            raise ProxyUnreachableError(f"proxy at {self.socket}: {reason}") from error
        raise ProxyUnreachableError(f"proxy at {self.socket}: it has ended the stream of health")

    async def clear_health(self, uid: str) -> BackendHealth:
        """Forget the past of backend `uid`, which was looked at and works; return its health."""
        return await self._call("POST", f"/backends/{uid}/health", BackendHealth)

    async def _call(
        self, method: str, path: str, response_type: type[T], *, body: bytes | None = None, wait_seconds: float = 0
    ) -> T:
        """Send a request and decode the response as `response_type`."""
        return self._decode(await self._request(method, path, body=body, wait_seconds=wait_seconds), response_type)

    def _decode(self, content: bytes, response_type: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=response_type)
        except msgspec.DecodeError as error:
            raise ProxyRefusedError(f"proxy at {self.socket} is of another version: {error}") from error

    async def _request(self, method: str, path: str, *, body: bytes | None = None, wait_seconds: float = 0) -> bytes:
        """Send a request and return the response's body; the time-out begins after `wait_seconds`, for a long poll."""
        timeout_seconds = wait_seconds + _TIMEOUT_SECONDS
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.socket))) as session,
                session.request(method, f"http://proxy{path}", data=body) as response,
            ):
                content = await response.read()
        except TimeoutError as error:
            raise ProxyUnreachableError(f"proxy at {self.socket}: no answer within {timeout_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ProxyUnreachableError(f"proxy at {self.socket}: {error}") from error
        if response.status != HTTPStatus.OK:
            raise ProxyRefusedError(f"proxy at {self.socket}: {_refusal_message(content)}")
        return content


def _refusal_message(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=ControlRefusal).error
    except msgspec.DecodeError:
        return content.decode(errors="replace")
