"""The proxy's listeners in a process of its own, which measures the gaps of its event loop.

A beat that is due every millisecond shows them: no other connection is served for as long as the loop does not come to
it. A gap is measured by the clock, and in processor time of the loop's thread, which no other load on the machine
changes. The processor time has up to a millisecond of ordinary work in it, so that it is at most too long.

`python -m benchmarks.servers.timed_proxy ENGINE_PORT CONCURRENCY` prints its port; for each line on stdin it prints the
longest gap since the last one, in milliseconds, by the clock and in processor time; it ends with stdin.
"""

import asyncio
import sys
import time
from typing import Final

import uvloop

from benchmarks.servers.ways import proxy_config
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.listeners import Listeners

BEAT_SECONDS: Final = 0.001


class Beat:
    """The longest gaps of the event loop since they were last taken."""

    def __init__(self) -> None:
        self._clock_seconds = 0.0
        self._processor_seconds = 0.0

    async def run(self) -> None:
        """Measure until it is cancelled."""
        while True:
            clock, processor = time.monotonic(), time.thread_time()
            await asyncio.sleep(BEAT_SECONDS)
            self._clock_seconds = max(self._clock_seconds, time.monotonic() - clock - BEAT_SECONDS)
            self._processor_seconds = max(self._processor_seconds, time.thread_time() - processor)

    def take_ms(self) -> tuple[float, float]:
        """Return the longest gap by the clock and in processor time, in milliseconds, and begin anew."""
        gaps = 1000 * self._clock_seconds, 1000 * self._processor_seconds
        self._clock_seconds = self._processor_seconds = 0.0
        return gaps


async def _serve(engine: int, concurrency: int) -> None:
    async with UpstreamPool() as pool, asyncio.TaskGroup() as tasks:
        listeners = Listeners(pool, tasks)
        await listeners.configure(proxy_config(engine, concurrency))
        print(listeners.service_states()[0].port, flush=True)
        beat = Beat()
        beating = tasks.create_task(beat.run())
        while await asyncio.to_thread(sys.stdin.readline):
            print(*beat.take_ms(), flush=True)
        beating.cancel()
        await listeners.drain(1)


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
