"""Facts of the kernel about sockets: the ports that a process listens on, and who is at the other end of a unix socket.

A log or a file could name the port of another process.
"""

import socket
import struct
import sys
from pathlib import Path
from typing import Final

import psutil

from devices.footprint import descendants

LOOPBACK = "127.0.0.1"
_MACOS_SOL_LOCAL: Final = 0
_MACOS_LOCAL_PEERCRED: Final = 1
_MACOS_LOCAL_PEERPID: Final = 2
_MACOS_XUCRED_BYTES: Final = 76
"""The size of struct xucred: its version, the user, and up to 16 groups."""
_CONNECT_SECONDS: Final = 1.0


def loopback_port(pid: int) -> int | None:
    """Return the TCP port on which process `pid` or a descendant listens on 127.0.0.1; None if there is none yet.

    Blocks while the open files of these processes are read.
    """
    try:
        # Not psutil's children(), which reads every process of the machine: a Mac has many hundreds.
        family = (pid, *descendants(pid))
        connections = [socket for member in family for socket in psutil.Process(member).net_connections("tcp4")]
    except (psutil.Error, OSError):  # the process or a child has just ended
        return None

    ports = [
        connection.laddr.port
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip == LOOPBACK
    ]
    return min(ports, default=None)


def unix_listener(path: Path) -> int | None:
    """Return the process that listens on the unix socket at `path`, as the kernel states it; None when none does."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_CONNECT_SECONDS)
        try:
            client.connect(str(path))
        except OSError:
            return None
        return unix_peer_pid(client)


def unix_peer_pid(connection: socket.socket) -> int:
    """Return the process at the other end of a unix socket, as it listened or connected.

    It is 0 if that process is in another pid namespace. Raises OSError.
    """
    if sys.platform == "darwin":
        return connection.getsockopt(_MACOS_SOL_LOCAL, _MACOS_LOCAL_PEERPID)
    # Linux returns process, user and group (struct ucred).
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def unix_peer_uid(connection: socket.socket) -> int:
    """Return the effective user of the process at the other end of a unix socket, as it listened or connected.

    Raises OSError.
    """
    if sys.platform == "darwin":
        credentials = connection.getsockopt(_MACOS_SOL_LOCAL, _MACOS_LOCAL_PEERCRED, _MACOS_XUCRED_BYTES)
        # struct xucred begins with its version and the user.
        _, uid = struct.unpack_from("2I", credentials)
    else:
        # struct ucred: process, user and group
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
