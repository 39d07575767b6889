"""Preconditions of serving: a spec without contradictions, usable Models, and a known size in memory.

Each message names the field, the value and the way out, because a person reads it in `kubectl get isvc`.
"""

import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from artifacts.source import scheme_of
from controller.models.served import Companion, Served, accelerator_of, format_of, is_split, runtime_of
from controller.reconcile.conditions import find
from controller.services.pods.device_claims import ACCEPTED_SHARE
from controller.services.pods.devices import NO_DEVICES, DeviceRequest, find_hardware_problem, request_devices
from controller.services.replica_memory import ModelMemory, ReplicaMemory, describe_workload, measure_replica
from crds.inferenceservice import InferenceService
from crds.meta import Accelerator
from crds.model import Model
from crds.pods import PodOptions, Resources, ServiceHardware
from crds.quantity import quantity_bytes
from crds.serving import RuntimeName
from crds.size import GIB, MIB, size_text
from crds.text import offer_names
from crds.weights_header import GGUF
from devices.products import find_product
from devices.vendors import VENDORS, Vendor, Vendors
from fitness.memory import refuse_device_count, way_out
from runtimes.quantization import refuse_quantization, warn_quantization
from runtimes.registry import RUNTIMES
from runtimes.runtime import RuntimeDemand
from runtimes.runtime_choice import refuse_demand

NO_DEVICE_CLAIMS: Final = "NoDeviceClaims"
"""Reason of a service that selects devices in a cluster in which none can be claimed."""
DEVICE_TOO_SMALL: Final = "DeviceTooSmall"
"""Reason of a service that no device of the cluster can hold; another node may change that."""

Phase = Literal["Pending", "Downloading", "WaitingForGPU", "Progressing", "Ready", "Degraded", "Failed", "Suspended"]


class ServiceProblem(NamedTuple):
    """A reason why a service does not serve as wanted."""

    reason: str
    message: str
    phase: Phase
    """The phase of the service while none of its replicas answers."""


class CheckedService(NamedTuple):
    """The outcome of all preconditions of one service."""

    served: Served | None
    """The Models to serve; None if `problem` prevents it."""
    problem: ServiceProblem | None
    """The first problem: of the spec, of a Model, or of the memory."""
    model_problem: ServiceProblem | None
    """The problem of a Model, which a problem of the spec may hide."""
    memory: ReplicaMemory = ReplicaMemory()
    """The memory of a replica of `served`."""

    def refuse(self, problem: ServiceProblem) -> "CheckedService":
        """Return the outcome with a problem that was found elsewhere."""
        return CheckedService(served=None, problem=problem, model_problem=self.model_problem)


def check_service(
    service: InferenceService,
    model: Model | None,
    companions: tuple[Companion, ...],
    vendors: Vendors = VENDORS,
    *,
    largest_device_bytes: int | None = None,
    has_claims: bool = True,
) -> CheckedService:
    """Check whether a service may run, and return the Models to serve or the first problem, with the memory it needs.

    The order is: the accelerator, the spec, claims of devices, the Models, the memory. A machine without a cluster
    checks alike.

    Args:
        service: the service.
        model: its Model; None if it does not exist.
        companions: its companions.
        vendors: the table of accelerators.
        largest_device_bytes: the memory of the largest device of its accelerator in the cluster; None: unknown.
        has_claims: devices can be claimed in the cluster.
    """
    # 1. The accelerator must exist.
    accelerator = decided_accelerator(service, model)
    vendor = vendors.get(accelerator) if accelerator is not None else None
    if accelerator is not None and vendor is None:
        message = f"hardware.accelerator {accelerator} does not exist: {offer_names(accelerator, vendors)}"
        problem = ServiceProblem("InvalidSpec", message, "Failed")
        return CheckedService(served=None, problem=problem, model_problem=None)

    # 2. The first problem of the spec, of claims and of the Models.
    model_problem = _find_model_problem(service, model, companions, vendor)
    spec_problem = _find_spec_problem(service, model, companions, vendors)
    first_problem = spec_problem or _refuse_claims(service, has_claims=has_claims) or model_problem
    if first_problem is not None or model is None:
        return CheckedService(served=None, problem=first_problem, model_problem=model_problem)

    # 3. The memory of a replica, which must be known and fit into a device.
    served = Served(model, runtime_of(service, model, vendors), companions)
    devices = request_devices(service, vendor) if vendor is not None and vendor.in_pods else NO_DEVICES
    memory = measure_replica(service, served, devices.number)
    memory_problem = _find_memory_problem(service, served, memory) or _find_device_problem(
        service, served, vendor, memory, devices, largest_device_bytes=largest_device_bytes
    )

    accepted = served if memory_problem is None else None
    return CheckedService(served=accepted, problem=memory_problem, model_problem=model_problem, memory=memory)


def _refuse_claims(service: InferenceService, *, has_claims: bool) -> ServiceProblem | None:
    """Return why a service may not run where devices cannot be claimed; None if it claims none."""
    if has_claims or service.spec.hardware.device_selector is None:
        return None
    message = (
        "hardware.deviceSelector claims devices by the API resource.k8s.io/v1, which the API server does not serve, or "
        "not to the controller: start kube-apiserver with --runtime-config=resource.k8s.io/v1=true and apply Pomona's "
        "roles again, or use hardware.products and hardware.memory in place of the selector"
    )
    return ServiceProblem(NO_DEVICE_CLAIMS, message, "Failed")


def _find_model_problem(
    service: InferenceService, model: Model | None, companions: Sequence[Companion], vendor: Vendor | None
) -> ServiceProblem | None:
    """Return why this service cannot serve its Model or its companions' Models now, or None."""
    in_pods = vendor is not None and vendor.in_pods
    # All Models that the service names: the field, the name there, and the Model; None: it does not exist.
    named = [
        ("modelRef", service.spec.model_ref, model),
        *((companion.field, companion.name, companion.model) for companion in companions),
    ]

    for field, name, candidate in named:
        if candidate is None or candidate.metadata.deletion_timestamp is not None:
            namespace = service.metadata.namespace
            message = f"Model {name} does not exist in namespace {namespace}: create it, or edit spec.{field}"
            return ServiceProblem("ModelNotFound", message, "Pending")

        problem = _refuse_model(candidate, in_pods=in_pods)
        if problem is not None:
            return problem
    return None


def _refuse_model(model: Model, *, in_pods: bool) -> ServiceProblem | None:
    """Return why a Model cannot be served yet, or ever, or None.

    It must be inspected (condition Ready), and for pods its weights must be on a volume (condition Cached), unless
    Ollama pulls them. Hosts fetch them by themselves.
    """
    name = model.metadata.name

    # 1. It must be inspected, by its latest spec.
    ready = find(model.status.conditions, "Ready")
    if model.status.observed_generation != model.metadata.generation or ready is None:
        return ServiceProblem("ModelNotReady", f"waiting for Model {name} to be inspected", "Pending")

    # 2. It may have failed for good.
    cached = find(model.status.conditions, "Cached")
    if model.status.phase == "Failed":
        # The condition that says why: Ready is about the inspection, Cached about the weights.
        failed = ready if ready.status != "True" else cached
        # Weights that cannot be put on a volume are no obstacle for hosts, which fetch by themselves.
        if failed is ready or in_pods:
            message = failed.message if failed else f"see its conditions: kubectl describe model {name}"
            return ServiceProblem("ModelFailed", f"Model {name}: {message}", "Failed")
    if ready.status != "True":
        return ServiceProblem("ModelNotReady", f"Model {name}: {ready.message}", "Pending")

    # 3. For pods, its weights must be on a volume, or on a node if it is copied to nodes.
    # A model of Ollama's library is on no volume: the Ollama of each pod pulls it.
    has_weights = cached is not None and cached.status == "True"
    if model.spec.cache.scope == "node":
        has_weights = has_weights and bool(model.status.copies)
    if in_pods and format_of(model) != "ollama" and not has_weights:
        message = cached.message if cached else "waiting for its weights to be fetched to the volume"
        return ServiceProblem("Downloading", f"Model {name}: {message}", "Downloading")
    return None


def _find_spec_problem(
    service: InferenceService, model: Model | None, companions: Sequence[Companion], vendors: Vendors
) -> ServiceProblem | None:
    """Return the contradiction in the spec, or between the spec and the Models or the runtime, or None."""
    if service.spec.scaling is not None:  # a machine without a cluster, which follows it, decides without it
        refusal = "spec.scaling is not followed by a cluster yet, only by `pomona up`: remove it, and set spec.replicas"
        return ServiceProblem("ScalingNotSupported", refusal, "Failed")
    accelerator = decided_accelerator(service, model)
    if accelerator is None:
        return None
    vendor = vendors[accelerator]
    message = find_hardware_problem(service, accelerator, vendor)
    message = message or _find_contradiction(service, model, companions, vendor)
    if message is None and model is not None:
        message = _find_unmet_demand(service, model, companions, vendors)
    return ServiceProblem("InvalidSpec", message, "Failed") if message else None


def decided_accelerator(service: InferenceService, model: Model | None) -> Accelerator | None:
    """Return the accelerator of the service, or None while it depends on a Model that does not exist."""
    return accelerator_of(service, model) if model else service.spec.hardware.accelerator


def _find_unmet_demand(
    service: InferenceService, model: Model, companions: Sequence[Companion], vendors: Vendors
) -> str | None:
    """Return the demand of the service that its runtime, the engine, cannot meet, or None.

    Checked are the options and formats that it knows, the quantization in pods, and the format of each companion.
    """
    spec, runtime = service.spec, RUNTIMES.get(runtime_of(service, model, vendors))
    if runtime is None:
        return f"runtime {spec.runtime} does not exist: {offer_names(str(spec.runtime), RUNTIMES)}, or auto"

    # All that the engine may refuse.
    accelerator, roles = accelerator_of(service, model), [companion.role for companion in companions]
    demand = RuntimeDemand(
        format=format_of(model),
        accelerator=accelerator,
        in_pods=vendors[accelerator].in_pods,
        vendors=vendors,
        has_image=spec.image is not None,
        container=spec.container,
        is_split=is_split(model),
        options=spec,
        draft="draft" in roles,
        projector="projector" in roles,
        adapter_scales=[companion.scale for companion in companions if companion.role == "adapter"],
        adapters_on_request=any(companion.request_name for companion in companions),
        header=model.status.gguf or GGUF(),
        companion_headers=[
            (companion.role, companion.model.status.gguf)
            for companion in companions
            if companion.model is not None and companion.model.status.gguf is not None
        ],
    )

    # The first refusal: of the engine, of the quantization, or of the format of a companion.
    refusal = refuse_demand(runtime, demand)
    if refusal is None and demand.in_pods:
        refusal = _refuse_weights(service, model, runtime.name)
    format_refusals = (_refuse_format(companion, model) for companion in companions)
    return refusal or next((message for message in format_refusals if message is not None), None)


def _refuse_weights(service: InferenceService, model: Model, engine: RuntimeName) -> str | None:
    """Return why the quantization of the weights cannot be served by this engine on these devices, or None."""
    quantization = model.status.gguf.quantization if model.status.gguf else ""
    accelerator = accelerator_of(service, model)
    # Any of the products may be taken, so that each must do; without a list any product of the vendor may.
    products = service.spec.hardware.products or [""]
    reasons = (refuse_quantization(quantization, engine, accelerator, product) for product in products)
    return next((reason for reason in reasons if reason is not None), None)


def list_remarks(
    service: InferenceService,
    model: Model | None,
    vendors: Vendors,
    memory: ReplicaMemory,
    *,
    smallest_device_bytes: int | None,
) -> tuple[str, ...]:
    """Return what users should know of an engine and weights in pods, such as an emulated quantization; none on hosts.

    Args:
        service: the service.
        model: its Model.
        vendors: the table of accelerators.
        memory: the memory of a replica.
        smallest_device_bytes: memory of the smallest device of the cluster that a replica may get.
    """
    vendor = vendors.get(accelerator_of(service, model)) if model is not None else None
    if model is None or vendor is None or not vendor.in_pods:
        return ()
    # An engine that is unknown, or never in pods, has none.
    if (runtime := RUNTIMES.get(runtime_of(service, model, vendors))) is None or runtime.pod is None:
        return ()

    # The remarks; an empty one says that there is none.
    quantization = model.status.gguf.quantization if model.status.gguf else ""
    accelerator = accelerator_of(service, model)
    products = service.spec.hardware.products or [""]
    emulated = (warn_quantization(quantization, runtime.name, accelerator, product) for product in products)
    slow = runtime.pod.slow_on_processor if not vendor.has_devices else None
    too_small = _warn_of_small_devices(service, accelerator, vendor, memory, smallest_device_bytes)
    return tuple(dict.fromkeys(remark for remark in (runtime.pod.warning, slow, *emulated, too_small) if remark))


def _warn_of_small_devices(
    service: InferenceService,
    accelerator: Accelerator,
    vendor: Vendor,
    memory: ReplicaMemory,
    smallest_bytes: int | None,
) -> str | None:
    """Return a remark if the scheduler may choose a device that is too small, since no field holds it off."""
    hardware, needed = service.spec.hardware, memory.device_bytes_each
    # A field chooses the devices already, or they are parts of devices, or claimed.
    if hardware.memory or hardware.products or request_devices(service, vendor).resource != vendor.resource:
        return None

    # Without memory_label, nodes do not state the memory, so hardware.memory could not be set.
    if needed is None or smallest_bytes is None or needed <= smallest_bytes or vendor.memory_label is None:
        return None

    # A device may report 3 % less than its nominal memory (ACCEPTED_SHARE).
    least_gib = math.ceil(needed / float(ACCEPTED_SHARE) / GIB)
    return (
        f"a replica needs {size_text(needed)} of each device, and the smallest {accelerator} device of the cluster has "
        f"{size_text(smallest_bytes)}: set hardware.memory to {least_gib}Gi, so that it gets a larger one"
    )


def _refuse_format(companion: Companion, model: Model) -> str | None:
    """Return why a companion can never be served with the model, or None."""
    if companion.model is None:
        return None
    if (format_of(companion.model) == "gguf") != (format_of(model) == "gguf"):
        return (
            f"{companion.field} {companion.name} has {companion.model.spec.source}, which is of another format than "
            f"{model.spec.source} of Model {model.metadata.name}: name a Model of the same format"
        )
    return None


def _find_contradiction(
    service: InferenceService, model: Model | None, companions: Sequence[Companion], vendor: Vendor
) -> str | None:
    """Return the contradiction between the accelerator and other fields or sources of Models, or None.

    An accelerator is either in pods or on hosts outside the cluster: either kind can read only some sources, and hosts
    know no fields that are about pods.
    """
    spec, accelerator = service.spec, decided_accelerator(service, model)
    # 1. The sources of the Models must be ones that this kind can read.
    if vendor.in_pods:
        readers, unreadable_schemes, remedy = "pods", {"file"}, "set hardware.accelerator to metal"
    else:
        readers, unreadable_schemes, remedy = "on hosts", {"s3", "pvc"}, "use an accelerator of pods"
    for candidate in (model, *(companion.model for companion in companions)):
        if candidate is not None and scheme_of(candidate.spec.source) in unreadable_schemes:
            return (
                f"accelerator {accelerator} runs {readers}, which cannot read {candidate.spec.source} of Model "
                f"{candidate.metadata.name}: {remedy}, or give the Model an hf:// or https:// source"
            )

    # 2. In pods, the weights of companions must not be on nodes of their own.
    if vendor.in_pods:
        refusals = map(_refuse_copies, companions)
        return next((message for message in refusals if message is not None), None)

    # 3. On hosts, no field may be stated that is about pods.
    stated_for_pods = {
        "image": spec.image is not None,
        "resources": spec.resources != Resources(),
        "tolerations with tolerationSeconds": any(
            toleration.toleration_seconds is not None for toleration in spec.tolerations
        ),
        "container": spec.container is not None,
        "pod": spec.pod != PodOptions(),
        "hardware": spec.hardware != ServiceHardware(accelerator=spec.hardware.accelerator),
    }
    stated = " and ".join(field for field, is_stated in stated_for_pods.items() if is_stated)
    if stated:
        return f"accelerator {accelerator} runs outside the cluster, where {stated} cannot hold: remove {stated}"
    return None


def _refuse_copies(companion: Companion) -> str | None:
    """Return why the weights of a companion are not beside those of the main Model, or None."""
    model = companion.model
    if model is None or model.spec.cache.scope != "node":
        return None
    return (
        f"{companion.field} {companion.name} has cache.scope node, so its weights are on nodes of their own: name a "
        "Model with cache.scope model and cache.accessMode ReadWriteMany, whose volume every node can mount"
    )


def _find_memory_problem(service: InferenceService, served: Served, memory: ReplicaMemory) -> ServiceProblem | None:
    """Return why the memory of a replica is not known, or why less is stated than a Model takes for certain.

    None: it is known, or `resources.memory` of the service states it.
    """
    if service.spec.resources.memory is not None:
        return None

    understated = next((model for model in memory.models if model.is_understated), None)
    if understated is not None:
        return ServiceProblem("MemoryUnderstated", _explain_understated(understated), "Failed")

    unknown = next((model.name for model in memory.models if model.size_bytes is None), None)
    if unknown is None:
        return None

    runtime = served.runtime
    if (pod := RUNTIMES[runtime].pod) and pod.from_container:
        message = f"the memory that the container of runtime {runtime} takes is not known: set resources.memory"
        return ServiceProblem("MemoryUnknown", message, "Failed")
    message = f"the memory of Model {unknown} cannot be computed from its header: set its spec.memoryBytes"
    return ServiceProblem("MemoryUnknown", message, "Failed")


def _find_device_problem(
    service: InferenceService,
    served: Served,
    vendor: Vendor | None,
    memory: ReplicaMemory,
    devices: DeviceRequest,
    *,
    largest_device_bytes: int | None,
) -> ServiceProblem | None:
    """Return why a replica fits into no device that the service allows or the cluster has, with what would fit.

    The limit is the least memory that the service states for its devices, else the largest device of the cluster, else
    the largest of the products that it names. If it is that of the cluster, the problem is not final: an autoscaler may
    add a larger one. None: it fits, has no device, or one of the two sizes is unknown.
    """
    if vendor is None or not devices.number:
        return None

    # 1. The memory that the replica needs of each device.
    workload, hardware = describe_workload(served, memory.stated_bytes), service.spec.hardware
    if refused := refuse_device_count(workload, devices.number):
        return ServiceProblem("InvalidSpec", refused, "Failed")
    needed = memory.in_pod
    if needed is None or needed.device_bytes_each is None:
        return None

    # 2. The limit, and in `place` the words that say where it comes from.
    field, stated = "hardware.memory", hardware.memory
    if hardware.device_selector is not None:
        field, stated = "hardware.deviceSelector.memory", hardware.device_selector.memory
    # The sizes known of the cluster and of products are those of whole devices, not of parts or of claimed ones.
    if stated is not None:
        limit, place = quantity_bytes(stated), f"{field} is {stated}"
    elif largest_device_bytes is not None and devices.resource == vendor.resource:
        limit = largest_device_bytes
        place = f"the largest {accelerator_of(service, served.model)} device of the cluster has {size_text(limit)}"
    elif (listed := _find_largest_product(service, served.model)) is not None and devices.resource == vendor.resource:
        limit, place = listed, f"the largest of hardware.products has {size_text(listed)}"
    else:
        return None
    if needed.device_bytes_each <= limit:
        return None

    # 3. The problem, with a way out.
    message = (
        f"a replica needs {size_text(needed.device_bytes_each)} on each of {devices.number} devices "
        f"({needed.text()}); {place}: {way_out(workload, service.spec, limit, devices.number)}"
    )
    # Final, unless the devices of the cluster are known, to which an autoscaler may add larger ones.
    if stated is not None or largest_device_bytes is None:
        return ServiceProblem(DEVICE_TOO_SMALL, message, "Failed")
    message += "; or state in hardware.memory what nodes have that an autoscaler adds"
    return ServiceProblem(DEVICE_TOO_SMALL, message, "Pending")


def _find_largest_product(service: InferenceService, model: Model) -> int | None:
    """Return the memory of the largest device in hardware.products, in bytes; None if one of them is not listed."""
    products = [find_product(accelerator_of(service, model), name) for name in service.spec.hardware.products]
    sizes = [product.memory_mib * MIB for product in products if product is not None and product.memory_mib is not None]
    return max(sizes) if sizes and len(sizes) == len(products) else None


def _explain_understated(memory: ModelMemory) -> str:
    """Return why the stated memory of a Model is too little: less than by its header, or not more than the file."""
    least, stated = memory.least_bytes or 0, size_text(memory.stated_bytes or 0)
    # Without a header, the least is the size of the file, and serving it takes more than that.
    if memory.measured_bytes is None:
        return (
            f"the file alone has {size_text(least)}: raise spec.memoryBytes of Model {memory.name}, which is {stated}, "
            f"above {least}"
        )
    return (
        f"by its header, serving it takes at least {size_text(least)}: raise spec.memoryBytes of Model {memory.name}, "
        f"which is {stated}, to {least}, or lower contextLength or parallel"
    )
