"""Route requests to the processes of a host, or keep requests away from them, by the configuration of its proxy.

`ProxyExposure` has the parts that every host needs: the choice of the processes that are served, draining, and the
proxy's counts. Its subclasses decide the listeners: a port for each service and EndpointSlices in a cluster, one
endpoint for all services on a machine without a cluster.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec
import structlog
from msgspec import structs

from crds.meta import PreviousToken
from crds.metalprocess import FurtherArtifact
from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from gateway.proxy.config import Backend, BackendAdapter, ProxyConfig, ProxyState, ServiceListener, Tls
from kube.resources import ObjectKey
from metal_agent.assignments import Assignment
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.proxy_process import Proxy
from runtimes.registry import find_runtime

_PROXY_BACK_SECONDS: Final = 30.0
"""Time in which a proxy that does not answer is back, or another one in its place."""
_ASK_AGAIN_SECONDS: Final = 1.0
_NOT_SERVED: Final = frozenset({"Rejected", "Stopped"})

log = structlog.get_logger()


class ServicePort(msgspec.Struct, frozen=True):
    """The port of one service on this host, and the token that its clients send."""

    port: int
    token: str
    previous: PreviousToken | None = None
    """The token before, while it is valid besides."""


class ProxyExposure(ABC):
    """The exposure of the processes in `runners`, by uid, through `proxy`."""

    def __init__(self, proxy: Proxy, runners: Mapping[str, Runner]) -> None:
        """Expose nothing before the first `configure`."""
        self._proxy = proxy
        self._runners = runners
        self._draining: set[str] = set()
        """The uids of processes that get no new request."""
        self._configure_lock = asyncio.Lock()  # one configuration at a time

    def services(self) -> dict[ObjectKey, list[Runner]]:
        """Return the processes that are served (all but Rejected and Stopped ones), grouped by their service."""
        grouped: defaultdict[ObjectKey, list[Runner]] = defaultdict(list)
        for runner in self._runners.values():
            service = runner.assignment.service
            if service.name and self._is_served(runner):  # a spec that cannot be read names no service
                grouped[service].append(runner)
        return grouped

    async def configure(self) -> bool:
        """Send the proxy its whole configuration; return True if the outcome differs from the one before.

        Raises ControlUnreachableError and ControlRefusedError.
        """
        async with self._configure_lock:
            # An evicted process may be back: only a process that is Stopping still drains.
            self._draining &= {uid for uid, runner in self._runners.items() if runner.state.phase == "Stopping"}
            return await self._configure()

    @abstractmethod
    async def withdraw(self, assignment: Assignment, timeout_seconds: float) -> None:
        """Remove the process from all places where clients find it, except the proxy; bounded in time, never raises."""

    async def drain(self, uid: str, timeout_seconds: float) -> None:
        """Send the process no new request, and wait until it has none in progress, but not beyond the time-out.

        Errors of the proxy are retried, with its configuration sent anew, since it may have been replaced. A proxy that
        fails for 30 s is not coming back: then the drain is given up, too.
        """
        self._draining.add(uid)  # the next configuration stops new requests to it

        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        failing_since: float | None = None

        while True:
            tried_at = loop.time()
            try:
                await self.configure()
                is_idle = await self._wait_idle(uid, max(0.0, deadline - loop.time()))
            except (ControlUnreachableError, ControlRefusedError) as error:
                now = loop.time()
                # A call that failed after a long wait is the first failure: the proxy may have answered until then.
                if failing_since is None or now - tried_at > _PROXY_BACK_SECONDS:
                    failing_since = now
                if now >= deadline or now >= failing_since + _PROXY_BACK_SECONDS:
                    log.warning("drain_failed", uid=uid, error=str(error))
                    return
                await asyncio.sleep(_ASK_AGAIN_SECONDS)
            else:
                if not is_idle:  # the time is up
                    log.warning("requests_aborted", uid=uid, after_seconds=timeout_seconds)
                return

    async def idle_seconds(self) -> dict[str, float | None]:
        """Return, by uid, the seconds that each process has been without a request; None if it never had one.

        Empty if the proxy does not answer.
        """
        try:
            state = await self._proxy.client.state()
        except (ControlUnreachableError, ControlRefusedError) as error:
            log.warning("idle_seconds_unknown", error=str(error))
            return {}
        return {backend.uid: backend.idle_seconds for service in state.services for backend in service.backends}

    async def wait_request(self, timeout_seconds: float) -> bool:
        """Wait until any process gets a request; return False after the time-out.

        Raises ControlUnreachableError and ControlRefusedError.
        """
        return await self._proxy.client.wait_busy(timeout_seconds)

    def requests(self, uid: str) -> int | None:
        """Return the number of requests in progress that the proxy last reported for the process; None if unknown."""
        state = self._proxy.state
        backends = [backend for service in state.services for backend in service.backends] if state else []
        return next((backend.in_flight for backend in backends if backend.uid == uid), None)

    async def clear_suspicion(self, uid: str) -> None:
        """Tell the proxy that the agent has checked the process and that it works; raises no error of the proxy."""
        try:
            await self._proxy.client.clear_health(uid)
        except (ControlUnreachableError, ControlRefusedError) as error:
            log.warning("suspicion_not_cleared", uid=uid, error=str(error))

    def _is_served(self, runner: Runner) -> bool:
        """Decide whether the process has an engine, or will have one."""
        return runner.state.phase not in _NOT_SERVED

    @abstractmethod
    async def _configure(self) -> bool:
        """Send the configuration; called by `configure`, one call at a time. Return True if the outcome has changed."""

    async def _wait_idle(self, uid: str, timeout_seconds: float) -> bool:
        """Wait until the process has no request; return False after the time-out."""
        return await self._proxy.client.wait_idle(uid, timeout_seconds)


def proxy_config(
    address: str,
    grouped: Mapping[ObjectKey, Collection[Runner]],
    ports: Mapping[ObjectKey, ServicePort],
    draining: Collection[str] = (),
    tls: Tls | None = None,
) -> ProxyConfig:
    """Return the whole configuration of the proxy.

    Args:
        address: the address on which it listens.
        grouped: the processes of each service; a service without a port or a token is not in `ports` and not served.
        ports: the port and the token of each service.
        draining: uids of processes that get no new request.
        tls: certificate and key of all listeners.
    """
    return ProxyConfig(
        tuple(
            ServiceListener(
                name=str(service),
                address=address,
                port=listening.port,
                token=listening.token,
                previous_token=listening.previous.token if listening.previous else None,
                previous_token_until=float(listening.previous.valid_until) if listening.previous else 0.0,
                backends=tuple(
                    structs.replace(
                        build_backend(runner.assignment, runner.url),
                        draining=runner.assignment.uid in draining or runner.state.is_drained,
                        model=runner.model,
                        api_key=runner.api_key,
                    )
                    for runner in grouped.get(service, ())
                    if runner.url
                ),
            )
            for service, listening in sorted(ports.items())
        ),
        tls=tls,
    )


def build_backend(assignment: Assignment, url: str) -> Backend:
    """Return the backend of a process at `url` as far as its assignment decides it."""
    spec, runtime = assignment.spec, find_runtime(assignment.spec.runtime)
    return Backend(
        assignment.uid,
        url,
        concurrency=runtime.limit_requests(spec),
        engine=spec.runtime,
        mode=spec.mode,
        context_length=spec.context_length,
        shared_tokens=runtime.count_shared_tokens(spec),
        adapters=list_adapters(spec.further_artifacts),
    )


def reachable_uids(state: ProxyState, address: str) -> frozenset[str]:
    """Return the uids of the processes to which the proxy sends new requests that come to `address`."""
    return frozenset(
        backend.uid
        for service in state.services
        if not service.error and service.address == address
        for backend in service.backends
        if not backend.draining
    )


def list_adapters(artifacts: Iterable[FurtherArtifact]) -> tuple[BackendAdapter, ...]:
    """Return the adapters of a process in the order of their ids; none if requests choose none of them."""
    adapters = tuple(
        BackendAdapter(float(artifact.scale), artifact.request_name or "")
        for artifact in artifacts
        if artifact.role == "adapter"
    )
    return adapters if any(adapter.name for adapter in adapters) else ()
