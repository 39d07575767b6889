"""Remembers each engine that was started: one file per process, so that the next agent takes over what runs."""

from pathlib import Path

import msgspec
import structlog

from artifacts import durable
from crds.metalprocess import MetalProcessSpec
from metal_agent.assignments import Assignment
from metal_agent.handle import Identity

log = structlog.get_logger()


class Record(msgspec.Struct, frozen=True):
    """One engine that was started for a MetalProcess. Times are RFC 3339.

    It has the whole spec, so that the engine can be supervised whatever became of every other file and of the API.
    """

    uid: str
    namespace: str
    name: str
    spec: MetalProcessSpec
    identity: Identity | None
    """Its process; None where it has none of its own."""
    started_at: str
    ready_at: str | None = None
    """When it generated its first token."""
    url: str = ""
    """Where the engine listens, on loopback; known once it is ready."""
    restarts: int = 0
    model: str = ""
    """Its name in the daemon that `spec.runtime` names, where it is a model in a shared daemon."""

    @property
    def assignment(self) -> Assignment:
        """What the engine was started for."""
        return Assignment(self.uid, self.namespace, self.name, self.spec)


class Records:
    """The records of one agent, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> dict[str, Record]:
        """Read all records by uid; damaged ones are left out. Raises OSError when one cannot be read."""
        found = (durable.read(path, Record) for path in sorted(self._folder.glob("[!.]*.json")))
        return {record.uid: record for record in found if record is not None}

    def write(self, record: Record) -> None:
        """Remember `record` in place of an earlier one of the same uid. Raises OSError."""
        durable.write(self._path(record.uid), record)

    def remove(self, uid: str) -> None:
        """Forget the engine of `uid`, which is gone; a record that cannot be deleted describes nothing that runs."""
        try:
            self._path(uid).unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot delete the record of an engine that is gone", uid=uid, error=str(error))

    def _path(self, uid: str) -> Path:
        return self._folder / f"{uid}.json"
