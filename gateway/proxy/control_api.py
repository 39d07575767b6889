"""The server side of the control API: the agent configures the proxy by it, and reads its state, metrics and health."""

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from gateway.http.awaited_exchange import AwaitedExchange
from gateway.http.control_calls import ControlError, begin_call, read_body, respond
from gateway.http.exchange import Exchange
from gateway.proxy import metrics
from gateway.proxy.build import BUILD
from gateway.proxy.config import BackendHealth, ProxyConfig, ProxyState, RequestsInFlight
from gateway.proxy.listeners import DrainingError, Listeners

_BODY_LIMIT_BYTES: Final = 16 << 20
_HEARTBEAT_SECONDS: Final = 5.0
"""The pause after which a stream of health has an empty line, so that each side notices that the other is gone."""


class ControlApi:
    """The paths of the control API of the proxy that has `listeners`; config.py has their messages."""

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners

    def begin(self, exchange: Exchange) -> AwaitedExchange:
        """Begin to answer one call."""
        return begin_call(exchange, self._dispatch)

    async def _dispatch(self, call: AwaitedExchange) -> None:
        """Carry out the call that method and path name; `uid` is that of a backend. Raises ControlError."""
        head = call.exchange.head
        match (head.method, *head.path.split("/")[1:]):
            case ("GET", "state"):
                respond(call, self._proxy_state())
            case ("PUT", "services"):
                await self._configure(call)
            case ("GET", "metrics"):
                call.exchange.respond(HTTPStatus.OK, metrics.FIELDS, metrics.render_metrics(self._listeners.services))
            case ("GET", "demand"):
                await self._wait_demand(call)
            case ("GET", "backends", "health"):
                await self._watch_health(call)
            case ("GET", "backends", "busy"):
                await self._wait_busy(call)
            case ("GET", "backends", uid, "idle"):
                await self._wait_idle(call, uid)
            case ("POST", "backends", uid, "health"):
                self._clear_health(call, uid)
            case _:
                raise ControlError(HTTPStatus.NOT_FOUND, f"{head.method} {head.path} is no call")

    async def _configure(self, call: AwaitedExchange) -> None:
        """Apply the configuration in the body, and answer with the new state. Raises ControlError."""
        body = await read_body(call, _BODY_LIMIT_BYTES)
        try:
            config = msgspec.json.decode(body, type=ProxyConfig)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ControlError(HTTPStatus.BAD_REQUEST, f"configuration refused: {error}") from error

        # It is applied to the end even when the agent hangs up or dies: half a change is worse than a late one.
        try:
            await asyncio.shield(asyncio.ensure_future(self._listeners.configure(config)))
        except DrainingError as error:
            raise ControlError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        respond(call, self._proxy_state())

    async def _wait_idle(self, call: AwaitedExchange, uid: str) -> None:
        """Answer once backend `uid` has no request in flight, or at the time-out of the call."""
        in_flight = self._listeners.in_flight
        await _wait(call, in_flight.wait_idle(uid))
        respond(call, RequestsInFlight(in_flight=in_flight.counts().get(uid, 0)))

    async def _wait_busy(self, call: AwaitedExchange) -> None:
        """Answer once any backend has a request in flight, or at the time-out of the call."""
        in_flight = self._listeners.in_flight
        await _wait(call, in_flight.wait_busy())
        respond(call, RequestsInFlight(in_flight=sum(in_flight.counts().values())))

    async def _wait_demand(self, call: AwaitedExchange) -> None:
        """Answer with the demand once it is another one than `seen` in the query, or at the time-out of the call."""
        demand = self._listeners.demand
        seen = parse_qs(call.exchange.head.query).get("seen", ["0"])[0]
        if not seen.isdecimal():
            raise ControlError(HTTPStatus.BAD_REQUEST, "seen must be the number of changes of an earlier answer")
        await _wait(call, demand.wait_past(int(seen)))
        respond(call, demand.read())

    async def _watch_health(self, call: AwaitedExchange) -> None:
        """Send the health of each suspect backend, then each change, as lines of JSON, until the client hangs up.

        In pauses empty lines are sent, so that the client can tell a quiet proxy from a stuck one.
        """
        call.exchange.start(HTTPStatus.OK, b"Content-Type: application/x-ndjson\r\n")
        async with contextlib.aclosing(self._listeners.health.watch(_HEARTBEAT_SECONDS)) as changes:
            async for health in changes:
                call.exchange.write((msgspec.json.encode(health) if health else b"") + b"\n")
                await call.drain()

    def _clear_health(self, call: AwaitedExchange, uid: str) -> None:
        if not self._listeners.health.clear(uid):
            raise ControlError(HTTPStatus.NOT_FOUND, f"no backend {uid} is configured")
        respond(call, BackendHealth(uid))

    def _proxy_state(self) -> ProxyState:
        services, router = self._listeners.service_states(), self._listeners.router_state()
        return ProxyState(version=BUILD, pid=os.getpid(), services=services, router=router)


async def _wait(call: AwaitedExchange, awaited: Coroutine[Any, Any, None]) -> None:
    """Wait for `awaited`, at most for the seconds that the query of the call states. Raises ControlError."""
    try:
        timeout_seconds = float(parse_qs(call.exchange.head.query)["timeoutSeconds"][0])
    except (KeyError, ValueError) as error:
        awaited.close()  # otherwise Python would warn that it was never awaited
        raise ControlError(HTTPStatus.BAD_REQUEST, "timeoutSeconds must be a number of seconds") from error
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            await awaited
