"""The traffic of a service: that of its pods by their metrics, and that of hosts, as agents report it.

Pomona's proxy is before every engine and counts what clients asked for. It is asked for its own series only, because it
would read those of the engine first. What a pod sends is not trusted: lines that are no counts are ignored.

The rate of tokens of a pod is 0 while nobody asks, and the time between two tokens grows with the requests beside. So
the speed of a pod is compared by what was generated for one request alone, which the proxy counts by itself.

An agent writes the numbers of a process once a minute at most, and only if they have changed by more than a tenth.
"""

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from controller.reconcile.plan import Snapshot, decode_stored
from controller.services.endpoints import Endpoint
from controller.services.metal_processes import read_hosts
from controller.services.rollout import is_host_lost
from crds.inferenceservice import InferenceServiceStatus
from crds.metalprocess import MetalProcess
from crds.rate import MOST_REPORTED, format_rate, is_notable_change
from kube.resources import METAL_PROCESSES

MOST: Final = 2**31 - 1
"""Largest number that the fields of the status hold."""
MOST_TOKENS_PER_SECOND: Final = float(MOST)
_MOST_COUNTED: Final = 2.0**53
"""Largest count that is believed."""
MOST_LINES: Final = 1000
"""Lines that are read of a series: one for each set of labels. A stranger's pod may send a MiB of them."""
REQUESTS: Final = "pomona_proxy_request_seconds_count"
"""Counter of the requests that have ended."""
SECONDS: Final = "pomona_proxy_request_seconds_sum"
"""Counter of their durations together."""
TOKENS: Final = "pomona_proxy_generated_tokens_total"
TRAFFIC_SERIES: Final = (REQUESTS, SECONDS, TOKENS)
LEAST_TOKENS: Final = 32
"""Tokens between two readings below which the speed is unknown: of a few, chance decides."""
LONE_TOKENS: Final = "pomona_proxy_lone_tokens_total"
"""Counter of the tokens of requests that ran alone."""
LONE_SECONDS: Final = "pomona_proxy_lone_token_seconds_total"
"""Counter of the time that these took."""
STREAM_SERIES: Final = (LONE_TOKENS, LONE_SECONDS)


class Traffic(NamedTuple):
    """The traffic of a service; None: unknown."""

    requests_per_minute: int | None = None
    average_ms: int | None = None
    """Average duration of the requests in the interval; None if there were none of clients, too."""
    tokens_per_second: float | None = None
    """Tokens that all pods together have generated, over a minute."""

    def fields(self) -> dict[str, int | str]:
        """Return the fields of a service's status."""
        rate = self.tokens_per_second
        figures = {
            "requestsPerMinute": self.requests_per_minute,
            "averageLatencyMs": self.average_ms,
            "tokensPerSecond": format_rate(rate) if rate is not None else None,
        }
        return {name: value for name, value in figures.items() if value is not None}


class TokenSource(NamedTuple):
    """The pods whose tokens are one series of the metrics, by the labels of the series."""

    namespace: str
    model: str
    """Name of the Model."""
    backend: str
    """Name of the engine."""
    node: str


UNKNOWN_TRAFFIC: Final = Traffic()


def read_traffic(status: InferenceServiceStatus) -> Traffic:
    """Return the traffic that a status shows."""
    rate = status.tokens_per_second
    tokens_per_second = float(rate) if rate else None
    return Traffic(status.requests_per_minute, status.average_latency_ms, tokens_per_second)


class MetricsSample(NamedTuple):
    """One reading of the metrics of one pod."""

    at: float
    """By the clock of the event loop, in seconds."""
    values: Mapping[str, float]


def parse_series(text: bytes, names: Collection[str]) -> dict[str, float]:
    """Return the sum over all labels of each named series in Prometheus' text form; other lines are ignored.

    Only the lines of these series cost time, and no more than `MOST_LINES` of each are read.
    """
    totals: dict[str, float] = {}
    lines = b"\n" + text

    for name in names:
        prefix, end = b"\n" + name.encode(), 0
        for _ in range(MOST_LINES):
            begin = lines.find(prefix, end)
            if begin < 0:
                break
            # The end of the line: the next line break, or the end of the text.
            end = lines.find(b"\n", begin + 1)
            end = len(lines) if end < 0 else end

            # The rest of the line is labels and the number.
            if (value := _read_number(lines[begin + len(prefix) : end])) is not None:
                totals[name] = totals.get(name, 0.0) + value
    return totals


def _read_number(rest: bytes) -> float | None:
    """Return the count in the rest of a line of Prometheus' text form, such as ` 3` or `{code="200"} 3`.

    None: there is no count, or the name that was found is only the beginning of a longer one.
    """
    if rest[:1] == b"{":
        # The value of a label may contain braces and blanks; the number is behind the last brace.
        rest = rest[rest.rfind(b"}") + 1 :]
    elif not rest[:1].isspace():
        return None
    try:
        value = float(rest.split(None, 1)[0])
    except (IndexError, ValueError):
        return None
    return value if 0 <= value <= _MOST_COUNTED else None


def measure_traffic(before: Mapping[Endpoint, MetricsSample], after: Mapping[Endpoint, MetricsSample]) -> Traffic:
    """Return the requests per minute and their average duration between two readings of pods.

    A pod that was read once does not count yet; if none counts, the traffic is unknown.
    """
    per_minute, requests, seconds, is_known = 0.0, 0.0, 0.0, False

    # REQUESTS and SECONDS are counters of the proxy: requests that have ended, and how long they took together.
    for endpoint, sample in after.items():
        earlier = before.get(endpoint)
        if REQUESTS not in sample.values or earlier is None or sample.at <= earlier.at:
            continue

        is_known = True
        increase = find_increase(earlier, sample, REQUESTS)
        requests += increase
        per_minute += increase * 60 / (sample.at - earlier.at)
        seconds += find_increase(earlier, sample, SECONDS)

    if not is_known:
        return UNKNOWN_TRAFFIC

    # A single request counts as none: it may be the question that the controller itself asks every ten minutes.
    requests_per_minute = min(round(per_minute), MOST) if requests > 1 else 0
    average_ms = min(round(seconds * 1000 / requests), MOST) if requests_per_minute else None
    return Traffic(requests_per_minute=requests_per_minute, average_ms=average_ms)


def measure_tokens(
    before: Mapping[Endpoint, MetricsSample], after: Mapping[Endpoint, MetricsSample]
) -> dict[Endpoint, float]:
    """Return the tokens that each pod generated per second between two readings, for each that was read twice."""
    return {
        endpoint: min(
            find_increase(before[endpoint], sample, TOKENS) / (sample.at - before[endpoint].at),
            MOST_TOKENS_PER_SECOND,
        )
        for endpoint, sample in after.items()
        if TOKENS in sample.values and endpoint in before and sample.at > before[endpoint].at
    }


def measure_streams(
    before: Mapping[Endpoint, MetricsSample], after: Mapping[Endpoint, MetricsSample]
) -> dict[Endpoint, float]:
    """Return the tokens per second of a single request between two readings of each pod, where it is known."""
    speeds = {pod: _measure_stream(before[pod], sample) for pod, sample in after.items() if pod in before}
    return {pod: speed for pod, speed in speeds.items() if speed is not None}


def _measure_stream(before: MetricsSample, after: MetricsSample) -> float | None:
    """Return the tokens per second of requests that ran alone between two readings; None if they generated too few.

    Among requests that run at once, each is slower, which says nothing of the hardware.
    """
    if any(name not in after.values for name in STREAM_SERIES):
        return None
    # The proxy counts tokens and seconds of requests beside which no other one ran (lone).
    tokens, seconds = find_increase(before, after, LONE_TOKENS), find_increase(before, after, LONE_SECONDS)
    return tokens / seconds if tokens >= LEAST_TOKENS and seconds > 0 else None


def find_increase(before: MetricsSample, after: MetricsSample, name: str) -> float:
    """Return the increase of a counter, which begins at 0 again when its process restarts."""
    old, new = before.values.get(name, 0.0), after.values.get(name, 0.0)
    return new - old if new >= old else new


def combine_traffic(one: Traffic, other: Traffic) -> Traffic:
    """Return the sum of two traffics; a number that is unknown in one of them is that of the other."""
    requests = [part.requests_per_minute for part in (one, other) if part.requests_per_minute is not None]
    rates = [part.tokens_per_second for part in (one, other) if part.tokens_per_second is not None]

    # The average duration is weighted by the requests.
    timed = [(part.requests_per_minute or 0, part.average_ms) for part in (one, other) if part.average_ms is not None]
    timed_requests = sum(number for number, _ in timed)
    total_ms = sum(number * duration_ms for number, duration_ms in timed)

    return Traffic(
        requests_per_minute=min(sum(requests), MOST) if requests else None,
        average_ms=min(round(total_ms / timed_requests), MOST) if timed_requests else None,
        tokens_per_second=min(sum(rates), MOST_TOKENS_PER_SECOND) if rates else None,
    )


def differs_notably(traffic: Traffic, measured: Traffic) -> bool:
    """Return whether a number differs by more than a tenth of it."""
    return any(_differs(old, new) for old, new in zip(traffic, measured, strict=True))


def _differs(old: float | None, new: float | None) -> bool:
    """Return whether a number differs by more than a tenth, or only one of the two is known."""
    if old is None or new is None:
        return old is not new
    return is_notable_change(old, new)


MOST_REQUESTS_REPORTED: Final = 1_000_000
"""Requests per minute that are believed of one process of a host."""


def find_host_traffic(snapshot: Snapshot, namespace: str, service_uid: str) -> Traffic:
    """Return the traffic of a service on hosts: the sum of what its processes report that serve on live hosts.

    A process that reports a negative number is left out, and excessive numbers are cut.
    """
    children = snapshot.children(METAL_PROCESSES, namespace, service_uid)
    processes = decode_stored(snapshot.store, METAL_PROCESSES, children, MetalProcess)
    hosts = read_hosts(snapshot.store, {process.spec.host_name for process in processes})

    traffic = UNKNOWN_TRAFFIC
    for process in processes:
        # Only what serves on a live host counts.
        status = process.status
        if status.phase != "Ready" or is_host_lost(process.spec.host_name or "", hosts):
            continue

        # A negative number tells that the report is wrong.
        rate, requests, average_ms = status.tokens_per_second, status.requests_per_minute, status.average_latency_ms
        if (requests is not None and requests < 0) or (average_ms is not None and average_ms < 0):
            continue

        # Cut excessive numbers, and add the rest up.
        reported = Traffic(
            requests_per_minute=min(requests, MOST_REQUESTS_REPORTED) if requests is not None else None,
            average_ms=average_ms,
            tokens_per_second=min(float(rate), MOST_REPORTED) if rate else None,
        )
        traffic = combine_traffic(traffic, reported)
    return traffic


def add_host_traffic(of_pods: Traffic, of_hosts: Traffic, shown: Traffic) -> Traffic:
    """Return the sum of the traffic in pods and on hosts; or `shown`, that of the status, if the sum hardly differs."""
    if of_hosts == UNKNOWN_TRAFFIC:
        return of_pods
    total = combine_traffic(of_pods, of_hosts)
    return total if differs_notably(shown, total) else shown
