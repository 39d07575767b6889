"""Copies that leave a node to make room: all Models come to the same choice by one pure function."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.models.copy_observation import StoredCopy, choose_victims, find_victims, models_of_victims
from controller.reconcile.indexes import declare_indexes
from crds.quantity import parse_quantity
from kube.client import Obj
from kube.resources import MODELS, NODES, PODS, PVCS, ObjectKey
from kube.store import Store
from tests.support.simulated_copies import SimulatedCopies
from tests.support.simulated_model import INSPECTED

MIB = 1 << 20
COPIES = st.lists(
    st.builds(
        StoredCopy,
        unused_since=st.sampled_from(["", "2026-11-21T10:00:00Z", "2026-11-21T11:00:00Z", "2026-11-21T12:00:00Z"]),
        model=st.builds(ObjectKey, st.just("team"), st.sampled_from("abc")),
        claim=st.uuids().map(str),
        size_bytes=st.integers(0, 100),
    ),
    max_size=8,
)


@given(COPIES, st.integers(0, 500), st.randoms())
def test_only_unused_copies_go_and_no_more_than_needed(copies: list[StoredCopy], limit: int, random: Any) -> None:
    victims = choose_victims(copies, limit)
    assert all(victim.unused_since for victim in victims)
    left = [copy for copy in copies if copy not in victims]
    total = sum(copy.size_bytes for copy in left)
    assert total <= limit or not any(copy.unused_since for copy in left)
    if victims:
        assert total + victims[-1].size_bytes > limit, "the last one had to go"
    newest = max((victim.unused_since for victim in victims), default="")
    assert all(copy.unused_since >= newest for copy in left if copy.unused_since)
    random.shuffle(copies)
    assert choose_victims(copies, limit) == victims, "each Model comes to the same result"


@given(COPIES, st.integers(0, 500))
def test_what_has_gone_lets_the_rest_stay(copies: list[StoredCopy], limit: int) -> None:
    victims = choose_victims(copies, limit)
    assert choose_victims([copy for copy in copies if copy not in victims], limit) == []


def copy(name: str, node: str = "a", unused: str = "") -> Obj:
    node_copy: Obj = {"node": node, "name": f"{name}-cache", "claim": f"uid-{name}", "path": "x", "sizeBytes": 10}
    return node_copy | ({"unusedSince": f"2026-11-21T{unused}:00:00Z"} if unused else {})


def store_of(*models: tuple[str, list[Obj], list[Obj]]) -> Store:
    """Return a store with Models whose copies and shortages are stated."""
    store = Store()
    declare_indexes(store)
    for name, copies, shortages in models:
        metadata = {"name": name, "namespace": "team", "uid": name, "resourceVersion": "1"}
        status = {"copies": copies, "shortages": shortages}
        store.put(
            MODELS, {"metadata": metadata, "spec": {"source": "http://models.example/tiny.gguf"}, "status": status}
        )
    return store


def names(store: Store, node: str, limit: int | None) -> list[str]:
    return [victim.model.name for victim in find_victims(store, node, limit)]


def test_limit_counts_the_copies_of_all_models_on_one_node() -> None:
    store = store_of(
        ("one", [copy("one", unused="10"), copy("one", "b", unused="09")], []),
        ("two", [copy("two", unused="11")], []),
        ("three", [copy("three")], []),
    )
    assert names(store, "a", None) == []
    assert names(store, "a", 30) == []
    assert names(store, "a", 29) == ["one"]
    assert names(store, "a", 0) == ["one", "two"]
    assert names(store, "b", 9) == ["one"]


def test_victims_follow_each_change_of_a_model() -> None:
    store = store_of(("one", [copy("one", unused="10")], []), ("two", [copy("two", unused="11")], []))
    store.put(NODES, {"metadata": {"name": "a", "uid": "a", "resourceVersion": "1"}})
    assert names(store, "a", 10) == ["one"]
    used = store.get(MODELS, "one", "team")
    assert used is not None
    metadata = used["metadata"] | {"resourceVersion": "2"}
    store.put(MODELS, used | {"metadata": metadata, "status": {"copies": [copy("one")], "shortages": []}})
    assert names(store, "a", 10) == ["two"]


def test_copy_counts_with_what_its_claim_takes_from_the_disk() -> None:
    simulated = make_cache(126 * MIB, "one")
    (copy,) = simulated.copies("one")
    requested = simulated.claims("one")[copy.name]["spec"]["resources"]["requests"]["storage"]
    assert copy.size_bytes == parse_quantity(requested) == 126 * MIB


@pytest.mark.parametrize(("limit", "found"), [(None, ["one"]), (20, ["one"]), (5, ["one", "two"])])
def test_shortage_of_any_model_is_a_limit_of_its_node(limit: int | None, found: list[str]) -> None:
    store = store_of(
        ("one", [copy("one", unused="10")], []),
        ("two", [copy("two", unused="11")], []),
        ("large", [], [{"node": "a", "job": "x", "keepBytes": 10}]),
    )
    assert names(store, "a", limit) == found
    large = store.get(MODELS, "large", "team")
    assert large is not None
    assert [key.name for key in models_of_victims(store, large, limit)] == sorted(found)


def make_cache(limit_bytes: int, *names: str) -> SimulatedCopies:
    """Return Models with a copy of 126 MiB each on one node, whose pods went in this order, an hour apart."""
    simulated = SimulatedCopies({"a": 9}, limit_bytes)
    for name in names:
        simulated.make_model(name)
        simulated.make_service(f"of-{name}", model=name, replicas=1)
        simulated.fetch_all()
        simulated.serve(simulated.copies(name)[0].name, node="a", service=f"of-{name}")
    for name in names:
        simulated.remove(PODS, f"of-{name}-{simulated.copies(name)[0].name}")
        simulated.make_service(f"of-{name}", model=name, replicas=0)
        simulated.pass_time(hours=1)
    return simulated


def test_unused_copies_go_when_a_node_has_too_many_the_one_first_that_was_unused_longest() -> None:
    simulated = make_cache(3 * 126 * MIB, "one", "two", "three")
    assert [len(simulated.copies(name)) for name in ("one", "two", "three")] == [1, 1, 1]
    simulated.make_model("four")
    simulated.make_service("of-four", model="four", replicas=1)
    simulated.fetch_all()
    assert [len(simulated.copies(name)) for name in ("one", "two", "three", "four")] == [0, 1, 1, 1]
    assert simulated.claims("one") == {}


def test_copy_in_use_stays_whatever_the_limit() -> None:
    simulated = SimulatedCopies({"a": 9}, 1)
    simulated.make_model()
    simulated.make_service(replicas=1)
    simulated.fetch_all()
    assert simulated.nodes_of() == ["a"], "a replica needs it"
    simulated.serve(simulated.copies()[0].name, node="a")
    simulated.make_service(replicas=0)
    assert simulated.nodes_of() == ["a"], "a pod mounts it"
    simulated.remove(PODS, f"chat-{simulated.copies()[0].name}")
    simulated.settle()
    assert (simulated.copies(), simulated.claims()) == ([], {})


def test_claim_of_an_evicted_copy_is_deleted_only_after_the_status_has_lost_it() -> None:
    simulated = make_cache(126 * MIB, "one")
    (copy,) = simulated.copies("one")
    simulated.make_model("two")
    simulated.make_service("of-two", model="two", replicas=1)
    simulated.schedule()
    (job,) = simulated.pending("two")
    simulated.end(job, 0, {"sizeBytes": 1})
    simulated.step("two")
    first = simulated.step("one")
    assert all(ref.resource != PVCS for ref in first.delete), "services may choose the copy by the status"
    assert simulated.copies("one") == []
    assert [ref.name for ref in simulated.step("one").delete if ref.resource == PVCS] == [copy.name]


def test_full_disk_takes_no_more_unused_copies_than_it_needs() -> None:
    simulated = SimulatedCopies({"a": 9})
    for name in ("one", "two", "three"):
        simulated.make_model(name)
        simulated.make_service(f"of-{name}", model=name, replicas=1)
        simulated.fetch_all()
    for name in ("one", "two"):
        simulated.make_service(f"of-{name}", model=name, replicas=0)
        simulated.pass_time(hours=1)
    simulated.make_model("large")
    simulated.make_service("of-large", model="large", replicas=1)
    simulated.schedule()
    failed = {"reason": "NoSpace", "message": "needs 100 MiB more"}
    simulated.end(simulated.pending("large")[0], 1, failed)
    simulated.settle()
    assert [len(simulated.copies(name)) for name in ("one", "two", "three")] == [0, 1, 1]
    assert "needs 100 MiB more" in simulated.condition("Cached", "large").message
    simulated.settle()
    assert len(simulated.copies("two")) == 1, "one attempt demands its space once"

    simulated.pass_time(minutes=1)
    simulated.end(simulated.pending("large")[0], 1, failed)
    simulated.settle()
    assert [len(simulated.copies(name)) for name in ("two", "three")] == [0, 1]
    simulated.pass_time(minutes=1)
    simulated.finish("large")
    simulated.schedule()
    simulated.finish("large")
    assert simulated.nodes_of("large") == ["a"]
    assert simulated.model("large").status.shortages == []


@pytest.mark.parametrize(
    ("answer", "size", "left"),
    [({"sizeBytes": None}, None, [1, 1]), ({}, "1Ti", [0, 1])],
    ids=["volume that may be too small", "volume that is larger than the weights"],
)
def test_size_that_a_tenant_chooses_takes_no_more_copies_of_others(
    answer: Obj, size: str | None, left: list[int]
) -> None:
    simulated = SimulatedCopies({"a": 9})
    for name in ("one", "two"):
        simulated.make_model(name)
        simulated.make_service(f"of-{name}", model=name, replicas=1)
        simulated.fetch_all()
        simulated.make_service(f"of-{name}", model=name, replicas=0)
        simulated.pass_time(hours=1)
    simulated.make_model("greedy", answer=INSPECTED | answer, **({"size": size} if size else {}))
    simulated.make_service("of-greedy", model="greedy", replicas=1)
    simulated.schedule()
    simulated.end(simulated.pending("greedy")[0], 1, {"reason": "NoSpace", "message": "needs more"})
    simulated.settle()
    assert [len(simulated.copies(name)) for name in ("one", "two")] == left
