"""The listening sockets: one for each service and one for the router, bound and unbound as the configuration says.

Only the difference is applied: a service whose address and port stay the same keeps its socket and its streams,
whatever else changes, and sends its next request to its new backends.
"""

import asyncio
import errno
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from devices import limits
from gateway.event_log import log
from gateway.http.connection_table import ConnectionTable
from gateway.http.limits import ConnectionTimes, connection_caps
from gateway.http.listener import HttpListener
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.config import BackendState, ListenerState, ProxyConfig, Tls
from gateway.proxy.demand import DemandMonitor
from gateway.proxy.engine_metrics import EngineScraper, PodReports
from gateway.proxy.handler import handle_requests
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.inference_request import SharedResources
from gateway.proxy.keep_alive import KeepAlive
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.model_control import ServedModels
from gateway.proxy.ollama_api import OllamaApi
from gateway.proxy.request_body import BodyBudget
from gateway.proxy.router import ModelRouter, SingleServiceRouter
from gateway.proxy.service import Service
from gateway.proxy.tls import ReloadedCertificate

_ROUTER_NAME = ""
"""The router's name among listeners; no service has it."""


class DrainingError(Exception):
    """The proxy is stopping and takes no configuration."""


class ListenAddress(NamedTuple):
    """The address and port of a listener, and its certificate."""

    address: str
    port: int
    tls: Tls | None = None


class Listeners:
    """All listeners of the proxy. `tasks` owns those that are unbound and still have running requests.

    `engine_hangs` is given by the proxy of a pod, which answers the kubelet's liveness probe of the engine by it, and
    `engine_scraper` if that engine has metrics.
    """

    def __init__(
        self,
        pool: UpstreamPool,
        tasks: asyncio.TaskGroup,
        times: ConnectionTimes | None = None,
        *,
        engine_hangs: Callable[[], bool] | None = None,
        engine_scraper: EngineScraper | None = None,
    ) -> None:
        # State and memory that the requests to all services share. `in_flight` counts the requests of each backend.
        self.services: dict[str, Service] = {}
        """By name."""
        self.in_flight = InFlight(self._admit_waiting)
        self.health = HealthMonitor()
        self.demand = DemandMonitor(self.services, self.in_flight)
        self._shared = SharedResources(
            body_budget=BodyBudget(),
            scan_turns=asyncio.Lock(),
            pool=pool,
            health=self.health,
            keep_alive=KeepAlive(),
        )

        # The reports on an engine that only the proxy of a pod gives; None: this is the proxy of a host.
        self._pod = PodReports(self.services, engine_scraper, engine_hangs) if engine_hangs else None

        # The connections of all listeners: the times that each may take, and their number.
        self._times = times or ConnectionTimes()
        self._table = ConnectionTable(connection_caps(limits.descriptor_limit()), self._times.sweep_seconds)

        # The configuration, and what `_configure_services` makes of it.
        self.config = ProxyConfig()
        self._addresses: dict[str, ListenAddress] = {}  # of each listener of `config`, by its name
        self._services_by_backend: dict[str, Service] = {}  # by the uid of a backend: its queue gets free slots
        self._model_router = ModelRouter()  # finds the service for requests to the router's port

        # The listeners, by name of the service, "" for the router: those that listen where the configuration says, and
        # the errors of those that could not be bound.
        self._bound: dict[str, HttpListener] = {}
        self._bind_errors: dict[str, OSError] = {}
        self._certificate: ReloadedCertificate | None = None  # that of all listeners

        self.configuring = asyncio.Lock()
        """Held while the configuration changes, or must not change."""

        # The end: while the proxy is draining, it takes no configuration. Tasks wait for the last requests of listeners
        # that are unbound.
        self._draining = False
        self._tasks = tasks
        self._finishing: set[asyncio.Task[None]] = set()

    async def configure(self, config: ProxyConfig) -> None:
        """Apply `config`. A listener that cannot be bound is reported in its state, and does not stop the others.

        Raises DrainingError.
        """
        async with self.configuring:
            if self._draining:
                raise DrainingError("the proxy is stopping: its requests end, and it takes no configuration")
            await self._apply(config)

    def service_states(self) -> tuple[ListenerState, ...]:
        """Return the state of every configured service, sorted by name."""
        return tuple(self._service_state(self.services[name]) for name in sorted(self.services))

    def router_state(self) -> ListenerState | None:
        """Return the state of the router, if one is configured."""
        return self._listener_state(_ROUTER_NAME) if self.config.router else None

    async def take_over(self, config: ProxyConfig, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        """Begin with the configuration and the listening sockets of the proxy before."""
        async with self.configuring:
            self._configure_services(config)
            for name, address in _listen_addresses(config).items():
                if name in sockets:  # one that the proxy before could not bind waits for the next `configure`
                    self._bound[name] = self._create_listener(name, address)
                    self._bound[name].take_over(sockets[name])

    def sockets(self) -> list[tuple[str, socket.socket]]:
        """Return the listening sockets with the names of their listeners."""
        return [(name, sock) for name, listener in self._bound.items() for sock in listener.sockets]

    def release(self) -> None:
        """Leave listening to the proxy that has taken over; requests go on, also those that wait in queues."""
        self._draining = True
        for service in self.services.values():
            if service.is_asleep:
                service.queue.refuse_waiting(lambda _: False)  # this proxy is not told that an engine is loaded
            if service.sharing:
                service.queue.limit = -1  # the newer proxy reckons with the requests that are here, and with no more
        for name in list(self._bound):
            self._unbind(name, close_idle=any(service.sharing for service in self.services.values()))

    def unfinished_counts(self) -> dict[str, int]:
        """Return the requests by backend: those in flight, and those that wait for shared cells, and may follow."""
        services = self._services_by_backend
        waiting = {uid: service.queue.queued for uid, service in services.items() if service.sharing}
        return dict(Counter(self.in_flight.counts()) + Counter(waiting))

    async def wait_released(self, timeout_seconds: float) -> None:
        """After `release`, wait until the last request has ended, or for `timeout_seconds`."""
        if self._finishing:
            await asyncio.wait(self._finishing, timeout=timeout_seconds)

    async def drain(self, timeout_seconds: float) -> None:
        """Stop listening, refuse requests in queues, give running ones `timeout_seconds`, then break them off."""
        async with self.configuring:
            self._draining = True
            await self._apply(ProxyConfig())  # without services: unbinds all listeners, and refuses what waits
        await self._end_requests(timeout_seconds)

    async def finish(self, timeout_seconds: float) -> None:
        """Stop listening, give running requests and those that wait in queues this time, then break them off."""
        async with self.configuring:
            self._draining = True
            for name in list(self._bound):
                self._unbind(name)
        await self._end_requests(timeout_seconds)

    async def _end_requests(self, timeout_seconds: float) -> None:
        """Wait for the requests of listeners that are unbound, and break off those that are late."""
        if not self._finishing:  # no listener that is unbound has a request left
            return
        _, late = await asyncio.wait(self._finishing, timeout=timeout_seconds)
        if late:
            log.warning("requests_broken_off", requests=sum(self.in_flight.counts().values()))
        for task in late:
            task.cancel()

    async def _apply(self, config: ProxyConfig) -> None:
        """Unbind, configure and bind what differs between the current configuration and `config`."""
        addresses, desired = self._addresses, _listen_addresses(config)
        # Unbound first, because a port may go from one listener to another.
        for name in list(self._bound):
            if desired.get(name) != addresses[name]:
                self._unbind(name)
        self._configure_services(config)
        self._bind_errors.clear()
        for name, address in desired.items():
            if name not in self._bound:
                await self._bind(name, address)

    def _configure_services(self, config: ProxyConfig) -> None:
        """Add, update and remove services as `config` says."""
        self.config, self._addresses = config, _listen_addresses(config)

        # 1. The services: those that are gone refuse what waits in their queues.
        names = {service.name for service in config.services}
        for name in [name for name in self.services if name not in names]:
            self.services.pop(name).queue.refuse_waiting(lambda _: False)
        for service in config.services:
            if service.name in self.services:
                self.services[service.name].update(service)
            else:
                self.services[service.name] = Service(service, self.in_flight, self.demand.note)

        # 2. What follows from them: the way to a service by model, and the services and the health of the backends.
        self._model_router.configure(config.router, self.services)
        self._services_by_backend = {
            backend.uid: self.services[service.name] for service in config.services for backend in service.backends
        }
        backends = [backend for service in config.services for backend in service.backends]
        self.in_flight.forget_others({backend.uid for backend in backends})  # keeps only their last ends
        self.health.configure(backends)
        self.demand.configure()

    def _admit_waiting(self, uid: str) -> None:
        """Give the slot of backend `uid`, which has become free, to the service that has the backend now."""
        if service := self._services_by_backend.get(uid):
            service.queue.admit_waiting()
        self.demand.note_end(uid)

    async def _bind(self, name: str, address: ListenAddress) -> None:
        """Make a listener and let it listen; a failure is logged, and kept for the state of the listener."""
        try:
            listener = self._create_listener(name, address)
            await listener.bind(address.address, address.port)
        except OSError as error:
            self._bind_errors[name] = error
            log.error("listener_not_bound", service=name or "router", error=_explain_bind_error(address, error))
            return
        self._bound[name] = listener
        log.info("listener_bound", service=name or "router", address=address.address, port=listener.port)

    def _create_listener(self, name: str, address: ListenAddress) -> HttpListener:
        """Return a listener for a service or the router. Raises OSError."""
        if name == _ROUTER_NAME:
            control = ServedModels(Path(self.config.router.control_socket if self.config.router else ""))
            handling = handle_requests(self._model_router, self._shared, ollama=OllamaApi(self._shared, control))
        else:
            handling = handle_requests(SingleServiceRouter(self.services[name]), self._shared, self._pod)
        return HttpListener(handling, self._table, self._times, self._load_tls_context(address.tls))

    def _unbind(self, name: str, *, close_idle: bool = True) -> None:
        """Stop listening at once; a task waits until the last request of the listener has ended.

        Without `close_idle`, a connection that has no request may send one more.
        """
        listener = self._bound.pop(name)
        log.info("listener_unbound", service=name or "router", port=listener.port)
        listener.unbind(close_idle=close_idle)
        task = self._tasks.create_task(_finish_requests(name, listener))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    def _load_tls_context(self, tls: Tls | None) -> ssl.SSLContext | None:
        """Return the TLS context of all listeners; read the certificate if it is another one. Raises OSError."""
        if tls is None:
            return None
        if self._certificate is None or self._certificate.tls != tls:
            self._certificate = ReloadedCertificate(tls)
        return self._certificate.context

    def _service_state(self, service: Service) -> ListenerState:
        """Return the state of a service: its listener, its backends with their requests, and its counts."""
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
        listener = self._listener_state(service.config.name)
        return structs.replace(listener, backends=backends, stats=service.stats)

    def _listener_state(self, name: str) -> ListenerState:
        """Return the state of the listener of a service or the router, without backends and counts."""
        address, error = self._addresses[name], self._bind_errors.get(name)
        return ListenerState(
            name=name,
            address=address.address,
            port=self._bound[name].port if name in self._bound else address.port,
            error=_explain_bind_error(address, error) if error else "",
            backends=(),
            port_taken=error is not None and error.errno == errno.EADDRINUSE,
        )


def _listen_addresses(config: ProxyConfig) -> dict[str, ListenAddress]:
    """Return the address of each listener by its name."""
    addresses = {service.name: ListenAddress(service.address, service.port, config.tls) for service in config.services}
    if config.router:
        addresses[_ROUTER_NAME] = ListenAddress(config.router.address, config.router.port, config.tls)
    return addresses


def _explain_bind_error(address: ListenAddress, error: OSError) -> str:
    """Return a readable reason why nothing listens on `address`."""
    is_about_certificate = isinstance(error, ssl.SSLError) or error.filename  # a file could not be read or used
    if is_about_certificate:
        certificate = address.tls.certificate if address.tls else None
        return f"cannot use certificate {certificate} with its key: {error}"
    # The number of a name that does not resolve is none of errno's; on macOS it looks like one.
    number = None if isinstance(error, socket.gaierror) else error.errno
    reason = os.strerror(number) if number is not None else error.strerror or str(error)
    return f"cannot listen on {address.address} port {address.port}: {reason}"


async def _finish_requests(name: str, listener: HttpListener) -> None:
    """Wait until the last request of an unbound listener has ended; log a failure of that."""
    try:
        await listener.finish()
    except Exception:  # noqa: BLE001 - one bad connection must not end the other services' streams
        log.exception("listener_not_closed_cleanly", service=name or "router")
