"""Gangs as they are observed: all of a replica in several pods, or none."""

import pytest

from controller.placement.ledger import MOST_CLAIMED
from controller.placement.observed_units import (
    observe_units,
)
from controller.placement.pod_units import MOST_IN_GANG
from controller.placement.queue_places import find_own_place, format_place
from controller.placement.vanished_units import build_freed_place, is_gone
from crds.meta import ENQUEUED_AT, LABEL_GANG, LABEL_GANG_SIZE
from devices.vendors import VENDORS
from kube.resources import PODS
from tests.support.api_objects import NOW
from tests.support.queue_objects import BORN, GPU, queue_pod, timestamp
from tests.unit.controller.placement.test_observed_units import LATER, MINUTE, OLD, observe, queue


@pytest.mark.parametrize("name", ["a", "z"])
def test_pod_that_can_take_no_device_hides_no_gang(name: str) -> None:
    labels = {LABEL_GANG: "all", LABEL_GANG_SIZE: "1"}
    bound = queue_pod("bound", gated=False, node="n1", labels=labels)
    units = observe(queue(bound, queue_pod(name, gated=False, labels=labels)))
    assert (units["all"].pools, units["all"].cells) == (("nvidia",), ("node/n1",))
    ending = observe(
        queue(
            bound | {"metadata": bound["metadata"] | {"deletionTimestamp": timestamp(LATER)}},
            queue_pod(name, deleted=LATER, labels=labels),
        )
    )["all"]
    assert (ending.pools, sum(part.get(GPU, 0) for part in ending.parts)) == (("nvidia",), 1)


def test_gang_waits_until_all_of_it_exists() -> None:
    labels = {LABEL_GANG: "big", LABEL_GANG_SIZE: "2"}
    first = queue_pod("one", labels=labels, annotations={ENQUEUED_AT: OLD})
    second = queue_pod("two", labels=labels, devices=4)
    assert observe(queue(first)) == {}
    unit = observe(queue(first, second))["big"]
    assert (unit.key.kind, unit.members, unit.uid, unit.state) == ("gang", ("one", "two"), "uid-one", "waiting")
    assert [part[GPU] for part in unit.parts] == [1, 4]
    assert unit.enqueued_at == find_own_place(second), "labels lend no pod the place of another"
    first, second = (queue_pod(name, labels=labels, annotations={ENQUEUED_AT: OLD}) for name in ("one", "two"))
    assert format_place(observe(queue(first, second))["big"].enqueued_at) == OLD


def test_place_of_a_gang_is_freed_once_the_pod_is_gone_that_stands_for_it() -> None:
    labels = {LABEL_GANG: "big", LABEL_GANG_SIZE: "2"}
    pods = [queue_pod(name, labels=labels, gated=False, node="n1") for name in ("one", "two")]
    pods[0]["metadata"]["uid"] = "uid-z"  # the names of pods and their uids have no common order
    store = queue(*pods)
    place = build_freed_place(observe(store)["big"])
    assert not is_gone(store, place)
    for pod in pods:
        store.remove(PODS, "team", pod["metadata"]["name"], uid=pod["metadata"]["uid"])
    assert is_gone(store, place)


def test_pod_that_joins_a_gang_does_not_protect_it_for_longer() -> None:
    labels = {LABEL_GANG: "big", LABEL_GANG_SIZE: "2"}
    first = queue_pod("one", labels=labels, gated=False, node="n1", created=BORN)
    second = queue_pod("two", labels=labels, gated=False, node="n1")
    assert observe(queue(first, second))["big"].evictable_since == (BORN + MINUTE).timestamp()


def test_gang_that_was_admitted_in_part_is_finished() -> None:
    labels = {LABEL_GANG: "big", LABEL_GANG_SIZE: "3"}
    admitted = [queue_pod(name, labels=labels, gated=False, node="n1") for name in ("one", "two")]
    units = observe_units(queue(*admitted, queue_pod("three", labels=labels)), VENDORS, NOW).units
    assert {(unit.state, unit.members, unit.cells) for unit in units} == {
        ("running", ("one", "two"), ("node/n1", "node/n1")),
        ("waiting", ("three",), ()),
    }
    ends = queue_pod("two", labels=labels, gated=False, node="n1", deleted=LATER)
    units = observe_units(queue(admitted[0], ends, queue_pod("three", labels=labels)), VENDORS, NOW).units
    assert {(unit.state, unit.members) for unit in units} == {("running", ("one",)), ("ending", ("two",))}


def test_gang_that_the_ledger_could_not_hold_is_not_in_the_queue() -> None:
    labels = {LABEL_GANG: "big", LABEL_GANG_SIZE: "1"}
    pods = [queue_pod(f"p{number}", labels=labels) for number in range(MOST_IN_GANG + 1)]
    assert (observe(queue(*pods)), len(observe(queue(*pods[1:]))["big"].members)) == ({}, MOST_IN_GANG)
    assert MOST_IN_GANG < MOST_CLAIMED, "it would never be admitted"


def test_pod_with_a_damaged_gang_waits_alone() -> None:
    units = observe(queue(queue_pod("one", labels={LABEL_GANG: "big", LABEL_GANG_SIZE: "many"})))
    assert units["one"].key.kind == "pod"
