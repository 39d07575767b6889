"""The proxy's reports reach the runner of the engine, and a proxy that reports nothing changes nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from gateway.proxy.config import BackendHealth
from gateway.proxy.control_client import ProxyClient
from metal_agent.engine_health import Suspicion
from metal_agent.process_events import ProcessEvent, Suspected, Trusted
from metal_agent.supervise.backend_reports import follow_backend_health, read_report
from tests.support import virtual_time


class _Told:
    """A runner that keeps its events."""

    def __init__(self) -> None:
        self.events: list[ProcessEvent] = []

    def notify(self, event: ProcessEvent) -> None:
        self.events.append(event)


class _Reporting(ProxyClient):
    """A proxy whose streams of reports have these lines and end with these errors."""

    def __init__(self, streams: list[list[BackendHealth | Exception]]) -> None:
        super().__init__(Path("control.sock"))
        self.streams = streams
        self.done = asyncio.Event()

    async def watch_health(self) -> AsyncIterator[BackendHealth]:
        if not self.streams:
            self.done.set()
            await asyncio.Event().wait()
        for line in self.streams.pop(0):
            if isinstance(line, Exception):
                raise line
            yield line


@pytest.mark.parametrize(
    "error",
    [
        ControlUnreachableError("it ended"),
        ControlRefusedError("404"),
        RuntimeError("a defect of ours"),
    ],
)
def test_reports_are_followed_whatever_ends_the_stream(error: Exception) -> None:
    runner: Any = _Told()

    async def main() -> None:
        sick = BackendHealth("u1", suspect=True, reason="Failing", message="500")
        proxy = _Reporting([[error], [sick, BackendHealth("unknown", suspect=True, reason="Slow"), error], [sick]])
        following = asyncio.create_task(follow_backend_health(proxy, {"u1": runner}))
        await asyncio.wait([following, asyncio.create_task(proxy.done.wait())], return_when=asyncio.FIRST_COMPLETED)
        following.cancel()

    virtual_time.run(main())
    assert runner.events == [Suspected(Suspicion("Failing", "500"))] * 2


def test_reason_of_a_newer_proxy_is_checked_without_draining() -> None:
    event = read_report(BackendHealth("u1", suspect=True, reason="Lukewarm", message="it is not well"))
    assert isinstance(event, Suspected)
    assert not event.suspicion.is_drained
    assert event.suspicion.message == "it is not well"
    assert read_report(BackendHealth("u1")) == Trusted()
