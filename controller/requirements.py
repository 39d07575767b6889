"""What must hold before a service can be served: a spec that makes sense, a usable Model, and a known size.

Each obstacle is told with the field, the value and the way out, because a person reads it in `kubectl get isvc`.
"""

from typing import Literal, NamedTuple

from controller.models import accelerator_of
from controller.status import find
from crds.inferenceservice import InferenceService, Resources
from crds.meta import Accelerator
from crds.model import Model
from devices.vendors import VENDORS
from fitness.memory import estimate, settings_of

Phase = Literal["Pending", "Downloading", "Progressing", "Ready", "Degraded", "Failed", "Suspended"]


class Problem(NamedTuple):
    """Why a service does not serve as wanted."""

    reason: str
    message: str
    phase: Phase
    """What the service is in while nothing of it answers."""


def model_problem(service: InferenceService, model: Model | None) -> Problem | None:
    """Return why the Model cannot be served by this service now, or None."""
    name = service.spec.model_ref
    if model is None or model.metadata.deletion_timestamp is not None:
        message = f"Model {name} does not exist in namespace {service.metadata.namespace}: create it, or edit modelRef"
        return Problem("ModelNotFound", message, "Pending")
    ready = find(model.status.conditions, "Ready")
    if model.status.observed_generation != model.metadata.generation or ready is None:
        return Problem("ModelNotReady", f"Model {name} is being looked at", "Pending")
    cached = find(model.status.conditions, "Cached")
    in_pods = VENDORS[accelerator_of(service, model)].in_pods
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


def spec_problem(service: InferenceService, model: Model | None) -> Problem | None:
    """Return what in the spec contradicts itself or the Model, or None."""
    accelerator = decided_accelerator(service, model)
    if accelerator is None:
        return None
    message = _contradiction(service, model, accelerator)
    return Problem("InvalidSpec", message, "Failed") if message else None


def decided_accelerator(service: InferenceService, model: Model | None) -> Accelerator | None:
    """Return where the service runs, or None while only its Model could say."""
    return accelerator_of(service, model) if model else service.spec.hardware.accelerator


def _contradiction(service: InferenceService, model: Model | None, accelerator: Accelerator) -> str | None:
    spec, vendor = service.spec, VENDORS[accelerator]
    if vendor.in_pods and model is not None and model.spec.source.startswith("file://"):
        return (
            f"accelerator {accelerator} runs pods, which cannot read {model.spec.source} of Model {spec.model_ref}: "
            "set hardware.accelerator to metal, or give the Model an hf:// or https:// source"
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


def memory_problem(service: InferenceService, model: Model) -> Problem | None:
    """Return why the memory of a replica is not known, or None."""
    if service.spec.resources.memory is not None or memory_bytes(service, model) is not None:
        return None
    message = (
        f"the header of Model {service.spec.model_ref} does not tell how much memory it takes: set its spec.memoryBytes"
    )
    return Problem("MemoryUnknown", message, "Failed")


def memory_bytes(service: InferenceService, model: Model) -> int | None:
    """Return the bytes that one replica takes, by the user's word or else by the artifact's header; None: not known."""
    if model.spec.memory_bytes is not None:
        return model.spec.memory_bytes
    needed = estimate(model.status.layout, settings_of(service.spec, runtime=service.spec.runtime or "llama.cpp"))
    return needed.total_bytes if needed else None
