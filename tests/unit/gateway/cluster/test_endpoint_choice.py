"""The choice of an endpoint: by conversation within a bound of load, else by load; the same in every replica."""

import random
from collections import Counter
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.endpoint_choice import (
    LOAD_FACTOR,
    EndpointGroup,
    GatewayEndpoint,
    choose_endpoint,
    order_endpoints,
    weigh_speeds,
)

NOW = 1000.0
UIDS = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=8, unique=True)
AFFINITIES = st.integers(0, 2**64 - 1)


@st.composite
def endpoints(draw: st.DrawFn) -> list[GatewayEndpoint]:
    """Endpoints with any weight, slots, load and health."""
    made = []
    for uid in draw(UIDS):
        endpoint = GatewayEndpoint(uid, draw(st.sampled_from([1.0, 1.0, 0.3, 20.0])), draw(st.integers(1, 300)))
        endpoint.outstanding_tokens = draw(st.sampled_from([0, 0, 1, 1000, 50_000]))
        if draw(st.booleans()):
            endpoint.health.note_unreachable(NOW - draw(st.sampled_from([0.5, 3.0])))
        made.append(endpoint)
    return made


def make_group(count: int, slots: int = 4) -> EndpointGroup:
    return EndpointGroup([GatewayEndpoint(f"pod-{number}", slots=slots) for number in range(count)])


def choose(
    group: EndpointGroup, affinity: int | None, tokens: int = 1000, excluded: Collection[str] = (), turn: int = 0
) -> GatewayEndpoint:
    endpoint = choose_endpoint(group, affinity, tokens, excluded=excluded, now=NOW, turn=turn)
    assert endpoint
    return endpoint


def find_homes(group: EndpointGroup, affinities: Sequence[int]) -> list[str]:
    """Return the uid of the endpoint that each conversation gets while nothing else runs."""
    return [choose(group, affinity).uid for affinity in affinities]


def draw_affinities(count: int) -> list[int]:
    generator = random.Random(count)  # noqa: S311 - the same in each run
    return [generator.getrandbits(64) for _ in range(count)]


# The same everywhere


@given(endpoints(), st.none() | AFFINITIES, st.integers(0, 50_000), st.integers(0, 100), st.randoms())
def test_order_of_the_endpoints_does_not_matter(
    members: list[GatewayEndpoint], affinity: int | None, tokens: int, turn: int, shuffler: random.Random
) -> None:
    chosen = choose(EndpointGroup(members), affinity, tokens, turn=turn)
    shuffler.shuffle(members)
    assert choose(EndpointGroup(members), affinity, tokens, turn=turn) is chosen


def test_homes_do_not_depend_on_process_or_version() -> None:
    """A replica of the next version must send a conversation to the same endpoint."""
    homes = find_homes(make_group(5), [1, 2**63, 0xDEADBEEF, 12345, 99])
    assert homes == ["pod-2", "pod-4", "pod-2", "pod-4", "pod-0"]


# Weights


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 2.0, 5.0), (50.0, 2000.0), (1.0,) * 9 + (10.0,)])
def test_conversations_spread_by_weight(weights: tuple[float, ...]) -> None:
    group = EndpointGroup([GatewayEndpoint(f"pod-{number}", weight) for number, weight in enumerate(weights)])
    homes = Counter(find_homes(group, draw_affinities(20_000)))
    for endpoint in group.endpoints:
        share = endpoint.weight / sum(weights)
        assert homes[endpoint.uid] / 20_000 == pytest.approx(share, abs=0.012)


def test_speeds_are_rounded_and_an_unknown_one_is_the_mean() -> None:
    slow, fast, unknown = weigh_speeds([40.0, 4000.0, None])
    assert [slow, unknown, fast] == pytest.approx([40.0, 400.0, 4000.0], rel=0.05)
    assert max(weigh_speeds([1e-9, 50.0, 1e12])) / min(weigh_speeds([1e-9, 50.0, 1e12])) == pytest.approx(100, rel=0.1)
    assert weigh_speeds([100.0]) == weigh_speeds([101.0]) != weigh_speeds([120.0])
    assert weigh_speeds([None, 0.0]) == [1.0, 1.0]
    assert weigh_speeds([]) == []


# Endpoints that leave and come back


@given(endpoints(), st.lists(AFFINITIES, max_size=30), st.data())
def test_only_conversations_of_an_endpoint_that_leaves_move(
    members: list[GatewayEndpoint], affinities: list[int], data: st.DataObject
) -> None:
    leaving = data.draw(st.sampled_from(members))
    remaining = EndpointGroup([endpoint for endpoint in members if endpoint is not leaving])
    for affinity in affinities:
        before = [endpoint for endpoint in order_endpoints(EndpointGroup(members), affinity) if endpoint is not leaving]
        assert order_endpoints(remaining, affinity) == before


def test_conversations_of_an_ejected_endpoint_spread_and_return() -> None:
    group, affinities = make_group(10), draw_affinities(5000)
    before = find_homes(group, affinities)
    ejected = group.endpoints[3]
    ejected.health.note_unreachable(NOW)
    during = find_homes(group, affinities)
    moved = Counter(new for old, new in zip(before, during, strict=True) if old != new)
    assert sum(moved.values()) == before.count(ejected.uid) == pytest.approx(500, rel=0.15)
    assert len(moved) == 9
    assert max(moved.values()) < 100  # about 56 for each
    ejected.health.note_success()
    assert find_homes(group, affinities) == before


def test_faster_endpoint_takes_conversations_and_gives_none_away() -> None:
    affinities = draw_affinities(5000)
    before = find_homes(make_group(4), affinities)
    group = EndpointGroup([GatewayEndpoint(f"pod-{number}", 2.0 if number == 1 else 1.0) for number in range(4)])
    after = find_homes(group, affinities)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"pod-1"}
    assert len(moved) / 5000 == pytest.approx(2 / 5 - 1 / 4, abs=0.02)


# The bound


@given(endpoints(), AFFINITIES, st.integers(1, 50_000))
def test_endpoint_of_a_conversation_is_the_first_within_the_bound(
    members: list[GatewayEndpoint], affinity: int, tokens: int
) -> None:
    group = EndpointGroup(members)
    working = [endpoint for endpoint in members if endpoint.health.ejected_until <= NOW] or members
    total = sum(endpoint.outstanding_tokens for endpoint in working) + tokens
    weight = sum(endpoint.weight for endpoint in working)
    within = [
        endpoint
        for endpoint in order_endpoints(group, affinity)
        if endpoint in working
        and endpoint.outstanding_tokens + tokens
        <= LOAD_FACTOR * total * endpoint.weight / weight + endpoint.spare_requests * tokens
    ]
    assert choose(group, affinity, tokens) is within[0]


def test_one_hot_conversation_spreads_over_all_endpoints() -> None:
    """All of its requests at once, as if each client sent the same prompt."""
    group = make_group(4, slots=4)
    for turn in range(400):
        choose(group, 7, turn=turn).begin_request(1000, NOW)
    for endpoint in group.endpoints:
        assert endpoint.outstanding_tokens <= LOAD_FACTOR * 400_000 / 4 + endpoint.spare_requests * 1000
        assert endpoint.outstanding_tokens > 0


def test_least_busy_of_many_gets_a_request_for_which_all_of_its_conversation_are_too_busy() -> None:
    group = make_group(100)
    for endpoint in order_endpoints(group, 7):
        endpoint.outstanding_tokens = 1_000_000
    assert choose(group, 7).outstanding_tokens == 0


@pytest.mark.parametrize(("slots", "most"), [(1, 5), (4, 13), (256, 21)])
def test_conversation_waits_behind_a_few_requests_rather_than_move(slots: int, most: int) -> None:
    """The number of equal requests of one conversation that go to its endpoint while a second one is idle."""
    group, count = make_group(2, slots=slots), 0
    while choose(group, 7) is order_endpoints(group, 7)[0]:
        choose(group, 7).begin_request(1000, NOW)
        count += 1
    assert count == most


# Without a conversation


@pytest.mark.parametrize("count", [1, 3, 50])
def test_equally_busy_endpoints_take_turns(count: int) -> None:
    group = make_group(count)
    chosen = Counter(choose(group, None, turn=turn).uid for turn in range(10 * count))
    assert set(chosen.values()) == {10}
    assert len(chosen) == count


def test_work_is_given_by_weight() -> None:
    group = EndpointGroup([GatewayEndpoint("mac", 50.0), GatewayEndpoint("h100", 2000.0)])
    for turn in range(410):
        choose(group, None, tokens=100, turn=turn).begin_request(100, NOW)
    assert [endpoint.outstanding_tokens for endpoint in group.endpoints] == [40_000, 1_000]
    group.endpoints[0].end_request(40_000)
    assert choose(group, None).uid == "h100"


def test_requests_without_tokens_spread_too() -> None:
    group = make_group(3)
    assert {choose(group, None, tokens=0, turn=turn).uid for turn in range(3)} == {"pod-0", "pod-1", "pod-2"}


# Failures


@pytest.mark.parametrize("affinity", [None, 7])
def test_excluded_endpoint_gets_no_second_try(affinity: int | None) -> None:
    group, excluded = make_group(3), set[str]()
    for _ in range(3):
        endpoint = choose(group, affinity, excluded=excluded)
        assert endpoint.uid not in excluded
        excluded.add(endpoint.uid)
    assert choose_endpoint(group, affinity, 1, excluded=excluded, now=NOW, turn=0) is None
    assert choose_endpoint(EndpointGroup([]), affinity, 1, excluded=(), now=NOW, turn=0) is None


@pytest.mark.parametrize("affinity", [None, 7])
def test_all_ejected_endpoints_are_tried(affinity: int | None) -> None:
    group, tried = make_group(3), list[str]()
    for endpoint in group.endpoints:
        endpoint.health.note_unreachable(NOW - 0.1)
    for _ in range(3):
        tried.append(choose(group, affinity, excluded=tried).uid)
    assert sorted(tried) == ["pod-0", "pod-1", "pod-2"]
    if affinity is not None:
        assert tried == [endpoint.uid for endpoint in order_endpoints(group, affinity)]


def test_ejected_endpoint_is_passed_over_even_if_the_working_ones_were_tried() -> None:
    """One of three is ejected and one was tried: the third gets the request, and only then the ejected one."""
    group = make_group(3)
    group.endpoints[0].health.note_unreachable(NOW)
    assert choose(group, None, excluded={"pod-1"}).uid == "pod-2"
    assert choose(group, None, excluded={"pod-1", "pod-2"}).uid == "pod-0"


@pytest.mark.parametrize("affinity", [None, 7])
def test_one_request_tries_an_ejected_endpoint_after_two_seconds(affinity: int | None) -> None:
    group = make_group(2)
    home = choose(group, 7)
    home.health.note_unreachable(NOW - 2.0)
    others = 0
    for turn in range(10):
        endpoint = choose(group, affinity, turn=turn)
        endpoint.begin_request(1000, NOW)
        others += endpoint is not home
    assert (home.outstanding_tokens, others) == (1000, 9)
    home.health.note_success()
    assert choose(group, affinity) is home


# Conversations over time


def simulate_turns(replicas: int, seed: int) -> tuple[float, float]:
    """Run 30 conversations over 3 endpoints, 12 turns at once; return the part that stayed, and the largest load.

    Turns begin and end in any order, and grow. Each may come to any replica of the gateway, which knows its own work
    only. The load is that of an endpoint in parts of its bound, in tokens.
    """
    generator = random.Random(seed)  # noqa: S311 - the same in each run
    groups = [make_group(3, slots=4) for _ in range(replicas)]
    affinities, tokens = draw_affinities(30 + seed)[seed:], [8000] * 30
    running: list[tuple[int, GatewayEndpoint, int]] = []
    last: dict[int, str] = {}
    stayed, turns, most = 0, 0, 0.0
    for number in range(6000):
        if len(running) == 12:
            conversation, endpoint, reserved = running.pop(generator.randrange(12))
            endpoint.end_request(reserved)
        conversation = generator.choice([n for n in range(30) if n not in {entry[0] for entry in running}])
        group = generator.choice(groups)
        size = tokens[conversation]
        endpoint = choose(group, affinities[conversation], size, turn=number)
        total = sum(member.outstanding_tokens for member in group.endpoints) + size
        bound = LOAD_FACTOR * total / 3 + endpoint.spare_requests * size
        most = max(most, (endpoint.outstanding_tokens + size) / bound)
        endpoint.begin_request(size, NOW)
        running.append((conversation, endpoint, size))
        tokens[conversation] = size + 400 if size < 40_000 else 8000
        if conversation in last:
            turns += 1
            stayed += last[conversation] == endpoint.uid
        last[conversation] = endpoint.uid
    return stayed / turns, most


@pytest.mark.parametrize("replicas", [1, 2])
def test_turns_of_conversations_stay_at_their_endpoint(replicas: int) -> None:
    outcomes = [simulate_turns(replicas, seed) for seed in range(5)]
    assert min(stayed for stayed, _ in outcomes) >= 0.95
    assert max(most for _, most in outcomes) <= 1.0
