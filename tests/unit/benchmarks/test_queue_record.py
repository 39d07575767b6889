"""The record by which a benchmark judges a queue whose controller crashes: it finds what must never be."""

from datetime import timedelta
from typing import Any

import msgspec

from benchmarks.queue_record import QueueRecord
from crds.meta import LABEL_SERVICE, Priority
from kube.client import Obj
from kube.resources import CONFIG_MAPS, PODS
from tests.support.api_objects import NOW
from tests.support.queue_objects import pinned, queue_pod


class Watched:
    """A record of two nodes with two devices and one with four, and what its watches bring."""

    def __init__(self, **priorities: Priority) -> None:
        self.record = QueueRecord({"one": 2, "two": 2, "large": 4}, {"a": "normal", "b": "normal", **priorities})
        self._known: dict[str, Obj] = {}
        self._version = 0

    def put(self, service: str, **fields: Any) -> None:
        """Bring a pod of a service; `pin` pins it without a gate."""
        self._version += 1
        pin, gated = fields.pop("pin", ""), fields.pop("gated", True)
        is_gated = gated and not pin and not fields.get("node")
        pod = queue_pod(f"{service}-1", service=service, version=self._version, gated=is_gated, **fields)
        pod = pinned(pod, pin) if pin else pod
        self.record.note(PODS, self._known.get(service), pod)
        self._known[service] = pod

    def end(self, service: str) -> None:
        """Bring the end of a pod, which has no version of its own."""
        self._version += 1
        self.record.note(PODS, self._known.pop(service), None)

    def decide(self, **nodes: str) -> None:
        """Bring a ledger that gives nodes to services."""
        self._version += 1
        claims = {f"uid-{service}-1": {"cells": [f"node/{node}"]} for service, node in nodes.items()}
        data = {"ledger.json": msgspec.json.encode({"claims": claims}).decode()}
        self.record.note(CONFIG_MAPS, None, {"metadata": {"resourceVersion": str(self._version)}, "data": data})


def order_of(watched: Watched) -> tuple[str, str]:
    """Return the services that wait in their order."""
    places = sorted((state.place, state.name) for state in watched.record.now.values() if state.place is not None)
    first, second = (name.removesuffix("-1") for _, name in places)
    return first, second


def test_pods_that_are_pinned_to_one_node_are_counted_together() -> None:
    watched = Watched()
    watched.put("a", devices=1, pin="one")
    watched.put("b", devices=1, pin="one")
    assert watched.record.list_double_bookings() == []
    watched.put("b", devices=2, pin="one")
    assert watched.record.list_double_bookings() == ["b-1 on one: 3 of 2"]
    assert watched.record.list_unbound() == ["a-1", "b-1"]


def test_one_moment_in_which_a_node_is_booked_twice_is_found_also_when_it_has_passed() -> None:
    watched = Watched()
    watched.put("a", devices=2, node="one")
    watched.put("b", devices=1, node="one")
    watched.end("a")
    assert watched.record.list_double_bookings() == ["b-1 on one: 3 of 2"]
    assert watched.record.list_unbound() == []


def test_devices_of_an_engine_behind_a_proxy_are_counted() -> None:
    watched = Watched()
    watched.put("a", devices=2, pin="one")
    pod = queue_pod("b-1", service="b", gated=False, node="one", version=9, devices=1)
    (engine,) = pod["spec"]["containers"]
    pod["spec"] |= {"containers": [{"name": "proxy"}], "initContainers": [engine | {"restartPolicy": "Always"}]}
    watched.record.note(PODS, None, pod)
    assert watched.record.list_double_bookings() == ["b-1 on one: 3 of 2"]


def test_pin_counts_without_the_mark_by_which_the_controller_knows_it() -> None:
    watched = Watched()
    watched.put("a", devices=2, node="one")
    pod = pinned(queue_pod("b-1", service="b", gated=False, version=9, devices=1), "one")
    pod["metadata"]["annotations"] = {}
    watched.record.note(PODS, None, pod)
    assert watched.record.list_double_bookings() == ["b-1 on one: 3 of 2"]


def test_promise_of_the_ledger_counts_beside_what_pods_have_until_it_is_kept() -> None:
    watched = Watched()
    watched.put("a", devices=1, pin="one")
    watched.put("b", devices=2)
    watched.decide(b="one")
    assert watched.record.list_double_bookings() == ["the ledger on one: 3 of 2"]
    watched = Watched()
    watched.put("b", devices=2)
    watched.decide(b="one")
    watched.put("a", devices=1, pin="one")
    watched.decide()
    assert watched.record.list_double_bookings() == ["a-1 on one: 3 of 2"]
    watched = Watched()
    watched.put("b", devices=2)
    assert watched.record.promised == 0
    watched.decide(b="one")
    assert watched.record.promised == 1
    watched.put("b", devices=2, pin="one")
    watched.put("b", devices=2, node="one")
    assert watched.record.promised == 0
    assert watched.record.list_double_bookings() == []
    watched.decide()
    watched.end("b")
    watched.put("a", devices=2)
    watched.decide(a="one")
    assert watched.record.list_double_bookings() == []


def test_pod_without_gate_and_node_could_be_anywhere() -> None:
    watched = Watched()
    watched.put("a")
    watched.put("b", pin="one")
    assert watched.record.list_unpinned() == []
    watched.put("a", gated=False)
    watched.put("a", node="two")
    assert watched.record.list_unpinned() == ["a-1"]


def test_decision_may_not_pass_one_that_is_ahead_and_fits_the_node() -> None:
    watched = Watched()
    watched.put("a")
    watched.put("b")
    first, second = order_of(watched)
    watched.decide(**{first: "one", second: "one"})
    assert watched.record.list_passed() == []
    watched.decide()
    watched.decide(**{second: "two"})
    assert watched.record.list_passed() == [f"{second}-1 (1) passed {first}-1 (1) on two: 2 were left"]


def test_decision_may_pass_one_for_which_the_node_is_too_small() -> None:
    watched = Watched(a="high")
    watched.put("a", devices=4)
    watched.put("b")
    watched.decide(b="one")
    assert watched.record.list_passed() == []
    watched.decide()
    watched.decide(b="large")
    assert watched.record.list_passed() == ["b-1 (1) passed a-1 (4) on large: 4 were left"]


def test_decision_may_use_what_is_too_little_for_one_of_a_higher_priority_but_not_of_the_same() -> None:
    watched = Watched(a="high", c="normal")
    watched.put("c", devices=1, pin="large")
    watched.put("a", devices=4)
    watched.put("b")
    watched.decide(b="large")
    assert watched.record.list_passed() == []
    watched = Watched(c="normal")
    watched.put("c", devices=1, pin="large")
    watched.put("a")
    watched.put("b")
    first, second = order_of(watched)
    watched.put(first, devices=4)
    watched.decide(**{second: "large"})
    assert watched.record.list_passed() == [f"{second}-1 (1) passed {first}-1 (4) on large: 3 were left"]


def test_pod_that_waits_beside_room_is_forgotten_unless_the_room_is_kept_for_one_ahead() -> None:
    watched = Watched(a="high")
    watched.put("a", devices=4)
    watched.put("b")
    assert watched.record.list_forgotten() == ["a-1", "b-1"]
    watched.put("c", pin="large", labels={LABEL_SERVICE: "c"})
    assert watched.record.list_forgotten() == ["b-1"]
    watched.put("d", devices=2, pin="one")
    watched.put("e", devices=2, pin="two")
    assert watched.record.list_forgotten() == []


def test_one_ahead_of_a_higher_priority_may_keep_one_node_and_those_of_the_same_all_that_they_could_use() -> None:
    watched = Watched(a="high", b="low", e="low")
    for service, node in (("c", "one"), ("d", "two")):
        watched.put(service, devices=1, pin=node, labels={LABEL_SERVICE: service})
    watched.put("f", devices=3, pin="large", labels={LABEL_SERVICE: "f"})
    watched.put("a", devices=2)
    watched.put("e", devices=4, created=NOW - timedelta(hours=1))
    watched.put("b")
    assert watched.record.list_forgotten() == ["b-1"]
    watched.put("c", devices=2, pin="one", labels={LABEL_SERVICE: "c"})
    assert watched.record.list_forgotten() == []  # `a` may keep the other small node


def test_devices_that_a_decision_gives_away_are_not_there_for_those_after_it() -> None:
    watched = Watched(a="high", b="normal", c="low")
    watched.put("a", devices=2)
    watched.put("b", devices=3)
    watched.put("c")
    watched.decide(b="large", c="large")
    assert watched.record.list_passed() == ["b-1 (3) passed a-1 (2) on large: 4 were left"]


def test_decision_may_pass_one_that_waits_behind_the_head_of_its_own_priority() -> None:
    watched = Watched(a="high", b="high", c="low")
    watched.put("f", devices=1, pin="large", labels={LABEL_SERVICE: "f"})
    watched.put("a", devices=4, created=NOW - timedelta(hours=1))
    watched.put("b")
    watched.put("c")
    watched.decide(c="large")
    assert watched.record.list_passed() == []  # `a` keeps the node from `b`, and may evict `c`
    watched.decide()
    watched.decide(c="one")  # which `a` could never use
    assert watched.record.list_passed() == ["c-1 (1) passed b-1 (1) on one: 2 were left"]
