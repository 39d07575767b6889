"""The readings of the metrics of services in pods, whose traffic their status shows.

The leader reads the metrics of each service's ready pods every five minutes, at a moment that is the service's own. The
reconciler of services asks for the last result and writes it into the status; it is woken only if the result differs by
more than a tenth. A minute after each reading the pods are read once more, for the tokens that they generated in that
minute. A pod that does not answer, or answers nonsense, costs one connection and no more: after 15 minutes
without any reading the traffic is unknown again. A service whose engine counts nothing is never read.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, NamedTuple

import aiohttp

from controller.reconcile.plan import Leading
from controller.services.endpoints import Endpoint
from controller.services.probe_policy import seconds_to_turn
from controller.services.readiness_probe import read_token
from controller.services.speed_watch import CHECKS, SpeedWatch
from controller.services.stream_speed import StreamSeries, measure_streams
from controller.services.traffic import (
    MOST_TOKENS_PER_SECOND,
    UNKNOWN_TRAFFIC,
    MetricsSample,
    TokenSource,
    Traffic,
    TrafficSeries,
    differs_notably,
    measure_tokens,
    measure_traffic,
    parse_series,
)
from kube.queue import WorkQueue, run_workers
from kube.resources import INFERENCE_SERVICES, ObjectKey

READ_SECONDS: Final = 300.0
"""Pause between two readings of a service: at 1,000 services, 3.3 readings a second, and as many for the tokens."""
STALE_SECONDS: Final = 900.0
"""Time without a reading after which the traffic is unknown."""
MINUTE_SECONDS: Final = 60.0
"""Time over which tokens are counted."""
TIMEOUT_SECONDS: Final = 5.0
MOST_BYTES: Final = 1 << 20
"""The longest answer that is read. vLLM's has about 60 KiB."""
MOST_PODS: Final = 100
CONNECTIONS: Final = 16
"""Pods that are read at once: 16 MiB at the most, if all send as much as they may."""


class TrafficTarget(NamedTuple):
    """The pods of a service whose metrics are read."""

    service_uid: str
    endpoints: tuple[Endpoint, ...]
    series: TrafficSeries
    model: str = ""
    """Name of the Model, in the metrics."""
    backend: str = ""
    """Name of the engine, in the metrics."""
    streams: StreamSeries | None = None
    """The counters of the speed of single requests; None: it is not watched."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all series that are read."""
        return (*self.series.names, *(self.streams.names if self.streams is not None else ()))


@dataclass(slots=True)
class _MeteredService:
    """All that the meter keeps of a service."""

    target: TrafficTarget
    traffic: Traffic
    """As the status shows it."""
    read_at: float
    """Time of the last reading with a result, or of the first call of `follow`."""
    samples: dict[Endpoint, MetricsSample] = field(default_factory=dict)
    streams: dict[Endpoint, MetricsSample] = field(default_factory=dict)
    """The readings from which the speed of single requests counts."""
    token: str = ""


ShowTokens = Callable[[ObjectKey, Mapping[TokenSource, float]], None]
"""Takes the tokens per second of a service; none: they are unknown."""


class TrafficMeter:
    """The readings of all services, and their last results.

    Args:
        show_tokens: takes the tokens per second of each service.
        watch: takes the speed of single requests, and asks for readings of what is slow; None: nobody does.
    """

    def __init__(self, show_tokens: ShowTokens = lambda _key, _rates: None, watch: SpeedWatch | None = None) -> None:
        self._show_tokens = show_tokens
        self._watch = watch
        self._services: dict[ObjectKey, _MeteredService] = {}
        self._due: WorkQueue[ObjectKey] = WorkQueue()
        self._minutes: WorkQueue[ObjectKey] = WorkQueue()
        """Services whose tokens are counted now."""
        self._checks: WorkQueue[ObjectKey] = WorkQueue()
        """Services whose speed is checked between two readings."""
        self._slots = asyncio.Semaphore(CONNECTIONS)

    def follow(self, key: ObjectKey, target: TrafficTarget | None, known: Traffic = UNKNOWN_TRAFFIC) -> Traffic:
        """Return the traffic of a service, and read its pods from now on; without a target it is forgotten.

        `known` is the traffic in its status, which stays until this leader has read the pods itself.
        """
        if target is None:
            if self._services.pop(key, None) is not None:
                self._show_tokens(key, {})
            return UNKNOWN_TRAFFIC
        service = self._services.get(key)
        if service is None or service.target.service_uid != target.service_uid:
            now = asyncio.get_running_loop().time()
            self._services[key] = service = _MeteredService(target, known, now)
            self._read_later(key, target)
            self._check_later(key, target, None)
        service.target = target
        return service.traffic

    async def run(self, leading: Leading) -> None:
        """Read for ever."""
        for key, service in self._services.items():
            self._read_later(key, service.target)
            self._check_later(key, service.target, None)
        # A connection is of no use five minutes later.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, trust_env=False, auto_decompress=False
        ) as session:

            async def read(key: ObjectKey) -> None:
                await self._read(session, leading, key)

            async def count_tokens(key: ObjectKey) -> None:
                await self._count_tokens(session, leading, key)

            async def check_speed(key: ObjectKey) -> None:
                await self._check_speed(session, leading, key)

            async with asyncio.TaskGroup() as lanes:
                lanes.create_task(run_workers(self._checks, check_speed, CONNECTIONS, READ_SECONDS))
                lanes.create_task(run_workers(self._due, read, CONNECTIONS, READ_SECONDS))
                lanes.create_task(run_workers(self._minutes, count_tokens, CONNECTIONS, READ_SECONDS))

    def _read_later(self, key: ObjectKey, target: TrafficTarget, least_seconds: float = 0.0) -> None:
        now = asyncio.get_running_loop().time()
        seconds = seconds_to_turn(target.service_uid, now + least_seconds, READ_SECONDS)
        self._due.add_after(key, least_seconds + seconds)

    def _check_later(self, key: ObjectKey, target: TrafficTarget, seconds: float | None) -> None:
        """Check the speed of a service after some time; None: once in the time of all checks, if that is short."""
        if self._watch is None or target.streams is None:
            return
        usual = CHECKS * self._watch.rules.check_seconds
        if seconds is not None or usual < READ_SECONDS:
            self._checks.add_after(key, usual if seconds is None else seconds)

    async def _check_speed(self, session: aiohttp.ClientSession, leading: Leading, key: ObjectKey) -> None:
        service = self._services.get(key)
        if service is None:
            return
        samples = await self._read_pods(session, leading, key, service)
        if self._services.get(key) is service:
            self._take_speeds(key, service, samples)

    def _take_speeds(self, key: ObjectKey, service: _MeteredService, samples: Mapping[Endpoint, MetricsSample]) -> None:
        """Take the speed of single requests since the readings from which it counts."""
        series = service.target.streams
        if self._watch is None or series is None:
            return
        speeds = measure_streams(service.streams, samples, series)
        now = asyncio.get_running_loop().time()
        kept = {
            each: sample
            for each, sample in service.streams.items()
            # Where few tokens were generated since, more are waited for.
            if each in samples and each not in speeds and now - sample.at < READ_SECONDS
        }
        service.streams = {**samples, **kept}
        self._check_later(key, service.target, self._watch.take(key, speeds, now))

    async def _read(self, session: aiohttp.ClientSession, leading: Leading, key: ObjectKey) -> None:
        service = self._services.get(key)
        if service is None:
            return
        target = service.target
        # A timer may fire a moment early: that moment is not the next turn.
        self._read_later(key, target, READ_SECONDS / 2)
        samples = await self._read_pods(session, leading, key, service)
        if self._services.get(key) is not service:
            return
        self._take_speeds(key, service, samples)
        now = asyncio.get_running_loop().time()
        measured = measure_traffic(service.samples, samples, target.series)
        service.samples = samples
        if samples and target.series.tokens is not None:
            self._minutes.add_after(key, MINUTE_SECONDS)
        is_known = measured != UNKNOWN_TRAFFIC if target.series.requests is not None else bool(samples)
        if not is_known and now - service.read_at < STALE_SECONDS:
            return
        if is_known:
            service.read_at = now
            measured = measured._replace(tokens_per_second=service.traffic.tokens_per_second)
        else:
            self._show_tokens(key, {})
        _show(service, measured, leading, key)

    async def _count_tokens(self, session: aiohttp.ClientSession, leading: Leading, key: ObjectKey) -> None:
        """Count the tokens since the last reading."""
        service = self._services.get(key)
        if service is None:
            return
        before, target = service.samples, service.target
        samples = await self._read_pods(session, leading, key, service)
        rates = measure_tokens(before, samples, target.series)
        if self._services.get(key) is service:
            self._take_speeds(key, service, samples)
        if self._services.get(key) is service and rates:
            self._show_tokens(key, _sum_by_node(rates, key.namespace, target))
            total = min(sum(rates.values()), MOST_TOKENS_PER_SECOND)
            _show(service, service.traffic._replace(tokens_per_second=total), leading, key)

    async def _read_pods(
        self, session: aiohttp.ClientSession, leading: Leading, key: ObjectKey, service: _MeteredService
    ) -> dict[Endpoint, MetricsSample]:
        """Return a sample of each pod that answers with the series."""
        target = service.target
        if target.series.needs_key and not service.token:
            token = await read_token(leading.client, key, target.service_uid)
            if not isinstance(token, str):
                return {}
            service.token = token
        pods = target.endpoints[:MOST_PODS]
        found = await asyncio.gather(*(self._read_pod(session, each, target, service.token) for each in pods))
        if None in found:
            # The token may have been replaced.
            service.token = ""
        return {pod: sample for pod, sample in zip(pods, found, strict=True) if sample is not None}

    async def _read_pod(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, target: TrafficTarget, token: str
    ) -> MetricsSample | None:
        series = target.series
        async with self._slots:
            text = await _read_metrics(session, endpoint, series, token)
        values = parse_series(text, target.names) if text is not None else {}
        is_counted = values and (series.requests is None or series.requests in values)
        return MetricsSample(asyncio.get_running_loop().time(), values) if is_counted else None


def _sum_by_node(rates: Mapping[Endpoint, float], namespace: str, target: TrafficTarget) -> dict[TokenSource, float]:
    """Return the tokens per second of the pods on each node."""
    sums: dict[TokenSource, float] = {}
    for endpoint, rate in rates.items():
        source = TokenSource(namespace, target.model, target.backend, endpoint.node)
        sums[source] = sums.get(source, 0.0) + rate
    return sums


def _show(service: _MeteredService, traffic: Traffic, leading: Leading, key: ObjectKey) -> None:
    """Take the traffic of a service, which is told if it differs by more than a tenth."""
    if differs_notably(service.traffic, traffic):
        service.traffic = traffic
        leading.enqueue(INFERENCE_SERVICES, key)


async def _read_metrics(
    session: aiohttp.ClientSession, endpoint: Endpoint, series: TrafficSeries, token: str
) -> bytes | None:
    """Return the text at the path of the metrics, or None if the pod does not answer with one."""
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if series.needs_key else {})
    try:
        async with session.get(f"{endpoint.url}{series.path}", headers=headers, allow_redirects=False) as response:
            if response.status != HTTPStatus.OK:
                return None
            text = bytearray()
            async for chunk in response.content.iter_any():
                text += chunk
                if len(text) > MOST_BYTES:
                    return None
            return bytes(text)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
