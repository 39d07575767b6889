"""The claim of a proxy to its control socket, and the hand-over of that claim and of all listening sockets.

A lock beside the socket makes a second proxy end before it changes anything, unless it was started to take over. Then
the first one sends it the lock, its configuration and its listening sockets over a second unix socket. Once the new one
has accepted them, the first one leaves and says so by its first report of requests in progress; only then does the new
one put its own sockets in the place of the old. Whichever dies on the way, the other is found by these names or ends.
"""

import fcntl
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from gateway.event_log import log
from gateway.http.named_socket import NamedSocket, SocketError
from gateway.proxy.config import ProxyConfig

HAND_OVER_SOCKET: Final = "handover.sock"
LAST_SOCKET: Final = "last-{pid}.sock"
LONGEST_NAME: Final = LAST_SOCKET.format(pid="9" * (5 if sys.platform == "darwin" else 7))
"""The longest name of a socket, with the largest pid of the system."""
_GROUP_AND_OTHERS: Final = 0o077
_HAND_OVER_SECONDS: Final = 10.0
_LENGTH_BYTES: Final = 8
_DESCRIPTORS_AT_ONCE: Final = 100
ACCEPTED: Final = b"+"
"""The answer of a proxy that takes over, when it is ready to listen."""


class _Message(msgspec.Struct, frozen=True):
    """The words of a hand-over; the descriptors come after it: the lock, then one for each of `listeners`."""

    config: ProxyConfig
    listeners: tuple[str, ...]


class Inheritance(NamedTuple):
    """A hand-over from the proxy at the other end of `connection`, which serves until it has left."""

    connection: socket.socket
    config: ProxyConfig
    sockets: dict[str, list[socket.socket]]
    """The listening sockets by the names of their listeners."""
    lock: int
    """The descriptor of the file that is locked."""


@dataclass
class ControlSocket:
    """The sockets and the lock of a proxy.

    Args:
        control: listens for the control API.
        hand_over: listens for a proxy that takes over.
        lock: the file that is locked.
        inheritance: what a proxy before this one hands over.
    """

    control: NamedSocket
    hand_over: NamedSocket
    lock: BinaryIO
    inheritance: Inheritance | None
    draining_socket: NamedSocket | None = None
    """After the hand-over: listens where an agent finds this proxy while its last requests end."""

    @property
    def path(self) -> Path:
        """The path of the control socket."""
        return self.control.path

    def take_names(self) -> None:
        """Listen at the paths, in the place of the proxy before. Raises SocketError."""
        self.control.take_name()
        self.hand_over.take_name()

    def prepare_leaving(self) -> None:
        """Do all of `leave` that may fail. Raises SocketError."""
        if self.draining_socket is None:
            self.draining_socket = NamedSocket(self.path.with_name(LAST_SOCKET.format(pid=os.getpid())))

    def leave(self) -> None:
        """Leave paths and lock to the proxy that has accepted them, and listen at a path of this proxy's own instead.

        There the agent finds this proxy while its last requests end. Raises nothing, since it cannot be undone.
        """
        self.control.abandon_name()
        self.hand_over.abandon_name()
        self.hand_over.close()
        # While this process had the lock, no other could start if the newer proxy crashed.
        self.lock.close()
        try:
            if self.draining_socket:  # `prepare_leaving` has bound it
                self.draining_socket.take_name()
        except SocketError as error:
            log.error("leaving_proxy_has_no_name", error=str(error))


@contextmanager
def claim_socket(path: Path, *, take_over: bool = False) -> Iterator[ControlSocket]:
    """Bind the control socket at `path` in a private directory, and hold its lock until the context ends.

    The lock keeps a second proxy from starting here. With `take_over`, the lock comes from the running proxy instead,
    with its configuration and listening sockets; it keeps its paths until the caller calls `take_names`.

    Raises:
        SocketError: the directory is open to other users, a proxy runs on this socket, there is none that hands over,
            or the path is too long.
    """
    # 1. The directory must be of this user alone.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if status.st_mode & _GROUP_AND_OTHERS or status.st_uid != os.geteuid():
        raise SocketError(
            f"{path.parent} must belong to uid {os.geteuid()} with mode 0700, because tokens pass through it"
        )

    with ExitStack() as stack:
        # 2. Get the lock: from the running proxy with all that it hands over, or by locking the file.
        inheritance = _inherit(path) if take_over else None
        lock_descriptor = inheritance.lock if inheritance else _lock_file(path)
        lock = stack.enter_context(os.fdopen(lock_descriptor, "wb"))

        # 3. Listen, without names at first.
        control = stack.enter_context(closing(NamedSocket(path)))
        hand_over = stack.enter_context(closing(NamedSocket(path.with_name(HAND_OVER_SOCKET))))
        claimed = ControlSocket(control, hand_over, lock, inheritance)
        if inheritance is None:  # else the caller takes the names, once the running proxy has left
            claimed.take_names()

        try:
            yield claimed
        finally:
            if claimed.draining_socket:  # bound for a hand-over to a newer proxy
                claimed.draining_socket.close()


def send_inheritance(
    connection: socket.socket, config: ProxyConfig, sockets: Sequence[tuple[str, socket.socket]], lock: int
) -> bool:
    """Hand over to a newer proxy, and return True if it has accepted; blocks for some seconds. Raises OSError.

    The message has the configuration and, for each socket, the name of its listener. After it come the descriptors:
    the lock, then the sockets in the order of these names.
    """
    connection.settimeout(_HAND_OVER_SECONDS)
    message = msgspec.json.encode(_Message(config, tuple(name for name, _ in sockets)))
    connection.sendall(len(message).to_bytes(_LENGTH_BYTES, "big") + message)
    descriptors = [lock, *(sock.fileno() for _, sock in sockets)]
    for start in range(0, len(descriptors), _DESCRIPTORS_AT_ONCE):
        # Descriptors need at least one byte to come with.
        socket.send_fds(connection, [b"f"], descriptors[start : start + _DESCRIPTORS_AT_ONCE])
    return connection.recv(1) == ACCEPTED


def _inherit(path: Path) -> Inheritance:
    """Receive what the proxy at `path` hands over. Raises SocketError."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_HAND_OVER_SECONDS)
    try:
        # 1. The message: its length, then JSON with the configuration and a name for each listening socket.
        connection.connect(str(path.with_name(HAND_OVER_SOCKET)))
        length = int.from_bytes(_receive(connection, _LENGTH_BYTES), "big")
        message = msgspec.json.decode(_receive(connection, length), type=_Message)

        # 2. The descriptors: the lock, then the listening sockets in the order of these names.
        descriptors: list[int] = []
        while len(descriptors) < 1 + len(message.listeners):
            data, received, _, _ = socket.recv_fds(connection, 1, _DESCRIPTORS_AT_ONCE)
            if not data:
                raise ConnectionError("it closed the connection")
            descriptors += received
    except (OSError, msgspec.DecodeError) as error:
        connection.close()
        raise SocketError(f"no proxy hands over on {path}: {error}; start one without --take-over") from error

    # 3. The sockets by name: a listener has one for each of its addresses.
    lock, *listening_descriptors = descriptors
    sockets: defaultdict[str, list[socket.socket]] = defaultdict(list)
    for name, descriptor in zip(message.listeners, listening_descriptors, strict=True):
        sockets[name].append(socket.socket(fileno=descriptor))
    return Inheritance(connection=connection, config=message.config, sockets=dict(sockets), lock=lock)


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    """Return the next `size_bytes` of a connection. Raises ConnectionError if it ends before."""
    data = bytearray()
    while len(data) < size_bytes:
        piece = connection.recv(size_bytes - len(data))
        if not piece:
            raise ConnectionError("it closed the connection")
        data += piece
    return bytes(data)


def _lock_file(path: Path) -> int:
    """Lock the file beside the socket, and return its descriptor. Raises SocketError if another proxy has the lock."""
    lock = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise SocketError(f"a proxy already runs on {path}; stop it with SIGTERM, or use another path") from error
    return lock
