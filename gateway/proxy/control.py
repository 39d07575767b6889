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
from gateway.http.control_messages import render_refusal
from gateway.http.exchange import RequestHandling
from gateway.http.limits import ConnectionCaps, ConnectionTimes
from gateway.http.listener import HttpListener
from gateway.http.named_socket import SocketError
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.control_api import ControlApi
from gateway.proxy.control_socket import ACCEPTED, ControlSocket, Inheritance, send_inheritance
from gateway.proxy.listeners import Listeners

_GARBAGE_THRESHOLD: Final = 20_000
_LAST_STREAMS_SECONDS: Final = 3600.0
"""The time of a request in progress after the hand-over; then it is broken off."""
_COUNT_SECONDS: Final = 0.1
_COUNTS_LIMIT_BYTES: Final = 1 << 20
_ACCEPT_AGAIN_SECONDS: Final = 1.0
_CONTROL_CAPS: Final = ConnectionCaps(total=64, per_peer=64)
_CLOSE_SECONDS: Final = 1.0
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


async def run_proxy(claimed: ControlSocket, *, drain_seconds: float) -> None:
    """Serve the control API until SIGTERM or SIGINT, then drain; a second signal ends at once.

    For an update without a pause, a newer proxy may take over the sockets of a running one:

    1. If this proxy was started to take over (`claimed.inheritance`), it gets the sockets of the proxy before it.
    2. It serves until a stop signal comes, or until a newer proxy has taken over from it (`_hand_over`).
    3. After a hand-over only its requests in progress are left; it reports their number to the newer proxy, which picks
       backends by it, and ends with the last of them, or when their time is up.

    Raises SocketError, in a group, if the proxy before does not hand over.
    """
    stop = set_up_process()
    async with UpstreamPool() as pool, asyncio.TaskGroup() as tasks:
        # The listeners of the services, and that of the control API. It has a table of connections of its own: whatever
        # clients do, the agent is heard.
        listeners = Listeners(pool, tasks)
        times = ConnectionTimes()
        table = ConnectionTable(_CONTROL_CAPS, times.sweep_seconds)
        control = HttpListener(RequestHandling(ControlApi(listeners).begin, render_refusal), table, times)

        # 1. Take over, and serve the control API.
        if claimed.inheritance:
            await _take_over(claimed, claimed.inheritance, listeners, tasks)
        control.take_over([claimed.control.socket])
        log.info("proxy_started", socket=str(claimed.path), pid=os.getpid())

        # 2. Wait until a newer proxy has accepted the listening sockets, or a stop signal has come.
        handing_over = tasks.create_task(_hand_over(claimed, listeners))
        stopping = tasks.create_task(stop.wait())
        await asyncio.wait({handing_over, stopping}, return_when=asyncio.FIRST_COMPLETED)

        # 3. A newer proxy listens now, and serves the control API: only the requests in progress are left here. Wait
        #    until they have ended, their time is up, or a stop signal has come.
        if handing_over.done():
            log.info("proxy_handed_over", requests=sum(listeners.in_flight.counts().values()))
            reporting = tasks.create_task(_report_counts(handing_over.result(), listeners))
            await _close(control)
            ending = tasks.create_task(listeners.wait_released(_LAST_STREAMS_SECONDS))
            await asyncio.wait({ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            reporting.cancel()

        # In each case: from now on a stop signal ends the process at once. Give running requests some time, and break
        # off the rest.
        restore_stop_signals()
        handing_over.cancel()
        stopping.cancel()
        log.info("proxy_draining", seconds=drain_seconds)
        await listeners.drain(drain_seconds)
        await _close(control)  # after a hand-over, it is closed already
    log.info("proxy_stopped")


def set_up_process() -> asyncio.Event:
    """Prepare this process for many connections and short requests; return the event that SIGTERM and SIGINT set."""
    limits.raise_descriptor_limit()
    # What was imported stays: to look through it again and again would take a tenth of the time of short requests.
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD)
    stop = asyncio.Event()
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def restore_stop_signals() -> None:
    """Restore the effect of the stop signals: a second one ends the process at once."""
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)


async def _close(control: HttpListener) -> None:
    """Stop listening, and break off the calls that do not end soon, such as a stream of health."""
    control.unbind()
    with suppress(TimeoutError):
        await asyncio.wait_for(control.finish(), _CLOSE_SECONDS)


async def _take_over(
    claimed: ControlSocket, inheritance: Inheritance, listeners: Listeners, tasks: asyncio.TaskGroup
) -> None:
    """Take over from the proxy before; raise SocketError if it does not hand over.

    1. Apply its configuration, and listen on its sockets.
    2. Write `ACCEPTED`, so that it stops listening.
    3. Wait for the first line of its counts of requests in progress: with it, the older proxy has left.
    4. Put our control sockets at its paths, and go on adding its counts to ours in a task.
    """
    # 1. and 2. Listen, and tell the proxy before.
    await listeners.take_over(inheritance.config, inheritance.sockets)
    inheritance.connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=inheritance.connection, limit=_COUNTS_LIMIT_BYTES)
    writer.write(ACCEPTED)

    # 3. Wait for its first line. No limit of time: until it has closed the connection, it may still leave.
    try:
        counts = await reader.readline()
    except (OSError, ValueError) as error:
        raise SocketError(f"the proxy on {claimed.path} does not hand over: {error}") from error
    if not counts:
        raise SocketError(f"the proxy on {claimed.path} does not hand over: it closed the connection; it serves on")

    # 4. It has left.
    claimed.take_names()
    tasks.create_task(_follow_counts(counts, reader, writer, listeners))


async def _hand_over(claimed: ControlSocket, listeners: Listeners) -> socket.socket:
    """Wait until a newer proxy has accepted the listening sockets, and stop listening here; return its connection.

    The configuration is locked once one has connected. What may fail, such as binding the socket for the time after
    the hand-over, is done before the other can accept, because two proxies on the same sockets would have two
    configurations. If the other does not accept, this one serves on and waits for the next.
    """
    loop = asyncio.get_running_loop()
    claimed.hand_over.socket.setblocking(False)
    while True:
        # 1. Wait for a newer proxy.
        try:
            connection, _ = await loop.sock_accept(claimed.hand_over.socket)
        except OSError as error:  # such as a lack of descriptors
            log.warning("hand_over_failed", error=str(error))
            await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
            continue

        # 2. Send it configuration, listening sockets and lock; leave once it has accepted them.
        try:
            async with listeners.configuring:
                claimed.prepare_leaving()  # binds the socket of the time after the hand-over
                sockets, lock = listeners.sockets(), claimed.lock.fileno()
                if await asyncio.to_thread(send_inheritance, connection, listeners.config, sockets, lock):
                    claimed.leave()  # gives up paths and lock
                    listeners.release()  # stops listening; requests in progress go on
                    return connection
        except (OSError, SocketError) as error:
            log.warning("hand_over_failed", error=str(error))
        connection.close()  # it has not accepted


async def _report_counts(connection: socket.socket, listeners: Listeners) -> None:
    """Tell the newer proxy which backends still work on requests of this one, until it is gone."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    reported: dict[str, int] | None = None
    with connection, suppress(OSError):
        while True:
            counts = listeners.unfinished_counts()
            if counts != reported:
                await loop.sock_sendall(connection, msgspec.json.encode(counts) + b"\n")
                reported = counts
            await asyncio.sleep(_COUNT_SECONDS)


async def _follow_counts(
    counts: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listeners: Listeners
) -> None:
    """Count the requests of the proxy before with those of this one, until it has ended; `counts` is the first line."""
    try:
        while counts:
            listeners.in_flight.count_elsewhere(msgspec.json.decode(counts, type=dict[str, int]))
            counts = await reader.readline()
    except (OSError, ValueError) as error:
        log.warning("counts_of_older_proxy_lost", error=str(error))
    finally:
        listeners.in_flight.count_elsewhere({})
        writer.close()
