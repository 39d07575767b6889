"""The listening sockets, one per service, moved from what is bound to what is wanted.

Only what differs is touched: a service whose address and port stay keeps its socket and its streams whatever else
changes, and takes new requests to its new backends from the next one on.
"""

import asyncio
import errno
import os
from collections.abc import Iterable, Mapping

import aiohttp
import msgspec
import structlog
from aiohttp import web
from msgspec import structs

from gateway.proxy import forward
from gateway.proxy.balance import InFlight
from gateway.proxy.config import BackendState, ListenerState, ProxyConfig, ServiceListener

# What a client keeps open between requests costs us a descriptor; longer than common load balancers keep theirs.
_KEEP_ALIVE_SECONDS = 75.0

_log = structlog.get_logger()


class Plan(msgspec.Struct, frozen=True):
    """The difference between what is bound and what is wanted. Unbind first: ports may change hands."""

    unbind: tuple[str, ...]
    bind: tuple[ServiceListener, ...]
    update: tuple[ServiceListener, ...]


def plan(bound: Mapping[str, ServiceListener], wanted: Iterable[ServiceListener]) -> Plan:
    """Compare by name, address and port; `bound` holds only what really listens, so a failed bind is tried again."""
    stay: list[ServiceListener] = []
    bind: list[ServiceListener] = []
    for service in wanted:
        current = bound.get(service.name)
        same_place = current is not None and (current.address, current.port) == (service.address, service.port)
        (stay if same_place else bind).append(service)
    kept = {service.name for service in stay}
    return Plan(unbind=tuple(name for name in bound if name not in kept), bind=tuple(bind), update=tuple(stay))


class Listener:
    """One service's socket. `service` may be replaced at any time; running requests keep what they started with."""

    def __init__(self, service: ServiceListener, in_flight: InFlight, session: aiohttp.ClientSession) -> None:
        self.service = service
        self._in_flight = in_flight
        self._session = session
        server = web.Server(
            self._answer,
            handler_cancellation=True,  # a client that hangs up cancels the work
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=None)
        self.port = service.port

    async def bind(self) -> None:
        """Start to listen; `port` is then the bound one. Raises OSError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.service.address, self.service.port)
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
        return await forward.answer(request, lambda: self.service, self._in_flight, self._session)


class Listeners:
    """All listeners of the proxy. `tasks` owns those that are unbound and still finishing."""

    def __init__(self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        self.in_flight = InFlight()
        self._session = session
        self._tasks = tasks
        self._bound: dict[str, Listener] = {}
        self._failed: dict[str, ListenerState] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    async def configure(self, config: ProxyConfig) -> None:
        """Make `config` so. A service that cannot be bound is reported by `state`, and does not stop the others."""
        async with self._one_at_a_time:
            change = plan({name: listener.service for name, listener in self._bound.items()}, config.services)
            self._failed.clear()
            for name in change.unbind:
                await self._unbind(name)
            for service in change.update:
                self._bound[service.name].service = service
            for service in change.bind:
                await self._bind(service)

    def state(self) -> tuple[ListenerState, ...]:
        """Return every configured service as it is, by name."""
        bound = [self._describe(listener.service, listener.port, "") for listener in self._bound.values()]
        return tuple(sorted([*bound, *self._failed.values()], key=lambda service: service.name))

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

    async def _bind(self, service: ServiceListener) -> None:
        listener = Listener(service, self.in_flight, self._session)
        try:
            await listener.bind()
        except OSError as error:
            # asyncio's own text repeats the address; a name that does not resolve has no errno of the system.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            message = f"cannot listen on {service.address} port {service.port}: {reason}"
            failed = self._describe(service, service.port, message)
            self._failed[service.name] = structs.replace(failed, taken=error.errno == errno.EADDRINUSE)
            _log.error("listener not bound", service=service.name, error=message)
            await listener.finish()
            return
        self._bound[service.name] = listener
        _log.info("listener bound", service=service.name, address=service.address, port=listener.port)

    async def _unbind(self, name: str) -> None:
        listener = self._bound.pop(name)
        await listener.unbind()
        task = self._tasks.create_task(_finish(name, listener))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        _log.info("listener unbound", service=name, port=listener.port)

    def _describe(self, service: ServiceListener, port: int, error: str) -> ListenerState:
        counts = self.in_flight.counts()
        backends = tuple(
            BackendState(
                uid=backend.uid, url=backend.url, draining=backend.draining, in_flight=counts.get(backend.uid, 0)
            )
            for backend in service.backends
        )
        return ListenerState(name=service.name, address=service.address, port=port, error=error, backends=backends)


async def _finish(name: str, listener: Listener) -> None:
    try:
        await listener.finish()
    except Exception:  # noqa: BLE001 - a task's end: one bad connection must not take the other services' streams along
        _log.exception("listener not closed cleanly", service=name)
