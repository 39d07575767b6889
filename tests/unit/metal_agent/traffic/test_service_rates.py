"""The mean of a minute of what a proxy counts."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.config import ListenerState, ProxyState, ServiceStats
from metal_agent.traffic.service_rates import MINUTE_SECONDS, ServiceRate, ServiceRates


def proxy_state(**tokens: int) -> ProxyState:
    return ProxyState(
        "1",
        1,
        tuple(ListenerState(name, "", 1, "", (), stats=ServiceStats(tokens_out=n)) for name, n in tokens.items()),
    )


def test_rate_is_the_mean_of_the_last_minute() -> None:
    rates = ServiceRates()
    assert rates.find_rate("chat", 0) is None
    for second in range(0, 301, 10):
        rates.note_state(proxy_state(chat=10 * second if second <= 200 else 2000), second)
        if second == 0:
            assert rates.find_rate("chat", 0) is None
        elif second <= 200:
            assert rates.find_rate("chat", second) == ServiceRate(10)
        elif second == 230:
            assert rates.find_rate("chat", second) == ServiceRate(5)
    assert rates.find_rate("chat", 300) == ServiceRate(0)


def test_rate_of_a_proxy_that_is_silent_is_unknown() -> None:
    rates = ServiceRates()
    rates.note_state(proxy_state(chat=0), 0)
    rates.note_state(proxy_state(chat=100), 10)
    assert rates.find_rate("chat", 70) == ServiceRate(10)
    assert rates.find_rate("chat", 71) is None
    rates.note_state(proxy_state(), 80)
    assert rates.find_rate("chat", 80) is None


def test_requests_and_their_time_are_those_that_ended_in_the_minute() -> None:
    rates = ServiceRates()
    for second, ended, lasted in ((0, 100, 900.0), (10, 101, 900.5), (20, 104, 903.0)):
        stats = ServiceStats(requests=ended, request_seconds=lasted)
        rates.note_state(ProxyState("1", 1, (ListenerState("chat", "", 1, "", (), stats=stats),)), second)
    assert rates.find_rate("chat", 20) == ServiceRate(0, 12, 0.75)
    rates.note_state(ProxyState("1", 1, (ListenerState("chat", "", 1, "", (), stats=ServiceStats(requests=1)),)), 30)
    assert rates.find_rate("chat", 30) is None, "another proxy counts from 0"


def test_another_proxy_counts_from_0() -> None:
    rates = ServiceRates()
    for second, tokens in ((0, 0), (10, 1000), (20, 5)):
        rates.note_state(proxy_state(chat=tokens), second)
    assert rates.find_rate("chat", 20) is None
    rates.note_state(proxy_state(chat=25), 30)
    assert rates.find_rate("chat", 30) == ServiceRate(2)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10_000)), min_size=2, max_size=30))
def test_rate_is_bounded_by_the_largest_one_and_memory_by_a_minute(steps: list[tuple[int, int]]) -> None:
    rates, now, total = ServiceRates(), 0, 0
    rates.note_state(proxy_state(chat=0), 0)
    for seconds, tokens in steps:
        now, total = now + seconds, total + tokens
        rates.note_state(proxy_state(chat=total), now)
        rate = rates.find_rate("chat", now)
        assert rate is not None
        assert 0 <= rate.tokens_per_second <= max(tokens / seconds for seconds, tokens in steps) * (1 + 1e-9)
        assert len(rates._counts["chat"]) <= MINUTE_SECONDS + 2
