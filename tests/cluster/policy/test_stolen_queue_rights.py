"""A thief with the controller's token: it may do to waiting pods what the queue does, and to no other pod anything."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from controller.placement.effects import admit_pod, annotate, build_eviction
from controller.placement.ledger import LEDGER, QueueLedger
from crds.meta import CONTROLLER_NAMESPACE, ENQUEUED_AT, NOMINATED, QUEUE_GATE
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.resources import CONFIG_MAPS, PODS
from tests.cluster.policy.attempts import find_unrefused
from tests.cluster.policy.queued_pods import (
    OWN_LABELS,
    REPLICA_SETS,
    SECOND_GATE,
    build_pod,
    find_pod,
    start_workload,
)
from tests.cluster.policy.test_stolen_controller_token import Thief, thief

__all__ = ["thief"]

REPLICA_SET = "one-5d4f8c7b9d"
FOREIGN = ("foreign", "bare", "of another service", "unlabelled")


@dataclass
class QueueThief:
    """The API with the controller's token, and pods that an administrator's workloads have, by what they are."""

    api: Client
    namespace: str
    pods: Mapping[str, Obj]

    def name(self, which: str) -> str:
        return str(self.pods[which]["metadata"]["name"])

    async def patch(self, which: str, *operations: Obj) -> None:
        await self.api.patch_json(PODS, self.name(which), self.namespace, operations)

    async def delete(self, which: str, **options: Any) -> None:
        uid = self.pods[which]["metadata"]["uid"]
        await self.api.delete(PODS, self.name(which), self.namespace, **({"uid": uid} | options))

    async def evict(self, which: str, **changes: Any) -> None:
        eviction = build_eviction(self.pods[which]) | changes
        await self.api.create_subresource(PODS, self.name(which), self.namespace, "eviction", eviction)


Attempt = Callable[[QueueThief], Awaitable[object]]


@pytest.fixture
async def queue(thief: Thief) -> QueueThief:
    both, own = (QUEUE_GATE, SECOND_GATE), OWN_LABELS
    started = {
        "own": (REPLICA_SET, build_pod(own, gates=both, annotations={"user.example/a": "b"})),
        "foreign": ("bank-5d4f8c7b9d", build_pod({}, gates=both)),
        "unlabelled": ("one-6d4f8c7b9d", build_pod({"inference.pomona.dev/service": "one"}, gates=both)),
        "of another service": ("bank-7d4f8c7b9d", build_pod(own, gates=both)),
    }
    pods = {
        which: await start_workload(thief.admin, REPLICA_SETS, thief.namespace, name, template)
        for which, (name, template) in started.items()
    }
    bare = build_pod(own, gates=both, namespace=thief.namespace, name="one-bare")
    pods["bare"] = await thief.admin.create(PODS, bare)
    return QueueThief(thief.api, thief.namespace, pods)


def change(path: str, value: object, op: str = "add") -> Attempt:
    return lambda queue: queue.patch("own", {"op": op, "path": path, "value": value})


def on_foreign(what: str, says: str, act: Callable[..., Awaitable[object]]) -> dict[str, tuple[str, Attempt]]:
    """Return the same attempt for each kind of pod that is not the controller's."""
    return {f"{what}, {which}": (says, partial(act, which=which)) for which in FOREIGN}


async def admit(queue: QueueThief, which: str) -> None:
    pod = queue.pods[which]
    await queue.api.patch_json(PODS, queue.name(which), queue.namespace, admit_pod(pod, "cpu-1"))


async def note(queue: QueueThief, which: str) -> None:
    patch = annotate(queue.pods[which], {ENQUEUED_AT: "2026-01-01T00:00:00Z"})
    await queue.api.patch_merge(PODS, queue.name(which), queue.namespace, patch, field_manager="thief")


def ledger(namespace: str = CONTROLLER_NAMESPACE, name: str = LEDGER, **metadata: Any) -> Attempt:
    made = {"metadata": {"namespace": namespace, "name": name, **metadata}}
    return lambda queue: queue.api.create(CONFIG_MAPS, made)


OTHER_METADATA = "changes no metadata"
OTHER_SPEC = "changes nothing of pod"
NOT_OURS = "changes and deletes only pods of the Deployment of an InferenceService"
NODE = {"apiVersion": "v1", "kind": "Node", "name": "cpu-1", "uid": "a", "blockOwnerDeletion": True}
TOLERATION = {"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}
BY_UID = "by its uid, with the grace period"
ATTEMPTS: dict[str, tuple[str, Attempt]] = {
    **on_foreign("admission", NOT_OURS, admit),
    **on_foreign("place", NOT_OURS, note),
    **on_foreign("deletion", NOT_OURS, QueueThief.delete),
    **on_foreign("eviction", "evicts only pods of the Deployment", QueueThief.evict),
    "image": (OTHER_SPEC, change("/spec/containers/0/image", "thief.example/engine", "replace")),
    "image of an init container": (OTHER_SPEC, change("/spec/initContainers/0/image", "thief.example/a", "replace")),
    "toleration": (OTHER_SPEC, change("/spec/tolerations/-", TOLERATION)),
    "deadline": (OTHER_SPEC, change("/spec/activeDeadlineSeconds", 1)),
    "node selector": (OTHER_SPEC, change("/spec/nodeSelector", {"a": "b"})),
    "gate of somebody else": (
        OTHER_SPEC,
        lambda queue: queue.patch("own", {"op": "remove", "path": "/spec/schedulingGates/1"}),
    ),
    "both gates": (OTHER_SPEC, lambda queue: queue.patch("own", {"op": "remove", "path": "/spec/schedulingGates"})),
    "label": (OTHER_METADATA, change("/metadata/labels/a", "b")),
    "label of a client": (OTHER_METADATA, change("/metadata/labels/inference.pomona.dev~1client", "true")),
    "annotation": (OTHER_METADATA, change("/metadata/annotations/a", "b")),
    "annotation of a user": (OTHER_METADATA, change("/metadata/annotations/user.example~1a", "c")),
    "annotations of a user removed": (
        OTHER_METADATA,
        lambda queue: queue.patch("own", {"op": "remove", "path": "/metadata/annotations/user.example~1a"}),
    ),
    "finalizer": (OTHER_METADATA, change("/metadata/finalizers", ["thief.example/stay"])),
    "owner": (OTHER_METADATA, change("/metadata/ownerReferences/-", NODE)),
    "end of whatever has the name": (BY_UID, lambda queue: queue.delete("own", uid=None)),
    "eviction that no policy sees": (
        "has the label",
        lambda queue: queue.evict("foreign", metadata={"name": queue.name("foreign"), "namespace": queue.namespace}),
    ),
    "eviction of whatever has the name": (BY_UID, lambda queue: queue.evict("own", deleteOptions={})),
    "eviction without grace": (
        BY_UID,
        lambda queue: queue.evict(
            "own",
            deleteOptions={
                "gracePeriodSeconds": 0,
                "preconditions": {"uid": queue.pods["own"]["metadata"]["uid"]},
            },
        ),
    ),
    "state of a pod": (
        "cannot patch",
        lambda queue: queue.api.patch_json(
            PODS,
            queue.name("own"),
            queue.namespace,
            [{"op": "add", "path": "/status/phase", "value": "Failed"}],
            subresource="status",
        ),
    ),
    "binding": (
        "cannot create",
        lambda queue: queue.api.create_subresource(PODS, queue.name("own"), queue.namespace, "binding", {}),
    ),
    "another ConfigMap": ("writes only ConfigMap pomona-system/pomona-queue", ledger(name="mine")),
    "ConfigMap of a tenant": ("cannot create", ledger(namespace="default")),
    "ledger that stays": ("no owner and no finalizer", ledger(finalizers=["thief.example/stay"])),
    "ledger that holds a node": ("no owner and no finalizer", ledger(ownerReferences=[NODE])),
    "measurement without a label": ("has the label inference.pomona.dev/benchmark", ledger(name=f"bench-{'0' * 16}")),
    "measurement by another name": ("writes only ConfigMap pomona-system/pomona-queue", ledger(name="bench-x")),
    "ports of hosts": (
        "writes only ConfigMap pomona-system/pomona-queue",
        lambda queue: queue.api.patch_json(
            CONFIG_MAPS, "pomona-host-ports", CONTROLLER_NAMESPACE, [{"op": "add", "path": "/data", "value": {}}]
        ),
    ),
    "ConfigMaps of tenants": ("cannot list", lambda queue: queue.api.list(CONFIG_MAPS, "default")),
}


async def test_stolen_rights_of_the_queue_reach_its_own_pods_only(queue: QueueThief) -> None:
    assert await find_unrefused(ATTEMPTS, queue) == {}


async def test_queue_does_to_its_pods_all_that_it_decides(thief: Thief, queue: QueueThief) -> None:
    """A place, a promise, admission to a node, an eviction and a deletion, as the controller writes them."""
    own = queue.pods["own"]
    name, uid = queue.name("own"), own["metadata"]["uid"]
    for notes in ({ENQUEUED_AT: "2026-01-01T00:00:00Z", NOMINATED: "{}"}, {NOMINATED: None}, {NOMINATED: "{}"}):
        own = await queue.api.patch_merge(
            PODS, name, queue.namespace, annotate(own, notes), field_manager="pomona-queue"
        )
    assert own["metadata"]["annotations"] == {
        "user.example/a": "b",
        ENQUEUED_AT: "2026-01-01T00:00:00Z",
        NOMINATED: "{}",
    }
    admitted = await queue.api.patch_json(PODS, name, queue.namespace, admit_pod(own, "cpu-1"))
    assert admitted["spec"]["schedulingGates"] == [{"name": SECOND_GATE}]
    assert NOMINATED not in admitted["metadata"]["annotations"]
    await queue.evict("own")
    successor = await find_pod(thief.admin, queue.namespace, REPLICA_SET, other_than=uid)
    names = successor["metadata"]["name"], queue.namespace
    await queue.api.delete(PODS, *names, uid=successor["metadata"]["uid"])
    with pytest.raises(NotFound):
        await thief.admin.get(PODS, *names)


async def test_controller_writes_its_ledger(thief: Thief) -> None:
    try:
        first = QueueLedger(thief.api, "one")
        await first.take_over()
        await first.write({}, ())
        await QueueLedger(thief.api, "two").take_over()
        with pytest.raises(Forbidden, match="cannot delete"):
            await thief.api.delete(CONFIG_MAPS, LEDGER, CONTROLLER_NAMESPACE)
    finally:
        await thief.admin.delete(CONFIG_MAPS, LEDGER, CONTROLLER_NAMESPACE)


async def test_evictions_of_others_are_held_by_no_policy_of_the_controller(thief: Thief, queue: QueueThief) -> None:
    """A drain sends an Eviction without labels; one with the controller's label is nobody's secret."""
    for which in ("foreign", "bare"):
        eviction = build_eviction(queue.pods[which])
        if which == "foreign":
            del eviction["metadata"]["labels"]
        await thief.admin.create_subresource(PODS, queue.name(which), queue.namespace, "eviction", eviction)
        with pytest.raises(NotFound):
            await thief.admin.get(PODS, queue.name(which), queue.namespace)
