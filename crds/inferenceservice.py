"""`InferenceService`: desired serving of one Model; the counterpart of a Deployment with a Service."""

from typing import Annotated, Literal

from msgspec import Meta

from crds.meta import (
    Accelerator,
    ApiStruct,
    Conditions,
    Name,
    ObjectMeta,
    Priority,
    Quantity,
    Toleration,
    described,
    keyed_by,
    rule,
)
from crds.serving import Adapter, RuntimeName, ServingOptions, Speculative


class ServiceHardware(ApiStruct, frozen=True):
    """Hardware of one replica."""

    accelerator: Annotated[
        Accelerator | None,
        described(
            "Where replicas run: cpu and nvidia are pods, metal is an off-cluster host with a metal agent. Absent "
            "takes the Model's."
        ),
    ] = None


class Resources(ApiStruct, frozen=True):
    """Resources that one replica requests of its node if it runs as a pod."""

    gpu: Annotated[
        Annotated[int, Meta(ge=1, le=8)] | None,
        described("Devices of one nvidia replica; absent: 1.", format="int32"),
    ] = None
    cpu: Annotated[Quantity | None, described("CPU that is requested, for example 2 or 500m.")] = None
    memory: Annotated[
        Quantity | None, described("Memory that is requested; absent is what the Model and its context take.")
    ] = None


class InferenceServiceSpec(ServingOptions, frozen=True, kw_only=True):
    """Desired state of a service; the fields of `ServingOptions` are part of it."""

    model_ref: Annotated[Name, described("Name of a Model in the same namespace.")]
    replicas: Annotated[
        int, Meta(ge=0, le=100), described("Replicas that serve; 0 keeps the Service and no replica.", format="int32")
    ] = 1
    suspend: Annotated[bool, described("Stops all replicas and keeps everything else, until it is false again.")] = (
        False
    )
    hardware: Annotated[ServiceHardware, described("Hardware of one replica.")] = ServiceHardware()
    resources: Annotated[Resources, described("What one replica that runs as a pod asks of its node.")] = Resources()
    runtime: Annotated[
        RuntimeName | None,
        described(
            "Engine that serves; absent is llama.cpp for a GGUF file and mlx-lm for a folder of MLX weights. Pods run "
            "llama.cpp; hosts run what `kubectl get mh -o yaml` lists in status.runtimes."
        ),
    ] = None
    speculative: Annotated[
        Speculative | None,
        described("Speculative decoding: a small model guesses, the model itself checks several guesses at once."),
    ] = None
    projector_model_ref: Annotated[
        Name | None,
        described("Name of a Model in the same namespace whose artifact lets this one see images or hear (mmproj)."),
    ] = None
    adapters: Annotated[
        list[Adapter],
        Meta(max_length=8),
        described("LoRA adapters on top of the model.", **keyed_by("modelRef")),
    ] = []
    priority: Annotated[
        Priority,
        described(
            "Which service is placed first when hosts are scarce, and leaves last when its host is short of memory. A "
            "critical one leaves only while the shortage is critical too, and after all others."
        ),
    ] = "normal"
    image: Annotated[
        Annotated[str, Meta(min_length=1, max_length=512)] | None,
        described("Container image with llama-server as its entry point; absent is llama.cpp's own."),
    ] = None
    node_selector: Annotated[
        dict[str, str], described("Labels that a node must have to run a pod of this service or fetch its weights.")
    ] = {}
    tolerations: Annotated[
        list[Toleration],
        Meta(max_length=32),
        described("Taints that pods of this service tolerate.", **{"x-kubernetes-list-type": "atomic"}),
    ] = []


class InferenceServiceStatus(ApiStruct, frozen=True):
    """Observed state of a service, as the controller reports it."""

    observed_generation: Annotated[
        int | None, described("The metadata.generation that this status was decided for.", format="int64")
    ] = None
    phase: Annotated[
        Literal["Pending", "Downloading", "Progressing", "Ready", "Degraded", "Failed", "Suspended"],
        described(
            "Pending: waits for its Model or a place. Downloading: weights are on their way. Progressing: replicas "
            "start. Ready: answers. Degraded: answers with fewer replicas. Failed: the conditions say why. "
            "Suspended: stopped on request."
        ),
    ] = "Pending"
    replicas: Annotated[int | None, described("Replicas that exist.", format="int32")] = None
    ready_replicas: Annotated[int | None, described("Replicas that serve.", format="int32")] = None
    selector: Annotated[str, described("Label selector of the replicas, for the scale subresource.")] = ""
    accelerator: Annotated[str, described("Accelerator that was decided for.")] = ""
    endpoint: Annotated[str, described("Address of the OpenAI-compatible API inside the cluster.")] = ""
    conditions: Conditions = []


def _chat_only(field: str) -> dict[str, str]:
    return rule(
        f"!has(self.{field}) || !has(self.mode) || self.mode == 'chat'",
        f"spec.{field} is for spec.mode chat: remove it, or set mode to chat",
    )


MODE_RULES = (
    _chat_only("speculative"),
    _chat_only("projectorModelRef"),
    _chat_only("chatTemplate"),
)


class InferenceService(ApiStruct, frozen=True):
    """Desired serving of one Model at one address."""

    metadata: Annotated[ObjectMeta, described("Standard object metadata.")]
    spec: Annotated[InferenceServiceSpec, described("What is to be served.", *MODE_RULES)]
    status: Annotated[InferenceServiceStatus, described("What the controller knows about this service.")] = (
        InferenceServiceStatus()
    )
    api_version: str = ""
    kind: str = ""


NAME_RULE = rule(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 40",
    "the name becomes a Service: use at most 40 lower-case letters, digits and '-', starting with a letter",
)
"""A rule on the whole object: 40 characters leave room for the suffixes in the names of a Service's children."""
