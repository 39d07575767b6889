"""Probes by which the kernel finds out that a peer is gone which has closed nothing: one without power or network.

Without them, a stream of a host that was switched off would wait for ever. Peers on this machine need none.
"""

import errno
import ipaddress
import socket
from typing import Final

ANSWER_SECONDS: Final = 2.5
"""A peer that acknowledges nothing for so long before its answer begins is given up, where another one may answer. The
kernel looks once a second, so that is after three seconds, and one lost probe ends no prompt that takes a minute."""
SILENCE_SECONDS: Final = 10.0
"""Else it has longer: nobody else can answer, or go on with an answer, and a network of radio may come back."""
GONE: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
"""Errors of a connection whose peer does not answer the kernel."""

_IDLE_SECONDS: Final = 1
_INTERVAL_SECONDS: Final = 1
_PROBES: Final = 10
_IDLE_OPTION: Final = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
"""The name on Linux, and that on macOS."""
_UNACKNOWLEDGED_OPTION: Final[int | None] = getattr(socket, "TCP_USER_TIMEOUT", None)
"""Where the kernel has no such option, ten probes without an answer end a connection."""


def probe_peer(connected: socket.socket) -> bool:
    """Enable the probes of a TCP socket's peer, while nothing comes; return False if that is on this machine."""
    address = connected.getpeername()
    if ipaddress.ip_address(address[0]).is_loopback:
        return False
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if _IDLE_OPTION is not None:
        connected.setsockopt(socket.IPPROTO_TCP, _IDLE_OPTION, _IDLE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    return _UNACKNOWLEDGED_OPTION is not None


def limit_silence(connected: socket.socket, seconds: float) -> None:
    """Give up the connection when its peer has acknowledged neither data nor probes for so long."""
    if _UNACKNOWLEDGED_OPTION is not None:
        connected.setsockopt(socket.IPPROTO_TCP, _UNACKNOWLEDGED_OPTION, int(seconds * 1000))
