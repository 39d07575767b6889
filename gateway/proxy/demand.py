"""Demand for engines that are not loaded: an agent waits for its changes, and requests wait here for the engines.

An agent decides which engines it loads and ends. It needs to know when a first request waits for one that is asleep
and, while one does, when another engine becomes idle and may make room. Nothing else is a change, so that a request to
a loaded engine costs nothing here. How long engines are idle is read when the agent asks.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Final

from gateway.change_counter import ChangeCounter
from gateway.proxy.config import Demand, ServiceDemand
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.service import HOLD_SECONDS, Service

_SWEEP_SECONDS: Final = 1.0


class DemandMonitor:
    """The demand of `services`, by name, whose backends have the requests that `in_flight` counts."""

    def __init__(self, services: Mapping[str, Service], in_flight: InFlight) -> None:
        self._services, self._in_flight = services, in_flight
        self._changes = ChangeCounter()
        # The number of another proxy is a different one, so that an agent never waits for a change that it missed.
        self._changes.count = time.monotonic_ns() // 1000
        self._sweep_timer: asyncio.TimerHandle | None = None
        """Starts the next sweep; None: none is planned, as no request waits for an engine that is asleep."""

    def configure(self) -> None:
        """Look at the services as they are configured now: requests may wait whose engine falls asleep."""
        if self._list_awaited():
            self.note()

    def note(self) -> None:
        """Note that a first request waits for an engine that is asleep, or that a model stays for another time."""
        self._changes.note()
        if self._sweep_timer is None:
            self._sweep_timer = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def note_end(self, uid: str) -> None:
        """Note that a request to backend `uid` has ended: an idle engine may make room for one that is waited for."""
        if self._sweep_timer and uid not in self._in_flight.counts() and self._list_awaited():
            self._changes.note()

    async def wait_past(self, seen_changes: int) -> None:
        """Wait until the number of changes is another one than `seen_changes`."""
        await self._changes.wait_past(seen_changes)

    def read(self) -> Demand:
        """Return the demand of all services now."""
        return Demand(self._changes.count, tuple(self._read_service(service) for service in self._services.values()))

    def _list_awaited(self) -> list[Service]:
        """Return the services whose engine is asleep while requests, or calls that load, wait for it."""
        return [service for service in self._services.values() if service.is_asleep and _count_waiting(service)]

    def _read_service(self, service: Service) -> ServiceDemand:
        """Return the demand of one service."""
        now, calls, keep_alive_seconds = time.monotonic(), service.load_calls, service.keep_alive_seconds
        return ServiceDemand(
            name=service.config.name,
            waiting=_count_waiting(service),
            waiting_seconds=max(service.queue.waiting_seconds(now), now - calls[0] if calls else 0.0),
            in_flight=service.queue.in_flight,
            idle_seconds=service.idle_seconds,
            keep_alive_seconds=-1.0 if keep_alive_seconds == math.inf else keep_alive_seconds,
        )

    def _sweep(self) -> None:
        """Refuse the requests that have waited for too long, and plan the next sweep while any waits."""
        self._sweep_timer = None
        latest = time.monotonic() - HOLD_SECONDS
        awaited = self._list_awaited()
        for service in awaited:
            if service.asleep_since <= latest:  # before, they have waited for a slot, which has no limit
                service.queue.refuse_waiting(lambda request: request.phase_began > latest)
        if awaited:
            self._sweep_timer = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)


def _count_waiting(service: Service) -> int:
    """Return the number of requests, and of calls that only load, that wait for a service."""
    return service.queue.queued + len(service.load_calls)
