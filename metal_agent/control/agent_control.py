"""The agent's side of its control socket, `agent.sock` in the state folder: GET /status, and POST /stop.

`stop` is a verb that no signal can be: SIGTERM ends the agent only, so that an update or a restart of it unloads no
model, and withdraws the endpoints if the machine shuts down. The mode of the socket admits its owner, and the kernel is
asked who connects: the owner and root are answered.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Final

import msgspec

from devices.sockets import unix_peer_uid
from gateway.http.connection_table import ConnectionTable
from gateway.http.control_messages import JSON_FIELDS, ControlRefusal, render_refusal
from gateway.http.exchange import Exchange, RequestHandling
from gateway.http.limits import ConnectionCaps, ConnectionTimes
from gateway.http.listener import HttpListener
from gateway.http.named_socket import NamedSocket, SocketError
from metal_agent.control.agent_status import AgentStatus, StopAccepted
from metal_agent.options import StartError

AGENT_SOCKET: Final = "agent.sock"
_CAPS: Final = ConnectionCaps(total=64, per_peer=64)


@contextlib.contextmanager
def serve_control(folder: Path, status: Callable[[], AgentStatus], stop: asyncio.Event) -> Iterator[None]:
    """Answer HTTP calls on the unix socket `agent.sock` in `folder` while the context lasts.

    GET /status answers what `status` returns; POST /stop sets `stop`. Only the agent's user and root are answered. The
    socket that a dead agent left is replaced. Raises StartError if the socket cannot be made.
    """

    def begin(exchange: Exchange) -> None:
        """Answer one call, by the `status` and `stop` that `serve_control` was given; the listener calls it."""
        match exchange.head.method, exchange.head.path:
            case "GET", "/status":
                _respond(exchange, status())
            case "POST", "/stop":
                stop.set()
                _respond(exchange, StopAccepted(os.getpid()))
            case method, path:
                _respond(exchange, ControlRefusal(f"{method} {path} is no call of this agent"), HTTPStatus.NOT_FOUND)

    times = ConnectionTimes()
    table = ConnectionTable(_CAPS, times.sweep_seconds)
    listener = HttpListener(RequestHandling(begin, render_refusal), table, times, admits_socket=is_trusted)

    try:
        bound = NamedSocket(folder / AGENT_SOCKET)
        bound.take_name()  # in place of the socket of a dead agent
    except SocketError as error:
        raise StartError(str(error)) from error

    with contextlib.closing(bound):
        listener.take_over([bound.socket])
        try:
            yield
        finally:
            listener.unbind()


def is_trusted(client: socket.socket) -> bool:
    """Return True if the process at the other end is of the agent's user or of root."""
    try:
        return unix_peer_uid(client) in {0, os.geteuid()}
    except OSError:
        return False


def _respond(exchange: Exchange, body: msgspec.Struct, status: HTTPStatus = HTTPStatus.OK) -> None:
    """Answer a call with a JSON object."""
    exchange.respond(status, JSON_FIELDS, msgspec.json.encode(body))
