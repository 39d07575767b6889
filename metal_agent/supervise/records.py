"""Records of started engines on disk, one file per process, so that the next agent adopts running engines.

A newer version may have written a record with values or fields that this one does not know. They are no reason to end
an engine: the rest of the record is used, and what is unknown survives a rewrite.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog
from msgspec import structs

from artifacts import durable
from crds.metalprocess import MetalProcessSpec
from metal_agent.assignments import UPGRADE, Assignment
from metal_agent.native.engine_handle import ProcessIdentity
from runtimes.registry import RUNTIMES

log = structlog.get_logger()


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine that was started for a MetalProcess. Times are RFC 3339.

    It has the whole spec, so that the engine can be supervised without any other file and without the API server.
    """

    uid: str
    namespace: str
    name: str
    spec: MetalProcessSpec
    identity: ProcessIdentity | None
    """The engine's process; None if it has none of its own."""
    started_at: str
    ready_at: str | None = None
    """Time of its first token."""
    url: str = ""
    """URL at which the engine listens on loopback; known once it is ready."""
    restarts: int = 0
    key_file: str = ""
    """Path of the file with the key that the engine requires; empty for a model of a daemon."""
    model: str = ""
    """Name of the model in the shared daemon of `spec.runtime`, if the engine is a model there."""
    unread: tuple[str, ...] = ()
    """Fields of the spec whose values this version cannot read, never written: the engine runs on, but this version
    does not start it."""

    @property
    def assignment(self) -> Assignment:
        """The assignment that the engine was started for."""
        fields = ", ".join(self.unread)
        problem = f"this agent cannot read {fields} of the MetalProcess; {UPGRADE}" if fields else ""
        return Assignment(self.uid, self.namespace, self.name, self.spec, problem)


class Records:
    """The records of one agent, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._on_disk: dict[str, tuple[Record, Mapping[str, Any]]] = {}
        """The records that `load` read, each with its whole content on disk, by uid."""

    def load(self) -> dict[str, Record]:
        """Read all records from disk; return them by uid. One that is damaged or of an unknown runtime is deleted.

        Raises OSError if a file cannot be read.
        """
        self._on_disk = {}  # by uid, each record and the content of its file
        for path in sorted(self._folder.glob("[!.]*.json")):
            content = durable.read(path, dict[str, Any])
            if content is None:
                continue
            record = _read_record(content)
            if record:
                self._on_disk[record.uid] = (record, content)  # `write` keeps what is unknown in it
            else:
                # No request would reach its engine, which is killed as a stray: it must not keep its memory.
                log.warning("record_unreadable", path=str(path))
                self.remove(path.stem)

        return {uid: record for uid, (record, _) in self._on_disk.items()}

    def write(self, record: Record) -> None:
        """Write `record`, in place of an earlier one of the same uid. Raises OSError.

        A newer version of the agent may have written the record that `load` read. If that is of the same engine, its
        fields that this version does not know, and its unreadable values of the spec, are kept for the next agent.
        """
        content: dict[str, Any] = msgspec.to_builtins(structs.replace(record, unread=()))
        earlier, earlier_content = self._on_disk.get(record.uid, (None, {}))
        if earlier and earlier.identity == record.identity:
            # Keep the fields of a newer version and, if the spec is the same, the values that this one cannot read.
            fields = {field.encode_name for field in structs.fields(Record)}
            content |= {name: value for name, value in earlier_content.items() if name not in fields}
            if earlier.spec == record.spec:
                content["spec"] = earlier_content["spec"]
        durable.write(self._path(record.uid), content)

    def remove(self, uid: str) -> None:
        """Delete the record of `uid`, whose engine is gone; a failure is harmless, since nothing would be adopted."""
        try:
            self._path(uid).unlink(missing_ok=True)
        except OSError as error:
            log.warning("record_not_deleted", uid=uid, error=str(error))

    def _path(self, uid: str) -> Path:
        """Return the path of the record of `uid`."""
        return self._folder / f"{uid}.json"


def _read_record(content: Mapping[str, Any]) -> Record | None:
    """Return a record without the unreadable fields of its spec; None if it is damaged or of an unknown runtime."""
    spec = content.get("spec")
    readable, unread = _split_fields(spec, MetalProcessSpec) if isinstance(spec, dict) else ({}, ())
    try:
        record = msgspec.convert({**content, "spec": readable, "unread": unread}, Record)
    except msgspec.ValidationError:
        return None
    return record if record.spec.runtime in RUNTIMES else None


def _split_fields(content: Mapping[str, Any], struct: type[msgspec.Struct]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return `content` without values that the fields of `struct` cannot have, and the names of the fields left out."""
    readable, unread = dict(content), []
    for field in structs.fields(struct):
        name = field.encode_name
        try:
            if name in readable:
                msgspec.convert(readable[name], field.type)
        except msgspec.ValidationError:
            del readable[name]
            unread.append(name)
    return readable, tuple(unread)
