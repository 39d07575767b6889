"""Remembers the most memory that each way of serving was seen to take, so that the next admission knows better.

The rule: what is reserved is the larger of the estimate and the highest peak of the last runs of the same artifacts,
runtime and arguments. It never falls below the estimate, so a run that was short, or idle, or seen badly takes nothing
away; and a run that leaked is forgotten after as many better ones.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from artifacts import durable
from crds.metalprocess import Artifact, MetalProcessSpec

RUNS: Final = 5
"""Runs that are remembered of each way of serving."""
_MOST_WAYS: Final = 256
_GROWTH: Final = 1.01
"""A peak that rises by less is not written."""

log = structlog.get_logger()


class Run(msgspec.Struct, frozen=True):
    """The highest that one engine was seen at; `started` tells its runs apart."""

    started: str
    bytes: int


class _Remembered(msgspec.Struct, frozen=True):
    runs: dict[str, list[Run]] = {}
    """By way of serving, the latest last."""


class Peaks:
    """What is remembered in the file `path`; in memory only where that is None.

    Raises OSError when it cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        remembered = durable.read(path, _Remembered) if path else None
        self._runs = dict(remembered.runs) if remembered else {}

    def needed_bytes(self, spec: MetalProcessSpec) -> int:
        """Return what is to be reserved for `spec`."""
        seen = self._runs.get(way(spec), ())
        return max(spec.memory_bytes, max((run.bytes for run in seen), default=0))

    def observe(self, seen: Mapping[str, tuple[MetalProcessSpec, int]]) -> None:
        """Take note of what engines use, by when they were started, which is unique; blocks while it is written."""
        changed = [self._note(started, way(spec), used) for started, (spec, used) in seen.items()]
        if not any(changed) or self._path is None:
            return
        while len(self._runs) > _MOST_WAYS:
            self._runs.pop(next(iter(self._runs)))
        try:
            durable.write(self._path, _Remembered(self._runs))
        except OSError as error:
            log.warning("cannot write the peaks of engines", error=str(error))

    def _note(self, started: str, key: str, used_bytes: int) -> bool:
        runs = self._runs.get(key, [])
        known = next((run for run in runs if run.started == started), None)
        if known and used_bytes < known.bytes * _GROWTH:
            return False
        others = [run for run in runs if run is not known]
        # The way that was used last is the last to be forgotten.
        self._runs.pop(key, None)
        self._runs[key] = [*others, Run(started, used_bytes)][-RUNS:]
        return True


def way(spec: MetalProcessSpec) -> str:
    """Identify what is served and how, as far as memory depends on it, whatever service it is for."""
    artifacts = [spec.artifact, *(each.artifact for each in spec.further_artifacts)]
    decides = (
        [_digest(artifact) for artifact in artifacts],
        spec.runtime,
        spec.mode,
        spec.context_length,
        spec.parallel,
        spec.cache_type_k,
        spec.cache_type_v,
        spec.extra_args,
    )
    return hashlib.sha256(msgspec.json.encode(decides)).hexdigest()


def _digest(artifact: Artifact) -> str:
    return artifact.sha256 or f"{artifact.source}@{artifact.revision}/{artifact.size_bytes}"
