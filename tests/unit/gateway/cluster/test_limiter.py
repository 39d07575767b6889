"""Limits counted in memory: what is admitted in any window, by one replica and by several, and what is given back."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.limiter import AdmittedRequest, Limiter
from gateway.cluster.rate_limits import MINUTE_US, LimitScope, RateLimits
from gateway.proxy.errors import RequestError

LIMIT = 10_000
SECOND_NS = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000 * SECOND_NS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND_NS)


@dataclass
class Admitted:
    """A request as its client knows it."""

    at_seconds: float
    request: AdmittedRequest
    used: int | None = None

    @property
    def charged(self) -> int:
        """The tokens that it may use, or has used as far as they were reserved."""
        return self.request.tokens if self.used is None else min(self.used, self.request.tokens)


NO_LIMITS = RateLimits()
TOKEN_LIMIT = RateLimits(tokens_per_minute=LIMIT)


@dataclass
class World:
    """Replicas, of which each has a key and its namespace, and the requests that they have admitted."""

    replicas: int = 1
    key: RateLimits = TOKEN_LIMIT
    namespace: RateLimits = NO_LIMITS
    clock: Clock = field(default_factory=Clock)
    admitted: list[Admitted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limiters = [Limiter(self.clock, lambda: 0.0) for _ in range(self.replicas)]
        self.scopes = []
        for limiter in self.limiters:
            limiter.replicas = self.replicas
            key = limiter.find_scope("key", "GatewayKey team-a/ci: spec", self.key)
            namespace = limiter.find_scope("namespace", "Namespace team-a: limits", self.namespace)
            self.scopes.append((key, namespace))

    def admit(self, tokens: int, replica: int = 0) -> Admitted | RequestError:
        try:
            request = self.limiters[replica].admit_at_once(self.scopes[replica], tokens, "chat")
        except RequestError as error:
            return error
        assert request
        self.admitted.append(Admitted(self.clock.now_ns / SECOND_NS, request))
        return self.admitted[-1]

    def settle(self, index: int, used: int) -> None:
        admitted = self.admitted[index]
        admitted.request.settle(used)
        admitted.used = used if admitted.used is None else admitted.used

    def find_overshoot(self, limit: int, largest_beyond_share: int = 0) -> list[str]:
        """Return each window between two admissions in which more was charged than the promise allows."""
        overshoots = []
        for start, first in enumerate(self.admitted):
            charged = 0
            for number, last in enumerate(self.admitted[start:], start=1):
                charged += last.charged
                seconds = last.at_seconds - first.at_seconds
                rounding = number * limit / MINUTE_US * self.replicas
                if charged > limit * (1 + seconds / 60) + largest_beyond_share + rounding + 1e-6:
                    overshoots.append(f"{charged} in {seconds} s")
        return overshoots


def allow(world: World, tokens: int, replica: int = 0) -> Admitted:
    admitted = world.admit(tokens, replica)
    assert isinstance(admitted, Admitted), admitted
    return admitted


def refuse(world: World, tokens: int, replica: int = 0) -> RequestError:
    error = world.admit(tokens, replica)
    assert isinstance(error, RequestError), error
    return error


def state(scopes: Sequence[LimitScope], now_us: int) -> list[tuple[int, int, int]]:
    return [(scope.requests.backlog_us(now_us), scope.tokens.backlog_us(now_us), scope.running) for scope in scopes]


# Few values, and large ones, so that works meet each other; many steps, so that there is something to give back.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("advance"), st.sampled_from([0.5, 1, 5, 10, 20, 30, 90]), st.just(0)),
        st.tuples(st.just("admit"), st.sampled_from([1 / 12, 1 / 6, 1 / 3, 1 / 2, 1]), st.integers(0, 2)),
        st.tuples(st.just("fill"), st.just(0), st.integers(0, 2)),
        st.tuples(st.just("settle"), st.integers(0, 30), st.sampled_from([0, 0, 0.01, 0.5, 1, 1.5])),
        st.tuples(st.just("settle"), st.integers(0, 30), st.sampled_from([0, 0, 0.01, 0.5, 1, 1.5])),
    ),
    min_size=20,
    max_size=40,
)
Steps = list[tuple[str, float, float]]


def play(world: World, steps: Steps) -> None:
    for step, first, second in steps:
        replica = int(second) % world.replicas
        now_us = world.clock.now_ns // 1000
        if step == "advance":
            world.clock.advance(first)
        elif step == "admit":
            world.admit(int(first * LIMIT), replica)
        elif step == "fill":  # all that is left, as the client that takes most would
            backlog_us = world.scopes[replica][0].tokens.backlog_us(now_us)
            world.admit(max(LIMIT * (MINUTE_US - backlog_us) // MINUTE_US, 1), replica)
        elif world.admitted:
            index = int(first) % len(world.admitted)
            world.settle(index, int(world.admitted[index].request.tokens * second))
        for scopes in world.scopes:
            assert all(value >= 0 for part in state(scopes, now_us) for value in part)


@given(STEPS)
def test_no_window_has_more_tokens_than_the_promise(steps: Steps) -> None:
    world = World()
    play(world, steps)
    assert world.find_overshoot(LIMIT) == []


@given(STEPS, st.integers(2, 3))
def test_shares_of_replicas_exceed_the_limit_by_one_request_each_at_most(steps: Steps, replicas: int) -> None:
    world = World(replicas)
    play(world, steps)
    assert world.find_overshoot(LIMIT, largest_beyond_share=(replicas - 1) * LIMIT) == []


@given(STEPS)
def test_requests_a_minute_hold_in_every_window(steps: Steps) -> None:
    world = World(key=RateLimits(requests_per_minute=7))
    play(world, steps)
    for start, first in enumerate(world.admitted):
        for number, last in enumerate(world.admitted[start:], start=1):
            assert number <= 7 * (1 + (last.at_seconds - first.at_seconds) / 60) + 0.001


@given(STEPS, st.floats(0, 1), st.floats(0, 2))
def test_second_settlement_changes_nothing(steps: Steps, used: float, again: float) -> None:
    world = World(key=RateLimits(60, LIMIT, 5))
    play(world, [*steps, ("advance", 200, 0), ("admit", 0.5, 0)])
    world.settle(-1, int(LIMIT * used))
    settled = state(world.scopes[0], world.clock.now_ns // 1000)
    world.settle(-1, int(LIMIT * again))
    assert state(world.scopes[0], world.clock.now_ns // 1000) == settled


@given(STEPS)
def test_refused_request_is_charged_to_none(steps: Steps) -> None:
    world = World(key=RateLimits(60, LIMIT, 5), namespace=RateLimits(30, LIMIT, 3))
    play(world, steps)
    before = state(world.scopes[0], world.clock.now_ns // 1000)
    if isinstance(world.admit(LIMIT // 2), RequestError):
        assert state(world.scopes[0], world.clock.now_ns // 1000) == before


@given(st.lists(st.integers(1, LIMIT), max_size=20))
def test_idle_minute_brings_back_the_whole_limit(requests: list[int]) -> None:
    world = World()
    for tokens in requests:
        world.admit(tokens)
    world.clock.advance(60)
    allow(world, LIMIT)
    refuse(world, 10)


@given(st.lists(st.integers(1, LIMIT // 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_what_was_not_used_is_admitted_again(requests: list[int], order: random.Random) -> None:
    world = World()
    allow(world, LIMIT - sum(requests))  # its work comes first, so that of the others lies ahead
    for tokens in requests:
        allow(world, tokens)
    indexes = list(range(1, len(requests) + 1))
    order.shuffle(indexes)
    for index in indexes:
        world.settle(index, 0)
    allow(world, sum(requests))


def test_time_that_is_over_is_not_given_back() -> None:
    """Else long requests, ended one by one, would admit many times the limit in a minute."""
    world = World()
    allow(world, LIMIT)
    world.clock.advance(60)
    allow(world, LIMIT)
    world.settle(0, 0)
    refuse(world, LIMIT // 2)


def test_parallel_requests_reserve_what_they_may_use() -> None:
    world = World()
    outcomes = [world.admit(1000) for _ in range(50)]
    assert sum(isinstance(outcome, Admitted) for outcome in outcomes) == 10
    error = next(outcome for outcome in outcomes if isinstance(outcome, RequestError))
    assert str(error) == "GatewayKey team-a/ci: spec.tokensPerMinute 10000 is used up: try again in 6 s"
    assert (error.status, error.headers["Retry-After"]) == (429, "6")


def test_usage_beyond_the_reservation_is_a_debt() -> None:
    world = World()
    allow(world, 1000)
    world.settle(0, 15_000)
    assert refuse(world, 1000).headers["Retry-After"] == "36"
    world.clock.advance(36)
    allow(world, 1000)


def test_client_waits_for_two_minutes_at_most() -> None:
    world = World()
    allow(world, 1000)
    world.settle(0, 1_000_000)
    error = refuse(world, 1000)
    assert error.headers["Retry-After"] == "120"
    assert error.headers["x-ratelimit-remaining-tokens"] == "0"


def test_request_that_never_fits_is_no_endless_429() -> None:
    error = refuse(World(key=RateLimits(tokens_per_minute=LIMIT)), LIMIT + 1)
    assert (error.status, error.headers) == (400, {"x-should-retry": "false"})
    assert str(error) == (
        "GatewayKey team-a/ci: spec.tokensPerMinute 10000 is less than the 10001 tokens that this request may use: "
        "lower its max tokens, send a shorter prompt, or raise the limit"
    )


def test_namespace_holds_over_its_keys() -> None:
    world = World(key=RateLimits(tokens_per_minute=LIMIT), namespace=RateLimits(requests_per_minute=2))
    other_key = world.limiters[0].find_scope("other", "GatewayKey team-a/two: spec", RateLimits())
    allow(world, 1)
    assert world.limiters[0].admit_at_once((other_key, world.scopes[0][1]), 1, "chat")
    assert str(refuse(world, 1)).startswith("Namespace team-a: limits.requestsPerMinute 2 is used up")


def test_concurrent_requests_hold_their_place_until_they_are_settled() -> None:
    world = World(key=RateLimits(concurrent_requests=2))
    allow(world, 0)
    allow(world, 0)
    assert str(refuse(world, 0)) == "GatewayKey team-a/ci: spec.concurrentRequests 2 is used up: try again in 1 s"
    world.clock.advance(80)
    world.settle(0, 0)
    allow(world, 0)
    assert refuse(world, 0).headers["Retry-After"] == "5"  # requests took 10 s in the mean, and two run


def test_request_without_tokens_does_not_wait_for_them() -> None:
    world = World()
    allow(world, LIMIT)
    allow(world, 0)


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_share_of_a_small_limit_admits_one_request(replicas: int) -> None:
    world = World(replicas, key=RateLimits(requests_per_minute=1, concurrent_requests=1))
    for replica in range(replicas):
        allow(world, 0, replica)
        world.settle(-1, 0)
        refuse(world, 0, replica)
    world.clock.advance(60 * replicas - 1)
    refuse(world, 0)
    world.clock.advance(1)
    allow(world, 0)


def test_replica_that_dies_leaves_its_share_to_the_others() -> None:
    world = World(2)
    allow(world, LIMIT // 4)  # half of a share
    world.limiters[0].replicas = 1
    allow(world, LIMIT // 2)  # half of the limit: the other one may have used as much of its share
    refuse(world, 10)


def test_changed_limit_keeps_the_part_that_is_used() -> None:
    world = World()
    allow(world, LIMIT // 2)
    world.limiters[0].find_scope("key", "GatewayKey team-a/ci: spec", RateLimits(tokens_per_minute=LIMIT * 10))
    refuse(world, LIMIT * 5 + 100)
    allow(world, LIMIT * 5)


def test_unknown_usage_keeps_the_reservation() -> None:
    world = World()
    allow(world, LIMIT).request.settle(None)
    refuse(world, 10)


def test_headers_are_those_of_the_scope_that_admits_least() -> None:
    world = World(key=RateLimits(60, 60_000), namespace=RateLimits(600, 30_000))
    assert allow(world, 3_000).request.headers("chat") == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "30000",
        "x-ratelimit-remaining-tokens": "27000",
        "x-ratelimit-reset-tokens": "6s",
    }
    assert allow(world, 3_000).request.headers("messages") == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "58",
        "anthropic-ratelimit-requests-reset": "1970-01-01T00:00:02Z",
        "anthropic-ratelimit-tokens-limit": "30000",
        "anthropic-ratelimit-tokens-remaining": "24000",
        "anthropic-ratelimit-tokens-reset": "1970-01-01T00:00:12Z",
    }
    assert World(key=RateLimits()).limiters[0].headers((), "chat") == {}
