"""Route requests on this machine to the engines: one endpoint for all services, by the `model` of each request.

The proxy is the agent's, with a router as one more listener. Behind the router, each service has its own listener, on a
port that the kernel chooses and with a token that only this process and the proxy have.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from msgspec import structs

from devices.sockets import LOOPBACK
from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from gateway.proxy.config import Backend, ListenerState, ProxyState, ServedModelFacts, ServiceListener
from kube.resources import ObjectKey
from metal_agent.assignments import Assignment
from metal_agent.options import StartError
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.exposure import ProxyExposure, ServicePort, proxy_config
from metal_agent.traffic.proxy_process import Proxy
from standalone.client_access import ClientAccess

ASLEEP_URL: Final = "http://asleep"
"""URL of an engine that is not loaded; nothing is sent there."""
_OTHER_PORT: Final = "give another port with --port"


class AbsentEngine(NamedTuple):
    """The state of a service that has no engine now, or may have none."""

    sleeping: tuple[Backend, ...] = ()
    """The engines that are loaded by a request; none: its requests are refused."""
    load_seconds: float = 0.0
    """Time in which they are probably loaded."""
    problem: str = ""
    """The reason why there is no engine."""


def add_absent(service: ServiceListener, absent: AbsentEngine | None) -> ServiceListener:
    """Return the configuration of a service whose requests wait for an engine, or are refused with the reason.

    Requests wait for an engine that is loaded on demand from the moment on when it is drained.
    """
    if absent is None:
        return service
    backends = service.backends
    if absent.sleeping:
        backends = tuple(
            structs.replace(backend, draining=False, asleep=True) if backend.draining else backend
            for backend in backends
        )
    return structs.replace(
        service,
        backends=backends or absent.sleeping,
        load_seconds=absent.load_seconds,
        problem=absent.problem,
    )


class StandaloneExposure(ProxyExposure):
    """Exposure of `runners` at `port` to the clients of `access`; once `abort` is set, no drain waits for requests."""

    def __init__(
        self, proxy: Proxy, runners: Mapping[str, Runner], port: int, access: ClientAccess, abort: asyncio.Event
    ) -> None:
        """Keep the proxy, the processes by uid, the endpoint's port and clients, and the event that ends draining."""
        super().__init__(proxy, runners)
        self.access = access
        self.control_socket = ""
        """The socket at which clients of Ollama's API have models added and removed."""
        self.forwarded_services: frozenset[ObjectKey] = frozenset()
        """The services whose requests are taken: an engine works on them, or they wait until it is loaded."""
        self.find_absent: Callable[[], Mapping[ObjectKey, AbsentEngine]] = dict
        """Returns the services that have no engine now, or may have none."""
        self.find_facts: Callable[[], Mapping[ObjectKey, ServedModelFacts]] = dict
        """Returns the facts of the model of each service, which clients of Ollama's API are shown."""
        self.router: ListenerState | None = None
        """The state of the endpoint, once the proxy is configured; `error` is the reason if it is not open."""
        self._port = port
        self._abort = abort
        self._token = secrets.token_urlsafe()
        """The secret with which the router of the proxy reaches the listener of each service."""

    @property
    def problem(self) -> str:
        """The reason why the endpoint is not open, with the way out; "" if it is open, or not configured yet."""
        return f"no endpoint: {self.router.error}; {self._way_out}" if self.router and self.router.error else ""

    @property
    def url(self) -> str:
        """The base URL for clients on this machine; "" while the endpoint is not open."""
        return self.access.build_url(self.router.port) if self.router and not self.router.error else ""

    @property
    def _way_out(self) -> str:
        is_default = self.access.address == LOOPBACK
        return _OTHER_PORT if is_default else f"{_OTHER_PORT}, or an address of this machine with --listen"

    def refuse_used_port(self) -> None:
        """Raise StartError if another program listens on the port, before any model is loaded."""
        address = self.access.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            socket.create_server((address, self._port), family=family).close()
        except OSError as error:
            raise StartError(f"no endpoint: {error.strerror}; {self._way_out}") from error

    async def read_state(self) -> ProxyState | None:
        """Return the proxy's own state; None while it does not answer."""
        try:
            return await self._proxy.client.state()
        except (ControlUnreachableError, ControlRefusedError):
            return None

    async def withdraw(self, assignment: Assignment, timeout_seconds: float) -> None:
        """Do nothing: only the proxy forwards to the process, and `drain` removes the process from the proxy."""

    async def _configure(self) -> bool:
        """Send the proxy a listener for each service, and the router before them that clients reach.

        Returns True if the state of the router, or the services that it can forward to, have changed.
        """
        # 1. Build the configuration. grouped: the processes of each service
        grouped, absent = self.services(), self.find_absent()
        # _token: the secret by which the listeners of the services know the router.
        ports = dict.fromkeys([*grouped, *absent], ServicePort(port=0, token=self._token))  # 0: the kernel chooses
        config = proxy_config(LOOPBACK, grouped, ports, self._draining)
        by_name = {str(key): engine for key, engine in absent.items()}
        facts = {str(key): facts for key, facts in self.find_facts().items()}
        config = structs.replace(
            config,
            services=tuple(
                structs.replace(add_absent(service, by_name.get(service.name)), facts=facts.get(service.name))
                for service in config.services
            ),
            router=structs.replace(self.access.build_listener(self._port), control_socket=self.control_socket),
        )

        # 2. Send it, and keep what the proxy answers.
        before = self.router, self.forwarded_services
        state = await self._proxy.client.configure(config)
        self.router = state.router  # where clients connect, or why it is not open
        taking = {
            service.name
            for service in state.services
            if not service.error and any(not backend.draining for backend in service.backends)
        }
        self.forwarded_services = frozenset(key for key in ports if str(key) in taking)
        return (self.router, self.forwarded_services) != before

    async def _wait_idle(self, uid: str, timeout_seconds: float) -> bool:
        """Wait until a process has no request; return False after the timeout, or if the user aborts."""
        idle = asyncio.create_task(self._proxy.client.wait_idle(uid, timeout_seconds))
        abort = asyncio.create_task(self._abort.wait())  # set when the user does not wait for requests
        try:
            await asyncio.wait({idle, abort}, return_when=asyncio.FIRST_COMPLETED)
            return idle.done() and idle.result()
        finally:
            idle.cancel()
            abort.cancel()
