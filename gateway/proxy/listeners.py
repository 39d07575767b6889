"""The listening sockets: one for each service and one for the router, bound and unbound as the configuration says.

Only the difference is applied: a service whose address and port stay the same keeps its socket and its streams,
whatever else changes, and sends its next request to its new backends.
"""

import asyncio
import errno
import logging
import os
import ssl
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import aiohttp
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import structs

from gateway.proxy.body_budget import BodyBudget
from gateway.proxy.config import BackendState, ListenerState, ProxyConfig, Tls
from gateway.proxy.handler import SharedResources, handle_request
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.metrics import ProxyMetrics, ServiceLoad
from gateway.proxy.router import ModelRouter, Router, SingleServiceRouter
from gateway.proxy.service import Service
from gateway.proxy.tls import ReloadedCertificate

# Longer than common load balancers keep idle connections, and bounded because each costs a descriptor. A connection on
# which no request begins, or whose first request does not complete its headers, has the same time.
_KEEP_ALIVE_SECONDS = 75.0
_ROUTER_NAME = ""

_log = structlog.get_logger()
_server_log = logging.getLogger(f"{__name__}.server")
"""aiohttp's own log of failed connections."""


def _remove_content(record: logging.LogRecord) -> bool:
    """Remove the bytes that aiohttp quotes from an invalid request: they may be a token, or part of a prompt."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args, record.exc_info = "request that is not HTTP: %s", (type(error).__name__,), None
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    return True


_server_log.addFilter(_remove_content)


class ListenAddress(NamedTuple):
    """The address and port of a listener, and its certificate."""

    address: str
    port: int
    tls: Tls | None = None


class ListenerPlan(NamedTuple):
    """The listeners to unbind, and then to bind: in this order, because a port may go from one to another."""

    unbind: tuple[str, ...]
    bind: tuple[str, ...]


def plan_listeners(bound: Mapping[str, ListenAddress], desired: Mapping[str, ListenAddress]) -> ListenerPlan:
    """Compare listeners by name and address; one that could not be bound is not in `bound`, so it is tried again."""
    return ListenerPlan(
        unbind=tuple(name for name, address in bound.items() if desired.get(name) != address),
        bind=tuple(name for name, address in desired.items() if bound.get(name) != address),
    )


class Listener:
    """One listening socket, whose requests go to `router`."""

    def __init__(
        self,
        address: ListenAddress,
        router: Router,
        shared: SharedResources,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.address = address
        self.port = address.port
        self._router = router
        self._shared = shared
        self._context = context
        server = web.Server(
            self._handle,
            handler_cancellation=True,  # a client that hangs up cancels its request
            auto_decompress=False,
            access_log=None,
            logger=_server_log,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=None)

    async def bind(self) -> None:
        """Start listening; `port` is then the bound one. Raises OSError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.address.address, self.address.port, ssl_context=self._context)
        await site.start()
        self.port = site.port

    async def unbind(self) -> None:
        """Stop listening at once; running requests go on."""
        for site in self._runner.sites:
            await site.stop()

    async def finish(self) -> None:
        """After `unbind`: close idle connections and wait until the last running request has ended."""
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        return await handle_request(request, self._router, self._shared)


class Listeners:
    """All listeners of the proxy. `tasks` owns those that are unbound and still have running requests."""

    def __init__(self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        self.in_flight = InFlight()
        self.health = HealthMonitor()
        self._shared = SharedResources(self.in_flight, BodyBudget(), session, self.health)
        self.metrics = ProxyMetrics(self._service_loads)
        self._tasks = tasks
        self._config = ProxyConfig()
        self._services: dict[str, Service] = {}
        self._model_router = ModelRouter(self._services)
        self._bound: dict[str, Listener] = {}
        self._failed: dict[str, OSError] = {}
        self._certificate: ReloadedCertificate | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self._configuring = asyncio.Lock()

    async def configure(self, config: ProxyConfig) -> None:
        """Apply `config`. A listener that cannot be bound is reported in its state, and does not stop the others."""
        async with self._configuring:
            desired = {each.name: ListenAddress(each.address, each.port, config.tls) for each in config.services}
            if config.router:
                desired[_ROUTER_NAME] = ListenAddress(config.router.address, config.router.port, config.tls)
            change = plan_listeners({name: listener.address for name, listener in self._bound.items()}, desired)
            for name in change.unbind:
                await self._unbind(name)
            self._configure_services(config)
            self._failed.clear()
            for name in change.bind:
                await self._bind(name, desired[name])

    def service_states(self) -> tuple[ListenerState, ...]:
        """Return the state of every configured service, sorted by name."""
        return tuple(self._service_state(self._services[name]) for name in sorted(self._services))

    def router_state(self) -> ListenerState | None:
        """Return the state of the router, if one is configured."""
        router = self._config.router
        return self._listener_state(_ROUTER_NAME, router.address, router.port) if router else None

    async def drain(self, timeout_seconds: float) -> None:
        """Stop listening, give running requests `timeout_seconds`, then break them off."""
        await self.configure(ProxyConfig())
        if not self._finishing:
            return
        _, late = await asyncio.wait(self._finishing, timeout=timeout_seconds)
        if late:
            _log.warning("requests_broken_off", requests=sum(self.in_flight.counts().values()))
        for task in late:
            task.cancel()

    def _configure_services(self, config: ProxyConfig) -> None:
        """Add, update and remove services as `config` says."""
        self._config = config
        self._model_router.token = config.router.token if config.router else None
        names = {each.name for each in config.services}
        for name in [name for name in self._services if name not in names]:
            self._services.pop(name).remove()
        for each in config.services:
            if each.name in self._services:
                self._services[each.name].update(each)
            else:
                self._services[each.name] = Service(each, self.in_flight, self.metrics)
        backends = [backend for each in config.services for backend in each.backends]
        self.in_flight.forget_others({backend.uid for backend in backends})
        self.health.configure(backends)

    async def _bind(self, name: str, address: ListenAddress) -> None:
        try:
            context = self._tls_context(address.tls)
            one_service = name != _ROUTER_NAME
            router = SingleServiceRouter(self._services[name]) if one_service else self._model_router
            listener = Listener(address, router, self._shared, context)
            try:
                await listener.bind()
            except OSError:
                await listener.finish()
                raise
        except OSError as error:
            self._failed[name] = error
            _log.error("listener_not_bound", service=name or "router", error=_bind_error(address, error))
            return
        self._bound[name] = listener
        _log.info("listener_bound", service=name or "router", address=address.address, port=listener.port)

    async def _unbind(self, name: str) -> None:
        listener = self._bound.pop(name)
        await listener.unbind()
        task = self._tasks.create_task(_finish_requests(name, listener))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        _log.info("listener_unbound", service=name or "router", port=listener.port)

    def _tls_context(self, tls: Tls | None) -> ssl.SSLContext | None:
        """Return the TLS context of all listeners. Raises OSError."""
        if tls is None:
            return None
        if self._certificate is None or self._certificate.tls != tls:
            self._certificate = ReloadedCertificate(tls)
        return self._certificate.context

    def _service_loads(self) -> Iterator[ServiceLoad]:
        for name, service in self._services.items():
            yield ServiceLoad(name, service.queue.in_flight, service.queue.queued)

    def _service_state(self, service: Service) -> ListenerState:
        counts = self.in_flight.counts()
        backends = tuple(
            BackendState(
                uid=backend.uid,
                url=backend.url,
                draining=backend.draining,
                in_flight=counts.get(backend.uid, 0),
                idle_seconds=self.in_flight.idle_seconds(backend.uid),
            )
            for backend in service.config.backends
        )
        listener = self._listener_state(service.config.name, service.config.address, service.config.port)
        return structs.replace(listener, backends=backends, stats=service.stats)

    def _listener_state(self, name: str, address: str, port: int) -> ListenerState:
        error = self._failed.get(name)
        return ListenerState(
            name=name,
            address=address,
            port=self._bound[name].port if name in self._bound else port,
            error=_bind_error(ListenAddress(address, port, self._config.tls), error) if error else "",
            backends=(),
            port_taken=error is not None and error.errno == errno.EADDRINUSE,
        )


def _bind_error(address: ListenAddress, error: OSError) -> str:
    """Return a readable reason why nothing listens on `address`."""
    if isinstance(error, ssl.SSLError) or error.filename:
        return f"cannot use certificate {address.tls and address.tls.certificate} with its key: {error}"
    # asyncio's text repeats the address; on Linux the errno of a name that does not resolve is negative.
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return f"cannot listen on {address.address} port {address.port}: {reason}"


async def _finish_requests(name: str, listener: Listener) -> None:
    try:
        await listener.finish()
    except Exception:  # noqa: BLE001 - one bad connection must not end the other services' streams
        _log.exception("listener_not_closed_cleanly", service=name or "router")
