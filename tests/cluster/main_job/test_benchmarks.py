"""The speed of a model is measured on an idle device by a Job, stored, and shown by the service."""

import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from controller.reconcile.conditions import find
from controller.reconcile.plan import owned_by
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, ObjectMeta
from fitness.performance import MeasuredPerformance
from fitness.performance_store import LABEL_BENCHMARK, SELECTOR
from kube.client import Obj
from kube.resources import CONFIG_MAPS, JOBS, MODELS, PODS
from tests.cluster.main_job.cluster import READY_SECONDS, Cluster, condition
from tests.cluster.nodes import joined
from tests.cluster.shared_controller import SharedController
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support.documents import list_blocks
from tests.support.eventually import eventually
from tests.support.shell import Shell
from tests.support.tiny_models import hollow_gguf
from tests.support.tiny_models.hollow_gguf import Shape

pytestmark = pytest.mark.long

LABELS = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"}
QUICK = {"warmupIterations": 0}


@pytest_asyncio.fixture
async def controller(shared_controller: SharedController) -> Process:
    """The controller, with benchmarks."""
    return await shared_controller.lend("--benchmarks")


@pytest_asyncio.fixture
async def l4_node(plane: ControlPlane, tmp_path: Path, watched: list[Process]) -> AsyncIterator[Process]:
    """The node `gpu-4` with two devices that say what they are."""
    async with joined(plane, "gpu-4", tmp_path, watched, resources={"nvidia.com/gpu": "2"}, labels=LABELS) as kubelet:
        yield kubelet


@pytest_asyncio.fixture
async def h100_node(plane: ControlPlane, tmp_path: Path, watched: list[Process]) -> AsyncIterator[Process]:
    """The node `gpu-5` with a device of another class."""
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
    async with joined(plane, "gpu-5", tmp_path, watched, resources={"nvidia.com/gpu": "1"}, labels=labels) as kubelet:
        yield kubelet


@pytest.mark.usefixtures("l4_node", "h100_node")
async def test_service_is_measured_where_it_serves_and_on_an_idle_device(
    cluster: Cluster, plane: ControlPlane, tmp_path: Path
) -> None:
    model = cluster.model(cache={"accessMode": "ReadWriteMany"})
    await cluster.apply(model, cluster.service("chat", "nvidia", parallel=2, benchmark=QUICK))

    async def measured() -> InferenceService:
        found = await cluster.get("chat")
        assert found.status.performance is not None
        assert {speed.source for speed in found.status.speeds} == {"Measured"}, found.status.speeds
        return found

    service = await eventually(measured, READY_SECONDS)
    shown = service.status.performance
    assert shown is not None
    assert (shown.device_class, shown.source) == ("nvidia-h100-80gb-hbm3x1", "live")
    (stored,) = (await cluster.client.list(CONFIG_MAPS, "pomona-system", label_selector=SELECTOR)).items
    assert stored["metadata"]["name"] == f"bench-{shown.model_hash}"
    records = {key: msgspec.json.decode(text, type=MeasuredPerformance) for key, text in stored["data"].items()}
    served, idle = (records[f"{name}_{cluster.namespace}"] for name in (shown.device_class, "nvidia-l4x1"))
    assert (served.node, served.source, list(served.concurrency)) == ("gpu-5", "live", ["1"])
    assert (idle.node, idle.source, list(idle.concurrency)) == ("gpu-4", "job", ["1"])
    for record in (served, idle):
        assert (len(record.runs), record.runtime, record.model) == (5, "llama.cpp", "tiny")

    async def jobs_are_gone() -> bool:
        return not await list_jobs(cluster)

    await eventually(jobs_are_gone)
    await _follow_document(plane, cluster, tmp_path)
    wide = await cluster.kubectl("get", "isvc", "chat", "-o", "wide")
    assert shown.tokens_per_second in wide.split()
    await cluster.client.delete(CONFIG_MAPS, stored["metadata"]["name"], "pomona-system")


@pytest.mark.usefixtures("l4_node", "h100_node")
async def test_benchmark_starts_beside_forged_jobs_and_does_not_cost_a_replica_its_place(cluster: Cluster) -> None:
    """Neither Job of a tenant holds a slot, though the policy lets the controller delete but one of them.

    A slower device is free all the time: whoever goes there stays there.
    """
    # On a model of a few kilobytes all devices are as fast.
    hollow_gguf.write(cluster.files.root / "large.gguf", Shape(layers=4, embedding=1024, feed_forward=4096))
    await cluster.apply(cluster.model(file="large.gguf", cache={"accessMode": "ReadWriteMany"}))
    model = await cluster.client.get(MODELS, "tiny", cluster.namespace)
    owner = owned_by(MODELS, msgspec.convert(model["metadata"], ObjectMeta))
    await cluster.apply(forge_job("orphan"), forge_job("owned", owner))
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["gpu-4"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [here]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    long = {"minDuration": "4m"}
    await cluster.apply(cluster.service("chat", "nvidia", benchmark=long, pod={"affinity": affinity}))
    await cluster.ready("chat")

    async def runs() -> Obj:
        jobs = {job["metadata"]["name"]: job for job in await list_jobs(cluster)}
        own = [job for name, job in jobs.items() if name != "orphan"]
        pods = (await cluster.client.list(PODS, cluster.namespace, label_selector=SELECTOR)).items
        assert ["owned" in jobs, len(own), len(pods)] == [False, 1, 1]
        assert any(pod["type"] == "Ready" and pod["status"] == "True" for pod in pods[0]["status"]["conditions"])
        assert pods[0]["spec"]["nodeName"] == "gpu-5"
        return own[0]

    job = await eventually(runs, READY_SECONDS)
    await cluster.apply(cluster.service("late", "nvidia", benchmark=long))
    await cluster.ready("late")
    (pod,) = (await cluster.client.list(PODS, cluster.namespace, label_selector=f"{LABEL_SERVICE}=late")).items
    assert pod["spec"]["nodeName"] == "gpu-5"
    assert job["metadata"]["uid"] not in {other["metadata"]["uid"] for other in await list_jobs(cluster)}
    service = await cluster.get("chat")
    assert find(service.status.conditions, "Benchmarked") is None, "to give way is no failure"


@pytest.mark.usefixtures("l4_node", "h100_node")
async def test_first_choice_of_auto_waits_for_a_measurement_on_each_class(
    cluster: Cluster, shared_controller: SharedController
) -> None:
    """Another leader measures anew, and goes on with the wait of the last one."""
    first = cluster.service("first", "cpu")
    await cluster.apply(cluster.model(cache={"accessMode": "ReadWriteMany"}), first)
    await cluster.ready("first")  # the weights are there
    await cluster.apply(cluster.service("chat", "auto", benchmark=QUICK | {"minDuration": "10s"}))

    async def probes() -> InferenceService:
        found = await cluster.get("chat")
        ready = condition(found)
        assert (found.status.phase, ready.reason) == ("Progressing", "MeasuringSpeed"), found.status
        assert (
            "measuring the speed on nvidia-h100-80gb-hbm3x1, nvidia-l4x1; the accelerator is chosen by 2"
            in ready.message
        )
        return found

    waiting = await eventually(probes, READY_SECONDS)
    assert waiting.status.choice is not None
    assert (waiting.status.choice.probing_since, waiting.status.choice.accelerators) != ("", [])
    assert (waiting.status.replicas, waiting.status.accelerator) == (0, "")
    await shared_controller.lend_new("--benchmarks")
    await cluster.ready("chat")

    async def placed() -> InferenceService:
        found = await cluster.get("chat")
        assert found.status.placement is not None
        assert found.status.placement.basis == "probe"
        return found

    service = await eventually(placed)
    assert {each.device_class: each.source for each in service.status.speeds} == {
        "nvidia-h100-80gb-hbm3x1": "Measured",
        "nvidia-l4x1": "Measured",
    }
    placement = service.status.placement
    assert placement is not None
    # The scores are those of the choice; status.speeds follows each later measurement, which may turn the order.
    scores = {choice.device_class: choice.score or 0 for choice in placement.others}
    scores[placement.device_class] = placement.score or 0
    assert scores.keys() >= {speed.device_class for speed in service.status.speeds}, "both were free, and compared"
    assert scores[placement.device_class] == max(scores.values())
    assert service.status.choice is not None
    assert service.status.choice.probing_since == waiting.status.choice.probing_since
    for stored in (await cluster.client.list(CONFIG_MAPS, "pomona-system", label_selector=SELECTOR)).items:
        await cluster.client.delete(CONFIG_MAPS, stored["metadata"]["name"], "pomona-system")


async def list_jobs(cluster: Cluster) -> list[Obj]:
    return (await cluster.client.list(JOBS, cluster.namespace, label_selector=SELECTOR)).items


def forge_job(name: str, owner: Obj | None = None) -> Obj:
    """Return a Job of a tenant that never ends and looks like one of the controller."""
    bench = {"name": "bench", "image": "pomona:test", "command": ["sleep", "3600"]}
    metadata = {
        "name": name,
        "labels": {LABEL_BENCHMARK: "true", LABEL_MANAGED_BY: MANAGED_BY},
        "ownerReferences": [owner] if owner is not None else [],
    }
    spec = {"suspend": True, "template": {"spec": {"restartPolicy": "Never", "containers": [bench]}}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


async def _follow_document(plane: ControlPlane, cluster: Cluster, folder: Path) -> None:
    """Run the commands of the document, and compare what they print, but for numbers and hashes."""
    document = CHECKOUT / "docs" / "benchmarks.md"
    shell = Shell(plane, folder / "user")
    config = folder / "user" / "kubeconfig"
    await shell.run(f"cp '{plane.environment['KUBECONFIG']}' '{config}'")
    shell.environment |= {"KUBECONFIG": str(config), "PATH": f"{sys.prefix}/bin:{shell.environment['PATH']}"}
    await shell.run(f"kubectl config set-context --current --namespace={cluster.namespace}")
    for command, output in zip(list_blocks(document.read_text(), "sh"), list_blocks(document.read_text()), strict=True):
        assert _mask(await shell.run(command)) == _mask(output)


def _mask(text: str) -> list[list[str]]:
    return [re.sub(r"bench-[0-9a-f]{16}|[0-9][0-9.,]*", "N", line).split() for line in text.splitlines()]
