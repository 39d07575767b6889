"""Benchmarks are few, start where nothing waits, take turns, and end for good after some failures."""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.benchmarks.benchmark_job import BenchmarkKey
from controller.benchmarks.benchmark_plan import (
    MOST_AT_ONCE,
    MOST_TRIES,
    MOST_URGENT,
    BenchmarkFailure,
    WantedBenchmark,
    choose_starts,
)
from controller.models.jobs import JobOutcome
from controller.services.endpoints import Endpoint
from kube.resources import ObjectKey

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
REPLICA = Endpoint("10.0.0.1", 8080, node="n1")


def key_of(name: str, namespace: str = "team") -> BenchmarkKey:
    return BenchmarkKey(namespace, "hash", name)


def wanted(
    name: str = "a",
    *nodes: str,
    accelerator: str = "nvidia",
    namespace: str = "team",
    replica: Endpoint | None = None,
) -> WantedBenchmark:
    service = ObjectKey(namespace, "chat")
    return WantedBenchmark(
        key_of(name, namespace), service, accelerator, "1", is_ready=True, nodes=nodes, replica=replica
    )


def start(
    due: Sequence[WantedBenchmark],
    going: Mapping[BenchmarkKey, str] = {},
    busy: Collection[str] = (),
    turns: Mapping[str, int] = {},
    urgent: str = "",
) -> list[tuple[str, str]]:
    made = choose_starts(due, going, busy, turns, {key_of(name) for name in urgent})
    return [(benchmark_start.wanted.key.device_class, benchmark_start.node) for benchmark_start in made]


def test_unknown_pair_is_measured_on_an_idle_node() -> None:
    assert start([wanted("a", "n1", "n2")]) == [("a", "n1")]
    assert start([wanted("a")]) == []


def test_no_job_starts_while_anything_waits_for_the_accelerator() -> None:
    assert start([wanted("a", "n1"), wanted("b", "n2", accelerator="amd")], busy={"nvidia"}) == [("b", "n2")]


def test_replica_that_serves_is_measured_itself_though_others_wait() -> None:
    assert start([wanted("a", "n2", replica=REPLICA)], busy={"nvidia"}) == [("a", "n1")]


def test_few_run_at_once_and_each_on_a_node_of_its_own() -> None:
    due = [wanted(name, "n1", "n2", "n3") for name in "abcd"]
    assert start(due) == [("a", "n1"), ("b", "n2")]
    assert start(due, {key_of("a"): "n1"}) == [("b", "n2")]
    assert start(due, {key_of("a"): "n1", key_of("b"): "n2"}) == []


def test_namespace_with_many_models_does_not_starve_another() -> None:
    many = [wanted(f"m{number}", "n1", "n2", namespace="big") for number in range(1000)]
    small = [wanted("a", "n1", "n2", namespace="small")]
    assert start([*many, *small]) == [("m0", "n1"), ("a", "n2")]
    running = {key_of("m0", "big"): "n1"}
    assert start([*many, *small], running, turns={"big": 1}) == [("a", "n2")]
    assert start([*many, *small], running, turns={"big": 1, "small": 2}) == [("a", "n2")]
    assert start(many) == [("m0", "n1"), ("m1", "n2")]


def test_namespaces_that_wait_take_turns() -> None:
    due = [wanted("a", "n1", namespace=namespace) for namespace in "xyz"]
    turns, order = dict[str, int](), list[str]()
    for number in range(6):
        (first,) = choose_starts(due, {}, (), turns)
        turns[first.wanted.key.namespace] = number + 1
        order.append(first.wanted.key.namespace)
    assert order == [*"xyz", *"xyz"]


def test_node_that_another_takes_costs_a_namespace_no_more_than_the_pair() -> None:
    due = [wanted("a", "n1", namespace="x"), wanted("b", "n1", namespace="y"), wanted("c", "n2", namespace="y")]
    assert start(due) == [("a", "n1"), ("c", "n2")]


def test_pairs_for_which_a_service_waits_are_measured_first_and_beside_others() -> None:
    due = [wanted(name, "n1", "n2", "n3", "n4") for name in "abcd"]
    assert start(due, urgent="d") == [("d", "n1"), ("a", "n2"), ("b", "n3")]
    assert start(due, {key_of("a"): "n1", key_of("b"): "n2"}, urgent="cd") == [("c", "n3"), ("d", "n4")]
    many = [wanted(name, *(f"n{number}" for number in range(9))) for name in "abcdef"]
    assert len(start(many, urgent="abcdef")) == MOST_URGENT
    assert start(due, busy={"nvidia"}, urgent="d") == []


pairs = st.tuples(st.sampled_from(["team", "other"]), st.sampled_from("abcde"))
wishes = st.lists(pairs, unique=True).map(lambda names: [wanted(name, "n1", "n2", namespace=ns) for ns, name in names])
keys = pairs.map(lambda pair: key_of(pair[1], pair[0]))


@given(wishes, st.dictionaries(keys, st.sampled_from(["n1", "n2", "n3"])), st.frozensets(keys))
def test_starts_keep_their_bounds(
    due: list[WantedBenchmark], going: dict[BenchmarkKey, str], urgent: frozenset[BenchmarkKey]
) -> None:
    made = choose_starts(due, going, (), {}, urgent)
    started = [start.wanted.key for start in made]
    assert going.keys().isdisjoint(started)
    assert {*going.values()}.isdisjoint({start.node for start in made})
    assert len({start.node for start in made}) == len({*started}) == len(made)
    for most, is_urgent in ((MOST_URGENT, True), (MOST_AT_ONCE, False)):
        before = sum((key in urgent) == is_urgent for key in going)
        assert before + sum((key in urgent) == is_urgent for key in started) <= max(most, before)


def failure(tries: int, minutes_ago: float = 0.0, *, is_final: bool = False) -> BenchmarkFailure:
    ended = NOW - timedelta(minutes=minutes_ago)
    state = "Failed" if is_final else "Broken"
    outcome = JobOutcome(state=state, reason="EngineFailed", message="no memory.", ended=ended)  # type: ignore[arg-type]
    return BenchmarkFailure("1", tries, outcome)


@pytest.mark.parametrize(("tries", "minutes_ago", "seconds"), [(1, 0.5, 30.0), (1, 1.0, 0.0), (2, 1.5, 30.0)])
def test_failure_is_tried_again_after_a_back_off(tries: int, minutes_ago: float, seconds: float) -> None:
    last = failure(tries, minutes_ago)
    assert (last.is_final, last.find_wait(NOW)) == (False, seconds)
    expected = f"the speed on a could not be measured: no memory; try {tries} of 3, and it is tried again"
    assert last.describe(key_of("a")) == ("EngineFailed", expected)


@pytest.mark.parametrize("last", [failure(MOST_TRIES), failure(1, is_final=True)])
def test_no_failure_is_tried_for_ever(last: BenchmarkFailure) -> None:
    assert last.is_final
    assert last.describe(key_of("a")).message.endswith("; it is not tried again before the service is edited")
