"""`MetalProcess`: one native process on a host; the counterpart of a Pod on a node.

The spec is self-contained and contains no secret, so that a host can serve it from disk while the API server is away.
The spec is immutable except `hostName`, which is absent until bound and then fixed: an edit or a move is a new object.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from crds.meta import ApiStruct, Conditions, Name, ObjectMeta, Priority, SecretName, described, rule
from crds.model import Revision
from crds.serving import AdapterScale, DraftTokens, Role, ServingOptions


class Artifact(ApiStruct, frozen=True):
    """The exact weights, which a host fetches and verifies by itself."""

    source: Annotated[str, Meta(max_length=2048), described("Where the weights are, as in the Model's spec.source.")]
    revision: Annotated[Revision, described("Exact revision; empty takes what the source has.")] = ""
    sha256: Annotated[str, Meta(max_length=64), described("SHA-256 that the file must have; empty is not known.")] = ""
    size_bytes: Annotated[int | None, described("Size of the file in bytes.", format="int64")] = None


class FurtherArtifact(ApiStruct, frozen=True):
    """An artifact that is served together with the weights."""

    role: Annotated[
        Role,
        described(
            "draft: a small model that guesses tokens ahead. projector: makes images or sound into tokens. adapter: a "
            "LoRA adapter."
        ),
    ]
    artifact: Annotated[Artifact, described("The exact artifact.")]
    scale: AdapterScale = "1"
    source_secret: Annotated[
        SecretName | None, described("Name of the Secret with the download token, where the source needs one.")
    ] = None


class MetalProcessSpec(ServingOptions, frozen=True, kw_only=True):
    """Everything that a host needs to serve one replica; the fields of `ServingOptions` are part of it."""

    service_name: Annotated[Name, described("InferenceService that this process serves; also the model's served name.")]
    model_name: Annotated[Name, described("Model that is served.")]
    runtime: Annotated[
        str,
        Meta(max_length=64),
        described("Engine that serves, such as llama.cpp; a host rejects what it has not."),
    ]
    artifact: Annotated[Artifact, described("The exact weights.")]
    memory_bytes: Annotated[int, Meta(ge=1), described("Bytes that are reserved on the host.", format="int64")]
    token_secret: Annotated[SecretName, described("Name of the Secret with the service's bearer token.")]
    further_artifacts: Annotated[
        list[FurtherArtifact],
        Meta(max_length=10),
        described(
            "What is fetched and served together with the weights: at most one draft and one projector.",
            rule(
                "self.filter(each, each.role == 'draft').size() <= 1 && "
                "self.filter(each, each.role == 'projector').size() <= 1",
                "an engine takes one draft and one projector: remove the others",
            ),
            **{"x-kubernetes-list-type": "atomic"},
        ),
    ] = []
    draft_max_tokens: DraftTokens = None
    priority: Annotated[
        Priority,
        described("Which process is placed first when hosts are scarce, and leaves last when its host has no memory."),
    ] = "normal"
    source_secret: Annotated[
        SecretName | None, described("Name of the Secret with the download token, where the source needs one.")
    ] = None
    host_name: Annotated[
        Annotated[str, Meta(max_length=63)] | None,
        described("MetalHost that runs this process; absent while it waits for a place."),
    ] = None


class FetchProgress(ApiStruct, frozen=True):
    """Progress of a fetch."""

    bytes: Annotated[int, described("Bytes that are on the host.", format="int64")] = 0
    total_bytes: Annotated[int | None, described("Bytes in all, where the source says so.", format="int64")] = None


class LastExit(ApiStruct, frozen=True):
    """The last exit of the engine."""

    code: Annotated[int | None, described("Exit code, where it exited by itself.", format="int32")] = None
    signal: Annotated[str, described("Signal that ended it, for example SIGKILL.")] = ""
    time: Annotated[str, described("When it ended.", format="date-time")] = ""
    log: Annotated[str, Meta(max_length=4096), described("Its last lines on standard error.")] = ""


class MetalProcessStatus(ApiStruct, frozen=True):
    """Observed state of a process, as the host's agent reports it."""

    phase: Annotated[
        Literal["Pending", "Fetching", "Starting", "Ready", "Stopping", "Stopped", "Failed", "Rejected"],
        described(
            "Pending: waits for a place or its turn. Fetching: weights are on their way. Starting: the engine loads. "
            "Ready: it answered. Stopping, Stopped: ends on request, or, with reason MemoryPressure, to be "
            "Pending until its host has memory again. Failed: tried again with back-off. Rejected: this host cannot "
            "run it; it is replaced elsewhere."
        ),
    ] = "Pending"
    reason: Annotated[str, described("Why, as one CamelCase word.")] = ""
    message: Annotated[str, Meta(max_length=4096), described("Why, and the way out, for a person.")] = ""
    progress: Annotated[FetchProgress | None, described("How far the fetch is.")] = None
    pid: Annotated[int | None, described("Process id on the host.", format="int64")] = None
    port: Annotated[int | None, described("Port of the service on the host's address.", format="int32")] = None
    restarts: Annotated[int | None, described("Times that the engine was started again.", format="int32")] = None
    started_at: Annotated[str | None, described("When the engine was started.", format="date-time")] = None
    ready_at: Annotated[str | None, described("When it generated its first token.", format="date-time")] = None
    last_exit: Annotated[LastExit | None, described("How the engine ended the last time.")] = None
    conditions: Annotated[
        Conditions,
        described(
            "DisruptionTarget is True while the process needs another place, for its host is short of memory: one is "
            "made on another host where it fits, and this one goes when that answers."
        ),
    ] = []


def _same(field: str) -> str:
    """Return the CEL rule that an optional field keeps its value, or stays absent."""
    return f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"


FIXED_RULE = rule(
    " && ".join(
        f"self.{field.encode_name} == oldSelf.{field.encode_name}" if field.required else _same(field.encode_name)
        for field in msgspec.structs.fields(MetalProcessSpec)
        if field.name != "host_name"
    ),
    "a MetalProcess is fixed once written: edit its InferenceService, which replaces it",
)
HOST_RULE = rule(
    "!has(oldSelf.hostName) || (has(self.hostName) && self.hostName == oldSelf.hostName)",
    "spec.hostName is fixed once bound: a move is a new MetalProcess",
)


class MetalProcess(ApiStruct, frozen=True):
    """One native process on an off-cluster host."""

    metadata: ObjectMeta
    spec: Annotated[
        MetalProcessSpec,
        described(
            "Everything that a host needs to serve one replica; fixed once written.",
            FIXED_RULE,
            HOST_RULE,
        ),
    ]
    status: Annotated[MetalProcessStatus, described("What the host's agent reports.")] = MetalProcessStatus()
    api_version: str = ""
    kind: str = ""
