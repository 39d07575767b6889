"""The claim of a proxy to its control socket, and the hand-over of that claim and of all listening sockets.

A lock beside the socket makes a second proxy end before it changes anything, unless it was started to take over. Then
the first one sends it the lock, its configuration and its listening sockets over a second unix socket, and the new one
puts its own control socket in the place of the old: at no moment does nobody listen.
"""

import fcntl
import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from gateway.proxy.config import ProxyConfig

HAND_OVER_SOCKET: Final = "handover.sock"
LAST_SOCKET: Final = "last-{pid}.sock"
_GROUP_AND_OTHERS: Final = 0o077
_SOCKET_MASK: Final = 0o177
_HAND_OVER_SECONDS: Final = 10.0
_LENGTH_BYTES: Final = 8
_DESCRIPTORS_AT_ONCE: Final = 100
_BACKLOG: Final = 128
_ACCEPTED: Final = b"+"


class SocketError(Exception):
    """The control socket cannot be claimed; the message says why, and what to change."""


class _Message(msgspec.Struct, frozen=True):
    """The words of a hand-over; the descriptors come after it: the lock, then one for each of `listeners`."""

    config: ProxyConfig
    listeners: tuple[str, ...]


class Inheritance:
    """A hand-over from the proxy at the other end of `connection`, which goes on until it is accepted."""

    def __init__(
        self, connection: socket.socket, config: ProxyConfig, sockets: dict[str, list[socket.socket]], lock: int
    ) -> None:
        self.connection = connection
        self.config = config
        self.sockets = sockets
        self.lock = lock

    def accept(self) -> None:
        """Tell the other proxy to stop listening. Raises OSError."""
        self.connection.sendall(_ACCEPTED)


@dataclass
class ControlSocket:
    """The sockets and the lock of a proxy.

    Args:
        path: the path of the control socket.
        control: listens for the control API.
        hand_over: listens for a proxy that takes over.
        lock: the descriptor of the lock.
        inheritance: what a proxy before this one hands over.
    """

    path: Path
    control: socket.socket
    hand_over: socket.socket
    lock: int
    inheritance: Inheritance | None
    last: socket.socket | None = None
    """After the hand-over: listens where an agent finds this proxy while its last requests end."""

    def give_away(self) -> None:
        """Leave the paths to the proxy that has taken over. Raises SocketError."""
        self.last = _listen(self.last_path)

    @property
    def last_path(self) -> Path:
        """The path of `last`."""
        return self.path.with_name(LAST_SOCKET.format(pid=os.getpid()))


@contextmanager
def claim_socket(path: Path, *, take_over: bool = False) -> Iterator[ControlSocket]:
    """Bind the control socket at `path` in a private directory, and hold its lock until the context ends.

    Raises:
        SocketError: the directory is open to other users, a proxy runs on this socket, there is none that hands over,
            or the path is too long.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if status.st_mode & _GROUP_AND_OTHERS or status.st_uid != os.geteuid():
        raise SocketError(
            f"{path.parent} must belong to uid {os.geteuid()} with mode 0700, because tokens pass through it"
        )
    with ExitStack() as stack:
        inheritance = _inherit(path) if take_over else None
        lock = inheritance.lock if inheritance else _lock(path)
        stack.callback(os.close, lock)
        hand_over_path = path.with_name(HAND_OVER_SOCKET)
        control = stack.enter_context(_listen(path))
        hand_over = stack.enter_context(_listen(hand_over_path))
        claimed = ControlSocket(path, control, hand_over, lock, inheritance)
        try:
            yield claimed
        finally:
            if claimed.last:
                claimed.last_path.unlink(missing_ok=True)
                claimed.last.close()
            else:
                path.unlink(missing_ok=True)
                hand_over_path.unlink(missing_ok=True)


def send_inheritance(
    connection: socket.socket, config: ProxyConfig, sockets: Sequence[tuple[str, socket.socket]], lock: int
) -> bool:
    """Hand over to a newer proxy, and return True if it has accepted; blocks for some seconds. Raises OSError."""
    connection.settimeout(_HAND_OVER_SECONDS)
    message = msgspec.json.encode(_Message(config, tuple(name for name, _ in sockets)))
    connection.sendall(len(message).to_bytes(_LENGTH_BYTES, "big") + message)
    descriptors = [lock, *(each.fileno() for _, each in sockets)]
    for start in range(0, len(descriptors), _DESCRIPTORS_AT_ONCE):
        socket.send_fds(connection, [b"f"], descriptors[start : start + _DESCRIPTORS_AT_ONCE])
    return connection.recv(1) == _ACCEPTED


def _inherit(path: Path) -> Inheritance:
    """Receive what the proxy at `path` hands over. Raises SocketError."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_HAND_OVER_SECONDS)
    try:
        connection.connect(str(path.with_name(HAND_OVER_SOCKET)))
        length = int.from_bytes(_receive(connection, _LENGTH_BYTES), "big")
        message = msgspec.json.decode(_receive(connection, length), type=_Message)
        descriptors: list[int] = []
        while len(descriptors) <= len(message.listeners):
            data, received, _, _ = socket.recv_fds(connection, 1, _DESCRIPTORS_AT_ONCE)
            if not data:
                raise ConnectionError("it closed the connection")
            descriptors += received
    except (OSError, msgspec.DecodeError) as error:
        connection.close()
        raise SocketError(f"no proxy hands over on {path}: {error}; start one without --take-over") from error
    lock, *rest = descriptors
    sockets: defaultdict[str, list[socket.socket]] = defaultdict(list)
    for name, descriptor in zip(message.listeners, rest, strict=True):
        sockets[name].append(socket.socket(fileno=descriptor))
    return Inheritance(connection, message.config, dict(sockets), lock)


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        piece = connection.recv(size_bytes - len(data))
        if not piece:
            raise ConnectionError("it closed the connection")
        data += piece
    return bytes(data)


def _lock(path: Path) -> int:
    lock = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise SocketError(f"a proxy already runs on {path}; stop it with SIGTERM, or use another path") from error
    return lock


def _listen(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, in the place of any other. Raises SocketError."""
    listening = socket.socket(socket.AF_UNIX)
    new = path.with_suffix(".new")
    mask = os.umask(_SOCKET_MASK)
    try:
        new.unlink(missing_ok=True)
        listening.bind(str(new))
        listening.listen(_BACKLOG)
        new.rename(path)
    except OSError as error:
        listening.close()
        raise SocketError(f"cannot listen on {path}: {error}; use a shorter path or a local disk") from error
    finally:
        os.umask(mask)
    return listening
