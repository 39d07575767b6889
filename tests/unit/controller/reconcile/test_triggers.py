"""Changes that no decision reads enqueue nothing; all others enqueue what they concern."""

import asyncio
from typing import Any

import pytest

from controller.controller_options import ControllerOptions
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Plan, Reconciler
from controller.reconcile.stamp import ANNOTATION_STAMP
from controller.reconcile.triggers import is_gated
from controller.run import Controller, Item
from controller.services.preconditions import DEVICE_TOO_SMALL
from crds.meta import QUEUE_GATE
from kube.client import Client, Obj
from kube.queue import WorkQueue
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    NODES,
    PODS,
    ObjectKey,
    Resource,
)
from tests.support.api_objects import GIB, condition, host, model, process, service, slice_of
from tests.support.watched_controller import CollectingQueue, no_credentials

CHAT = Item(INFERENCE_SERVICES, ObjectKey("team", "chat"))
TINY = Item(MODELS, ObjectKey("team", "tiny"))
STUDIO = Item(METAL_HOSTS, ObjectKey("", "studio-1"))
PROCESS = Item(METAL_PROCESSES, ObjectKey("team", "chat-1-0"))
LEAVING = Item(METAL_PROCESSES, ObjectKey("team", "chat-8-0"))


class NoApi(Client):
    """An API that is never called."""

    def __init__(self) -> None:
        pass


@pytest.fixture
def controller() -> Controller:
    return Controller(NoApi(), no_credentials, ControllerOptions(PodSettings("pomona:test")))


def deployment(**status: Any) -> Obj:
    owner = {
        "apiVersion": "inference.pomona.dev/v1alpha1",
        "kind": "InferenceService",
        "name": "chat",
        "uid": "uid-chat",
    }
    metadata: Obj = {
        "name": "chat",
        "namespace": "team",
        "uid": "d",
        "ownerReferences": [{**owner, "controller": True}],
    }
    metadata["annotations"] = {ANNOTATION_STAMP: "a"}
    spec = {"replicas": 1, "template": {"spec": {"containers": []}}}
    return {"metadata": metadata, "spec": spec, "status": status}


def pod(**status: Any) -> Obj:
    metadata = {"name": "chat-1", "namespace": "team", "uid": "p", "labels": {"inference.pomona.dev/service": "chat"}}
    return {"metadata": metadata, "spec": {"containers": []}, "status": status}


def slice_of_pods(endpoints: list[Obj]) -> Obj:
    labels = {"kubernetes.io/service-name": "chat"}
    metadata = {"name": "chat-x7k2p", "namespace": "team", "uid": "e", "labels": labels}
    return {"metadata": metadata, "ports": [], "endpoints": endpoints}


READY_BUT_FOR_A_DEVICE = condition("Ready", "False", DEVICE_TOO_SMALL)


def node_with(gpus: int) -> Obj:
    return {"metadata": {"name": "gpu-1", "uid": "n"}, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}


def enqueued(controller: Controller, resource: Resource, old: Obj | None, new: Obj) -> set[Item]:
    """Return what a change from `old` to `new` enqueues."""
    new["metadata"]["resourceVersion"] = "2"
    if old is not None:
        old["metadata"]["resourceVersion"] = "1"
        controller.store.put(resource, old)
    controller._queue = queue = CollectingQueue()
    controller.store.put(resource, new)
    return queue.items


QUIET = {
    "a host reports its free memory": (METAL_HOSTS, host(free_bytes=GIB), host(free_bytes=2 * GIB)),
    "the status of a service is written": (INFERENCE_SERVICES, service(), service(status={"phase": "Pending"})),
    "nothing is left but another version": (
        DEPLOYMENTS,
        deployment(replicas=1),
        deployment(replicas=1),
    ),
    "a pod has its volumes": (
        PODS,
        pod(conditions=[condition("PodScheduled", "True")]),
        pod(conditions=[condition("PodScheduled", "True"), condition("Initialized", "True")]),
    ),
    "a Deployment reports its progress": (
        DEPLOYMENTS,
        deployment(replicas=1),
        deployment(replicas=1, conditions=[condition("Progressing", "True")]),
    ),
    "a Deployment counts pods of which none is ready": (
        DEPLOYMENTS,
        deployment(),
        deployment(observedGeneration=1, replicas=1, updatedReplicas=1, unavailableReplicas=1),
    ),
    "a pod is created": (PODS, None, pod(phase="Pending")),
    "an EndpointSlice has no endpoint yet": (ENDPOINT_SLICES, None, slice_of_pods([])),
}
NEWS = {
    "the spec of a service": (INFERENCE_SERVICES, service(), service(replicas=2), {CHAT, TINY}),
    "the status of a Model": (MODELS, model(cached=False), model(), {CHAT}),
    "a Deployment's replicas": (
        DEPLOYMENTS,
        deployment(),
        deployment(replicas=1, readyReplicas=1),
        {CHAT},
    ),
    "a pod that fits nowhere": (PODS, pod(), pod(conditions=[condition("PodScheduled", "False")]), {CHAT}),
    "a pod that is scheduled": (PODS, pod(), pod(conditions=[condition("PodScheduled", "True")]), {CHAT}),
    "a pod that the queue has admitted": (
        PODS,
        pod(conditions=[condition("PodScheduled", "False")]) | {"spec": {"schedulingGates": [{"name": QUEUE_GATE}]}},
        pod(conditions=[condition("PodScheduled", "False")]),
        {CHAT},
    ),
    "a pod that a node runs": (PODS, pod(), pod(phase="Running"), {CHAT}),
    "a pod that is ready": (
        PODS,
        pod(conditions=[condition("PodScheduled", "True"), condition("Ready", "False")]),
        pod(conditions=[condition("PodScheduled", "True"), condition("Ready", "True")]),
        {CHAT},
    ),
    "a Deployment's ready pods": (
        DEPLOYMENTS,
        deployment(replicas=2, readyReplicas=1),
        deployment(replicas=2, readyReplicas=2),
        {CHAT},
    ),
    "a quota that no pod fits into": (
        DEPLOYMENTS,
        deployment(replicas=1),
        deployment(replicas=1, conditions=[condition("ReplicaFailure", "True")]),
        {CHAT},
    ),
    "the status of a process": (
        METAL_PROCESSES,
        process("chat-1-0", host="studio-1"),
        process("chat-1-0", host="studio-1", phase="Ready"),
        {CHAT, PROCESS},
    ),
    "the binding of a process": (
        METAL_PROCESSES,
        process("chat-1-0"),
        process("chat-1-0", host="studio-1"),
        {CHAT, PROCESS, STUDIO},
    ),
    "the life of a host": (METAL_HOSTS, host(), host(ready="False"), {CHAT, STUDIO}),
    "the pressure of a host": (
        METAL_HOSTS,
        host(),
        host(conditions=[condition("MemoryPressure", "True")]),
        {CHAT, STUDIO},
    ),
    "the progress of a drain": (
        METAL_HOSTS,
        host(conditions=[condition("Ready", "True"), condition("Drained", "False", message="2 processes")]),
        host(conditions=[condition("Ready", "True"), condition("Drained", "False", message="1 process")]),
        {STUDIO},
    ),
    "the answer of a host": (
        METAL_HOSTS,
        host(conditions=[condition("Ready", "True"), condition("Reachable", "False")]),
        host(conditions=[condition("Ready", "True"), condition("Reachable", "True")]),
        {STUDIO},
    ),
    "the controller's version": (METAL_HOSTS, host(), host(controllerVersion="2"), {STUDIO}),
    "the pause of a host": (METAL_HOSTS, host(), host(conditions=[condition("Paused", "True")]), {CHAT, STUDIO}),
    "the first endpoint": (ENDPOINT_SLICES, slice_of_pods([]), slice_of_pods([{"addresses": ["10.0.0.1"]}]), {CHAT}),
    "an endpoint": (
        ENDPOINT_SLICES,
        slice_of("chat", "studio-1", ready=False),
        slice_of("chat", "studio-1"),
        {CHAT},
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_change_that_is_not_read_enqueues_nothing(controller: Controller, name: str) -> None:
    controller.store.put(METAL_PROCESSES, process("chat-9-0"))
    resource, old, new = QUIET[name]
    assert enqueued(controller, resource, old, new) == set()


@pytest.mark.parametrize("name", NEWS)
def test_change_that_is_read_enqueues_what_it_concerns(controller: Controller, name: str) -> None:
    resource, old, new, expected = NEWS[name]
    if resource == METAL_HOSTS:
        controller.store.put(METAL_PROCESSES, process("chat-9-0"))
        leaving = process("chat-8-0", host="studio-1", deletionTimestamp="2026-11-21T11:00:00Z")
        controller.store.put(METAL_PROCESSES, leaving)
        expected = expected | ({LEAVING} if CHAT in expected else set())
    if name.endswith("Model"):
        controller.store.put(INFERENCE_SERVICES, service())
    assert enqueued(controller, resource, old, new) == expected


def test_service_that_waits_is_enqueued_once_for_a_change_of_a_host(controller: Controller) -> None:
    """Many may wait with many replicas, and many hosts may be lost at once."""
    for number in range(10):
        controller.store.put(METAL_PROCESSES, process(f"chat-{number}-0"))
    bound = process("mail-0", host="studio-1")
    bound["spec"]["serviceName"] = "mail"
    controller.store.put(METAL_PROCESSES, bound)
    added = list[Item]()

    class CountingQueue(CollectingQueue):
        def add(self, key: Item, *, urgent: bool = False) -> None:
            added.append(key)
            super().add(key, urgent=urgent)

    controller.store.put(METAL_HOSTS, host())
    controller._queue = CountingQueue()
    lost = host(ready="False")
    lost["metadata"]["resourceVersion"] = "2"
    controller.store.put(METAL_HOSTS, lost)
    assert added.count(CHAT) == 1
    assert set(added) == {CHAT, Item(INFERENCE_SERVICES, ObjectKey("team", "mail")), STUDIO}


def test_node_enqueues_services_without_a_device_only_if_its_devices_change(controller: Controller) -> None:
    controller.store.put(INFERENCE_SERVICES, service(status={"conditions": [READY_BUT_FOR_A_DEVICE]}))
    tainted = node_with(gpus=1) | {"spec": {"taints": [{"key": "key", "effect": "NoSchedule"}]}}
    assert enqueued(controller, NODES, node_with(gpus=1), tainted) == set()
    larger = node_with(gpus=2)
    larger["metadata"]["name"] = "gpu-2"
    assert enqueued(controller, NODES, None, larger) == {CHAT}


@pytest.mark.parametrize(
    ("later", "again_seconds"),
    [(None, None), ({"replicas": 1}, None), ({"replicas": 1, "readyReplicas": 1}, 0.0)],
    ids=["nothing", "what is not read", "a ready pod"],
)
async def test_event_of_a_write_enqueues_nothing_even_before_the_answer(
    later: Obj | None, again_seconds: float | None
) -> None:
    """A change by another meanwhile is decided about, if it is read."""

    class Observed(NoApi):
        async def apply(self, resource: Resource, obj: Any, **_options: Any) -> Obj:
            versions = {"2": obj} if later is None else {"2": obj, "3": obj | {"status": later}}
            for version, content in versions.items():
                seen = {**content, "metadata": {**content["metadata"], "resourceVersion": version}}
                world.store.put(resource, seen)
            return {**obj, "metadata": {**obj["metadata"], "resourceVersion": "2"}}

    world = Controller(Observed(), no_credentials, ControllerOptions(PodSettings("pomona:test"), elects=False))
    world.store.put(INFERENCE_SERVICES, service())
    world._queue = queue = CollectingQueue()
    plan = Plan(apply=((DEPLOYMENTS, deployment()),))
    kind = Reconciler(resource=INFERENCE_SERVICES, decide=lambda _snapshot, _key: plan)
    assert await world._executor.reconcile(kind, CHAT.key) == again_seconds
    assert queue.items == set()
    world.store.remove(DEPLOYMENTS, "team", "chat")
    assert queue.items == {CHAT}


async def test_what_is_about_to_wait_for_a_change_is_decided_again(controller: Controller) -> None:
    """The change comes after the decision and before its status, by which those that wait are found."""
    controller._queue = queue = WorkQueue[Item]()
    queue.add(CHAT)
    assert await queue.get() == CHAT
    node = {"metadata": {"name": "gpu-1"}, "status": {"allocatable": {"nvidia.com/gpu": "1"}}}
    controller.store.put(NODES, node)
    queue.done(CHAT)
    assert await asyncio.wait_for(queue.get(), 1) == CHAT


def test_standby_enqueues_nothing(controller: Controller) -> None:
    controller.store.put(METAL_PROCESSES, process("chat-1-0", host="studio-1"))
    assert controller._queue is None


@pytest.mark.parametrize("gates", [None, [], [{"name": "other.example/gate"}]], ids=str)
def test_pod_without_our_gate_does_not_wait_in_the_queue(gates: list[Obj] | None) -> None:
    assert not is_gated(pod() | {"spec": {"schedulingGates": gates}})


def test_pod_with_our_gate_waits_in_the_queue() -> None:
    gates = [{"name": "other.example/gate"}, {"name": QUEUE_GATE}]
    assert is_gated(pod() | {"spec": {"schedulingGates": gates}})
