"""The Deployment of a service whose replicas are pods, and the Service in front of all replicas."""

import hashlib
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from controller.models.jobs import NO_IMAGE
from controller.models.served import Companion, Served, cache_path, cached_claim, format_of, is_mounted_image, own_claim
from controller.pod_settings import DEFAULT_SETTINGS, PodSettings
from controller.reconcile.plan import child
from controller.services.pods.claim_templates import add_claim
from controller.services.pods.deployment_strategy import choose_first_strategy
from controller.services.pods.devices import request_devices
from controller.services.pods.one_node import has_one_node, label_claims
from controller.services.pods.pod_options import find_option_problem
from controller.services.pods.pod_proxy import PORT_NAME
from controller.services.pods.pod_template import EngineChoice, MountedWeights, build_pod
from controller.services.pods.queue_gate import is_queued, name_local_queue, set_gate
from controller.services.preconditions import CheckedService, ServiceProblem
from crds.cache import NodeCopy
from crds.inferenceservice import InferenceService, wanted_replicas
from crds.meta import (
    DEFAULT_CONTAINER,
    KUEUE_QUEUE_NAME,
    LABEL_ACCELERATOR,
    LABEL_COPY,
    LABEL_MANAGED_BY,
    LABEL_SERVICE,
    MANAGED_BY,
    TOKEN_ROTATION,
    Accelerator,
)
from crds.model import Model
from crds.pods import PodOptions
from crds.weights_header import GGUF
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, SERVICES, Resource
from runtimes.pod import SERVICE_PORT
from runtimes.quantization import list_unfit_families

_DIGITS: Final = 8


def choose_engine(
    service: InferenceService, accelerator: Accelerator | None, checked: CheckedService, settings: PodSettings
) -> EngineChoice | None:
    """Return the engine of a service in pods, with the accelerator and the memory that it requests.

    None: it runs on hosts, a precondition is not met, or its memory is neither stated nor known.
    """
    vendor = settings.vendors.get(accelerator or "")
    if checked.served is None or accelerator is None or vendor is None or not vendor.in_pods:
        return None

    # The memory that the container requests: as stated, else as computed.
    stated, needed = service.spec.resources.memory, checked.memory
    memory = needed.container_bytes if stated is None else stated
    if memory is None:
        return None

    runtime = checked.served.runtime
    is_estimate = stated is None and needed.in_pod is not None  # `in_pod` is computed from the header of the weights
    header = checked.served.model.status.gguf or GGUF()
    unfit = list_unfit_families(header.quantization, runtime, accelerator)

    return EngineChoice(
        runtime=runtime,
        accelerator=accelerator,
        vendor=vendor,
        memory=memory,
        cache_bytes=needed.cache_bytes,
        layout=checked.served.model.status.layout,
        container=service.spec.container,
        is_estimate=is_estimate,
        unfit=unfit,
        chat_format=header.chat_format,
    )


def companion_weights(served: Served) -> list[tuple[Companion, MountedWeights]]:
    """Return the companions of a Model with their weights."""
    return [
        (companion, mounted_weights(companion.model)) for companion in served.companions if companion.model is not None
    ]


def find_pod_problem(
    service: InferenceService, served: Served | None, choice: EngineChoice | None, settings: PodSettings
) -> ServiceProblem | None:
    """Return why these pods cannot be made, or why they cannot have the options of spec.pod, or None."""
    options = service.spec.pod
    if choice is not None and not settings.image:
        missing = "pods need a container of Pomona, whose image is unknown: start `pomona controller` with --image"
        return ServiceProblem(NO_IMAGE, missing, "Failed")
    if choice is None or served is None or options == PodOptions():  # no pod, or no option
        return None
    # The options are compared with what the pod has without them.
    bare = replace(service, spec=replace(service.spec, pod=PodOptions()))
    pod = build_pod(bare, choice, mounted_weights(served.model), companion_weights(served), settings=settings)
    message = find_option_problem(options, pod)
    return ServiceProblem("InvalidSpec", message, "Failed") if message else None


def mounted_weights(model: Model, copy: NodeCopy | None = None) -> MountedWeights:
    """Return the weights of a Model as pods mount them.

    They are on the volume of the given copy, which is tied to one node, or else on the one volume of the Model or in
    its image. Ollama mounts none and pulls its model by itself.
    """
    if copy is not None:
        return MountedWeights(claim=copy.name, path=copy.path, size_bytes=model.status.size_bytes, node=copy.node)

    if format_of(model) == "ollama":
        # Ollama pulls them from the source by itself. Their size is unknown, and at most the memory that is stated.
        return MountedWeights(claim=None, path=model.spec.source, size_bytes=model.spec.stated_bytes)

    # On the one volume of the Model, or in its image.
    return MountedWeights(
        claim=cached_claim(model),
        path=cache_path(model),
        size_bytes=model.status.size_bytes,
        image=model.status.cached.image if model.status.cached is not None else "",
        has_one_node=has_one_node(model),
        is_ours=own_claim(model) is None and not is_mounted_image(model),
    )


def build_network_service(service: InferenceService) -> tuple[Resource, Obj]:
    """Return the Service: the one address of all replicas, which exists also without replicas."""
    owner = service.metadata
    spec = {
        "selector": {LABEL_SERVICE: owner.name},
        "ports": [{"name": PORT_NAME, "port": SERVICE_PORT, "targetPort": PORT_NAME, "protocol": "TCP"}],
    }
    return child(SERVICES, owner.name, INFERENCE_SERVICES, owner, {}, spec=spec)


def build_deployment(
    service: InferenceService,
    choice: EngineChoice,
    weights: MountedWeights,
    companions: Sequence[tuple[Companion, MountedWeights]] = (),
    *,
    replicas: int | None = None,
    strategy: Obj | None = None,
    settings: PodSettings = DEFAULT_SETTINGS,
    label: str = "",
) -> tuple[Resource, Obj]:
    """Return the Deployment of all replicas of a service in pods, or of the replicas beside one copy of the weights.

    Args:
        service: the service.
        choice: its engine and accelerator.
        weights: the weights of its Model; those with a node are a copy.
        companions: its companions with their weights.
        replicas: the replicas of this Deployment; None: all of the service.
        strategy: how its pods are replaced; None: as `choose_first_strategy` says for a template that changes.
        settings: the administrator's settings.
        label: the accelerator, if the service may use several: it tells apart the Deployments and their pods.
    """
    owner, count = service.metadata, wanted_replicas(service) if replicas is None else replicas

    # 1. The labels by which this Deployment differs from others of the service, and the other labels of its pods.
    own_labels = {LABEL_COPY: weights.claim} if weights.claim and weights.node else {}
    own_labels |= {LABEL_ACCELERATOR: label} if label else {}
    selector = {LABEL_SERVICE: owner.name, **own_labels}

    all_weights = (weights, *(of_companion for _companion, of_companion in companions))
    # By these labels, pods of a volume that is on one node at a time find each other; `mark` is the value.
    claims = label_claims(
        {mounted.claim: mounted.mark for mounted in all_weights if mounted.claim and mounted.has_one_node}
    )
    queue = name_local_queue(service)
    # Kueue's webhook looks at the Deployment, and its manager at the pods.
    kueue = {KUEUE_QUEUE_NAME: queue} if queue else {}
    labels = {**selector, LABEL_MANAGED_BY: MANAGED_BY, **claims, **kueue}

    # 2. The spec, with the claim of devices and the gate of the queue where they are needed.
    devices = request_devices(service, choice.vendor)
    annotations = {DEFAULT_CONTAINER: choice.pod.container, **_note_rotation(service)}
    spec: Obj = {
        "replicas": count,
        "selector": {"matchLabels": selector},
        "strategy": choose_first_strategy(weights.node, count) if strategy is None else strategy,
        "template": {
            "metadata": {"labels": labels, "annotations": annotations},
            "spec": build_pod(service, choice, weights, companions, settings=settings),
        },
    }
    if devices.need is not None:
        spec["template"] = add_claim(spec["template"], owner.name, devices.need)

    name = name_deployment(owner.name, weights, label)
    resource, made = child(DEPLOYMENTS, name, INFERENCE_SERVICES, owner, own_labels | kueue, spec=spec)
    return resource, set_gate(made, is_gated=is_queued(service, devices, settings))


def name_deployment(service: str, weights: MountedWeights, label: str = "") -> str:
    """Return the name of the Deployment that serves these weights: the service's, with a digest if it may have several.

    A readable ending could be a part of the name of another service. `label` is that of `build_deployment`.
    """
    claim = weights.claim if weights.node else None
    parts = [part for part in (label, claim) if part]
    return f"{service}-{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:_DIGITS]}" if parts else service


def _note_rotation(service: InferenceService) -> dict[str, str]:
    """Return the annotation that replaces the pods after their token; none before the first replacement."""
    rotation = service.status.token_rotation
    return {TOKEN_ROTATION: rotation} if rotation else {}
