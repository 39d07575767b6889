"""`MetalProcess`: one native process on a host; the counterpart of a Pod on a node, or with `inspect` of a Job's pod.

The spec is self-contained and contains no secret, so that a host can serve it from disk while the API server is away.
The spec is immutable except `hostName`, which is absent until bound and then fixed, and `MUTABLE_FIELDS`, which the
controller patches: another edit, or a move, is a new object.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from crds.cache import Sha256
from crds.meta import (
    AS_SET,
    Amount,
    ApiObject,
    ApiStruct,
    Conditions,
    Count,
    Features,
    HostName,
    LabelName,
    Name,
    ObjectMeta,
    Priority,
    SecretName,
    Time,
    checked_by,
    rule,
)
from crds.model import FilePatterns, Mirrors, Revision
from crds.performance import BenchmarkOptions, ProcessPerformance
from crds.rate import Rate
from crds.serving import DRAIN_SECONDS, AdapterScale, DraftTokens, DrainSeconds, Role, ServingOptions

MUTABLE_FIELDS: Final = ("priority", "protected", "drain_seconds")
"""Fields of a spec by which an engine is treated, and not started: their edit reloads no model."""
HOLDS_NO_MEMORY: Final = frozenset({"Stopped", "Rejected"})
"""Phases of a process whose engine is not on its host: it has ended there, or was refused."""


ADAPTERS_ON_REQUEST: Final = "AdaptersOnRequest"
"""Feature of agents: adapters that requests choose. Others would apply these to each request."""


class Artifact(ApiStruct, frozen=True):
    """The exact weights, which a host fetches and verifies by itself."""

    source: Annotated[str, Meta(max_length=2048), "Location of the weights, in the form of the Model's spec.source."]
    revision: Annotated[
        Revision, "Exact revision. If it is empty, the host takes the current revision of the source."
    ] = ""
    sha256: Annotated[Sha256, "SHA-256 that the file must have; empty if the SHA-256 is not known."] = ""
    size_bytes: Annotated[Amount | None, "Size of the file in bytes."] = None
    files: FilePatterns = []
    mirrors: Mirrors = []


class FurtherArtifact(ApiStruct, frozen=True):
    """An artifact that is served together with the weights."""

    role: Annotated[
        Role,
        "draft: a small model that proposes tokens. projector: converts images or sound into tokens. adapter: "
        "a LoRA adapter.",
    ]
    artifact: Annotated[Artifact, "The exact artifact."]
    scale: AdapterScale = "1"
    request_name: Annotated[
        Name | None,
        "Name of an adapter that is applied only to requests with SERVICE:NAME as their model. Absent: it is applied "
        "to each request.",
    ] = None
    source_secret: Annotated[
        SecretName | None, "Name of the Secret with the download token, if the source needs a token."
    ] = None


class MetalProcessSpec(ServingOptions, frozen=True, kw_only=True):
    """Everything that a host needs to serve one replica; the fields of `ServingOptions` are part of it."""

    service_name: Annotated[
        LabelName,
        "Name of the InferenceService that this process belongs to. Requests use this name as the model name.",
    ]
    model_name: Annotated[Name, "Name of the Model that is served."]
    runtime: Annotated[
        str,
        Meta(max_length=64),
        "Engine that serves the model, such as llama.cpp. A host without this engine rejects the process.",
    ]
    artifact: Annotated[Artifact, "The exact weights."]
    memory_bytes: Annotated[int, Meta(ge=1, le=1 << 60), "Memory that is reserved on the host, in bytes."]
    token_secret: Annotated[SecretName, "Name of the Secret with the service's bearer token."]
    further_artifacts: Annotated[
        list[FurtherArtifact],
        Meta(max_length=10),
        "Artifacts that are fetched and served together with the weights, with at most one draft and one projector.",
        checked_by(
            rule(
                "self.filter(each, each.role == 'draft').size() <= 1 && "
                "self.filter(each, each.role == 'projector').size() <= 1",
                "an engine takes one draft and one projector: remove the others",
            )
        ),
    ] = []
    draft_max_tokens: DraftTokens = None
    priority: Annotated[
        Priority,
        "When hosts are scarce, processes of higher priority are placed first. When a host is short of "
        "memory, processes of lower priority are removed from the host first.",
    ] = "normal"
    protected: Annotated[
        bool,
        "True: the process is not evicted for one of higher priority, and a host that is short of memory removes "
        "it only while the memory pressure is critical. Default: false.",
    ] = False
    drain_seconds: DrainSeconds = DRAIN_SECONDS
    benchmark: Annotated[
        BenchmarkOptions | None,
        "Extent of the measurement of its speed, as the service had it when the process was created.",
    ] = None
    source_secret: Annotated[
        SecretName | None, "Name of the Secret with the download token, if the source needs a token."
    ] = None
    features: Annotated[
        Features,
        "Features that the host's agent must know, beyond those of the first release, which has none: an agent "
        "rejects a process with one that it does not know.",
        AS_SET,
    ] = []
    host_name: Annotated[
        HostName | None, "Name of the MetalHost that runs this process. Absent while the process waits for a host."
    ] = None


class FetchProgress(ApiStruct, frozen=True):
    """Progress of a fetch."""

    bytes: Annotated[Amount, "Bytes of the artifact that are already on the host."] = 0
    total_bytes: Annotated[
        Amount | None, "Size of the artifact in bytes. Absent if the source does not state its size."
    ] = None


class LastExit(ApiStruct, frozen=True):
    """The last exit of the engine."""

    code: Annotated[Annotated[int, Meta(ge=-255, le=255)] | None, "Exit code, if the engine exited by itself."] = None
    signal: Annotated[str, Meta(max_length=64), "Signal that ended the engine, for example SIGKILL."] = ""
    time: Annotated[Time, "When the engine ended."] = ""
    log: Annotated[str, Meta(max_length=4096), "Last lines of the engine's log."] = ""


class MetalProcessStatus(ApiStruct, frozen=True):
    """Observed state of a process, as the host's agent reports it."""

    phase: Annotated[
        Literal["Pending", "Fetching", "Starting", "Ready", "Stopping", "Stopped", "Failed", "Rejected"],
        "Pending: the process waits for a host, or for its turn or for memory on its host. Fetching: the weights "
        "are being fetched. Starting: the engine is loading the weights. Ready: the engine has answered. Stopping: "
        "the engine is being stopped. With reason MemoryPressure or HostPaused, the process then is Pending until "
        "its host has memory again, or its owner does not need the host. Stopped: the engine was stopped on "
        "request. Failed: the process is tried again with back-off. Rejected: this host cannot run the process; a "
        "replacement is created for another host. If only memory was missing, this host tries the process again "
        "when enough memory is free.",
    ] = "Pending"
    reason: Annotated[
        str,
        Meta(max_length=128, pattern=r"^([A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?)?$"),
        "Reason for the phase: one CamelCase word.",
    ] = ""
    message: Annotated[str, Meta(max_length=4096), "Explanation for people: the cause and the remedy."] = ""
    progress: Annotated[
        FetchProgress | None, "Progress of the fetch; several artifacts are fetched one after the other."
    ] = None
    pid: Annotated[Amount | None, "Process id of the engine on the host."] = None
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)] | None, "Port of the service on the host's address."] = None
    restarts: Annotated[Count | None, "Number of times that the engine was restarted."] = None
    started_at: Annotated[Time | None, "When the engine was started."] = None
    ready_at: Annotated[Time | None, "When the engine first answered."] = None
    last_exit: Annotated[LastExit | None, "Last exit of the engine."] = None
    tokens_per_second: Annotated[
        Rate,
        "Tokens that the process generates per second for its clients: the mean of one minute, written at most "
        "once a minute, and only if it has changed by more than a tenth. 0: it is idle. Absent if it is unknown.",
    ] = ""
    requests_per_minute: Annotated[
        Count | None,
        "Requests of clients to the process that ended in the last minute, written as tokensPerSecond is. Absent "
        "if it is unknown.",
    ] = None
    average_latency_ms: Annotated[
        Count | None,
        "Average time from the arrival of these requests to the end of their answers, in milliseconds. Absent if "
        "there were none, or if it is unknown.",
    ] = None
    performance: Annotated[
        ProcessPerformance | None,
        "Speed of the model on this host, which the agent measured once while the host was idle. Absent if it was "
        "not measured.",
    ] = None
    conditions: Annotated[
        Conditions,
        "DisruptionTarget is True while the process needs another host because its own host is short of memory, or "
        "paused by its owner. The controller creates a replacement process for another host with enough memory, "
        "and deletes this process when the replacement answers.",
    ] = []


def with_edits(spec: MetalProcessSpec, edited: MetalProcessSpec) -> MetalProcessSpec:
    """Return `spec` with the mutable fields of `edited`."""
    return msgspec.structs.replace(spec, **{name: getattr(edited, name) for name in MUTABLE_FIELDS})


_UNEDITED: Final = MetalProcessSpec(
    service_name="", model_name="", runtime="", artifact=Artifact(source=""), memory_bytes=1, token_secret=""
)


def without_edits(spec: MetalProcessSpec) -> MetalProcessSpec:
    """Return `spec` with the defaults of the mutable fields: what an engine is started by."""
    return with_edits(spec, _UNEDITED)


def _keeps_value(field: str) -> str:
    """Return the CEL rule that an optional field keeps its value, or stays absent."""
    return f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"


FIXED_RULE = rule(
    " && ".join(
        f"self.{field.encode_name} == oldSelf.{field.encode_name}"
        if field.required
        else _keeps_value(field.encode_name)
        for field in msgspec.structs.fields(MetalProcessSpec)
        if field.name not in {"host_name", *MUTABLE_FIELDS}
    ),
    "a MetalProcess is fixed once written: edit its InferenceService, which replaces it",
)
HOST_RULE = rule(
    "!has(oldSelf.hostName) || (has(self.hostName) && self.hostName == oldSelf.hostName)",
    "spec.hostName is fixed once bound: a move is a new MetalProcess",
)


class MetalProcess(ApiObject, frozen=True, kw_only=True):
    """One native process on an off-cluster host."""

    spec: Annotated[
        MetalProcessSpec,
        "Everything that a host needs to serve one replica. The spec is immutable, except that hostName is "
        "set once, and that priority, protected and drainSeconds follow the InferenceService.",
        checked_by(FIXED_RULE, HOST_RULE),
    ]
    status: Annotated[MetalProcessStatus, "Observed state of the process, as the host's agent reports it."] = (
        MetalProcessStatus()
    )


class _HostedSpec(ApiStruct, frozen=True):
    host_name: str | None = None
    service_name: str = ""
    memory_bytes: int = 0


class _ReportedPhase(ApiStruct, frozen=True):
    phase: str = ""


class HostedProcess(ApiStruct, frozen=True):
    """The part of a MetalProcess by which its host is judged; all else may have values of a newer version."""

    metadata: ObjectMeta
    spec: _HostedSpec = _HostedSpec()
    status: _ReportedPhase = _ReportedPhase()

    @property
    def holds_memory(self) -> bool:
        """True unless its engine has ended, or was refused."""
        return self.status.phase not in HOLDS_NO_MEMORY

    @property
    def is_deleted(self) -> bool:
        """True if it is being deleted."""
        return self.metadata.deletion_timestamp is not None

    @property
    def owner_uid(self) -> str:
        """The uid of its service; empty if it has none."""
        return next((owner.uid for owner in self.metadata.owner_references if owner.controller), "")
