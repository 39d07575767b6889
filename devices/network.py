"""Changes of this machine's network: a link, an address or a route. The kernel reports them on a socket.

Linux reports on a netlink socket (rtnetlink(7)), macOS and the BSDs on a routing socket (route(4)); every user may open
both. The change itself is not read: the caller reads the state that it needs. On the routing socket macOS also
reports lookups of routes, which the caller's own reading causes; lookups are ignored.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import Final

_NETLINK_ROUTE: Final = 0
_LINKS: Final = 0x1  # RTMGRP_LINK
_ADDRESSES: Final = 0x10 | 0x100  # RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
_ROUTES: Final = 0x40 | 0x400  # RTMGRP_IPV4_ROUTE, RTMGRP_IPV6_ROUTE
_AF_ROUTE: Final = 17  # of macOS
_NO_CHANGES: Final = frozenset({4, 5, 7, 8, 11})  # RTM_GET, RTM_LOSING, RTM_MISS, RTM_LOCK, RTM_RESOLVE of macOS
_TYPE_OFFSET: Final = 3  # rtm_type, ifm_type, ifam_type: after a length of 16 bits and a version
_MOST_BYTES: Final = 65536


@contextlib.contextmanager
def watch_network() -> Iterator[asyncio.Event]:
    """Yield an event that is set by each change of a link, address or route of this machine, while the context lasts.

    The caller clears it. Needs a running event loop.

    Raises:
        OSError: the system has no such socket, or refuses it.
    """
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    with _listen() as kernel:
        kernel.setblocking(False)

        def read_messages() -> None:
            """Read all messages that have come, and set the event if one reports a change."""
            try:
                while message := kernel.recv(_MOST_BYTES):
                    # On Linux the socket gets messages of changes only; on macOS also others.
                    if sys.platform == "linux" or is_change(message):
                        changed.set()
            except BlockingIOError:
                pass  # no more messages
            except OSError:
                # The buffer of the socket overflowed, so messages were lost.
                changed.set()

        # The event loop calls it when the socket has something to read.
        loop.add_reader(kernel, read_messages)
        try:
            yield changed
        finally:
            loop.remove_reader(kernel)


def is_change(message: bytes) -> bool:
    """Decide whether a message of macOS's routing socket reports a change, and not only a lookup of a route."""
    return len(message) <= _TYPE_OFFSET or message[_TYPE_OFFSET] not in _NO_CHANGES


def _listen() -> socket.socket:
    """Open a socket on which the kernel reports changes of links, addresses and routes. Raises OSError."""
    if sys.platform != "linux":
        return socket.socket(_AF_ROUTE, socket.SOCK_RAW, 0)
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE)
    try:
        kernel.bind((0, _LINKS | _ADDRESSES | _ROUTES))
    except OSError:
        kernel.close()
        raise
    return kernel
