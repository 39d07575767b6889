"""The measurements of this host in its state folder, by artifacts, runtime and arguments, so that each is made once.

A try is written before it begins: a machine or an agent that dies of a measurement does not try for ever.
"""

from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import structs

from artifacts import durable
from crds.metalprocess import MetalProcessSpec
from crds.performance import ProcessPerformance
from crds.rate import format_rate
from fitness.performance import MeasuredPerformance
from metal_agent.memory.peaks import identify_serving

_MOST_ENTRIES: Final = 256

log = structlog.get_logger()


class Measurement(msgspec.Struct, frozen=True):
    """The tries and the last speed of one model with its arguments."""

    engine: str = ""
    """Version of the engine that the tries are of; another version is measured anew."""
    tries: int = 0
    performance: MeasuredPerformance | None = None
    """The last measurement, maybe of an earlier version."""
    is_current: bool = False
    """True if it is of this version."""


class MeasurementsFile(msgspec.Struct, frozen=True):
    """The state file `measurements.json`."""

    measurements: dict[str, Measurement] = {}
    """By key of `identify_serving`, the latest last."""


class Measurements:
    """The measurements of a host, kept in the file `path`, or only in memory if that is None.

    Raises OSError if it cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        kept = durable.read(path, MeasurementsFile) if path else None
        self._measured = dict(kept.measurements) if kept else {}

    def find(self, spec: MetalProcessSpec) -> ProcessPerformance | None:
        """Return the speed of a process as its status shows it, or None if it was not measured."""
        measurement = self._measured.get(identify_serving(spec))
        return describe_performance(measurement.performance) if measurement and measurement.performance else None

    def count_tries(self, spec: MetalProcessSpec, engine: str) -> int | None:
        """Return the tries so far to measure a process with this version of the engine; None if it is measured.

        Tries and speed are those of one version: with another one, as after an update, it is measured anew.
        """
        measurement = self._measured.get(identify_serving(spec), Measurement())
        is_of_other_version = measurement.engine != engine
        if is_of_other_version:
            return 0
        return None if measurement.is_current else measurement.tries  # is_current: it has the speed of this version

    def begin_try(self, spec: MetalProcessSpec, engine: str) -> None:
        """Count a try to measure a process with this version of the engine; blocks while the file is written."""
        measurement = self._measured.get(identify_serving(spec), Measurement())
        tries = measurement.tries + 1 if measurement.engine == engine else 1
        self._store(spec, Measurement(engine=engine, tries=tries, performance=measurement.performance))

    def take_back_try(self, spec: MetalProcessSpec) -> None:
        """Uncount the last try, which gave way to something else; blocks while the file is written."""
        measurement = self._measured.get(identify_serving(spec), Measurement())
        self._store(spec, structs.replace(measurement, tries=max(0, measurement.tries - 1)))

    def finish(self, spec: MetalProcessSpec, performance: MeasuredPerformance) -> None:
        """Store the speed of a process, which is then not measured again; blocks while the file is written."""
        measurement = self._measured.get(identify_serving(spec), Measurement())
        self._store(spec, structs.replace(measurement, performance=performance, is_current=True))

    def _store(self, spec: MetalProcessSpec, measurement: Measurement) -> None:
        """Store a measurement, also on disk; beyond the limit, the one that was stored first is forgotten."""
        key = identify_serving(spec)
        # The key that was measured last is the last to be forgotten.
        kept = {name: entry for name, entry in self._measured.items() if name != key}
        while len(kept) >= _MOST_ENTRIES:
            kept.pop(next(iter(kept)))  # the oldest
        self._measured = {**kept, key: measurement}
        if self._path is None:
            return
        try:
            durable.write(self._path, MeasurementsFile(self._measured))
        except OSError as error:
            log.warning("measurements_not_written", error=str(error))


def describe_performance(record: MeasuredPerformance) -> ProcessPerformance:
    """Return a measurement as the status of a process shows it."""
    prompt, latency_ms = record.prompt_tokens_per_second, record.inter_token_latency_ms
    first_ms, load_seconds = record.time_to_first_token_ms, record.load_seconds
    return ProcessPerformance(
        tokens_per_second=format_rate(record.tokens_per_second),
        prompt_tokens_per_second=format_rate(prompt) if prompt is not None else "",
        time_to_first_token_ms=round(first_ms) if first_ms is not None else None,
        inter_token_latency_ms=format_rate(latency_ms) if latency_ms is not None else "",
        load_seconds=round(load_seconds) if load_seconds is not None else None,
        measured_at=record.measured_at,
    )
