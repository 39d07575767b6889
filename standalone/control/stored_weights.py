"""The weights in the store of a machine, for people: the list, and the deletion of some."""

from collections.abc import Iterable
from datetime import UTC, datetime

from artifacts.source import without_secrets
from artifacts.weights_store import WeightsStore
from metal_agent.assignments import Assignment
from standalone.control.up_status import WeightsFacts

SHOWN_DIGITS = 12


class WeightsInUseError(Exception):
    """The weights are in use; the message says by whom, and the way out."""


def list_weights(store: WeightsStore, assignments: Iterable[Assignment] = ()) -> list[WeightsFacts]:
    """Return the weights in the store, the most recently used first, each with the services that serve it.

    Raises OSError.
    """
    services = [
        (artifact.sha256, without_secrets(artifact.source), assignment.spec.service_name)
        for assignment in assignments
        for artifact in (assignment.spec.artifact, *(further.artifact for further in assignment.spec.further_artifacts))
    ]
    facts = []
    for stored in store.stored():
        manifest = stored.manifest
        source = without_secrets(manifest.source)
        names = {name for sha256, of, name in services if manifest.digest == sha256 or source == of}
        facts.append(
            WeightsFacts(
                digest=manifest.digest,
                size_bytes=manifest.size_bytes,
                last_used=datetime.fromtimestamp(stored.used_at, UTC).isoformat(timespec="seconds"),
                in_use=stored.in_use,
                source=source,
                services=sorted(names),
            )
        )
    return facts


def delete_weights(store: WeightsStore, facts: WeightsFacts) -> None:
    """Delete weights. Raises WeightsInUseError, OSError and ArtifactError."""
    if not store.remove(facts.digest):  # the store keeps what a process has locked
        if facts.services:
            way_out = f"serves {', '.join(facts.services)}: take that out of the files of `pomona up` first"
        else:
            way_out = "is in use: end the engine, or delete the InferenceService, that serves it first"
        raise WeightsInUseError(f"{facts.digest[:SHOWN_DIGITS]} ({facts.source}) {way_out}")
