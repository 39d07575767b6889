"""The agent's side of the proxy's control socket."""

import asyncio
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from gateway.proxy.config import Idle, ProxyConfig, ProxyState, Refusal

_TIMEOUT_SECONDS = 5.0

T = TypeVar("T")


class ProxyUnreachableError(Exception):
    """No proxy answered on the socket: not started yet, dead, or stuck. Nothing is known about what it did."""


class ProxyRefusedError(Exception):
    """The proxy answered and would not, or is of a version that we do not understand; the message says why."""


class ProxyClient:
    """Calls on the control socket at `socket`. Holds no connection, so it outlives any number of proxies.

    Every call raises ProxyUnreachableError or ProxyRefusedError; each may be repeated at will.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    async def configure(self, config: ProxyConfig) -> ProxyState:
        """Make `config` the whole configuration and return what became of it; see `ListenerState.error`."""
        return await self._call("PUT", "/services", ProxyState, body=msgspec.json.encode(config))

    async def state(self) -> ProxyState:
        """Return who the proxy is, its listeners, and the requests in flight per backend."""
        return await self._call("GET", "/state", ProxyState)

    async def wait_idle(self, uid: str, timeout_seconds: float) -> bool:
        """Wait until backend `uid` answers no request, configured or not; False if it still does after the time-out."""
        path = f"/backends/{uid}/idle?timeoutSeconds={timeout_seconds}"
        return (await self._call("GET", path, Idle, wait_seconds=timeout_seconds)).in_flight == 0

    async def metrics(self) -> bytes:
        """Return the proxy's metrics in Prometheus' text form."""
        return await self._ask("GET", "/metrics")

    async def _call(
        self, method: str, path: str, answer_type: type[T], *, body: bytes | None = None, wait_seconds: float = 0
    ) -> T:
        """Call, and read the answer as `answer_type`."""
        answer = await self._ask(method, path, body=body, wait_seconds=wait_seconds)
        try:
            return msgspec.json.decode(answer, type=answer_type)
        except msgspec.DecodeError as error:
            raise ProxyRefusedError(f"proxy at {self.socket} is of another version: {error}") from error

    async def _ask(self, method: str, path: str, *, body: bytes | None = None, wait_seconds: float = 0) -> bytes:
        """Call; what takes `wait_seconds` by intent has the usual time beyond that."""
        timeout_seconds = wait_seconds + _TIMEOUT_SECONDS
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.socket))) as session,
                session.request(method, f"http://proxy{path}", data=body) as response,
            ):
                answer = await response.read()
        except TimeoutError as error:
            raise ProxyUnreachableError(f"proxy at {self.socket}: no answer within {timeout_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ProxyUnreachableError(f"proxy at {self.socket}: {error}") from error
        if response.status != HTTPStatus.OK:
            raise ProxyRefusedError(f"proxy at {self.socket}: {_refusal(answer)}")
        return answer


def _refusal(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=Refusal).error
    except msgspec.DecodeError:
        return answer.decode(errors="replace")
