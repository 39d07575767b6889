"""The readings of the metrics of services in pods, whose traffic their status shows.

The leader reads the metrics of each service's ready pods every ten seconds while it has requests, and every half minute
while it has none, and with many pods less often. Traffic is that of the last minute. The reconciler of services asks
for the last result and writes it into the status; it is woken only if the result differs by more than a tenth, and once
a minute at most. A pod that does not answer, or answers nonsense, costs one connection and no more: its service is read
ever more rarely, and after three minutes without any reading the traffic is unknown again.
"""

import asyncio
import functools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import aiohttp

from controller.reconcile.plan import Leading
from controller.services.endpoints import Endpoint
from controller.services.pod_answer import open_session, read_answer
from controller.services.probe_policy import seconds_to_turn
from controller.services.readiness_probe import read_token
from controller.services.speed_watch import SpeedWatch
from controller.services.traffic import (
    MOST_TOKENS_PER_SECOND,
    REQUESTS,
    STREAM_SERIES,
    TRAFFIC_SERIES,
    UNKNOWN_TRAFFIC,
    MetricsSample,
    TokenSource,
    Traffic,
    differs_notably,
    measure_streams,
    measure_tokens,
    measure_traffic,
    parse_series,
)
from gateway.proxy.paths import METRICS_OF_PROXY
from kube.queue import WorkQueue, run_workers
from kube.resources import INFERENCE_SERVICES, ObjectKey

BUSY_SECONDS: Final = 10.0
"""Pause between two readings of a service that has requests, or is new."""
IDLE_SECONDS: Final = 30.0
"""The same of one that had none in the last minute."""
LEAST_SECONDS: Final = 1.0
"""Shortest pause between two readings of a service whose speed is checked."""
MOST_PER_SECOND: Final = 50.0
"""Readings of pods in a second. One takes 0.6 ms of a processor, so all together take 3 % of it: 1,000 busy pods are
read every 20 seconds, and 500 every ten."""
FAILING_SECONDS: Final = 300.0
"""Pause between two readings of a service of which a pod does not answer, at the most: it may hold connections."""
STALE_SECONDS: Final = 180.0
"""Time without a reading after which the traffic is unknown."""
MINUTE_SECONDS: Final = 60.0
"""Time over which requests and tokens are counted."""
SHOWN_SECONDS: Final = 60.0
"""Least time between two changes of the traffic that a status shows: each is a write."""
LEAST_RATE: Final = 0.1
"""Least tokens per second that are shown: less is what the controller's own questions take, and no load."""
MOST_BYTES: Final = 1 << 20
"""The longest answer that is read. vLLM's has about 60 KiB."""
MOST_PODS: Final = 100
CONNECTIONS: Final = 16
"""Pods that are read at once: 16 MiB at the most, if all send as much as they may."""


class TrafficTarget(NamedTuple):
    """The pods of a service whose metrics are read."""

    service_uid: str
    endpoints: tuple[Endpoint, ...]
    model: str = ""
    """Name of the Model, in the metrics."""
    backend: str = ""
    """Name of the engine, in the metrics."""


class _Reading(NamedTuple):
    """A reading of the pods of a service."""

    at: float
    samples: Mapping[Endpoint, MetricsSample]


@dataclass(slots=True)
class _MeteredService:
    """All that the meter keeps of a service. Times are by the clock of the event loop, in seconds."""

    target: TrafficTarget
    read_at: float
    """Time of the last reading with a result, or of the first call of `follow`."""
    traffic: Traffic | None = None
    """The last traffic that was reported; None before the first."""
    reported_at: float = -math.inf
    """Time of the last change of `traffic`."""
    readings: deque[_Reading] = field(default_factory=deque)
    """Those of the last minute, and the one before."""
    failures: int = 0
    """Readings in a row in which a pod did not answer."""
    stream_baselines: dict[Endpoint, MetricsSample] = field(default_factory=dict)
    """The readings from which the speed of single requests counts."""
    next_speed_at: float = 0.0
    """Time of the next look at that speed."""
    token: str = ""


ShowTokens = Callable[[ObjectKey, Mapping[TokenSource, float]], None]
"""Takes the tokens per second of a service; none: they are unknown."""


class TrafficMeter:
    """The readings of all services, and their last results.

    Args:
        show_tokens: takes the tokens per second of each service.
        watch: takes the speed of single requests; None: nobody does.
    """

    def __init__(self, show_tokens: ShowTokens = lambda _key, _rates: None, watch: SpeedWatch | None = None) -> None:
        """Begin with no service; `follow` adds them, and `run` reads those that are due.

        The watch compares the speed of a single request with the one that is expected, to find slow replicas.
        """
        self._show_tokens = show_tokens
        self._watch = watch
        self._services: dict[ObjectKey, _MeteredService] = {}
        self._pods = 0
        """Pods of all services."""
        self._due: WorkQueue[ObjectKey] = WorkQueue()
        """The services whose pods are to be read."""
        self._slots = asyncio.Semaphore(CONNECTIONS)
        """One slot for each pod that is read at once."""

    def find_traffic(self, key: ObjectKey, service_uid: str) -> Traffic | None:
        """Return the traffic of a service; None: this leader has not read its pods yet."""
        service = self._services.get(key)
        return service.traffic if service is not None and service.target.service_uid == service_uid else None

    def forget(self, key: ObjectKey) -> None:
        """Read no more pods of a service, and remove its tokens from the metrics."""
        service = self._services.pop(key, None)
        if service is not None:
            self._pods -= _count_pods(service.target)
            self._show_tokens(key, {})

    def follow(self, key: ObjectKey, target: TrafficTarget) -> None:
        """Read these pods of a service from now on; what was read of an earlier service of its name is forgotten."""
        service = self._services.get(key)
        # The number of all pods, by which pauses are stretched.
        self._pods += _count_pods(target)
        if service is not None:
            self._pods -= _count_pods(service.target)

        if service is None or service.target.service_uid != target.service_uid:
            now = asyncio.get_running_loop().time()
            self._services[key] = service = _MeteredService(target, now)
            self._begin(key, target)  # enqueue the first reading
        service.target = target

    async def run(self, leading: Leading) -> None:
        """Read the metrics of all services while this replica leads."""
        for key, service in self._services.items():
            self._begin(key, service.target)
        async with open_session() as session:
            await run_workers(self._due, functools.partial(self._read, session, leading), CONNECTIONS, FAILING_SECONDS)

    def _begin(self, key: ObjectKey, target: TrafficTarget) -> None:
        """Enqueue the first reading of a service, at a time that differs from service to service."""
        now = asyncio.get_running_loop().time()
        self._due.add_after(key, seconds_to_turn(target.service_uid, now, self._stretch_pause(IDLE_SECONDS)))

    def _stretch_pause(self, seconds: float) -> float:
        """Return the pause between two readings: `seconds`, or more if there are many pods."""
        return max(seconds, self._pods / MOST_PER_SECOND)

    async def _read(self, session: aiohttp.ClientSession, leading: Leading, key: ObjectKey) -> float | None:
        """Read the pods of a service and report what has changed; return the seconds until the next reading.

        The pause is short while the service has requests or a speed is to be read, and long while pods do not answer or
        there are very many. None: the service is not followed any more, or was replaced by another one of its name.
        """
        service = self._services.get(key)
        if service is None:
            return None

        samples = await self._read_pods(session, leading, key, service)
        if self._services.get(key) is not service:
            # Another service of this name is read at moments of its own.
            return None

        now = asyncio.get_running_loop().time()
        self._report_speeds(key, service, samples, now)
        measured = self._measure(key, service, samples, now)
        _report(service, measured, leading, key, now)

        service.failures = 0 if len(samples) == _count_pods(service.target) else service.failures + 1
        pause = IDLE_SECONDS if _is_idle(measured) else BUSY_SECONDS
        # Speeds are read at the end of each window of the watch, so no later than that.
        if self._watch is not None:
            pause = min(pause, service.next_speed_at - now)
        # A second at least, and longer if there are very many pods.
        pause = self._stretch_pause(max(pause, LEAST_SECONDS))

        # The service is due again after this pause, which doubles with each failure in a row.
        return min(pause * 2.0**service.failures, max(pause, FAILING_SECONDS))

    def _measure(
        self, key: ObjectKey, service: _MeteredService, samples: Mapping[Endpoint, MetricsSample], now: float
    ) -> Traffic | None:
        """Return the traffic of the last minute, from the readings kept of that time and these new samples.

        If the samples give no number, it is the last one that was reported, and unknown after `STALE_SECONDS`. The
        samples are added to the readings, and the tokens per second are shown in the metrics.
        """
        # Of the readings older than a minute, the latest one stays, with which the new samples are compared.
        readings = service.readings
        while len(readings) > 1 and readings[1].at <= now - MINUTE_SECONDS:
            readings.popleft()

        # The oldest sample of each pod: readings are taken in reverse order, so that older samples replace newer ones.
        before = {pod: sample for reading in reversed(readings) for pod, sample in reading.samples.items()}
        if samples:
            readings.append(_Reading(now, samples))

        # The traffic between these and the new samples.
        measured, rates = measure_traffic(before, samples), measure_tokens(before, samples)
        if measured == UNKNOWN_TRAFFIC and not rates:
            # The first reading of a pod says nothing yet.
            if samples or now - service.read_at < STALE_SECONDS:
                return service.traffic
            readings.clear()
            self._show_tokens(key, {})
            return UNKNOWN_TRAFFIC

        # Show the tokens in the metrics, and their sum in the traffic.
        service.read_at = now
        if not rates:
            return measured
        self._show_tokens(key, _sum_by_node(rates, key.namespace, service.target))
        rate = min(sum(rates.values()), MOST_TOKENS_PER_SECOND)
        return measured._replace(tokens_per_second=rate if rate >= LEAST_RATE else 0.0)

    def _report_speeds(
        self, key: ObjectKey, service: _MeteredService, samples: Mapping[Endpoint, MetricsSample], now: float
    ) -> None:
        """Pass the speed of single requests to the watch, once per window of some minutes.

        It is measured from the baselines, the samples at the end of the last window, to these samples, which are the
        next baselines.
        """
        if self._watch is None or now < service.next_speed_at:
            return

        speeds = measure_streams(service.stream_baselines, samples)
        # A pod that generated too few tokens is compared with its earlier sample once more.
        earlier = {
            pod: sample for pod, sample in service.stream_baselines.items() if pod in samples and pod not in speeds
        }
        service.stream_baselines = {**samples, **earlier}

        service.next_speed_at = now + self._watch.window_seconds
        self._watch.add_readings(key, speeds, now)

    async def _read_pods(
        self, session: aiohttp.ClientSession, leading: Leading, key: ObjectKey, service: _MeteredService
    ) -> dict[Endpoint, MetricsSample]:
        """Return a sample of each pod that answers with the series; none if the token cannot be read.

        The token is kept in `service` until a pod does not answer with it.
        """
        target = service.target
        if not service.token:
            token = await read_token(leading.client, key, target.service_uid)
            if not isinstance(token, str):
                return {}
            service.token = token

        pods = target.endpoints[:MOST_PODS]
        samples = await asyncio.gather(*(self._read_pod(session, endpoint, service.token) for endpoint in pods))
        if None in samples:
            # The token may have been replaced.
            service.token = ""

        return {pod: sample for pod, sample in zip(pods, samples, strict=True) if sample is not None}

    async def _read_pod(self, session: aiohttp.ClientSession, endpoint: Endpoint, token: str) -> MetricsSample | None:
        """Return a sample of a pod; None if it does not answer with the proxy's series."""
        async with self._slots:
            text = await _read_metrics(session, endpoint, token)
        values = parse_series(text, (*TRAFFIC_SERIES, *STREAM_SERIES)) if text is not None else {}
        return MetricsSample(asyncio.get_running_loop().time(), values) if REQUESTS in values else None


def _sum_by_node(rates: Mapping[Endpoint, float], namespace: str, target: TrafficTarget) -> dict[TokenSource, float]:
    """Return the tokens per second of the pods on each node."""
    sums: dict[TokenSource, float] = {}
    for endpoint, rate in rates.items():
        source = TokenSource(namespace, target.model, target.backend, endpoint.node)
        sums[source] = sums.get(source, 0.0) + rate
    return sums


def _count_pods(target: TrafficTarget) -> int:
    """Return the number of pods of a service that are read."""
    return min(len(target.endpoints), MOST_PODS)


def _is_idle(traffic: Traffic | None) -> bool:
    """Return whether a service is known to have had no request in the last minute."""
    if traffic is None or traffic == UNKNOWN_TRAFFIC:
        return False
    return not traffic.requests_per_minute and not traffic.tokens_per_second


def _report(service: _MeteredService, traffic: Traffic | None, leading: Leading, key: ObjectKey, now: float) -> None:
    """Enqueue a service, so that its status shows its new traffic, if that differs notably from the reported one.

    That is by more than a tenth, and once a minute at most, since each report is a write; the first traffic is reported
    at once, and so is a notable change from or to unknown.
    """
    if traffic is None:
        return
    is_due = now - service.reported_at >= SHOWN_SECONDS or UNKNOWN_TRAFFIC in (service.traffic, traffic)
    if service.traffic is None or (is_due and differs_notably(service.traffic, traffic)):
        service.traffic, service.reported_at = traffic, now
        leading.enqueue(INFERENCE_SERVICES, key)


async def _read_metrics(session: aiohttp.ClientSession, endpoint: Endpoint, token: str) -> bytes | None:
    """Return the proxy's own metrics as text, or None if the pod does not answer with them."""
    url = f"{endpoint.url}{METRICS_OF_PROXY}"
    return await read_answer(session, url, MOST_BYTES, {"Authorization": f"Bearer {token}"})
