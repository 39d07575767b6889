"""Limits that replicas count in a real Redis and a real Valkey: exact over replicas, outages and lost replies."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as StoreConnectionError

from gateway.cluster import redis_limits
from gateway.cluster.limiter import AdmittedRequest, Limiter
from gateway.cluster.rate_limits import LimitScope, RateLimits
from gateway.cluster.redis_limits import RedisLimiter, connect_store
from gateway.proxy.errors import RequestError
from tests.support.eventually import eventually
from tests.support.servers.limit_stores import STORES, StoreServer, run_store
from tests.unit.gateway.cluster.running_gateway import AUTHORIZED, gateway_in_process
from tests.unit.gateway.proxy.running_proxy import fake_engine

LIMIT = 600_000
TOKEN_US = 100
"""Time of a token at that limit, without a fraction."""
PATIENT_SECONDS = 60.0
"""For calls of tests without an outage: a busy machine is slow."""
NOTHING_RUNS = {b"r", b"t", b"R", b"T"}
"""Fields of a scope, without those of replicas where its requests run, if these have a limit."""
CLOCK = "redis.call('TIME')"


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StoreServer]:
    async with run_store(request.param, tmp_path, keeps_data=True) as server:
        yield server


class StoreClient:
    """A client of the store that may lose replies, and may have the script use a clock of the test."""

    def __init__(self, url: str, clock: Callable[[], int] | None = None) -> None:
        self._client = connect_store(url)
        self.admin = connect_store(url)
        """A connection of the test's own, which no outage of the replica closes."""
        self.connection_pool = self._client.connection_pool
        self._clock = clock
        self.calls = 0
        self.lost_replies = 0
        """Replies that are lost from now on."""

    async def evalsha(self, sha: str, keys: int, *arguments: Any) -> Any:
        self.calls += 1
        if self._clock:
            script = redis_limits._SCRIPT.decode()
            assert CLOCK in script
            seconds, microseconds = divmod(self._clock() // 1000, 1_000_000)
            script = script.replace(CLOCK, "{ARGV[3], ARGV[4]}")
            reply = await self._client.eval(script, keys, *arguments, str(seconds), str(microseconds))
        else:
            reply = await self._client.evalsha(sha, keys, *arguments)
        if self.lost_replies:
            self.lost_replies -= 1
            raise StoreConnectionError("the reply is lost")
        return reply

    async def eval(self, *arguments: Any) -> Any:
        return await self._client.eval(*arguments)

    async def kill_connections(self) -> None:
        """Close the connections of all clients, at the store."""
        await self.admin.client_kill_filter(_type="normal", skipme=True)

    async def close(self) -> None:
        await self._client.aclose()
        await self.admin.aclose()


class Replica:
    """One replica of the gateway with a key, whose limits are counted in the store."""

    def __init__(self, url: str, limits: RateLimits, *, seconds: float, clock: Callable[[], int] | None = None) -> None:
        self.client = StoreClient(url, clock)
        real = clock or time.monotonic_ns
        self.limiter = RedisLimiter(cast("Redis", self.client), clock=real, call_seconds=seconds)
        self.limiter.replicas = 2
        self.key = self.limiter.find_scope("key", "GatewayKey team-a/ci: spec", limits)
        self.task = asyncio.create_task(self.limiter.run())

    async def try_admit(self, tokens: int) -> AdmittedRequest | RequestError:
        try:
            return await self.limiter.admit((self.key,), tokens, "chat")
        except RequestError as error:
            return error

    async def admit(self, tokens: int) -> AdmittedRequest:
        admitted = await self.try_admit(tokens)
        assert isinstance(admitted, AdmittedRequest), admitted
        return admitted

    async def refuse(self, tokens: int) -> RequestError:
        error = await self.try_admit(tokens)
        assert isinstance(error, RequestError)
        return error

    async def flush(self) -> None:
        """Wait until the store knows all that this replica does."""
        limiter = self.limiter
        while limiter._wake.is_set() or limiter._batch or limiter._settlements or limiter._untold or limiter._waiting:
            assert not self.task.done()
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        await self.client.close()


Start = Callable[..., Replica]


@pytest.fixture
async def start(store: StoreServer) -> AsyncIterator[Start]:
    replicas = []

    def start_replica(
        limits: RateLimits, seconds: float = PATIENT_SECONDS, clock: Callable[[], int] | None = None
    ) -> Replica:
        replicas.append(Replica(store.url, limits, seconds=seconds, clock=clock))
        return replicas[-1]

    yield start_replica
    for replica in replicas:
        await replica.stop()


async def read_scope(replica: Replica) -> dict[bytes, int]:
    stored = await cast("Awaitable[dict[bytes, bytes]]", replica.client.admin.hgetall("pomona:limits:scope:key"))
    return {name: int(value) for name, value in stored.items()}


async def test_parallel_requests_at_two_replicas_have_one_limit(start: Start) -> None:
    replicas = [start(RateLimits(tokens_per_minute=100_000)) for _ in range(2)]
    outcomes = await asyncio.gather(*(replicas[number % 2].try_admit(30_000) for number in range(300)))
    admitted = [outcome for outcome in outcomes if isinstance(outcome, AdmittedRequest)]
    assert len(admitted) == 3
    error = next(outcome for outcome in outcomes if isinstance(outcome, RequestError))
    assert str(error).startswith("GatewayKey team-a/ci: spec.tokensPerMinute 100000 is used up: try again in 1")
    assert error.headers["x-ratelimit-limit-tokens"] == "100000"
    for request in admitted:
        request.settle(0)
    await asyncio.gather(*(replica.flush() for replica in replicas))
    await replicas[0].admit(95_000)
    assert set(await read_scope(replicas[0])) == NOTHING_RUNS
    assert sum(replica.client.calls for replica in replicas) < 40, "requests that come together go together"


async def test_concurrent_requests_are_counted_over_replicas(start: Start) -> None:
    first, second = start(RateLimits(concurrent_requests=3)), start(RateLimits(concurrent_requests=3))
    running = [await first.admit(0), await first.admit(0), await second.admit(0)]
    assert (await second.refuse(0)).status == 429
    running[0].settle(0)
    await first.flush()
    running.append(await second.admit(0))
    for request in running:
        request.settle(0)
        request.settle(0)
    await asyncio.gather(first.flush(), second.flush())
    assert set(await read_scope(first)) == NOTHING_RUNS


async def test_requests_that_end_while_their_number_has_no_limit_hold_no_place(start: Start) -> None:
    """The owner takes the limit out of the key while they run, and puts it back."""
    limits = RateLimits(requests_per_minute=1000, concurrent_requests=2)
    first, second = start(limits), start(limits)
    running = [await first.admit(0), await first.admit(0)]
    first.limiter.find_scope("key", first.key.path, RateLimits(requests_per_minute=1000))
    for request in running:
        request.settle(0)
    first.limiter.find_scope("key", first.key.path, limits)
    await first.flush()
    await second.admit(0)


async def test_places_of_a_replica_that_died_are_free_after_its_lease(start: Start) -> None:
    now_ns = 1_000_000_000_000

    def clock() -> int:
        return now_ns

    first, second = (start(RateLimits(concurrent_requests=2), clock=clock) for _ in range(2))
    await first.admit(0)
    await first.admit(0)
    await first.stop()
    now_ns += 29_000_000_000
    assert (await second.refuse(0)).status == 429
    now_ns += 2_000_000_000
    await second.admit(0)


async def test_flushed_scripts_are_sent_again(start: Start) -> None:
    replica = start(RateLimits(tokens_per_minute=LIMIT))
    await replica.admit(1)
    await replica.client.admin.script_flush()
    await replica.admit(1)


async def test_lost_reply_charges_nothing_twice(start: Start) -> None:
    replica = start(RateLimits(tokens_per_minute=LIMIT, concurrent_requests=5))
    first = await replica.admit(LIMIT // 2 - 1)
    begin_us = (await read_scope(replica))[b"t"]
    replica.client.lost_replies = 1
    (await replica.admit(1)).settle(1)
    await replica.flush()
    begin_us += TOKEN_US
    assert (await read_scope(replica))[b"t"] == begin_us

    replica.client.lost_replies = 3
    first.settle(LIMIT // 2 - 1001)
    error = await replica.refuse(10_000)
    assert (error.status, error.headers) == (503, {"Retry-After": "10"})
    assert str(error) == (
        "GatewayKey team-a/ci: spec.tokensPerMinute 600000 cannot be counted, because Redis "
        "(gateway.redis.secret) does not answer: try again in 10 s"
    )
    await eventually(lambda: not replica.limiter.is_away)
    second = await replica.admit(10_000)
    await replica.flush()
    stored = await read_scope(replica)
    assert stored[b"t"] - begin_us == (10_000 - 1000) * TOKEN_US
    second.settle(0)
    await replica.flush()
    stored = await read_scope(replica)
    assert stored[b"t"] - begin_us == -1000 * TOKEN_US
    assert set(stored) == NOTHING_RUNS


async def test_cancelled_request_holds_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = start(RateLimits(tokens_per_minute=LIMIT, concurrent_requests=5))
    await replica.admit(LIMIT // 2)
    begin_us = (await read_scope(replica))[b"t"]

    # Its client hangs up before the call to the store, or while that is under way.
    for passes in range(10):
        task = asyncio.create_task(replica.try_admit(1000))
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            outcome = await task  # it was faster
            assert isinstance(outcome, AdmittedRequest)
            outcome.settle(0)
        await replica.flush()
        assert (await read_scope(replica))[b"t"] == begin_us

    # Its client hangs up when the answer is there, and has not been taken.
    take_reply = replica.limiter._take_reply

    def take_reply_and_cancel(*arguments: Any) -> None:
        take_reply(*arguments)
        task.cancel()

    monkeypatch.setattr(replica.limiter, "_take_reply", take_reply_and_cancel)
    task = asyncio.create_task(replica.try_admit(1000))
    with pytest.raises(asyncio.CancelledError):
        await task
    await replica.flush()
    assert replica.key.running == 1
    assert (await read_scope(replica))[b"t"] == begin_us


async def test_store_that_lost_its_data_is_told_what_replicas_know(start: Start) -> None:
    limits = RateLimits(requests_per_minute=4, tokens_per_minute=LIMIT, concurrent_requests=3)
    first, second = start(limits), start(limits)
    running = [await first.admit(LIMIT // 2), await first.admit(0)]
    await first.client.admin.flushall()
    for replica in (first, second):
        replica.limiter._wake.set()
    await asyncio.gather(first.flush(), second.flush())
    assert "tokensPerMinute" in str(await second.refuse(LIMIT * 3 // 4))
    running.append(await second.admit(0))
    assert "concurrentRequests" in str(await second.refuse(0))
    for request in running:
        request.settle(0)
    await asyncio.gather(first.flush(), second.flush())
    await first.admit(0)
    assert "requestsPerMinute 4" in str(await first.refuse(0))


async def test_without_store_tokens_are_refused_and_the_rest_is_shared(store: StoreServer, start: Start) -> None:
    replica = start(RateLimits(requests_per_minute=4, tokens_per_minute=LIMIT), seconds=1.0)
    await replica.admit(1)
    await store.process.kill()
    assert (await replica.refuse(1)).status == 503
    assert replica.limiter.is_away
    calls = replica.client.calls
    for _ in range(1000):  # no request waits for the store, and none calls it
        with pytest.raises(RequestError, match="tokensPerMinute 600000 cannot be counted"):
            replica.limiter.admit_at_once((replica.key,), 1, "chat")
    assert replica.client.calls == calls
    # It has used a quarter of the limit, and so of its share of two.
    assert replica.limiter.admit_at_once((replica.key,), 0, "chat")
    with pytest.raises(RequestError, match="requestsPerMinute 4 is used up"):
        replica.limiter.admit_at_once((replica.key,), 0, "chat")
    assert replica.limiter.admit_at_once((LimitScope("free", "GatewayKey a/b: spec", RateLimits()),), 10, "chat")

    await store.start()
    await eventually(lambda: not replica.limiter.is_away)
    await replica.flush()
    # What was counted in the outage counts: three quarters of the limit.
    await replica.admit(1)
    assert "requestsPerMinute" in str(await replica.refuse(1))


class Load:
    """Clients of two replicas, which reserve tokens, use a part of them or more, and settle."""

    def __init__(self, replicas: list[Replica], seed: int) -> None:
        self._replicas = replicas
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self.used = 0
        self.outcomes: Counter[int] = Counter()
        """By status; 200: admitted."""
        self.stopped = False

    async def ask(self, replica: Replica) -> None:
        while not self.stopped:
            outcome = await replica.try_admit(100)
            if isinstance(outcome, RequestError):
                self.outcomes[outcome.status] += 1
                await asyncio.sleep(0.01)
                continue
            self.outcomes[200] += 1
            await asyncio.sleep(self._random.uniform(0.001, 0.02))  # the engine works
            used = self._random.choice([0, 10, 50, 100, 130])
            outcome.settle(used)
            self.used += used

    async def wait_for(self, status: int, more: int) -> None:
        """Wait until so many more requests have had that status, at any replica."""
        wanted = self.outcomes[status] + more
        await eventually(lambda: self.outcomes[status] >= wanted)


async def test_outages_lose_no_charge_and_double_none(store: StoreServer, start: Start) -> None:
    """A tenth of the tokens is left beside a long request: the work never ends, so that each microsecond shows."""
    limits = RateLimits(tokens_per_minute=6_000_000, concurrent_requests=1000)
    replicas = [start(limits, seconds=0.25) for _ in range(2)]

    async def admit_long_request() -> AdmittedRequest | None:
        outcome = await replicas[0].try_admit(5_400_000)
        return outcome if isinstance(outcome, AdmittedRequest) else None

    long_request = await eventually(admit_long_request)
    assert long_request
    begin_us = (await read_scope(replicas[0]))[b"t"]
    load = Load(replicas, seed=1)
    clients = [asyncio.create_task(load.ask(replicas[number % 2])) for number in range(16)]
    pid = store.process.pid
    for _ in range(2):
        await load.wait_for(200, more=100)
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: all(replica.limiter.is_away for replica in replicas))
        await load.wait_for(503, more=50)
        os.kill(pid, signal.SIGCONT)
        await eventually(lambda: not any(replica.limiter.is_away for replica in replicas))
        await load.wait_for(200, more=100)
        await replicas[0].client.kill_connections()
        await load.wait_for(200, more=100)
        await store.process.kill()
        await load.wait_for(503, more=50)
        await store.start()
        pid = store.process.pid
        await eventually(lambda: not any(replica.limiter.is_away for replica in replicas))
        await load.wait_for(200, more=100)
    load.stopped = True
    await asyncio.gather(*clients)
    await asyncio.gather(*(replica.flush() for replica in replicas))

    stored = await read_scope(replicas[0])
    assert stored[b"t"] > begin_us
    assert stored[b"t"] - begin_us == load.used * 10
    assert [replica.key.running for replica in replicas] == [1, 0]
    long_request.settle(None)
    await asyncio.gather(*(replica.flush() for replica in replicas))
    assert set(await read_scope(replicas[0])) == NOTHING_RUNS
    assert set(load.outcomes) <= {200, 429, 503}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("advance"), st.sampled_from([0.5, 1, 5, 20]), st.just(0)),
        st.tuples(st.just("admit"), st.integers(1, LIMIT), st.just(0)),
        st.tuples(st.just("admit"), st.sampled_from([LIMIT // 12, LIMIT // 2]), st.just(0)),
        st.tuples(st.just("settle"), st.integers(0, 30), st.sampled_from([0, 0.1, 1, 1.5])),
        st.tuples(st.just("settle"), st.integers(0, 30), st.sampled_from([0, 0.1, 1, 1.5])),
    ),
    min_size=10,
    max_size=30,
)


@pytest.mark.parametrize("name", STORES)
def test_store_decides_as_memory_does(name: str, tmp_path: Path) -> None:
    """The script has the arithmetic once more: both count the same requests, by the same clock."""

    async def count_twice(url: str, steps: list[tuple[str, float, float]]) -> None:
        now_ns = 1_000_000_000_000

        def clock() -> int:
            return now_ns

        limits = RateLimits(requests_per_minute=7, tokens_per_minute=LIMIT, concurrent_requests=4)
        replica = Replica(url, limits, seconds=PATIENT_SECONDS, clock=clock)
        memory = Limiter(clock)
        key = memory.find_scope("key", "GatewayKey team-a/ci: spec", limits)
        admitted: list[tuple[AdmittedRequest, AdmittedRequest]] = []
        await replica.client.admin.flushall()
        for step, first, second in steps:
            if step == "advance":
                now_ns += int(first * 1e9)
            elif step == "admit":
                outcome, expected = await asyncio.gather(
                    replica.try_admit(int(first)), memory.admit((key,), int(first), "chat"), return_exceptions=True
                )
                if isinstance(outcome, AdmittedRequest) and isinstance(expected, AdmittedRequest):
                    assert outcome.headers("chat") == expected.headers("chat")
                    admitted.append((outcome, expected))
                else:
                    assert isinstance(outcome, RequestError)
                    assert isinstance(expected, RequestError)
                    assert (str(outcome), outcome.headers) == (str(expected), expected.headers)
            elif admitted:
                for request in admitted[int(first) % len(admitted)]:
                    request.settle(int(request.tokens * second))
                await replica.flush()
        await replica.stop()

    @settings(max_examples=40)
    @given(STEPS)
    def check(url: str, steps: list[tuple[str, float, float]]) -> None:
        asyncio.run(count_twice(url, steps))

    async def serve() -> None:
        async with run_store(name, tmp_path, keeps_data=False) as server:
            await asyncio.to_thread(check, server.url)

    asyncio.run(serve())


def test_url_of_a_store_is_checked() -> None:
    with pytest.raises(ValueError, match="redis://"):
        connect_store("http://127.0.0.1:6379")


async def test_two_gateways_admit_a_limit_together(store: StoreServer) -> None:
    """A client that is spread over both gets no more than one gateway alone would give."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(fake_engine(answer_at_once))
        urls = []
        for _ in range(2):
            client = connect_store(store.url)
            stack.push_async_callback(client.aclose)
            limiter = RedisLimiter(client, call_seconds=PATIENT_SECONDS)
            counting = asyncio.create_task(limiter.run())
            stack.callback(counting.cancel)
            gateway = await stack.enter_async_context(gateway_in_process(limiter))
            gateway.cluster.put_key(requestsPerMinute=3)
            gateway.cluster.serve("team-a", "chat", engine.url)
            urls.append(gateway.url)
        http = await stack.enter_async_context(aiohttp.ClientSession())

        async def ask(url: str) -> int:
            body = {"model": "chat", "messages": []}
            async with http.post(f"{url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
                return response.status

        statuses = await asyncio.gather(*(ask(url) for url in urls * 4))
        assert Counter(statuses) == {200: 3, 429: 5}


async def answer_at_once(_request: web.BaseRequest) -> web.StreamResponse:
    return web.json_response({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
