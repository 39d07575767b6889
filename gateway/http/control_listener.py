"""The server side of a control API on a unix socket: only the user of the process and root are answered.

The mode of the socket admits its owner, and the kernel is asked who connects.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from devices.sockets import unix_peer_uid
from gateway.http.connection_table import ConnectionTable
from gateway.http.control_calls import AnswerCall, begin_call
from gateway.http.control_messages import render_refusal
from gateway.http.exchange import RequestHandling
from gateway.http.limits import ConnectionCaps, ConnectionTimes
from gateway.http.listener import HttpListener
from gateway.http.named_socket import NamedSocket

_CAPS: Final = ConnectionCaps(total=64, per_peer=64)


@contextlib.contextmanager
def serve_calls(path: Path, answer: AnswerCall) -> Iterator[None]:
    """Answer HTTP calls on the unix socket at `path` while the context lasts, in place of that of a dead process.

    Raises SocketError if the socket cannot be made.
    """
    times = ConnectionTimes()
    table = ConnectionTable(_CAPS, times.sweep_seconds)
    handling = RequestHandling(lambda exchange: begin_call(exchange, answer), render_refusal)
    listener = HttpListener(handling, table, times, admits_socket=is_trusted)
    with contextlib.closing(NamedSocket(path)) as bound:
        bound.take_name()
        listener.take_over([bound.socket])
        try:
            yield
        finally:
            listener.unbind()


def is_trusted(client: socket.socket) -> bool:
    """Return True if the process at the other end is of this process's user or of root."""
    try:
        return unix_peer_uid(client) in {0, os.geteuid()}
    except OSError:
        return False
