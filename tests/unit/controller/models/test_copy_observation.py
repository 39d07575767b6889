"""Changes of pods, nodes and other Models enqueue the Models whose copies they concern, and no others."""

import itertools
from typing import Any

import pytest

from controller.controller_options import ControllerOptions
from controller.models.claims import read_classes
from controller.models.jobs import Reservation
from controller.models.observation import ModelInputs, observe_model
from controller.models.served import Served
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Snapshot
from controller.run import Controller, Item
from crds.inferenceservice import InferenceService
from crds.model import Model
from kube.client import Client, Obj
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
from tests.support.api_objects import NOW, as_model, condition, model, service, store
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


class CountingClient(Client):
    """Counts the StorageClasses that are read."""

    def __init__(self) -> None:
        self.reads = 0

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert (resource, name, namespace) == (STORAGE_CLASSES, "local", None)
        self.reads += 1
        return {}


@pytest.mark.parametrize(
    ("classes", "is_immediate"),
    [
        ({"local": {"volumeBindingMode": "WaitForFirstConsumer"}}, False),
        ({"local": {"volumeBindingMode": "Immediate"}}, True),
        ({"local": {}}, True),
        ({}, False),
    ],
    ids=["waits", "immediate", "default", "was not read"],
)
def test_class_of_copies_has_to_wait_for_the_node(classes: dict[str, Obj], is_immediate: bool) -> None:
    inputs = ModelInputs(classes=classes)
    observed = observe_model(Snapshot(store(), NOW, inputs), TINY.key, as_model(model(cache=CACHE)))
    assert observed.copies.binds_immediately is is_immediate


async def test_class_is_read_only_before_the_first_claim_of_a_service() -> None:
    chat, claim = (INFERENCE_SERVICES, service()), (PVCS, claim_of("tiny-cache-1", "tiny"))
    copied, whole = as_model(model(cache=CACHE)), as_model(model())
    for cluster, observed, reads in (
        (store(chat), copied, 1),
        (store(chat), whole, 0),
        (store(chat, claim), copied, 0),
        (store(), copied, 0),
    ):
        client = CountingClient()
        await read_classes(client, Snapshot(cluster, NOW), observed)
        assert client.reads == reads


def test_replica_is_measured_once_for_each_version_of_its_service_and_models() -> None:
    measured: list[str] = []

    def reserve(found: InferenceService, _served: Served) -> Reservation:
        measured.append(found.metadata.name)
        return Reservation()

    cluster = store()
    for number in range(3):
        cluster.put(INFERENCE_SERVICES, named(service(hardware={"accelerator": "cpu"}), f"chat-{number}"))
    cluster.put(MODELS, model(cache=CACHE))

    def measure() -> list[str]:
        measured.clear()
        snapshot = Snapshot(cluster, NOW)
        model = snapshot.read(MODELS, TINY.key, Model)
        assert model is not None
        assert len(observe_model(snapshot, TINY.key, model, reserve=reserve).copies.consumers) == 3
        return sorted(measured)

    assert measure() == ["chat-0", "chat-1", "chat-2"]
    cluster.put(PODS, pod())
    assert measure() == []
    edited = named(service(hardware={"accelerator": "nvidia"}), "chat-1")
    edited["metadata"]["resourceVersion"] = str(next(VERSIONS))
    cluster.put(INFERENCE_SERVICES, edited)
    assert measure() == ["chat-1"]
    inspected = model(cache=CACHE, status={"sizeBytes": 1})
    inspected["metadata"]["resourceVersion"] = str(next(VERSIONS))
    cluster.put(MODELS, inspected)
    assert measure() == ["chat-0", "chat-1", "chat-2"]
