"""Choice and count of requests, without a network."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.balance import InFlight, choose
from gateway.proxy.config import Backend


def backends(draining: list[bool]) -> list[Backend]:
    return [Backend(uid=f"u{i}", url=f"http://127.0.0.1:{i + 1}", draining=flag) for i, flag in enumerate(draining)]


@given(
    draining=st.lists(st.booleans(), max_size=5),
    counts=st.dictionaries(st.sampled_from(["u0", "u1", "u2", "u3", "u4"]), st.integers(1, 9)),
    tried=st.sets(st.sampled_from(["u0", "u1", "u2", "u3", "u4"])),
)
def test_the_least_busy_backend_that_may_be_asked_is_chosen(
    draining: list[bool], counts: dict[str, int], tried: set[str]
) -> None:
    eligible = {b.uid for b in backends(draining) if not b.draining} - tried
    chosen = choose(backends(draining), counts, tried)
    if chosen is None:
        assert not eligible
    else:
        assert chosen.uid in eligible
        assert counts.get(chosen.uid, 0) == min(counts.get(uid, 0) for uid in eligible)


def test_equals_keep_their_order_so_that_one_prompt_cache_stays_warm() -> None:
    chosen = choose(backends([False, False]), {}, ())
    assert chosen is not None
    assert chosen.uid == "u0"


async def test_idle_is_when_the_last_request_has_ended() -> None:
    in_flight = InFlight()
    with in_flight.request("a"):
        with in_flight.request("a"):
            waiting = asyncio.create_task(in_flight.wait_idle("a"))
            assert in_flight.counts() == {"a": 2}
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)
    assert in_flight.counts() == {}


async def test_who_never_answered_is_idle() -> None:
    await asyncio.wait_for(InFlight().wait_idle("unknown"), 1)


async def test_a_failed_request_is_not_counted_for_ever() -> None:
    in_flight = InFlight()
    with pytest.raises(ConnectionResetError), in_flight.request("a"):
        raise ConnectionResetError
    assert in_flight.counts() == {}
