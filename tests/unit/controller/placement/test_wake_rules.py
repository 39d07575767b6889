"""The changes for which the queue is planned again: those that a decision reads, or that may make room."""

import pytest

from controller.placement.cell_registry import CellRegistry
from controller.placement.observed_units import observe_units
from controller.placement.wake_rules import RoomWatch, decisive_facts, is_decisive
from crds.meta import ENQUEUED_AT, NOMINATED
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, NODES, PODS, Resource
from kube.store import Store
from tests.support.api_objects import GIB, NOW, condition, host, process, service, store
from tests.support.queue_objects import deployment_of, queue_pod, queued_service
from tests.support.waiting_units import host_cell, waiting_process


class Watched:
    """A RoomWatch that is told of every change of a store."""

    def __init__(self, known: Store) -> None:
        self._known = known
        self._registry = CellRegistry(known, VENDORS, lambda _host: True)
        self._watch = RoomWatch()
        self.look()

    def look(self) -> bool:
        """Return whether the queue is to be planned, and plan it."""
        is_due = self._watch.take_cells(self._registry.list_cells())
        units = observe_units(self._known, VENDORS, NOW).units
        self._watch.expect(unit for unit in units if unit.state == "waiting")
        return is_due


def version(obj: Obj, number: int) -> Obj:
    return {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(number)}}


def test_report_of_a_host_wakes_only_if_something_fits() -> None:
    cluster = store((METAL_HOSTS, host("one", GIB, budgetBytes=64 * GIB)), (METAL_PROCESSES, process("a-b-0", gib=3)))
    watched = Watched(cluster)
    cluster.put(METAL_HOSTS, version(host("one", 2 * GIB, budgetBytes=64 * GIB), 2))
    assert not watched.look(), "still too small"
    cluster.put(METAL_HOSTS, version(host("one", 4 * GIB, budgetBytes=64 * GIB), 3))
    assert watched.look()
    cluster.put(METAL_HOSTS, version(host("one", 3 * GIB, budgetBytes=64 * GIB), 4))
    assert not watched.look(), "it has lost room"
    assert not watched.look()


@pytest.mark.parametrize(
    ("changed", "is_due"),
    [
        (host("one", GIB, conditions=[condition("Paused", "True")]), True),
        (None, True),
        (host("one", GIB, runtimes=["llama.cpp", "ollama"]), True),
        (host("one", GIB, weights=["a" * 64]), False),
        (host("one", GIB, temperature=9), False),
    ],
    ids=["closed", "gone", "another engine", "other weights", "nothing that matters"],
)
def test_cell_of_which_more_than_its_room_changes_wakes(changed: Obj | None, *, is_due: bool) -> None:
    cluster = store((METAL_HOSTS, host("one", GIB)), (METAL_PROCESSES, process("a-b-0", gib=3)))
    watched = Watched(cluster)
    if changed is None:
        cluster.remove(METAL_HOSTS, "", "one", uid="uid-one")
    else:
        cluster.put(METAL_HOSTS, version(changed, 2))
    assert watched.look() == is_due


def test_cells_are_compared_by_their_names() -> None:
    small, large = host_cell("small", free_gib=1), host_cell("large", free_gib=9)
    watch = RoomWatch()
    watch.take_cells((small, large))
    watch.expect([waiting_process("chat", 9)])
    assert not watch.take_cells((large, small)), "the same cells in another order"
    assert not watch.take_cells((large, host_cell("small", free_gib=2)))
    assert watch.take_cells((large, host_cell("small", free_gib=9)))
    assert watch.take_cells((large, host_cell("other", free_gib=1))), "one is gone and another has come"
    assert watch.take_cells((large,))


def test_no_cell_wakes_while_nothing_waits() -> None:
    cluster = store((METAL_HOSTS, host("one", GIB)))
    watched = Watched(cluster)
    cluster.put(METAL_HOSTS, version(host("one", 4 * GIB), 2))
    assert not watched.look()


def pod_with(**changes: Obj) -> Obj:
    pod = queue_pod("a")
    return {**pod, **{part: {**pod[part], **fields} for part, fields in changes.items()}}


SCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


@pytest.mark.parametrize(
    ("changed", "matters"),
    [
        (pod_with(metadata={"annotations": {ENQUEUED_AT: "2026-01-01T00:00:00Z"}}), True),
        (pod_with(metadata={"annotations": {NOMINATED: "{}"}}), True),
        (pod_with(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}), True),
        (pod_with(spec={"schedulingGates": []}), True),
        (pod_with(spec={"nodeName": "n1"}), True),
        (pod_with(status={"phase": "Failed"}), True),
        (pod_with(status={"conditions": [SCHEDULED]}), True),
        (pod_with(status={"conditions": [{"type": "Ready", "status": "True"}]}), False),
        (pod_with(metadata={"resourceVersion": "8"}), False),
        (pod_with(metadata={"annotations": {"note": "mine"}}), False),
    ],
)
def test_only_what_a_decision_reads_of_a_pod_matters(changed: Obj, *, matters: bool) -> None:
    assert (decisive_facts(PODS, queue_pod("a")) != decisive_facts(PODS, changed)) == matters


def test_status_of_a_service_does_not_matter_and_its_spec_does() -> None:
    before = decisive_facts(INFERENCE_SERVICES, service())
    assert decisive_facts(INFERENCE_SERVICES, service(status={"phase": "Ready"})) == before
    assert decisive_facts(INFERENCE_SERVICES, service(generation=2)) != before
    assert decisive_facts(INFERENCE_SERVICES, service(status={"accelerator": "nvidia"})) != before


def test_status_of_the_present_spec_wakes_the_units_that_wait_for_it() -> None:
    """A second replica waited until something else changed."""
    before = decisive_facts(INFERENCE_SERVICES, service(generation=2, status={"observedGeneration": 1}))
    after = decisive_facts(INFERENCE_SERVICES, service(generation=2, status={"observedGeneration": 2}))
    assert after != before
    slow = [{"deviceClass": "nvidia-l4x1", "tokensPerSecond": "9", "refusal": "TooSlow"}]
    faster = [{**slow[0], "tokensPerSecond": "10"}]
    refused, again, accepted = (
        decisive_facts(INFERENCE_SERVICES, service(generation=2, status={"observedGeneration": 2, "speeds": speeds}))
        for speeds in (slow, faster, [{"deviceClass": "nvidia-l4x1", "tokensPerSecond": "50"}])
    )
    assert refused != after
    assert again == refused, "another speed makes no room"
    assert accepted != refused


JOB_POD = {**queue_pod("a"), "metadata": {**queue_pod("a")["metadata"], "labels": {}}}


@pytest.mark.parametrize(
    ("resource", "obj", "alone", "beside_a_pod"),
    [
        (PODS, queue_pod("a"), True, True),
        (PODS, JOB_POD, False, False),
        (METAL_PROCESSES, process("a-b-0"), True, True),
        (INFERENCE_SERVICES, queued_service(), False, True),
        (INFERENCE_SERVICES, queued_service("other"), False, False),
        (DEPLOYMENTS, deployment_of(), False, True),
        (NODES, {"metadata": {"name": "n1"}}, False, False),
    ],
    ids=["pod", "pod of a Job", "process", "service", "another service", "Deployment", "node"],
)
def test_only_what_concerns_a_replica_is_decisive(
    resource: Resource, obj: Obj, *, alone: bool, beside_a_pod: bool
) -> None:
    for others, is_expected in (((), alone), (((PODS, queue_pod("one")),), beside_a_pod)):
        cluster = store(*others)
        assert is_decisive(cluster, resource, None, obj) == is_expected
        assert is_decisive(cluster, resource, obj, None) == is_expected
        assert not is_decisive(cluster, resource, obj, obj)


def test_service_with_a_process_is_decisive() -> None:
    chat = service()
    owned = process(
        "a-b-0",
        ownerReferences=[
            {"kind": "InferenceService", "uid": chat["metadata"]["uid"], "name": "chat", "controller": True}
        ],
    )
    assert is_decisive(store((METAL_PROCESSES, owned)), INFERENCE_SERVICES, chat, service(generation=2))
    assert not is_decisive(store(), INFERENCE_SERVICES, chat, service(generation=2))
