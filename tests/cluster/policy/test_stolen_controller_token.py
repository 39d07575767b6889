"""A thief with the controller's token: it writes what the controller writes, and opens nothing else."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.models.jobs import CONTAINER_SECURITY, POD_SECURITY
from crds.meta import (
    HOSTS_NAMESPACE,
    LABEL_MANAGED_BY,
    LABEL_SERVICE,
    LABEL_SERVICE_NAME,
    MANAGED_BY,
    PROCESS_FINALIZER,
)
from kube import credentials
from kube.client import Client, Obj, connect
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    NETWORK_POLICIES,
    NODES,
    POD_DISRUPTION_BUDGETS,
    POD_MONITORS,
    PODS,
    PVCS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICES,
    Resource,
)
from tests.cluster.policy.attempts import find_unrefused
from tests.cluster.policy.objects import build_event, build_process
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.support.refused_manifests import make_manifest

MANAGER = "pomona-controller"
METADATA = {"name", "namespace", "labels", "annotations", "ownerReferences", "finalizers"}
HOST = "policy-1"
COPY = "one-0123abcd"
"""Name of the Deployment beside a copy of weights."""
PULL_SECRETS = [{"name": "theirs"}, {"name": "registry"}]
"""Secrets of a user and of an administrator with which nodes pull images; no container can read them."""
OWN_PODS: Obj = {"matchLabels": {LABEL_SERVICE: "one"}}


@dataclass
class Thief:
    """The API with the controller's token, beside an administrator's; `owners` are the objects of users by kind."""

    api: Client
    admin: Client
    namespace: str
    owners: dict[str, Obj]

    def owned(self, kind: str, resource: Resource, name: str, **body: Any) -> tuple[Resource, Obj]:
        """Return an object as the controller makes it, controlled by the user's object of this kind."""
        owner = self.owners[kind]
        namespace = HOSTS_NAMESPACE if kind == "MetalHost" else self.namespace
        reference = {key: owner[key] for key in ("apiVersion", "kind")}
        reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
        metadata = {
            "namespace": namespace,
            "name": name,
            "labels": {LABEL_MANAGED_BY: MANAGED_BY},
            "ownerReferences": [reference | {"controller": True, "blockOwnerDeletion": True}],
        }
        return resource, {"metadata": metadata, **body}


Attempt = Callable[[Thief], Awaitable[object]]
KEY = {"name": "theirs", "key": "a"}


@pytest.fixture
async def thief(plane: ControlPlane, client: Client, namespace: str, pod_monitors: None) -> AsyncIterator[Thief]:
    del pod_monitors  # the kind, which a cluster may have
    kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT)
    async with contextlib.AsyncExitStack() as stack:
        api = await stack.enter_async_context(connect(credentials.load(kubeconfig)))
        owners = {
            "InferenceService": await client.create(INFERENCE_SERVICES, make_manifest(INFERENCE_SERVICES, namespace)),
            "Model": await client.create(MODELS, make_manifest(MODELS, namespace)),
            "MetalHost": await client.create(METAL_HOSTS, {"metadata": {"name": HOST}, "spec": {}}),
        }
        stack.push_async_callback(client.delete, METAL_HOSTS, HOST)
        found = Thief(api, client, namespace, owners)
        await client.create(*role(found, rule()))
        # Before its host, whose garbage is collected some time later: the next test has a host of the same name.
        stack.push_async_callback(client.delete, ROLES, f"grants:{HOST}", HOSTS_NAMESPACE)
        yield found


def secret(thief: Thief, **changes: Any) -> tuple[Resource, Obj]:
    resource, obj = thief.owned("InferenceService", SECRETS, "one-token", type="Opaque", data={"token": "Zm9v"})
    metadata = {key: change for key, change in changes.items() if key in METADATA}
    body = {key: change for key, change in changes.items() if key not in metadata}
    return resource, {**obj, **body, "metadata": {**obj["metadata"], **metadata}}


def pod(**changes: Any) -> Obj:
    container = {"name": "main", "image": "pomona-test", "securityContext": CONTAINER_SECURITY}
    container |= changes.pop("container", {})
    return {
        "automountServiceAccountToken": False,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": [{"name": "token", "secret": {"secretName": "one-token"}}, {"name": "tmp", "emptyDir": {}}],
        **changes,
    }


def mount(secret: str, **source: Any) -> list[Obj]:
    return [{"name": "a", "secret": {"secretName": secret, **source}}]


def deployment(
    thief: Thief, name: str = "one", owner: str = "InferenceService", **changes: Any
) -> tuple[Resource, Obj]:
    labels = {LABEL_SERVICE: "one"}
    template = {"metadata": {"labels": labels}, "spec": pod(**changes)}
    spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
    return thief.owned(owner, DEPLOYMENTS, name, spec=spec)


def job(thief: Thief, **changes: Any) -> tuple[Resource, Obj]:
    spec = {"suspend": True, "template": {"spec": pod(restartPolicy="Never", **({"volumes": []} | changes))}}
    return thief.owned("Model", JOBS, "one-fetch", spec=spec)


def service(thief: Thief, **changes: Any) -> tuple[Resource, Obj]:
    spec = {"selector": {LABEL_SERVICE: "one"}, "ports": [{"name": "http", "port": 8080, "targetPort": "http"}]}
    return thief.owned("InferenceService", SERVICES, "one", spec=spec | changes)


def budget(thief: Thief, **changes: Any) -> tuple[Resource, Obj]:
    spec = {"maxUnavailable": 1, "selector": OWN_PODS, **changes}
    return thief.owned("InferenceService", POD_DISRUPTION_BUDGETS, "one", spec=spec)


def policy(thief: Thief, **changes: Any) -> tuple[Resource, Obj]:
    spec = {"podSelector": OWN_PODS, "policyTypes": ["Ingress"], **changes}
    return thief.owned("InferenceService", NETWORK_POLICIES, "one", spec=spec)


def scrape(**endpoint: Any) -> Attempt:
    return create(monitor, podMetricsEndpoints=[endpoint])


def monitor(thief: Thief, **changes: Any) -> tuple[Resource, Obj]:
    credentials = {"name": "one-token", "key": "token"}
    endpoint = {"port": "http", "path": "/metrics", "authorization": {"type": "Bearer", "credentials": credentials}}
    spec = {"selector": OWN_PODS, "podMetricsEndpoints": [endpoint], "sampleLimit": 5500, **changes}
    return thief.owned("InferenceService", POD_MONITORS, "one", spec=spec)


def role(thief: Thief, *rules: Obj, name: str = f"grants:{HOST}") -> tuple[Resource, Obj]:
    return thief.owned("MetalHost", ROLES, name, rules=list(rules))


def rule(**changes: Any) -> Obj:
    resources = ["metalhosts/services"]
    return {
        "apiGroups": ["inference.pomona.dev"],
        "resources": resources,
        "resourceNames": ["a.b"],
        "verbs": ["use"],
        **changes,
    }


def binding(thief: Thief, role: str = f"grants:{HOST}", **subject: str) -> tuple[Resource, Obj]:
    reference = {"apiGroup": ROLES.group, "kind": "Role", "name": role}
    who = {"kind": "ServiceAccount", "name": HOST, "namespace": HOSTS_NAMESPACE, **subject}
    return thief.owned("MetalHost", ROLE_BINDINGS, f"grants:{HOST}", roleRef=reference, subjects=[who])


def metal_process(thief: Thief, owner: str = "InferenceService", **metadata: Any) -> tuple[Resource, Obj]:
    spec = build_process(thief.namespace, "one-1", None)["spec"]
    resource, obj = thief.owned(owner, METAL_PROCESSES, "one-1", spec=spec)
    return resource, {**obj, "metadata": {**obj["metadata"], "finalizers": [PROCESS_FINALIZER], **metadata}}


def event(thief: Thief, **metadata: Any) -> tuple[Resource, Obj]:
    resource, obj = build_event(thief.owners["InferenceService"], "controller-0")
    return resource, {**obj, "metadata": {**obj["metadata"], **metadata}}


def held(build: Callable[..., tuple[Resource, Obj]]) -> Attempt:
    """Create an object, and hold the end of a foreign one by it: the owner of a blocking dependent waits for it."""

    async def attempt(thief: Thief) -> None:
        resource, obj = build(thief)
        node = {"apiVersion": "v1", "kind": "Node", "name": "cpu-1", "uid": "a", "blockOwnerDeletion": True}
        obj["metadata"]["ownerReferences"] = [*obj["metadata"].get("ownerReferences", []), node]
        await thief.api.create(resource, obj)

    return attempt


def claim(thief: Thief) -> Obj:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    return {"metadata": {"namespace": thief.namespace, "name": "a"}, "spec": spec}


def cache(thief: Thief) -> tuple[Resource, Obj]:
    return thief.owned("Model", PVCS, "a", spec=claim(thief)["spec"])


def create(build: Callable[..., tuple[Resource, Obj]], *arguments: Any, **changes: Any) -> Attempt:
    return lambda thief: thief.api.create(*build(thief, *arguments, **changes))


def take(resource: Resource, name: str, body: Obj) -> Attempt:
    """Apply the controller's object by force over one that an administrator has made and nobody owns."""

    async def attempt(thief: Thief) -> None:
        metadata = {"namespace": thief.namespace, "name": name}
        await thief.admin.create(resource, {"metadata": metadata, **deepcopy(body)})
        try:
            await thief.api.apply(*thief.owned("InferenceService", resource, name, **body), field_manager=MANAGER)
        finally:
            await thief.admin.delete(resource, name, thief.namespace)

    return attempt


def on_foreign(resource: Resource, body: Obj, act: Callable[[Thief, str], Awaitable[object]]) -> Attempt:
    """Do something to an object that an administrator has made."""

    async def attempt(thief: Thief) -> None:
        await thief.admin.create(resource, {"metadata": {"namespace": thief.namespace, "name": "theirs"}, **body})
        try:
            await act(thief, "theirs")
        finally:
            await thief.admin.delete(resource, "theirs", thief.namespace)

    return attempt


async def bind_another_role(thief: Thief) -> None:
    """Give the host what another host has been granted."""
    await thief.admin.create(*role(thief, rule(), name="grants:policy-2"))
    await thief.api.create(*binding(thief, "grants:policy-2"))


PORTS = [{"name": "http", "port": 8080, "protocol": "TCP", "targetPort": "http"}]
OWN_SERVICE: Obj = {"spec": {"selector": {LABEL_SERVICE: "one"}, "ports": PORTS}}
FOREIGN_SLICE: Obj = {"addressType": "IPv4", "endpoints": []}
DATA = [{"op": "add", "path": "/data", "value": {"a": "Zm9v"}}]


def change(resource: Resource, path: str, value: object) -> Attempt:
    operations = [{"op": "add", "path": path, "value": value}]
    return lambda thief: thief.api.patch_json(resource, "one", thief.namespace, operations)


ATTEMPTS: dict[str, tuple[str, Attempt]] = {
    "Secret that nobody owns": (
        "writes only secrets that a InferenceService controls",
        create(secret, ownerReferences=[]),
    ),
    "Secret of another name": ("has not the name of its InferenceService", create(secret, name="admin")),
    "Secret without the label": ("has the label", create(secret, labels={})),
    "Secret that gets a ServiceAccount's token": (
        "type Opaque only",
        create(
            secret,
            type="kubernetes.io/service-account-token",
            annotations={"kubernetes.io/service-account.name": "default"},
        ),
    ),
    "Secret in a system's namespace": (
        "writes only secrets",
        create(secret, namespace="kube-system", ownerReferences=[]),
    ),
    "Secret for hosts that no host owns": ("that a MetalHost controls", create(secret, namespace=HOSTS_NAMESPACE)),
    "change of a foreign Secret": (
        "changes and deletes only secrets|writes only secrets",
        on_foreign(
            SECRETS, {"data": {}}, lambda thief, name: thief.api.patch_json(SECRETS, name, thief.namespace, DATA)
        ),
    ),
    "capture of a foreign Secret": ("controls already", take(SECRETS, "one-token", {"type": "Opaque"})),
    "deletion of a Secret": (
        "cannot delete",
        on_foreign(SECRETS, {}, lambda thief, name: thief.api.delete(SECRETS, name, thief.namespace)),
    ),
    "list of Secrets": ("cannot list", lambda thief: thief.api.list(SECRETS, thief.namespace)),
    "list of hosts' Secrets": ("cannot list", lambda thief: thief.api.list(SECRETS, HOSTS_NAMESPACE)),
    "Deployment of a foreign name": ("has not the name", create(deployment, "two", volumes=[])),
    "Deployment with a foreign name behind its own": ("has not the name", create(deployment, "one-0123abcd-x")),
    "Deployment beside a copy with a foreign Secret": (
        "mounts no Secret but",
        create(deployment, COPY, volumes=mount(f"{COPY}-token")),
    ),
    "Deployment of a Model": ("that a InferenceService controls", create(deployment, owner="Model", volumes=[])),
    "pod with a ServiceAccount": ("without a ServiceAccount", create(deployment, serviceAccountName="admin")),
    "pod with a token": (
        "without a ServiceAccount and its token",
        create(deployment, automountServiceAccountToken=True),
    ),
    "pod with a projected token": (
        "volumes of type",
        create(deployment, volumes=[{"name": "a", "projected": {"sources": [{"serviceAccountToken": {"path": "a"}}]}}]),
    ),
    "pod on a node's files": (
        "volumes of type",
        create(deployment, volumes=[{"name": "a", "hostPath": {"path": "/"}}]),
    ),
    "pod with a foreign Secret": ("mounts no Secret but", create(deployment, volumes=mount("admin"))),
    "pod on a node's network": ("hostNetwork", create(deployment, hostNetwork=True)),
    "pod on a node past the scheduler": ("nodeName", create(deployment, nodeName="control-plane")),
    "privileged pod": ("without privileges", create(deployment, container={"securityContext": {"privileged": True}})),
    "pod as root": ("no root", create(deployment, securityContext={})),
    "pod with a port of its node": (
        "ports of the node",
        create(deployment, container={"ports": [{"containerPort": 80, "hostPort": 80}]}),
    ),
    "init container as root": (
        "no root",
        create(deployment, initContainers=[{"name": "a", "image": "a", "securityContext": {"runAsNonRoot": False}}]),
    ),
    "Job with a ServiceAccount": ("without a ServiceAccount", create(job, serviceAccountName="admin")),
    "Job on a node's files": ("volumes of type", create(job, volumes=[{"name": "a", "hostPath": {"path": "/"}}])),
    "Job with all keys of a Secret": ("mounts no Secret but", create(job, volumes=mount("admin"))),
    "Job with a key that is no login": (
        "mounts no Secret but",
        create(job, volumes=mount("a", items=[{"key": "tls.key", "path": "a"}])),
    ),
    "pod with the login of a registry": (
        "mounts no Secret but",
        create(deployment, volumes=mount("a", items=[{"key": "token", "path": "a"}])),
    ),
    "Job of a service": (
        "jobs that a Model controls",
        lambda thief: thief.api.create(*thief.owned("InferenceService", JOBS, "one", spec=job(thief)[1]["spec"])),
    ),
    "claim that nobody owns": (
        "persistentvolumeclaims that a Model controls",
        lambda thief: thief.api.create(PVCS, claim(thief)),
    ),
    "capture of a foreign Service": ("controls already", take(SERVICES, "one", OWN_SERVICE)),
    "budget for foreign pods": ("their own service only", create(budget, selector={"matchLabels": {"app": "bank"}})),
    "budget for all pods": ("their own service only", create(budget, selector={})),
    "policy for all pods": ("their own service only", create(policy, podSelector={})),
    "capture of a foreign policy": (
        "controls already",
        take(NETWORK_POLICIES, "one", {"spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}),
    ),
    "monitor of foreign pods": ("their own service only", create(monitor, selector={})),
    "monitor of foreign namespaces": ("scrapes its own pods", create(monitor, namespaceSelector={"any": True})),
    "monitor with a foreign key": ("scrapes its own pods", scrape(authorization={"credentials": KEY})),
    "monitor of a foreign address": ("scrapes its own pods", scrape(relabelings=[{"targetLabel": "__address__"}])),
    "monitor of mapped labels": ("scrapes its own pods", scrape(relabelings=[{"action": "labelmap"}])),
    "monitor that renames series": ("scrapes its own pods", scrape(metricRelabelings=[{"targetLabel": "__name__"}])),
    "monitor whose pods state their labels": ("scrapes its own pods", scrape(honorLabels=True)),
    "monitor with a foreign password": ("scrapes its own pods", scrape(basicAuth={"password": KEY})),
    "Service at an external address": ("no external address", create(service, externalIPs=["10.0.0.1"])),
    "Service on ports of all nodes": ("type ClusterIP", create(service, type="NodePort")),
    "Service for foreign pods": ("selects its own pods", create(service, selector={"app": "bank"})),
    "Service of all pods' endpoints by hand": ("selects its own pods", create(service, selector=None)),
    "grant of Secrets to a host": (
        "grants only the use",
        create(role, rule(apiGroups=[""], resources=["secrets"], verbs=["get"])),
    ),
    "grant of all names": ("each by its name", create(role, rule(resourceNames=[]))),
    "grant by another name": ("writes only roles and rolebindings grants:HOST", create(role, rule(), name=HOST)),
    "binding of another host's grants": ("binds Role", bind_another_role),
    "grants for another account": ("to the host of that name only", create(binding, name="other")),
    "grants for everybody": ("to the host of that name only", create(binding, kind="User", name="a")),
    "Role elsewhere": (
        "cannot create",
        lambda thief: thief.api.create(ROLES, {"metadata": {"namespace": thief.namespace, "name": "a"}, "rules": []}),
    ),
    "slice of a pod": (
        "deletes only EndpointSlices of metal agents",
        on_foreign(
            ENDPOINT_SLICES,
            FOREIGN_SLICE | {"addressType": "IPv4"},
            lambda thief, name: thief.api.delete(ENDPOINT_SLICES, name, thief.namespace),
        ),
    ),
    "the API server's slice": (
        "deletes only EndpointSlices",
        lambda thief: thief.api.delete(ENDPOINT_SLICES, "kubernetes", "default"),
    ),
    "slice of its own": (
        "cannot create",
        lambda thief: thief.api.create(
            ENDPOINT_SLICES,
            {
                "metadata": {"namespace": thief.namespace, "name": "a", "labels": {LABEL_SERVICE_NAME: "bank"}},
                **FOREIGN_SLICE,
            },
        ),
    ),
    "pod": (
        "cannot create",
        lambda thief: thief.api.create(PODS, {"metadata": {"namespace": thief.namespace, "name": "a"}, "spec": {}}),
    ),
    "spec of a service": ("writes only labels", change(INFERENCE_SERVICES, "/spec/replicas", 9)),
    "source of a Model": ("writes only labels", change(MODELS, "/spec/source", "https://thief.example/a.gguf")),
    "annotations of a service": ("writes only labels", change(INFERENCE_SERVICES, "/metadata/annotations", {"a": "b"})),
    "Model that cannot be deleted": ("writes only labels", change(MODELS, "/metadata/finalizers", ["thief.example/s"])),
    "labels of a user": ("labels whose names start with", change(MODELS, "/metadata/labels", {"team": "a"})),
    "another Model": (
        "cannot create",
        lambda thief: thief.api.create(MODELS, {"metadata": {"name": "mine", "namespace": thief.namespace}}),
    ),
    "end of a Model": ("cannot delete", lambda thief: thief.api.delete(MODELS, "one", thief.namespace)),
    "registration of a host": (
        "cannot create",
        lambda thief: thief.api.create(METAL_HOSTS, {"metadata": {"name": "mine"}, "spec": {}}),
    ),
    "process of no service": ("of the InferenceService that they serve", create(metal_process, ownerReferences=[])),
    "process of a Model": ("of the InferenceService that they serve", create(metal_process, "Model")),
    "process that cannot be deleted": ("adds no finalizer", create(metal_process, finalizers=["thief.example/stay"])),
    "Secret that cannot be deleted": ("adds no finalizer", create(secret, finalizers=["thief.example/stay"])),
    "Event that cannot be deleted": ("adds no finalizer", create(event, finalizers=["thief.example/stay"])),
    "Event that holds its service": ("no other owner", held(event)),
    "Secret that holds a node": ("no other owner", held(secret)),
    "process that holds a node": ("no other owner", held(metal_process)),
    "Deployment that holds a node": ("no other owner", held(deployment)),
    "claim that holds a node": ("no other owner", held(cache)),
    "grant that holds a node": ("no other owner", held(lambda thief: role(thief, rule(), name="grants:policy-3"))),
    "end of a node": ("cannot delete", lambda thief: thief.api.delete(NODES, "cpu-1")),
}
BY_KUBECTL = {
    "exec": ("cannot create", "create --raw=/api/v1/namespaces/default/pods/a/exec -f /dev/null"),
    "impersonation": (r"\(Forbidden\)", "get secrets --as=admin --as-group=system:masters"),
    "token of a host": ("cannot create", f"create token {HOST} --namespace={HOSTS_NAMESPACE}"),
    "token of its own": ("cannot create", f"create token {CONTROLLER_ACCOUNT} --namespace={CONTROLLER_NAMESPACE}"),
    "end of the policy": ("cannot delete", "delete validatingadmissionpolicy pomona-controller-objects"),
    "more rights": ("cannot", "create clusterrolebinding mine --clusterrole=cluster-admin --user=mine"),
    "approval of a certificate": ("cannot", "get certificatesigningrequests"),
    "a webhook that sees all": ("cannot", "delete mutatingwebhookconfigurations --all"),
    "Lease of a host": ("cannot", f"delete lease {HOST} --namespace={HOSTS_NAMESPACE}"),
}


async def test_stolen_controller_token_opens_nothing_else(thief: Thief) -> None:
    assert await find_unrefused(ATTEMPTS, thief) == {}


@pytest.mark.parametrize(("says", "command"), BY_KUBECTL.values(), ids=BY_KUBECTL)
async def test_stolen_controller_token_is_no_way_around(
    plane: ControlPlane, tmp_path: Path, says: str, command: str
) -> None:
    kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT)
    with pytest.raises(PlaneError, match=says):
        await plane.kubectl(f"--kubeconfig={kubeconfig}", f"--cache-dir={tmp_path}", *command.split())


async def test_controller_writes_all_that_it_needs(thief: Thief) -> None:
    """Objects as the controller makes them; the tests of the main job run under these policies, too."""
    for build in (secret, deployment, service, metal_process, event, budget, policy, monitor):
        await thief.api.create(*build(thief))
    await thief.api.create(*deployment(thief, COPY, imagePullSecrets=PULL_SECRETS))
    patch = [{"op": "remove", "path": "/metadata/finalizers"}]
    await thief.api.patch_json(METAL_PROCESSES, "one-1", thief.namespace, patch)
    await thief.api.delete(METAL_PROCESSES, "one-1", thief.namespace)
    await thief.api.create(*job(thief, imagePullSecrets=PULL_SECRETS))
    for written in (
        thief.owned("MetalHost", SECRETS, HOST, type="Opaque", data={}),
        role(thief, rule()),
        binding(thief),
    ):
        await thief.api.apply(*written, field_manager=MANAGER)
    await thief.api.patch_json(SECRETS, "one-token", thief.namespace, DATA)
    kinds = (DEPLOYMENTS, POD_DISRUPTION_BUDGETS, NETWORK_POLICIES, POD_MONITORS)
    for resource, name in ((DEPLOYMENTS, COPY), *((kind, "one") for kind in kinds), (JOBS, "one-fetch")):
        await thief.api.delete(resource, name, thief.namespace)
