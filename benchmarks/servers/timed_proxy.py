"""The proxy's listeners in a thread of this process, with the longest piece of their work on the loop's thread.

It is measured in processor time of that thread, which no other load on the machine changes. Measured are the calls by
which the loop hands over what sockets bring, and each step of the scan of a large body: all that is not the loop's own.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import uvloop

from gateway.http.server_connection import ServerConnection
from gateway.http.upstream_connection import UpstreamConnection
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy import request_body
from gateway.proxy.config import ProxyConfig
from gateway.proxy.listeners import Listeners
from gateway.proxy.upstream_request import UpstreamRequest

_CALLS: Final = (
    *((ServerConnection, name) for name in ("data_received", "eof_received", "connection_lost", "resume_writing")),
    *((UpstreamConnection, name) for name in ("data_received", "eof_received", "connection_lost")),
    (UpstreamRequest, "send"),
    (UpstreamRequest, "_send_over"),
)


class TimedProxy:
    """The proxy, and the longest piece of work since it was last asked for."""

    def __init__(self) -> None:
        self.port = 0
        self.longest_seconds = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._started = threading.Event()

    def take_longest_ms(self) -> float:
        """Return the longest piece of work in milliseconds, and begin anew."""
        longest, self.longest_seconds = self.longest_seconds, 0.0
        return 1000 * longest

    def run(self, config: ProxyConfig) -> None:
        """Serve until `stop`."""
        with ExitStack() as stack:
            for owner, name in _CALLS:
                stack.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name))))
            scan_body = request_body.scan_body
            stack.enter_context(
                mock.patch.object(request_body, "scan_body", lambda content: self._timed_steps(scan_body(content)))
            )
            uvloop.run(self._serve(config))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self._note(time.thread_time() - began)

        return timed

    def _timed_steps(self, steps: Generator[None, None, Any]) -> Generator[None, None, Any]:
        step = self._timed(lambda: next(steps))
        while True:
            try:
                step()
            except StopIteration as end:
                return end.value
            yield

    def _note(self, seconds: float) -> None:
        self.longest_seconds = max(self.longest_seconds, seconds)

    def wait_started(self) -> None:
        """Wait until it listens."""
        self._started.wait()

    def stop(self) -> None:
        """End it; called by another thread."""
        if self._loop:
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self, config: ProxyConfig) -> None:
        self._loop = asyncio.get_running_loop()
        async with UpstreamPool() as pool, asyncio.TaskGroup() as tasks:
            listeners = Listeners(pool, tasks)
            await listeners.configure(config)
            self.port = listeners.service_states()[0].port
            self._started.set()
            await self._stop.wait()
            await listeners.drain(1)


@contextmanager
def run_timed_proxy(config: ProxyConfig) -> Iterator[TimedProxy]:
    """Run the proxy until the context ends."""
    proxy = TimedProxy()
    thread = threading.Thread(target=proxy.run, args=(config,))
    thread.start()
    proxy.wait_started()
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join()
