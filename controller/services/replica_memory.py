"""The memory of one replica: stated by the user, or computed from the headers of its Models.

In a pod with devices, the memory of the container and that of each device are two figures, and what the user states
counts for the devices. A part that is unknown makes the whole unknown, and the replica is not placed.
"""

from typing import Final, NamedTuple

from controller.models.served import Served
from crds.inferenceservice import InferenceService
from crds.model import Model
from fitness.memory import PodMemory, Workload, estimate, estimate_pod, further_bytes, is_understated, way_out

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


class ReplicaMemory(NamedTuple):
    """The memory of one replica, measured once for all that is decided about it."""

    models: tuple[ModelMemory, ...] = ()
    """The main Model first, then its companions."""
    in_pod: PodMemory | None = None
    """Memory of container and devices; None if a header lacks a part of it, or nothing but the stated memory counts:
    without devices, and for an engine that Pomona does not know."""
    is_stated: bool = False
    """True if a Model states its memory."""
    devices: int = 0
    """Devices of a pod."""

    @property
    def total_bytes(self) -> int | None:
        """The bytes that a replica takes without devices; None if those of a Model are not known."""
        sizes = [model.size_bytes for model in self.models]
        return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)

    @property
    def stated_bytes(self) -> int | None:
        """The bytes that count in place of an estimate; None if no Model states its memory."""
        return self.total_bytes if self.is_stated else None

    @property
    def container_bytes(self) -> int | None:
        """The bytes that the container of a pod takes of its node; None: unknown."""
        if self.in_pod is not None and self.in_pod.device_bytes_each is not None:
            return self.in_pod.container_bytes
        return self.total_bytes

    @property
    def device_bytes_each(self) -> int | None:
        """The bytes that a pod takes of each of its devices; None: it has none, or they are unknown."""
        return self.in_pod.device_bytes_each if self.in_pod else None

    @property
    def cache_bytes(self) -> int | None:
        """The KV cache in the memory of the container; None: unknown."""
        return self.in_pod.cache_bytes if self.in_pod else None


def is_memory_stated(served: Served) -> bool:
    """Return whether a Model of the service states its memory in spec.memoryBytes, so that it is not estimated."""
    models = (served.model, *(companion.model for companion in served.companions))
    return any(model is not None and model.spec.stated_bytes is not None for model in models)


def measure_replica(service: InferenceService, served: Served, devices: int = 0) -> ReplicaMemory:
    """Return the memory of a replica, on a host or in a pod with this number of devices.

    It is estimated from the headers of the Models, or stated by the user in a Model. `in_pod`, the memory of container
    and devices, is None if a part of it is unknown, or if it is stated and there are no devices to which it applies.
    """
    workload = describe_workload(served)
    # By the headers; None: one lacks a part that counts.
    estimated = estimate(workload, service.spec)
    has_draft = any(companion.role == "draft" for companion in served.companions)
    draft_bytes = sum(estimated.draft) if estimated and estimated.draft else None
    # Further files (projectors and adapters) are a part of the estimate, and count for their own Models.
    main_bytes = sum(estimated.parts) - estimated.parts.further_bytes if estimated else None

    # 1. The memory of each Model.
    models = [_measure_model(served.model.metadata.name, served.model, main_bytes)]
    for companion in served.companions:
        model, role = companion.model, companion.role
        further = further_bytes(role, model.status.size_bytes) if model else None
        models.append(_measure_model(companion.name, model, draft_bytes if role == "draft" else further))
    memory = ReplicaMemory(tuple(models), is_stated=is_memory_stated(served), devices=devices)

    # 2. That of container and devices. Stated memory counts for devices only, and must be known of all Models.
    if memory.is_stated and (memory.stated_bytes is None or not devices):
        return memory
    # An estimate that lacks a part for the draft, a small model that proposes tokens, would be too low.
    if not memory.is_stated and has_draft and draft_bytes is None:
        return memory
    if not devices:
        return memory._replace(in_pod=PodMemory(estimated) if estimated else None)

    on_devices = workload._replace(stated_bytes=memory.stated_bytes)
    return memory._replace(in_pod=estimate_pod(on_devices, service.spec, devices))


def _measure_model(name: str, model: Model | None, measured_bytes: int | None) -> ModelMemory:
    """Return the memory of one Model; `measured_bytes` is what its header gives, None if that is not known.

    Sizes so large that only a corrupt header states them count as unknown. The least that it takes is the size by its
    header, else that of its file.
    """
    if model is None:
        return ModelMemory(name, stated_bytes=None, measured_bytes=None, least_bytes=None)

    if measured_bytes is not None and measured_bytes > _MOST_BYTES:
        measured_bytes = None
    stated = model.spec.stated_bytes
    if stated is not None and stated > _MOST_BYTES:
        stated = None

    least = model.status.size_bytes if measured_bytes is None else measured_bytes
    return ModelMemory(name, stated_bytes=stated, measured_bytes=measured_bytes, least_bytes=least)


def describe_workload(served: Served, stated_bytes: int | None = None) -> Workload:
    """Return what the memory of a replica is estimated from: the layout of its Model and draft, and further files.

    With `stated_bytes`, these count instead of the estimate.
    """
    # A draft is a small model that proposes tokens; at most one of the companions is one.
    draft = next((companion.model for companion in served.companions if companion.role == "draft"), None)
    further = sum(
        further_bytes(companion.role, companion.model.status.size_bytes) or 0
        for companion in served.companions
        if companion.model and companion.role in {"projector", "adapter"}
    )
    return Workload(
        served.model.status.layout,
        served.runtime,
        draft=draft.status.layout if draft else None,
        further_bytes=further,
        adapters_on_request=any(companion.request_name for companion in served.companions),
        stated_bytes=stated_bytes,
        quantization=header.quantization if (header := served.model.status.gguf) else "",
    )


class MemoryAdvice(NamedTuple):
    """Advice about a replica that fits nowhere; the defaults apply if the user stated its memory."""

    memory_parts: str = ""
    """Its memory by part: weights, KV cache and so on."""
    way_out: str = "lower contextLength or parallel"


def advise_memory(service: InferenceService, served: Served, free_bytes: int) -> MemoryAdvice:
    """Return the parts of a replica's memory, and the settings that would fit into `free_bytes`."""
    if is_memory_stated(served):
        return MemoryAdvice()
    workload = describe_workload(served)
    needed = estimate(workload, service.spec)
    return MemoryAdvice(needed.text(), way_out(workload, service.spec, free_bytes)) if needed else MemoryAdvice()
