"""Manifests that are refused, with the messages: tested with a real API server, and with validation without one."""

from typing import Any, NamedTuple

from crds.meta import API_VERSION
from kube.client import Obj
from kube.resources import (
    ACCELERATOR_POOLS,
    GATEWAY_KEYS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODEL_ROUTES,
    MODELS,
    Resource,
)

MODEL = {"source": "https://models.example/tiny.gguf"}
SERVICE = {"modelRef": "tiny"}
PROCESS = {
    "serviceName": "chat",
    "modelName": "tiny",
    "runtime": "llama.cpp",
    "artifact": {"source": MODEL["source"]},
    "memoryBytes": 1 << 30,
    "tokenSecret": "chat-token",
}
SPECS: dict[Resource, dict[str, Any]] = {
    MODELS: MODEL,
    INFERENCE_SERVICES: SERVICE,
    METAL_PROCESSES: PROCESS,
    METAL_HOSTS: {},
    ACCELERATOR_POOLS: {"accelerator": "nvidia", "nodeSelector": {"team": "a"}},
    GATEWAY_KEYS: {},
    MODEL_ROUTES: {"services": [{"name": "chat"}]},
}
_SERVING = {"priority": "normal", "mode": "chat", "cacheTypeK": "f16", "cacheTypeV": "f16"}
_REFRESH = {"refreshPolicy": "IfNotPresent", "refreshIntervalSeconds": 3600}
DEFAULTS: dict[Resource, dict[str, Any]] = {
    MODELS: {
        **_REFRESH,
        "cache": {"medium": "Volume", "scope": "model", "accessMode": "ReadWriteOnce"},
        "hardware": {"accelerator": "cpu"},
    },
    INFERENCE_SERVICES: {
        **_SERVING,
        "replicas": 1,
        "suspend": False,
        "evictionProtection": False,
        "drainSeconds": 600,
        "placement": {"minFit": "marginal"},
    },
    METAL_PROCESSES: _SERVING | {"protected": False, "drainSeconds": 600},
    GATEWAY_KEYS: {"suspend": False, "overlapSeconds": 86_400},
    MODEL_ROUTES: {"services": [{"name": "chat", "weight": 1}]},
}
"""Default values that are added to each of `SPECS`."""
NULLS: list[dict[str, Any]] = [
    {"replicas": None, "adapters": None, "image": None, "resources": None},
    {"hardware": {"accelerator": None}},
    {"nodeSelector": {"disk": None}},
    {"tolerations": [{"key": None}]},
]
"""Parts of a service's spec with null (a YAML key without a value), which counts as absent."""
GOOD_ARGUMENTS = ["--temp", "0.5", "-fa", "on", "--n_threads", "2", "{{ größer - 1 }}"]
BAD_ARGUMENTS = ["a\0b", "a\nb", "on\n", "\x7f"]


def make_manifest(resource: Resource, namespace: str = "default", name: str = "one", **spec: Any) -> Obj:
    """Return a manifest that is valid unless `spec` makes it invalid; a field that is None is left out."""
    fields = {**SPECS[resource], **spec}
    return {
        "apiVersion": API_VERSION,
        "kind": resource.kind,
        "metadata": {"namespace": namespace, "name": name},
        "spec": {field: value for field, value in fields.items() if value is not None},
    }


class RefusedManifest(NamedTuple):
    """A manifest that is refused, and the message as a pattern."""

    resource: Resource
    spec: dict[str, Any]
    says: str
    name: str = "one"

    def manifest(self, namespace: str = "default") -> Obj:
        return make_manifest(self.resource, namespace, self.name, **self.spec)


REFUSED_MANIFESTS = {
    "key for a regular expression": RefusedManifest(GATEWAY_KEYS, {"services": ["chat", "a.+b"]}, "services"),
    "key for services of two namespaces at once": RefusedManifest(GATEWAY_KEYS, {"services": ["a/b/c"]}, "services"),
    "key with 65 patterns": RefusedManifest(GATEWAY_KEYS, {"services": ["a"] * 65}, "services"),
    "key with a pattern that is no name": RefusedManifest(GATEWAY_KEYS, {"services": ["a" * 129]}, "services"),
    "key whose name is too long for a service's": RefusedManifest(
        GATEWAY_KEYS, {}, "the name becomes that of a Secret: use at most 40", "k" * 41
    ),
    "key without any request": RefusedManifest(GATEWAY_KEYS, {"requestsPerMinute": 0}, "requestsPerMinute"),
    "key that is replaced in a century": RefusedManifest(GATEWAY_KEYS, {"overlapSeconds": 31_536_001}, "overlapSec"),
    "route to no service": RefusedManifest(MODEL_ROUTES, {"services": []}, "services"),
    "route to 17 services": RefusedManifest(
        MODEL_ROUTES, {"services": [{"name": f"s{number}"} for number in range(17)]}, "services"
    ),
    "route to a pattern": RefusedManifest(MODEL_ROUTES, {"services": [{"name": "chat-*"}]}, "services"),
    "route to a service of two namespaces": RefusedManifest(
        MODEL_ROUTES, {"services": [{"name": "a/b/c"}]}, "services"
    ),
    "route to a service twice": RefusedManifest(
        MODEL_ROUTES, {"services": [{"name": "chat"}, {"name": "chat", "weight": 3}]}, "services"
    ),
    "route that nobody takes": RefusedManifest(
        MODEL_ROUTES, {"services": [{"name": "chat", "weight": 0}]}, "no service has a weight above 0"
    ),
    "route whose only service stands in for itself": RefusedManifest(
        MODEL_ROUTES, {"fallbacks": [{"name": "code"}, {"name": "chat"}]}, "the only service stands in for itself"
    ),
    "route with a cause": RefusedManifest(MODEL_ROUTES, {"fallbacks": [{"name": "code", "when": ["Bored"]}]}, "when"),
    "route with five fallbacks": RefusedManifest(
        MODEL_ROUTES, {"fallbacks": [{"name": f"s{number}"} for number in range(5)]}, "fallbacks"
    ),
    "access for a pattern of namespaces": RefusedManifest(
        INFERENCE_SERVICES, {"access": {"namespaces": ["team-*"]}}, "access.namespaces"
    ),
    "drain for which others would wait": RefusedManifest(
        INFERENCE_SERVICES, {"drainSeconds": 601}, "set spec.drainSeconds to 600 or less, or spec.evictionProtection"
    ),
    "scaled twice": RefusedManifest(INFERENCE_SERVICES, {"replicas": 2, "scaling": {}}, "decides the number"),
    "least above most": RefusedManifest(INFERENCE_SERVICES, {"scaling": {"minReplicas": 2}}, "less than min"),
    "drain of a day": RefusedManifest(
        INFERENCE_SERVICES, {"drainSeconds": 86_400, "evictionProtection": True}, "drainSeconds"
    ),
    "pinned weights that are looked at again": RefusedManifest(
        MODELS, {"refreshPolicy": "OnChange", "sha256": "a" * 64}, "spec.refreshPolicy OnChange is for"
    ),
    "volume that is looked at again": RefusedManifest(
        MODELS, {"source": "pvc://weights/tiny.gguf", "refreshPolicy": "OnChange"}, "spec.refreshPolicy OnChange is for"
    ),
    "interval that would be a flood": RefusedManifest(
        MODELS, {"refreshPolicy": "OnChange", "refreshIntervalSeconds": 10}, "refreshIntervalSeconds"
    ),
    "mirror whose bytes cannot be verified": RefusedManifest(
        MODELS, {"mirrors": ["https://mirror.example/tiny.gguf"]}, "spec.mirrors needs a digest"
    ),
    "mirror of a tag": RefusedManifest(
        MODELS,
        {"source": "oci://ghcr.io/acme/tiny:v1", "mirrors": ["oci://mirror.example/acme/tiny:v1"]},
        "spec.mirrors needs a digest",
    ),
    "mirror of an image that nodes pull": RefusedManifest(
        MODELS,
        {
            "source": f"oci://ghcr.io/acme/tiny@sha256:{'a' * 64}",
            "mirrors": [f"oci://mirror.example/acme/tiny@sha256:{'a' * 64}"],
            "cache": {"medium": "Image"},
        },
        "spec.mirrors is not for cache.medium Image",
    ),
    "mirror that is a file of the host": RefusedManifest(
        MODELS, {"sha256": "a" * 64, "mirrors": ["file:///etc/passwd"]}, "mirrors"
    ),
    "thinking that contradicts modelType": RefusedManifest(
        MODELS, {"modelType": "DenseThinking", "thinking": False}, "spec.modelType and spec.thinking contradict"
    ),
    "more active parameters than there are": RefusedManifest(
        MODELS, {"totalParameters": 5, "activeParameters": 6}, "spec.activeParameters needs spec.totalParameters"
    ),
    "domain that is no part of a label": RefusedManifest(MODELS, {"domains": ["Code review"]}, "domains"),
    "file:// with a Secret": RefusedManifest(
        MODELS,
        {"source": "file:///m.gguf", "memoryBytes": 1, "sourceSecretRef": {"name": "hub"}},
        "a file:// source takes no spec.sourceSecretRef: remove it",
    ),
    "folder of a hub with a sha256": RefusedManifest(
        MODELS, {"source": "hf://acme/mlx@v1", "sha256": "0" * 64}, "a folder has no sha256: remove spec.sha256"
    ),
    "folder of a host with a sha256": RefusedManifest(
        MODELS, {"source": "file:///mlx/", "memoryBytes": 1, "sha256": "0" * 64}, "pin a commit with @REVISION"
    ),
    "oci:// with a digest of a file": RefusedManifest(
        MODELS,
        {"source": "oci://r.example/tiny:v1", "sha256": "0" * 64},
        "pin it with oci://REGISTRY/REPOSITORY@sha256",
    ),
    "image volume of another source": RefusedManifest(
        MODELS, {"cache": {"medium": "Image"}}, "cache.medium Image needs a source that nodes can pull as an image"
    ),
    "ollama:// without memoryBytes": RefusedManifest(
        MODELS, {"source": "ollama://qwen3:8b"}, "spec: Invalid value: .*an ollama:// source needs spec.memoryBytes"
    ),
    "ollama:// with a digest": RefusedManifest(
        MODELS,
        {"source": "ollama://qwen3:8b", "memoryBytes": 1, "sha256": "0" * 64},
        "Ollama pulls and verifies it by itself",
    ),
    "pvc:// with a digest": RefusedManifest(
        MODELS, {"source": "pvc://weights/m.gguf", "sha256": "0" * 64}, "nothing is fetched; remove them"
    ),
    "pvc:// with a Secret": RefusedManifest(
        MODELS, {"source": "pvc://weights/m.gguf", "sourceSecretRef": {"name": "a"}}, "nothing is fetched; remove them"
    ),
    "scheme that nobody fetches": RefusedManifest(
        MODELS, {"source": "ftp://a/m.gguf"}, "spec.source: .*ftp://a/m.gguf"
    ),
    "no source": RefusedManifest(MODELS, {"source": None}, "spec.source: Required value"),
    "source that is no string": RefusedManifest(MODELS, {"source": 7}, "spec.source: .*must be of type string"),
    "sha256 in upper case": RefusedManifest(MODELS, {"sha256": "A" * 64}, "spec.sha256: .*0-9a-f"),
    "short sha256": RefusedManifest(MODELS, {"sha256": "a" * 63}, "spec.sha256: .*0-9a-f"),
    "sha256 with a line break": RefusedManifest(MODELS, {"sha256": "a" * 64 + "\n"}, "spec.sha256: .*0-9a-f"),
    "memory in no unit of Kubernetes": RefusedManifest(
        MODELS, {"memoryBytes": "8 gigs"}, "spec.memoryBytes: .*should match"
    ),
    "labels of more nodes than there are": RefusedManifest(
        INFERENCE_SERVICES,
        {**SERVICE, "nodeSelector": {f"label-{number}": "" for number in range(65)}},
        "spec.nodeSelector: Too many: 65: must have at most 64 items",
    ),
    "long key of a label": RefusedManifest(
        INFERENCE_SERVICES,
        {**SERVICE, "nodeSelector": {"k" * 318: ""}},
        "spec.nodeSelector: Invalid value: .*a key has at most 317 characters",
    ),
    "no memory": RefusedManifest(MODELS, {"memoryBytes": 0}, "spec.memoryBytes: .*greater than or equal to 1"),
    "memory beyond 64 bits": RefusedManifest(
        MODELS, {"memoryBytes": 1 << 80}, "spec.memoryBytes: .*less than or equal to"
    ),
    "unknown accelerator": RefusedManifest(
        MODELS, {"hardware": {"accelerator": "TPU!"}}, 'spec.hardware.accelerator: .*"TPU!".*should match'
    ),
    "long Model name": RefusedManifest(MODELS, {}, "use a name of at most 46 characters", "m" * 47),
    "name that is none": RefusedManifest(
        MODELS, {}, "metadata.name: Invalid value: .*lowercase RFC 1123 subdomain", "My_Model"
    ),
    "long service name": RefusedManifest(INFERENCE_SERVICES, {}, "use at most 40 lower-case letters", "s" * 41),
    "service name with a leading digit": RefusedManifest(INFERENCE_SERVICES, {}, "starting with a letter", "1st"),
    "no Model": RefusedManifest(INFERENCE_SERVICES, {"modelRef": ""}, "spec.modelRef: .*at least 1 char"),
    "negative replicas": RefusedManifest(
        INFERENCE_SERVICES, {"replicas": -1}, "spec.replicas: .*greater than or equal to 0"
    ),
    "replicas in words": RefusedManifest(
        INFERENCE_SERVICES, {"replicas": "two"}, "spec.replicas: .*must be of type integer"
    ),
    "too many slots": RefusedManifest(
        INFERENCE_SERVICES, {"parallel": 4097}, "spec.parallel: .*less than or equal to 4096"
    ),
    "host beside the queue": RefusedManifest(
        INFERENCE_SERVICES,
        {"hardware": {"accelerator": "metal"}, "scheduling": {"mode": "Native"}},
        "always go by the queue: remove spec.scheduling.mode",
    ),
    "choice without the queue": RefusedManifest(
        INFERENCE_SERVICES,
        {"hardware": {"accelerator": "auto"}, "scheduling": {"mode": "Native"}},
        "accelerator auto needs the controller's queue: set spec.scheduling.mode to Queue",
    ),
    "choice by a Model": RefusedManifest(
        MODELS, {"hardware": {"accelerator": "auto"}}, "only a service may state hardware.accelerator auto"
    ),
    "host given to Kueue": RefusedManifest(
        INFERENCE_SERVICES,
        {"hardware": {"accelerator": "metal"}, "scheduling": {"mode": "Kueue", "queueName": "models"}},
        "always go by the queue: remove spec.scheduling.mode",
    ),
    "Kueue without a queue": RefusedManifest(
        INFERENCE_SERVICES, {"scheduling": {"mode": "Kueue"}}, "names the LocalQueue of mode Kueue: set both"
    ),
    "queue without Kueue": RefusedManifest(
        INFERENCE_SERVICES, {"scheduling": {"queueName": "models"}}, "names the LocalQueue of mode Kueue: set both"
    ),
    "queue of another mode": RefusedManifest(
        INFERENCE_SERVICES,
        {"scheduling": {"mode": "Native", "queueName": "models"}},
        "names the LocalQueue of mode Kueue: set both",
    ),
    "name of a queue that is no label": RefusedManifest(
        INFERENCE_SERVICES,
        {"scheduling": {"mode": "Kueue", "queueName": "Models_"}},
        "spec.scheduling.queueName: .*should match",
    ),
    "unknown mode of scheduling": RefusedManifest(
        INFERENCE_SERVICES, {"scheduling": {"mode": "Fair"}}, 'spec.scheduling.mode: .*"Fair": supported values'
    ),
    "tiny context": RefusedManifest(INFERENCE_SERVICES, {"contextLength": 1}, "spec.contextLength: .*equal to 128"),
    "negative quantity": RefusedManifest(
        INFERENCE_SERVICES, {"resources": {"cpu": -1}}, "spec.resources.cpu: .*greater than or equal to 0"
    ),
    "quantity that is none": RefusedManifest(
        INFERENCE_SERVICES, {"resources": {"memory": "much"}}, 'spec.resources.memory: .*"much".*should match'
    ),
    "quantity of a million digits": RefusedManifest(
        INFERENCE_SERVICES,
        {"resources": {"memory": "9" * 990_000}},
        "spec.resources.memory: Too long: may not be more than 32 bytes",
    ),
    "long quantity of devices": RefusedManifest(
        INFERENCE_SERVICES, {"hardware": {"memory": "9" * 33}}, "spec.hardware.memory: Too long"
    ),
    "long quantity of a folder": RefusedManifest(
        INFERENCE_SERVICES,
        {"pod": {"volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "9" * 33}}]}},
        r"spec.pod.volumes\[0\].emptyDir.sizeLimit: Too long",
    ),
    "long quantity of a cache": RefusedManifest(MODELS, {"cache": {"size": "9" * 33}}, "spec.cache.size: Too long"),
    "too many arguments": RefusedManifest(
        INFERENCE_SERVICES, {"extraArgs": ["1"] * 33}, "spec.extraArgs: Too many: 33: must have at most 32 items"
    ),
    "arguments that are no list": RefusedManifest(
        INFERENCE_SERVICES, {"extraArgs": "--temp 1"}, "spec.extraArgs: .*must be of type array"
    ),
    "toleration of an unknown operator": RefusedManifest(
        INFERENCE_SERVICES,
        {"tolerations": [{"key": "a"}, {"operator": "In"}]},
        r'spec.tolerations\[1\].operator: Unsupported value: "In"',
    ),
    "runtime that is no name": RefusedManifest(
        INFERENCE_SERVICES, {"runtime": "v llm"}, 'spec.runtime: .*"v llm".*should match'
    ),
    "unknown mode": RefusedManifest(INFERENCE_SERVICES, {"mode": "speech"}, 'spec.mode: .*"speech".*"embeddings"'),
    "unknown cache type": RefusedManifest(
        INFERENCE_SERVICES, {"cacheTypeK": "q2_k"}, 'spec.cacheTypeK: .*"q2_k".*"q8_0"'
    ),
    "draft that nothing chats with": RefusedManifest(
        INFERENCE_SERVICES,
        {"mode": "embeddings", "speculative": {"draftModelRef": "small"}},
        "spec.speculative is for spec.mode chat: remove it, or set mode to chat",
    ),
    "projector that nothing chats with": RefusedManifest(
        INFERENCE_SERVICES, {"mode": "rerank", "projectorModelRef": "eyes"}, "spec.projectorModelRef is for spec.mode"
    ),
    "template that nothing chats with": RefusedManifest(
        INFERENCE_SERVICES, {"mode": "rerank", "chatTemplate": "{{ x }}"}, "spec.chatTemplate is for spec.mode chat"
    ),
    "speculation without a draft": RefusedManifest(
        INFERENCE_SERVICES, {"speculative": {"maxTokens": 4}}, "spec.speculative.draftModelRef: Required value"
    ),
    "draft of no tokens": RefusedManifest(
        INFERENCE_SERVICES,
        {"speculative": {"draftModelRef": "small", "maxTokens": 0}},
        "spec.speculative.maxTokens: .*greater than or equal to 1",
    ),
    "negative adapter": RefusedManifest(
        INFERENCE_SERVICES,
        {"adapters": [{"modelRef": "accent", "scale": "-1"}]},
        r"spec.adapters\[0\].scale: .*should match",
    ),
    "adapter twice": RefusedManifest(
        INFERENCE_SERVICES,
        {"adapters": [{"modelRef": "accent"}, {"modelRef": "accent", "scale": "2"}]},
        r"spec.adapters\[1\]: Duplicate value",
    ),
    "too many adapters": RefusedManifest(
        INFERENCE_SERVICES,
        {"adapters": [{"modelRef": f"a{number}"} for number in range(9)]},
        "spec.adapters: Too many: 9: must have at most 8 items",
    ),
    "empty template": RefusedManifest(INFERENCE_SERVICES, {"chatTemplate": ""}, "spec.chatTemplate: .*at least 1 char"),
    "process with two drafts": RefusedManifest(
        METAL_PROCESSES,
        {"furtherArtifacts": [{"role": "draft", "artifact": {"source": "hf://a/b/c.gguf"}}] * 2},
        "an engine takes one draft and one projector: remove the others",
    ),
    "process without a service": RefusedManifest(
        METAL_PROCESSES, {"serviceName": None}, "spec.serviceName: Required value"
    ),
    "process with an unknown part": RefusedManifest(
        METAL_PROCESSES,
        {"furtherArtifacts": [{"role": "voice", "artifact": {"source": "hf://a/b/c.gguf"}}]},
        r'spec.furtherArtifacts\[0\].role: .*"voice".*"adapter"',
    ),
    "Secret that no host's key could name": RefusedManifest(
        MODELS, {"sourceSecretRef": {"name": "s" * 181}}, "spec.sourceSecretRef.name: .*may not be more than 180"
    ),
    "host name that nothing can be bound to": RefusedManifest(
        METAL_HOSTS, {}, "use a name of at most 63 characters", "h" * 64
    ),
    "pool of all nodes with a selector": RefusedManifest(
        ACCELERATOR_POOLS, {}, "has all nodes that no other pool selects: remove nodeSelector", "nvidia"
    ),
    "pool of some nodes without a selector": RefusedManifest(
        ACCELERATOR_POOLS, {"nodeSelector": None}, "state in nodeSelector the labels of the pool's nodes"
    ),
    "pool with a dot in its name": RefusedManifest(
        ACCELERATOR_POOLS, {}, "use a name of at most 63 lower-case letters", "team.a"
    ),
    "bytes of devices": RefusedManifest(
        ACCELERATOR_POOLS, {"nominal": "4Gi"}, "nominal counts devices: use a whole number"
    ),
    "part of a device": RefusedManifest(
        ACCELERATOR_POOLS, {"lendingLimit": "0.5"}, "lendingLimit counts devices: use a whole number"
    ),
    "thousands of devices": RefusedManifest(
        ACCELERATOR_POOLS, {"borrowingLimit": "1k"}, "borrowingLimit counts devices: use a whole number"
    ),
    "elastic pool for nothing": RefusedManifest(
        ACCELERATOR_POOLS, {"elastic": {"maxWaiting": 0}}, "maxWaiting: .*greater than or equal to 1"
    ),
    "elastic pool of hosts": RefusedManifest(
        ACCELERATOR_POOLS,
        {"accelerator": "metal", "elastic": {"maxWaiting": 1}},
        "no autoscaler adds hosts to a pool of accelerator metal: remove elastic",
    ),
    "devices of hosts": RefusedManifest(
        ACCELERATOR_POOLS,
        {"accelerator": "metal", "quotas": [{"namespace": "a", "devices": 1}]},
        "hosts have memory and no devices: state memory in quotas",
    ),
    "quota of no namespace": RefusedManifest(
        ACCELERATOR_POOLS, {"quotas": [{"namespace": "team-*"}]}, "namespace: .*should match"
    ),
    "two quotas of a namespace": RefusedManifest(
        ACCELERATOR_POOLS, {"quotas": [{"namespace": "a"}, {"namespace": "a"}]}, "quotas.*: Duplicate value"
    ),
    "pools without the queue": RefusedManifest(
        INFERENCE_SERVICES,
        {"scheduling": {"mode": "Native", "pools": ["nvidia"]}},
        "only the controller's queue knows pools: set spec.scheduling.mode to Queue",
    ),
    "service of a process in another namespace": RefusedManifest(
        METAL_PROCESSES,
        {"serviceName": "../../team-b/endpointslices/chat"},
        r"spec.serviceName: .*should match '\^\[a-z0-9",
    ),
    "service of a process with a dot": RefusedManifest(
        METAL_PROCESSES, {"serviceName": "chat.studio-2"}, "spec.serviceName: .*should match"
    ),
    "Model of a process with a path": RefusedManifest(
        METAL_PROCESSES, {"modelName": "a/../b"}, "spec.modelName: .*should match"
    ),
    "host of a process with a path": RefusedManifest(
        METAL_PROCESSES, {"hostName": ".."}, "spec.hostName: .*should match"
    ),
    "host of a process without a name": RefusedManifest(
        METAL_PROCESSES, {"hostName": ""}, "spec.hostName: .*should match"
    ),
    "Secret of a process with a path": RefusedManifest(
        METAL_PROCESSES, {"tokenSecret": "a..b"}, "spec.tokenSecret: .*should match"
    ),
    "Model with a path": RefusedManifest(INFERENCE_SERVICES, {"modelRef": "../tiny"}, "spec.modelRef: .*should match"),
    "Model of another namespace": RefusedManifest(
        INFERENCE_SERVICES, {"modelRef": "other/tiny"}, "spec.modelRef: .*names a Model of the same namespace: use its"
    ),
    "draft of another namespace": RefusedManifest(
        INFERENCE_SERVICES,
        {"speculative": {"draftModelRef": "other/tiny"}},
        "spec.speculative.draftModelRef: .*names a Model of the same namespace",
    ),
    "projector of another namespace": RefusedManifest(
        INFERENCE_SERVICES,
        {"projectorModelRef": "other/eyes"},
        "spec.projectorModelRef: .*names a Model of the same namespace",
    ),
    "adapter of another namespace": RefusedManifest(
        INFERENCE_SERVICES,
        {"adapters": [{"modelRef": "accent"}, {"modelRef": "other/accent"}]},
        r"spec.adapters\[1\].modelRef: .*names a Model of the same namespace",
    ),
    "Secret of another namespace": RefusedManifest(
        MODELS,
        {"sourceSecretRef": {"name": "other/hub"}},
        "spec.sourceSecretRef.name: .*names a Secret of the same namespace",
    ),
    "claim of another namespace in a source": RefusedManifest(
        MODELS,
        {"source": "pvc://other:weights/tiny.gguf"},
        "a pvc:// source names a PersistentVolumeClaim of the same namespace: use pvc://CLAIM/PATH/FILE.gguf",
    ),
    "claim of another namespace in an escaped source": RefusedManifest(
        MODELS,
        {"source": "pvc://other%2Fweights/tiny.gguf"},
        "a pvc:// source names a PersistentVolumeClaim of the same namespace",
    ),
    "claim of another namespace in a pod": RefusedManifest(
        INFERENCE_SERVICES,
        {"pod": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "other/weights"}}]}},
        r"spec.pod.volumes\[0\].persistentVolumeClaim.claimName: .*names a PersistentVolumeClaim of the same namespace",
    ),
    "ConfigMap of another namespace in a pod": RefusedManifest(
        INFERENCE_SERVICES,
        {"pod": {"volumes": [{"name": "data", "configMap": {"name": "other/settings"}}]}},
        r"spec.pod.volumes\[0\].configMap.name: .*names a ConfigMap of the same namespace",
    ),
    "pull secret of another namespace": RefusedManifest(
        INFERENCE_SERVICES,
        {"pod": {"imagePullSecrets": [{"name": "other/registry"}]}},
        r"spec.pod.imagePullSecrets\[0\].name: .*names a Secret of the same namespace",
    ),
    "process without memory": RefusedManifest(METAL_PROCESSES, {"memoryBytes": 0}, "spec.memoryBytes: .*equal to 1"),
    **{
        f"argument {item!r}": RefusedManifest(
            INFERENCE_SERVICES,
            {"extraArgs": ["--temp", item]},
            r"spec\.extraArgs\[1\].*should match",
        )
        for item in BAD_ARGUMENTS
    },
}
