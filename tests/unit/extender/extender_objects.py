"""Nodes, pods, services and measurements for the tests of the extender."""

import json
from typing import Any

import msgspec

from crds.inferenceservice import InferenceService
from crds.model import Model
from crds.nodefitness import NodeDevice, NodeFitnessStatus
from devices.vendors import VENDORS
from extender.node_facts import ScoringFacts, read_node
from extender.speed_table import SpeedTable
from extender.subject import ScoringSubject, ServedModel
from extender.wire import PodFacts
from fitness.performance import MeasuredPerformance
from fitness.performance_store import build_config_map, encode_record
from kube.client import Obj
from tests.support.api_objects import model, service

GIB = 2**30
HASH = "0123456789abcdef"
L4 = "nvidia-l4x1"
H100 = "nvidia-h100-80gb-hbm3x1"
L4_LABELS = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"}
H100_LABELS = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
MI300_LABELS = {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"}
SHARED = {"nvidia.com/gpu.sharing-strategy": "time-slicing", "nvidia.com/gpu.replicas": "4"}

SERVED = ServedModel(msgspec.convert(model(), Model), msgspec.convert(service(), InferenceService), "llama.cpp")


def fitness(product: str = "NVIDIA L4", device_class: str = L4, **device: Any) -> NodeFitnessStatus:
    """Return what the agent of a node with two devices reports."""
    facts = {"memory_bytes": 23034 << 20, **device}
    return NodeFitnessStatus(
        observed_at="2026-11-26T12:00:00Z",
        vendor="nvidia",
        device_class=device_class,
        devices=[NodeDevice(id=f"GPU-{number}", product=product, **facts) for number in (0, 1)],
        processor="AMD EPYC 7763 64-Core Processor",
        cpu_cores=8,
        memory_bytes=64 * GIB,
    )


def facts(labels: dict[str, str], annotations: dict[str, str] | None = None, **device: Any) -> ScoringFacts:
    """Return the facts of a node; `device` has the facts of each device, as its agent reports them."""
    return read_node(labels, annotations or {}, fitness(**device) if device else None, VENDORS).facts


def pod(labels: dict[str, str] | None = None, **devices: int) -> PodFacts:
    """Return a pod that requests devices: `nvidia=2`."""
    resources = {VENDORS[name.replace("_", "-")].resource or "": number for name, number in devices.items()}
    return PodFacts("team", labels or {}, resources)


def subject(**more: Any) -> ScoringSubject:
    """Return a service with one device of NVIDIA."""
    defaults: dict[str, Any] = {"accelerator": "nvidia", "device_count": 1, "is_served": True}
    return ScoringSubject(HASH, "team", **{**defaults, **more})


def measured(model_hash: str = HASH, /, **speeds: float) -> Obj:
    """Return the ConfigMap with tokens a second by device class, whose dashes are underscores."""
    data = {
        key.replace("_", "-"): encode_record(MeasuredPerformance(tokens_per_second=speed))
        for key, speed in speeds.items()
    }
    return build_config_map(model_hash, data)


def measure(table: SpeedTable, config_map: Obj) -> None:
    """Put measurements into a table."""
    table.measured.update(config_map)
    table.forget_speeds()


def args_body(labels: dict[str, str], names: list[str], namespace: str = "team", gpus: int = 1) -> bytes:
    """Return a request for a pod, as the scheduler sends it."""
    container = {"name": "engine", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    sent = {"metadata": {"name": "p", "namespace": namespace, "labels": labels}, "spec": {"containers": [container]}}
    return json.dumps({"Pod": sent, "Nodes": None, "NodeNames": names}).encode()
