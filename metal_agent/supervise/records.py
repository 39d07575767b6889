"""Records of started engines on disk, one file per process, so that the next agent adopts running engines."""

from pathlib import Path

import msgspec
import structlog

from artifacts import durable
from crds.metalprocess import MetalProcessSpec
from metal_agent.assignments import Assignment
from metal_agent.native.engine_handle import ProcessIdentity

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
    """Path of the file with the key that the engine requires; empty if an earlier version started it without one."""
    model: str = ""
    """Name of the model in the shared daemon of `spec.runtime`, if the engine is a model there."""

    @property
    def assignment(self) -> Assignment:
        """The assignment that the engine was started for."""
        return Assignment(self.uid, self.namespace, self.name, self.spec)


class Records:
    """The records of one agent, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> dict[str, Record]:
        """Read all records, by uid; damaged ones are left out. Raises OSError if a file cannot be read."""
        found = (durable.read(path, Record) for path in sorted(self._folder.glob("[!.]*.json")))
        return {record.uid: record for record in found if record is not None}

    def write(self, record: Record) -> None:
        """Write `record`, in place of an earlier one of the same uid. Raises OSError."""
        durable.write(self._path(record.uid), record)

    def remove(self, uid: str) -> None:
        """Delete the record of `uid`, whose engine is gone; a failure is harmless, since nothing would be adopted."""
        try:
            self._path(uid).unlink(missing_ok=True)
        except OSError as error:
            log.warning("record_not_deleted", uid=uid, error=str(error))

    def _path(self, uid: str) -> Path:
        return self._folder / f"{uid}.json"
