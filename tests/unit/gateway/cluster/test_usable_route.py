"""The choice of a service by a route: in the share of its weight, alike in all replicas, apart from its endpoints."""

from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest

from gateway.cluster.endpoint_choice import EndpointGroup, GatewayEndpoint, hash_seed, order_endpoints
from gateway.cluster.routed_service import RoutedService
from gateway.cluster.usable_route import UsableRoute
from gateway.cluster.watched_objects import RouteTarget, WatchedRoute, WatchedService

NUMBERS = [hash_seed(str(conversation)) for conversation in range(40_000)]
SHARE = 0.01
"""The most by which a share of 40,000 conversations differs from its weight: four standard deviations."""


def service(name: str) -> RoutedService:
    metadata = {"namespace": "team-a", "name": name, "uid": name, "creationTimestamp": "2026-11-29T12:00:00Z"}
    return RoutedService(msgspec.convert({"metadata": metadata}, WatchedService))


SERVICES = {name: service(name) for name in "abcd"}


def route(weights: Mapping[str, int], absent: str = "", **fallbacks: tuple[str, ...]) -> UsableRoute:
    metadata = {"namespace": "team-a", "name": "r", "creationTimestamp": "2026-11-29T12:00:00Z"}
    spec = {
        "services": [{"name": name, "weight": weight} for name, weight in weights.items()],
        "fallbacks": [{"name": name, "when": when} for name, when in fallbacks.items()],
    }
    watched = msgspec.convert({"metadata": metadata, "spec": spec}, WatchedRoute)

    def find(target: RouteTarget) -> RoutedService | None:
        return SERVICES[target.name] if target.name not in absent else None

    return UsableRoute(watched, find)


def choose(usable: UsableRoute, number: int) -> str:
    return usable.choose_by_number(number).model


@pytest.mark.parametrize(
    "weights", [{"a": 1, "b": 1}, {"a": 9, "b": 1}, {"a": 50, "b": 30, "c": 20}, {"a": 1000, "b": 1, "c": 0}]
)
def test_services_share_conversations_by_weight(weights: Mapping[str, int]) -> None:
    usable = route(weights)
    counts = Counter(choose(usable, number) for number in NUMBERS)
    total = sum(weights.values())
    for name, weight in weights.items():
        assert counts[name] / len(NUMBERS) == pytest.approx(weight / total, abs=SHARE)
    assert weights.get("c") != 0 or not counts["c"]


def test_replicas_choose_alike_whatever_the_order() -> None:
    one, other = route({"a": 2, "b": 1, "c": 1}), route({"c": 1, "a": 2, "b": 1})
    assert all(choose(one, number) == choose(other, number) for number in NUMBERS[:2000])


def test_new_weight_moves_no_more_conversations_than_it_has_to() -> None:
    before, after = route({"a": 90, "b": 10}), route({"a": 80, "b": 20})
    moves = Counter((choose(before, number), choose(after, number)) for number in NUMBERS)
    assert moves["b", "a"] == 0
    assert moves["a", "b"] / len(NUMBERS) == pytest.approx(0.1, abs=SHARE)


def test_conversations_of_a_service_that_leaves_are_shared_by_the_others() -> None:
    before, after = route({"a": 1, "b": 1, "c": 2}), route({"a": 1, "b": 1, "c": 2}, absent="a")
    moves = Counter((choose(before, number), choose(after, number)) for number in NUMBERS)
    assert {pair for pair in moves if pair[0] != pair[1]} == {("a", "b"), ("a", "c")}
    assert moves["a", "c"] / len(NUMBERS) == pytest.approx(0.25 * 2 / 3, abs=SHARE)


@pytest.mark.parametrize("endpoints", [2, 3, 8])
def test_conversations_of_a_service_are_spread_over_all_of_its_endpoints(endpoints: int) -> None:
    """The same number chooses the service and then the endpoint: neither choice may follow from the other."""
    usable = route({"a": 1, "b": 1, "c": 1})
    group = EndpointGroup([GatewayEndpoint(f"team-a/b http://10.0.0.{n}:8080") for n in range(endpoints)])
    at_service = [number for number in NUMBERS if choose(usable, number) == "b"]
    counts = Counter(order_endpoints(group, number)[0].uid for number in at_service)
    assert len(counts) == endpoints
    for count in counts.values():
        assert count / len(at_service) == pytest.approx(1 / endpoints, abs=2 * SHARE)


def test_fallbacks_stand_in_by_cause_and_in_their_order() -> None:
    usable = route({"a": 1}, b=("ContextTooLong",), c=(), d=("NoCapacity", "CauseOfALaterRelease"))
    tried: list[RoutedService] = []
    assert [usable.find_fallback(cause, tried) for cause in ("ContextTooLong", "NoCapacity")] == [
        SERVICES["b"],
        SERVICES["c"],
    ]
    tried = [SERVICES["a"], SERVICES["c"]]
    assert usable.find_fallback("Unavailable", tried) is None
    assert usable.find_fallback("NoCapacity", tried) is SERVICES["d"]


def test_route_is_usable_if_a_request_has_a_service_to_go_to() -> None:
    assert route({"a": 1}).is_usable
    assert route({"a": 1}, absent="a", b=("Unavailable",)).is_usable
    assert not route({"a": 1}, absent="a", b=("NoCapacity",)).is_usable
    assert not route({"a": 0}).is_usable
    assert not route({"a": 1}, absent="ab", b=()).is_usable
