"""The agent's hour of patience with a proxy that has streams: an older one, and one whose control API is silent."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.http.control_client import ControlUnreachableError
from gateway.proxy.build import BUILD
from gateway.proxy.config import ListenerState, ProxyState, ServiceStats
from gateway.proxy.control_client import ProxyClient
from metal_agent.native.engine_handle import EngineExit
from metal_agent.traffic.proxy_process import Proxy
from tests.support import virtual_time

PID = 4711
NEVER = float("inf")
HOUR_SECONDS = 3600.0
CHECK_SECONDS = 15.0
"""More than the pause between two checks of a proxy."""


class _AdoptedProcess:
    """An adopted proxy's process that ends when it is told to, and keeps the time of that."""

    pid = PID

    def __init__(self) -> None:
        self.ended_at: float | None = None
        self._exit: asyncio.Future[EngineExit] = asyncio.get_running_loop().create_future()

    async def wait(self) -> EngineExit:
        return await asyncio.shield(self._exit)

    async def end(self, grace_seconds: float) -> None:
        del grace_seconds
        self.ended_at = asyncio.get_running_loop().time()
        self._exit.set_result(EngineExit(code=0))

    def release(self) -> None:
        """Close nothing: there is no handle."""


class _ProxyWithStreams(ProxyClient):
    """The control API of a proxy that has requests until one time, and is silent from another on.

    Args:
        is_older: it is of another build; to hand over fails.

    """

    def __init__(self, *, is_older: bool, busy_until: float = NEVER, silent_from: float = NEVER) -> None:
        super().__init__(Path("control.sock"))
        self._is_older = is_older
        self._busy_until = busy_until
        self._silent_from = silent_from

    async def state(self) -> ProxyState:
        now = asyncio.get_running_loop().time()
        if now >= self._silent_from:
            raise ControlUnreachableError("silent")
        stats = ServiceStats(in_flight=int(now < self._busy_until))
        listener = ListenerState("team/chat", "127.0.0.1", 1, "", (), stats=stats)
        return ProxyState("0.1" if self._is_older else BUILD, PID, (listener,))


def seconds_until_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, client: _ProxyWithStreams, *, serves: bool = True
) -> float:
    """Return the time at which the agent ends its adopted proxy."""

    async def main() -> float:
        proxy = Proxy(folder, lambda: None)
        process: Any = _AdoptedProcess()
        proxy.process, proxy.client = process, client

        async def answer_as_listeners() -> bool:
            return serves

        async def fail_to_hand_over() -> None:
            pass

        monkeypatch.setattr(proxy, "_has_live_listener", answer_as_listeners)
        monkeypatch.setattr(proxy, "_hand_over", fail_to_hand_over)
        async with asyncio.timeout(10 * HOUR_SECONDS):
            await proxy._run_once()
        assert process.ended_at is not None
        return float(process.ended_at)

    return virtual_time.run(main())


def test_busy_older_proxy_is_replaced_after_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_at = seconds_until_ended(tmp_path, monkeypatch, _ProxyWithStreams(is_older=True))
    assert 0 <= ended_at - HOUR_SECONDS <= CHECK_SECONDS


def test_idle_older_proxy_is_replaced_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = _ProxyWithStreams(is_older=True, busy_until=1000.0)
    assert abs(seconds_until_ended(tmp_path, monkeypatch, client) - 1000.0 - 60.0) <= CHECK_SECONDS


@pytest.mark.parametrize(("serves", "patience_seconds"), [(True, HOUR_SECONDS), (False, 60.0)])
def test_silent_proxy_is_replaced_after_an_hour_and_soon_if_its_listeners_are_silent_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, serves: bool, patience_seconds: float
) -> None:
    client = _ProxyWithStreams(is_older=False, silent_from=100.0)
    ended_at = seconds_until_ended(tmp_path, monkeypatch, client, serves=serves)
    assert 0 <= ended_at - 100.0 - patience_seconds <= 2 * CHECK_SECONDS
