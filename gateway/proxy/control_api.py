"""The server side of the control API: the agent configures the proxy by it, and reads its state, metrics and health."""

import asyncio
import os
from http import HTTPStatus
from importlib import metadata
from typing import Final

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.proxy.config import BackendHealth, BackendIdle, ControlRefusal, ProxyConfig, ProxyState
from gateway.proxy.listeners import DrainingError, Listeners

_BODY_LIMIT_BYTES: Final = 16 << 20
_HEARTBEAT_SECONDS: Final = 5.0
"""The pause after which a stream of health has an empty line, so that each side notices that the other is gone."""


class ControlApi:
    """The paths of the control API of the proxy that has `listeners`; config.py has their messages."""

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners

    def application(self) -> web.Application:
        """Return the application that serves all paths."""
        application = web.Application(client_max_size=_BODY_LIMIT_BYTES)
        application.router.add_get("/state", self._state)
        application.router.add_put("/services", self._configure)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/backends/{uid}/idle", self._wait_idle)
        application.router.add_get("/backends/health", self._watch_health)
        application.router.add_post("/backends/{uid}/health", self._clear_health)
        return application

    async def _state(self, _: web.Request) -> web.Response:
        return _json_response(self._proxy_state())

    async def _configure(self, request: web.Request) -> web.Response:
        try:
            config = msgspec.json.decode(await request.read(), type=ProxyConfig)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _refuse(HTTPStatus.BAD_REQUEST, f"configuration refused: {error}")
        try:
            await self._listeners.configure(config)
        except DrainingError as error:
            return _refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        return _json_response(self._proxy_state())

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._listeners.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _wait_idle(self, request: web.Request) -> web.Response:
        uid = request.match_info["uid"]
        try:
            timeout_seconds = float(request.query["timeoutSeconds"])
        except (KeyError, ValueError):
            return _refuse(HTTPStatus.BAD_REQUEST, "timeoutSeconds must be a number of seconds")
        in_flight = self._listeners.in_flight
        try:
            async with asyncio.timeout(timeout_seconds):
                await in_flight.wait_idle(uid)
        except TimeoutError:
            pass
        return _json_response(BackendIdle(in_flight=in_flight.counts().get(uid, 0)))

    async def _watch_health(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        watch = self._listeners.health.watch()
        try:
            async for changes in watch.changes(_HEARTBEAT_SECONDS):
                await response.write(b"".join(msgspec.json.encode(health) + b"\n" for health in changes) or b"\n")
        except ConnectionError:
            pass  # the agent has hung up
        finally:
            watch.close()
        return response

    async def _clear_health(self, request: web.Request) -> web.Response:
        uid = request.match_info["uid"]
        if not self._listeners.health.clear(uid):
            return _refuse(HTTPStatus.NOT_FOUND, f"no backend {uid} is configured")
        return _json_response(BackendHealth(uid))

    def _proxy_state(self) -> ProxyState:
        return ProxyState(
            version=metadata.version("pomona"),
            pid=os.getpid(),
            services=self._listeners.service_states(),
            router=self._listeners.router_state(),
            hand_over=True,
        )


def _refuse(status: HTTPStatus, error: str) -> web.Response:
    return _json_response(ControlRefusal(error), status)


def _json_response(body: msgspec.Struct, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
