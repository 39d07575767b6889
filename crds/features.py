"""Features: what an agent must understand to run a MetalProcess, beyond what agents of the first release do.

An agent ignores fields that it does not know, and the API server writes defaults into new fields of every process. So
the controller states what a process needs in `spec.features`, an agent reports what it knows in `status.features`, the
queue compares both, and an agent rejects a process that needs more. A field or a value that changes how a process runs
gets its line in `FEATURE_OF_FIELD` with the release that adds it, and any other field its place in
`FIELDS_THAT_MAY_BE_IGNORED`; a test compares the fields with the previous version.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from crds.meta import without_defaults
from crds.metalhost import MetalHostStatus
from crds.metalprocess import MetalProcessSpec

INSPECTION: Final = "Inspection"
PROTECTION: Final = "Protection"

FEATURE_OF_FIELD: Final[Mapping[str, str]] = {"inspect": INSPECTION, "protected": PROTECTION}
"""Features by field of a MetalProcess's spec, such as `artifact.mirrors`, or by one of its values, `mode=rerank`."""
FIELDS_THAT_MAY_BE_IGNORED: Final = frozenset({"benchmark", "drainSeconds"})
"""Later fields of a MetalProcess's spec that change nothing of how it runs: agents that do not know them run it,
and those of earlier releases drain for 30 s, whatever drainSeconds says."""
AGENT_FEATURES: Final = tuple(sorted(set(FEATURE_OF_FIELD.values())))
"""All that the agent of this version knows."""


def find_features(spec: MetalProcessSpec) -> list[str]:
    """Return the features that a process of this spec needs, sorted."""
    stated = set(list_stated_fields(without_defaults(spec)))
    return sorted({feature for field, feature in FEATURE_OF_FIELD.items() if field in stated})


def known_features(status: MetalHostStatus) -> frozenset[str]:
    """Return the features that a host's agent knows; one that reports none has those of the first release."""
    # Agents of the release before state the only feature that they have in a field of its own.
    return frozenset((*status.features, INSPECTION) if status.inspects else status.features)


def list_stated_fields(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each field of a spec as JSON, and with it each text as `PATH=TEXT`."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            field = f"{path}.{name}" if path else str(name)
            yield field
            yield from list_stated_fields(each, field)
    elif isinstance(value, list):
        for each in value:
            yield from list_stated_fields(each, path)
    elif isinstance(value, str):
        yield f"{path}={value}"
