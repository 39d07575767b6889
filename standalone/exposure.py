"""Brings requests on this machine to the engines: one endpoint for all services, by the `model` of each request.

The proxy is the one of the agent, with one more listener. That of each service stands behind it on a port that the
kernel chooses and with a token that nobody is told.
"""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import structlog
from msgspec import structs

from devices.sockets import LOOPBACK
from gateway.proxy.client import ProxyRefusedError, ProxyUnreachableError
from gateway.proxy.config import ListenerState, ProxyState, Router
from metal_agent.assignments import Assignment
from metal_agent.endpoints import Service
from metal_agent.exposure import Place, accepted, idle_seconds, in_flight, proxy_config
from metal_agent.proxy import Proxy
from metal_agent.runner import Runner

_ABSENT: Final = frozenset({"Rejected", "Stopped"})

log = structlog.get_logger()


class Exposed:
    """What of `runners` answers at `port` of loopback through `proxy`; after `hurry` no request is waited for."""

    def __init__(self, proxy: Proxy, runners: Mapping[str, Runner], port: int, hurry: asyncio.Event) -> None:
        self.accepted: frozenset[Service] = frozenset()
        """The services that answer."""
        self.router: ListenerState | None = None
        """The endpoint, once the proxy has it."""
        self._proxy = proxy
        self._runners = runners
        self._port = port
        self._hurry = hurry
        self._closed: set[str] = set()
        self._token = secrets.token_urlsafe()
        self._configuring = asyncio.Lock()

    async def configure(self) -> bool:
        """Tell the proxy everything; whether what answers, or where, has changed.

        Raises ProxyUnreachableError and ProxyRefusedError.
        """
        async with self._configuring:
            grouped: defaultdict[Service, list[Runner]] = defaultdict(list)
            for runner in self._runners.values():
                if runner.assignment.service and runner.state.phase not in _ABSENT:
                    grouped[runner.assignment.service].append(runner)
            self._closed &= {uid for uid, runner in self._runners.items() if runner.state.phase == "Stopping"}
            places = dict.fromkeys(grouped, Place(0, self._token))
            config = structs.replace(
                proxy_config(LOOPBACK, grouped, places, self._closed), router=Router(address=LOOPBACK, port=self._port)
            )
            before = self.router, self.accepted
            state = await self._proxy.client.configure(config)
            ready = accepted(state, LOOPBACK)
            self.router = state.router
            self.accepted = frozenset(
                service
                for service, runners in grouped.items()
                if any(runner.assignment.uid in ready for runner in runners)
            )
            return (self.router, self.accepted) != before

    async def state(self) -> ProxyState | None:
        """Ask the proxy what it does; None while it does not answer."""
        try:
            return await self._proxy.client.state()
        except (ProxyUnreachableError, ProxyRefusedError):
            return None

    async def withdraw(self, assignment: Assignment) -> None:
        """Do nothing: nobody but the proxy leads here, and `drain` tells it."""

    async def idle_seconds(self) -> dict[str, float | None]:
        """Ask since when each process answers nothing, by uid."""
        return await idle_seconds(self._proxy.client)

    def requests(self, uid: str) -> int | None:
        """Count the requests that the process answered when the proxy was last asked; None: nobody knows."""
        return in_flight(self._proxy.state, uid)

    async def drain(self, uid: str, timeout_seconds: float) -> None:
        """Give the process nothing new and wait until it answers nothing, for a bounded time and unless in a hurry."""
        self._closed.add(uid)
        try:
            await self.configure()
            idle = asyncio.create_task(self._proxy.client.wait_idle(uid, timeout_seconds))
            hurry = asyncio.create_task(self._hurry.wait())
            try:
                await asyncio.wait({idle, hurry}, return_when=asyncio.FIRST_COMPLETED)
                if not (idle.done() and idle.result()):
                    log.warning("requests are broken off", uid=uid)
            finally:
                idle.cancel()
                hurry.cancel()
        except (ProxyUnreachableError, ProxyRefusedError) as error:
            log.warning("not drained", uid=uid, error=str(error))
