"""A listener by which the controller finds out whether the cluster reaches this host.

Nothing on a host knows whether a firewall or a route keeps the cluster away, and a host without services has no other
listener. So the agent answers on a spare port of its range with the name of this host, and the controller asks there. A
service that needs the port gets it.
The answer holds no secret; a client that is slow or sends too much is dropped.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Final

import structlog

_REQUEST_BYTES: Final = 4096
_REQUEST_SECONDS: Final = 5.0
_MOST_CONNECTIONS: Final = 16
_RETRY_SECONDS: Final = 60.0
"""Pause after no port could be bound."""

log = structlog.get_logger()


class ReachabilityListener:
    """The listener of host `host` at `address`.

    Args:
        host: the name of the host, which it answers.
        address: the address at which the cluster reaches this host.
        list_ports: returns the ports to try, in this order.
        on_change: called after `port` has changed.
    """

    def __init__(
        self, host: str, address: str, list_ports: Callable[[], Iterable[int]], on_change: Callable[[], None]
    ) -> None:
        self.port: int | None = None
        """The bound port; None: none is bound."""
        body = f"{host}\n".encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self._response = head.encode() + body
        self._address = address
        self._list_ports = list_ports
        self._on_change = on_change
        self._server: asyncio.Server | None = None
        self._moved = asyncio.Event()
        self._connections = 0

    def move(self, address: str) -> None:
        """Listen at another address from now on."""
        self._address = address
        self._moved.set()

    def give_up(self, port: int) -> None:
        """Stop to listen on `port` before this returns, as a service gets it; another spare port is tried."""
        if port == self.port and self._server:
            self._server.close()
            self._set_port(None)
            self._moved.set()

    async def run(self) -> None:
        """Listen until cancelled."""
        while True:
            self._moved.clear()
            self._server = server = await self._bind()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if server else _RETRY_SECONDS):
                        await self._moved.wait()
            finally:
                if server:
                    server.close()
                    self._set_port(None)

    async def _bind(self) -> asyncio.Server | None:
        """Return a server on the first port that can be bound; None: there is none now."""
        refusal = "no port of --port-range is free"
        for port in self._list_ports():
            try:
                server = await asyncio.start_server(self._answer, self._address, port, limit=_REQUEST_BYTES)
            except OSError as error:
                refusal = str(error)
            else:
                self._set_port(port)
                return server
        log.warning("reachability_not_served", address=self._address, error=refusal)
        return None

    def _set_port(self, port: int | None) -> None:
        if port != self.port:
            self.port = port
            self._on_change()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request, which is not looked at, and answer it; errors concern that client only."""
        self._connections += 1
        try:
            if self._connections > _MOST_CONNECTIONS:
                return
            async with asyncio.timeout(_REQUEST_SECONDS):
                # Unread bytes would have the kernel reset the connection, and the client might lose the answer.
                await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("reachability_request_dropped", error=type(error).__name__)
        finally:
            self._connections -= 1
            writer.close()
