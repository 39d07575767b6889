"""Peak memory of earlier runs, by artifacts, runtime and arguments, for the next admission.

The reservation is the larger of the estimate and the highest peak of the last runs. It is never below the estimate, so
a run that was short, idle or measured badly does no harm; a run that leaked is forgotten after as many better ones.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from artifacts import durable
from crds.metalprocess import Artifact, MetalProcessSpec
from crds.serving import ServingOptions, stated_options

RUNS: Final = 5
"""Runs that are kept for each key."""
_MAX_ENTRIES: Final = 256
_FREE_OPTIONS: Final = frozenset({"chat_template"})
"""Options that take no memory."""
_GROWTH: Final = 1.01
"""A peak that rises by less than this factor is not written."""

log = structlog.get_logger()


class Run(msgspec.Struct, frozen=True):
    """The peak of one run of an engine; `started` is unique among runs."""

    started: str
    bytes: int


class PeaksFile(msgspec.Struct, frozen=True):
    """The state file `peaks.json`."""

    runs: dict[str, list[Run]] = {}
    """By key of `identify_serving`, the latest last."""


class Peaks:
    """Peaks of earlier runs, kept in the file `path`, or only in memory if that is None.

    Raises OSError if it cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        remembered = durable.read(path, PeaksFile) if path else None
        self._runs = dict(remembered.runs) if remembered else {}

    def needed_bytes(self, spec: MetalProcessSpec) -> int:
        """Return the memory to reserve for `spec`: its own amount or, if larger, the highest peak of earlier runs."""
        runs = self._runs.get(identify_serving(spec), ())
        return max(spec.memory_bytes, max((run.bytes for run in runs), default=0))

    def observe(self, used_by_run: Mapping[str, tuple[MetalProcessSpec, int]]) -> None:
        """Note the memory that each run of an engine uses now, and write new peaks to disk.

        `used_by_run` has spec and used bytes by the unique name of the run: an engine that was started again is another
        run of the same spec. If the file cannot be written, the peaks are kept in memory, and written with the next
        new peak.
        """
        # `_note` returns True if the run is new, or its peak has risen.
        has_risen = [self._note(run, identify_serving(spec), used) for run, (spec, used) in used_by_run.items()]
        if not any(has_risen) or self._path is None:
            return

        # _runs: by key, the last runs of engines that serve the same; the key that was noted last is at its end.
        while len(self._runs) > _MAX_ENTRIES:
            self._runs.pop(next(iter(self._runs)))  # the one that was noted first

        try:
            durable.write(self._path, PeaksFile(self._runs))
        except OSError as error:
            log.warning("peaks_not_written", error=str(error))

    def _note(self, run_name: str, key: str, used_bytes: int) -> bool:
        """Note the memory of a run; return True if the run is new, or its peak has risen by 1 % or more.

        A smaller rise changes nothing. `key` is what the engine serves (see `identify_serving`): the last `RUNS` runs
        of each key are kept. `run_name` is one start of the engine.
        """
        runs = self._runs.get(key, [])
        previous = next((run for run in runs if run.started == run_name), None)
        if previous and used_bytes < previous.bytes * _GROWTH:
            return False
        others = [run for run in runs if run is not previous]
        # Inserted anew, so that the key that was noted last is the last to be forgotten.
        self._runs.pop(key, None)
        self._runs[key] = [*others, Run(run_name, used_bytes)][-RUNS:]
        return True


def identify_serving(spec: MetalProcessSpec) -> str:
    """Return the key of everything that determines memory use: artifacts, runtime and options, but not the service."""
    artifacts = [spec.artifact, *(further.artifact for further in spec.further_artifacts)]
    defaults, stated = stated_options(ServingOptions()), stated_options(spec)
    # An option with its default is left out, so that an option that is added changes no key. _FREE_OPTIONS are those
    # that take no memory.
    options = {name: value for name, value in stated.items() if name not in _FREE_OPTIONS and value != defaults[name]}
    identity = [[_digest(artifact) for artifact in artifacts], spec.runtime, options]
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()


def _digest(artifact: Artifact) -> str:
    """Return the identity of an artifact: its digest, or else its source and size."""
    return artifact.sha256 or f"{artifact.source}@{artifact.revision}/{artifact.size_bytes}"
