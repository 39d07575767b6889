"""Match engines that `pomona up` left running with MetalProcesses of the cluster, so that no model is loaded twice.

An engine is identified by the digest of its weights, its runtime and everything that decides its arguments, not by uid
or name, since the cluster assigns new ones. An engine that no MetalProcess claims for a while is stopped; until then
its memory is reported to the cluster as free, and is freed if another process needs it.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import structs

from crds.metalprocess import Artifact, MetalProcessSpec, without_edits
from metal_agent.assignments import Assignment

CLAIM_SECONDS: Final = 600.0
"""Time, from the first full list of MetalProcesses, for the owner to apply the running services to the cluster."""


def fingerprint_engine(spec: MetalProcessSpec) -> MetalProcessSpec:
    """Return the identity of an engine: its spec without names, host, Secrets, memory and fields that may change.

    Two engines with equal results serve the same weights in the same way, so one can replace the other. Fields that do
    not count get a constant; a field that is added to the spec belongs to the identity. Compare the specs, not their
    encodings, which may differ for equal specs: msgspec omits a default by its identity.
    """
    further_artifacts = [
        structs.replace(further, artifact=_identify_weights(further.artifact), source_secret=None)
        for further in spec.further_artifacts
    ]

    return structs.replace(
        without_edits(spec),  # without the fields that may change while it runs
        service_name="",
        model_name="",
        memory_bytes=1,
        token_secret="",
        source_secret=None,
        host_name=None,
        artifact=_identify_weights(spec.artifact),
        further_artifacts=further_artifacts,
    )


def match_engines(unclaimed: Mapping[str, MetalProcessSpec], wanted: Iterable[Assignment]) -> dict[str, Assignment]:
    """Return the assignment that takes over each running engine, by uid of the engine; each engine is taken over once.

    Args:
        unclaimed: specs of running engines, by uid.
        wanted: assignments without an engine.
    """
    unmatched = {uid: fingerprint_engine(spec) for uid, spec in unclaimed.items()}  # not taken over so far
    claimed: dict[str, Assignment] = {}
    for assignment in wanted:
        if assignment.deleted:
            continue

        wanted_fingerprint, service_name = fingerprint_engine(assignment.spec), assignment.spec.service_name
        equal_engines = [uid for uid, fingerprint in unmatched.items() if fingerprint == wanted_fingerprint]
        # The engine of the same service is preferred: it was started with the name of its service.
        of_same_service = [uid for uid in equal_engines if unclaimed[uid].service_name == service_name]
        if uid := min(of_same_service or equal_engines, default=None):  # any of them, but always the same
            del unmatched[uid]
            claimed[uid] = assignment
    return claimed


def exceeds_memory(wanted: Iterable[Assignment], available_bytes: int) -> bool:
    """Decide whether the assignments, none of which has an engine yet, reserve more memory than is available."""
    return sum(assignment.spec.memory_bytes for assignment in wanted if not assignment.deleted) > available_bytes


def _identify_weights(artifact: Artifact) -> Artifact:
    """Return the identity of weights: their digest if it is known, else their source and revision."""
    if artifact.sha256:
        return Artifact(source="", sha256=artifact.sha256)
    return Artifact(source=artifact.source, revision=artifact.revision)
