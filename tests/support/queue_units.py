"""Cells and units for tests of the queue."""

from collections.abc import Mapping
from typing import Any

from controller.placement.units import (
    CPU,
    MEMORY,
    PODS,
    Amounts,
    Cell,
    HostRequirement,
    NodeRequirement,
    Unit,
    UnitKey,
)
from kube.resources import ObjectKey

GPU = "nvidia.com/gpu"


def gpus(count: int, memory: int = 1, cpu: int = 1) -> Amounts:
    """Return the need of a pod."""
    return {GPU: count, MEMORY: memory, CPU: cpu, PODS: 1}


def node(name: str, devices: int = 8, *, labels: Mapping[str, str] | None = None, **changes: Any) -> Cell:
    """Return an empty node."""
    total: Amounts = {GPU: devices, MEMORY: 64, CPU: 64, PODS: 16}
    built: dict[str, Any] = {
        "name": name,
        "kind": "node",
        "pool": "nvidia",
        "total": total,
        "free": changes.get("total", total),
        "node": {"metadata": {"name": name, "labels": dict(labels or {})}, "spec": {}},
    }
    return Cell(**{**built, **changes})


def host(name: str, memory: int = 64, **changes: Any) -> Cell:
    """Return an empty host."""
    built: dict[str, Any] = {
        "name": name,
        "kind": "host",
        "pool": "metal",
        "total": {MEMORY: memory},
        "free": {MEMORY: memory},
        "runtimes": frozenset({"llama.cpp"}),
    }
    return Cell(**{**built, **changes})


def pod(uid: str, need: int | Amounts = 1, at: float = 0.0, **changes: Any) -> Unit:
    """Return a pod that waits; with `cells`, one that runs there."""
    parts = (gpus(need) if isinstance(need, int) else need,)
    namespace = changes.pop("namespace", "team")
    selector = changes.pop("selector", {})
    built: dict[str, Any] = {
        "key": UnitKey("pod", namespace, uid),
        "uid": uid,
        "service": ObjectKey(namespace, changes.pop("service", uid)),
        "enqueued_at": at,
        "parts": parts,
        "pools": ("nvidia",),
        "requirement": NodeRequirement(str(sorted(selector.items())), {"nodeSelector": selector}),
    }
    if changes.get("cells"):
        built["state"] = "running"
    return Unit(**{**built, **changes})


def process(uid: str, memory: int = 8, at: float = 0.0, **changes: Any) -> Unit:
    """Return a MetalProcess that waits; with `cells`, one that runs there."""
    namespace = changes.pop("namespace", "team")
    built: dict[str, Any] = {
        "key": UnitKey("process", namespace, uid),
        "parts": ({MEMORY: memory},),
        "pools": ("metal",),
        "requirement": HostRequirement(changes.pop("runtime", "llama.cpp"), namespace),
    }
    return pod(uid, at=at, namespace=namespace, **{**built, **changes})
