"""The client of a control API, which a process of Pomona serves on a unix socket: JSON over HTTP."""

import asyncio
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from gateway.http.control_messages import ControlRefusal

_TIMEOUT_SECONDS = 5.0

T = TypeVar("T")


class ControlUnreachableError(Exception):
    """No process answered on the socket: it is not started yet, dead, or stuck. The call may have had its effect."""


class ControlRefusedError(Exception):
    """The process refused the call, or is of an incompatible version; the message says why."""


class ControlClient:
    """The client of `server` on `socket`. It keeps no connection, so it works across restarts of the server.

    Every call raises ControlUnreachableError or ControlRefusedError.
    """

    def __init__(self, socket: Path, server: str) -> None:
        self.socket = socket
        self._server = server

    async def call(
        self, method: str, path: str, response_type: type[T], *, body: bytes | None = None, wait_seconds: float = 0
    ) -> T:
        """Send a request and decode the response as `response_type`."""
        return self.decode(await self.request(method, path, body=body, wait_seconds=wait_seconds), response_type)

    def decode(self, content: bytes, response_type: type[T]) -> T:
        """Decode a message of the server."""
        try:
            return msgspec.json.decode(content, type=response_type)
        except msgspec.DecodeError as error:
            raise ControlRefusedError(f"{self._server} at {self.socket} is of another version: {error}") from error

    async def request(self, method: str, path: str, *, body: bytes | None = None, wait_seconds: float = 0) -> bytes:
        """Send a request and return the response's body; the time-out begins after `wait_seconds`, for a long poll."""
        timeout_seconds = wait_seconds + _TIMEOUT_SECONDS
        at = f"{self._server} at {self.socket}"
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.socket))) as session,
                session.request(method, f"http://{self._server}{path}", data=body) as response,
            ):
                content = await response.read()
        except TimeoutError as error:
            raise ControlUnreachableError(f"{at}: no answer within {timeout_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ControlUnreachableError(f"{at}: {error}") from error
        if response.status != HTTPStatus.OK:
            raise ControlRefusedError(f"{at}: {refusal_message(content)}")
        return content


def refusal_message(content: bytes) -> str:
    """Return the message in the body of a refusal."""
    try:
        return msgspec.json.decode(content, type=ControlRefusal).error
    except msgspec.DecodeError:
        return content.decode(errors="replace")
