"""Requests to the API server as admin, over connections that are kept.

Each test has an event loop of its own, and a connection belongs to one loop. A new TLS connection for each request
would cost test and API server 14 ms of processor time instead of 2, and a test that waits sends many requests. So the
connections belong to a loop in a thread, which lasts as long as the control plane.
"""

import asyncio
import ssl
from http import HTTPStatus
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import aiohttp

CALL_TIMEOUT = aiohttp.ClientTimeout(total=60)
"""Limit for an answer, also on a busy machine: it is no claim about speed."""


class AdminResponse(NamedTuple):
    """A response; `retry_after` is the header of that name."""

    status: int
    content_type: str
    retry_after: str | None
    text: str

    @property
    def ok(self) -> bool:
        """True for a status below 400."""
        return self.status < HTTPStatus.BAD_REQUEST


class AdminSession:
    """Connections that start with the first request and end with `close`.

    Args:
        certificate: file with the certificate of the server, which may be written later than this object is made.
        token: bearer token.
    """

    def __init__(self, certificate: Path, token: str) -> None:
        self._certificate = certificate
        self._token = token
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._session: aiohttp.ClientSession | None = None

    async def send(self, method: str, url: str, body: object, headers: dict[str, str]) -> AdminResponse:
        """Send a request and return the response, whatever its status.

        Raises:
            aiohttp.ClientError: no answer.
            TimeoutError: no answer in time.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = Thread(target=self._loop.run_forever, name="admin session", daemon=True)
            self._thread.start()
        sending = asyncio.run_coroutine_threadsafe(self._send(method, url, body, headers), self._loop)
        return await asyncio.wrap_future(sending)

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        if self._loop is None or self._thread is None:
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
        self._loop = self._thread = None

    async def _send(self, method: str, url: str, body: object, headers: dict[str, str]) -> AdminResponse:
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=self._certificate))
            own = {"Authorization": f"Bearer {self._token}"}
            self._session = aiohttp.ClientSession(connector=connector, headers=own, timeout=CALL_TIMEOUT)
        async with self._session.request(method, url, json=body, headers=headers) as response:
            retry_after = response.headers.get("Retry-After")
            return AdminResponse(response.status, response.content_type, retry_after, await response.text())

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = None
