"""The choice of a backend and the count of its requests, without a network."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.config import Backend
from gateway.proxy.load_balancer import InFlight, pick_backend

UIDS = ["u0", "u1", "u2", "u3", "u4"]


@given(
    backends=st.lists(st.tuples(st.booleans(), st.none() | st.integers(1, 4)), max_size=5),
    counts=st.dictionaries(st.sampled_from(UIDS), st.integers(1, 9)),
    tried=st.sets(st.sampled_from(UIDS)),
    free=st.booleans(),
)
def test_least_busy_eligible_backend_is_picked(
    backends: list[tuple[bool, int | None]], counts: dict[str, int], tried: set[str], free: bool
) -> None:
    candidates = [backend(uid, *fields) for uid, fields in zip(UIDS, backends, strict=False)]
    eligible = {candidate.uid for candidate in candidates if not candidate.draining} - tried
    if free:
        eligible -= {
            candidate.uid
            for candidate in candidates
            if candidate.concurrency and counts.get(candidate.uid, 0) >= candidate.concurrency
        }
    chosen = pick_backend(candidates, counts, tried, only_free=free)
    if chosen is None:
        assert not eligible
    else:
        assert chosen.uid in eligible
        assert counts.get(chosen.uid, 0) == min(counts.get(uid, 0) for uid in eligible)


def backend(uid: str, draining: bool = False, concurrency: int | None = None) -> Backend:
    return Backend(uid=uid, url="http://127.0.0.1:1", draining=draining, concurrency=concurrency)


def test_first_of_equally_busy_backends_is_picked_so_its_prompt_cache_stays_warm() -> None:
    chosen = pick_backend([backend("u0"), backend("u1")], {})
    assert chosen is not None
    assert chosen.uid == "u0"


async def test_backend_is_idle_when_its_last_request_has_ended() -> None:
    in_flight = InFlight(lambda _: None)
    assert in_flight.idle_seconds("a") is None
    in_flight.begin("a")
    in_flight.begin("a")
    waiting = asyncio.create_task(in_flight.wait_idle("a"))
    assert in_flight.counts() == {"a": 2}
    in_flight.end("a")
    await asyncio.sleep(0)
    assert not waiting.done()
    assert in_flight.idle_seconds("a") == 0
    in_flight.end("a")
    await asyncio.wait_for(waiting, 60)
    assert in_flight.counts() == {}
    assert 0 < (in_flight.idle_seconds("a") or 0) < 60
    in_flight.forget_others(["b"])
    assert in_flight.idle_seconds("a") is None


async def test_backend_without_any_request_is_idle() -> None:
    await asyncio.wait_for(InFlight(lambda _: None).wait_idle("unknown"), 60)


async def test_next_request_to_any_backend_ends_the_wait_for_one() -> None:
    in_flight = InFlight(lambda _: None)
    waiting = [asyncio.create_task(in_flight.wait_busy()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    in_flight.begin("a")
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    await asyncio.wait_for(in_flight.wait_busy(), 60)
    in_flight.end("a")
    waiting = [asyncio.create_task(in_flight.wait_busy())]
    await asyncio.sleep(0)
    assert not waiting[0].done()
    in_flight.count_elsewhere({"b": 1})
    await asyncio.wait_for(waiting[0], 60)
