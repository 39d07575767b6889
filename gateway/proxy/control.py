"""The proxy's process: its control API on a unix socket, and its life from claim to drain.

The socket's directory admits one user, which is all the authorization there is; the tokens of the services pass
through it. A lock beside the socket makes sure that a second proxy, started by an agent that lost track of the first,
ends before it touches anything. Nothing is kept on disk: who restarts the proxy says the configuration again.
"""

import asyncio
import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from importlib import metadata
from pathlib import Path

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from devices import limits
from gateway.proxy import exchange
from gateway.proxy.config import Idle, ProxyConfig, ProxyState, Refusal
from gateway.proxy.listeners import Listeners

_GROUP_AND_OTHERS = 0o077
_SOCKET_MASK = 0o177
_CONTROL_BODY_BYTES = 16 << 20

_log = structlog.get_logger()


class SocketError(Exception):
    """The control socket cannot be ours; the message says whose it is, or what to change."""


@contextmanager
def claim(path: Path) -> Iterator[socket.socket]:
    """Own the control socket at `path` while the context lasts: private directory, no other proxy, no stale file.

    Raises:
        SocketError: the directory is open to other users, a proxy runs on this socket, or the path is too long.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if status.st_mode & _GROUP_AND_OTHERS or status.st_uid != os.geteuid():
        raise SocketError(f"{path.parent} must belong to uid {os.geteuid()} with mode 0700: tokens pass through it")
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


async def serve(control: socket.socket, *, drain_seconds: float) -> None:
    """Serve the control API on the claimed socket until SIGTERM or SIGINT, then drain; a second signal ends at once."""
    limits.raise_descriptors()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with exchange.upstream_session() as session, asyncio.TaskGroup() as tasks:
        listeners = Listeners(session, tasks)
        # Handlers are not cancelled when the agent hangs up or dies: half of a change is worse than a late one.
        runner = web.AppRunner(_application(listeners), access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.SockSite(runner, control).start()
        _log.info("proxy started", socket=control.getsockname(), pid=os.getpid())
        await stop.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        _log.info("proxy drains", seconds=drain_seconds)
        await listeners.drain(drain_seconds)
        await runner.cleanup()
    _log.info("proxy stopped")


def _application(listeners: Listeners) -> web.Application:
    async def state(_: web.Request) -> web.Response:
        return _answer(_state(listeners))

    async def configure(request: web.Request) -> web.Response:
        try:
            config = msgspec.json.decode(await request.read(), type=ProxyConfig)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _answer(Refusal(f"configuration refused: {error}"), HTTPStatus.BAD_REQUEST)
        await listeners.configure(config)
        return _answer(_state(listeners))

    async def wait_idle(request: web.Request) -> web.Response:
        uid = request.match_info["uid"]
        try:
            timeout_seconds = float(request.query["timeoutSeconds"])
        except (KeyError, ValueError):
            return _answer(Refusal("timeoutSeconds must be a number of seconds"), HTTPStatus.BAD_REQUEST)
        try:
            async with asyncio.timeout(timeout_seconds):
                await listeners.in_flight.wait_idle(uid)
        except TimeoutError:
            pass
        return _answer(Idle(in_flight=listeners.in_flight.counts().get(uid, 0)))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=listeners.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application(client_max_size=_CONTROL_BODY_BYTES)
    application.router.add_get("/state", state)
    application.router.add_put("/services", configure)
    application.router.add_get("/metrics", metrics)
    application.router.add_get("/backends/{uid}/idle", wait_idle)
    return application


def _state(listeners: Listeners) -> ProxyState:
    return ProxyState(
        version=metadata.version("pomona"), pid=os.getpid(), services=listeners.state(), router=listeners.router()
    )


def _answer(body: msgspec.Struct, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
