"""A field that the agent of the previous version would ignore is not added by mistake."""

from collections.abc import Iterator
from typing import Any, Final

import yaml

from tests.controlplane.process import CHECKOUT
from tests.support.previous_version import read_file

PROCESSES: Final = "crds/inference.pomona.dev_metalprocesses.yaml"
MAY_BE_IGNORED: Final[frozenset[str]] = frozenset()
"""Fields of a MetalProcess's spec since the previous version that change nothing of how a process runs."""

OF_FEATURES: Final = frozenset({"furtherArtifacts.requestName"})
"""Fields that are stated only beside a feature, by which the agent of the previous version rejects the process."""


def test_previous_agent_knows_all_fields_of_a_process() -> None:
    """Else it runs a process as if they were not stated: move `PREVIOUS_COMMIT`, or ask for a feature.

    Values of enums are no fields: an agent rejects a process with one that it does not know.
    """
    before = set(list_fields(read_spec(read_file(PROCESSES))))
    now = set(list_fields(read_spec((CHECKOUT / PROCESSES).read_text())))
    assert now - before == MAY_BE_IGNORED | OF_FEATURES
    assert {"artifact.mirrors", "furtherArtifacts.artifact.files"} <= now


def read_spec(text: str) -> dict[str, Any]:
    (version,) = yaml.safe_load(text)["spec"]["versions"]
    spec: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec


def list_fields(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the path of each field."""
    for name, field in schema.get("properties", {}).items():
        yield f"{path}{name}"
        yield from list_fields(field, f"{path}{name}.")
    if "items" in schema:
        yield from list_fields(schema["items"], path)
