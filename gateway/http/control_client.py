"""The client of a control API, which a process of Pomona serves on a unix socket: JSON over HTTP.

Another process may have taken the name of the socket: an answer is bounded in length and time, and leads nowhere else.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import aiohttp
import msgspec

from gateway.http.control_messages import ControlRefusal

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.tracing import Trace

_TIMEOUT_SECONDS = 5.0
_MOST_BYTES = 16 * 1024 * 1024
"""The longest answer, far more than a host with thousands of processes sends."""

T = TypeVar("T")


class ControlUnreachableError(Exception):
    """No process answered on the socket: it is not started yet, dead, or stuck. The call may have had its effect."""


class ControlRefusedError(Exception):
    """The process refused the call, or is of an incompatible version; the message says why.

    `refusal` is the process's own message; empty if it has not answered, or is not trusted.
    """

    def __init__(self, message: str, refusal: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal


class ControlClient:
    """The client of `server` on `socket`. It keeps no connection, so it works across restarts of the server.

    Every call raises ControlUnreachableError or ControlRefusedError.
    """

    def __init__(self, socket: Path, server: str) -> None:
        self.socket = socket
        self._server = server

    def check_peer(self, connection: socket.socket) -> None:
        """Check who is at the other end before anything is sent. Raises ControlRefusedError: it is not trusted."""

    async def call(
        self, method: str, path: str, response_type: type[T], *, body: bytes | None = None, wait_seconds: float = 0
    ) -> T:
        """Send a request and decode the response as `response_type`."""
        return self.decode(await self.request(method, path, body=body, wait_seconds=wait_seconds), response_type)

    def decode(self, content: bytes, response_type: type[T]) -> T:
        """Decode a message of the server."""
        try:
            return msgspec.json.decode(content, type=response_type)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ControlRefusedError(f"{self._server} at {self.socket} is of another version: {error}") from error

    async def request(self, method: str, path: str, *, body: bytes | None = None, wait_seconds: float = 0) -> bytes:
        """Send a request and return the response's body; the time-out begins after `wait_seconds`, for a long poll."""
        timeout_seconds = wait_seconds + _TIMEOUT_SECONDS
        at = f"{self._server} at {self.socket}"  # for the messages of errors
        try:
            # A session for this request only. Its connector calls `check_peer` on the new connection, before the
            # request is sent.
            async with (
                asyncio.timeout(timeout_seconds),
                aiohttp.ClientSession(
                    connector=_CheckedConnector(str(self.socket), self.check_peer), auto_decompress=False
                ) as session,
                session.request(method, f"http://{self._server}{path}", data=body, allow_redirects=False) as response,
            ):
                content = await self._read_content(response)
        except TimeoutError as error:
            raise ControlUnreachableError(f"{at}: no answer within {timeout_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ControlUnreachableError(f"{at}: {error}") from error

        if response.status != HTTPStatus.OK:
            raise _build_refusal(at, content)
        return content

    async def stream_lines(
        self, method: str, path: str, *, body: bytes | None = None, pause_seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """Send a request and yield the lines of the response, but for the empty ones that a server sends in pauses.

        Raises ControlUnreachableError, also if nothing comes for `pause_seconds`, and ControlRefusedError.
        """
        at = f"{self._server} at {self.socket}"
        timeout = aiohttp.ClientTimeout(total=None, sock_read=pause_seconds)
        try:
            async with (
                aiohttp.ClientSession(
                    connector=_CheckedConnector(str(self.socket), self.check_peer),
                    auto_decompress=False,
                    timeout=timeout,
                ) as session,
                session.request(method, f"http://{self._server}{path}", data=body, allow_redirects=False) as response,
            ):
                if response.status != HTTPStatus.OK:
                    raise _build_refusal(at, await self._read_content(response))
                async for line in response.content:
                    if not line.isspace():
                        yield line
        except ValueError as error:  # a line that is longer than aiohttp keeps
            raise ControlRefusedError(f"{at}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ControlUnreachableError(f"{at}: {str(error) or f'nothing for {pause_seconds:g} s'}") from error

    async def _read_content(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of a response. Raises ControlRefusedError if it is too long."""
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > _MOST_BYTES:
                raise ControlRefusedError(
                    f"{self._server} at {self.socket}: its answer is longer than {_MOST_BYTES} bytes"
                )
        return bytes(content)


class _CheckedConnector(aiohttp.UnixConnector):
    """A connector that has the other end checked before a request is sent."""

    def __init__(self, path: str, check: Callable[[socket.socket], None]) -> None:
        super().__init__(path)
        self._check = check

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list["Trace"],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - the method of aiohttp has it
    ) -> "ResponseHandler":
        """Connect to the socket; close the connection again if the check refuses the other end."""
        protocol = await super()._create_connection(req, traces, timeout)
        try:
            if protocol.transport:
                # Given at construction; raises if the process at the other end is not trusted.
                self._check(protocol.transport.get_extra_info("socket"))
        except BaseException:
            protocol.close()
            raise
        return protocol


def _build_refusal(server: str, content: bytes) -> ControlRefusedError:
    """Return the error for a response that is not 200."""
    refusal = _read_refusal(content)
    return ControlRefusedError(f"{server}: {refusal}", refusal)


def _read_refusal(content: bytes) -> str:
    """Return the message in the body of a refusal, or the body as text if it has no such form."""
    try:
        return msgspec.json.decode(content, type=ControlRefusal).error
    except (msgspec.DecodeError, RecursionError):
        return content.decode(errors="replace")
