"""What must hold before a service can be served: a spec that makes sense, a usable Model, and a known size.

Each obstacle is told with the field, the value and the way out, because a person reads it in `kubectl get isvc`.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from controller.models import accelerator_of
from controller.parts import Part, Served, format_of, runtime_of
from controller.status import find
from controller.weights import is_outdated
from crds.inferenceservice import InferenceService, Resources
from crds.meta import Accelerator
from crds.model import Model
from crds.serving import Role
from devices.vendors import VENDORS
from fitness.memory import estimate, further_bytes, settings_of, way_out
from runtimes.registry import RUNTIMES
from runtimes.serving import Wanted, refusal

_PROJECTOR: Final = "clip"
"""The architecture that llama.cpp's projectors (mmproj files) state, whatever they project."""

_MOST_BYTES: Final = 1 << 58
"""Of one Model; what is more comes of a header that makes no sense, and fits no MetalProcess or pod."""

Phase = Literal["Pending", "Downloading", "Progressing", "Ready", "Degraded", "Failed", "Suspended"]


class Problem(NamedTuple):
    """Why a service does not serve as wanted."""

    reason: str
    message: str
    phase: Phase
    """What the service is in while nothing of it answers."""


def model_problem(service: InferenceService, model: Model | None, parts: Sequence[Part] = ()) -> Problem | None:
    """Return why a Model cannot be served by this service now, or None; `parts` have theirs."""
    accelerator = decided_accelerator(service, model)
    in_pods = accelerator is not None and VENDORS[accelerator].in_pods
    named = [("modelRef", service.spec.model_ref, model), *((part.field, part.name, part.model) for part in parts)]
    for field, name, found in named:
        if found is None or found.metadata.deletion_timestamp is not None:
            namespace = service.metadata.namespace
            message = f"Model {name} does not exist in namespace {namespace}: create it, or edit {field}"
            return Problem("ModelNotFound", message, "Pending")
        problem = _unusable(found, in_pods=in_pods)
        if problem is not None:
            return problem
    return None


def _unusable(model: Model, *, in_pods: bool) -> Problem | None:
    name = model.metadata.name
    ready = find(model.status.conditions, "Ready")
    if model.status.observed_generation != model.metadata.generation or ready is None:
        return Problem("ModelNotReady", f"Model {name} is being looked at", "Pending")
    cached = find(model.status.conditions, "Cached")
    if model.status.phase == "Failed":
        failed = ready if ready.status != "True" else cached
        # Weights that cannot be put on a volume are no obstacle for hosts, which fetch by themselves.
        if failed is ready or in_pods:
            message = failed.message if failed else "its conditions say why"
            return Problem("ModelFailed", f"Model {name}: {message}", "Failed")
    if ready.status != "True":
        return Problem("ModelNotReady", f"Model {name}: {ready.message}", "Pending")
    if in_pods and (cached is None or cached.status != "True"):
        message = cached.message if cached else "its weights are on their way to the volume"
        return Problem("Downloading", f"Model {name}: {message}", "Downloading")
    return None


def spec_problem(service: InferenceService, model: Model | None, parts: Sequence[Part] = ()) -> Problem | None:
    """Return what in the spec contradicts itself or the Models, or None."""
    accelerator = decided_accelerator(service, model)
    if accelerator is None:
        return None
    message = _contradiction(service, model, parts, accelerator)
    if message is None and model is not None:
        message = _inability(service, model, parts, accelerator)
    return Problem("InvalidSpec", message, "Failed") if message else None


def decided_accelerator(service: InferenceService, model: Model | None) -> Accelerator | None:
    """Return where the service runs, or None while only its Model could say."""
    return accelerator_of(service, model) if model else service.spec.hardware.accelerator


def _inability(service: InferenceService, model: Model, parts: Sequence[Part], accelerator: Accelerator) -> str | None:
    """Return what the runtime cannot do."""
    spec, runtime = service.spec, RUNTIMES[runtime_of(service, model)]
    roles = [part.role for part in parts]
    wanted = Wanted(
        format=format_of(model),
        accelerator=accelerator,
        in_pods=VENDORS[accelerator].in_pods,
        mode=spec.mode,
        parallel=spec.parallel,
        cache_types=(spec.cache_type_k, spec.cache_type_v),
        draft="draft" in roles,
        projector="projector" in roles,
        adapter_scales=[part.scale for part in parts if part.role == "adapter"],
        chat_template=spec.chat_template is not None,
        extra=spec.extra_args,
    )
    told = refusal(runtime, wanted)
    return told or next((message for part in parts if (message := _mismatch(part, model)) is not None), None)


def _mismatch(part: Part, model: Model) -> str | None:
    """Return why a part can never go with the model."""
    if part.model is None:
        return None
    if format_of(part.model) != format_of(model):
        return (
            f"{part.field} {part.name} has {part.model.spec.source}, which is of another format than "
            f"{model.spec.source} of Model {model.metadata.name}: name one of the same format"
        )
    architecture = part.model.status.gguf.architecture if part.model.status.gguf else ""
    if part.role == "projector" and architecture not in {"", _PROJECTOR}:
        return (
            f"{part.field} {part.name} is a model of architecture {architecture} and no projector: name a Model whose "
            "source is the mmproj file that belongs to the model"
        )
    return None


def _contradiction(
    service: InferenceService, model: Model | None, parts: Sequence[Part], accelerator: Accelerator
) -> str | None:
    spec, vendor = service.spec, VENDORS[accelerator]
    for each in (model, *(part.model for part in parts)):
        if vendor.in_pods and each is not None and each.spec.source.startswith(("file://", "ollama://")):
            return (
                f"accelerator {accelerator} runs pods, which cannot read {each.spec.source} of Model "
                f"{each.metadata.name}: set hardware.accelerator to metal, or give the Model an hf:// or https:// "
                "source"
            )
    if spec.resources.gpu is not None and vendor.device_resource is None:
        return f"resources.gpu is {spec.resources.gpu}, but accelerator {accelerator} has no devices: remove it"
    if vendor.in_pods:
        return None
    of_pods = {
        "image": spec.image is not None,
        "resources": spec.resources != Resources(),
        "nodeSelector": bool(spec.node_selector),
        "tolerations": bool(spec.tolerations),
    }
    stated = " and ".join(field for field, is_stated in of_pods.items() if is_stated)
    if stated:
        return f"accelerator {accelerator} runs on hosts outside the cluster, where {stated} cannot hold: remove it"
    return None


def memory_problem(service: InferenceService, served: Served) -> Problem | None:
    """Return why the memory of a replica is not known, or None."""
    if service.spec.resources.memory is not None:
        return None
    unknown = next((name for name, size_bytes in _sizes_bytes(service, served) if size_bytes is None), None)
    if unknown is None:
        return None
    models = (served.model, *(part.model for part in served.parts))
    if any(each.metadata.name == unknown and is_outdated(each) for each in models if each):
        return Problem("ModelNotReady", f"Model {unknown} is being looked at again", "Pending")
    message = f"the header of Model {unknown} does not tell how much memory it takes: set its spec.memoryBytes"
    return Problem("MemoryUnknown", message, "Failed")


def memory_bytes(service: InferenceService, served: Served) -> int | None:
    """Return the bytes that one replica takes, by the user's word or else by the artifacts' headers; None: unknown."""
    total_bytes = 0
    for _name, size_bytes in _sizes_bytes(service, served):
        if size_bytes is None:
            return None
        total_bytes += size_bytes
    return total_bytes


def is_memory_stated(served: Served) -> bool:
    """Whether the memory of a replica, or a part of it, is the user's word, and no estimate."""
    return any(
        each.spec.memory_bytes is not None for each in (served.model, *(part.model for part in served.parts)) if each
    )


def _sizes_bytes(service: InferenceService, served: Served) -> list[tuple[str, int | None]]:
    """Return what each Model of a service takes, by its name."""
    settings = settings_of(service.spec, runtime=runtime_of(service, served.model))

    def of(model: Model | None, role: Role | None) -> int | None:
        size_bytes = told(model, role)
        return None if size_bytes is None or size_bytes > _MOST_BYTES else size_bytes

    def told(model: Model | None, role: Role | None) -> int | None:
        if model is None:
            return None
        if model.spec.memory_bytes is not None:
            return model.spec.memory_bytes
        if role in {"projector", "adapter"}:
            return further_bytes(role, model.status.size_bytes)
        needed = estimate(model.status.layout, settings)
        # A draft shares the engine's process.
        return needed and needed.total_bytes - (needed.parts.engine_bytes if role == "draft" else 0)

    sizes = [(served.model.metadata.name, of(served.model, None))]
    return sizes + [(part.name, of(part.model, part.role)) for part in served.parts]


class Advice(NamedTuple):
    """What a person should know of a replica that fits nowhere; empty where only the user knows what it takes."""

    parts: str = ""
    """What it takes, by part."""
    way_out: str = "lower contextLength or parallel"


def memory_advice(service: InferenceService, served: Served, free_bytes: int) -> Advice:
    """Say what a replica is made of and what would fit into `free_bytes`."""
    if is_memory_stated(served):
        return Advice()
    draft = next((part.model for part in served.parts if part.role == "draft"), None)
    further = sum(
        further_bytes(part.role, part.model.status.size_bytes) or 0
        for part in served.parts
        if part.model and part.role in {"projector", "adapter"}
    )
    settings = settings_of(service.spec, runtime=runtime_of(service, served.model), further_bytes=further)
    layouts = (served.model.status.layout, draft.status.layout if draft else None)
    needed = estimate(layouts[0], settings, layouts[1])
    return Advice(needed.text(), way_out(layouts[0], settings, free_bytes, layouts[1])) if needed else Advice()
