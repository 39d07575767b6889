"""The proxy's process: it serves the control API on its control socket, drains when it is stopped, and hands over.

The services' tokens pass through the socket; its only authorization is that its directory admits one user. Nothing is
kept on disk: an agent that restarts the proxy sends the configuration again.
"""

import asyncio
import gc
import os
import signal
import socket
from contextlib import suppress
from typing import Final

import msgspec

from devices import limits
from gateway.event_log import log
from gateway.http.connection_table import ConnectionTable
from gateway.http.limits import ConnectionCaps, ConnectionTimes
from gateway.http.listener import HttpListener
from gateway.http.server_connection import RequestHandling
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.control_api import ControlApi, render_refusal
from gateway.proxy.control_socket import ControlSocket, Inheritance, SocketError, send_inheritance
from gateway.proxy.listeners import Listeners

_GARBAGE_THRESHOLD: Final = 20_000
_LAST_STREAMS_SECONDS: Final = 3600.0
"""The time of a request in progress after the hand-over; then it is broken off."""
_COUNT_SECONDS: Final = 0.1
_CONTROL_CAPS: Final = ConnectionCaps(total=64, per_peer=64)
_CLOSE_SECONDS: Final = 1.0


async def run_proxy(claimed: ControlSocket, *, drain_seconds: float) -> None:
    """Serve the control API until SIGTERM or SIGINT, then drain; a second signal ends at once.

    If a newer proxy takes over, end when the requests in progress have ended.
    """
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
        times = ConnectionTimes()
        # A table of its own: whatever clients do, the agent is heard.
        table = ConnectionTable(_CONTROL_CAPS, times.sweep_seconds)
        control = HttpListener(RequestHandling(ControlApi(listeners).begin, render_refusal), table, times)
        if claimed.inheritance:
            await _take_over(claimed.inheritance, listeners, tasks)
        control.take_over([claimed.control])
        log.info("proxy_started", socket=str(claimed.path), pid=os.getpid())
        handing_over = tasks.create_task(_hand_over(claimed, listeners))
        stopping = tasks.create_task(stop.wait())
        await asyncio.wait({handing_over, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if handing_over.done():
            log.info("proxy_handed_over", requests=sum(listeners.in_flight.counts().values()))
            await _close(control)
            reporting = tasks.create_task(_report_counts(handing_over.result(), listeners))
            listeners.release()
            ending = tasks.create_task(listeners.wait_released(_LAST_STREAMS_SECONDS))
            await asyncio.wait({ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            reporting.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        handing_over.cancel()
        stopping.cancel()
        log.info("proxy_draining", seconds=drain_seconds)
        await listeners.drain(drain_seconds)
        await _close(control)
    log.info("proxy_stopped")


async def _close(control: HttpListener) -> None:
    """Stop listening, and break off the calls that do not end soon, such as a stream of health."""
    control.unbind()
    with suppress(TimeoutError):
        await asyncio.wait_for(control.finish(), _CLOSE_SECONDS)


async def _take_over(inheritance: Inheritance, listeners: Listeners, tasks: asyncio.TaskGroup) -> None:
    """Listen on the sockets of the proxy before, and let it stop listening."""
    await listeners.take_over(inheritance.config, inheritance.sockets)
    inheritance.accept()
    tasks.create_task(_follow_counts(inheritance.connection, listeners))


async def _hand_over(claimed: ControlSocket, listeners: Listeners) -> socket.socket:
    """Wait until a newer proxy has taken over; return the connection to it."""
    loop = asyncio.get_running_loop()
    claimed.hand_over.setblocking(False)
    while True:
        connection, _ = await loop.sock_accept(claimed.hand_over)
        try:
            async with listeners.unchanged() as config:
                sockets = listeners.sockets()
                if await asyncio.to_thread(send_inheritance, connection, config, sockets, claimed.lock):
                    claimed.give_away()
                    return connection
        except (OSError, SocketError) as error:
            log.warning("hand_over_failed", error=str(error))
        connection.close()


async def _report_counts(connection: socket.socket, listeners: Listeners) -> None:
    """Tell the newer proxy which backends still work on requests of this one, until it is gone."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    reported: dict[str, int] | None = None
    with connection, suppress(OSError):
        while True:
            counts = dict(listeners.in_flight.counts())
            if counts != reported:
                await loop.sock_sendall(connection, msgspec.json.encode(counts) + b"\n")
                reported = counts
            await asyncio.sleep(_COUNT_SECONDS)


async def _follow_counts(connection: socket.socket, listeners: Listeners) -> None:
    """Count the requests of the proxy before with those of this one, until it has ended."""
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        while line := await reader.readline():
            listeners.in_flight.count_elsewhere(msgspec.json.decode(line, type=dict[str, int]))
    except (OSError, ValueError) as error:
        log.warning("counts_of_older_proxy_lost", error=str(error))
    finally:
        listeners.in_flight.count_elsewhere({})
        writer.close()
