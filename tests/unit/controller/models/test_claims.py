"""Decisions about volumes: a Model is edited, and its volume grows, is replaced, or is refused."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from controller.models.claims import RELEASE_SECONDS, observe_claims, read_classes
from controller.models.served import cached_claim
from controller.models.volume import WEIGHTS
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.partial_objects import declare_partial_objects
from controller.reconcile.plan import Snapshot
from crds.cache import CacheOptions
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.resources import DEPLOYMENTS, MODELS, PODS, PVCS, STORAGE_CLASSES, Resource
from kube.store import Store
from tests.support.simulated_model import INSPECTED, START, SimulatedModel, make_cached, make_inspected

OTHER = "http://models.example/other.gguf"


def requested(simulated: SimulatedModel, name: str) -> str:
    size: str = simulated.claims[name]["spec"]["resources"]["requests"]["storage"]
    return size


def successor(simulated: SimulatedModel) -> str:
    (name,) = set(simulated.claims) - {"tiny-cache"}
    return name


def changes(simulated: SimulatedModel) -> list[tuple[str, str]]:
    conditions = [condition for condition in simulated.model.status.conditions if condition.type == "VolumeChanging"]
    return [(condition.status, condition.reason) for condition in conditions]


def test_claim_names_the_weights_that_it_is_for_and_the_status_names_the_claim() -> None:
    simulated = make_cached()
    cached = simulated.model.status.cached
    assert cached is not None
    assert simulated.claims["tiny-cache"]["metadata"]["annotations"] == {WEIGHTS: cached.path}
    assert cached.name == cached_claim(simulated.model) == "tiny-cache"
    assert changes(simulated) == []


def test_raised_size_grows_the_volume_if_its_class_can() -> None:
    simulated = make_cached()
    simulated.expandable = {"standard"}
    jobs, claims = set(simulated.jobs), dict(simulated.claims)
    simulated.edit(cache=CacheOptions(size="2 GiB"))
    plan = simulated.step()
    (patch,) = plan.patch
    assert patch.operations[0] == {
        "op": "test",
        "path": "/metadata/uid",
        "value": claims["tiny-cache"]["metadata"]["uid"],
    }
    simulated.settle()
    assert requested(simulated, "tiny-cache") == "2Gi"
    assert (set(simulated.jobs), set(simulated.claims)) == (jobs, {"tiny-cache"}), "no weights are fetched again"
    assert simulated.condition("Cached").status == "True"
    assert simulated.condition("VolumeChanging").reason == "VolumeGrowing"
    assert "from 126Mi to 2Gi" in simulated.condition("VolumeChanging").message

    simulated.claims["tiny-cache"]["status"]["conditions"] = [{"type": "ResizeFailed", "message": "quota of the array"}]
    simulated.settle()
    assert "quota of the array" in simulated.condition("VolumeChanging").message
    simulated.claims["tiny-cache"]["status"]["capacity"]["storage"] = "2Gi"
    simulated.settle()
    assert changes(simulated) == []


def test_growth_is_reported_by_one_event() -> None:
    simulated = make_cached()
    simulated.expandable = {"standard"}
    simulated.edit(cache=CacheOptions(size="2Gi"))
    events = [event for _ in range(4) for event in simulated.step().events]
    assert [(event.type, event.reason) for event in events] == [("Normal", "VolumeGrowing")]


@pytest.mark.parametrize("size", ["100Mi", "126Mi", None])
def test_size_that_is_not_larger_changes_no_volume(size: str | None) -> None:
    simulated = make_cached()
    before = dict(simulated.claims)
    simulated.edit(cache=CacheOptions(size=size))
    plan = simulated.settle()
    assert (plan.patch, simulated.claims, changes(simulated)) == ((), before, [])


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (CacheOptions(size="2Gi"), "its StorageClass standard cannot grow it to 2Gi"),
        (CacheOptions(storage_class_name="fast"), "spec.cache.storageClassName is fast now"),
    ],
    ids=["size", "class"],
)
def test_pods_serve_from_the_earlier_volume_until_its_successor_is_verified(cache: CacheOptions, reason: str) -> None:
    simulated = make_cached()
    simulated.mounted = {"tiny-cache"}
    simulated.edit(cache=cache)
    simulated.settle()
    new = successor(simulated)
    assert simulated.condition("Cached").status == "True"
    assert cached_claim(simulated.model) == "tiny-cache"
    assert simulated.model.status.phase == "Ready"
    assert changes(simulated) == [("True", "VolumeReplaced")]
    assert reason in simulated.condition("VolumeChanging").message
    assert simulated.job("fetch")["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == new

    simulated.end("fetch", 0, {"sizeBytes": 1})
    assert simulated.settle().again_seconds == RELEASE_SECONDS
    assert cached_claim(simulated.model) == new
    assert set(simulated.claims) == {"tiny-cache", new}, "a pod mounts the earlier volume"
    simulated.mounted = {new}
    assert simulated.settle().again_seconds is None
    assert (set(simulated.claims), changes(simulated)) == ({new}, [])


def test_volume_is_deleted_only_after_the_status_names_its_successor() -> None:
    """A controller that dies between the two would leave pods without weights."""
    simulated = make_cached()
    simulated.edit(cache=CacheOptions(storage_class_name="fast"))
    simulated.settle()
    simulated.end("fetch", 0, {"sizeBytes": 1})
    plan = simulated.step()
    assert plan.status is not None
    assert plan.status["cached"]["name"] == successor(simulated)
    assert [ref for ref in plan.delete if ref.resource == PVCS] == []
    assert [ref.name for ref in simulated.step().delete if ref.resource == PVCS] == ["tiny-cache"]


def test_failed_replacement_is_reported_while_pods_serve() -> None:
    simulated = make_cached()
    simulated.edit(cache=CacheOptions(storage_class_name="fast"))
    simulated.settle()
    simulated.end("fetch", 2, {"reason": "SourceNotFound", "message": "gone"})
    simulated.settle()
    assert changes(simulated) == [("False", "SourceNotFound")]
    assert simulated.condition("Cached").status == "True"
    assert simulated.model.status.phase == "Ready"


def test_edit_that_is_taken_back_keeps_the_earlier_volume() -> None:
    simulated = make_cached()
    simulated.edit(cache=CacheOptions(storage_class_name="fast"))
    simulated.settle()
    simulated.edit(cache=CacheOptions())
    simulated.settle()
    assert (set(simulated.claims), changes(simulated)) == ({"tiny-cache"}, [])
    assert simulated.condition("Cached").status == "True"


def test_other_weights_get_a_volume_of_their_own() -> None:
    simulated = make_cached()
    simulated.mounted = {"tiny-cache"}
    simulated.edit(source=OTHER)
    simulated.settle()
    simulated.end("inspect", 0, INSPECTED | {"file": "other.gguf", "sizeBytes": 1 << 30})
    simulated.settle()
    new = successor(simulated)
    assert requested(simulated, new) == "1143Mi"
    assert (simulated.condition("Cached").status, changes(simulated)) == ("False", [("True", "VolumeReplaced")])
    simulated.end("fetch", 0, {"sizeBytes": 1})
    simulated.settle()
    assert set(simulated.claims) == {"tiny-cache", new}
    simulated.mounted.clear()
    simulated.settle()
    assert set(simulated.claims) == {new}


def test_volume_without_weights_is_used_after_an_edit_that_keeps_the_revision() -> None:
    simulated = make_inspected(sha256="ab" * 32)
    simulated.add_consumer()
    simulated.settle()
    simulated.edit(sha256="cd" * 32)
    simulated.settle()
    simulated.end("inspect", 0, INSPECTED)
    simulated.settle()
    assert set(simulated.claims) == {"tiny-cache"}


def test_size_below_that_of_the_weights_is_refused_with_the_way_out() -> None:
    simulated = make_inspected(cache=CacheOptions(size="10Mi"))
    simulated.add_consumer()
    simulated.settle()
    assert (simulated.claims, simulated.model.status.phase) == ({}, "Failed")
    assert simulated.condition("Cached").reason == "VolumeTooSmall"
    assert "spec.cache.size 10Mi" in simulated.condition("Cached").message
    assert "raise it to 126Mi, or remove it" in simulated.condition("Cached").message
    simulated.edit(cache=CacheOptions(size="126Mi"))
    simulated.settle()
    assert requested(simulated, "tiny-cache") == "126Mi"


def test_volume_that_is_not_bound_does_not_grow() -> None:
    """The API server refuses it; nothing is on such a volume."""
    simulated = make_inspected()
    simulated.claim_phase, simulated.expandable = "Pending", {"standard"}
    simulated.add_consumer()
    simulated.settle()
    simulated.edit(cache=CacheOptions(size="2Gi"))
    simulated.now += timedelta(seconds=10)
    assert simulated.settle().patch == ()
    assert requested(simulated, successor(simulated)) == "2Gi"


def test_without_a_consumer_no_volume_is_replaced() -> None:
    simulated = make_cached()
    simulated.consumers.clear()
    simulated.edit(cache=CacheOptions(size="2Gi", storage_class_name="fast"))
    simulated.settle()
    assert set(simulated.claims) == {"tiny-cache"}
    assert simulated.condition("Cached").status == "True"


def owned(name: str, **metadata: Any) -> Obj:
    owner = {"apiVersion": MODELS.api_version, "kind": "Model", "uid": "model-uid", "name": "tiny", "controller": True}
    identity = {"name": name, "namespace": "team", "uid": name, "resourceVersion": "1", "ownerReferences": [owner]}
    spec = {"storageClassName": "standard", "resources": {"requests": {"storage": "1Gi"}}}
    return {"metadata": identity | metadata, "spec": spec, "status": {"phase": "Bound"}}


def snapshot_of(*objects: tuple[Resource, Obj]) -> Snapshot:
    store = Store()
    declare_indexes(store)
    declare_partial_objects(store)
    for resource, obj in objects:
        store.put(resource, obj)
    return Snapshot(store, START)


MOUNTS: Obj = {"containers": [], "volumes": [{"persistentVolumeClaim": {"claimName": "tiny-cache", "readOnly": True}}]}
METADATA: Obj = {"name": "chat", "namespace": "team", "uid": "chat", "resourceVersion": "1"}


@pytest.mark.parametrize(
    ("user", "is_mounted"),
    [
        ((PODS, {"metadata": METADATA, "spec": MOUNTS, "status": {"phase": "Running"}}), True),
        ((PODS, {"metadata": METADATA, "spec": MOUNTS, "status": {"phase": "Failed"}}), False),
        ((PODS, {"metadata": METADATA | {"namespace": "thieves"}, "spec": MOUNTS}), False),
        ((DEPLOYMENTS, {"metadata": METADATA, "spec": {"template": {"spec": MOUNTS}}}), True),
    ],
    ids=["pod", "ended pod", "pod of another namespace", "Deployment whose pod was evicted"],
)
def test_claim_that_a_pod_or_a_deployment_mounts_is_found(user: tuple[Resource, Obj], is_mounted: bool) -> None:
    simulated = SimulatedModel()
    claims = [
        owned("tiny-cache"),
        owned("tiny-cache-2"),
        owned("b", deletionTimestamp="x"),
    ]
    observed = observe_claims(snapshot_of(user, *((PVCS, claim) for claim in claims)), simulated.model, {})
    assert [claim.metadata.name for claim in observed.claims] == ["tiny-cache", "tiny-cache-2"]
    assert observed.mounted == (frozenset({"tiny-cache"}) if is_mounted else frozenset())


def test_claim_that_is_being_deleted_keeps_its_name() -> None:
    """Pods that mount it hold it, and it can be created again only after they have ended."""
    user = (PODS, {"metadata": METADATA, "spec": MOUNTS, "status": {"phase": "Running"}})
    going = owned("tiny-cache", deletionTimestamp="2026-11-21T12:00:00Z")
    observed = observe_claims(snapshot_of(user, (PVCS, going)), SimulatedModel().model, {})
    assert not observed.claims
    assert observed.leaving == {"tiny-cache"}
    simulated = make_cached()
    simulated.leaving, simulated.claims = {"tiny-cache"}, {}
    simulated.settle()
    assert successor(simulated).startswith("tiny-cache-")
    simulated.end("fetch", 0, {"sizeBytes": 1})
    simulated.settle()
    assert cached_claim(simulated.model) == successor(simulated)


def test_model_that_is_made_again_twice_takes_no_claim_of_the_model_between() -> None:
    """Services read that claim until the weights of the last Model are verified, which needs another one."""
    names: list[str] = []
    for number in ("second", "third"):
        simulated = make_cached()
        simulated.leaving, simulated.claims = {"tiny-cache", *names}, {}
        metadata = msgspec.structs.replace(simulated.model.metadata, uid=number)
        simulated.model = msgspec.structs.replace(simulated.model, metadata=metadata)
        simulated.settle()
        names.append(successor(simulated))
    assert len(set(names)) == len(names)


class StorageClasses(Client):
    """Answers reads of StorageClasses, and counts them."""

    def __init__(self, answer: Obj | Exception) -> None:
        self.answer = answer
        self.reads: list[str] = []

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert (resource, namespace) == (STORAGE_CLASSES, None)
        self.reads.append(name)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "size", "expandable", "reads"),
    [
        ({"allowVolumeExpansion": True}, "2Gi", {"standard"}, 1),
        ({"allowVolumeExpansion": False}, "2Gi", set(), 1),
        ({}, "2Gi", set(), 1),
        (Forbidden("get", status=403, reason="Forbidden", message="no"), "2Gi", set(), 1),
        (NotFound("get", status=404, reason="NotFound", message="no"), "2Gi", set(), 1),
        ({"allowVolumeExpansion": True}, "1Gi", set(), 0),
        ({"allowVolumeExpansion": True}, None, set(), 0),
    ],
    ids=["can grow", "cannot grow", "default", "may not be read", "is gone", "large enough", "no size stated"],
)
async def test_storage_class_is_read_only_for_a_volume_that_is_too_small(
    answer: Obj | Exception, size: str | None, expandable: set[str], reads: int
) -> None:
    simulated, client = SimulatedModel(cache=CacheOptions(size=size)), StorageClasses(answer)
    snapshot = snapshot_of((PVCS, owned("tiny-cache")))
    classes = await read_classes(client, snapshot, simulated.model)
    assert observe_claims(snapshot, simulated.model, classes).expandable == expandable
    assert len(client.reads) == reads


def test_size_above_the_largest_of_kubernetes_is_capped() -> None:
    simulated = make_cached()
    simulated.expandable = {"standard"}
    simulated.edit(cache=CacheOptions(size="9" * 32))
    assert [patch.operations[-1]["value"] for patch in simulated.settle().patch] in ([], ["9" * 32])
    assert requested(simulated, "tiny-cache") == "9" * 32
    assert simulated.condition("Cached").status == "True"
