"""The traffic of a service by the metrics of its pods."""

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.services.endpoints import Endpoint
from controller.services.traffic import (
    MOST_LINES,
    REQUESTS,
    SECONDS,
    TOKENS,
    TRAFFIC_SERIES,
    UNKNOWN_TRAFFIC,
    MetricsSample,
    Traffic,
    differs_notably,
    measure_tokens,
    measure_traffic,
    parse_series,
    read_traffic,
)
from controller.services.traffic_meter import MOST_BYTES
from crds.inferenceservice import InferenceServiceStatus
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.metrics import render_metrics
from gateway.proxy.service import Service
from tests.unit.gateway.proxy.running_proxy import make_service

ONE, TWO = Endpoint("10.0.0.1", 8080), Endpoint("10.0.0.2", 8080)
NAMES = ("requests", "seconds_sum")
LABELS = st.text(st.characters(exclude_characters='\n"\\'), max_size=20)


def sample(at: float, requests: float, seconds: float = 0.0) -> MetricsSample:
    return MetricsSample(at, {REQUESTS: requests, SECONDS: seconds})


def test_series_are_those_of_the_proxy() -> None:
    service = Service(make_service(name="team/chat"), InFlight(lambda _: None))
    for seconds in (0.5, 1.5):
        service.metrics.request_seconds.observe(seconds)
        service.metrics.generated_tokens += 15
    series = parse_series(render_metrics({"team/chat": service}), TRAFFIC_SERIES)
    assert series == {REQUESTS: 2.0, SECONDS: 2.0, TOKENS: 30.0}


def tokens(at: float, number: float) -> MetricsSample:
    return MetricsSample(at, {TOKENS: number})


@given(
    st.dictionaries(st.sampled_from([ONE, TWO]), st.tuples(st.floats(0, 2**53), st.floats(0, 2**53))),
    st.floats(min_value=0.1, max_value=1000),
)
def test_rate_of_each_pod_is_its_increase(counts: dict[Endpoint, tuple[float, float]], spent: float) -> None:
    before = {count: tokens(0.0, old) for count, (old, _) in counts.items()}
    after = {count: tokens(spent, new) for count, (_, new) in counts.items()}
    # A counter that is smaller began anew.
    expected = {
        count: min((new - old if new >= old else new) / spent, 2**31 - 1) for count, (old, new) in counts.items()
    }
    assert measure_tokens(before, after) == pytest.approx(expected)


def test_rate_of_pods_that_were_not_read_twice_is_unknown() -> None:
    assert measure_tokens({}, {ONE: tokens(60, 5)}) == {}
    assert measure_tokens({ONE: tokens(60, 5)}, {ONE: tokens(60, 5)}) == {}
    assert measure_tokens({ONE: tokens(0, 5)}, {ONE: MetricsSample(60, {REQUESTS: 1})}) == {}
    assert measure_tokens({ONE: sample(0, 5)}, {ONE: sample(60, 5)}) == {}


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
    series = parse_series("\n".join(lines).encode("utf-8", "surrogatepass"), NAMES)
    assert series.get("requests", 0) == sum(number for _, number in requests)
    assert series.get("seconds_sum", 0) == sum(number for _, number in others)
    assert set(series) <= {"requests", "seconds_sum"}


def test_lines_of_a_hostile_pod_cost_the_leader_little() -> None:
    begun = time.process_time()
    assert parse_series(b"requests 1\n" + b"\n" * MOST_BYTES, NAMES) == {"requests": 1}
    assert time.process_time() - begun < 0.05  # 0.1 s line by line, and a leader makes 50 readings a second
    line = b"requests 1\n"
    assert parse_series(line * (MOST_BYTES // len(line)), NAMES) == {"requests": MOST_LINES}


@given(st.lists(st.one_of(st.binary(), st.sampled_from([b"requests", b"{", b"} ", b" 1e308\n", b" inf\n", b"\n"]))))
def test_text_of_any_bytes_gives_counts_or_nothing(parts: list[bytes]) -> None:
    series = parse_series(b"".join(parts), NAMES)
    assert all(0 <= value < float("inf") for value in series.values())
    counted = {REQUESTS: series.get("requests", 0.0), SECONDS: series.get("seconds_sum", 0.0)}
    measured = measure_traffic({ONE: sample(0.0, 0)}, {ONE: MetricsSample(300.0, counted)})
    assert all(number is None or 0 <= number < 2**31 for number in measured)


def test_traffic_is_the_sum_of_all_pods() -> None:
    before = {ONE: sample(0.0, 100, 10.0), TWO: sample(0.0, 0)}
    after = {ONE: sample(300.0, 200, 60.0), TWO: sample(300.0, 300, 30.0)}
    assert measure_traffic(before, after) == Traffic(80, 200)


def test_pod_counts_from_its_second_reading_on() -> None:
    assert measure_traffic({}, {ONE: sample(0.0, 1000)}) == UNKNOWN_TRAFFIC
    both = {ONE: sample(60.0, 60, 6.0), TWO: sample(60.0, 1000, 1000.0)}
    assert measure_traffic({ONE: sample(0.0, 0)}, both) == Traffic(60, 100)


def test_probes_of_the_controller_tell_no_latency() -> None:
    assert measure_traffic({ONE: sample(0.0, 0)}, {ONE: sample(300.0, 1, 3.0)}) == Traffic(0, None)


def test_change_of_less_than_a_tenth_is_no_news() -> None:
    assert not differs_notably(Traffic(100, 1000), Traffic(109, 901))
    assert differs_notably(Traffic(100, 1000), Traffic(112, 1000))
    assert differs_notably(Traffic(100, 1000), Traffic(100, 800))
    assert differs_notably(UNKNOWN_TRAFFIC, Traffic(0, None))
    assert differs_notably(Traffic(1, 1), UNKNOWN_TRAFFIC)
    assert not differs_notably(Traffic(0, None), Traffic(0, None))
