"""A tenant's token: what users write in its namespace, and nothing that the controller or a host writes."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

import pytest

from controller.benchmarks.benchmark_job import read_benchmark
from controller.models.jobs import JobOutcome
from crds.meta import HOSTS_NAMESPACE
from kube import credentials
from kube.client import Client, Obj, connect
from kube.errors import Forbidden, NotFound
from kube.resources import (
    ACCELERATOR_POOLS,
    ENDPOINT_SLICES,
    GATEWAY_KEYS,
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODEL_ROUTES,
    MODELS,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    Resource,
)
from tests.cluster.kube.test_watch import SERVICE_ACCOUNTS
from tests.cluster.policy.objects import build_process
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.support.eventually import eventually
from tests.support.refused_manifests import make_manifest

ONLY_THE_CONTROLLER = "only Pomona's controller creates, edits and deletes MetalProcesses: .* the InferenceService"
RBAC = "rbac.authorization.k8s.io"


@contextlib.asynccontextmanager
async def account(plane: ControlPlane, admin: Client, namespace: str, role: str, kind: str) -> AsyncIterator[Client]:
    """Connect as a new ServiceAccount with a role in its namespace, once it may list what it may list."""
    metadata = {"namespace": namespace, "name": role}
    await admin.create(SERVICE_ACCOUNTS, {"metadata": metadata})
    reference = {"apiGroup": RBAC, "kind": kind, "name": role}
    subject = {"kind": "ServiceAccount", "name": role, "namespace": namespace}
    await admin.create(ROLE_BINDINGS, {"metadata": metadata, "roleRef": reference, "subjects": [subject]})
    async with connect(credentials.load(await plane.service_account_kubeconfig(namespace, role))) as client:

        async def may_list() -> bool:
            try:
                await client.list(MODELS, namespace)
            except Forbidden:
                return False
            return True

        await eventually(may_list)  # roles are aggregated by the controller manager
        yield client


@pytest.fixture
async def tenant(plane: ControlPlane, client: Client, namespace: str) -> AsyncIterator[Client]:
    """The API, as one who has Kubernetes' role `edit` in the namespace."""
    async with account(plane, client, namespace, "edit", "ClusterRole") as api:
        yield api


@pytest.fixture
async def owner(plane: ControlPlane, client: Client, namespace: str) -> AsyncIterator[Client]:
    """The API, as one who has all rights in the namespace."""
    everything = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    await client.create(ROLES, {"metadata": {"namespace": namespace, "name": "owner"}, "rules": [everything]})
    async with account(plane, client, namespace, "owner", "Role") as api:
        yield api


async def test_tenant_has_models_and_services(tenant: Client, plane: ControlPlane, namespace: str) -> None:
    for resource in (MODELS, INFERENCE_SERVICES, GATEWAY_KEYS, MODEL_ROUTES):
        await tenant.create(resource, make_manifest(resource, namespace))
        await tenant.patch_json(resource, "one", namespace, [{"op": "add", "path": "/metadata/labels", "value": {}}])
        assert [item["metadata"]["name"] for item in (await tenant.list(resource, namespace)).items] == ["one"]
    kubeconfig = await plane.service_account_kubeconfig(namespace, "edit")
    await plane.kubectl(
        f"--kubeconfig={kubeconfig}", "scale", "isvc", "one", "--replicas=0", f"--namespace={namespace}"
    )
    assert (await tenant.get(INFERENCE_SERVICES, "one", namespace))["spec"]["replicas"] == 0
    for resource in (MODELS, INFERENCE_SERVICES, GATEWAY_KEYS, MODEL_ROUTES):
        await tenant.delete(resource, "one", namespace)


async def test_tenant_token_opens_nothing_else(tenant: Client, client: Client, namespace: str) -> None:
    await client.create(METAL_PROCESSES, build_process(namespace, "chat-1", "studio-1"))
    for resource in (INFERENCE_SERVICES, GATEWAY_KEYS, MODEL_ROUTES):
        await client.create(resource, make_manifest(resource, namespace))

    def status(resource: Resource, name: str) -> Awaitable[Obj]:
        obj = {"metadata": {"namespace": namespace, "name": name}, "status": {"phase": "Ready"}}
        return tenant.apply(resource, obj, field_manager="tenant", subresource="status")

    attempts: dict[str, Callable[[], Awaitable[object]]] = {
        "creation of a process": lambda: tenant.create(METAL_PROCESSES, build_process(namespace, "chat-2", "studio-1")),
        "deletion of a process": lambda: tenant.delete(METAL_PROCESSES, "chat-1", namespace),
        "status of a process": lambda: status(METAL_PROCESSES, "chat-1"),
        "status of a service": lambda: status(INFERENCE_SERVICES, "one"),
        "status of a key": lambda: status(GATEWAY_KEYS, "one"),
        "status of a route": lambda: status(MODEL_ROUTES, "one"),
        "a route elsewhere": lambda: tenant.create(MODEL_ROUTES, make_manifest(MODEL_ROUTES, "default")),
        "keys elsewhere": lambda: tenant.list(GATEWAY_KEYS, "default"),
        "registration of a host": lambda: tenant.create(METAL_HOSTS, {"metadata": {"name": "mine"}, "spec": {}}),
        "hosts": lambda: tenant.list(METAL_HOSTS),
        "a pool": lambda: tenant.create(ACCELERATOR_POOLS, make_manifest(ACCELERATOR_POOLS, name="mine")),
        "pools": lambda: tenant.list(ACCELERATOR_POOLS),
        "slices": lambda: tenant.create(
            ENDPOINT_SLICES, {"metadata": {"namespace": namespace, "name": "a"}, "addressType": "IPv4", "endpoints": []}
        ),
        "tokens of hosts": lambda: tenant.list(SECRETS, HOSTS_NAMESPACE),
        "grants": lambda: tenant.list(ROLES, HOSTS_NAMESPACE),
        "services elsewhere": lambda: tenant.list(INFERENCE_SERVICES, "default"),
        "a Model elsewhere": lambda: tenant.create(MODELS, make_manifest(MODELS, "default")),
    }
    refusals = {}
    for name, attempt in attempts.items():
        try:
            await attempt()
        except Forbidden as error:
            refusals[name] = error.message
    assert refusals.keys() == attempts.keys()
    assert [name for name, message in refusals.items() if "cannot" not in message] == []


async def test_owner_of_a_namespace_makes_no_process(owner: Client, client: Client, namespace: str) -> None:
    """All rights in a namespace allow no MetalProcess: its spec leads an agent, and its status frees memory."""
    await client.create(METAL_PROCESSES, build_process(namespace, "chat-1", None))
    name = {"namespace": namespace, "name": "chat-1"}
    bind = [{"op": "add", "path": "/spec/hostName", "value": "studio-1"}]
    stopped = {"metadata": name, "status": {"phase": "Stopped"}}
    attempts: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: owner.create(METAL_PROCESSES, build_process(namespace, "chat-2", "studio-1")),
        lambda: owner.patch_json(METAL_PROCESSES, "chat-1", namespace, bind),
        lambda: owner.apply(METAL_PROCESSES, stopped, field_manager="tenant", subresource="status"),
        lambda: owner.delete(METAL_PROCESSES, "chat-1", namespace),
    )
    for attempt in attempts:
        with pytest.raises(Forbidden, match=ONLY_THE_CONTROLLER):
            await attempt()


async def test_owner_of_a_namespace_writes_no_digest(owner: Client, client: Client, namespace: str) -> None:
    """All rights in a namespace are not enough: with the digest of another's key, one would be taken for the other."""
    await owner.create(GATEWAY_KEYS, make_manifest(GATEWAY_KEYS, namespace))
    metadata = {"namespace": namespace, "name": "one"}
    forged = {"metadata": metadata, "status": {"digest": "0" * 64}}
    with pytest.raises(Forbidden, match="only Pomona's controller writes the status of GatewayKeys"):
        await owner.apply(GATEWAY_KEYS, forged, field_manager="tenant", subresource="status")
    await owner.patch_json(GATEWAY_KEYS, "one", namespace, [{"op": "add", "path": "/spec/suspend", "value": True}])
    await client.apply(GATEWAY_KEYS, forged, field_manager="administrator", subresource="status")


@pytest.mark.parametrize("by", ["generic-garbage-collector", "namespace-controller"])
async def test_kubernetes_deletes_processes(plane: ControlPlane, client: Client, namespace: str, by: str) -> None:
    """Garbage collection goes on; the controller manager of the tests is an administrator, so it proves nothing."""
    await client.create(METAL_PROCESSES, build_process(namespace, "chat-1", None))
    who = f"--as=system:serviceaccount:kube-system:{by}"
    await plane.kubectl("delete", "mp", "chat-1", f"--namespace={namespace}", "--wait=false", who)
    with pytest.raises(NotFound):
        await client.get(METAL_PROCESSES, "chat-1", namespace)


async def test_administrator_who_is_no_master_deletes_processes(
    plane: ControlPlane, client: Client, namespace: str
) -> None:
    await client.create(METAL_PROCESSES, build_process(namespace, "chat-1", None))
    await plane.kubectl(
        "create", "clusterrolebinding", f"root-{namespace}", "--clusterrole=cluster-admin", "--user=root"
    )
    delete = ("delete", "mp", "chat-1", f"--namespace={namespace}", "--as=root")
    try:

        async def is_bound() -> bool:
            try:
                await plane.kubectl(*delete)
            except PlaneError:  # the authorizer has not seen the binding yet
                return False
            return True

        await eventually(is_bound)
    finally:
        await plane.kubectl("delete", "clusterrolebinding", f"root-{namespace}")


async def test_viewer_reads_models_and_services(plane: ControlPlane, client: Client, namespace: str) -> None:
    await client.create(MODELS, make_manifest(MODELS, namespace))
    async with account(plane, client, namespace, "view", "ClusterRole") as viewer:
        assert (await viewer.get(MODELS, "one", namespace))["metadata"]["name"] == "one"
        assert (await viewer.list(INFERENCE_SERVICES, namespace)).items == []
        with pytest.raises(Forbidden):
            await viewer.delete(MODELS, "one", namespace)
        with pytest.raises(Forbidden):
            await viewer.list(METAL_PROCESSES, namespace)


async def test_owner_of_a_namespace_forges_a_benchmark_that_ends_no_round(owner: Client, namespace: str) -> None:
    """The API server takes any time and any container in a status, so the controller must."""
    containers = [{"name": "bench", "image": "none"}]
    never = {"name": "never"}
    metadata = {"namespace": namespace, "name": "forged"}
    await owner.create(
        JOBS,
        {
            "metadata": metadata,
            "spec": {
                "parallelism": 0,
                "template": {"spec": {"containers": containers, "restartPolicy": "Never", "schedulingGates": [never]}},
            },
        },
    )
    await owner.create(PODS, {"metadata": metadata, "spec": {"containers": containers, "schedulingGates": [never]}})
    ended = {"exitCode": 0, "message": '{"tokensPerSecond": 5}', "finishedAt": "9999-12-31T23:59:59Z"}
    states = [
        {"name": "bench", "image": "none", "imageID": "", "ready": False, "restartCount": 0, "state": state}
        for state in ({"terminated": ended}, {"waiting": {"reason": "Later"}})
    ]
    latest = "9999-12-31T23:59:59Z"
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": latest, "lastProbeTime": latest}
        for kind in ("FailureTarget", "Failed")
    ]
    add = [{"op": "add", "path": "/status/conditions", "value": conditions}]

    async def has_begun() -> bool:
        return "startTime" in ((await owner.get(JOBS, "forged", namespace)).get("status") or {})

    await eventually(has_begun)
    job = await owner.patch_json(JOBS, "forged", namespace, add, subresource="status")
    put = [{"op": "add", "path": "/status/containerStatuses", "value": states}]
    forged_pod = await owner.patch_json(PODS, "forged", namespace, put, subresource="status")
    assert [status["name"] for status in forged_pod["status"]["containerStatuses"]] == ["bench", "bench"]
    for pods in ((), (forged_pod,)):
        outcome = read_benchmark(job, pods, datetime.now(UTC))
        assert isinstance(outcome, JobOutcome)
        assert outcome.state in {"Going", "Broken"}
