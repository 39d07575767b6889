"""A listening address: its sockets, the connections that came by it, and their orderly end.

Connections are accepted here and not by the event loop, so that the caps hold before a connection costs anything, and
so that a lack of descriptors pauses the listener instead of closing it.
"""

import asyncio
import errno
import functools
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final

from gateway.event_log import log
from gateway.http.connection_table import ConnectionTable
from gateway.http.exchange import RequestHandling
from gateway.http.limits import ConnectionTimes
from gateway.http.server_connection import ServerConnection

_BACKLOG: Final = 4096
"""As many as the kernel allows: what does not fit in there comes again after a second, too late for a probe."""
_ACCEPTS_AT_ONCE: Final = 8
"""Between two looks of the event loop at other sockets: a flood of connections must not delay streams and calls."""
_PAUSE_SECONDS: Final = 0.2
_LOCAL_PEER: Final = "local"
"""The peer at the other end of a unix socket."""
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class HttpListener:
    """The connections to one address.

    Args:
        handling: the work on requests.
        table: all connections of the process.
        times: the times that a connection may take.
        context: the certificate; None: plain HTTP.
        admits_socket: decides whether the client at the other end of a socket may connect.
        buffer_bytes: the buffers that the kernel has for each socket; None: as large as it finds useful, some MiB.
    """

    def __init__(
        self,
        handling: RequestHandling,
        table: ConnectionTable,
        times: ConnectionTimes,
        context: ssl.SSLContext | None = None,
        *,
        admits_socket: Callable[[socket.socket], bool] = lambda _: True,
        buffer_bytes: int | None = None,
    ) -> None:
        self.sockets: tuple[socket.socket, ...] = ()
        """The listening sockets; empty before `bind` or `take_over`, and after `unbind`."""

        # Given at construction, and never changed.
        self._handling = handling  # begins each request, and renders errors
        self._table = table  # counts the connections, with those of other listeners, and ends those that are late
        self._times = times
        self._context = context  # TLS; None: plain HTTP
        self._admits_socket = admits_socket  # False: its client may not connect
        self._buffer_bytes = buffer_bytes  # the kernel's buffers of each socket; None: as large as the kernel likes

        # What came in by the sockets: open connections, also those in their handshake, and the tasks of handshakes.
        self._connections: set[ServerConnection] = set()
        self._handshakes: set[asyncio.Task[None]] = set()

        # By the descriptor of a listening socket that accepts nothing now: the timer that lets it accept again.
        self._resume_timers: dict[int, asyncio.TimerHandle] = {}

        # For the end: `_closed` is set when the listener is unbound and its last connection is closed. `_closes_idle`
        # is the argument of the last `unbind`, for connections whose handshake ends after it.
        self._closed = asyncio.Event()
        self._closes_idle = True

    @property
    def paused(self) -> bool:
        """True while no connection is accepted, because descriptors lack."""
        return bool(self._resume_timers)

    @property
    def port(self) -> int:
        """The bound port."""
        port: int = self.sockets[0].getsockname()[1]
        return port

    async def bind(self, address: str, port: int) -> None:
        """Start listening on every address that `address` names. Raises OSError."""
        # Resolve the name; "" stands for all addresses of this machine.
        infos = await asyncio.get_running_loop().getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )

        # One socket for each address. If one of them fails, all are closed, and nothing listens.
        sockets: list[socket.socket] = []
        try:
            for family, kind, protocol, _, socket_address in dict.fromkeys(infos):  # each address once
                try:
                    bound = socket.socket(family, kind, protocol)
                except OSError as error:
                    # Raised unless the kernel lacks this family and there are other addresses.
                    if error.errno != errno.EAFNOSUPPORT or len(infos) == 1:
                        raise
                    continue  # a kernel without IPv6 names :: nevertheless
                sockets.append(bound)

                bound.setblocking(False)
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:  # it takes no IPv4 connections
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if self._buffer_bytes is not None:  # accepted sockets inherit them
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer_bytes)
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)

                bound.bind(socket_address)
                bound.listen(_BACKLOG)
        except OSError:
            for bound in sockets:
                bound.close()
            raise
        self.take_over(sockets)

    def take_over(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections on sockets that listen already."""
        self.sockets = tuple(sockets)
        for bound in self.sockets:
            bound.setblocking(False)
            self._resume(bound)  # from now on the loop calls `_accept` when a client connects

    def unbind(self, *, close_idle: bool = True) -> None:
        """Stop listening at once; requests in progress go on, and connections without one are closed.

        Without `close_idle`, those may send one more request: a client that is just sending one gets its answer.
        """
        self._closes_idle = close_idle
        loop = asyncio.get_running_loop()
        for bound in self.sockets:
            if pause := self._resume_timers.pop(bound.fileno(), None):  # paused, for lack of descriptors or memory
                pause.cancel()
            loop.remove_reader(bound.fileno())
            bound.close()
        self.sockets = ()
        for connection in list(self._connections):
            connection.drain_requests(close_idle=close_idle)
        self._note_if_closed()

    async def finish(self) -> None:
        """After `unbind`: wait until the last connection is closed; break off all requests if that is cancelled."""
        try:
            await self._closed.wait()
        except asyncio.CancelledError:
            for connection in list(self._connections):
                connection.abort()
            for handshake in self._handshakes:
                handshake.cancel()
            raise

    def _resume(self, bound: socket.socket) -> None:
        self._resume_timers.pop(bound.fileno(), None)
        asyncio.get_running_loop().add_reader(bound.fileno(), self._accept, bound)

    def _pause(self, bound: socket.socket, error: OSError) -> None:
        """Stop accepting for a moment, until descriptors are free again."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(bound.fileno())
        self._resume_timers[bound.fileno()] = loop.call_later(_PAUSE_SECONDS, self._resume, bound)
        log.warning("accept_paused", error=str(error), connections=self._table.accepted)

    def _accept(self, bound: socket.socket) -> None:
        """Accept some of the connections that wait in the kernel, and begin their handshakes.

        A client that may not connect, or for which the table of connections has no room, is closed at once. If
        descriptors or memory lack, the listener pauses.
        """
        for _ in range(_ACCEPTS_AT_ONCE):
            # 1. Accept one.
            try:
                accepted, address = bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # none waits, or the client has gone again
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                self._pause(bound, error)
                return

            # 2. Close it, unless its client may connect and there is room for it.
            peer = str(address[0]) if address else _LOCAL_PEER  # a unix socket has no address
            if not self._admits_socket(accepted) or not self._table.admit(peer, is_tls=self._context is not None):
                accepted.close()
                continue

            # 3. Count it, before its handshake, so that the caps hold for that, too.
            accepted.setblocking(False)
            connection = ServerConnection(peer, self._handling, self._table, self._times, self._forget)
            self._connections.add(connection)
            self._table.add(connection)

            # 4. Begin its handshake in a task; `_end_handshake` closes what did not become a connection.
            handshake = asyncio.get_running_loop().create_task(self._connect(accepted, connection))
            connection.handshake = handshake
            self._handshakes.add(handshake)
            handshake.add_done_callback(functools.partial(self._end_handshake, accepted, connection))

    async def _connect(self, accepted: socket.socket, connection: ServerConnection) -> None:
        """Make an accepted socket a connection, after its TLS handshake if it has one."""
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,  # asyncio asks for the protocol of the socket
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._times.head_seconds if self._context else None,
            )
        except OSError:
            return  # the client failed in its handshake, which is for the client to know
        if not self.sockets:  # `unbind` was called during the handshake
            connection.drain_requests(close_idle=self._closes_idle)

    def _forget(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self._note_if_closed()

    def _end_handshake(
        self, accepted: socket.socket, connection: ServerConnection, handshake: asyncio.Task[None]
    ) -> None:
        """Note that the task of a handshake has ended; close and forget a socket that did not become a connection.

        It is not closed by the task itself, because a task that is cancelled before its first step runs no code.
        """
        self._handshakes.discard(handshake)
        connection.handshake = None
        if not connection.was_made:
            accepted.close()
            self._table.remove(connection)
            self._connections.discard(connection)
        self._note_if_closed()

    def _note_if_closed(self) -> None:
        """End the wait of `finish` if no socket, connection or handshake is left."""
        if not self.sockets and not self._connections and not self._handshakes:
            self._closed.set()
