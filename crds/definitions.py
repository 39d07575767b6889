"""The CustomResourceDefinition of each kind: names, columns that kubectl shows, subresources, selectable fields."""

from typing import Any, Literal

import msgspec

from crds import acceleratorpool, gatewaykey, gatewayquota, inferenceservice, metalhost, model
from crds.acceleratorpool import AcceleratorPool
from crds.gatewaykey import GatewayKey
from crds.gatewayquota import GatewayQuota
from crds.inferenceservice import InferenceService
from crds.meta import GROUP, VERSION
from crds.metalhost import MetalHost
from crds.metalprocess import MetalProcess
from crds.model import Model
from crds.modelroute import ModelRoute
from crds.nodefitness import NodeFitness
from crds.schema import Schema, field_schema


class Column(msgspec.Struct, frozen=True):
    """One column of `kubectl get`; `wide` columns show with `-o wide`."""

    name: str
    path: str
    type: Literal["string", "integer", "boolean", "date"] = "string"
    wide: bool = False

    def render(self) -> dict[str, Any]:
        """Return the printer column in the form of the CRD."""
        column: dict[str, Any] = {"name": self.name, "type": self.type, "jsonPath": self.path}
        return column | {"priority": 1} if self.wide else column


def condition(type_: str, field: str) -> str:
    """Return the JSONPath of one field of the condition of that type."""
    return f".status.conditions[?(@.type=='{type_}')].{field}"


SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}
AGE = Column("Age", ".metadata.creationTimestamp", "date")


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """Names, columns and rules of a kind, beside its fields."""

    struct: type[msgspec.Struct]
    plural: str
    short: str
    aliases: tuple[str, ...] = ()
    """Further short names."""
    columns: tuple[Column, ...]
    cluster_scoped: bool = False
    scalable: bool = False
    selectable: tuple[str, ...] = ()
    """Paths of the fields by which `kubectl get --field-selector` finds objects; an absent one counts as empty."""
    rules: tuple[dict[str, str], ...] = ()

    @property
    def kind(self) -> str:
        """Return the kind's name, which is the struct's."""
        return self.struct.__name__

    def render(self) -> dict[str, Any]:
        """Return the CustomResourceDefinition of this kind: names, scope, and its one version with the schema."""
        # AGE, the column with the age, comes last in `kubectl get`, as for Kubernetes' own kinds.
        version: dict[str, Any] = {
            "name": VERSION,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": self._render_schema()},
            "subresources": ({"status": {}} if self._has_field("status") else {})
            | ({"scale": dict(SCALE)} if self.scalable else {}),
            "additionalPrinterColumns": [column.render() for column in (*self.columns, AGE)],
        }

        if self.selectable:
            version["selectableFields"] = [{"jsonPath": path} for path in self.selectable]

        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{self.plural}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "names": {
                    "kind": self.kind,
                    "listKind": f"{self.kind}List",
                    "plural": self.plural,
                    "singular": self.kind.lower(),
                    "shortNames": [self.short, *self.aliases],
                    "categories": ["pomona"],
                },
                "scope": "Cluster" if self.cluster_scoped else "Namespaced",
                "versions": [version],
            },
        }

    def _has_field(self, name: str) -> bool:
        return name in self.struct.__struct_fields__

    def _render_schema(self) -> Schema:
        """Return the schema of a whole object of this kind: its spec and its status, if it has them, and its rules."""
        # The API server fills in the defaults of a spec; a status has none.
        spec = {"spec": field_schema(self.struct, "spec", defaults=True)} if self._has_field("spec") else {}
        status = {"status": field_schema(self.struct, "status", defaults=False)} if self._has_field("status") else {}

        schema: Schema = {
            "description": (self.struct.__doc__ or "").strip(),
            "type": "object",
            "properties": {
                "apiVersion": {"type": "string"},
                "kind": {"type": "string"},
                "metadata": {"type": "object"},
                **spec,
                **status,
            },
        }

        # An object must have a spec if that has required fields.
        if "required" in spec.get("spec", {}):
            schema["required"] = ["spec"]
        if self.rules:
            schema["x-kubernetes-validations"] = list(self.rules)
        return schema


DEFINITIONS = (
    Definition(
        struct=Model,
        plural="models",
        short="mdl",
        columns=(
            Column("Phase", ".status.phase"),
            Column("Size", ".status.size"),
            Column("Accelerator", ".spec.hardware.accelerator"),
            Column("Cached", condition("Cached", "reason")),
            Column("Reason", condition("Ready", "reason")),
            Column("Arch", ".status.gguf.architecture", wide=True),
            Column("Parameters", ".status.parameters", wide=True),
            Column("Quantization", ".status.gguf.quantization", wide=True),
            Column("Message", condition("Ready", "message"), wide=True),
            Column("Cache message", condition("Cached", "message"), wide=True),
        ),
        selectable=(".status.phase", ".spec.hardware.accelerator"),
        rules=(model.NAME_RULE,),
    ),
    Definition(
        struct=InferenceService,
        plural="inferenceservices",
        short="isvc",
        columns=(
            Column("Phase", ".status.phase"),
            Column("Model", ".spec.modelRef"),
            Column("Accelerator", ".status.accelerator"),
            Column("Engine", ".status.runtime"),
            Column("Available", ".status.availableReplicas", "integer"),
            Column("Updated", ".status.readyReplicas", "integer"),
            Column("Replicas", ".status.replicas", "integer"),
            Column("Reason", condition("Ready", "reason")),
            Column("Endpoint", ".status.endpoint"),
            Column("Queue", ".status.queue.place", wide=True),
            Column("Context", ".spec.contextLength", "integer", wide=True),
            Column("Memory", ".status.memory", wide=True),
            Column("Device memory", ".status.deviceMemory", wide=True),
            Column("Speed", ".status.performance.tokensPerSecond", wide=True),
            Column("Tokens/s", ".status.tokensPerSecond", wide=True),
            Column("Requests/min", ".status.requestsPerMinute", "integer", wide=True),
            Column("Latency ms", ".status.averageLatencyMs", "integer", wide=True),
            Column("Message", condition("Ready", "message"), wide=True),
        ),
        scalable=True,
        selectable=(".status.phase", ".status.accelerator"),
        rules=(inferenceservice.NAME_RULE,),
    ),
    Definition(
        struct=GatewayKey,
        plural="gatewaykeys",
        short="gk",
        columns=(
            Column("Ready", condition("Ready", "status")),
            Column("Reason", condition("Ready", "reason")),
            Column("Services", ".spec.services"),
            Column("Expires", ".spec.expiresAt"),
            Column("Last used", ".status.usage.lastUsedAt", "date"),
            Column("Requests", ".status.usage.requests", "integer"),
            Column("Tokens", ".status.usage.tokens", "integer"),
            Column("Suspended", ".spec.suspend", "boolean", wide=True),
            Column("Requests/min", ".spec.requestsPerMinute", "integer", wide=True),
            Column("Tokens/min", ".spec.tokensPerMinute", "integer", wide=True),
            Column("Concurrent", ".spec.concurrentRequests", "integer", wide=True),
            Column("Message", condition("Ready", "message"), wide=True),
        ),
        rules=(gatewaykey.NAME_RULE,),
    ),
    Definition(
        struct=GatewayQuota,
        plural="gatewayquotas",
        short="gq",
        columns=(
            Column("Requests/min", ".spec.requestsPerMinute", "integer"),
            Column("Tokens/min", ".spec.tokensPerMinute", "integer"),
            Column("Concurrent", ".spec.concurrentRequests", "integer"),
        ),
        cluster_scoped=True,
        rules=(gatewayquota.NAME_RULE,),
    ),
    Definition(
        struct=ModelRoute,
        plural="modelroutes",
        short="mr",
        columns=(
            Column("Ready", condition("Ready", "status")),
            Column("Reason", condition("Ready", "reason")),
            Column("Message", condition("Ready", "message"), wide=True),
        ),
    ),
    Definition(
        struct=MetalHost,
        plural="metalhosts",
        short="mh",
        columns=(
            Column("Ready", condition("Ready", "status")),
            Column("Chip", ".status.chip"),
            Column("Free", ".status.available"),
            Column("Address", ".status.address"),
            Column("Reason", condition("Ready", "reason")),
            Column("Address accepted", condition("AddressAccepted", "status"), wide=True),
            Column("Reachable", condition("Reachable", "status"), wide=True),
            Column("Cordoned", ".spec.unschedulable", "boolean", wide=True),
            Column("Drained", condition("Drained", "reason"), wide=True),
            Column("Paused", condition("Paused", "reason"), wide=True),
            Column("GPU", ".status.gpuCores", "integer", wide=True),
            Column("Pressure", ".status.memoryPressure", wide=True),
            Column("Thermal", ".status.thermalLevel", wide=True),
            Column("Power", ".status.powerSource", wide=True),
            Column("OS", ".status.os", wide=True),
            Column("Agent", ".status.agentVersion", wide=True),
        ),
        cluster_scoped=True,
        rules=(metalhost.NAME_RULE,),
    ),
    Definition(
        struct=MetalProcess,
        plural="metalprocesses",
        short="mp",
        columns=(
            Column("Phase", ".status.phase"),
            Column("Service", ".spec.serviceName"),
            Column("Host", ".spec.hostName"),
            Column("Restarts", ".status.restarts", "integer"),
            Column("Reason", ".status.reason"),
            Column("Message", ".status.message", wide=True),
        ),
        selectable=(".spec.hostName",),
    ),
    Definition(
        struct=AcceleratorPool,
        plural="acceleratorpools",
        short="pool",
        aliases=("pools",),
        columns=(
            Column("Accelerator", ".spec.accelerator"),
            Column("Cells", ".status.cells", "integer"),
            Column("Used", ".status.used"),
            Column("Waiting", ".status.waiting", "integer"),
            Column("Borrowed", ".status.borrowed"),
            Column("Lent", ".status.lent"),
            Column("Ready", condition("Ready", "status")),
            Column("Reason", condition("Ready", "reason")),
            Column("Nominal", ".spec.nominal", wide=True),
            Column("Borrowing limit", ".spec.borrowingLimit", wide=True),
            Column("Lending limit", ".spec.lendingLimit", wide=True),
            Column("Max waiting", ".spec.elastic.maxWaiting", "integer", wide=True),
            Column("Message", condition("Ready", "message"), wide=True),
        ),
        cluster_scoped=True,
        rules=acceleratorpool.OBJECT_RULES,
    ),
    Definition(
        struct=NodeFitness,
        plural="nodefitnesses",
        short="nf",
        columns=(
            Column("Vendor", ".status.vendor"),
            Column("Class", ".status.deviceClass"),
            Column("Heartbeat", ".status.observedAt", "date"),
            Column("Ready", condition("Ready", "status")),
            Column("Reason", condition("Ready", "reason")),
            Column("Source", ".status.source", wide=True),
            Column("Driver", ".status.driver", wide=True),
            Column("Cores", ".status.cpuCores", "integer", wide=True),
            Column("Agent", ".status.agentVersion", wide=True),
            Column("Message", condition("Ready", "message"), wide=True),
        ),
        cluster_scoped=True,
    ),
)
"""All kinds, in the order in which a user encounters them."""
