"""The real kube-scheduler, with the configuration of docs/extender.md, asks the extender of the chart's identity."""

import re
import sys
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import yaml

from crds.inferenceservice import InferenceService
from crds.meta import CONTROLLER_NAMESPACE, LABEL_SERVICE
from crds.model import Model
from fitness.performance import MeasuredPerformance, hash_model
from fitness.performance_store import build_config_map, encode_record
from kube.client import Client
from kube.resources import CONFIG_MAPS, INFERENCE_SERVICES, LEASES, MODELS, PODS
from tests.controlplane import binaries
from tests.controlplane.helm import CHART, run_helm
from tests.controlplane.plane import FEW_PROCESSORS, ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support import api_objects
from tests.support.documents import list_blocks
from tests.support.eventually import eventually
from tests.support.simulated_nodes import GPU, SimulatedNodes

ACCOUNT = "pomona-extender"
SCHEDULER = "pomona-scheduler"
EXTENDER = "http://127.0.0.1:8888"
L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"}


def read_configuration() -> dict[str, Any]:
    """Return the scheduler's configuration of the document."""
    (block,) = list_blocks((CHECKOUT / "docs" / "extender.md").read_text(), "yml")
    configuration: dict[str, Any] = yaml.safe_load(block)
    return configuration


@pytest_asyncio.fixture
async def installed(plane: ControlPlane, tmp_path: Path) -> AsyncIterator[None]:
    """The chart's objects of the scheduler, without its Deployment: its programs run as processes."""
    rendered = await run_helm(
        "template", "pomona", str(CHART), "--set=scheduler.enabled=true", "--show-only=templates/scheduler.yaml"
    )
    objects = [document for document in yaml.safe_load_all(rendered) if document and document["kind"] != "Deployment"]
    (configuration,) = [document["data"]["scheduler.yaml"] for document in objects if document["kind"] == "ConfigMap"]
    assert yaml.safe_load(configuration) == read_configuration()
    manifest = tmp_path / "scheduler-objects.yaml"
    manifest.write_text(yaml.safe_dump_all(objects))
    await plane.apply(manifest)
    yield
    await plane.kubectl("delete", "--ignore-not-found", "-f", str(manifest))


@pytest_asyncio.fixture
async def extender(plane: ControlPlane, installed: None, tmp_path: Path) -> AsyncIterator[Process]:
    """The extender with its own ServiceAccount, ready."""
    del installed
    kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, ACCOUNT)
    argv = [sys.executable, "-m", "cli.main", "extender", f"--kubeconfig={kubeconfig}"]
    process = Process("extender", argv, tmp_path / "extender.log")
    process.start()
    await eventually(is_ready)
    yield process
    if process.running:
        assert await process.stop() == 0


async def is_ready() -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"{EXTENDER}/readyz") as response:
        return response.status == HTTPStatus.OK


@pytest_asyncio.fixture
async def scheduler(plane: ControlPlane, installed: None, tmp_path: Path) -> AsyncIterator[Process]:
    """A second kube-scheduler with its own ServiceAccount, which leads."""
    del installed
    kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, SCHEDULER)
    configuration = tmp_path / "scheduler.yaml"
    configuration.write_text(
        yaml.safe_dump({**read_configuration(), "clientConnection": {"kubeconfig": str(kubeconfig)}})
    )
    argv = [
        *(str(binaries.ensure_binaries().kube_scheduler), f"--config={configuration}"),
        *(f"--cert-dir={tmp_path / 'certificates'}", "--bind-address=127.0.0.1", "--secure-port=10300"),
    ]
    process = Process("second kube-scheduler", argv, tmp_path / "second-scheduler.log", FEW_PROCESSORS)
    process.start()
    yield process
    await process.kill()
    # The next scheduler would wait until it expires.
    await plane.request("DELETE", LEASES.path(CONTROLLER_NAMESPACE, SCHEDULER), accept={HTTPStatus.NOT_FOUND})


@pytest_asyncio.fixture
async def nodes(plane: ControlPlane, client: Client) -> AsyncIterator[SimulatedNodes]:
    """Two nodes with L4 and one with H100."""
    async with SimulatedNodes(plane, client).running() as nodes:
        await nodes.add("slow-1", 8, **L4)
        await nodes.add("slow-2", 8, **L4)
        await nodes.add("fast-1", 4)
        yield nodes


async def create_service(plane: ControlPlane, client: Client, namespace: str, **status: Any) -> str:
    """Create a service as its controller reports it, and return the hash of its model."""
    kinds = ((MODELS, api_objects.model()), (INFERENCE_SERVICES, api_objects.service(scheduling={"mode": "Native"})))
    reported = {"phase": "Progressing", "runtime": "vllm", "accelerator": "nvidia", **status}
    hashed = []
    for resource, obj in kinds:
        name, stated = obj["metadata"]["name"], obj["status"] or reported
        await client.create(resource, {"metadata": {"name": name, "namespace": namespace}, "spec": obj["spec"]})
        await plane.request("PATCH", f"{resource.path(namespace, name)}/status", {"status": stated})
        hashed.append(await client.get(resource, name, namespace))
    model, service = msgspec.convert(hashed[0], Model), msgspec.convert(hashed[1], InferenceService)
    return hash_model(model, "vllm", service.spec)


async def create_pod(client: Client, namespace: str, name: str, **labels: str) -> None:
    container = {"name": "engine", "image": "engine", "resources": {"limits": {GPU: "1"}}}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    # The grace of pods whose node ends with the test: nothing runs there that could report their end.
    spec = {"schedulerName": SCHEDULER, "containers": [container], "terminationGracePeriodSeconds": 0}
    await client.create(PODS, {"metadata": metadata, "spec": spec})


async def find_node(client: Client, namespace: str, name: str) -> str:
    """Wait until a pod is bound, and return its node."""

    async def node() -> str:
        node_name: str = (await client.get(PODS, name, namespace))["spec"].get("nodeName", "")
        return node_name

    return await eventually(node)


async def read_metric(pattern: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{EXTENDER}/metrics") as response:
        match = re.search(rf"^{pattern} (\S+)$", await response.text(), re.MULTILINE)
    return float(match[1]) if match else 0.0


@pytest.mark.usefixtures("nodes", "scheduler")
async def test_pods_go_to_the_faster_class_and_are_scheduled_without_the_extender(
    plane: ControlPlane, client: Client, namespace: str, extender: Process
) -> None:
    model_hash = await create_service(plane, client, namespace)
    speeds = {"nvidia-l4x1": 20.0, "nvidia-h100-80gb-hbm3x1": 100.0}
    records = {key: encode_record(MeasuredPerformance(tokens_per_second=speed)) for key, speed in speeds.items()}
    config_map = build_config_map(model_hash, records)
    await client.create(CONFIG_MAPS, config_map)
    try:
        await eventually(lambda: has_scores(namespace))
        names = [f"chat-{number}" for number in range(4)]
        for name in names:
            await create_pod(client, namespace, name, **{LABEL_SERVICE: "chat"})
        assert {await find_node(client, namespace, name) for name in names} == {"fast-1"}
        # The faster node is full, and the pod of a model that is not known is placed as ever.
        await create_pod(client, namespace, "more", **{LABEL_SERVICE: "chat"})
        await create_pod(client, namespace, "stranger")
        assert (await find_node(client, namespace, "more")).startswith("slow-")
        assert (await find_node(client, namespace, "stranger")).startswith("slow-")
        assert await read_metric(r'pomona_extender_requests_total\{outcome="neutral",verb="filter"\}') >= 1

        await extender.kill()
        await create_pod(client, namespace, "orphan", **{LABEL_SERVICE: "chat"})
        assert (await find_node(client, namespace, "orphan")).startswith("slow-")
    finally:
        await client.delete(CONFIG_MAPS, config_map["metadata"]["name"], CONTROLLER_NAMESPACE)


async def has_scores(namespace: str) -> bool:
    """Return whether the extender knows service, measurements and nodes."""
    container = {"resources": {"limits": {GPU: "1"}}}
    pod = {"metadata": {"namespace": namespace, "labels": {LABEL_SERVICE: "chat"}}, "spec": {"containers": [container]}}
    body = {"Pod": pod, "NodeNames": ["slow-1", "slow-2", "fast-1"]}
    async with aiohttp.ClientSession() as session, session.post(f"{EXTENDER}/score", json=body) as response:
        scores = {entry["Host"]: entry["Score"] for entry in await response.json()}
    return scores == {"slow-1": 4, "slow-2": 4, "fast-1": 10}


@pytest.mark.usefixtures("nodes", "extender", "scheduler")
async def test_reason_for_a_misfit_is_in_the_condition_of_the_pod(
    plane: ControlPlane, client: Client, namespace: str
) -> None:
    await create_service(plane, client, namespace, deviceMemoryBytes=200 * 2**30)
    words = "a device has 22.5 GiB of memory, and the model needs 200.0 GiB"

    async def is_explained() -> bool:
        await create_pod_once(client, namespace)
        conditions = (await client.get(PODS, "large", namespace))["status"].get("conditions") or ()
        return any(words in condition.get("message", "") for condition in conditions)

    await eventually(is_explained)
    assert not (await client.get(PODS, "large", namespace))["spec"].get("nodeName")


async def create_pod_once(client: Client, namespace: str) -> None:
    """Create a pod of the service once the extender knows it, as nothing is known against a node before."""
    container = {"resources": {"limits": {GPU: "1"}}}
    pod = {"metadata": {"namespace": namespace, "labels": {LABEL_SERVICE: "chat"}}, "spec": {"containers": [container]}}
    body = {"Pod": pod, "NodeNames": ["slow-1", "fast-1"]}
    async with aiohttp.ClientSession() as session, session.post(f"{EXTENDER}/filter", json=body) as response:
        assert (await response.json())["NodeNames"] == []
    if not any(item["metadata"]["name"] == "large" for item in (await client.list(PODS, namespace)).items):
        await create_pod(client, namespace, "large", **{LABEL_SERVICE: "chat"})
