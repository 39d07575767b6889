"""Brings requests to the processes and keeps them away: the proxy's configuration and the slices that lead to it.

An endpoint is ready only when all of it is true at once: the engine generated a token, the proxy listens and has the
engine and the service's token, and the cluster holds this host for alive. What stops is withdrawn first.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from gateway.proxy.client import ProxyClient, ProxyRefusedError, ProxyUnreachableError
from gateway.proxy.config import Backend, ProxyConfig, ProxyState, ServiceListener, Tls
from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from metal_agent.assignments import Assignment
from metal_agent.endpoints import Endpoints, Member, Service, desired
from metal_agent.freshness import Clocks, Freshness
from metal_agent.ports import NoPortError, Ports
from metal_agent.proxy import Proxy
from metal_agent.runner import Runner

WITHDRAW_SECONDS: Final = 5.0
"""For a withdrawal that the API server does not answer; what was to stop then stops, and requests fail at the proxy."""
LINGER_SECONDS: Final = 2.0
"""For who still sends requests here to hear of the withdrawal; kube-proxy takes changes at most once a second."""
_PORTS_TRIED: Final = 8
"""In one go; what is taken then too is tried later, and the other services need not wait for it."""
_ABSENT = frozenset({"Rejected", "Stopped"})

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Place:
    """One service on this host as the proxy is to serve it."""

    port: int
    token: str


def proxy_config(
    address: str,
    grouped: Mapping[Service, Collection[Runner]],
    places: Mapping[Service, Place],
    closed: Collection[str] = (),
    tls: Tls | None = None,
) -> ProxyConfig:
    """The whole configuration: a service without a place, for its port or token is not known, is not served.

    What is in `closed`, by uid, gets nothing new.
    """
    return ProxyConfig(
        tuple(
            ServiceListener(
                name="/".join(service),
                address=address,
                port=place.port,
                token=place.token,
                backends=tuple(
                    Backend(
                        runner.assignment.uid,
                        runner.url,
                        draining=runner.assignment.uid in closed,
                        concurrency=runner.assignment.spec.parallel if runner.assignment.spec else None,
                        model=runner.model,
                        api_key=runner.api_key,
                    )
                    for runner in grouped[service]
                    if runner.url
                ),
            )
            for service, place in sorted(places.items())
        ),
        tls=tls,
    )


def accepted(state: ProxyState, address: str) -> frozenset[str]:
    """The uids to which the proxy sends new requests that come to `address`."""
    return frozenset(
        backend.uid
        for service in state.services
        if not service.error and service.address == address
        for backend in service.backends
        if not backend.draining
    )


def in_flight(state: ProxyState | None, uid: str) -> int | None:
    """Count the requests that a process answers by what the proxy said; None: nobody knows."""
    backends = [backend for service in state.services for backend in service.backends] if state else []
    return next((backend.in_flight for backend in backends if backend.uid == uid), None)


async def idle_seconds(proxy: ProxyClient) -> dict[str, float | None]:
    """Ask the proxy since when each process answers nothing, by uid; None was never asked anything.

    Empty when the proxy does not answer.
    """
    try:
        state = await proxy.state()
    except (ProxyUnreachableError, ProxyRefusedError) as error:
        log.warning("not known who is idle", error=str(error))
        return {}
    return {backend.uid: backend.idle_seconds for service in state.services for backend in service.backends}


class Exposed:
    """What of `runners` is reachable at `address`, through `proxy` and the slices of `host`."""

    def __init__(
        self,
        *,
        client: Client,
        host: str,
        address: str,
        proxy: Proxy,
        ports: Ports,
        runners: Mapping[str, Runner],
        secret: Callable[[str, str], str | None],
        tls: Tls | None = None,
    ) -> None:
        self.freshness = Freshness()
        self.suspended: frozenset[str] = frozenset()
        """Known here and missing in the fresh list: about to be removed, and served elsewhere."""
        self.accepted: frozenset[str] | None = None
        """What the proxy serves; None before its first answer: then slices stay as an earlier agent left them."""
        self._closed: set[str] = set()
        self._problems: dict[Service, str] = {}
        self._host = host
        self.address = address
        self._proxy = proxy
        self._ports = ports
        self._runners = runners
        self._secret = secret
        self._tls = tls
        self._configuring = asyncio.Lock()
        self.endpoints = Endpoints(client, host, self._slice)

    def move(self, address: str) -> None:
        """Serve at another address from now on, where nothing is ready before the proxy listens there."""
        self.address = address
        self.accepted = frozenset()

    def port(self, service: Service) -> int | None:
        """Return the port of `service` on the host's address."""
        return self._ports.get("/".join(service))

    def services(self) -> dict[Service, list[Runner]]:
        """Group what is here by service."""
        grouped: defaultdict[Service, list[Runner]] = defaultdict(list)
        for runner in self._runners.values():
            service = runner.assignment.service
            # What no cluster has claimed serves nobody, and its namespace is none of a cluster's.
            if service and runner.state.phase not in _ABSENT and not runner.assignment.is_standalone:
                grouped[service].append(runner)
        return grouped

    def problem(self, service: Service) -> str:
        """Say why `service` cannot be reached on this host although its engine is ready; empty when it can."""
        if self.accepted is not None and not self._proxy.answers:
            return "the proxy of this host does not run; it is started again"
        return self._problems.get(service, "")

    async def configure(self) -> bool:
        """Tell the proxy everything; answers whether what it serves, or does not and why, has changed.

        Raises ProxyUnreachableError and ProxyRefusedError.
        """
        async with self._configuring:
            before = self.accepted, self._problems
            stopping = {uid for uid, runner in self._runners.items() if runner.state.phase == "Stopping"}
            self._closed &= stopping
            for _ in range(_PORTS_TRIED):
                grouped = self.services()
                places, problems = self._places(grouped)
                config = proxy_config(self.address, grouped, places, self._closed, self._tls)
                state = await self._proxy.client.configure(config)
                taken = [service.name for service in state.services if service.taken]
                # A port that another program holds is given up for the next one of the range.
                for name in taken:
                    log.warning("port taken by another program", service=name)
                    self._ports.refuse(name)
                if not taken:
                    break
            self.accepted = accepted(state, self.address)
            errors = {listener.name: listener.error for listener in state.services if listener.error}
            unbound = {service: errors["/".join(service)] for service in places if "/".join(service) in errors}
            self._problems = problems | unbound
            return (self.accepted, self._problems) != before

    @property
    def complete(self) -> bool:
        """Whether the proxy serves everything that is here, as far as it is known."""
        return not self._problems

    async def publish(self, service: Service) -> None:
        """Make the slice of `service` true, unless it is not known yet what is. Raises ApiError and Unreachable."""
        if self.accepted is not None and self.freshness.may_serve(clocks()):
            await self.endpoints.publish(service)

    async def withdraw(self, assignment: Assignment) -> None:
        """Route no new request to the process; an API server that does not answer is waited for a bounded time."""
        if assignment.service is None:
            return
        try:
            async with asyncio.timeout(WITHDRAW_SECONDS):
                await self.endpoints.publish(assignment.service)
        except (ApiError, Unreachable, TimeoutError) as error:
            log.warning("endpoint not withdrawn", service="/".join(assignment.service), error=str(error) or "time-out")

    async def drain(self, uid: str, timeout_seconds: float) -> None:
        """Give the process nothing new and wait until it answers nothing, for a bounded time."""
        service = self._runners[uid].assignment.service
        if not any(runner.state.phase == "Ready" for runner in self.services().get(service or ("", ""), ())):
            await asyncio.sleep(LINGER_SECONDS)
        self._closed.add(uid)
        try:
            await self.configure()
            if not await self._proxy.client.wait_idle(uid, timeout_seconds):
                log.warning("requests are broken off", uid=uid, after_seconds=timeout_seconds)
        except (ProxyUnreachableError, ProxyRefusedError) as error:
            log.warning("not drained", uid=uid, error=str(error))

    async def idle_seconds(self) -> dict[str, float | None]:
        """Ask the proxy since when each process answers nothing, by uid; None was never asked anything.

        Empty when the proxy does not answer.
        """
        return await idle_seconds(self._proxy.client)

    def requests(self, uid: str) -> int | None:
        """Count the requests that the process answered when the proxy was last asked; None: nobody knows."""
        return in_flight(self._proxy.state, uid)

    def _places(self, grouped: Mapping[Service, Collection[Runner]]) -> tuple[dict[Service, Place], dict[Service, str]]:
        """Find the place of each service, or why it has none."""
        places, problems = {}, {}
        for service, runners in grouped.items():
            try:
                port = self._ports.assign("/".join(service))
            except (NoPortError, OSError) as error:
                problems[service] = str(error)
                continue
            secret = next(runner.assignment.spec.token_secret for runner in runners if runner.assignment.spec)
            token = self._secret(service[0], secret)
            if token:
                places[service] = Place(port, token)
            else:
                problems[service] = f"the token in Secret {service[0]}/{secret} has not arrived on this host"
        return places, problems

    def _slice(self, service: Service) -> Obj | None:
        serving = (self.accepted or frozenset()) - self.suspended if self.freshness.may_serve(clocks()) else frozenset()
        members = [
            Member(
                uid=runner.assignment.uid,
                name=runner.assignment.name,
                ready=runner.state.phase == "Ready" and runner.proven and runner.assignment.uid in serving,
                stopping=runner.state.phase == "Stopping",
            )
            for runner in self.services().get(service, [])
        ]
        return desired(service, self._host, self.address, self.port(service), members, tls=self._tls is not None)


def clocks() -> Clocks:
    """Read both clocks."""
    return Clocks(time.monotonic(), time.time())
