"""The choice of the endpoint for a request: the one of its conversation, as long as that has not too much work.

Each conversation orders the endpoints by weighted rendezvous hashing: all replicas of the gateway have the same order
without any shared state, and when an endpoint leaves, only its own conversations move, and return with it. The first
one in this order that is within the bound gets the request. The bound is in outstanding tokens: a share of the total by
speed, and some requests more. These are there because another endpoint has to compute the whole prompt again: to wait
behind a few requests costs less than to move, and a conversation that moves with each change of the load finds no cache
anywhere.
"""

import functools
import hashlib
import math
import statistics
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Final

from gateway.cluster.endpoint_health import EndpointHealth

LOAD_FACTOR: Final = 1.25
"""An endpoint keeps its conversations up to so many times its share of the outstanding tokens, and some requests."""
MOST_SPARE_REQUESTS: Final = 8
USUAL_SLOTS: Final = 4
"""For an engine whose slots are not known."""
_ORDERED: Final = 16
"""The endpoints that a conversation may have; if all of these have too much work, the one with the least gets it."""
_REMEMBERED_ORDERS: Final = 8192
_SPEED_STEP: Final = math.log(1.1)
_MOST_FROM_MEDIAN: Final = math.log(10)
"""No weight is further from the median, so that a false speed takes no endpoint all of its conversations."""

_MULTIPLIER: Final = 0x9E3779B97F4A7C15
_LOWEST_64_BITS: Final = (1 << 64) - 1
_LOG_2_64: Final = 64 * math.log(2)


class GatewayEndpoint:
    """An endpoint of a service, with the work that this process has given to it.

    Args:
        uid: its identity, the same in every replica of the gateway, and again when the endpoint comes back.
        weight: its speed, by `weigh_speeds`; every replica must have the same.
        slots: the requests that its engine works on at once.
    """

    __slots__ = ("health", "outstanding_tokens", "seed", "spare_requests", "uid", "weight")

    def __init__(self, uid: str, weight: float = 1.0, slots: int = USUAL_SLOTS) -> None:
        self.uid = uid
        self.weight = weight
        self.spare_requests = min(slots + 1, MOST_SPARE_REQUESTS)
        """The requests above its share, of the size of the next one, with which it still keeps its conversations."""
        self.seed = hash_seed(uid)
        self.outstanding_tokens = 0
        self.health = EndpointHealth()

    def begin_request(self, tokens: int, now: float) -> None:
        """Count a request of so many tokens, which is sent to the endpoint now."""
        self.outstanding_tokens += tokens
        self.health.begin_attempt(now)

    def end_request(self, tokens: int) -> None:
        """Count a request less, whatever has become of it."""
        self.outstanding_tokens -= tokens


class EndpointGroup:
    """The endpoints of one service that take requests. When they or a weight change, make another group of them."""

    __slots__ = ("endpoints",)

    def __init__(self, endpoints: Sequence[GatewayEndpoint]) -> None:
        self.endpoints = tuple(sorted(endpoints, key=attrgetter("uid")))  # the same in every replica


def choose_endpoint(
    group: EndpointGroup, affinity: int | None, tokens: int, *, excluded: Collection[str], now: float, turn: int
) -> GatewayEndpoint | None:
    """Return the endpoint for a request; None if every one of the group is excluded.

    Args:
        group: the endpoints of the service. An ejected one is passed over, unless all are.
        affinity: the number of the request's conversation; None: it has none, and the least busy endpoint gets it.
        tokens: those that the request may use; a request without tokens counts as one.
        excluded: uids of endpoints that were tried.
        now: the time, by the clock of `EndpointHealth`.
        turn: a number that grows with each request; equally busy endpoints take turns by it.
    """
    # 1. The first in the order of its conversation, if it works and has few requests: of most services, it mostly does.
    tokens = tokens or 1
    order = order_endpoints(group, affinity) if affinity is not None else ()
    if order and not excluded:
        first = order[0]
        if first.health.ejected_until <= now and first.outstanding_tokens <= (first.spare_requests - 1) * tokens:
            return first

    # 2. The endpoints that may get it: those that work or else, if there are none, all.
    candidates = [endpoint for endpoint in group.endpoints if endpoint.uid not in excluded]
    usable = [endpoint for endpoint in candidates if endpoint.health.ejected_until <= now] or candidates

    # 3. The first in the order of its conversation that is within the bound.
    bound_per_weight = 0.0  # summed up only if the first one has more than a few requests
    for endpoint in order:
        if endpoint not in usable:
            continue
        above_bound = float(endpoint.outstanding_tokens + tokens - endpoint.spare_requests * tokens)
        if above_bound > 0:
            bound_per_weight = bound_per_weight or _compute_bound(usable, tokens)
            above_bound -= bound_per_weight * endpoint.weight
        if above_bound <= 0:
            return endpoint

    # 4. The one with the least work for its speed; of several, one after the other.
    loads = [(endpoint.outstanding_tokens + tokens) / endpoint.weight for endpoint in usable]
    least = min(loads, default=0.0)
    least_busy = [endpoint for endpoint, load in zip(usable, loads, strict=True) if load == least]
    return least_busy[turn % len(least_busy)] if least_busy else None


@functools.lru_cache(maxsize=_REMEMBERED_ORDERS)
def order_endpoints(group: EndpointGroup, affinity: int) -> list[GatewayEndpoint]:
    """Return the first endpoints in the order of a conversation; the remembered orders are of those that go on."""

    def score(endpoint: GatewayEndpoint) -> float:
        return score_choice(affinity, endpoint.seed, endpoint.weight)

    return sorted(group.endpoints, key=score, reverse=True)[:_ORDERED]


def hash_seed(name: str) -> int:
    """Return the number, of 64 bits, by which `score_choice` tells choices apart."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def score_choice(affinity: int, seed: int, weight: float) -> float:
    """Return how much a conversation prefers one of several choices; of all conversations, each is first by its weight.

    A hash of both is made a number between 0 and 1, of which the logarithm is divided by the weight: the larger the
    weight, the more often is the quotient the largest.
    """
    mixed = (affinity ^ seed) * _MULTIPLIER & _LOWEST_64_BITS
    return (math.log(mixed + 1) - _LOG_2_64) / weight


def weigh_speeds(tokens_per_second: Sequence[float | None]) -> list[float]:
    """Return the weights of endpoints by their speeds; one whose speed is unknown counts as their mean.

    They are in steps of a tenth, so that no conversation moves when a measurement varies a little. The largest is about
    100 times the least at most.
    """
    logarithms = [math.log(speed) if speed else None for speed in tokens_per_second]
    known = [logarithm for logarithm in logarithms if logarithm is not None] or [0.0]
    median = statistics.median(known)
    least, most = median - _MOST_FROM_MEDIAN, median + _MOST_FROM_MEDIAN
    mean = statistics.fmean([min(max(logarithm, least), most) for logarithm in known])
    bounded = [mean if logarithm is None else min(max(logarithm, least), most) for logarithm in logarithms]
    return [math.exp(round(logarithm / _SPEED_STEP) * _SPEED_STEP) for logarithm in bounded]


def _compute_bound(endpoints: Sequence[GatewayEndpoint], tokens: int) -> float:
    """Return the outstanding tokens for each unit of weight up to which an endpoint keeps its conversations."""
    total = sum([endpoint.outstanding_tokens for endpoint in endpoints]) + tokens
    return LOAD_FACTOR * total / sum([endpoint.weight for endpoint in endpoints])
