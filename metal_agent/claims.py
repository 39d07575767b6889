"""Recognises engines that a `pomona up` left on this machine as what a cluster wants here, so that nothing loads twice.

An engine is what it serves and how: the digest of its weights, the runtime and all that decides its arguments. Neither
uid nor name tells, for the cluster gives its own. What no MetalProcess claims for a while is stopped; until then its
memory is offered to the cluster as free, and is made free where something else needs it.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from msgspec import structs

from crds.metalprocess import Artifact, MetalProcessSpec
from metal_agent.assignments import Assignment

CLAIM_SECONDS: Final = 600.0
"""From the first whole list of MetalProcesses, for an owner to apply to the cluster what ran without it."""


def fingerprint(spec: MetalProcessSpec) -> bytes:
    """Return what an engine is, without what the cluster calls it: fields that are not named here count."""
    further = [
        structs.replace(each, artifact=_identity(each.artifact), source_secret=None) for each in spec.further_artifacts
    ]
    engine = structs.replace(
        spec,
        service_name="",
        model_name="",
        memory_bytes=1,
        token_secret="",
        source_secret=None,
        host_name=None,
        priority="normal",
        artifact=_identity(spec.artifact),
        further_artifacts=further,
    )
    return msgspec.json.encode(engine, order="sorted")


def match(unclaimed: Mapping[str, MetalProcessSpec], wanted: Iterable[Assignment]) -> dict[str, Assignment]:
    """Return by the uid of each engine that is claimed what claims it; each is claimed once.

    Args:
        unclaimed: what runs, by uid.
        wanted: what does not run yet.
    """
    free = {uid: (fingerprint(spec), spec.service_name) for uid, spec in unclaimed.items()}
    claimed: dict[str, Assignment] = {}
    for assignment in wanted:
        if assignment.spec is None or assignment.deleted:
            continue
        mark, name = fingerprint(assignment.spec), assignment.spec.service_name
        alike = [uid for uid, (known, _) in free.items() if known == mark]
        # Of equal engines that of the same name: what it answers with is its name then.
        if uid := min(alike, key=lambda uid: (free[uid][1] != name, uid), default=None):
            del free[uid]
            claimed[uid] = assignment
    return claimed


def needs_room(wanted: Iterable[Assignment], available_bytes: int) -> bool:
    """Whether what is wanted, and does not run yet, fits only where something else makes room."""
    return sum(each.spec.memory_bytes for each in wanted if each.spec and not each.deleted) > available_bytes


def _identity(artifact: Artifact) -> Artifact:
    """Name the weights: by their digest where it is known, else by where they come from."""
    if artifact.sha256:
        return Artifact(source="", sha256=artifact.sha256)
    return Artifact(source=artifact.source, revision=artifact.revision)
