"""Admission of a process to this host, before anything is fetched; an admitted process has its memory reserved."""

import asyncio
from collections.abc import Collection

from artifacts.errors import ArtifactError
from artifacts.source import scheme_of
from crds.metalprocess import MetalProcessSpec
from crds.size import size_text
from crds.weights_header import Layout
from fitness.memory import Estimate, Workload, estimate, is_understated, way_out
from metal_agent.assignments import Assignment
from metal_agent.memory.ledger import Ledger
from metal_agent.memory.peaks import Peaks
from metal_agent.native import engine_command
from metal_agent.process_events import Admitted, Failed, Refused
from metal_agent.weights import HostWeights
from runtimes.registry import RUNTIMES

_FILE_REASONS = {"SourceForbidden": "FileNotAllowed", "SourceNotFound": "FileNotFound"}


async def admit(
    assignment: Assignment, weights: HostWeights, ledger: Ledger, peaks: Peaks, daemons: Collection[str] = ()
) -> Admitted | Refused | Failed:
    """Decide whether this host can run the assignment; on Admitted its memory is reserved under its uid.

    The reservation is the larger of spec.memoryBytes and the peak that was measured here for the same weights, runtime
    and options. `daemons` are the runtimes whose shared daemon runs here.

    Refused: this host cannot run it, or not now (InsufficientMemory: it is checked again once so much is free). Failed:
    the weights could not be read; it is tried again.
    """
    spec = assignment.spec
    # 1. Can this host run such a process at all?
    if assignment.problem:
        return Refused("Unsupported", assignment.problem)
    runtimes = [*await asyncio.to_thread(engine_command.list_installed), *daemons]
    if spec.runtime not in runtimes:
        return Refused("Unsupported", _describe_missing_runtime(spec.runtime, runtimes))
    try:
        obstacle = engine_command.find_obstacle(spec)
        if obstacle:
            return Refused("Unsupported", obstacle)
        layout = await weights.read_layout(spec.artifact)
    except ArtifactError as error:
        return explain_artifact_error(spec.artifact.source, error)

    # 2. Does spec.memoryBytes cover what the weights need by their header?
    workload = Workload(layout, spec.runtime)
    estimated = estimate(workload, spec)
    if estimated is not None and estimated.total_bytes > spec.memory_bytes:
        return _understated(spec, estimated)

    # 3. Reserve the memory.
    needed_bytes = peaks.needed_bytes(spec)
    problem = ledger.reserve(assignment.uid, needed_bytes)
    if not problem:
        return Admitted()

    # 4. It does not fit: say what would help.
    peak_note = ", which is the peak measured here before" if needed_bytes > spec.memory_bytes else ""
    # If engines of this model used more than stated: assume the same excess for any other context.
    limit_bytes = ledger.available_bytes - (needed_bytes - spec.memory_bytes)
    if estimated is not None and estimated.total_bytes <= limit_bytes and not spec.further_artifacts:
        # spec.memoryBytes was stated higher than needed: no other context and no other weights would help.
        advice = (
            f"by the file's header {size_text(estimated.total_bytes)} are enough: lower spec.memoryBytes of Model "
            f"{spec.model_name}"
        )
    else:
        advice = way_out(workload, spec, limit_bytes)  # such as a shorter context that would fit
    return Refused("InsufficientMemory", f"{problem}{peak_note}; {advice}, or free memory on this host", needed_bytes)


def _describe_missing_runtime(runtime: str, installed: Collection[str]) -> str:
    """Return the message about a runtime that is not among the `installed` ones of this host."""
    hint = RUNTIMES[runtime].install_hint if runtime in RUNTIMES else "a newer pomona may know it"
    return f"spec.runtime {runtime!r} is not installed on this host, which has {', '.join(installed) or 'none'}: {hint}"


def find_understatement(spec: MetalProcessSpec, layout: Layout | None, draft: Layout | None = None) -> Refused | None:
    """Return the refusal of fetched weights that take clearly more memory than is reserved; None if they do not.

    The reservation relies on spec.memoryBytes of the Model, or on headers that a server or another host reported;
    `layout` and `draft` are those of the bytes that arrived.
    """
    needed = estimate(Workload(layout, spec.runtime, draft=draft), spec)
    if needed is None or not is_understated(spec.memory_bytes, needed.total_bytes):
        return None
    return _understated(spec, needed)


def _understated(spec: MetalProcessSpec, needed: Estimate) -> Refused:
    """Return the refusal of a process whose spec.memoryBytes, which is reserved, is less than its weights need."""
    return Refused(
        "MemoryUnderstated",
        f"by the file's header, serving it takes {size_text(needed.total_bytes)} ({needed.text()}), but only "
        f"{size_text(spec.memory_bytes)} are reserved: raise spec.memoryBytes of Model {spec.model_name} to "
        f"{needed.total_bytes} or lower the context",
    )


def explain_artifact_error(source: str, error: ArtifactError) -> Refused | Failed:
    """Return the outcome for an artifact error: a file that is missing on this host may be on another one."""
    # _FILE_REASONS: the reasons for a file that is missing, or outside of the allowed folder.
    if scheme_of(source) == "file" and error.reason in _FILE_REASONS:
        return Refused(_FILE_REASONS[error.reason], error.message)
    pause = error.retry_after_seconds
    return Failed(error.reason, error.message, permanent=not error.retryable, retry_after_seconds=pause)
