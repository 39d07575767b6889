"""The proxy's process: it claims its control socket, serves the control API on it, and drains when it is stopped.

The services' tokens pass through the socket; its only authorization is that its directory admits one user. A lock
beside the socket makes a second proxy, started by an agent that lost track of the first, end before it changes
anything. Nothing is kept on disk: an agent that restarts the proxy sends the configuration again.
"""

import asyncio
import fcntl
import gc
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from aiohttp import web

from devices import limits
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.control_api import ControlApi
from gateway.proxy.listeners import Listeners

_GROUP_AND_OTHERS = 0o077
_SOCKET_MASK = 0o177
_GARBAGE_THRESHOLD = 20_000

_log = structlog.get_logger()


class SocketError(Exception):
    """The control socket cannot be claimed; the message says why, and what to change."""


@contextmanager
def claim_socket(path: Path) -> Iterator[socket.socket]:
    """Bind the control socket at `path` in a private directory, and hold its lock until the context ends.

    Raises:
        SocketError: the directory is open to other users, a proxy runs on this socket, or the path is too long.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if status.st_mode & _GROUP_AND_OTHERS or status.st_uid != os.geteuid():
        raise SocketError(
            f"{path.parent} must belong to uid {os.geteuid()} with mode 0700, because tokens pass through it"
        )
    with path.with_suffix(".lock").open("w") as lock, socket.socket(socket.AF_UNIX) as control:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SocketError(f"a proxy already runs on {path}; stop it with SIGTERM, or use another path") from error
        path.unlink(missing_ok=True)
        mask = os.umask(_SOCKET_MASK)
        try:
            control.bind(str(path))
        except OSError as error:
            raise SocketError(f"cannot listen on {path}: {error}; use a shorter path or a local disk") from error
        finally:
            os.umask(mask)
        try:
            yield control
        finally:
            path.unlink(missing_ok=True)


async def run_proxy(control: socket.socket, *, drain_seconds: float) -> None:
    """Serve the control API on the claimed socket until SIGTERM or SIGINT, then drain; a second signal ends at once."""
    limits.raise_descriptor_limit()
    # What was imported stays: to look through it again and again would take a tenth of the time of short requests.
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with UpstreamPool() as pool, asyncio.TaskGroup() as tasks:
        listeners = Listeners(pool, tasks)
        # Handlers are not cancelled when the agent hangs up or dies: half a change is worse than a late one.
        runner = web.AppRunner(ControlApi(listeners).application(), access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.SockSite(runner, control).start()
        _log.info("proxy_started", socket=control.getsockname(), pid=os.getpid())
        await stop.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        _log.info("proxy_draining", seconds=drain_seconds)
        await listeners.drain(drain_seconds)
        await runner.cleanup()
    _log.info("proxy_stopped")
