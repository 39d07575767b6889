"""API objects in the form in which the API server sends them, for tests of pure decisions."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from controller.placement.nodes import declare_nodes
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.partial_objects import declare_partial_objects
from controller.reconcile.plan import Plan
from crds.inferenceservice import InferenceService
from crds.meta import (
    API_VERSION,
    HOSTS_NAMESPACE,
    LABEL_SERVICE,
    LABEL_SERVICE_NAME,
    LABEL_SLICE_MANAGED_BY,
    PROCESS_FINALIZER,
    SLICE_MANAGED_BY,
    slice_name,
)
from crds.metalhost import MetalHost
from crds.metalprocess import HostedProcess, MetalProcess
from crds.model import Model
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import Resource
from kube.store import Store


def secret(namespace: str, name: str, **more: Any) -> Obj:
    return {"metadata": {"namespace": namespace, "name": name}, "data": {"a": "Zm9v"}, **more}


NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
GIB = 2**30
NAMESPACE = "team"
ADDRESS = "10.77.0.100"
"""Address of hosts and pods, and of the endpoints of slices."""


def condition(kind: str, status: str, reason: str = "Because", message: str = "so it is", generation: int = 1) -> Obj:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": "2026-11-21T11:00:00Z",
    }


def service(name: str = "chat", *, generation: int = 1, status: Obj | None = None, **spec: Any) -> Obj:
    return {
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": f"uid-{name}",
            "generation": generation,
            "resourceVersion": "1",
        },
        "spec": {"modelRef": "tiny", **spec},
        "status": status or {},
    }


def model(*, cached: bool = True, status: Obj | None = None, **spec: Any) -> Obj:
    defaults = {
        "observedGeneration": 1,
        "phase": "Ready",
        "revision": "r1",
        "sha256": "a" * 64,
        "file": "tiny.gguf",
        "sizeBytes": GIB,
        "gguf": {"architecture": "llama"},
        "layout": {
            "tensorBytes": GIB,
            "vocabularySize": 32_000,
            "embeddingSize": 1024,
            "attentionSize": 1024,
            "headCount": 8,
            "feedForwardSize": 4096,
            "layers": [{"count": 1, "keyElements": 256, "valueElements": 256}],
        },
        "conditions": [condition("Ready", "True"), condition("Cached", str(cached), "Fetching")],
    }
    return {
        "metadata": {
            "name": "tiny",
            "namespace": NAMESPACE,
            "uid": "uid-tiny",
            "generation": 1,
            "resourceVersion": "1",
        },
        "spec": {"source": "http://models.example/tiny.gguf", **spec},
        "status": defaults | (status or {}),
    }


def library_model() -> Obj:
    """Return a Model of Ollama's library, which the engine of each pod pulls by itself."""
    tiny = model(source="ollama://tiny:1b", memoryBytes=GIB)
    ready = next(reported for reported in tiny["status"]["conditions"] if reported["type"] == "Ready")
    return tiny | {"status": {"observedGeneration": 1, "phase": "Ready", "conditions": [ready]}}


def host(name: str = "studio-1", free_bytes: int | None = 64 * GIB, *, ready: str = "True", **status: Any) -> Obj:
    reason = "LeaseRenewed" if ready == "True" else "LeaseExpired"
    defaults: Obj = {
        "address": ADDRESS,
        "runtimes": ["llama.cpp"],
        "conditions": [condition("Ready", ready, reason)],
        "processes": [],
    }
    if free_bytes is not None:
        defaults["availableBytes"] = free_bytes
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "1"},
        "status": defaults | status,
    }


_METADATA = frozenset({"deletionTimestamp", "creationTimestamp", "namespace", "finalizers", "annotations"})


def pool(name: str, accelerator: str = "nvidia", *, version: int = 1, status: Obj | None = None, **spec: Any) -> Obj:
    """Return an AcceleratorPool; a change of its spec has another `version`, which is also its generation."""
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version), "generation": version}
    return {"metadata": metadata, "spec": {"accelerator": accelerator, **spec}, "status": status or {}}


def process(name: str, *, host: str | None = None, phase: str = "Pending", gib: int = 1, **fields: Any) -> Obj:
    """Return a MetalProcess of service `chat`; `fields` are put into its metadata, status or spec, by name."""
    obj: Obj = {
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": f"uid-{name}",
            "resourceVersion": "7",
            "generation": 1,
            "creationTimestamp": "2026-11-21T11:59:00Z",
            "labels": {LABEL_SERVICE: "chat"},
            "finalizers": [PROCESS_FINALIZER],
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": "InferenceService",
                    "name": "chat",
                    "uid": "uid-chat",
                    "controller": True,
                }
            ],
        },
        "spec": {
            "serviceName": "chat",
            "modelName": "tiny",
            "runtime": "llama.cpp",
            "artifact": {"source": "http://models.example/tiny.gguf"},
            "memoryBytes": gib * GIB,
            "tokenSecret": "chat-token",
        },
        "status": {"phase": phase},
    }
    if host:
        obj["spec"]["hostName"] = host
    for field, value in fields.items():
        part = "metadata" if field in _METADATA else "spec"
        obj["status" if field in {"reason", "message", "progress", "conditions"} else part][field] = value
    return obj


def slice_of(service: str, host: str, address: str = ADDRESS, *, ready: bool = True) -> Obj:
    return {
        "metadata": {
            "name": slice_name(service, host),
            "namespace": NAMESPACE,
            "uid": f"uid-{slice_name(service, host)}",
            "resourceVersion": "1",
            "labels": {
                LABEL_SERVICE_NAME: service,
                LABEL_SLICE_MANAGED_BY: SLICE_MANAGED_BY,
            },
        },
        "ports": [{"name": "http", "port": 18000}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": ready}}],
    }


def lease(host: str, renewed: str, duration_seconds: int = 40) -> Obj:
    return {
        "metadata": {"name": host, "namespace": HOSTS_NAMESPACE},
        "spec": {"renewTime": renewed, "leaseDurationSeconds": duration_seconds},
    }


def as_service(obj: Obj) -> InferenceService:
    return msgspec.convert(obj, InferenceService)


def as_model(obj: Obj) -> Model:
    return msgspec.convert(obj, Model)


def as_host(obj: Obj) -> MetalHost:
    return msgspec.convert(obj, MetalHost)


def as_process(obj: Obj) -> MetalProcess:
    return msgspec.convert(obj, MetalProcess)


def as_hosted(*objects: Obj) -> list[HostedProcess]:
    return msgspec.convert(objects, list[HostedProcess])


def store(*objects: tuple[Resource, Obj]) -> Store:
    """Return a store with the controller's indexes and what it keeps of these objects."""
    kept = Store()
    declare_indexes(kept)
    declare_partial_objects(kept)
    declare_nodes(kept, VENDORS)
    for resource, obj in objects:
        kept.put(resource, obj)
    return kept


def planned_condition(plan: Plan, kind: str) -> Obj:
    """Return the condition of this type from the status that the plan writes."""
    assert plan.status is not None
    return next(planned for planned in plan.status["conditions"] if planned["type"] == kind)
