"""The memory of one replica: stated by the user, or computed from the headers of its Models.

In a pod with devices, the memory of the container and that of each device are two figures. A part that is unknown makes
the whole unknown, and the replica is not placed.
"""

from typing import Final, NamedTuple

from controller.models.served import Served, runtime_of
from crds.inferenceservice import InferenceService
from crds.model import Model
from crds.serving import Role
from fitness.memory import (
    PodMemory,
    Workload,
    estimate,
    estimate_pod,
    further_bytes,
    is_understated,
    way_out,
)

_MOST_BYTES: Final = 1 << 58
"""Limit of one Model's size: a larger one comes from a corrupt header, and fits no MetalProcess or pod."""


class ModelMemory(NamedTuple):
    """The memory that one Model of a service takes."""

    name: str
    stated_bytes: int | None
    """Its spec.memoryBytes."""
    measured_bytes: int | None
    """Computed from its header."""
    least_bytes: int | None
    """The lower bound by the header or, if that has no layout, by the size of the file; None if neither is known."""

    @property
    def size_bytes(self) -> int | None:
        """The bytes to reserve; None if they are not known."""
        return self.measured_bytes if self.stated_bytes is None else self.stated_bytes

    @property
    def is_understated(self) -> bool:
        """True if less is stated than is known to be needed."""
        if not self.stated_bytes or not self.least_bytes:
            return False
        return is_understated(self.stated_bytes, self.least_bytes)


def memory_bytes(service: InferenceService, served: Served) -> int | None:
    """Return the bytes that one replica takes, stated by the user or computed from the headers; None: unknown."""
    total_bytes = 0
    for each in measure_memory(service, served):
        if each.size_bytes is None:
            return None
        total_bytes += each.size_bytes
    return total_bytes


def is_memory_stated(served: Served) -> bool:
    """Return whether a Model of the service states its memory in spec.memoryBytes, so that it is not estimated."""
    return any(
        each.spec.memory_bytes is not None
        for each in (served.model, *(companion.model for companion in served.companions))
        if each
    )


def measure_memory(service: InferenceService, served: Served) -> list[ModelMemory]:
    """Return the memory of each Model of a service."""
    runtime = runtime_of(service, served.model)

    def compute(model: Model, role: Role | None) -> int | None:
        if role in {"projector", "adapter"}:
            return further_bytes(role, model.status.size_bytes)
        needed = estimate(Workload(model.status.layout, runtime), service.spec)
        # A draft shares the engine's process.
        return needed and needed.total_bytes - (needed.parts.engine_bytes if role == "draft" else 0)

    def measure(name: str, model: Model | None, role: Role | None) -> ModelMemory:
        if model is None:
            return ModelMemory(name, None, None, None)
        measured = compute(model, role)
        if measured is not None and measured > _MOST_BYTES:
            measured = None
        stated, size_bytes = model.spec.memory_bytes, model.status.size_bytes
        stated = None if stated is not None and stated > _MOST_BYTES else stated
        return ModelMemory(name, stated, measured, size_bytes if measured is None else measured)

    return [
        measure(served.model.metadata.name, served.model, None),
        *(measure(companion.name, companion.model, companion.role) for companion in served.companions),
    ]


def describe_workload(service: InferenceService, served: Served) -> Workload:
    """Return the artifacts of a replica, as far as its memory depends on them."""
    draft = next((companion.model for companion in served.companions if companion.role == "draft"), None)
    further = sum(
        further_bytes(companion.role, companion.model.status.size_bytes) or 0
        for companion in served.companions
        if companion.model and companion.role in {"projector", "adapter"}
    )
    return Workload(
        served.model.status.layout,
        runtime_of(service, served.model),
        draft=draft.status.layout if draft else None,
        further_bytes=further,
    )


def estimate_pod_memory(service: InferenceService, served: Served, devices: int) -> PodMemory | None:
    """Return the memory of one replica in a pod; None if a Model states it for all, or its header lacks a part."""
    draft = next((companion.model for companion in served.companions if companion.role == "draft"), None)
    if is_memory_stated(served) or (draft is not None and draft.status.layout is None):
        return None
    return estimate_pod(describe_workload(service, served), service.spec, devices)


def container_bytes(service: InferenceService, served: Served, devices: int) -> int | None:
    """Return the memory that the container of a pod takes of its node; None: unknown."""
    found = estimate_pod_memory(service, served, devices) if devices else None
    return found.container_bytes if found is not None else memory_bytes(service, served)


class Advice(NamedTuple):
    """Advice about a replica that fits nowhere; the defaults apply if the user stated its memory."""

    memory_parts: str = ""
    """Its memory by part: weights, KV cache and so on."""
    way_out: str = "lower contextLength or parallel"


def memory_advice(service: InferenceService, served: Served, free_bytes: int) -> Advice:
    """Return the parts of a replica's memory, and the settings that would fit into `free_bytes`."""
    if is_memory_stated(served):
        return Advice()
    workload = describe_workload(service, served)
    needed = estimate(workload, service.spec)
    return Advice(needed.text(), way_out(workload, service.spec, free_bytes)) if needed else Advice()
