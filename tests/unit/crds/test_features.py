"""Features of agents: what a MetalProcess needs, what a host knows, and that no field was added without a feature."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import yaml

from crds.features import (
    AGENT_FEATURES,
    FEATURE_OF_FIELD,
    FIELDS_THAT_MAY_BE_IGNORED,
    INSPECTION,
    find_features,
    known_features,
    list_stated_fields,
)
from crds.meta import without_defaults
from crds.metalhost import MetalHostStatus
from crds.metalprocess import MetalProcessSpec
from tests.controlplane.process import CHECKOUT
from tests.support.previous_version import unpack

PROCESSES = "crds/inference.pomona.dev_metalprocesses.yaml"
SERVING = {
    "serviceName": "chat",
    "modelName": "tiny",
    "runtime": "llama.cpp",
    "artifact": {"source": "https://models.example/tiny.gguf", "mirrors": []},
    "memoryBytes": 1,
    "tokenSecret": "chat-token",
    "contextLength": 4096,
    "mode": "rerank",
}


def test_process_needs_the_features_of_what_it_states(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"inspect": "Inspection", "artifact.mirrors": "Mirrors", "mode=rerank": "Rerank", "mode=chat": "Chat"}
    monkeypatch.setattr("crds.features.FEATURE_OF_FIELD", table | {"furtherArtifacts.artifact.files": "Folders"})
    spec = msgspec.convert(SERVING, MetalProcessSpec)
    assert find_features(spec) == ["Rerank"]
    further = {"role": "draft", "artifact": {"source": "hf://a/b", "files": ["*.gguf"]}}
    spec = msgspec.convert({**SERVING, "inspect": True, "furtherArtifacts": [further]}, MetalProcessSpec)
    assert find_features(spec) == ["Folders", "Inspection", "Rerank"]


def test_process_that_serves_as_in_the_first_release_needs_no_feature() -> None:
    spec = msgspec.convert(SERVING, MetalProcessSpec)
    assert find_features(spec) == []
    assert "features" not in set(list_stated_fields(without_defaults(spec)))


@pytest.mark.parametrize(
    ("status", "known"),
    [
        (MetalHostStatus(), set()),
        (MetalHostStatus(inspects=True), {INSPECTION}),
        (MetalHostStatus(features=["Inspection", "Tomorrow"], inspects=True), {INSPECTION, "Tomorrow"}),
        (MetalHostStatus(features=["Tomorrow"]), {"Tomorrow"}),
    ],
)
def test_host_knows_what_its_agent_reports(status: MetalHostStatus, known: set[str]) -> None:
    assert known_features(status) == known


def test_what_was_added_since_the_previous_version_has_a_feature() -> None:
    """Else agents of the previous version would be given a process that they run as if it were not stated."""
    before, now = (set(list_schema(read_spec(folder / PROCESSES))) for folder in (unpack().folder, CHECKOUT))
    ignored = {each for each in now if each.partition(".")[0] in FIELDS_THAT_MAY_BE_IGNORED}
    assert now - before - {"features"} - ignored - set(FEATURE_OF_FIELD) == set()
    assert {each.partition(".")[0] for each in ignored} == FIELDS_THAT_MAY_BE_IGNORED, "each names a field"
    assert set(FEATURE_OF_FIELD) <= now, "each line names a field"
    assert len(now) > 40
    assert {"mode=rerank", "artifact.mirrors", "furtherArtifacts.artifact.files"} <= now
    assert sorted(set(FEATURE_OF_FIELD.values())) == list(AGENT_FEATURES)


def read_spec(path: Any) -> dict[str, Any]:
    (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def list_schema(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the path of each field, and of each value of an enum, as `list_stated_fields` does of an object."""
    for name, each in schema.get("properties", {}).items():
        field = f"{path}.{name}" if path else name
        yield field
        yield from list_schema(each, field)
    if "items" in schema:
        yield from list_schema(schema["items"], path)
    yield from (f"{path}={value}" for value in schema.get("enum", ()))
