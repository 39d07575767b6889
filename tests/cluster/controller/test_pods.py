"""Pods on the real API server: restricted Pod Security, objects beside them, and options that it refuses."""

import functools
from pathlib import Path

import pytest
import pytest_asyncio

from controller.placement.device_need import AttributeDemand, DeviceNeed
from controller.pod_settings import PodSettings
from controller.services.pods.pod_template import EngineChoice, MountedWeights, build_pod
from devices.vendors import VENDORS
from kube.client import Client, Obj
from kube.errors import Invalid, NotFound
from kube.resources import (
    DEPLOYMENTS,
    MODELS,
    NAMESPACES,
    NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS,
    POD_MONITORS,
    PODS,
    RESOURCE_CLAIM_TEMPLATES,
    Resource,
)
from runtimes.registry import RUNTIMES
from tests.cluster.controller.test_services import ServiceNamespace, files
from tests.cluster.shared_controller import SharedController
from tests.controlplane import members
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support.api_objects import as_service, service
from tests.support.eventually import eventually
from tests.support.file_server import FileServer

__all__ = ["files"]

PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False)
OWN = {"inference.pomona.dev/service": "chat"}
BESIDE = (POD_DISRUPTION_BUDGETS, NETWORK_POLICIES, POD_MONITORS)
OPTIONS: Obj = {
    "imagePullSecrets": [{"name": "registry"}],
    "env": [{"name": "A", "value": "b"}, {"name": "EMPTY"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}
                ]
            }
        },
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {}}}
            ]
        },
    },
    "topologySpreadConstraints": [{"topologyKey": "zone"}],
    "volumes": [
        {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "files", "configMap": {"name": "templates"}},
        {"name": "lasting", "persistentVolumeClaim": {"claimName": "mine"}},
    ],
    "volumeMounts": [
        {"name": "scratch", "mountPath": "/opt/scratch"},
        {"name": "files", "mountPath": "/opt/files", "readOnly": True, "subPath": "a"},
    ],
}


@pytest_asyncio.fixture
async def restricted(client: Client, namespace: str) -> str:
    """A namespace in which the API server refuses pods that are not restricted."""
    label = [{"op": "add", "path": "/metadata/labels/pod-security.kubernetes.io~1enforce", "value": "restricted"}]
    await client.patch_json(NAMESPACES, namespace, None, label)
    return namespace


async def test_every_pod_meets_the_restricted_standard(client: Client, restricted: str) -> None:
    engines = [name for name, runtime in RUNTIMES.items() if runtime.pod is not None]
    vendors = [name for name, vendor in VENDORS.items() if vendor.in_pods]
    assert "llama.cpp" in engines
    for number, (engine, vendor) in enumerate((each, other) for each in engines for other in vendors):
        container: Obj = {"container": {}, "image": "registry.example/engine:1"}
        chat = as_service(service(pod=OPTIONS, resources={"memoryLimit": "2Gi"}, **container))
        choice = EngineChoice(engine, vendor, VENDORS[vendor], "1Gi")
        weights = MountedWeights("tiny-cache", "a/tiny.gguf")
        spec = build_pod(chat, choice, weights, settings=PodSettings("registry.example/pomona:1"))
        metadata = {"name": f"pod-{number}", "namespace": restricted}
        made = await client.create(
            PODS, {"metadata": metadata, "spec": {**spec, "schedulingGates": [{"name": "a.b/c"}]}}
        )
        assert made["spec"]["priority"] == 10_000, (engine, vendor)
        assert made["spec"]["preemptionPolicy"] == "Never"


@pytest_asyncio.fixture
async def controller(pod_monitors: None, shared_controller: SharedController) -> Process:
    """A new controller with network policies turned on: it looks for PodMonitor at its start and every ten minutes."""
    del pod_monitors  # the kind, before the controller
    return await shared_controller.lend_new("--network-policies", "--monitoring-namespace=metrics")


@pytest_asyncio.fixture
async def cluster(client: Client, restricted: str, controller: Process) -> ServiceNamespace:
    """A restricted namespace, beside the controller."""
    del controller
    return ServiceNamespace(client, restricted)


@pytest.mark.usefixtures("node")
async def test_pods_are_guarded_and_monitored_while_they_exist(cluster: ServiceNamespace, files: FileServer) -> None:
    client, namespace = cluster.client, cluster.namespace
    await cluster.make(MODELS, "tiny", source=f"{files.url}/tiny.gguf", cache={"accessMode": "ReadWriteMany"})
    await cluster.make_service(
        hardware={"accelerator": "cpu"}, contextLength=512, replicas=2, pod={"env": OPTIONS["env"]}
    )
    await cluster.reaches("Ready", reason="Serving")

    made = [await client.get(kind, "chat", namespace) for kind in BESIDE]
    assert [selected_labels(manifest) for manifest in made] == [OWN, OWN, OWN]

    await cluster.edit("chat", replicas=1)
    await cluster.reaches("Ready")
    await eventually(lambda: is_gone(cluster, POD_DISRUPTION_BUDGETS))
    kept = [await client.get(kind, "chat", namespace) for kind in BESIDE[1:]]
    assert kept == made[1:], "what is as desired is not written again"

    await client.delete(NETWORK_POLICIES, "chat", namespace)
    await eventually(lambda: exists(cluster, NETWORK_POLICIES))
    await cluster.edit("chat", suspend=True)
    for kind in BESIDE:
        await eventually(functools.partial(is_gone, cluster, kind))


@pytest.mark.usefixtures("node")
async def test_monitor_follows_the_labels_of_a_restarted_controller(
    plane: ControlPlane, client: Client, namespace: str, controller: Process, tmp_path: Path, *, files: FileServer
) -> None:
    services = ServiceNamespace(client, namespace)
    await services.make(MODELS, "tiny", source=f"{files.url}/tiny.gguf")
    await services.make_service(hardware={"accelerator": "cpu"}, contextLength=512)
    await eventually(lambda: exists(services, POD_MONITORS))
    before = await client.get(POD_MONITORS, "chat", namespace)
    managed = {"app.kubernetes.io/managed-by": "pomona"}
    assert before["metadata"]["labels"] == managed
    await controller.stop()

    async def has_labels(labels: dict[str, str]) -> bool:
        monitor = await client.get(POD_MONITORS, "chat", namespace)
        assert monitor["metadata"]["uid"] == before["metadata"]["uid"], "it is no other object"
        return bool(monitor["metadata"]["labels"] == managed | labels)

    for labels in ({"release": "one", "team": "a"}, {"release": "two"}, {}):
        options = (f"--monitor-label={key}={value}" for key, value in labels.items())
        process = await members.controller(plane, tmp_path, *options)
        process.start()
        try:
            await eventually(functools.partial(has_labels, labels))
        finally:
            await process.stop()


def selected_labels(obj: Obj) -> Obj:
    """Return the labels of the pods that an object beside them selects."""
    selector: Obj = obj["spec"].get("podSelector") or obj["spec"]["selector"]
    labels: Obj = selector["matchLabels"]
    return labels


async def exists(cluster: ServiceNamespace, kind: Resource) -> bool:
    return await cluster.exists(kind, "chat")


async def is_gone(cluster: ServiceNamespace, kind: Resource) -> bool:
    return not await cluster.exists(kind, "chat")


@pytest.mark.usefixtures("node")
async def test_options_that_the_api_server_refuses_are_conditions(cluster: ServiceNamespace, files: FileServer) -> None:
    await cluster.make(MODELS, "tiny", source=f"{files.url}/tiny.gguf")
    await cluster.make_service(contextLength=512, resources={"memoryLimit": "1Mi"})
    assert "memory limit" in await refusal(cluster)
    terms = [{"matchExpressions": [{"key": "zone", "operator": "Exists", "values": ["a"]}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    await cluster.edit("chat", resources={}, pod={"affinity": {"nodeAffinity": required}})
    assert "nodeSelectorTerms[0].matchExpressions[0].values" in await refusal(cluster)
    await cluster.edit("chat", pod={})
    await cluster.reaches("Ready")


async def refusal(cluster: ServiceNamespace) -> str:
    service = await cluster.reaches("Failed", reason="Invalid")
    return next(condition.message for condition in service.status.conditions if condition.type == "Ready")


@pytest.mark.usefixtures("node")
async def test_missing_priority_class_is_named_with_the_command(
    plane: ControlPlane, cluster: ServiceNamespace, files: FileServer
) -> None:
    await plane.kubectl("delete", "priorityclass", "pomona-batch")
    try:
        await cluster.make(MODELS, "tiny", source=f"{files.url}/tiny.gguf")
        await cluster.make_service(contextLength=512, priority="batch")
        failed = await cluster.reaches("Failed", reason="PriorityClassMissing")
        message = next(condition.message for condition in failed.status.conditions if condition.type == "Ready")
        assert "PriorityClass pomona-batch does not exist" in message
        assert "kubectl apply --server-side -f deploy/install/priority-classes.yaml" in message
        with pytest.raises(NotFound):
            await cluster.client.get(PRIORITY_CLASSES, "pomona-batch")
    finally:
        await plane.apply(CHECKOUT / "deploy" / "install" / "priority-classes.yaml")
    await cluster.reaches("Ready")
    deployment = await cluster.client.get(DEPLOYMENTS, "chat", cluster.namespace)
    assert deployment["spec"]["template"]["spec"]["priorityClassName"] == "pomona-batch"


async def test_value_of_a_device_attribute_is_one_text_to_the_api_server(client: Client, namespace: str) -> None:
    """The API server compiles what the scheduler would evaluate; a text that ends its string is no expression."""
    hostile = ("x' || true || 'a' == 'a", "back\\", "two\nlines", "'")
    demands = (AttributeDemand(name="productName", type="string", values=hostile),)
    need = DeviceNeed(driver="gpu.nvidia.com", device_class="gpu.nvidia.com", demands=demands)
    own = "device.attributes['gpu.nvidia.com'].productName"

    async def make(name: str, *expressions: str) -> Obj:
        selectors = [{"cel": {"expression": expression}} for expression in expressions]
        request = {"deviceClassName": need.device_class, "selectors": selectors}
        spec = {"spec": {"devices": {"requests": [{"name": "devices", "exactly": request}]}}}
        metadata = {"name": name, "namespace": namespace}
        return await client.create(RESOURCE_CLAIM_TEMPLATES, {"metadata": metadata, "spec": spec})

    await make("escaped", *need.list_expressions())
    with pytest.raises(Invalid):
        await make("raw", f"{own} == '{hostile[-1]}'")
