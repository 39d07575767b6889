"""`Model`: an artifact and its needs; the counterpart of an image. Inspected once, then used by many services."""

from typing import Annotated, Literal

from msgspec import Meta

from crds.cache import CachedWeights, CacheOptions, NodeCopy, NodeShortage, Sha256
from crds.meta import (
    AS_SET,
    LARGEST_AMOUNT,
    Accelerator,
    Amount,
    ApiObject,
    ApiStruct,
    ByteSize,
    Conditions,
    LongText,
    SecretReference,
    ShortText,
    Time,
    checked_by,
    rule,
)
from crds.quantity import quantity_bytes
from crds.weights_header import GGUF, Layout, WeightsFormat

FilePatterns = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^/\x00-\x1f\x7f]+(/[^/\x00-\x1f\x7f]+)*$")]],
    Meta(max_length=64),
    "Files to take of a source that is a repository or folder: paths as they are listed, in which * stands for any "
    "letters, ? for one, and [[] for a bracket. For a GGUF model, patterns that end in .gguf and match one model, "
    "for example *Q4_K_M*.gguf; all parts of a split model are taken, also from a folder of the repository. For "
    "safetensors, the weights to take; configuration and tokenizer are always taken. Default: all files of a "
    "folder of safetensors that an engine needs.",
]


Mirrors = Annotated[
    list[Annotated[str, Meta(max_length=2048, pattern=r"^(hf|https?|oci)://[^\s]+$")]],
    Meta(max_length=4),
    "Further sources of the same weights, in the forms of spec.source. They are asked in this order while the "
    "source and the mirrors before cannot be reached or do not have the weights. A digest verifies their bytes "
    "whoever sends them: of one file of an hf:// or http(s):// source spec.sha256, and of an artifact the digest "
    "in oci://REGISTRY/REPOSITORY@sha256:DIGEST, which source and mirrors share. Weights with another digest are "
    "refused, and no further mirror is asked. A mirror never gets the token of spec.sourceSecretRef. A folder or "
    "split model of hf:// takes no mirrors, since a hub states no digest of configurations and tokenizers.",
]


class ModelHardware(ApiStruct, frozen=True):
    """Hardware that services of this Model use unless they say otherwise."""

    accelerator: Annotated[
        Accelerator,
        "Where services of this Model run by default: cpu, nvidia, amd, intel-gaudi and intel in pods, metal on an "
        "off-cluster host. Only a service may state auto.",
        checked_by(
            rule("self != 'auto'", "only a service may state hardware.accelerator auto: name one, or leave it out")
        ),
    ] = "cpu"


ModelType = Literal["Dense", "MoE", "DenseThinking", "MoEThinking"]
LabelWord = Annotated[str, Meta(max_length=40, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A word that becomes part of a label's name, so that objects are found by it."""


class ModelSpec(ApiStruct, frozen=True):
    """Desired state of a Model."""

    source: Annotated[
        str,
        Meta(max_length=2048, pattern=r"^(hf|https?|s3|oci|pvc|file|ollama)://[^\s]+$"),
        "Location of the weights. A GGUF file: hf://ORG/REPO[@REVISION]/FILE.gguf, http(s)://HOST/FILE.gguf "
        "or file:///PATH.gguf; of a split model, its first part (NAME-00001-of-00003.gguf). A folder of "
        "safetensors or MLX weights, or a repository of which spec.files chooses a GGUF model: "
        "hf://ORG/REPO[@REVISION], file:///PATH/ with a slash at the end, or an artifact of a registry whose "
        "layers are files, such as `oras push` makes: oci://REGISTRY/REPOSITORY:TAG or "
        "oci://REGISTRY/REPOSITORY@sha256:DIGEST. For pods only, a file or folder of a bucket, "
        "s3://BUCKET/KEY.gguf or s3://BUCKET/PREFIX/, or on a PersistentVolumeClaim of this namespace, which pods "
        "mount read-only, pvc://CLAIM/PATH.gguf or pvc://CLAIM/PATH/. In a path, a blank is written %20, @ %40, "
        "# %23, ? %3F and % %25. A model of Ollama's library: ollama://NAME:TAG; Ollama, in a pod or on the host, "
        "pulls the model. Only hosts can serve a file:// source, and its path must be below their agent's "
        "--file-root.",
    ]
    files: FilePatterns = []
    sha256: Annotated[
        Annotated[str, Meta(max_length=128, pattern=r"^[0-9a-f]{64}$")] | None,
        "Expected SHA-256 of the file, 64 hexadecimal digits. Weights with another SHA-256 are never served.",
    ] = None
    mirrors: Mirrors = []
    source_secret_ref: Annotated[
        SecretReference | None,
        "Secret whose key `token` holds the bearer token for a gated hf:// or private http(s):// source. For an "
        "oci:// source, `token` holds USER:PASSWORD or a bearer token, and the keys `username` and `password`, or "
        "a Secret of type kubernetes.io/dockerconfigjson, can take its place; hosts take `token` only. The token "
        "is sent to the server of spec.source, so its owner must allow that: by the Secret's type "
        "inference.pomona.dev/source, or by the label inference.pomona.dev/source=true on an Opaque Secret or a "
        "Docker configuration. Any other Secret is refused. For an s3:// source, the keys are AWS_ACCESS_KEY_ID "
        "and AWS_SECRET_ACCESS_KEY, and if they are needed AWS_SESSION_TOKEN, AWS_REGION (default us-east-1) and "
        "AWS_ENDPOINT_URL, the URL of a service other than AWS; the bucket is in the path of each request. Without "
        "a Secret, an s3:// source must be a public bucket of AWS.",
    ] = None
    refresh_policy: Annotated[
        Literal["IfNotPresent", "OnChange"],
        "IfNotPresent: the source is read once for each edit of the Model. OnChange: a branch of hf://, a file of "
        "http(s)://, a tag of oci://, or a file or folder of s3:// is checked every spec.refreshIntervalSeconds. "
        "When its revision has changed, the new weights are fetched beside the old ones, and services move to them "
        "once they are verified. A commit of hf:// and a digest of oci:// never change, so they are not checked.",
    ] = "IfNotPresent"
    refresh_interval_seconds: Annotated[
        int,
        Meta(ge=300, le=31_536_000),
        "Seconds between two checks of the source with spec.refreshPolicy OnChange; up to a tenth more, so that "
        "not all sources are checked at once. Default: 3600, an hour.",
        {"format": "int64"},
    ] = 3600
    hardware: Annotated[ModelHardware, "Hardware that services of this Model use by default."] = ModelHardware()
    memory_bytes: Annotated[
        ByteSize | None,
        "Memory that serving this Model takes, such as 24Gi, 24GiB or 1.5 GB, or in bytes. Default: computed from the "
        "artifact's header, which this field overrides. Required for ollama:// sources, whose size only Ollama knows, "
        "and in a cluster for file:// sources, because nothing there can read the file: without it, such a Model is "
        "not Ready, with reason MemoryUnknown. In a pod with devices, "
        "each device holds its share of this value, or what the header says if that is more, and the memory of "
        "the container is computed in any case. A value that is clearly less than what the header says is refused "
        "with reason MemoryUnderstated, by the controller and by the host that reads the header; where the header "
        "does not say it, a value below the size of the file is.",
    ] = None
    cache: Annotated[CacheOptions, "The volume that holds the verified weights for pods."] = CacheOptions()
    domains: Annotated[
        list[LabelWord],
        Meta(max_length=16),
        "Subjects that the model is good at, for example code, math or medicine. Each becomes a label "
        "inference.pomona.dev/domain-DOMAIN=true of the Model and its services: kubectl get isvc -l "
        "inference.pomona.dev/domain-code",
        AS_SET,
    ] = []
    languages: Annotated[
        list[Annotated[str, Meta(max_length=3, pattern=r"^[a-z]{2,3}$")]],
        Meta(max_length=64),
        "Languages that the model understands, as ISO 639 codes, for example en or deu. Each becomes a label "
        "inference.pomona.dev/language-CODE=true.",
        AS_SET,
    ] = []
    capabilities: Annotated[
        list[LabelWord],
        Meta(max_length=16),
        "Abilities of the model, for example chat, vision, tools or embeddings. Each becomes a label "
        "inference.pomona.dev/capability-CAPABILITY=true.",
        AS_SET,
    ] = []
    model_type: Annotated[
        ModelType | None,
        "Kind of the model: a mixture of experts (MoE) or not (Dense), and if it thinks before it answers. "
        "Default: computed from the artifact's header and spec.thinking. It becomes the label "
        "inference.pomona.dev/model-type.",
    ] = None
    thinking: Annotated[
        bool | None, "True if the model writes down its thoughts before its answer. Default: false."
    ] = None
    total_parameters: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 62)] | None,
        "Number of parameters, for example 8030261248. Default: the artifact's.",
    ] = None
    active_parameters: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 62)] | None,
        "Number of parameters that one token uses, for a mixture of experts. Default: the artifact's.",
    ] = None

    @property
    def stated_bytes(self) -> int | None:
        """Memory that serving the Model takes, as `memory_bytes` states it; None if it has to be computed."""
        return None if self.memory_bytes is None else quantity_bytes(self.memory_bytes)


Revision = Annotated[str, Meta(max_length=256)]
"""An HTTP server decides the length of its ETag; a longer ETag is refused when it is read."""


_Fact = Annotated[int, Meta(ge=0, le=LARGEST_AMOUNT)]
"""A number that follows from a header, whose server can write anything: facts with another one are refused whole."""


class ModelFacts(ApiStruct, frozen=True):
    """The facts of weights that are known without downloading them: the result of an inspection."""

    revision: Annotated[
        Revision,
        "Exact revision that was inspected: a commit for hf://, the manifest's digest for oci://, an ETag or date "
        "for http(s)://.",
    ] = ""
    sha256: Annotated[Sha256, "SHA-256 of the file, once it is known."] = ""
    file: Annotated[LongText, "Name of the file, or of the first part of a split model. Absent for a folder."] = ""
    size_bytes: Annotated[_Fact | None, "Size of all files in bytes."] = None
    gguf: Annotated[GGUF | None, "Facts from the artifact's header, or from the config.json of a folder."] = None
    format: Annotated[
        WeightsFormat | None,
        "Format of the weights, as the inspection found it: gguf, safetensors, mlx (safetensors that MLX wrote), "
        "or ollama. Engines are chosen by it.",
    ] = None
    total_parameters: Annotated[
        _Fact | None, "Number of parameters. Absent if it does not follow exactly from the headers."
    ] = None
    active_parameters: Annotated[
        _Fact | None,
        "Number of parameters that a token uses, of a model with experts. Absent for other models, and if it does "
        "not follow exactly from the headers.",
    ] = None
    layout: Annotated[
        Layout | None,
        "Dimensions that decide how much memory serving takes. Absent if the artifact does not state all of them.",
    ] = None


class ModelStatus(ModelFacts, frozen=True):
    """Observed state of a Model, as the controller reports it."""

    observed_generation: Annotated[Amount | None, "The metadata.generation from which this status was computed."] = None
    phase: Annotated[
        Literal["Pending", "Downloading", "Ready", "Failed"],
        "Pending: the artifact is being inspected. Downloading: the weights are being downloaded to the "
        "volume. Ready: the Model can be used; its artifact has been inspected, or the host that serves it "
        "does that (file:// and ollama:// sources). Failed: the conditions show the cause.",
    ] = "Pending"
    last_checked: Annotated[Time, "When the source was last checked with spec.refreshPolicy OnChange."] = ""
    size: Annotated[ShortText, "sizeBytes in readable form, for example 4.4 GiB."] = ""
    parameters: Annotated[
        ShortText, "Parameters in readable form, for example 8.0B, or 30.5B of which 3.3B are active."
    ] = ""
    cached: Annotated[CachedWeights | None, "Verified weights on the volume for pods."] = None
    copies: Annotated[
        list[NodeCopy], Meta(max_length=2048), "Verified weights on the disks of nodes, with spec.cache.scope node."
    ] = []
    shortages: Annotated[
        list[NodeShortage],
        Meta(max_length=2048),
        "Nodes whose disk has no space for a copy that is being made, with spec.cache.scope node.",
    ] = []
    conditions: Conditions = []


class Model(ApiObject, frozen=True, kw_only=True):
    """An artifact that can be served, and what it needs."""

    spec: Annotated[
        ModelSpec,
        "Desired state of the Model.",
        checked_by(
            rule(
                "!self.source.startsWith('file://') || !has(self.sourceSecretRef)",
                "a file:// source takes no spec.sourceSecretRef: remove it",
            ),
            rule(
                "!self.source.startsWith('ollama://') || has(self.memoryBytes)",
                "an ollama:// source needs spec.memoryBytes: only Ollama knows its size, which `ollama ps` shows",
            ),
            rule(
                "!self.source.startsWith('ollama://') || !(has(self.sourceSecretRef) || has(self.sha256))",
                "an ollama:// source takes no spec.sourceSecretRef and no spec.sha256: Ollama pulls and verifies it by "
                "itself; remove them",
            ),
            rule(
                "self.cache.medium != 'Image' || self.source.startsWith('oci://')",
                "cache.medium Image needs a source that nodes can pull as an image: oci://REGISTRY/REPOSITORY:TAG",
            ),
            rule(
                "self.cache.scope != 'node' || (has(self.cache.storageClassName) && self.cache.medium == 'Volume' && "
                "self.cache.accessMode == 'ReadWriteOnce')",
                "cache.scope node needs cache.storageClassName, a class of volumes on nodes, and no other cache.medium "
                "or cache.accessMode",
            ),
            rule(
                "self.cache.scope != 'node' || !self.source.matches('^(file|pvc|ollama)://')",
                "cache.scope node is for weights that a Job fetches: remove it for file://, pvc:// and ollama:// "
                "sources",
            ),
            rule(
                "!has(self.sha256) || !self.source.startsWith('oci://')",
                "an oci:// source has its digest in the source: remove spec.sha256, and pin it with "
                "oci://REGISTRY/REPOSITORY@sha256:DIGEST",
            ),
            rule(
                "!self.source.startsWith('pvc://') || self.source.matches('^pvc://[a-z0-9]([-.a-z0-9]*[a-z0-9])?/')",
                "a pvc:// source names a PersistentVolumeClaim of the same namespace: use pvc://CLAIM/PATH/FILE.gguf, "
                "or pvc://CLAIM/PATH/ for a folder",
            ),
            rule(
                "!self.source.startsWith('pvc://') || !(has(self.sourceSecretRef) || has(self.sha256))",
                "a pvc:// source takes no spec.sourceSecretRef and no spec.sha256: the volume's owner put the weights "
                "there, and nothing is fetched; remove them",
            ),
            rule(
                "!has(self.sha256) || !(self.source.endsWith('/') || self.source.matches('^hf://[^/]+/[^/]+$'))",
                "a folder has no sha256: remove spec.sha256, and pin a commit with @REVISION in spec.source instead",
            ),
            rule(
                "!has(self.mirrors) || size(self.mirrors) == 0 || (has(self.sha256) && "
                "self.source.matches('^(hf|https?)://')) || self.source.matches('^oci://.+@sha256:')",
                "spec.mirrors needs a digest, by which the bytes of a mirror are verified: an hf:// or http(s):// "
                "source with spec.sha256, or oci://REGISTRY/REPOSITORY@sha256:DIGEST",
            ),
            rule(
                "!has(self.mirrors) || size(self.mirrors) == 0 || self.cache.medium != 'Image'",
                "spec.mirrors is not for cache.medium Image, which nodes pull by themselves: remove one of them, and "
                "configure mirrors in the container runtime of the nodes",
            ),
            rule(
                "!has(self.refreshPolicy) || self.refreshPolicy != 'OnChange' || (!has(self.sha256) && "
                "self.source.matches('^(hf|https?|oci|s3)://'))",
                "spec.refreshPolicy OnChange is for an hf://, http(s)://, oci:// or s3:// source without spec.sha256, "
                "which pins the weights: remove one of them",
            ),
            rule(
                "!has(self.modelType) || !has(self.thinking) || self.modelType.endsWith('Thinking') == self.thinking",
                "spec.modelType and spec.thinking contradict each other: remove one of them",
            ),
            rule(
                "!has(self.activeParameters) || (has(self.totalParameters) ? self.activeParameters <= "
                "self.totalParameters : false)",
                "spec.activeParameters needs spec.totalParameters, and is not larger",
            ),
        ),
    ]
    status: Annotated[ModelStatus, "Observed state of the Model, as the controller reports it."] = ModelStatus()


NAME_RULE = rule(
    "size(self.metadata.name) <= 46",
    "use a name of at most 46 characters: what a Job appends to it must fit into the 63 of a label",
)
"""A rule on the whole object, since a Job's name becomes a label of its pods."""
