"""Tells when the network of this machine changes: a link, an address or a route. The kernel says so to who listens.

Linux sends it on a netlink socket (rtnetlink(7)), macOS and the BSDs on a routing socket (route(4)); both are open to
every user. What has changed is not read: whoever waits looks at what he needs, as it is then. But macOS says there too
that somebody asked for a route that there is not, and whoever looks while offline does just that.
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
def watch() -> Iterator[asyncio.Event]:
    """Give an event that each change sets, while the context lasts. Needs a running event loop.

    Raises:
        OSError: the system has no such socket, or grants none.
    """
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    with _listen() as kernel:
        kernel.setblocking(False)

        def hear() -> None:
            try:
                while message := kernel.recv(_MOST_BYTES):
                    if sys.platform == "linux" or is_change(message):
                        changed.set()
            except BlockingIOError:
                pass  # that was all
            except OSError:
                # The kernel had more to say than the socket could hold.
                changed.set()

        loop.add_reader(kernel, hear)
        try:
            yield changed
        finally:
            loop.remove_reader(kernel)


def is_change(message: bytes) -> bool:
    """Whether a message of macOS's routing socket tells of a change, and not of a mere question for a route."""
    return len(message) <= _TYPE_OFFSET or message[_TYPE_OFFSET] not in _NO_CHANGES


def _listen() -> socket.socket:
    if sys.platform != "linux":
        return socket.socket(_AF_ROUTE, socket.SOCK_RAW, 0)
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE)
    try:
        kernel.bind((0, _LINKS | _ADDRESSES | _ROUTES))
    except OSError:
        kernel.close()
        raise
    return kernel
