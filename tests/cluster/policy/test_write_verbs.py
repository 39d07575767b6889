"""No form of a write goes around a policy: PUT, patches of each kind and forced server-side apply change nothing."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from crds.meta import HOSTS_NAMESPACE
from kube.client import Client, Obj
from kube.errors import ApiError
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    LEASES,
    METAL_HOSTS,
    METAL_PROCESSES,
    NAMESPACES,
    ROLES,
    SECRETS,
    SERVICES,
    Resource,
)
from kube.transport import Request
from tests.cluster.policy.conftest import Hosts
from tests.cluster.policy.objects import ADDRESSES
from tests.cluster.policy.test_stolen_controller_token import (
    FOREIGN_SLICE,
    HOST,
    Thief,
    deployment,
    metal_process,
    role,
    rule,
    secret,
    thief,
)

__all__ = ["thief"]

CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
CLUSTER_ROLES = Resource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False)
POLICIES = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "validatingadmissionpolicies",
    "ValidatingAdmissionPolicy",
    namespaced=False,
)
GRANTS = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}


class Target(NamedTuple):
    """An object, and the part of it that a thief would change."""

    resource: Resource
    namespace: str | None
    name: str
    change: Obj
    subresource: str = ""


def reference(kind: str, api_version: str = "v1", **more: Any) -> Obj:
    return {"apiVersion": api_version, "kind": kind, "name": "cpu-1", "uid": "a", "blockOwnerDeletion": True, **more}


FINALIZER: Obj = {"metadata": {"finalizers": ["thief.example/stay"]}}
NODE_OWNER: Obj = {"metadata": {"ownerReferences": [reference("Node")]}}


def targets_of_host(hosts: Hosts) -> list[Target]:
    here = hosts.namespace
    return [
        Target(ENDPOINT_SLICES, here, "other.studio-2", {"endpoints": [{"addresses": [ADDRESSES["studio-1"]]}]}),
        Target(ENDPOINT_SLICES, here, "chat.studio-1", {"endpoints": [{"addresses": [ADDRESSES["studio-2"]]}]}),
        Target(ENDPOINT_SLICES, here, "chat.studio-1", {"ports": [{"name": "ssh", "port": 22, "protocol": "TCP"}]}),
        Target(ENDPOINT_SLICES, here, "chat.studio-1", NODE_OWNER),
        Target(ENDPOINT_SLICES, here, "chat.studio-1", FINALIZER),
        Target(ENDPOINT_SLICES, "default", "kubernetes", {"metadata": {"labels": {"a": "b"}}}),
        Target(METAL_HOSTS, None, "studio-1", {"spec": {"namespaces": ["kube-system"]}}),
        Target(METAL_HOSTS, None, "studio-1", {"spec": {"namespaces": ["kube-system"]}}, "status"),
        Target(METAL_HOSTS, None, "studio-1", FINALIZER, "status"),
        Target(METAL_HOSTS, None, "studio-2", {"status": {"availableBytes": 1}}, "status"),
        Target(LEASES, HOSTS_NAMESPACE, "studio-1", FINALIZER),
        Target(LEASES, HOSTS_NAMESPACE, "studio-1", NODE_OWNER),
        Target(LEASES, HOSTS_NAMESPACE, "studio-2", {"spec": {"holderIdentity": "thief"}}),
        Target(METAL_PROCESSES, here, "chat-1", {"spec": {"memoryBytes": 2}}),
        Target(METAL_PROCESSES, here, "chat-1", {"spec": {"memoryBytes": 2}}, "status"),
        Target(METAL_PROCESSES, here, "chat-1", FINALIZER, "status"),
        Target(METAL_PROCESSES, here, "other-1", {"status": {"phase": "Stopped"}}, "status"),
        Target(ROLES, HOSTS_NAMESPACE, "grants:studio-1", {"rules": [GRANTS]}),
        Target(CONFIG_MAPS, "pomona-system", "pomona-host-ports", {"data": {"firstPort": "1"}}),
        Target(POLICIES, None, "pomona-host-slices", {"spec": {"failurePolicy": "Ignore"}}),
        Target(SECRETS, here, "theirs", {"data": {"a": "Zm9v"}}),
    ]


def targets_of_controller(thief: Thief) -> list[Target]:
    here = thief.namespace
    theirs: list[tuple[Resource, Obj]] = [
        (SECRETS, {"data": {"a": "Zm9v"}}),
        (SECRETS, {"metadata": {"labels": {"app.kubernetes.io/managed-by": "pomona"}}}),
        (SERVICES, {"spec": {"selector": {"app": "bank"}}}),
        (DEPLOYMENTS, {"spec": {"replicas": 3}}),
        (DEPLOYMENTS, {"metadata": {"ownerReferences": [owner_of(thief)]}}),
        (ENDPOINT_SLICES, {"endpoints": [{"addresses": ["10.77.0.99"]}]}),
    ]
    more_owners = {"metadata": {"ownerReferences": [owner_of(thief), reference("Node")]}}
    unlabelled = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "thief"}}}
    own = ((SECRETS, "one-token"), (DEPLOYMENTS, "one"))
    return [
        *(Target(resource, here, "theirs", change) for resource, change in theirs),
        *(
            Target(resource, here, name, change)
            for resource, name in own
            for change in (FINALIZER, more_owners, unlabelled)
        ),
        Target(METAL_PROCESSES, here, "one-1", FINALIZER),
        Target(METAL_PROCESSES, here, "one-1", NODE_OWNER),
        Target(INFERENCE_SERVICES, here, "one", {"spec": {"replicas": 9}}),
        Target(INFERENCE_SERVICES, here, "one", FINALIZER, "status"),
        Target(METAL_HOSTS, None, HOST, {"spec": {"namespaces": ["kube-system"]}}),
        Target(ROLES, HOSTS_NAMESPACE, f"grants:{HOST}", {"rules": [GRANTS]}),
        Target(ROLES, HOSTS_NAMESPACE, f"grants:{HOST}", FINALIZER),
        Target(NAMESPACES, None, here, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}}}),
        Target(CLUSTER_ROLES, None, "pomona-controller", {"rules": [GRANTS]}),
        Target(POLICIES, None, "pomona-controller-objects", {"spec": {"failurePolicy": "Ignore"}}),
    ]


def owner_of(thief: Thief) -> Obj:
    (reference,) = secret(thief)[1]["metadata"]["ownerReferences"]
    return dict(reference)


def merge(old: Any, change: Any) -> Any:
    if not isinstance(old, Mapping) or not isinstance(change, Mapping):
        return change
    return {**old, **{key: merge(old.get(key), value) for key, value in change.items()}}


Send = Callable[[Client, Target, Obj], Awaitable[object]]


def patch(kind: str) -> Send:
    return lambda api, target, _: send(api, target, "PATCH", target.change, kind)


async def force(api: Client, target: Target, _: Obj) -> None:
    metadata = {"name": target.name} | ({"namespace": target.namespace} if target.namespace else {})
    identity = {"apiVersion": target.resource.api_version, "kind": target.resource.kind, "metadata": metadata}
    await send(api, target, "PATCH", merge(identity, target.change), "apply-patch+yaml")


async def put(api: Client, target: Target, found: Obj) -> None:
    await send(api, target, "PUT", merge(found, target.change), "json")


async def send(api: Client, target: Target, method: str, body: Obj, kind: str) -> None:
    resource, namespace, name, _, subresource = target
    query = {"fieldManager": "thief", "force": "true"} if kind.startswith("apply") else {}
    path = resource.path(namespace, name, subresource)
    request = Request(method, path, query, msgspec.json.encode(body), f"application/{kind}")
    await api._call(method, resource, namespace, name, request)


VERBS: dict[str, Send] = {
    "PUT": put,
    "strategic merge patch": patch("strategic-merge-patch+json"),
    "merge patch": patch("merge-patch+json"),
    "forced apply": force,
}


async def changed_by(api: Client, admin: Client, targets: list[Target]) -> list[str]:
    """Send each change in each form; return those that had an effect, or that none but an administrator could send."""
    changed = []
    for target in targets:
        before = await read(admin, target)
        for verb, attempt in VERBS.items():
            words = f"{verb} {target.resource} {target.name} {target.subresource} {target.change}"
            try:
                await attempt(api, target, await admin.get(target.resource, target.name, target.namespace))
            except ApiError as error:
                if error.status not in {403, 415}:
                    changed.append(f"{words}: {error}")
            if await read(admin, target) != before:
                changed.append(words)
    return changed


async def read(admin: Client, target: Target) -> Obj:
    """Return what must stay: everything but the notes about writers."""
    current = await admin.get(target.resource, target.name, target.namespace)
    noted = {"managedFields", "resourceVersion"}
    return current | {"metadata": {key: content for key, content in current["metadata"].items() if key not in noted}}


async def test_no_verb_of_a_host_changes_what_is_not_its_own(hosts: Hosts) -> None:
    await hosts.admin.create(SECRETS, {"metadata": {"namespace": hosts.namespace, "name": "theirs"}})
    assert await changed_by(hosts.own, hosts.admin, targets_of_host(hosts)) == []


async def test_no_verb_of_the_controller_changes_what_it_does_not_own(thief: Thief) -> None:
    metadata = {"namespace": thief.namespace, "name": "theirs"}
    spec = deployment(thief)[1]["spec"]
    for resource, body in (
        (SECRETS, {}),
        (SERVICES, {"spec": {"ports": [{"port": 80}], "selector": {"app": "theirs"}}}),
        (DEPLOYMENTS, {"spec": spec}),
        (ENDPOINT_SLICES, FOREIGN_SLICE),
    ):
        await thief.admin.create(resource, {"metadata": metadata, **body})
    for written in (secret(thief), deployment(thief), metal_process(thief)):
        await thief.api.create(*written)
    assert await changed_by(thief.api, thief.admin, targets_of_controller(thief)) == []


async def test_administrator_is_held_by_no_policy_of_the_controller(thief: Thief) -> None:
    resource, obj = secret(thief, ownerReferences=[], name="plain", type="kubernetes.io/basic-auth", labels={})
    await thief.admin.create(resource, obj | {"data": {"username": "YQ=="}})
    await thief.admin.patch_json(resource, "plain", thief.namespace, [{"op": "add", "path": "/data/a", "value": ""}])
    await thief.admin.delete(resource, "plain", thief.namespace)
    await thief.admin.create(*role(thief, rule(apiGroups=[""], resources=["secrets"], verbs=["get"]), name="plain"))
    await thief.admin.delete(ROLES, "plain", HOSTS_NAMESPACE)
