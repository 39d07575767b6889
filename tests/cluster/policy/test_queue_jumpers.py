"""A tenant who edits the pods of its namespace: none leaves the queue, or gets a better place, by hand."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from controller.placement.effects import admit_pod
from crds.meta import (
    DEVICE_NEED,
    ENQUEUED_AT,
    LABEL_GANG,
    LABEL_MANAGED_BY,
    LABEL_SERVICE,
    MANAGED_BY,
    NOMINATED,
    POD_TEMPLATE,
    QUEUE_GATE,
)
from kube.client import Client, Obj
from kube.errors import Forbidden
from kube.resources import DEPLOYMENTS, PODS
from kube.transport import Request
from tests.cluster.policy.attempts import find_unrefused
from tests.cluster.policy.queued_pods import (
    OWN_LABELS,
    REPLICA_SETS,
    build_pod,
    build_workload,
    failure_of,
    find_pod,
    start_workload,
)
from tests.cluster.policy.test_stolen_controller_token import Thief, thief
from tests.cluster.policy.test_tenant_token import tenant
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually
from tests.support.simulated_nodes import SimulatedNodes

__all__ = ["tenant", "thief"]

FIRST: Final = "1970-01-01T00:00:00Z"
"""A place in the queue before everybody's."""
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
PINNED: Final = {
    "nodeAffinity": {
        REQUIRED: {
            "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-0"]}]}]
        }
    }
}


@dataclass
class Jumper:
    """The API as a tenant, and a pod of a service that waits."""

    api: Client
    namespace: str
    pod: Obj

    async def patch(self, *operations: Mapping[str, Any]) -> None:
        await self.api.patch_json(PODS, self.pod["metadata"]["name"], self.namespace, operations)

    async def create(self, labels: Obj, *then: Obj, **metadata: Any) -> None:
        """Create a pod, change it by `then`, and delete it."""
        made = await self.api.create(PODS, build_pod(labels, namespace=self.namespace, name="mine", **metadata))
        try:
            if then:
                await self.api.patch_json(PODS, made["metadata"]["name"], self.namespace, then)
        finally:
            await self.api.delete(PODS, "mine", self.namespace)


Attempt = Callable[[Jumper], Awaitable[object]]


@pytest.fixture
async def jumper(tenant: Client, client: Client, namespace: str) -> Jumper:
    template = build_pod(OWN_LABELS, annotations={"user.example/a": "b"})
    return Jumper(tenant, namespace, await start_workload(client, DEPLOYMENTS, namespace, "one", template))


def annotation(name: str) -> str:
    return f"/metadata/annotations/{name.replace('/', '~1')}"


def label(name: str) -> str:
    return f"/metadata/labels/{name.replace('/', '~1')}"


def change(path: str, value: object) -> Attempt:
    return lambda jumper: jumper.patch({"op": "add", "path": path, "value": value})


def remove(path: str) -> Attempt:
    return lambda jumper: jumper.patch({"op": "remove", "path": path})


ONLY_POMONA: Final = "only Pomona lets a pod out of the queue"
NOTES: Final = "only Pomona writes the annotations"
MARKS: Final = "a pod keeps its service, template and gang"
ATTEMPTS: dict[str, tuple[str, Attempt]] = {
    "pinned to a node": (ONLY_POMONA, change("/spec/affinity", PINNED)),
    "nodes of its own choice": (ONLY_POMONA, change("/spec/nodeSelector", {"a": "b"})),
    "pod of another service": (MARKS, change(label(LABEL_SERVICE), "other")),
    "pod of no service": (MARKS, remove(label(LABEL_SERVICE))),
    "pod of no ReplicaSet": (MARKS, remove(label("pod-template-hash"))),
    "the place of its gang": (MARKS, change(label(LABEL_GANG), "all")),
    "pod of an earlier template": (MARKS, change(annotation(POD_TEMPLATE), "earlier")),
    "devices that it does not claim": (MARKS, change(annotation(DEVICE_NEED), "{}")),
    "an earlier place": (NOTES, change(annotation(ENQUEUED_AT), FIRST)),
    "a promise": (NOTES, change(annotation(NOMINATED), "{}")),
    "pod that is nobody's": ("gets or loses the label", remove(label(LABEL_MANAGED_BY))),
    "own pod with a place": (
        "a new pod has no place",
        lambda jumper: jumper.create(OWN_LABELS, annotations={ENQUEUED_AT: FIRST}),
    ),
    "own pod with a promise": (
        "a new pod has no place",
        lambda jumper: jumper.create(OWN_LABELS, annotations={NOMINATED: "{}"}),
    ),
    "own pod that becomes one of the queue with its place": (
        "gets or loses the label",
        lambda jumper: jumper.create(
            {LABEL_SERVICE: "one"},
            {"op": "add", "path": label(LABEL_MANAGED_BY), "value": MANAGED_BY},
            annotations={ENQUEUED_AT: FIRST},
        ),
    ),
    "state of a pod": (
        "cannot patch",
        lambda jumper: jumper.api.patch_json(
            PODS,
            jumper.pod["metadata"]["name"],
            jumper.namespace,
            [{"op": "add", "path": "/metadata/annotations", "value": {ENQUEUED_AT: FIRST}}],
            subresource="status",
        ),
    ),
    # What would take the gate away comes last: without the policy, the others would be refused for another reason.
    "pod that is nobody's, and starts": (
        "gets or loses the label",
        lambda jumper: jumper.patch(
            {"op": "remove", "path": label(LABEL_MANAGED_BY)}, {"op": "remove", "path": "/spec/schedulingGates"}
        ),
    ),
    "without the gate": (ONLY_POMONA, remove("/spec/schedulingGates")),
    "admission": (NOTES, lambda jumper: jumper.patch(*admit_pod(jumper.pod, "gpu-0"))),
}


async def test_tenant_moves_no_pod_in_the_queue(jumper: Jumper) -> None:
    """The attempts share their pod, since none of them has an effect."""
    assert await find_unrefused(ATTEMPTS, jumper) == {}


async def test_tenant_takes_no_place_away(thief: Thief, tenant: Client) -> None:
    """A place that the queue has noted can be neither removed nor copied to another pod."""
    pod = await start_workload(thief.admin, REPLICA_SETS, thief.namespace, "one-0a", build_pod(OWN_LABELS))
    name = pod["metadata"]["name"]
    operation = {"op": "add", "path": "/metadata/annotations", "value": {ENQUEUED_AT: FIRST}}
    await thief.api.patch_json(PODS, name, thief.namespace, [operation])
    for value in ("2026-01-01T00:00:00Z", None):
        with pytest.raises(Forbidden, match=NOTES):
            await tenant.patch_merge(
                PODS, name, thief.namespace, {"metadata": {"annotations": {ENQUEUED_AT: value}}}, field_manager="thief"
            )


async def test_template_of_a_tenant_gives_no_place(tenant: Client, namespace: str) -> None:
    """A Deployment of a tenant's own, with the labels of the queue: its ReplicaSet makes no pod with a place."""
    template = build_pod(OWN_LABELS, annotations={ENQUEUED_AT: FIRST})
    await tenant.create(DEPLOYMENTS, build_workload(namespace, "mine", template))

    async def is_refused() -> bool:
        return "a new pod has no place in the queue" in await failure_of(tenant, namespace, "mine")

    await eventually(is_refused)
    assert (await tenant.list(PODS, namespace)).items == []


async def test_tenant_goes_on_with_the_rest_of_its_pods(jumper: Jumper, plane: ControlPlane) -> None:
    """Labels, annotations, ephemeral changes, restarts, evictions and deletions of pods that wait."""
    name, namespace = jumper.pod["metadata"]["name"], jumper.namespace
    await jumper.patch({"op": "add", "path": "/metadata/labels/debug", "value": "1"})
    await jumper.patch({"op": "add", "path": annotation("user.example/a"), "value": "c"})
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    await jumper.api.create_subresource(PODS, name, namespace, "eviction", eviction)
    second = await find_pod(jumper.api, namespace, "one", other_than=jumper.pod["metadata"]["uid"])
    await jumper.api.delete(PODS, second["metadata"]["name"], namespace)
    third = await find_pod(jumper.api, namespace, "one", other_than=second["metadata"]["uid"])
    assert third["spec"]["schedulingGates"] == [{"name": QUEUE_GATE}]
    await plane.kubectl("rollout", "restart", "deployment/one", f"--namespace={namespace}")


async def test_administrator_lets_a_pod_out_of_the_queue(jumper: Jumper, client: Client) -> None:
    name, namespace = jumper.pod["metadata"]["name"], jumper.namespace
    await client.patch_json(PODS, name, namespace, [{"op": "add", "path": annotation(ENQUEUED_AT), "value": FIRST}])
    pod = await client.patch_json(PODS, name, namespace, [{"op": "remove", "path": "/spec/schedulingGates"}])
    assert "schedulingGates" not in pod["spec"]


@pytest.mark.parametrize("how", ["foreground", "orphan"])
async def test_garbage_collection_of_waiting_pods_goes_on(plane: ControlPlane, jumper: Jumper, how: str) -> None:
    """It removes owners and finalizers of pods; without all rights, as in most clusters."""
    name, namespace = jumper.pod["metadata"]["name"], jumper.namespace
    await plane.kubectl("delete", "deployment", "one", f"--namespace={namespace}", f"--cascade={how}")
    if how == "orphan":
        patch = '{"metadata": {"ownerReferences": null, "finalizers": null}}'
        by = "--as=system:serviceaccount:kube-system:generic-garbage-collector"
        await plane.kubectl("patch", "pod", name, f"--namespace={namespace}", f"--patch={patch}", by)
        return

    async def is_gone() -> bool:
        return not (await jumper.api.list(PODS, namespace)).items

    await eventually(is_gone)


async def test_controllers_without_all_rights_make_waiting_pods(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """The controller manager of the tests is an administrator, so it proves nothing about its rights."""
    path = tmp_path / "pod.yaml"
    pod = {"apiVersion": "v1", "kind": "Pod", **build_pod(OWN_LABELS, namespace=namespace, name="one-0a-b1c2d")}
    path.write_text(json.dumps(pod))
    by = "--as=system:serviceaccount:kube-system:replicaset-controller"
    await plane.kubectl("create", f"--filename={path}", by)
    await plane.kubectl("delete", "pod", "one-0a-b1c2d", f"--namespace={namespace}", by)


async def test_admitted_pod_is_bound_and_runs(plane: ControlPlane, thief: Thief) -> None:
    """The controller admits, the real scheduler binds, a node reports: no policy is in their way."""
    nodes = SimulatedNodes(plane, thief.admin)
    async with nodes.running():
        await nodes.add("gpu-0")
        pod = await start_workload(thief.admin, REPLICA_SETS, thief.namespace, "one-0a", build_pod(OWN_LABELS))
        name = pod["metadata"]["name"]
        await thief.api.patch_json(PODS, name, thief.namespace, admit_pod(pod, "gpu-0"))

        async def runs() -> bool:
            current = await thief.admin.get(PODS, name, thief.namespace)
            return bool(current["status"]["phase"] == "Running" and current["spec"]["nodeName"] == "gpu-0")

        await eventually(runs)
        at_once = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        path = PODS.path(thief.namespace, name)
        with pytest.raises(Forbidden, match="with the grace period that the pod states"):
            await thief.api._call(
                "delete", PODS, thief.namespace, name, Request("DELETE", path, {}, msgspec.json.encode(at_once))
            )
        await thief.api.delete(PODS, name, thief.namespace, uid=pod["metadata"]["uid"])
        assert (await find_pod(thief.admin, thief.namespace, "one-0a", other_than=pod["metadata"]["uid"]))["metadata"]
