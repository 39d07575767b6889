"""`InferenceService`: desired serving of one Model; the counterpart of a Deployment with a Service."""

from typing import Annotated, Literal

from msgspec import Meta

from crds.accelerator_choice import AcceleratorChoice
from crds.gatewaykey import EVERY_NAMESPACE
from crds.meta import (
    AS_SET,
    LABEL_PATTERN,
    Amount,
    ApiObject,
    ApiStruct,
    Conditions,
    Count,
    LabelName,
    Labels,
    LongText,
    Name,
    Priority,
    SchedulingMode,
    ShortText,
    Toleration,
    checked_by,
    keyed_by,
    of_same_namespace,
    rule,
)
from crds.performance import BenchmarkOptions, MeasuredRates
from crds.placement import ClassSpeeds, NodeSpeeds, PlacementDemands, PlacementStatus, SpeedReplacement
from crds.pods import ContainerOptions, PodOptions, Resources, ServiceHardware
from crds.queue_status import QueueStatus
from crds.rate import Rate
from crds.serving import DRAIN_SECONDS, Adapter, DrainSeconds, RuntimeName, ServingChoice, ServingOptions, Speculative


class Scheduling(ApiStruct, frozen=True):
    """The way in which replicas get their devices."""

    mode: Annotated[
        SchedulingMode | None,
        "Queue: a pod waits with a scheduling gate until the controller's queue, which all accelerators and hosts "
        "share, gives it a node. Native: Kubernetes' scheduler places the pod in its own order, and nothing is "
        "preempted for it. Kueue: the pods are given to Kueue, which admits them by the quota of queueName. "
        "Default: Queue for pods that request devices, unless the controller serves only some namespaces or was "
        "started with --scheduling-mode Native. Hosts always go by the queue. An edit from or to Kueue restarts "
        "all replicas. Any other edit restarts no replica that has a node: it holds for pods that wait, and for "
        "those of the next change of the service.",
    ] = None
    queue_name: Annotated[
        LabelName | None,
        "LocalQueue of Kueue in the namespace of the service, for mode Kueue. Another name restarts all replicas, "
        "which then wait in that queue.",
    ] = None
    pools: Annotated[
        list[LabelName],
        Meta(max_length=8),
        "Pools that replicas may use, in this order: names of AcceleratorPools of the accelerator, or the name of "
        "the accelerator for the nodes that no AcceleratorPool selects. The first of each accelerator is the home "
        "of its replicas: what they use of the others is borrowed. Default: the pool with the name of the "
        "accelerator, then all other pools of the accelerator by name, as far as these lend and have quota for the "
        "namespace. An edit moves no replica that has a node. Unless hardware.accelerator names one, the pools may "
        "be of several accelerators: see status.choice.",
    ] = []


_AccessNamespace = Annotated[
    str, Meta(min_length=1, max_length=63, extra_json_schema={"pattern": rf"^\{EVERY_NAMESPACE}$|{LABEL_PATTERN}"})
]


class ServiceAccess(ApiStruct, frozen=True):
    """Namespaces that a service admits through the gateway of the cluster."""

    namespaces: Annotated[
        list[_AccessNamespace],
        Meta(max_length=256),
        "Namespaces whose GatewayKeys may use the service through the gateway, beside its own. * stands for all. "
        "Default: only its own.",
        AS_SET,
    ] = []


class Scaling(ApiStruct, frozen=True):
    """The number of replicas by demand."""

    min_replicas: Annotated[
        int,
        Meta(ge=0, le=100),
        "Replicas that are always loaded. 0: the model is loaded by its first request, which waits meanwhile, and "
        "unloaded after idleSeconds without one, or sooner to make room for another model that is asked for.",
    ] = 1
    max_replicas: Annotated[
        int, Meta(ge=1, le=100), "Most replicas at a time. A machine without a cluster loads no more than minReplicas."
    ] = 1
    idle_seconds: Annotated[
        int, Meta(ge=1, le=604_800), "Time without a request after which the model is unloaded, in seconds."
    ] = 300


class InferenceServiceSpec(ServingOptions, frozen=True, kw_only=True):
    """Desired state of a service; the fields of `ServingOptions` are part of it."""

    model_ref: Annotated[Name, "Name of a Model in the same namespace.", of_same_namespace("Model")]
    replicas: Annotated[int, Meta(ge=0, le=100), "Number of replicas. 0 stops all replicas and keeps the Service."] = 1
    scaling: Annotated[
        Scaling | None,
        "The number of replicas by demand, in place of replicas. `pomona up` follows it; a cluster does not yet, and "
        "says so in the condition Ready. Default: the number is that of replicas.",
    ] = None
    suspend: Annotated[
        bool,
        "If true, all replicas are stopped, and everything else is kept. Set suspend to false to start the "
        "replicas again.",
    ] = False
    hardware: Annotated[ServiceHardware, "Hardware of one replica."] = ServiceHardware()
    resources: Annotated[Resources, "Resources that one replica requests of its node if the replica runs as a pod."] = (
        Resources()
    )
    runtime: Annotated[
        RuntimeName | None,
        "Engine that serves the model, such as llama.cpp or vllm. auto is the default: llama.cpp for a GGUF file, "
        "vllm for a folder of safetensors in pods, mlx-lm for a folder on a host, ollama for an ollama:// source. "
        "If that one has no image for an accelerator in pods, it is the first other one that has. "
        "Each engine has a page in docs/engines/, which says where it runs; the condition Ready of a service that "
        "names one that does not exist lists all. A host runs the engines in its status.runtimes, which `kubectl "
        "get mh -o yaml` shows.",
    ] = None
    speculative: Annotated[
        Speculative | None,
        "Speculative decoding: a small draft model proposes tokens, and the model checks several of these "
        "tokens at once.",
    ] = None
    projector_model_ref: Annotated[
        Name | None,
        "Name of a Model in the same namespace whose artifact is a projector (mmproj). With the projector, "
        "the service accepts images or sound.",
        of_same_namespace("Model"),
    ] = None
    adapters: Annotated[
        list[Adapter],
        Meta(max_length=8),
        "LoRA adapters on top of the model. They are applied to each request or, with onRequest, to those that name "
        "them.",
        keyed_by("modelRef"),
    ] = []
    priority: Annotated[
        Priority,
        "When devices or hosts are scarce, replicas of higher priority get them first, and of equal ones those "
        "that have waited longest. If nothing is free for a replica, running replicas of lower priority are "
        "evicted, as few as possible, and wait again at their old place; spec.evictionProtection prevents that. A "
        "pod also gets the PriorityClass pomona-PRIORITY, which is installed with Pomona and preempts nothing. "
        "When a host is short of memory, services of lower priority are removed from the host first. A critical "
        "service is removed only while the memory pressure is critical, and after all other services.",
    ] = "normal"
    scheduling: Annotated[
        Scheduling, "The way in which replicas get devices. Default: by the queue, in order of priority."
    ] = Scheduling()
    placement: Annotated[PlacementDemands, "Demands on the devices of the replicas: least speed, and least fit."] = (
        PlacementDemands()
    )
    eviction_protection: Annotated[
        bool,
        "If true, no replica is evicted for a service of higher priority, and a host that is short of memory "
        "removes it only while the memory pressure is critical, like a service of priority critical. Its place in "
        "the queue stays that of spec.priority. Default: false.",
    ] = False
    drain_seconds: DrainSeconds = DRAIN_SECONDS
    image: Annotated[
        Annotated[str, Meta(min_length=1, max_length=512)] | None,
        "Container image with the engine as its entry point. Default: the image that the engine's page lists.",
    ] = None
    container: Annotated[
        ContainerOptions | None,
        "The container of spec.image, for runtime generic, which serves any image with an OpenAI-compatible API.",
    ] = None
    pod: Annotated[PodOptions, "What is added to the pods of this service."] = PodOptions()
    benchmark: Annotated[
        BenchmarkOptions | None,
        "Extent of what measures the speed of the model: Jobs, if the controller runs with --benchmarks, and the "
        "agents of hosts. An edit measures nothing anew that was measured, and restarts no replica, so that a "
        "host follows it with the next one.",
    ] = None
    access: Annotated[
        ServiceAccess, "Who may use the service through the gateway of the cluster. An edit restarts no replica."
    ] = ServiceAccess()
    node_selector: Annotated[
        Labels,
        "Labels that a node must have to run a pod of this service or fetch its weights, or that a MetalHost must "
        "have to run a process of it.",
    ] = {}
    tolerations: Annotated[
        list[Toleration],
        Meta(max_length=32),
        "Taints of nodes that pods of this service tolerate, or of MetalHosts that its processes tolerate.",
    ] = []


class ServicePerformance(MeasuredRates, frozen=True, kw_only=True):
    """The measured speed of a replica."""

    source: Annotated[
        Literal["job", "host", "live"],
        "job: a Job on an idle device measured it. host: the agent of a host did. live: the "
        "controller did, at a replica that serves.",
    ]
    device_class: Annotated[
        str, Meta(max_length=128), "Hardware on which it was measured, for example nvidia-h100-80gb-hbm3x1."
    ]
    model_hash: Annotated[
        str,
        Meta(max_length=64),
        "Identity of the weights, engine and context: ConfigMap bench-HASH has all measurements of it.",
    ]


class InferenceServiceStatus(ApiStruct, frozen=True):
    """Observed state of a service, as the controller reports it."""

    observed_generation: Annotated[Amount | None, "The metadata.generation from which this status was computed."] = None
    phase: Annotated[
        Literal["Pending", "Downloading", "WaitingForGPU", "Progressing", "Ready", "Degraded", "Failed", "Suspended"],
        "Pending: the service waits for its Model, or for a node that Kubernetes' scheduler finds. WaitingForGPU: "
        "it waits in the queue for a GPU or a host; status.queue has its place and the reason. Downloading: the "
        "weights are being downloaded. Progressing: replicas are starting, or a new spec is being rolled out. "
        "Ready: the service answers. Degraded: the service answers, but has fewer ready replicas than "
        "spec.replicas or another problem, which the conditions show. Failed: the conditions show the cause. "
        "Suspended: spec.suspend is true or spec.replicas is 0.",
    ] = "Pending"
    replicas: Annotated[
        Count | None, "Replicas that exist: pods that a scheduler has seen, and processes on hosts."
    ] = None
    ready_replicas: Annotated[Count | None, "Replicas of the latest spec that serve."] = None
    available_replicas: Annotated[
        Count | None, "Replicas that serve, also those of an earlier spec, which do until the new ones are ready."
    ] = None
    selector: Annotated[ShortText, "Label selector of the replicas, for the scale subresource."] = ""
    accelerator: Annotated[
        LongText, "Accelerator of the replicas; several, such as nvidia,metal, if they are on several."
    ] = ""
    choice: Annotated[
        AcceleratorChoice | None,
        "The replicas on each accelerator, and why others have none. Absent unless hardware.accelerator is auto or "
        "scheduling.pools are of several accelerators.",
    ] = None
    serving: Annotated[
        ServingChoice | None,
        "Options with which the model is served: context length, requests at once, and memory for earlier "
        "conversations. Those that the spec leaves out are chosen once for a spec, from the model and the hosts and "
        "nodes that the service may use. Absent until the Model is inspected.",
    ] = None
    runtime: Annotated[ShortText, "Engine of the replicas; that on the first accelerator if they are on several."] = ""
    memory: Annotated[
        ShortText,
        "Memory of its node or host that one replica takes, for example 4.4 GiB; that on the first accelerator if "
        "they are on several.",
    ] = ""
    device_memory: Annotated[
        ShortText,
        "Memory that one replica takes of its devices: their number, and what each of them must have, for example "
        "2 x 38.2 GiB. Empty without devices, and if it is unknown.",
    ] = ""
    device_memory_bytes: Annotated[Amount | None, "Memory that one replica takes of each of its devices, in bytes."] = (
        None
    )
    nodes: Annotated[
        list[ShortText], Meta(max_length=20), "Nodes and hosts that run a replica, at most 20 of them."
    ] = []
    endpoint: Annotated[ShortText, "Address of the OpenAI-compatible API inside the cluster."] = ""
    requests_per_minute: Annotated[
        Count | None,
        "Requests of all replicas together in the last minute. Pods are read every 10 to 30 seconds, by their "
        "metrics, and hosts report by themselves; a change of more than a tenth is shown, once a minute at most for "
        "the pods and for each host. Absent if it is unknown: before the second reading, and 3 minutes after the last "
        "one.",
    ] = None
    average_latency_ms: Annotated[
        Count | None,
        "Average time from the arrival of these requests to the end of their answers, in milliseconds. Absent if "
        "requestsPerMinute is 0 or unknown.",
    ] = None
    speeds: ClassSpeeds = []
    node_speeds: NodeSpeeds = []
    placement: Annotated[
        PlacementStatus | None,
        "The place of the last replica that the queue has placed, and why it is there. Absent if no replica runs "
        "there any more.",
    ] = None
    replacement: Annotated[
        SpeedReplacement | None,
        "The last replacement of a replica whose speed or fit had fallen, if the controller runs with "
        "--replace-degraded. Absent if there was none.",
    ] = None
    tokens_per_second: Annotated[
        Rate,
        "Tokens that all replicas together generate per second now: the mean of one minute, read and shown as "
        "requestsPerMinute is. 0: they are idle. Absent if it is unknown: before the second reading, and for "
        "engines that count no tokens.",
    ] = ""
    performance: Annotated[
        ServicePerformance | None,
        "Speed of a single request on the hardware of the replicas, as it was measured; of replicas on several "
        "kinds of hardware the slowest. Absent if it was not measured; status.speeds has estimates, too.",
    ] = None
    queue: Annotated[
        QueueStatus | None,
        "Place in the queue of the first replica that waits for a GPU or a host. Absent if none waits. It is "
        "updated at most once a second, and later while many services move at once.",
    ] = None
    proof: Annotated[
        ShortText,
        "Digest of the generation, replicas and endpoints that have generated a token. A controller that becomes "
        "leader probes the service at once only if it differs. Pods are probed every 10 minutes in any case.",
    ] = ""
    token_rotation: Annotated[
        ShortText,
        "Identifier of the last replacement of the token. Each new value of the annotation "
        "inference.pomona.dev/rotate-token replaces the token in Secret SERVICE-token. If that token was edited "
        "since, the edit is followed instead; without the annotation, an edit is followed within 10 minutes. Hosts "
        "accept the previous token for 10 more minutes, and pods are replaced.",
    ] = ""
    conditions: Conditions = []


def _chat_only(field: str) -> dict[str, str]:
    """Return the rule that `field` is set only in mode chat."""
    return rule(
        f"!has(self.{field}) || !has(self.mode) || self.mode == 'chat'",
        f"spec.{field} is for spec.mode chat: remove it, or set mode to chat",
    )


SPEC_RULES = (
    rule(
        "!has(self.scaling) || !has(self.replicas) || self.replicas == 1",
        "spec.scaling decides the number of replicas: remove spec.replicas, or spec.scaling",
    ),
    rule(
        "!has(self.scaling) || !has(self.scaling.minReplicas) || !has(self.scaling.maxReplicas) || "
        "self.scaling.minReplicas <= self.scaling.maxReplicas",
        "spec.scaling.maxReplicas is less than minReplicas: raise it, or lower minReplicas",
    ),
    _chat_only("speculative"),
    _chat_only("projectorModelRef"),
    _chat_only("chatTemplate"),
    rule(
        "!has(self.scheduling) || !has(self.scheduling.mode) || self.scheduling.mode == 'Queue' || "
        "!has(self.hardware) || !has(self.hardware.accelerator) || self.hardware.accelerator != 'metal'",
        "hosts with accelerator metal always go by the queue: remove spec.scheduling.mode",
    ),
    rule(
        "!has(self.scheduling) || !has(self.scheduling.mode) || self.scheduling.mode == 'Queue' || "
        "!has(self.hardware) || !has(self.hardware.accelerator) || self.hardware.accelerator != 'auto'",
        "accelerator auto needs the controller's queue: set spec.scheduling.mode to Queue, or remove it",
    ),
    rule(
        "!has(self.scheduling) || (has(self.scheduling.mode) && self.scheduling.mode == 'Kueue') == "
        "has(self.scheduling.queueName)",
        "spec.scheduling.queueName names the LocalQueue of mode Kueue: set both, or remove queueName",
    ),
    rule(
        "!has(self.scheduling) || !has(self.scheduling.pools) || size(self.scheduling.pools) == 0 || "
        "!has(self.scheduling.mode) || self.scheduling.mode == 'Queue'",
        "only the controller's queue knows pools: set spec.scheduling.mode to Queue, or remove spec.scheduling.pools",
    ),
    rule(
        f"!has(self.drainSeconds) || self.drainSeconds <= {DRAIN_SECONDS} || "
        "(has(self.evictionProtection) && self.evictionProtection)",
        f"others may wait for the room of an evicted replica: set spec.drainSeconds to {DRAIN_SECONDS} or less, or "
        "spec.evictionProtection to true",
    ),
)


class InferenceService(ApiObject, frozen=True, kw_only=True):
    """Desired serving of one Model at one address."""

    spec: Annotated[InferenceServiceSpec, "Desired state of the service.", checked_by(*SPEC_RULES)]
    status: Annotated[InferenceServiceStatus, "Observed state of the service, as the controller reports it."] = (
        InferenceServiceStatus()
    )


class ReplicaDemand(ApiStruct, frozen=True):
    """The part of `InferenceServiceSpec` by which replicas are counted, which every version of the resource has."""

    replicas: int = 1
    scaling: Scaling | None = None
    suspend: bool = False


class ScaledService(ApiStruct, frozen=True):
    """An InferenceService of which only the number of replicas is read."""

    spec: ReplicaDemand = ReplicaDemand()


def is_on_demand(service: InferenceService) -> bool:
    """Return whether the replicas of a service are loaded by requests, and unloaded without them."""
    scaling = service.spec.scaling
    return scaling is not None and not scaling.min_replicas and not service.spec.suspend


def wanted_replicas(service: InferenceService | ScaledService) -> int:
    """Return how many replicas a service wants, one on demand included: where its spec becomes a number."""
    if service.spec.suspend:
        return 0
    scaling = service.spec.scaling
    return service.spec.replicas if scaling is None else max(1, scaling.min_replicas)


NAME_RULE = rule(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 40",
    "the name becomes a Service: use at most 40 lower-case letters, digits and '-', starting with a letter",
)
"""A rule on the whole object: 40 characters leave room for the suffixes in the names of a Service's children."""
