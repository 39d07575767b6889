"""The watch cache never goes back in time, and its listeners get exactly the differences."""

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kube.client import Obj
from kube.resources import MODELS, NODES, PODS, Resource
from kube.store import Store


def pod(name: str, version: int, *, uid: str = "", namespace: str = "ns", **labels: str) -> Obj:
    metadata: dict[str, Any] = {"namespace": namespace, "name": name, "uid": uid or f"uid-{name}"}
    return {"metadata": {**metadata, "resourceVersion": str(version), "labels": labels}}


def versioned(version: str) -> Obj:
    return {"metadata": pod("a", 1)["metadata"] | {"resourceVersion": version}}


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def heard(store: Store) -> list[tuple[Obj | None, Obj | None]]:
    changes: list[tuple[Obj | None, Obj | None]] = []
    store.subscribe(lambda _, old, new: changes.append((old, new)))
    return changes


def test_put_returns_whether_an_object_is_new(store: Store, heard: list[Any]) -> None:
    assert store.put(PODS, pod("a", 1))
    assert not store.put(PODS, pod("a", 1))
    assert store.put(PODS, pod("a", 2))
    assert heard == [(None, pod("a", 1)), (pod("a", 1), pod("a", 2))]


def test_an_older_version_never_replaces_a_newer_one(store: Store, heard: list[Any]) -> None:
    store.put(PODS, pod("a", 10))
    assert not store.put(PODS, pod("a", 9)), "numbers, not text"
    assert store.get(PODS, "a", "ns") == pod("a", 10)
    assert len(heard) == 1


def test_new_object_of_the_same_name_replaces_the_old_one(store: Store) -> None:
    store.put(PODS, pod("a", 10))
    assert store.put(PODS, pod("a", 11, uid="another"))


def test_a_late_event_of_a_predecessor_does_not_replace_its_successor(store: Store) -> None:
    store.put(PODS, pod("a", 10, uid="new"))
    assert not store.put(PODS, pod("a", 9, uid="old"))
    assert store.get(PODS, "a", "ns") == pod("a", 10, uid="new")


def test_answer_to_a_write_that_arrives_after_the_deletion_is_ignored(store: Store) -> None:
    store.put(PODS, pod("a", 1))
    assert store.remove(PODS, "ns", "a", uid="uid-a", resource_version="3")
    assert not store.put(PODS, pod("a", 2))
    assert store.put(PODS, pod("a", 4)), "it left our selector and came back"


def test_a_late_deletion_does_not_remove_the_successor(store: Store) -> None:
    store.put(PODS, pod("a", 7, uid="new"))
    assert not store.remove(PODS, "ns", "a", uid="old", resource_version="6")
    assert store.get(PODS, "a", "ns")


def test_remove_returns_true_only_for_an_existing_object(store: Store, heard: list[Any]) -> None:
    assert not store.remove(PODS, "ns", "a")
    store.put(PODS, pod("a", 1))
    assert store.remove(PODS, "ns", "a")
    assert heard[-1] == (pod("a", 1), None)


def test_list_is_of_one_resource_and_one_namespace(store: Store) -> None:
    store.put(PODS, pod("a", 1))
    store.put(PODS, pod("a", 1, namespace="other", uid="x"))
    store.put(NODES, {"metadata": {"name": "n", "uid": "n", "resourceVersion": "1"}})
    assert len(store.list(PODS)) == 2
    assert store.list(PODS, "ns") == [pod("a", 1)]
    assert store.get(NODES, "n")


def test_index_follows_every_change(store: Store) -> None:
    store.put(PODS, pod("a", 1, app="x"))
    store.add_index(PODS, "app", lambda obj: [obj["metadata"]["labels"]["app"]])
    store.put(PODS, pod("b", 1, app="x"))
    assert [obj["metadata"]["name"] for obj in store.by_index(PODS, "app", "x")] == ["a", "b"]
    store.put(PODS, pod("a", 2, app="y"))
    store.remove(PODS, "ns", "b")
    assert store.by_index(PODS, "app", "x") == ()
    assert store.by_index(PODS, "app", "y") == (pod("a", 2, app="y"),)
    assert list(store.index_values(PODS, "app")) == ["y"]


def test_index_gives_the_same_sequence_until_an_object_of_it_changes(store: Store) -> None:
    store.add_index(PODS, "app", lambda obj: [obj["metadata"]["labels"]["app"]])
    store.put(PODS, pod("a", 1, app="x"))
    first = store.by_index(PODS, "app", "x")
    store.put(PODS, pod("b", 2, app="y"))
    assert store.by_index(PODS, "app", "x") is first
    store.put(PODS, pod("a", 3, app="x"))
    assert store.by_index(PODS, "app", "x") == (pod("a", 3, app="x"),)


def test_derived_value_is_kept_until_one_of_its_objects_changes(store: Store) -> None:
    computed = count()

    def derive(*inputs: object) -> int:
        return store.derive(PODS, store.list(PODS)[0], "number", lambda: next(computed), *inputs)

    store.put(PODS, pod("a", 1))
    assert (derive(), derive()) == (0, 0)
    store.put(PODS, pod("a", 2))
    assert (derive(), derive()) == (1, 1)
    inputs = [(), ("another",)]
    assert (derive(inputs[0]), derive(inputs[0]), derive(inputs[1])) == (2, 2, 3)


def test_value_derived_from_an_object_that_is_not_stored_is_not_kept(store: Store) -> None:
    store.put(PODS, pod("a", 1))
    assert store.derive(PODS, pod("a", 1), "number", lambda: 1) == 1
    assert store.derive(PODS, pod("a", 1), "number", lambda: 2) == 2


def test_summary_is_kept_until_an_object_of_its_kinds_changes(store: Store) -> None:
    computed = count()

    def summarize() -> int:
        return store.summarize((PODS, NODES), "number", lambda: next(computed))

    assert (summarize(), summarize()) == (0, 0)
    store.put(PODS, pod("a", 1))
    assert (summarize(), summarize()) == (1, 1)
    store.put(MODELS, pod("a", 1))
    assert summarize() == 1
    store.remove(PODS, "ns", "a")
    assert summarize() == 2


def test_an_undeclared_index_is_an_error(store: Store) -> None:
    with pytest.raises(KeyError):
        store.by_index(PODS, "typo", "x")


def test_an_object_put_during_the_list_stays(store: Store, heard: list[Any]) -> None:
    store.put(PODS, pod("old", 1))
    before = store.snapshot(PODS)
    store.put(PODS, pod("new", 6))
    store.put(PODS, pod("old", 7))
    store.replace(PODS, [pod("old", 1)], before=before)
    assert store.list(PODS) == [pod("old", 7), pod("new", 6)]
    assert len(heard) == 3


def test_an_object_put_during_the_list_stays_though_the_list_lacks_it(store: Store) -> None:
    store.put(PODS, pod("a", 1))
    before = store.snapshot(PODS)
    store.put(PODS, pod("a", 2))
    store.replace(PODS, [], before=before)
    assert store.list(PODS) == [pod("a", 2)]


def test_object_that_a_list_replaced_by_its_successor_never_comes_back(store: Store) -> None:
    store.put(PODS, pod("a", 1, uid="old"))
    store.replace(PODS, [pod("a", 3, uid="new")])
    store.remove(PODS, "ns", "a")
    assert not store.put(PODS, pod("a", 1, uid="old")), "an event that comes late"


def test_events_after_a_list_of_a_restored_backup_are_taken(store: Store) -> None:
    store.put(PODS, pod("a", 100))
    store.replace(PODS, [pod("a", 50)])
    assert store.put(PODS, pod("a", 51)), "the list has the object: it was not deleted at version 100"


def test_versions_that_are_no_numbers_are_compared_by_equality(store: Store) -> None:
    assert store.put(PODS, versioned("b"))
    assert not store.put(PODS, versioned("b"))
    assert store.put(PODS, versioned("a"))
    assert store.put(PODS, pod("a", 7)), "a server of another kind"


def test_a_list_after_a_restored_backup_replaces_newer_versions(store: Store) -> None:
    store.put(PODS, pod("a", 100))
    store.replace(PODS, [pod("a", 50)])
    assert store.get(PODS, "a", "ns") == pod("a", 50)


def test_replace_in_one_namespace_leaves_the_others(store: Store) -> None:
    store.put(PODS, pod("a", 1, namespace="other"))
    store.replace(PODS, [], namespace="ns")
    assert store.list(PODS)


Cluster = st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 3), st.integers(1, 9)))


@given(Cluster, Cluster)
def test_replace_reports_exactly_the_differences(
    first: dict[str, tuple[int, int]], second: dict[str, tuple[int, int]]
) -> None:
    def listed(cluster: dict[str, tuple[int, int]]) -> list[Obj]:
        return [pod(name, version, uid=f"{name}-{uid}") for name, (uid, version) in cluster.items()]

    store = Store()
    store.add_index(PODS, "uid", lambda obj: [obj["metadata"]["uid"]])
    store.replace(PODS, listed(first))
    mirror: dict[str, Obj] = {obj["metadata"]["name"]: obj for obj in listed(first)}
    told: list[str] = []

    def listener(_: Resource, old: Obj | None, new: Obj | None) -> None:
        name = (new or old or {})["metadata"]["name"]
        told.append(name)
        assert mirror.pop(name, None) == old
        if new:
            mirror[name] = new

    store.subscribe(listener)
    store.replace(PODS, listed(second))
    assert mirror == {obj["metadata"]["name"]: obj for obj in listed(second)}
    assert sorted(told) == sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    assert sorted(obj["metadata"]["name"] for obj in store.list(PODS)) == sorted(second)
    for obj in listed(first) + listed(second):
        uid = obj["metadata"]["uid"]
        assert [*store.by_index(PODS, "uid", uid)] == [o for o in store.list(PODS) if o["metadata"]["uid"] == uid]


def test_only_the_reduced_part_of_an_object_is_kept(store: Store, heard: list[Any]) -> None:
    store.set_reduction(PODS, lambda obj: {"metadata": obj["metadata"]})
    store.add_index(PODS, "name", lambda obj: [obj["metadata"]["name"]])
    store.put(PODS, pod("a", 1) | {"spec": {"containers": []}})
    store.replace(PODS, [pod("a", 2) | {"spec": {}}, pod("b", 3) | {"spec": {}}])
    kept = [pod("a", 2), pod("b", 3)]
    assert store.list(PODS) == kept == [store.by_index(PODS, "name", name)[0] for name in "ab"]
    assert [new for _, new in heard] == [pod("a", 1), *kept]
