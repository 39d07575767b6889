"""Tells when the network of this machine changes: a link, an address or a route. The kernel says so to who listens.

Linux sends it on a netlink socket (rtnetlink(7)), macOS and the BSDs on a routing socket (route(4)); both are open to
every user. What has changed is not read: whoever waits looks at what he needs, as it is then.
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
            # Also on an error: the kernel says by one that it had more to say than the socket could hold.
            changed.set()
            with contextlib.suppress(OSError):
                while kernel.recv(_MOST_BYTES):
                    pass

        loop.add_reader(kernel, hear)
        try:
            yield changed
        finally:
            loop.remove_reader(kernel)


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
