"""Expose this host's services to the cluster: each with a port of the proxy, and an EndpointSlice with that port.

An endpoint is ready only while all of this is true: the engine has generated a token, the proxy listens and has the
engine and the service's token, and the cluster considers this host alive. A process is withdrawn before it stops.

A service keeps its port over restarts, because EndpointSlices and firewalls name it.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import structlog

from artifacts import durable
from gateway.proxy.config import Tls
from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from kube.resources import ObjectKey
from metal_agent.assignments import Assignment
from metal_agent.cluster.endpoint_slices import Clocks, Endpoints, Freshness, SliceMember, build_slice
from metal_agent.cluster.host_tokens import HostTokens
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.exposure import ProxyExposure, ServicePort, proxy_config, reachable_uids
from metal_agent.traffic.process_traffic import TrafficReport
from metal_agent.traffic.proxy_process import Proxy

LINGER_SECONDS: Final = 2.0
"""Time for clients to notice a withdrawal; kube-proxy applies changes at most once a second."""
_PORTS_TRIED: Final = 8
"""Ports tried in a row for a service; if all are taken, it is tried again later, and others need not wait for it."""

log = structlog.get_logger()


class NoPortError(Exception):
    """Every port of the range is assigned to a service or taken by another program."""


class ServicePorts:
    """The ports `first` to `last`, by service as `<namespace>/<service>`, kept in the file `path`."""

    def __init__(self, path: Path, first: int, last: int) -> None:
        """Read the ports that services had before; those outside of the range are forgotten."""
        self._path = path
        self._range = range(first, last + 1)
        kept = durable.read(path, dict[str, int]) or {}
        self._assigned = {service: port for service, port in kept.items() if port in self._range}
        self._foreign: set[int] = set()
        """Ports that were taken by other programs when the proxy tried them; all are tried again when none is left."""
        self.on_assign: Callable[[int], None] = lambda _port: None
        """Called with a port that a service gets, which this agent must not use for anything else any more."""

    def get(self, service: str) -> int | None:
        """Return the port of `service`, or None if it has none."""
        return self._assigned.get(service)

    def assign(self, service: str) -> int:
        """Return the port of `service`; a new one is written to disk first. Raises NoPortError and OSError.

        `on_assign` is called with a new port.
        """
        if service in self._assigned:
            return self._assigned[service]

        assigned = set(self._assigned.values())
        unassigned = [port for port in self._range if port not in assigned]
        # _foreign: ports that other programs had when the proxy tried them.
        if self._foreign.issuperset(unassigned):
            # Other programs may have left their ports meanwhile; a port that is still taken is refused again.
            self._foreign.clear()

        port = next((port for port in unassigned if port not in self._foreign), None)
        if port is None:
            ports = f"{self._range.start}-{self._range.stop - 1}"
            raise NoPortError(f"no port of --port-range {ports} is free for {service}: widen it")

        durable.write(self._path, {**self._assigned, service: port})
        self._assigned[service] = port
        self.on_assign(port)
        return port

    def list_spare(self) -> list[int]:
        """Return ports that no service has, the last one first; the first one of the range is left to services."""
        assigned = set(self._assigned.values())
        return [port for port in reversed(self._range[1:]) if port not in assigned][:_PORTS_TRIED]

    def refuse(self, service: str) -> None:
        """Take away the port of `service`, which another program uses; no other service gets that port either."""
        if (port := self._assigned.pop(service, None)) is not None:
            self._foreign.add(port)

    def keep(self, services: set[str]) -> None:
        """Forget every service that is not in `services`. Raises OSError."""
        if not self._assigned.keys() <= services:
            self._assigned = {service: port for service, port in self._assigned.items() if service in services}
            durable.write(self._path, self._assigned)


class ClusterExposure(ProxyExposure):
    """The exposure of the processes in `runners` at `address`, through `proxy` and the EndpointSlices of `host`.

    Args:
        client: writes the slices.
        host: the name of this host.
        address: the address on which the proxy listens, and that the slices name.
        proxy: the proxy of this host.
        ports: the ports of the services.
        runners: the processes by uid.
        tokens: the tokens of the services.
        tls: certificate and key of the listeners; None for plain HTTP.
    """

    def __init__(
        self,
        *,
        client: Client,
        host: str,
        address: str,
        proxy: Proxy,
        ports: ServicePorts,
        runners: Mapping[str, Runner],
        tokens: HostTokens,
        tls: Tls | None = None,
    ) -> None:
        """Expose nothing so far: no endpoint is ready before the proxy has answered and the assignments are listed."""
        super().__init__(proxy, runners)
        self.traffic = TrafficReport(runners, proxy.service_rates)  # of each process, for its status

        # Conditions of ready endpoints, beside the state of the process.
        self.freshness = Freshness()  # of the Lease and the assignments: without it no endpoint is ready
        self.suspended: frozenset[str] = frozenset()
        """Uids of processes that run here but are not in the fresh list: about to be removed, and served elsewhere."""
        self.proxied_uids: frozenset[str] | None = None
        """Uids of processes that the proxy serves; None before its first answer: slices are kept until then."""
        self.address = address
        self._is_leaving = False
        """True once this machine shuts down: no endpoint becomes ready any more."""
        self.endpoints = Endpoints(client, host, self._build_wanted_slice)
        self._problems: dict[ObjectKey, str] = {}
        """The reason why the proxy does not serve a service: it has no port, no token, or cannot bind the port."""
        self._host, self._tls = host, tls
        self._ports, self._tokens = ports, tokens  # of the services: ports on this host, and bearer tokens

    def move(self, address: str) -> None:
        """Serve at another address from now on; no endpoint is ready before the proxy listens there."""
        self.address = address
        self.proxied_uids = frozenset()

    def find_port(self, service: ObjectKey) -> int | None:
        """Return the port of `service` on the host's address, or None if it has none."""
        return self._ports.get(str(service))

    def find_problem(self, service: ObjectKey) -> str:
        """Return the reason why `service` cannot be reached here although its engine is ready; empty if it can.

        The first that applies: the proxy has ceased to answer, does not serve the service, or the controller has not
        granted the slice.
        """
        has_answered_before = self.proxied_uids is not None
        if has_answered_before and not self._proxy.answers:
            return "the proxy of this host does not run; it is started again"
        # _problems: why the proxy does not serve it. The refusal: why its slice was not written.
        refusal = self.endpoints.refusals.get(service)
        return self._problems.get(service) or (refusal.message if refusal else "")

    @property
    def serves_all(self) -> bool:
        """True if the last configuration of the proxy left no service with a problem."""
        return not self._problems

    async def publish(self, service: ObjectKey) -> None:
        """Write the slice of `service` if the proxy has answered and `freshness` allows ready endpoints.

        Raises ApiError and Unreachable.
        """
        if self.proxied_uids is not None and self.freshness.may_serve(read_clocks()):
            await self.endpoints.publish(service)

    async def withdraw(self, assignment: Assignment, timeout_seconds: float) -> None:
        """Write the slice of the process's service, so that no new request is routed to the process.

        The slice follows the states of the processes: it is not ready any more, unless another process of the service
        is. The API server has a bounded time to accept that; an error is only logged. Without a service there is
        no slice.
        """
        if not assignment.service.name:
            return
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.endpoints.publish(assignment.service)
        except (ApiError, Unreachable, TimeoutError) as error:
            log.warning("endpoint_not_withdrawn", service=str(assignment.service), error=str(error) or "time-out")

    async def withdraw_all(self, timeout_seconds: float) -> None:
        """Make all endpoints of this host not ready until this agent ends; return once clients have noticed that.

        Until then the proxy accepts their requests.
        """
        self._is_leaving = True  # from now on no slice is ready
        served = [runners[0].assignment for runners in self.services().values()]
        await asyncio.gather(*(self.withdraw(assignment, timeout_seconds) for assignment in served))
        if served:
            await asyncio.sleep(LINGER_SECONDS)  # until clients have noticed it

    async def drain(self, uid: str, timeout_seconds: float) -> None:
        """Send the process no new request, and wait, for a bounded time, until it has none in progress.

        If no other process of the service is Ready here, it accepts requests until clients have noticed the withdrawal.
        """
        service = self._runners[uid].assignment.service
        if not any(runner.state.phase == "Ready" for runner in self.services().get(service, ())):
            linger_seconds = min(LINGER_SECONDS, timeout_seconds)
            await asyncio.sleep(linger_seconds)
            timeout_seconds -= linger_seconds  # which is a part of the drain
        await super().drain(uid, timeout_seconds)

    def _is_served(self, runner: Runner) -> bool:
        """Decide whether the process serves a service of the cluster."""
        # A standalone process that the cluster has not claimed serves no service of the cluster.
        return super()._is_served(runner) and not runner.assignment.is_standalone

    async def _configure(self) -> bool:
        """Send the proxy its configuration, then note which processes it serves and the problems of the others.

        Return True if either differs from before. If another program uses the port of a service, the service gets the
        next free one, and the configuration is sent again, up to `_PORTS_TRIED` times.
        """
        # proxied_uids: the processes that the proxy serves; _problems: why it does not serve a service.
        before = self.proxied_uids, self._problems
        for _ in range(_PORTS_TRIED):  # the last turn's ports, problems and state count
            grouped = self.services()
            ports, problems = self._assign_ports(grouped)
            # _draining: uids of processes that get no new request.
            config = proxy_config(self.address, grouped, ports, self._draining, self._tls)
            state = await self._proxy.client.configure(config)

            taken = [service.name for service in state.services if service.port_taken]
            for name in taken:
                log.warning("port_taken", service=name)
                self._ports.refuse(name)
            if not taken:
                break

        self.proxied_uids = reachable_uids(state, self.address)
        # `error`: why the proxy does not listen there. Such a service has a problem, like one without port or token.
        errors = {listener.name: listener.error for listener in state.services if listener.error}
        unbound = {service: errors[str(service)] for service in ports if str(service) in errors}
        self._problems = problems | unbound
        return (self.proxied_uids, self._problems) != before

    def _assign_ports(
        self, grouped: Mapping[ObjectKey, Collection[Runner]]
    ) -> tuple[dict[ObjectKey, ServicePort], dict[ObjectKey, str]]:
        """Return port and token of each service that has both, and the reason for each service that does not."""
        ports, problems = {}, {}
        for service, runners in grouped.items():
            try:
                port = self._ports.assign(str(service))
            except (NoPortError, OSError) as error:
                problems[service] = str(error)
                continue

            secret = next(iter(runners)).assignment.spec.token_secret  # all processes of a service have the same one
            token = self._tokens.read(service.namespace, secret)
            if token:
                ports[service] = ServicePort(port, token, self._tokens.read_previous(service.namespace, secret))
            else:
                problems[service] = f"the token in Secret {service.namespace}/{secret} has not arrived on this host"
        return ports, problems

    def _build_wanted_slice(self, service: ObjectKey) -> Obj | None:
        """Return the desired slice of a service; None if it has no process or no port here.

        A process is ready in it if
        1. the Lease is fresh and this machine does not shut down,
        2. its engine answers, or it is a predecessor that still serves (see below), and
        3. the proxy serves it, and it is not suspended: running here, but no longer assigned to this host.
        """
        # `serving` are the uids that fulfil conditions 1 and 3, `ready` those that fulfil 2.
        may_serve = self.freshness.may_serve(read_clocks()) and not self._is_leaving
        serving = (self.proxied_uids or frozenset()) - self.suspended if may_serve else frozenset()

        runners = self.services().get(service, [])
        ready = {runner.assignment.uid for runner in runners if runner.state.phase == "Ready" and runner.is_answering}
        is_successor_unproxied = bool(ready - serving)
        if is_successor_unproxied:
            # Until the proxy has the successor, it sends requests to the predecessor, which is Stopping. Both have the
            # same endpoint, the proxy's port, which would otherwise be not ready for some milliseconds.
            ready |= {runner.assignment.uid for runner in runners if runner.state.phase == "Stopping"}

        members = [
            SliceMember(
                uid=runner.assignment.uid,
                name=runner.assignment.name,
                ready=runner.assignment.uid in ready & serving,
                stopping=runner.state.phase == "Stopping",
            )
            for runner in runners
        ]
        return build_slice(
            service, self._host, self.address, self.find_port(service), members, tls=self._tls is not None
        )


def read_clocks() -> Clocks:
    """Return the present time of both clocks."""
    return Clocks(time.monotonic(), time.time())
