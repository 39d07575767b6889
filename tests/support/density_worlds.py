"""Small clusters for tests of the density API."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from console.density_snapshot import SnapshotSource
from controller.placement.cluster_view import ClusterView
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, MODELS, NODE_FITNESSES, NODES, PODS
from tests.support import api_objects

GIB = 2**30
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
FRESH = "2026-11-21T11:59:30Z"
OLD = "2026-11-21T11:00:00Z"
GPU = "nvidia.com/gpu"


class Clock:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def build_view(objects: Sequence[tuple[Any, Obj]], clock: Clock | None = None) -> ClusterView:
    view = ClusterView(VENDORS, clock=clock or Clock(), read_time=lambda: NOW)
    for resource, obj in objects:
        view.store.put(resource, obj)
    return view


def build_source(objects: Sequence[tuple[Any, Obj]], clock: Clock | None = None) -> SnapshotSource:
    return SnapshotSource(build_view(objects, clock))


def gpu_node(
    name: str, devices: int = 1, product: str = "NVIDIA L4", memory: int = 24 * GIB, **more: Any
) -> list[tuple[Any, Obj]]:
    """Return a Node with devices, and its NodeFitness."""
    status = {
        "observedAt": more.get("observed_at", FRESH),
        "vendor": "nvidia",
        "deviceClass": f"nvidia-{product.split(' ', 1)[1].lower().replace(' ', '-')}x1",
        "devices": [
            {
                "id": f"GPU-{number}",
                "product": product,
                "memoryBytes": memory,
                "freeBytes": more.get("free", memory),
                "memoryBandwidthBytesPerSecond": more.get("bandwidth", 300 * 10**9),
            }
            for number in range(devices)
        ],
        "processor": "AMD EPYC",
        "cpuCores": 16,
        "architecture": "x86_64",
        "memoryBytes": 128 * GIB,
        "availableBytes": 100 * GIB,
        "memoryBandwidthBytesPerSecond": 50 * 10**9,
    }
    allocatable = {"cpu": "16", "memory": "120Gi", "pods": "110", GPU: str(devices)}
    return [
        (NODES, node(name, allocatable, **more.get("node", {}))),
        (NODE_FITNESSES, {"metadata": {"name": name, "uid": f"nf-{name}", "resourceVersion": "1"}, "status": status}),
    ]


def cpu_node(name: str, available: int = 20 * GIB, **more: Any) -> list[tuple[Any, Obj]]:
    """Return a Node without devices, and its NodeFitness."""
    status = {
        "observedAt": more.get("observed_at", FRESH),
        "vendor": "cpu",
        "deviceClass": "cpu-amd-epycx2",
        "processor": "AMD EPYC",
        "cpuCores": 2,
        "architecture": "x86_64",
        "memoryBytes": 24 * GIB,
        "availableBytes": available,
        "memoryBandwidthBytesPerSecond": 40 * 10**9,
    }
    return [
        (NODES, node(name, {"cpu": "2", "memory": "23Gi", "pods": "110"}, **more.get("node", {}))),
        (NODE_FITNESSES, {"metadata": {"name": name, "uid": f"nf-{name}", "resourceVersion": "1"}, "status": status}),
    ]


def node(name: str, allocatable: dict[str, str], *, ready: str = "True", unschedulable: bool = False) -> Obj:
    return {
        "metadata": {"name": name, "uid": f"node-{name}", "resourceVersion": "1", "labels": {}},
        "spec": {"unschedulable": unschedulable},
        "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": ready}]},
    }


def pod(name: str, on: str, requests: dict[str, str], service: str = "", namespace: str = "team") -> tuple[Any, Obj]:
    """Return a pod of ours that is bound."""
    labels = {LABEL_MANAGED_BY: MANAGED_BY} | ({LABEL_SERVICE: service} if service else {})
    return PODS, {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"pod-{namespace}-{name}",
            "resourceVersion": "1",
            "labels": labels,
        },
        "spec": {"nodeName": on, "containers": [{"name": "engine", "resources": {"requests": requests}}]},
    }


def host(name: str, available: int = 60 * GIB, ready: str = "True", **status: Any) -> tuple[Any, Obj]:
    """Return a MetalHost."""
    return METAL_HOSTS, {
        "metadata": {"name": name, "uid": f"mh-{name}", "resourceVersion": "1"},
        "spec": {},
        "status": {
            "chip": "Apple M4 Max",
            "gpuCores": 40,
            "memoryBytes": 64 * GIB,
            "budgetBytes": 60 * GIB,
            "availableBytes": available,
            "memoryBandwidthBytesPerSecond": 546 * 10**9,
            "runtimes": ["llama.cpp", "mlx-lm"],
            "conditions": [api_objects.condition("Ready", ready)],
            **status,
        },
    }


def process(name: str, on: str, memory: int, service: str = "chat", namespace: str = "team") -> tuple[Any, Obj]:
    """Return a MetalProcess that is bound."""
    return METAL_PROCESSES, {
        "metadata": {"name": name, "namespace": namespace, "uid": f"mp-{name}", "resourceVersion": "1"},
        "spec": {
            "serviceName": service,
            "modelName": "tiny",
            "runtime": "llama.cpp",
            "artifact": {"source": "hf://a/b/c.gguf"},
            "memoryBytes": memory,
            "hostName": on,
            "tokenSecret": "chat-token",
        },
    }


def model(name: str, namespace: str = "team", *, version: str = "1", **spec: Any) -> tuple[Any, Obj]:
    """Return a Model of 8 billion parameters in a GGUF file, as it was inspected."""
    layout = {
        "tensorBytes": 5027783488,
        "vocabularySize": 151936,
        "embeddingSize": 4096,
        "attentionSize": 4096,
        "headCount": 32,
        "feedForwardSize": 12288,
        "layers": [{"count": 36, "keyElements": 1024, "valueElements": 1024}],
    }
    return MODELS, {
        "metadata": {"name": name, "namespace": namespace, "uid": f"m-{namespace}-{name}", "resourceVersion": version},
        "spec": {"source": f"hf://org/{name}-GGUF/{name}-Q4_K_M.gguf", **spec},
        "status": {
            "phase": "Ready",
            "format": "gguf",
            "layout": layout,
            "totalParameters": 8_190_735_360,
            "gguf": {"quantization": "Q4_K_M", "modelName": name.title()},
        },
    }


def service(name: str, model_ref: str, namespace: str = "team", **status: Any) -> tuple[Any, Obj]:
    """Return an InferenceService."""
    return INFERENCE_SERVICES, {
        "metadata": {"name": name, "namespace": namespace, "uid": f"s-{namespace}-{name}", "resourceVersion": "1"},
        "spec": {"modelRef": model_ref},
        "status": {"phase": "Ready", "runtime": "llama.cpp", **status},
    }
