"""Changes of pods, nodes and other Models enqueue the Models whose copies they concern, and no others."""

import itertools
from typing import Any

import pytest

from controller.controller_options import ControllerOptions
from controller.models.copy_observation import read_binding
from controller.models.jobs import Reservation
from controller.models.observation import observe_model
from controller.models.served import Served
from controller.pod_settings import PodSettings
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.plan import Snapshot
from controller.run import Controller, Item
from crds.inferenceservice import InferenceService
from crds.model import Model
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    MODELS,
    NODES,
    PODS,
    PVCS,
    STORAGE_CLASSES,
    ObjectKey,
    Resource,
)
from kube.store import Store
from tests.support.api_objects import NOW, as_model, condition, model, service
from tests.support.watched_controller import CollectingQueue, no_credentials

CACHE = {"scope": "node", "storageClassName": "local"}
TINY = Item(MODELS, ObjectKey("team", "tiny"))
OTHER = Item(MODELS, ObjectKey("team", "other"))
REFUSED = condition("PodScheduled", "False", "Unschedulable")
VERSIONS = itertools.count(2)
MOUNT = {"volumes": [{"persistentVolumeClaim": {"claimName": "tiny-cache-1"}}]}


def copy(claim: str, **fields: str) -> Obj:
    return {"node": "a", "name": claim, "claim": f"uid-{claim}", "path": "x", "sizeBytes": 1 << 30, **fields}


def claim_of(name: str, owner: str) -> Obj:
    reference = {"apiVersion": MODELS.api_version, "kind": "Model", "name": owner, "uid": f"uid-{owner}"}
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": "1"}
    owned = metadata | {"ownerReferences": [reference | {"controller": True}]}
    return {"metadata": owned, "spec": {"resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "local"}}


def named(obj: Obj, name: str) -> Obj:
    return {**obj, "metadata": {**obj["metadata"], "name": name, "uid": f"uid-{name}"}}


@pytest.fixture
def controller() -> Controller:
    """A controller with room for one of two Models on node a."""

    class NoApi(Client):
        def __init__(self) -> None:
            pass

    settings = PodSettings("pomona:test", node_cache_bytes=3 << 29)
    world = Controller(NoApi(), no_credentials, ControllerOptions(settings))
    unused = copy("other-cache-1", unusedSince="2026-11-21T10:00:00Z")
    world.store.put(MODELS, named(model(status={"copies": [unused]}, cache=CACHE), "other"))
    world.store.put(MODELS, model(status={"copies": []}, cache=CACHE))
    for name, owner in (("tiny-cache-1", "tiny"), ("other-cache-1", "other")):
        world.store.put(PVCS, claim_of(name, owner))
    world._queue = CollectingQueue()
    return world


def enqueued(controller: Controller, resource: Resource, *versions: Obj) -> set[Item]:
    """Return what the last of these versions of an object enqueues."""
    for obj in versions:
        controller._queue = queue = CollectingQueue()
        obj["metadata"]["resourceVersion"] = str(next(VERSIONS))
        controller.store.put(resource, obj)
    return queue.items


def pod(spec: Obj = MOUNT, **status: Any) -> Obj:
    return {"metadata": {"name": "p", "namespace": "team", "uid": "p"}, "spec": spec, "status": status}


def test_pod_that_mounts_a_copy_concerns_its_model(controller: Controller) -> None:
    assert enqueued(controller, PODS, pod()) == {TINY}
    assert enqueued(controller, PODS, pod(), pod(phase="Failed")) == {TINY}
    assert enqueued(controller, PODS, pod(), pod(conditions=[REFUSED])) == {TINY}


def test_other_changes_of_a_pod_concern_no_model(controller: Controller) -> None:
    assert enqueued(controller, PODS, pod(), pod(conditions=[condition("Ready", "True")])) == set()
    assert enqueued(controller, PODS, named(pod({}), "bare")) == set()
    gated = condition("PodScheduled", "False", "SchedulingGated")
    assert enqueued(controller, PODS, pod(), pod(conditions=[gated])) == set(), "no scheduler has looked at it"


def test_volume_of_a_model_without_copies_is_not_followed(controller: Controller) -> None:
    whole = model()
    whole["metadata"]["resourceVersion"] = "2"
    controller.store.put(MODELS, whole)
    assert enqueued(controller, PODS, pod()) == set()


def test_deployment_that_mounts_a_copy_concerns_its_model(controller: Controller) -> None:
    metadata = {"name": "d", "namespace": "team", "uid": "d"}
    deployment = {"metadata": metadata, "spec": {"replicas": 0, "template": {"spec": MOUNT}}}
    assert enqueued(controller, DEPLOYMENTS, deployment) == {TINY}


def test_node_concerns_the_models_with_a_copy_on_it_when_it_comes_or_goes(controller: Controller) -> None:
    node = {"metadata": {"name": "a", "uid": "a"}, "status": {}}
    assert enqueued(controller, NODES, node) == {OTHER}
    busy = {"metadata": {"name": "a", "uid": "a", "labels": {"x": "y"}}, "status": {"allocatable": {"cpu": "1"}}}
    assert enqueued(controller, NODES, node, busy) == set()
    controller._queue = queue = CollectingQueue()
    controller.store.remove(NODES, "", "a")
    assert queue.items == {OTHER}


def test_new_copy_concerns_the_models_whose_copies_go_from_its_node(controller: Controller) -> None:
    full = model(status={"copies": [copy("tiny-cache-1")]}, cache=CACHE)
    assert enqueued(controller, MODELS, full) >= {OTHER}


def test_copy_that_fits_concerns_no_other_model(controller: Controller) -> None:
    elsewhere = model(status={"copies": [copy("tiny-cache-1", node="b")]}, cache=CACHE)
    assert OTHER not in enqueued(controller, MODELS, elsewhere)


class StorageClasses(Client):
    """Answers reads of StorageClasses, and counts them."""

    def __init__(self, answer: Obj | Exception) -> None:
        self.answer = answer
        self.reads = 0

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert (resource, name, namespace) == (STORAGE_CLASSES, "local", None)
        self.reads += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def snapshot_of(*claims: Obj, has_service: bool = True) -> Snapshot:
    store = Store()
    declare_indexes(store)
    if has_service:
        store.put(INFERENCE_SERVICES, service())
    for claim in claims:
        store.put(PVCS, claim)
    return Snapshot(store, NOW)


@pytest.mark.parametrize(
    ("answer", "is_immediate"),
    [
        ({"volumeBindingMode": "WaitForFirstConsumer"}, False),
        ({"volumeBindingMode": "Immediate"}, True),
        ({}, True),
        (Forbidden("get", status=403, reason="Forbidden", message="no"), False),
        (NotFound("get", status=404, reason="NotFound", message="no"), False),
    ],
    ids=["waits", "immediate", "default", "may not be read", "does not exist"],
)
async def test_class_of_copies_has_to_wait_for_the_node(answer: Obj | Exception, is_immediate: bool) -> None:
    immediate = await read_binding(StorageClasses(answer), snapshot_of(), as_model(model(cache=CACHE)))
    assert immediate is is_immediate


async def test_class_is_read_only_before_the_first_claim_of_a_service() -> None:
    client = StorageClasses({})
    assert not await read_binding(client, snapshot_of(), as_model(model()))
    assert not await read_binding(client, snapshot_of(claim_of("tiny-cache-1", "tiny")), as_model(model(cache=CACHE)))
    assert not await read_binding(client, snapshot_of(has_service=False), as_model(model(cache=CACHE)))
    assert client.reads == 0


def test_replica_is_measured_once_for_each_version_of_its_service_and_models() -> None:
    measured: list[str] = []

    def reserve(found: InferenceService, _served: Served) -> Reservation:
        measured.append(found.metadata.name)
        return Reservation()

    store = Store()
    declare_indexes(store)
    for number in range(3):
        store.put(INFERENCE_SERVICES, named(service(hardware={"accelerator": "cpu"}), f"chat-{number}"))
    store.put(MODELS, model(cache=CACHE))

    def measure() -> list[str]:
        measured.clear()
        snapshot = Snapshot(store, NOW)
        model = snapshot.read(MODELS, TINY.key, Model)
        assert model is not None
        assert len(observe_model(snapshot, TINY.key, model, reserve=reserve).copies.consumers) == 3
        return sorted(measured)

    assert measure() == ["chat-0", "chat-1", "chat-2"]
    store.put(PODS, pod())
    assert measure() == []
    edited = named(service(hardware={"accelerator": "nvidia"}), "chat-1")
    edited["metadata"]["resourceVersion"] = str(next(VERSIONS))
    store.put(INFERENCE_SERVICES, edited)
    assert measure() == ["chat-1"]
    inspected = model(cache=CACHE, status={"sizeBytes": 1})
    inspected["metadata"]["resourceVersion"] = str(next(VERSIONS))
    store.put(MODELS, inspected)
    assert measure() == ["chat-0", "chat-1", "chat-2"]
