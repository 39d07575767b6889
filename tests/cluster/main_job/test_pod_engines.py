"""Engines for safetensors, and devices of every vendor, in pods: from `kubectl apply` to an answer.

vLLM, SGLang and TGI are stand-ins that refuse options which the real ones do not have; llama.cpp is real.
"""

from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from controller.services.traffic import REQUESTS, TRAFFIC_SERIES, parse_series
from gateway.proxy.paths import METRICS_OF_PROXY
from kube.client import Obj
from kube.resources import DEPLOYMENTS, PODS
from runtimes.registry import RUNTIMES
from tests.cluster.main_job.cluster import Cluster, condition
from tests.cluster.nodes import SharedNodes
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.tiny_models import tiny_mlx

NVIDIA = {"nvidia.com/gpu": "2"}
NVIDIA_LABELS = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.memory": "40960"}
AMD = {"amd.com/gpu": "1"}
AMD_LABELS = {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"}
# A card needs 11876 MiB of pages.
GAUDI = {"habana.ai/gaudi": "1", "hugepages-2Mi": "12Gi"}
INTEL = {"gpu.intel.com/i915": "1"}
SHARED = {"accessMode": "ReadWriteMany"}
"""The cache of a Model whose pods are on several nodes."""
TENSORS: dict[str, Any] = {"modelRef": "tensors", "contextLength": 2048, "extraArgs": []}
CPU_IMAGE = "vllm/vllm-openai-cpu:v0.33.0-x86_64"


@pytest_asyncio.fixture
async def nvidia_node(shared_nodes: SharedNodes) -> Process:
    """The node `gpu-2` with two NVIDIA devices and the labels of GPU feature discovery."""
    return await shared_nodes.lend("nvidia_node", "gpu-2", resources=NVIDIA, labels=NVIDIA_LABELS)


@pytest_asyncio.fixture
async def amd_node(shared_nodes: SharedNodes) -> Process:
    """The node `gpu-3` with AMD devices."""
    return await shared_nodes.lend("amd_node", "gpu-3", resources=AMD, labels=AMD_LABELS)


@pytest_asyncio.fixture
async def gaudi_node(shared_nodes: SharedNodes) -> Process:
    """The node `gpu-4` with Gaudi devices, and pages of 2 MiB."""
    return await shared_nodes.lend("gaudi_node", "gpu-4", resources=GAUDI)


@pytest_asyncio.fixture
async def intel_node(shared_nodes: SharedNodes) -> Process:
    """The node `gpu-5` with Intel devices."""
    return await shared_nodes.lend("intel_node", "gpu-5", resources=INTEL)


@pytest.fixture
def tensors(cluster: Cluster) -> Obj:
    """A Model of a folder of safetensors at the hub."""
    tiny_mlx.write(cluster.files.root / "acme" / "tensors", written_for="pt")
    return cluster.model("tensors", source="hf://acme/tensors")


async def name_pod(cluster: Cluster, service: str) -> str:
    """Return the name of the service's only pod."""
    (name,) = [name for name in await cluster.names(PODS) if name.startswith(f"{service}-")]
    return name


async def pod_of(cluster: Cluster, service: str) -> Obj:
    """Return the spec of the service's only pod."""
    pods = await cluster.client.list(PODS, cluster.namespace, label_selector=f"inference.pomona.dev/service={service}")
    (spec,) = (pod["spec"] for pod in pods.items)
    pod_spec: Obj = spec
    return pod_spec


async def check_answers(cluster: Cluster, service: str) -> None:
    """Check that the service answers with its token, and 401 without."""
    assert (await cluster.ask(service)).text.startswith("Hello from a")
    assert (await cluster.ask(service, token="")).status == 401


async def check_traffic_is_counted(cluster: Cluster, service: str) -> None:
    """Check that a pod of the service tells its requests to the holder of the token, as the controller reads them."""
    (url,), token = await cluster.urls(service), await cluster.token(service)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}{METRICS_OF_PROXY}") as refused:
            assert refused.status == 401
        async with session.get(f"{url}{METRICS_OF_PROXY}", headers={"Authorization": f"Bearer {token}"}) as response:
            series = parse_series(await response.read(), TRAFFIC_SERIES)
    assert set(series) == set(TRAFFIC_SERIES)
    # That of the prober, and that of the test.
    assert series[REQUESTS] >= 2


async def check_row(cluster: Cluster, node: str) -> None:
    """Check what the status, and `kubectl get -o wide`, show of the service `chat` on the processor of a node."""
    status = (await cluster.get("chat")).status
    assert (status.accelerator, status.runtime, status.nodes) == ("cpu", "vllm", [node])
    assert status.memory.endswith(" GiB")
    heading, row = (await cluster.kubectl("get", "isvc", "chat", "--output=wide")).splitlines()
    for column, value in (("ACCELERATOR", "cpu"), ("ENGINE", "vllm"), ("CONTEXT", "2048"), ("MEMORY", status.memory)):
        assert row[heading.index(column) :].startswith(value), row


async def test_folder_of_safetensors_is_served_by_vllm(cluster: Cluster, tensors: Obj) -> None:
    await cluster.apply(tensors, cluster.service("chat", "cpu", **TENSORS))
    await cluster.ready("chat")
    await check_answers(cluster, "chat")
    assert (await cluster.ask("chat", token="wrong")).status == 401
    await check_traffic_is_counted(cluster, "chat")

    pod = await pod_of(cluster, "chat")
    await check_row(cluster, pod["nodeName"])
    (_restore, engine) = pod["initContainers"]
    assert engine["image"] == CPU_IMAGE
    assert not any("token" in str(part) for part in (engine["args"], engine.get("env"), engine["volumeMounts"]))


async def test_code_that_a_pod_has_compiled_is_there_for_the_next_one(cluster: Cluster, tensors: Obj) -> None:
    await cluster.apply(tensors, cluster.service("chat", "cpu", **TENSORS))
    await cluster.ready("chat")
    first = await name_pod(cluster, "chat")
    assert await cluster.kubectl("logs", first, "--container=vllm") == "compiled\n"

    async def is_kept() -> bool:
        return '"outcome":"kept"' in await cluster.kubectl("logs", first, "--container=proxy")

    await eventually(is_kept, 90)
    await cluster.kubectl("delete", "pod", first)
    await cluster.ready("chat")
    second = await name_pod(cluster, "chat")
    assert '"outcome":"restored"' in await cluster.kubectl("logs", second, "--container=compiled-code")
    assert await cluster.kubectl("logs", second, "--container=vllm") == "found compiled code\n"
    await check_answers(cluster, "chat")


@pytest.mark.usefixtures("nvidia_node")
async def test_sglang_and_tgi_serve_with_nvidia_devices(cluster: Cluster, tensors: Obj) -> None:
    hardware = {"accelerator": "nvidia", "memory": "32Gi", "products": ["NVIDIA-A100-SXM4-40GB"]}
    for engine in ("sglang", "tgi"):
        service = cluster.service(engine, "nvidia", **TENSORS, runtime=engine, hardware=hardware)
        await cluster.apply(tensors, service)
    await cluster.ready("sglang", "tgi")
    for engine in ("sglang", "tgi"):
        await check_answers(cluster, engine)
        status = (await cluster.get(engine)).status
        assert (status.accelerator, status.runtime, status.nodes) == ("nvidia", engine, ["gpu-2"])
        *_, container = (await pod_of(cluster, engine))["initContainers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.usefixtures("amd_node", "gaudi_node")
async def test_vllm_serves_with_amd_and_gaudi_devices(cluster: Cluster, tensors: Obj) -> None:
    amd = {"accelerator": "amd", "memory": "128Gi"}
    tensors["spec"]["cache"] = SHARED
    await cluster.apply(
        tensors,
        cluster.service("amd", "amd", **TENSORS, hardware=amd),
        cluster.service("gaudi", "intel-gaudi", **TENSORS, image=CPU_IMAGE),
    )
    await cluster.ready("amd", "gaudi")
    for service, node in (("amd", "gpu-3"), ("gaudi", "gpu-4")):
        await check_answers(cluster, service)
        status = (await cluster.get(service)).status
        assert (status.runtime, status.nodes) == ("vllm", [node])
    pod = await pod_of(cluster, "gaudi")
    (_restore, engine) = pod["initContainers"]
    assert engine["resources"]["limits"] == {"habana.ai/gaudi": "1", "hugepages-2Mi": "11876Mi"}
    pod = await pod_of(cluster, "amd")
    assert RUNTIMES["vllm"].pod is not None
    assert pod["initContainers"][1]["image"] == RUNTIMES["vllm"].pod.images["amd"]


@pytest.mark.usefixtures("amd_node", "intel_node")
async def test_llama_cpp_serves_with_amd_and_intel_devices(cluster: Cluster) -> None:
    model = cluster.model(cache=SHARED)
    await cluster.apply(model, *(cluster.service(name, name) for name in ("amd", "intel")))
    await cluster.ready("amd", "intel")
    for service, node in (("amd", "gpu-3"), ("intel", "gpu-5")):
        await check_answers(cluster, service)
        status = (await cluster.get(service)).status
        assert (status.accelerator, status.runtime, status.nodes) == (service, "llama.cpp", [node])


async def test_pairs_that_cannot_work_are_refused_with_what_works(cluster: Cluster, tensors: Obj) -> None:
    refused = {
        ("amd", "tgi"): "runtime tgi has no image for accelerator amd: set hardware.accelerator to nvidia",
        ("intel-gaudi", "vllm"): "accelerator intel-gaudi: set hardware.accelerator to amd or cpu or nvidia",
        ("metal", "vllm"): "runtime vllm runs in pods only, and accelerator metal is outside of the cluster",
    }
    services = [
        cluster.service(f"on-{accelerator}", accelerator, **TENSORS, runtime=engine) for accelerator, engine in refused
    ]
    await cluster.apply(tensors, *services)
    for (accelerator, _engine), words in refused.items():
        service = await cluster.wait_for_phase(f"on-{accelerator}", "Failed", "InvalidSpec")
        assert words in condition(service).message
    assert await cluster.names(DEPLOYMENTS) == []
