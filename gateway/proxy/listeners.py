"""The listening sockets, one per service and one of the router, moved from what is bound to what is wanted.

Only what differs is touched: a service whose address and port stay keeps its socket and its streams whatever else
changes, and takes new requests to its new backends from the next one on.
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

from gateway.proxy import forward
from gateway.proxy.balance import InFlight
from gateway.proxy.bodies import Bodies
from gateway.proxy.config import BackendState, ListenerState, ProxyConfig, Tls
from gateway.proxy.entrance import AllServices, Entrance, OneService
from gateway.proxy.metrics import Level, Metrics
from gateway.proxy.service import Service
from gateway.proxy.tls import Certificate

# What a client keeps open between requests costs us a descriptor; longer than common load balancers keep theirs. A
# connection on which no request begins, or whose first one does not get to the end of its headers, has the same time.
_KEEP_ALIVE_SECONDS = 75.0
_ROUTER = ""

_log = structlog.get_logger()
_server_log = logging.getLogger(f"{__name__}.server")
"""Where aiohttp says what it could not do with a connection."""


def _without_content(record: logging.LogRecord) -> bool:
    """Keep out what aiohttp quotes of a request that is not HTTP: it may be a token, or part of a prompt."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args, record.exc_info = "request that is not HTTP: %s", (type(error).__name__,), None
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    return True


_server_log.addFilter(_without_content)


class Place(NamedTuple):
    """Where something listens, and how."""

    address: str
    port: int
    tls: Tls | None = None


class Plan(NamedTuple):
    """The difference between what is bound and what is wanted. Unbind first: ports may change hands."""

    unbind: tuple[str, ...]
    bind: tuple[str, ...]


def plan(bound: Mapping[str, Place], wanted: Mapping[str, Place]) -> Plan:
    """Compare by name and place; `bound` holds only what really listens, so a failed bind is tried again."""
    return Plan(
        unbind=tuple(name for name, place in bound.items() if wanted.get(name) != place),
        bind=tuple(name for name, place in wanted.items() if bound.get(name) != place),
    )


class Listener:
    """One socket that leads to `entrance`."""

    def __init__(
        self,
        place: Place,
        entrance: Entrance,
        shared: forward.Shared,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.place = place
        self.port = place.port
        self._entrance = entrance
        self._shared = shared
        self._context = context
        server = web.Server(
            self._answer,
            handler_cancellation=True,  # a client that hangs up cancels the work
            auto_decompress=False,
            access_log=None,
            logger=_server_log,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=None)

    async def bind(self) -> None:
        """Start to listen; `port` is then the bound one. Raises OSError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.place.address, self.place.port, ssl_context=self._context)
        await site.start()
        self.port = site.port

    async def unbind(self) -> None:
        """Stop to listen, at once; what is being answered goes on."""
        for site in self._runner.sites:
            await site.stop()

    async def finish(self) -> None:
        """After `unbind`: close idle connections and wait until the last running request has ended."""
        await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        return await forward.answer(request, self._entrance, self._shared)


class Listeners:
    """All listeners of the proxy. `tasks` owns those that are unbound and still finishing."""

    def __init__(self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        self.in_flight = InFlight()
        self._shared = forward.Shared(self.in_flight, Bodies(), session)
        self.metrics = Metrics(self._levels)
        self._tasks = tasks
        self._config = ProxyConfig()
        self._services: dict[str, Service] = {}
        self._all = AllServices(self._services)
        self._bound: dict[str, Listener] = {}
        self._failed: dict[str, OSError] = {}
        self._certificate: Certificate | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    async def configure(self, config: ProxyConfig) -> None:
        """Make `config` so. A service that cannot be bound is reported by `state`, and does not stop the others."""
        async with self._one_at_a_time:
            wanted = {each.name: Place(each.address, each.port, config.tls) for each in config.services}
            if config.router:
                wanted[_ROUTER] = Place(config.router.address, config.router.port, config.tls)
            change = plan({name: listener.place for name, listener in self._bound.items()}, wanted)
            for name in change.unbind:
                await self._unbind(name)
            self._take(config)
            self._failed.clear()
            for name in change.bind:
                await self._bind(name, wanted[name])

    def state(self) -> tuple[ListenerState, ...]:
        """Return every configured service as it is, by name."""
        return tuple(self._describe(self._services[name]) for name in sorted(self._services))

    def router(self) -> ListenerState | None:
        """Return the router as it is, where one is wanted."""
        wanted = self._config.router
        return self._place(_ROUTER, wanted.address, wanted.port) if wanted else None

    async def drain(self, timeout_seconds: float) -> None:
        """Stop to listen, give running requests `timeout_seconds`, then break them off."""
        await self.configure(ProxyConfig())
        if not self._finishing:
            return
        _, late = await asyncio.wait(self._finishing, timeout=timeout_seconds)
        if late:
            _log.warning("requests broken off", requests=sum(self.in_flight.counts().values()))
        for task in late:
            task.cancel()

    def _take(self, config: ProxyConfig) -> None:
        """Hold what `config` says of services; what it does not name any more ends by itself."""
        self._config = config
        self._all.token = config.router.token if config.router else None
        names = {each.name for each in config.services}
        for name in [name for name in self._services if name not in names]:
            self._services.pop(name).leave()
        for each in config.services:
            if each.name in self._services:
                self._services[each.name].update(each)
            else:
                self._services[each.name] = Service(each, self.in_flight, self.metrics)
        self.in_flight.keep({backend.uid for each in config.services for backend in each.backends})

    async def _bind(self, name: str, place: Place) -> None:
        try:
            context = self._context(place.tls)
            entrance = self._all if name == _ROUTER else OneService(self._services[name])
            listener = Listener(place, entrance, self._shared, context)
            try:
                await listener.bind()
            except OSError:
                await listener.finish()
                raise
        except OSError as error:
            self._failed[name] = error
            _log.error("listener not bound", service=name or "router", error=_reason(place, error))
            return
        self._bound[name] = listener
        _log.info("listener bound", service=name or "router", address=place.address, port=listener.port)

    async def _unbind(self, name: str) -> None:
        listener = self._bound.pop(name)
        await listener.unbind()
        task = self._tasks.create_task(_finish(name, listener))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        _log.info("listener unbound", service=name or "router", port=listener.port)

    def _context(self, tls: Tls | None) -> ssl.SSLContext | None:
        """Return the context for `tls`, read once for all listeners. Raises OSError."""
        if tls is None:
            return None
        if self._certificate is None or self._certificate.tls != tls:
            self._certificate = Certificate(tls)
        return self._certificate.context

    def _levels(self) -> Iterator[Level]:
        for name, service in self._services.items():
            yield Level(name, service.turns.working, service.turns.queued)

    def _describe(self, service: Service) -> ListenerState:
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
        place = self._place(service.config.name, service.config.address, service.config.port)
        return structs.replace(place, backends=backends, stats=service.stats)

    def _place(self, name: str, address: str, port: int) -> ListenerState:
        error = self._failed.get(name)
        return ListenerState(
            name=name,
            address=address,
            port=self._bound[name].port if name in self._bound else port,
            error=_reason(Place(address, port, self._config.tls), error) if error else "",
            backends=(),
            taken=error is not None and error.errno == errno.EADDRINUSE,
        )


def _reason(place: Place, error: OSError) -> str:
    """Say why nothing listens."""
    if isinstance(error, ssl.SSLError) or error.filename:
        return f"cannot use certificate {place.tls and place.tls.certificate} with its key: {error}"
    # asyncio's own text repeats the address; a name that does not resolve has no errno of the system.
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return f"cannot listen on {place.address} port {place.port}: {reason}"


async def _finish(name: str, listener: Listener) -> None:
    try:
        await listener.finish()
    except Exception:  # noqa: BLE001 - a task's end: one bad connection must not take the other services' streams along
        _log.exception("listener not closed cleanly", service=name or "router")
