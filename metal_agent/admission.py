"""Decides whether this host runs a process at all, before anything is fetched, and reserves its memory."""

import asyncio
from collections.abc import Collection

from artifacts.errors import ArtifactError
from crds.size import size_text
from fitness.memory import estimate, settings_of, way_out
from metal_agent import engine
from metal_agent.assignments import Assignment
from metal_agent.ledger import Ledger
from metal_agent.lifecycle import Admitted, Failed, Refused
from metal_agent.peaks import Peaks
from metal_agent.weights import Weights
from runtimes.registry import RUNTIMES

_FILE_REASONS = {"SourceForbidden": "FileNotAllowed", "SourceNotFound": "FileNotFound"}


async def admit(
    assignment: Assignment, weights: Weights, ledger: Ledger, peaks: Peaks, daemons: Collection[str] = ()
) -> Admitted | Refused | Failed:
    """Look at everything that can be known now; on Admitted its memory is reserved under its uid.

    What is reserved is the larger of the spec's word and what the same was seen to take here. `daemons` are the
    runtimes whose shared daemon runs here.
    """
    spec = assignment.spec
    if spec is None:
        return Refused("Unsupported", assignment.problem)
    runtimes = [*await asyncio.to_thread(engine.installed), *daemons]
    if spec.runtime not in runtimes:
        has = ", ".join(runtimes) or "none"
        hint = RUNTIMES[spec.runtime].install_hint if spec.runtime in RUNTIMES else "a newer pomona may know it"
        message = f"spec.runtime {spec.runtime!r} is not installed on this host, which has {has}: {hint}"
        return Refused("Unsupported", message)
    try:
        unable = engine.inability(spec)
        if unable:
            return Refused("Unsupported", unable)
        layout = await weights.layout(spec.artifact)
    except ArtifactError as error:
        return refusal(spec.artifact.source, error)
    settings = settings_of(spec, runtime=spec.runtime)
    needed = estimate(layout, settings)
    if needed is not None and needed.total_bytes > spec.memory_bytes:
        return Refused(
            "MemoryUnderstated",
            f"the file's own header says that serving it takes {size_text(needed.total_bytes)} ({needed.text()}), but "
            f"only {size_text(spec.memory_bytes)} are reserved: raise spec.memoryBytes of Model {spec.model_name} to "
            f"{needed.total_bytes} or lower the context",
        )
    needed_bytes = peaks.needed_bytes(spec)
    problem = ledger.reserve(assignment.uid, needed_bytes)
    if not problem:
        return Admitted()
    seen = ", which is what it was seen to take here before" if needed_bytes > spec.memory_bytes else ""
    # What was seen beside the estimate would come on top of any other context, too.
    limit_bytes = ledger.available_bytes - (needed_bytes - spec.memory_bytes)
    if needed is not None and needed.total_bytes <= limit_bytes and not spec.further_artifacts:
        # Somebody stated more than that: no other context and no other weights would change it.
        way = (
            f"the file's own header tells of {size_text(needed.total_bytes)} only: lower spec.memoryBytes of Model "
            f"{spec.model_name}"
        )
    else:
        way = way_out(layout, settings, limit_bytes)
    return Refused("InsufficientMemory", f"{problem}{seen}; {way}, or free memory there", needed_bytes)


def refusal(source: str, error: ArtifactError) -> Refused | Failed:
    """Tell what an artifact's error means here: a file that this host has not, another host may have."""
    if source.startswith("file:") and error.reason in _FILE_REASONS:
        return Refused(_FILE_REASONS[error.reason], error.message)
    return Failed(error.reason, error.message, permanent=not error.retryable)
