"""The services that read a volume: it stays for them when its Model is deleted."""

from typing import Any

from controller.models.claims import build_owner_patches, observe_claims
from controller.models.copy_observation import models_of_mounts
from controller.models.reconciler import model_reconciler
from controller.pod_settings import DEFAULT_SETTINGS
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.partial_objects import declare_partial_objects
from controller.reconcile.plan import Patch, Snapshot
from crds.meta import LABEL_MODEL
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS, PODS, PVCS, ObjectKey
from kube.store import Store
from tests.support.api_objects import NOW, as_model, model

API = "inference.pomona.dev/v1alpha1"
OWNER: Obj = {"apiVersion": API, "kind": "Model", "name": "tiny", "uid": "model-uid", "controller": True}
OWNER |= {"blockOwnerDeletion": True}
MOUNTED: Obj = {"volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "tiny-cache"}}], "containers": []}
KEY = ObjectKey("team", "tiny")


def reader(name: str) -> Obj:
    return {"apiVersion": API, "kind": "InferenceService", "name": name, "uid": f"{name}-uid"}


class Cluster:
    """A store with a Model, its claim and Deployments that mount it."""

    def __init__(self) -> None:
        self.store = Store()
        declare_indexes(self.store)
        declare_partial_objects(self.store)
        tiny = model()
        self.put(MODELS, "tiny", **{**tiny, "metadata": {**tiny["metadata"], "uid": "model-uid"}})
        self.put_claim(OWNER)

    def put(self, resource: Any, name: str, *, metadata: Obj | None = None, **body: Any) -> None:
        defaults = {"name": name, "namespace": "team", "uid": f"{name}-uid", "resourceVersion": "1"}
        self.store.put(resource, {**body, "metadata": defaults | (metadata or {})})

    def put_claim(self, *owners: Obj) -> None:
        metadata = {"labels": {LABEL_MODEL: "tiny"}, "ownerReferences": [*owners], "creationTimestamp": NOW.isoformat()}
        spec = {"resources": {"requests": {"storage": "1Gi"}}}
        self.store.remove(PVCS, "team", "tiny-cache")
        self.put(PVCS, "tiny-cache", metadata=metadata, spec=spec, status={"phase": "Bound"})

    def deploy(self, service: str) -> None:
        self.put(INFERENCE_SERVICES, service, spec={"modelRef": "tiny"})
        owner = reader(service) | {"controller": True, "blockOwnerDeletion": True}
        metadata = {"ownerReferences": [owner]}
        self.put(DEPLOYMENTS, service, metadata=metadata, spec={"template": {"metadata": {}, "spec": MOUNTED}})

    def share(self) -> tuple[Patch, ...]:
        snapshot = Snapshot(self.store, NOW)
        tiny = self.store.get(MODELS, "tiny", "team")
        assert tiny is not None
        return build_owner_patches(observe_claims(snapshot, as_model(tiny), {}))


def owners_of(patch: Patch) -> list[Obj]:
    """Return the owners that a patch gives to a claim, after its test of those that it had."""
    _uid, before, after = patch.operations
    assert (before["op"], before["path"]) == ("test", "/metadata/ownerReferences")
    owners: list[Obj] = after["value"]
    assert owners[: len(before["value"])] == before["value"]
    return owners


def test_services_that_read_a_volume_own_it_beside_the_model() -> None:
    cluster = Cluster()
    assert cluster.share() == ()
    cluster.deploy("chat")
    cluster.deploy("batch")
    (patch,) = cluster.share()
    assert owners_of(patch) == [OWNER, reader("batch"), reader("chat")]
    cluster.put_claim(OWNER, reader("batch"), reader("chat"))
    assert cluster.share() == (), "nothing is written at rest"


def test_service_that_is_not_there_becomes_no_owner() -> None:
    """Kubernetes takes away an owner that does not exist, and both would write for ever."""
    cluster = Cluster()
    cluster.deploy("chat")
    cluster.store.remove(INFERENCE_SERVICES, "team", "chat")
    assert cluster.share() == (), "it is deleted, and its Deployment is not yet"
    cluster.put(INFERENCE_SERVICES, "chat", metadata={"uid": "another-uid"}, spec={"modelRef": "tiny"})
    assert cluster.share() == (), "the Deployment is of an earlier service, or names any uid"


def test_service_that_reads_other_weights_by_now_owns_the_volume_no_more() -> None:
    """Else the volume would outlive its Model as long as any service that ever read it."""
    cluster = Cluster()
    cluster.deploy("chat")
    cluster.put_claim(OWNER, reader("batch"), reader("chat"))
    (patch,) = cluster.share()
    assert patch.operations[-1]["value"] == [OWNER, reader("chat")]
    cluster.put_claim(OWNER, reader("chat"), {**OWNER, "kind": "Backup", "uid": "backup-uid", "controller": False})
    assert cluster.share() == (), "owners of other kinds are none of ours"


def test_claim_gets_a_limited_number_of_owners() -> None:
    cluster = Cluster()
    for number in range(100):
        cluster.deploy(f"chat-{number}")
    (patch,) = cluster.share()
    owners = owners_of(patch)
    assert len(owners) == 32
    cluster.put_claim(*owners)
    cluster.deploy("a-first-by-its-name")
    assert cluster.share() == ()


def test_deployment_that_mounts_a_volume_wakes_its_model_and_a_pod_only_that_of_copies() -> None:
    cluster = Cluster()
    cluster.deploy("chat")
    cluster.put(PODS, "chat-1", spec=MOUNTED)
    by_kind = [models_of_mounts(cluster.store, obj) for kind in (DEPLOYMENTS, PODS) for obj in cluster.store.list(kind)]
    assert by_kind == [[KEY], []]


def test_volume_of_an_earlier_model_of_the_name_is_not_taken() -> None:
    """Its services still read it; the Model that was created again makes another one."""
    cluster = Cluster()
    cluster.put_claim(reader("chat"))
    tiny = cluster.store.get(MODELS, "tiny", "team")
    assert tiny is not None
    observed = observe_claims(Snapshot(cluster.store, NOW), as_model(tiny), {})
    assert (observed.claims, observed.leaving) == ([], frozenset({"tiny-cache"}))


def test_plan_of_a_model_shares_its_claims() -> None:
    cluster = Cluster()
    cluster.deploy("chat")
    plan = model_reconciler(DEFAULT_SETTINGS).decide(Snapshot(cluster.store, NOW), KEY)
    assert [owners_of(patch)[-1] for patch in plan.patch] == [reader("chat")]
