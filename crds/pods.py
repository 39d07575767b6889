"""Fields of an InferenceService that concern its pods alone: hardware, resources, options, container of any image.

The affinity to nodes, to other pods, and away from other pods has Kubernetes' own fields. It is typed, because the
affinity that the hardware demands is added to each term of it. The API server checks the rest, such as the syntax of
labels, when the Deployment is applied; its message becomes the condition Ready.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta

from crds.meta import (
    AS_SET,
    LABEL_PATTERN,
    LABEL_VALUE_PATTERN,
    Accelerator,
    ApiStruct,
    LabelName,
    Labels,
    Name,
    Quantity,
    SecretReference,
    checked_by,
    keyed_by,
    of_same_namespace,
    rule,
)

_MOST_TERMS: Final = 16
_Weight = Annotated[int, Meta(ge=1, le=100)]


class LabelRequirement(ApiStruct, frozen=True):
    """`corev1.NodeSelectorRequirement`, and `metav1.LabelSelectorRequirement`."""

    key: Annotated[str, Meta(max_length=317), "Key of the label."]
    operator: Annotated[
        Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"],
        "Relation of the label to the values. Gt and Lt compare integers, and are for nodes only.",
    ]
    values: Annotated[
        list[Annotated[str, Meta(max_length=63)]],
        Meta(max_length=64),
        "Values; none for Exists and DoesNotExist, one for Gt and Lt.",
    ] = []


_Requirements = Annotated[list[LabelRequirement], Meta(max_length=_MOST_TERMS)]


class NodeTerm(ApiStruct, frozen=True):
    """`corev1.NodeSelectorTerm`."""

    match_expressions: Annotated[_Requirements, "Requirements on the labels of a node, which must all be met."] = []
    match_fields: Annotated[_Requirements, "Requirements on the fields of a node, such as metadata.name."] = []


class NodeTerms(ApiStruct, frozen=True):
    """`corev1.NodeSelector`."""

    node_selector_terms: Annotated[
        list[NodeTerm], Meta(min_length=1, max_length=_MOST_TERMS), "Terms of which a node must meet one."
    ]


class PreferredNodes(ApiStruct, frozen=True):
    """`corev1.PreferredSchedulingTerm`."""

    weight: Annotated[_Weight, "Weight of the preference, from 1 to 100."]
    preference: Annotated[NodeTerm, "Nodes that are preferred."]


class NodeAffinity(ApiStruct, frozen=True):
    """`corev1.NodeAffinity`."""

    required_during_scheduling_ignored_during_execution: Annotated[
        NodeTerms | None, "Nodes on which pods may run. What spec.hardware demands is added to each term."
    ] = None
    preferred_during_scheduling_ignored_during_execution: Annotated[
        list[PreferredNodes], Meta(max_length=_MOST_TERMS), "Nodes that the scheduler prefers."
    ] = []


class LabelSelector(ApiStruct, frozen=True):
    """`metav1.LabelSelector`."""

    match_labels: Annotated[Labels, "Labels that an object must have."] = {}
    match_expressions: Annotated[_Requirements, "Requirements on the labels, which must all be met."] = []


class PodTerm(ApiStruct, frozen=True):
    """`corev1.PodAffinityTerm` about pods of the same namespace: others' pods must not be kept off nodes."""

    topology_key: Annotated[
        str,
        Meta(min_length=1, max_length=317),
        "Label of nodes: nodes with the same value are one place, for example kubernetes.io/hostname.",
    ]
    label_selector: Annotated[LabelSelector | None, "The other pods, of the same namespace. Default: no pods."] = None


class PreferredPods(ApiStruct, frozen=True):
    """`corev1.WeightedPodAffinityTerm`."""

    weight: Annotated[_Weight, "Weight of the preference, from 1 to 100."]
    pod_affinity_term: Annotated[PodTerm, "Pods whose place is preferred, or avoided."]


class PodAffinity(ApiStruct, frozen=True):
    """`corev1.PodAffinity` and `corev1.PodAntiAffinity`."""

    required_during_scheduling_ignored_during_execution: Annotated[
        list[PodTerm], Meta(max_length=_MOST_TERMS), "Terms that must all be met."
    ] = []
    preferred_during_scheduling_ignored_during_execution: Annotated[
        list[PreferredPods], Meta(max_length=_MOST_TERMS), "Terms that the scheduler prefers."
    ] = []


class Affinity(ApiStruct, frozen=True):
    """`corev1.Affinity`."""

    node_affinity: Annotated[NodeAffinity | None, "Affinity to nodes."] = None
    pod_affinity: Annotated[PodAffinity | None, "Affinity to the places of other pods."] = None
    pod_anti_affinity: Annotated[PodAffinity | None, "Affinity away from the places of other pods."] = None


_PATH: Final = r"^/[^\x00-\x20\x7f]*$"
_VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
_RESOURCE: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$"

_ATTRIBUTE: Final = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z_][A-Za-z0-9_]*$"
"""An attribute of a device; one without a domain is of the driver's own."""
_ATTRIBUTE_VALUE: Final = r"^[ -!#-\[\]-~]+$"
"""Printable characters without quote and backslash, so that none ends a string of CEL."""

_Product = Annotated[
    str,
    Meta(
        max_length=63,
        description="Product, exactly as the node label of the vendor has it, for example NVIDIA-L4.",
        extra_json_schema={"pattern": LABEL_VALUE_PATTERN},
    ),
]


class DeviceAttribute(ApiStruct, frozen=True):
    """The demand on one attribute of a device."""

    name: Annotated[
        str,
        Meta(max_length=64),
        "Attribute as the DRA driver of the vendor names it, for example productName.",
        {"pattern": _ATTRIBUTE},
    ]
    values: Annotated[
        list[Annotated[str, Meta(max_length=64, extra_json_schema={"pattern": _ATTRIBUTE_VALUE})]],
        Meta(max_length=8),
        "Values of which the attribute must have one.",
        AS_SET,
    ] = []
    at_least: Annotated[
        Annotated[str, Meta(max_length=64, extra_json_schema={"pattern": r"^[0-9]+(\.[0-9]+){0,2}$"})] | None,
        "Least number or version that the attribute must have, for example 8.9.",
    ] = None


_ONE_DEMAND: Final = rule(
    "self.all(a, (has(a.values) && size(a.values) > 0) != has(a.atLeast))",
    "each of deviceSelector.attributes has either values or atLeast: state one of them",
)


class DeviceSelector(ApiStruct, frozen=True):
    """The demands on each device of a replica, which its pod claims by Dynamic Resource Allocation (DRA)."""

    memory: Annotated[
        Quantity | None,
        "Least memory of one device, for example 72Gi. A device that reports up to 3 % less is accepted, since "
        "products report slightly less than their nominal memory.",
    ] = None
    attributes: Annotated[
        list[DeviceAttribute],
        Meta(max_length=8),
        "Attributes that each device must have, all of them.",
        checked_by(_ONE_DEMAND),
        keyed_by("name"),
    ] = []


class ServiceHardware(ApiStruct, frozen=True):
    """Hardware of one replica."""

    accelerator: Annotated[
        Accelerator | None,
        "Where replicas run: cpu, nvidia, amd, intel-gaudi and intel in pods, metal on an off-cluster host with a "
        "metal agent. The controller may know further ones; it lists them in the condition Ready of a service that "
        "names one that does not exist. auto: on any of them that has devices or is metal, or on several at once, "
        "wherever there is room; status.choice says where. Default: the accelerator of the Model, unless "
        "scheduling.pools names pools of others.",
    ] = None
    count: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | None, "Devices that one replica in a pod gets, all of one node. Default: 1."
    ] = None
    memory: Annotated[
        Quantity | None,
        "Least memory of one device, for example 24Gi. A pod runs only on a node whose label says that its devices "
        "have it. A device that reports up to 3 % less than its nominal memory is accepted.",
    ] = None
    products: Annotated[list[_Product], Meta(max_length=16), "Products of which the devices must be one.", AS_SET] = []
    preferred_products: Annotated[
        list[_Product],
        Meta(max_length=16),
        "Products that the scheduler prefers, the best first. Nodes with another product are used if none of these "
        "is free.",
    ] = []
    resource: Annotated[
        Annotated[str, Meta(max_length=253, extra_json_schema={"pattern": _RESOURCE})] | None,
        "Extended resource that counts the devices, for example nvidia.com/mig-1g.10gb for a partition. Default: "
        "the resource of the accelerator's device plugin, such as nvidia.com/gpu.",
    ] = None
    device_selector: Annotated[
        DeviceSelector | None,
        "Claim devices of the vendor's DRA driver that meet these demands; {} is any device. Default: the resource "
        "of the device plugin is requested, and nothing is claimed.",
    ] = None


class Resources(ApiStruct, frozen=True):
    """Resources that one replica requests of its node if it runs as a pod."""

    gpu: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | None,
        "Another name of hardware.count; if both are stated, they must be equal.",
    ] = None
    cpu: Annotated[
        Quantity | None,
        "CPU that one replica requests, for example 2 or 500m; its engine starts as many threads. Default: what the "
        "engine wants for its devices; without devices up to 8, by the largest node.",
    ] = None
    memory: Annotated[
        Quantity | None,
        "Memory of the node that one replica requests. Default: the memory that the Model and its context take, "
        "without what devices hold.",
    ] = None
    memory_limit: Annotated[
        Quantity | None,
        "Memory of the node at which one replica is killed; not less than memory. Shared memory counts. Default: "
        "no limit, because an engine that is killed drops all its requests.",
    ] = None


class EnvVar(ApiStruct, frozen=True):
    """An environment variable."""

    name: Annotated[str, Meta(max_length=128), "Name of the variable.", {"pattern": _VARIABLE}]
    value: Annotated[str, Meta(max_length=4096), "Value of the variable; it must not be a secret."] = ""


class ContainerOptions(ApiStruct, frozen=True):
    """The container of an image that Pomona does not know, for runtime generic."""

    command: Annotated[
        list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=64), "Entry point. Default: that of the image."
    ] = []
    args: Annotated[
        list[Annotated[str, Meta(max_length=4096)]],
        Meta(max_length=64),
        "Arguments. $(MODEL_PATH) is the path of the weights in the container, $(SERVICE_NAME) the name of the "
        "service, $(PORT) the port.",
    ] = []
    env: Annotated[list[EnvVar], Meta(max_length=64), "Environment variables.", keyed_by("name")] = []
    port: Annotated[
        int,
        Meta(ge=1024, le=65535),
        "Port at which the container serves the OpenAI-compatible API on 127.0.0.1. Pomona's proxy listens at the "
        "port of the Service and checks the token.",
    ] = 8000
    health_path: Annotated[
        str, Meta(max_length=256), "Path that answers 200 without a token once the model is loaded.", {"pattern": _PATH}
    ] = "/health"
    model_mount_path: Annotated[
        str, Meta(max_length=256), "Folder at which the volume with the weights is mounted.", {"pattern": _PATH}
    ] = "/models"


class EmptyDirectory(ApiStruct, frozen=True):
    """`corev1.EmptyDirVolumeSource`."""

    medium: Annotated[Literal["", "Memory"], "Memory: files are kept in memory. Default: on the disk of the node."] = ""
    size_limit: Annotated[Quantity | None, "Most that the files may take. Default: no limit."] = None


class ClaimVolume(ApiStruct, frozen=True):
    """`corev1.PersistentVolumeClaimVolumeSource`."""

    claim_name: Annotated[
        Name,
        "PersistentVolumeClaim in the same namespace; not one that Pomona made for a Model.",
        of_same_namespace("PersistentVolumeClaim"),
    ]
    read_only: Annotated[bool, "Mount the volume read-only."] = False


class ConfigMapVolume(ApiStruct, frozen=True):
    """`corev1.ConfigMapVolumeSource`."""

    name: Annotated[Name, "ConfigMap in the same namespace; each key becomes a file.", of_same_namespace("ConfigMap")]


class PodVolume(ApiStruct, frozen=True):
    """A volume of a pod, of one of the kinds that open nothing of the node and no Secret."""

    name: Annotated[
        str, Meta(min_length=1, max_length=50), "Name of the volume, for volumeMounts.", {"pattern": LABEL_PATTERN}
    ]
    empty_dir: Annotated[EmptyDirectory | None, "An empty folder that is deleted with the pod."] = None
    persistent_volume_claim: Annotated[ClaimVolume | None, "A volume that lasts."] = None
    config_map: Annotated[ConfigMapVolume | None, "Files from a ConfigMap."] = None


class PodVolumeMount(ApiStruct, frozen=True):
    """A volume in the container of the engine."""

    name: Annotated[str, Meta(max_length=50), "Name of one of volumes."]
    mount_path: Annotated[
        str,
        Meta(max_length=256),
        "Absolute path in the container; not one that Pomona uses, such as /models and /tmp.",
        {"pattern": _PATH},
    ]
    sub_path: Annotated[str, Meta(max_length=256), "File or folder of the volume. Default: its root."] = ""
    read_only: Annotated[bool, "Mount the volume read-only."] = False


class SpreadConstraint(ApiStruct, frozen=True):
    """`corev1.TopologySpreadConstraint` about the pods of the service."""

    topology_key: Annotated[
        str,
        Meta(min_length=1, max_length=317),
        "Label of nodes: nodes with the same value are one place, for example topology.kubernetes.io/zone.",
    ]
    max_skew: Annotated[
        int, Meta(ge=1, le=100), "Most pods that one place may have more than the place with the fewest."
    ] = 1
    when_unsatisfiable: Annotated[
        Literal["DoNotSchedule", "ScheduleAnyway"],
        "DoNotSchedule: a pod waits if no node meets the constraint. ScheduleAnyway: it is a preference.",
    ] = "ScheduleAnyway"


_ONE_KIND: Final = rule(
    "self.all(v, (has(v.emptyDir) ? 1 : 0) + (has(v.persistentVolumeClaim) ? 1 : 0) + (has(v.configMap) ? 1 : 0) == 1)",
    "each of spec.pod.volumes has one of emptyDir, persistentVolumeClaim and configMap: state exactly one",
)


class PodOptions(ApiStruct, frozen=True):
    """Options of a user for the pods of a service."""

    image_pull_secrets: Annotated[
        list[SecretReference],
        Meta(max_length=8),
        "Secrets in the same namespace with which nodes pull the image. The engine cannot read them.",
        keyed_by("name"),
    ] = []
    env: Annotated[
        list[EnvVar],
        Meta(max_length=64),
        "Environment variables of the engine. A variable that Pomona itself sets is refused. Values are readable "
        "by everyone who may read pods: they must not be secrets.",
        keyed_by("name"),
    ] = []
    affinity: Annotated[
        Affinity | None, "Affinity of the pods. What spec.hardware demands of nodes holds in addition."
    ] = None
    topology_spread_constraints: Annotated[
        Annotated[list[SpreadConstraint], Meta(max_length=8)] | None,
        "Spread of the service's pods. Default: a preference for as many nodes as possible; an empty list leaves "
        "it to the scheduler.",
        keyed_by("topologyKey", "whenUnsatisfiable"),
    ] = None
    runtime_class_name: Annotated[
        LabelName | None, "RuntimeClass of the pods. Default: that of the accelerator, if it has one."
    ] = None
    scheduler_name: Annotated[
        LabelName | None,
        "Scheduler of the pods, for example one that asks `pomona extender` for the fastest node. A pod that the "
        "queue has given a node is bound to that node by any scheduler. A scheduler that does not exist leaves the "
        "pods pending. Default: the scheduler of the cluster.",
    ] = None
    volumes: Annotated[
        list[PodVolume], Meta(max_length=16), "Volumes for volumeMounts.", checked_by(_ONE_KIND), keyed_by("name")
    ] = []
    volume_mounts: Annotated[
        list[PodVolumeMount], Meta(max_length=32), "Volumes in the container of the engine.", keyed_by("mountPath")
    ] = []
