"""The generated CRD YAML matches the structs, and a stale file is reported."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from crds import generate
from crds.definitions import DEFINITIONS, Definition
from crds.gatewayquota import GatewayQuota
from crds.meta import GROUP


def walk(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    schemas = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        schemas += walk(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            schemas += walk(schema[key], f"{path}[]")
    return schemas


def open_ends(schema: dict[str, Any]) -> list[str]:
    """Return the bounds that a schema lacks, so that one object could take as much memory as its writer likes."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return ["x-kubernetes-preserve-unknown-fields"]
    if schema.get("x-kubernetes-int-or-string"):
        return [bound for bound in ("maximum", "maxLength") if bound not in schema]
    match schema["type"]:
        case "string":
            return [] if "enum" in schema or "maxLength" in schema else ["maxLength"]
        case "integer" | "number":
            return [bound for bound in ("minimum", "maximum") if bound not in schema]
        case "array":
            return [] if "maxItems" in schema else ["maxItems"]
        case "object" if "additionalProperties" in schema:
            keys = any(
                "self.all(key, size(key) <=" in rule["rule"] for rule in schema.get("x-kubernetes-validations", [])
            )
            return [] if "maxProperties" in schema and keys else ["maxProperties, and a rule on its keys"]
        case _:
            return []


@pytest.fixture(scope="module")
def files() -> dict[Path, str]:
    return generate.render_files()


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda d: d.kind)
class TestDefinition:
    def test_file_beside_the_structs_is_fresh(self, definition: Definition, files: dict[Path, str]) -> None:
        name = f"{GROUP}_{definition.plural}.yaml"
        for path in (generate.FOLDER / name, generate.CHART / name):
            assert path.read_text() == files[path], "run `make crds`"
        rendered = definition.render()
        assert yaml.safe_load(files[generate.FOLDER / name]) == rendered
        kept = rendered | {"metadata": rendered["metadata"] | {"annotations": generate.KEPT}}
        assert yaml.safe_load(files[generate.CHART / name]) == kept

    def test_schema_is_structural(self, definition: Definition) -> None:
        root = definition.render()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for path, schema in walk(root):
            assert "$ref" not in schema, path
            assert "type" in schema or schema.get("x-kubernetes-int-or-string"), path

    def test_every_field_is_described(self, definition: Definition) -> None:
        root = definition.render()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        silent = [
            path
            for path, schema in walk(root)
            if "description" not in schema
            and path not in {".apiVersion", ".kind", ".metadata"}  # Kubernetes describes these
            and not path.endswith("[]")
        ]
        assert silent == []

    def test_every_default_is_in_the_description(self, definition: Definition) -> None:
        root = definition.render()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        silent = [
            path
            for path, schema in walk(root)
            if "default" in schema and schema["default"] != {} and "Default:" not in schema["description"]
        ]
        assert silent == []

    def test_everything_that_others_write_is_bounded(self, definition: Definition) -> None:
        root = definition.render()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        names = {".apiVersion", ".kind"}  # the API server compares them with the resource
        unbounded = [
            (path, missing) for path, schema in walk(root) if path not in names for missing in open_ends(schema)
        ]
        assert unbounded == []

    def test_status_has_no_defaults(self, definition: Definition) -> None:
        root = definition.render()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        assert [path for path, schema in walk(root["properties"].get("status", {})) if "default" in schema] == []

    def test_conditions_merge_by_type(self, definition: Definition) -> None:
        root = definition.render()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        if definition.struct is GatewayQuota:  # an administrator's word is final: it has no status
            assert "status" not in root["properties"]
            return
        conditions = root["properties"]["status"]["properties"]["conditions"]
        assert conditions["x-kubernetes-list-type"] == "map"
        assert conditions["x-kubernetes-list-map-keys"] == ["type"]
        assert set(conditions["items"]["required"]) == {"type", "status", "reason", "message", "lastTransitionTime"}


def test_stale_file_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, files: dict[Path, str]
) -> None:
    first = next(iter(files))
    monkeypatch.setattr(generate, "render_files", lambda: files | {first: "other"})
    monkeypatch.setattr("sys.argv", ["generate", "--check"])
    assert generate.main() == 1
    assert capsys.readouterr().err == f"crds/{first.name} is stale: run `make crds`\n"
