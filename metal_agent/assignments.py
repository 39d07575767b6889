"""What this host was told to run: read from the API's objects, and kept on disk for a start without an API server.

An object that this version cannot read is an assignment too, one that is rejected: a newer controller must see why,
and an agent must not fall over it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from artifacts import durable
from crds.metalprocess import MetalProcessSpec

STANDALONE: Final = "standalone-"
"""How the uid of a process begins that no API server knows: `pomona up` started it."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One MetalProcess that is bound to this host, or what stands for one where there is no cluster."""

    uid: str
    namespace: str
    name: str
    spec: MetalProcessSpec | None
    """None when this version of the agent cannot read it; then `problem` says why."""
    problem: str = ""
    deleted: bool = False

    @property
    def is_standalone(self) -> bool:
        """Whether it is of this machine alone, and no cluster's."""
        return self.uid.startswith(STANDALONE)

    @property
    def service(self) -> tuple[str, str] | None:
        """Namespace and name of the service that it serves."""
        return (self.namespace, self.spec.service_name) if self.spec else None


def read(obj: dict[str, Any]) -> Assignment:
    """Read a MetalProcess as the API has it."""
    metadata = obj["metadata"]
    spec, problem = None, ""
    try:
        spec = msgspec.convert(obj.get("spec"), MetalProcessSpec)
    except msgspec.ValidationError as error:
        problem = f"this agent cannot read the MetalProcess: {error}; update the agent"
    return Assignment(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        spec=spec,
        problem=problem,
        deleted=bool(metadata.get("deletionTimestamp")),
    )


class LastKnown(msgspec.Struct, frozen=True):
    """The last state of the API that was seen: MetalProcesses, and the data of the host's Secret (base64)."""

    processes: list[dict[str, Any]] = []
    secret: dict[str, str] = {}


class Memory:
    """Keeps what was last known in one file that only its owner may read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: LastKnown | None = None

    def load(self) -> LastKnown:
        """Return what was last known; nothing on a new host."""
        return durable.read(self._path, LastKnown) or LastKnown()

    def save(self, processes: Iterable[dict[str, Any]], secret: dict[str, str]) -> None:
        """Remember what the API says now, without status and bookkeeping. Raises OSError."""
        known = LastKnown([_essence(obj) for obj in processes], secret)
        if known != self._written:
            durable.write(self._path, known)
            self._written = known


def _essence(obj: dict[str, Any]) -> dict[str, Any]:
    kept = ("name", "namespace", "uid", "deletionTimestamp")
    metadata = {key: value for key, value in obj["metadata"].items() if key in kept}
    return {"metadata": metadata, "spec": obj.get("spec")}
