"""Definitions that all Pomona resources share: group, labels, object metadata, conditions, and the base of structs.

Structs are decoded from objects of the API server, and encoded to apply them. Unknown fields are ignored, so that an
older agent can read a newer object. A field that equals its default is not written, so that with server-side apply the
writer owns only the fields that it decided.
"""

import functools
import hashlib
import zlib
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

GROUP: Final = "inference.pomona.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

LABEL_SERVICE: Final = f"{GROUP}/service"
"""Label of serving pods and MetalProcesses only: a Service selects by it, so no other object may have it."""
LABEL_MODEL: Final = f"{GROUP}/model"
"""Label of a Model's Jobs, of their pods, and of the MetalProcesses that inspect the Model."""
LABEL_COPY: Final = f"{GROUP}/copy"
"""Claim of the copy of weights that the pods of a Deployment mount, of a Model with spec.cache.scope node."""
LABEL_ACCELERATOR: Final = f"{GROUP}/accelerator"
"""Accelerator of the pods of a Deployment, of a service that may use several."""
LABEL_CLIENT: Final = f"{GROUP}/client"
"""Label of pods that may send requests to services where NetworkPolicies are on; its value is "true"."""
METRIC_PREFIX: Final = "pomona"
"""Beginning of the names of all metrics, unless `--metric-prefix` states another one for some."""
PROXY_CONTAINER: Final = "proxy"
"""Name of the container in front of the engine of a pod; its log is not that of the engine."""
RESTORE_CONTAINER: Final = "compiled-code"
"""Name of the container that ends before the engine of a pod starts, and leaves it compiled code."""
DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
"""Annotation of a pod: the container whose log kubectl prints by default; of services the engine."""
CLI_FIELD_MANAGER: Final = "pomona-cli"
"""Owner of the fields that an administrator writes by `pomona`."""
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "pomona"
OURS: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
"""Selects the objects that we have made."""
LABEL_SERVICE_NAME: Final = "kubernetes.io/service-name"
"""Label of an EndpointSlice: the Service whose requests the slice takes."""
LABEL_SLICE_MANAGED_BY: Final = "endpointslice.kubernetes.io/managed-by"
LABEL_HOST: Final = f"{GROUP}/host"
"""Label of an EndpointSlice: the host that writes it, by which its agent selects its own."""
SLICE_MANAGED_BY: Final = "metal-agent.pomona.dev"
"""Value of `LABEL_SLICE_MANAGED_BY`, with which Kubernetes' own controller leaves a host's slices unchanged."""
HOSTS_NAMESPACE: Final = "pomona-metal-hosts"
"""Namespace of each host's Lease, ServiceAccount and Secret."""
CONTROLLER_NAMESPACE: Final = "pomona-system"
"""Namespace of the controller's identity and Lease, and of the gateway."""
PROCESS_FINALIZER: Final = f"{GROUP}/metal-process"
"""Keeps a MetalProcess, and so its reserved bytes, until its host has stopped it or is known to be gone."""

ENQUEUED_AT: Final = f"{GROUP}/enqueued-at"
"""Annotation of a pod or MetalProcess that replaces another one: since when its replica has a place in the queue."""

POD_TEMPLATE: Final = f"{GROUP}/template"
"""Annotation of the template of a Deployment, and so of its pods: a digest by which a pod is known to have it."""
COST: Final = f"{GROUP}/cost"
"""Annotation of a Node or MetalHost: what it costs, in whatever unit all of them have."""
QUEUE_GATE: Final = f"{GROUP}/queue"
"""Scheduling gate of a pod that waits for the queue to give it a node."""
NOMINATED: Final = f"{GROUP}/nominated"
"""Annotation of a pod or MetalProcess that waits for others to end: the cells that it is promised, as JSON."""
DEVICE_NEED: Final = f"{GROUP}/device-need"
"""Annotation of a pod that claims devices: what each must be, as JSON."""
LABEL_GANG: Final = f"{GROUP}/gang"
"""Label of pods of which all or none run: the name that they share."""
LABEL_GANG_SIZE: Final = f"{GROUP}/gang-size"
"""Label of such pods: their number."""
ADMITTED_AT: Final = f"{GROUP}/admitted-at"
"""Annotation of a MetalProcess: the time when it was bound, from which its minimum run time counts."""

KUEUE_QUEUE_NAME: Final = "kueue.x-k8s.io/queue-name"
"""Label by which a Deployment and its pods are given to Kueue: the name of a LocalQueue of their namespace."""
KUEUE_GATE: Final = "kueue.x-k8s.io/admission"
"""Scheduling gate of a pod that waits for Kueue, which sets and removes it."""
REBALANCE_AT: Final = f"{GROUP}/rebalance-at"
"""Annotation of an InferenceService: the time of a request to move its processes to better hosts."""
MOVES: Final = f"{GROUP}/moves"
"""Annotation of a MetalProcess: uid of the process in whose place it was created on such a request."""

DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of a pod, of Kubernetes: of ready pods, that with the least cost ends first."""

ROTATE_TOKEN: Final = f"{GROUP}/rotate-token"
"""Annotation that replaces a token: on an InferenceService by each new value, on its Secret until that is done."""
TOKEN_ROTATION: Final = f"{GROUP}/token-rotation"
"""Annotation with the last replacement of a token: on its Secret, and on pods, which read it when they start."""
ROTATE_KEY: Final = f"{GROUP}/rotate-key"
"""Annotation that replaces the key of a GatewayKey by each new value."""
KEY_ROTATION: Final = f"{GROUP}/key-rotation"
"""Annotation of the Secret of a GatewayKey with the last replacement of the key."""
TOKEN_DIGEST: Final = f"{GROUP}/token-digest"
"""Annotation of a service's Secret: a digest of the token that was followed last, by which an edit is recognised."""

DISRUPTION_TARGET: Final = "DisruptionTarget"
"""Condition of a MetalProcess that needs another host; Pods have a condition of the same name."""
MEMORY_PRESSURE: Final = "MemoryPressure"
"""Condition of a MetalHost that takes no new process, named like a Node's; also the reason in resulting statuses."""

STABLE: Final = "Stable"
"""Condition of a MetalHost whose Lease has expired lately: False while it takes no new process for that reason."""
FLAPPING: Final = "Flapping"
"""Reason in `STABLE` and in resulting statuses."""

PAUSED: Final = "Paused"
"""Condition of a MetalHost whose owner needs the machine: it takes no new process, and moves those that it has."""
HOST_PAUSED: Final = "HostPaused"
"""Reason in the statuses of processes and services that result from `PAUSED`."""
DRAINED: Final = "Drained"
"""Condition of a MetalHost that is being drained: True once no process is left on it."""

ADDRESS_ACCEPTED: Final = "AddressAccepted"
"""Condition of a MetalHost whose EndpointSlices may name the address that it states."""
REACHABLE: Final = "Reachable"
"""Condition of a MetalHost whose agent answers the controller."""

Priority = Literal["critical", "high", "normal", "low", "batch"]
SchedulingMode = Literal["Queue", "Native", "Kueue"]
"""The party that decides which pod gets devices first: the queue of the controller, Kubernetes' scheduler, or Kueue."""
DefaultSchedulingMode = Literal["Queue", "Native"]
"""Mode of services that state none: Kueue needs the name of a queue."""
PRIORITY_RANK: Final[dict[Priority, int]] = {priority: rank for rank, priority in enumerate(get_args(Priority))}
"""Position in the order of importance: 0 is the most important, which is bound and loaded first and evicted last."""
LOWEST_PRIORITY: Final[Priority] = get_args(Priority)[-1]


HTTPS: Final = "https"
"""Value of `appProtocol` on the port of a slice if its host serves with a certificate; else the field is absent."""


def digest_request(value: str) -> str:
    """Return the identifier of a replacement by the value of the annotation that asks for it; empty for an empty one.

    The value itself is not repeated elsewhere: it is whatever a user has written.
    """
    return hashlib.sha256(value.encode()).hexdigest()[:16] if value else ""


def slice_name(service: str, host: str) -> str:
    """Return the name of the EndpointSlice of a service on a host; `split_slice_name` is the inverse."""
    return f"{service}.{host}"


def split_slice_name(name: str) -> tuple[str, str]:
    """Return service and host of a slice: a Service's name has no dot. Without a dot, the host is empty."""
    service, _, host = name.partition(".")
    return service, host


def host_secret_key(namespace: str, secret: str) -> str:
    """Return the key of another Secret's token in a host's Secret; it is unique, as a namespace has no underscore."""
    return f"{namespace}_{secret}_token"


GATEWAY_NAME: Final = "pomona-gateway"
"""Name that the chart gives to all objects of the gateway, such as its Service, in `CONTROLLER_NAMESPACE`."""
_SHARDS: Final = 8
GATEWAY_SHARDS: Final = tuple(f"{GATEWAY_NAME}-{number}" for number in range(_SHARDS))
"""The Secrets of `CONTROLLER_NAMESPACE` with copies of all services' tokens, which the gateway reads.

They are several, as all tokens of a large cluster do not fit into one, and each change of one is sent as a whole.
"""


def gateway_shard(namespace: str, service: str) -> str:
    """Return the Secret with the token of a service for the gateway, one of `GATEWAY_SHARDS`."""
    return GATEWAY_SHARDS[zlib.crc32(f"{namespace}/{service}".encode()) % _SHARDS]


def gateway_token_key(namespace: str, service: str) -> str:
    """Return the key of a service's token in that Secret; it is unique, as a namespace has no underscore."""
    return f"{namespace}_{service}_token"


def read_gateway_token_key(key: str) -> tuple[str, str]:
    """Return namespace and service of a key that `gateway_token_key` has made. Raises ValueError for another one."""
    namespace, service, _ = key.split("_")
    return namespace, service


PREVIOUS_TOKENS_KEY: Final = "previous_tokens"
"""Key of the replaced tokens in a Secret with copies; all other keys there have two underscores."""


class PreviousToken(msgspec.Struct, frozen=True, rename="camel"):
    """A token that was replaced and is still valid; `PREVIOUS_TOKENS_KEY` has a JSON object of them by data key."""

    token: str
    """In base64, as the data of a Secret."""
    valid_until: int
    """In seconds since 1970."""


class ApiStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of every struct that is read from or written to the API."""


def without_defaults(struct: ApiStruct) -> dict[str, Any]:
    """Return the fields of a struct as JSON, without those that have their default or are empty (None, "" or []).

    msgspec's own `omit_defaults` compares numbers and strings by identity, so equal structs may look different to it.
    """
    stated = {}
    for field in _struct_fields(type(struct)):
        value = getattr(struct, field.name)
        if value not in (field.default, None, "", []):
            stated[field.encode_name] = _as_json(value)
    return stated


@functools.lru_cache
def _struct_fields(struct: type[ApiStruct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a struct: msgspec reads its annotations anew at each call, and each decision asks."""
    return msgspec.structs.fields(struct)


def _as_json(value: object) -> object:
    if isinstance(value, list):
        return [_as_json(entry) for entry in value]
    return without_defaults(value) if isinstance(value, ApiStruct) else value


# What the annotation of a field has beside its type: a text is its description, which `kubectl explain` shows, `Meta`
# has limits that hold in the struct as well, and a dictionary has keywords of its schema, for the API server alone.


def rule(cel: str, message: str) -> dict[str, str]:
    """Return a CEL rule of a CRD, with standard CEL functions only; `message` gives the user the remedy."""
    return {"rule": cel, "message": message}


def checked_by(*rules: dict[str, str]) -> dict[str, Any]:
    """Return keywords for the schema of a field: CEL rules, which are added to those of its type."""
    return {"x-kubernetes-validations": list(rules)}


def of_same_namespace(kind: str) -> dict[str, Any]:
    """Return keywords for the schema of a field that names an object of this kind in its own namespace."""
    message = f"names a {kind} of the same namespace: use its name alone"
    return checked_by(rule("!self.contains('/')", message))


AS_SET: Final = {"x-kubernetes-list-type": "set"}
"""The schema of a list of distinct values, of which server-side apply merges those of several writers."""


def keyed_by(*keys: str) -> dict[str, Any]:
    """Return keywords for the schema of a list: server-side apply merges the entries of several writers by key."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


LABEL_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
"""An RFC 1123 label, such as the name of a Service: no dot, so it is one part of an EndpointSlice's name."""
NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
"""An RFC 1123 subdomain, as of most objects' names: neither `..` nor a slash, so it is one segment of a path."""
LABEL_VALUE_PATTERN: Final = r"^[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$"
"""A value of a label that is not empty, or its key without a prefix; both have at most 63 letters."""

LONGEST_NAME: Final = 253
LONGEST_LABEL: Final = 63

# The schema has the patterns, the struct has not: the API server has checked what is read from it.
Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME, extra_json_schema={"pattern": NAME_PATTERN})]
LabelName = Annotated[str, Meta(min_length=1, max_length=LONGEST_LABEL, extra_json_schema={"pattern": LABEL_PATTERN})]
HostName = Annotated[str, Meta(max_length=LONGEST_LABEL, extra_json_schema={"pattern": NAME_PATTERN})]
SecretName = Annotated[str, Meta(min_length=1, max_length=180, extra_json_schema={"pattern": NAME_PATTERN})]
"""Name of a Secret of which a host may get a copy: `host_secret_key` must be a valid key of at most 253 characters."""
Features = Annotated[list[Annotated[str, Meta(max_length=63, pattern=r"^[A-Z][A-Za-z0-9]*$")]], Meta(max_length=64)]
"""Names of features of agents, in CamelCase."""

AUTO_ACCELERATOR: Final = "auto"
"""Value of hardware.accelerator that leaves the choice to the controller."""
Accelerator = Annotated[str, Meta(min_length=1, max_length=40, extra_json_schema={"pattern": LABEL_PATTERN})]
"""Name of an accelerator vendor, or `metal`. The vendors are in a table that an administrator may extend."""
LARGEST_AMOUNT: Final = 1 << 62
"""A server may state any number, and an object takes 63 bits. The schema's limits are floating-point numbers."""
_LARGEST_COUNT: Final = (1 << 31) - 1
UNSTATED_LIMITS: Final = frozenset({LARGEST_AMOUNT, _LARGEST_COUNT})
"""Limits of what a number can be, which the reference does not repeat for each field."""

# The schema has these limits, the structs have not: what a host reports beyond them is judged where it is used.
Amount = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": LARGEST_AMOUNT})]
"""Bytes, parameters or elements: as many as an object can state, since headers of weights and clocks state them."""
Count = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": _LARGEST_COUNT})]
"""A number of things, or of milliseconds: as many as 32 bits hold."""
Time = Annotated[str, Meta(extra_json_schema={"maxLength": 40, "format": "date-time"})]
"""A time of RFC 3339, with at most nanoseconds; empty or absent if it is unknown, as the field says."""
Uid = Annotated[str, Meta(max_length=64)]
"""`metadata.uid` of an object."""
ShortText = Annotated[str, Meta(max_length=256)]
"""A name, a size or a digest as text. Whatever a host states in it fits into messages and tables of others."""
LongText = Annotated[str, Meta(max_length=2048)]
"""A path, the address of an image, or a list of names as text."""
LabelKey = Annotated[str, Meta(extra_json_schema={"maxLength": LONGEST_NAME + 1 + LONGEST_LABEL})]
LabelValue = Annotated[str, Meta(extra_json_schema={"maxLength": LONGEST_LABEL})]
Labels = Annotated[dict[LabelKey, LabelValue], Meta(extra_json_schema={"maxProperties": 64})]
"""Labels that an object must have. More than a few are never needed: nodes of clouds have some 40 in all."""
Quantity = Annotated[
    int | str,
    Meta(
        extra_json_schema={
            "pattern": r"^[0-9]+(\.[0-9]+)?(m| ?(k|M|G|T|Ki|Mi|Gi|Ti)B?| ?B)?$",
            "minimum": 0,
            "maximum": LARGEST_AMOUNT,
            "maxLength": 32,
        }
    ),
]
"""A quantity such as `500m`, `4Gi`, `4GiB`, `1.5 GB` or a plain number; `crds/quantity.py` reads it, and writes it as
Kubernetes does."""

ByteSize = Annotated[
    int | str,
    Meta(
        extra_json_schema={
            "pattern": r"^([1-9][0-9]*(\.[0-9]+)?|0\.[0-9]*[1-9][0-9]*)( ?(k|M|G|T|Ki|Mi|Gi|Ti)B?| ?B)?$",
            "minimum": 1,
            "maximum": LARGEST_AMOUNT,
            "maxLength": 32,
        }
    ),
]
"""A quantity of memory above 0, in bytes or such as `24Gi` or `24GiB`."""


class OwnerReference(ApiStruct, frozen=True):
    """`metav1.OwnerReference`."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class ManagedFields(ApiStruct, frozen=True):
    """`metav1.ManagedFieldsEntry`: the time when one writer last changed its fields."""

    time: str = ""
    subresource: str = ""


class ObjectMeta(ApiStruct, frozen=True):
    """The fields of `metav1.ObjectMeta` that Pomona uses."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: list[str] = []
    owner_references: list[OwnerReference] = []
    managed_fields: list[ManagedFields] = []


class ApiObject(ApiStruct, frozen=True):
    """Base of the kinds of Pomona: the fields that every object has."""

    metadata: ObjectMeta
    api_version: str = ""
    kind: str = ""


class Condition(ApiStruct, frozen=True):
    """`metav1.Condition`: one observed fact, with the time of its last change and the observed generation."""

    type: Annotated[str, Meta(max_length=316, pattern=r"^[A-Za-z0-9.\-/]+$"), "Type of the condition, in CamelCase."]
    status: Annotated[Literal["True", "False", "Unknown"], "True, False or Unknown."]
    reason: Annotated[
        str,
        Meta(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"),
        "Reason for the status: one CamelCase word that programs may compare.",
    ]
    message: Annotated[str, Meta(max_length=32768), "Explanation for people: the cause and the remedy."]
    last_transition_time: Annotated[Time, "When the status last changed."]
    observed_generation: Annotated[Amount | None, "The metadata.generation for which the condition was set."] = None


Conditions = Annotated[
    list[Condition], Meta(max_length=32), "Current conditions of the object, one entry for each type.", keyed_by("type")
]


class SecretReference(ApiStruct, frozen=True):
    """Reference to a Secret in the namespace of the object."""

    name: Annotated[SecretName, "Name of a Secret in the same namespace.", of_same_namespace("Secret")]


_DECADE_SECONDS: Final = 10 * 366 * 24 * 3600


class Toleration(ApiStruct, frozen=True):
    """`corev1.Toleration`."""

    key: Annotated[LabelKey, "Taint key that is tolerated. An empty key with operator Exists tolerates all taints."] = (
        ""
    )
    operator: Annotated[
        Literal["Exists", "Equal"], "Equal: the taint must have the same value. Exists: the taint may have any value."
    ] = "Equal"
    value: Annotated[LabelValue, "Taint value that is tolerated when operator is Equal."] = ""
    effect: Annotated[
        Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"],
        "Taint effect that is tolerated; empty tolerates all effects.",
    ] = ""
    toleration_seconds: Annotated[
        Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": _DECADE_SECONDS})] | None,
        "For effect NoExecute: seconds until the pod is evicted. Default: the pod is never evicted.",
        {"format": "int64"},
    ] = None
