"""The traffic of a service by the metrics of its pods."""

import time
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.services.endpoints import Endpoint
from controller.services.traffic import (
    MOST_LINES,
    UNKNOWN_TRAFFIC,
    MetricsSample,
    Traffic,
    TrafficSeries,
    differs_notably,
    find_series,
    measure_tokens,
    measure_traffic,
    parse_series,
    read_traffic,
)
from controller.services.traffic_meter import MOST_BYTES
from crds.inferenceservice import InferenceServiceStatus
from gateway.proxy.metrics import ProxyMetrics
from runtimes.registry import RUNTIMES

ONE, TWO = Endpoint("10.0.0.1", 8080), Endpoint("10.0.0.2", 8080)
SERIES = TrafficSeries("/metrics", needs_key=False, requests="requests", seconds="seconds")
NAMES = ("requests", "seconds_count", "seconds_sum")
LABELS = st.text(st.characters(exclude_characters='\n"\\'), max_size=20)


def sample(at: float, requests: float, seconds: float = 0.0) -> MetricsSample:
    return MetricsSample(at, {"requests": requests, "seconds_count": requests, "seconds_sum": seconds})


def find_series_of(engine: str) -> TrafficSeries | None:
    pod = RUNTIMES[engine].pod
    assert pod is not None
    return find_series(pod)


def test_proxy_counts_for_an_engine_behind_it() -> None:
    metrics = ProxyMetrics(list)
    for seconds in (0.5, 1.5):
        metrics.for_service("team/chat").request_seconds.observe(seconds)
        metrics.for_service("team/chat").generated_tokens += 15
    for engine in ("vllm", "sglang", "tgi", "ollama", "generic"):
        series = find_series_of(engine)
        assert series is not None
        assert series.needs_key
        assert series.path == "/metrics?engine=false", "the engine's own series would cost more than all that is read"
        assert parse_series(metrics.text(), series.names) == dict(zip(series.names, (2.0, 2.0, 30.0), strict=True))


def test_engine_that_counts_tokens_alone_has_a_rate_and_no_requests() -> None:
    series = find_series_of("llama.cpp")
    assert series is not None
    assert series.names == ("llamacpp:tokens_predicted_total",)
    before, after = (MetricsSample(at, {series.names[0]: at * 7}) for at in (0.0, 60.0))
    assert measure_traffic({ONE: before}, {ONE: after}, series) == UNKNOWN_TRAFFIC
    assert measure_tokens({ONE: before}, {ONE: after}, series) == {ONE: 7.0}


def test_engine_that_counts_nothing_is_not_read() -> None:
    pod = RUNTIMES["llama.cpp"].pod
    assert pod is not None
    assert pod.metrics is not None
    counts_nothing = replace(pod, metrics=pod.metrics._replace(requests=None, generated_tokens=None))
    assert find_series(counts_nothing) is None
    assert find_series(replace(pod, metrics=None)) is None


def tokens(at: float, number: float) -> MetricsSample:
    return MetricsSample(at, {"tokens": number})


@given(
    st.dictionaries(st.sampled_from([ONE, TWO]), st.tuples(st.floats(0, 2**53), st.floats(0, 2**53))),
    st.floats(min_value=0.1, max_value=1000),
)
def test_rate_of_each_pod_is_its_increase(counts: dict[Endpoint, tuple[float, float]], spent: float) -> None:
    series = SERIES._replace(tokens="tokens")
    before = {each: tokens(0.0, old) for each, (old, _) in counts.items()}
    after = {each: tokens(spent, new) for each, (_, new) in counts.items()}
    # A counter that is smaller began anew.
    expected = {each: min((new - old if new >= old else new) / spent, 2**31 - 1) for each, (old, new) in counts.items()}
    assert measure_tokens(before, after, series) == pytest.approx(expected)


def test_rate_of_pods_that_were_not_read_twice_is_unknown() -> None:
    series = SERIES._replace(tokens="tokens")
    assert measure_tokens({}, {ONE: tokens(60, 5)}, series) == {}
    assert measure_tokens({ONE: tokens(60, 5)}, {ONE: tokens(60, 5)}, series) == {}
    assert measure_tokens({ONE: tokens(0, 5)}, {ONE: MetricsSample(60, {"requests": 1})}, series) == {}
    assert measure_tokens({ONE: sample(0, 5)}, {ONE: sample(60, 5)}, SERIES) == {}


@pytest.mark.parametrize("rate", [0.0, 0.004, 7.5, 12345.6])
def test_rate_is_read_from_the_status_as_it_was_written(rate: float) -> None:
    shown = Traffic(tokens_per_second=rate).fields()
    status = msgspec.convert(shown, InferenceServiceStatus)
    assert not differs_notably(Traffic(tokens_per_second=rate), read_traffic(status))
    assert read_traffic(InferenceServiceStatus()) == UNKNOWN_TRAFFIC


@given(st.lists(st.tuples(LABELS, st.integers(0, 2**40))), st.lists(st.tuples(LABELS, st.integers(0, 2**40))))
def test_series_are_summed_over_their_labels(requests: list[tuple[str, int]], others: list[tuple[str, int]]) -> None:
    lines = ["# TYPE requests counter", "requests_total 7", "requestsandmore{} 7", "requests NaN", "requests -1"]
    lines += [f'requests{{model="{label}",le="0.5"}} {number} 1700000000000' for label, number in requests]
    lines += [f'seconds_sum{{model="{label}"}} {number}' for label, number in others]
    found = parse_series("\n".join(lines).encode("utf-8", "surrogatepass"), NAMES)
    assert found.get("requests", 0) == sum(number for _, number in requests)
    assert found.get("seconds_sum", 0) == sum(number for _, number in others)
    assert set(found) <= {"requests", "seconds_sum"}


def test_lines_of_a_hostile_pod_cost_the_leader_little() -> None:
    begun = time.process_time()
    assert parse_series(b"requests 1\n" + b"\n" * MOST_BYTES, NAMES) == {"requests": 1}
    assert time.process_time() - begun < 0.05  # 0.1 s line by line, and a leader makes 50 readings a second
    line = b"requests 1\n"
    assert parse_series(line * (MOST_BYTES // len(line)), NAMES) == {"requests": MOST_LINES}


@given(st.lists(st.one_of(st.binary(), st.sampled_from([b"requests", b"{", b"} ", b" 1e308\n", b" inf\n", b"\n"]))))
def test_text_of_any_bytes_gives_counts_or_nothing(parts: list[bytes]) -> None:
    found = parse_series(b"".join(parts), NAMES)
    assert all(0 <= value < float("inf") for value in found.values())
    measured = measure_traffic({ONE: sample(0.0, 0)}, {ONE: MetricsSample(300.0, found)}, SERIES)
    assert all(number is None or 0 <= number < 2**31 for number in measured)


def test_traffic_is_the_sum_of_all_pods() -> None:
    before = {ONE: sample(0.0, 100, 10.0), TWO: sample(0.0, 0)}
    after = {ONE: sample(300.0, 200, 60.0), TWO: sample(300.0, 300, 30.0)}
    assert measure_traffic(before, after, SERIES) == Traffic(80, 200)


def test_counter_that_fell_began_at_zero_again() -> None:
    assert measure_traffic({ONE: sample(0.0, 1000, 500.0)}, {ONE: sample(60.0, 10, 5.0)}, SERIES) == Traffic(10, 500)


def test_pod_counts_from_its_second_reading_on() -> None:
    assert measure_traffic({}, {ONE: sample(0.0, 1000)}, SERIES) == UNKNOWN_TRAFFIC
    both = {ONE: sample(60.0, 60, 6.0), TWO: sample(60.0, 1000, 1000.0)}
    assert measure_traffic({ONE: sample(0.0, 0)}, both, SERIES) == Traffic(60, 100)


def test_probes_of_the_controller_tell_no_latency() -> None:
    assert measure_traffic({ONE: sample(0.0, 0)}, {ONE: sample(300.0, 1, 3.0)}, SERIES) == Traffic(0, None)


def test_number_of_requests_without_a_histogram_is_enough() -> None:
    series = SERIES._replace(seconds=None)
    assert series.names == ("requests",)
    assert measure_traffic({ONE: sample(0.0, 0)}, {ONE: sample(60.0, 5)}, series) == Traffic(5, None)


def test_change_of_less_than_a_tenth_is_no_news() -> None:
    assert not differs_notably(Traffic(100, 1000), Traffic(109, 901))
    assert differs_notably(Traffic(100, 1000), Traffic(112, 1000))
    assert differs_notably(Traffic(100, 1000), Traffic(100, 800))
    assert differs_notably(UNKNOWN_TRAFFIC, Traffic(0, None))
    assert differs_notably(Traffic(1, 1), UNKNOWN_TRAFFIC)
    assert not differs_notably(Traffic(0, None), Traffic(0, None))
