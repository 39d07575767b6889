"""Assignments of this host, read from MetalProcesses and kept on disk for a start without an API server.

An object that this version cannot read is an assignment too, and is rejected: a newer controller must see the reason,
and the agent must not fail because of it.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from artifacts import durable
from crds.metalprocess import ADAPTERS_ON_REQUEST, Artifact, MetalProcessSpec
from gateway.proxy.build import BUILD
from kube.resources import ObjectKey

STANDALONE: Final = "standalone-"
"""Prefix of the uid of a process that `pomona up` started, and that is in no API server."""


AGENT_FEATURES: Final = frozenset({ADAPTERS_ON_REQUEST})
"""Features that this agent knows, by which a later controller asks for more than the first release does. A field of a
MetalProcess that changes how it runs gets one once a version without that field is published."""
UPGRADE: Final = "update Pomona on this host, and run `pomona agent restart`"
"""The way out of a process of a newer release."""


UNREADABLE: Final = MetalProcessSpec(
    service_name="", model_name="", runtime="", artifact=Artifact(source=""), memory_bytes=0, token_secret=""
)
"""In place of a spec that this version of the agent cannot read: no engine runs it."""


class Assignment(msgspec.Struct, frozen=True):
    """One MetalProcess that is bound to this host, or its equivalent without a cluster."""

    uid: str
    namespace: str
    name: str
    spec: MetalProcessSpec
    """UNREADABLE if this version of the agent cannot read it; then `problem` says why."""
    problem: str = ""
    """The reason why this version starts no engine for it; one that runs, of a newer version, runs on."""
    deleted: bool = False

    @property
    def is_standalone(self) -> bool:
        """True if `pomona up` started it, and it belongs to no cluster."""
        return self.uid.startswith(STANDALONE)

    @property
    def service(self) -> ObjectKey:
        """The InferenceService that the process serves; without a name if the spec is not readable."""
        return ObjectKey(self.namespace, self.spec.service_name)


def read_assignment(obj: dict[str, Any]) -> Assignment:
    """Return the assignment of a MetalProcess; one that this version cannot run has a `problem`, the reason.

    It may come from a newer controller: then a field has a value that is unknown here, or spec.features names something
    that changes how the process runs.
    """
    metadata = obj["metadata"]
    try:
        spec = msgspec.convert(obj.get("spec"), MetalProcessSpec)
    except msgspec.ValidationError as error:
        # UNREADABLE stands for a spec that cannot be read: no engine runs it.
        spec, problem = UNREADABLE, f"this agent cannot read the MetalProcess: {error}; {UPGRADE}"
    else:
        unknown = ", ".join(sorted(set(spec.features) - AGENT_FEATURES))
        reason = f"spec.features has {unknown}, which this agent ({BUILD}) does not know: {UPGRADE}"
        problem = reason if unknown else ""

    return Assignment(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        spec=spec,
        problem=problem,
        deleted=bool(metadata.get("deletionTimestamp")),
    )


def desired_state(obj: dict[str, Any]) -> tuple[Any, ...]:
    """Return what only others write of a MetalProcess or of the host's Secret: a change of it requires work."""
    return obj["metadata"]["uid"], obj["metadata"].get("deletionTimestamp"), obj.get("spec"), obj.get("data")


class LastKnown(msgspec.Struct, frozen=True):
    """The last state of the API that was seen: MetalProcesses, and the data of the host's Secret (base64)."""

    processes: list[dict[str, Any]] = []
    secret: dict[str, str] = {}


class LastKnownFile:
    """The state file `assignments.json`, which only its owner may read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: LastKnown | None = None

    def load(self, host: str) -> LastKnown:
        """Return the last known state; empty if there is none, or if this machine was another host then."""
        last_known = durable.read(self._path, LastKnown) or LastKnown()
        hosts = {(process.get("spec") or {}).get("hostName", host) for process in last_known.processes}
        return last_known if hosts <= {host} else LastKnown()

    def save(self, processes: Iterable[dict[str, Any]], secret: dict[str, str]) -> None:
        """Write the present state of the API, without status and bookkeeping. Raises OSError."""
        last_known = LastKnown([_strip_bookkeeping(obj) for obj in processes], secret)
        if last_known != self._written:  # _written: what this agent wrote last
            durable.write(self._path, last_known)
            self._written = last_known


def _strip_bookkeeping(obj: dict[str, Any]) -> dict[str, Any]:
    """Return a MetalProcess without its status and without metadata that an agent does not need."""
    kept = ("name", "namespace", "uid", "deletionTimestamp")
    metadata = {key: value for key, value in obj["metadata"].items() if key in kept}
    return {"metadata": metadata, "spec": obj.get("spec")}
