"""The values of the chart: each is described once, in two places, and the default ones are valid."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cli.controller import command
from crds.meta import LONGEST_NAME
from tests.controlplane.process import CHECKOUT

CHART = CHECKOUT / "deploy" / "chart"
TEXT = (CHART / "values.yaml").read_text()
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
FROM_HELM = "global"
"""Key that Helm itself adds to the values of a chart within another one."""
OPTIONS = {
    "image.pullSecrets": "--image-pull-secret",
    "scope.namespaces": "--namespace",
    "models.nodeCacheSize": "--node-cache-size",
}
"""Option of the controller by the value that is passed on to it."""
REFUSED = {
    "image.repository": (
        "ghcr.io/pomona-dev/pomona:0.1.0",
        "registry.example/pomona@sha256:01",
        "https://hub.example/a",
    ),
    "image.tag": ("-1", "a/b"),
    "image.pullSecrets": ("a..b", "Registry"),
    "models.nodeCacheSize": ("500 gigs", "0Gi", "1e3", "1" * 65),
    "models.allowPrivateSources": ("10.1.0.0/33", "10.1.0.256", "10.1.0.0/16,10.2.0.0/16", "hub.example"),
}
"""Values that make no sense, and with which the controller would not start, or its pods would get no image."""
ACCEPTED = {
    "image.repository": ("pomona", "registry.example:5000/team/pomona", "[fd00::1]:5000/pomona"),
    "image.tag": ("", "0.1.0", "_main", "v1.0-rc.1"),
    "models.nodeCacheSize": ("", "500Gi", "1.5TiB", "500 GiB", "107374182400"),
    "models.allowPrivateSources": ("10.1.0.0/16", "192.168.1.255", "0.0.0.0/0", "fd00::/8", "::1"),
}


def described_in_schema(schema: dict[str, Any], *path: str) -> Iterator[tuple[str, str]]:
    """Yield path and description of each value; a section has properties, and refuses all others."""
    for name, child in schema["properties"].items():
        if name == FROM_HELM:
            continue
        if "properties" in child:
            yield from described_in_schema(child, *path, name)
        else:
            yield ".".join((*path, name)), child["description"]
    assert schema["additionalProperties"] is False, path


def described_in_comments(text: str) -> Iterator[tuple[str, str]]:
    """Yield path and description of each value that has a comment."""
    path: list[str] = []
    comment = ""
    for line in text.splitlines():
        if match := re.fullmatch(r" *# -- (.*)", line):
            comment = match[1]
        elif match := re.match(r"( *)(\w+):", line):
            path[len(match[1]) // 2 :] = [match[2]]
            if comment:
                yield ".".join(path), comment
            comment = ""


def values(section: dict[str, Any], described: frozenset[str], *path: str) -> Iterator[str]:
    """Yield the path of each value; what is below a described one is its content."""
    for name, child in section.items():
        where = ".".join((*path, name))
        if isinstance(child, dict) and where not in described:
            yield from values(child, described, *path, name)
        else:
            yield where


def test_each_value_is_described_in_the_same_words_by_comment_and_schema() -> None:
    described = dict(described_in_schema(SCHEMA))
    assert dict(described_in_comments(TEXT)) == described
    assert [*values(yaml.safe_load(TEXT), frozenset(described))] == [*described]
    assert all(re.fullmatch(r"[A-Z].*\.", description) for description in described.values())


def test_section_and_default_cannot_be_emptied() -> None:
    """Helm takes a key without a value for one to leave out, as what is below it is if all of that is commented out."""
    assert {*list_stated_as_required(SCHEMA)} == {*list_required(yaml.safe_load(TEXT), SCHEMA)}


def test_default_values_are_valid() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(yaml.safe_load(TEXT), SCHEMA, cls=jsonschema.Draft7Validator)


def find_schema(path: str) -> dict[str, Any]:
    """Return the schema of a value, or that of the items of one that is a list."""
    schema = SCHEMA
    for name in path.split("."):
        schema = schema["properties"][name]
    return dict(schema.get("items", schema))


def list_required(section: dict[str, Any], schema: dict[str, Any], *path: str) -> Iterator[str]:
    """Yield the path of each section, and of each default that an empty value would take away."""
    for name, value in section.items():
        child = schema["properties"][name]
        if "properties" in child:
            yield ".".join((*path, name))
            yield from list_required(value, child, *path, name)
        elif value and not isinstance(value, dict):
            yield ".".join((*path, name))


def list_stated_as_required(schema: dict[str, Any], *path: str) -> Iterator[str]:
    yield from (".".join((*path, name)) for name in schema.get("required", ()))
    for name, child in schema.get("properties", {}).items():
        yield from list_stated_as_required(child, *path, name)


def is_valid(schema: dict[str, Any], value: str) -> bool:
    return jsonschema.Draft7Validator(schema).is_valid(value)


def texts(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    """Generate texts that a schema with a pattern accepts."""
    return st.from_regex(schema["pattern"], fullmatch=True).filter(lambda text: is_valid(schema, text))


@pytest.mark.parametrize("path", REFUSED)
def test_value_that_makes_no_sense_is_refused(path: str) -> None:
    assert [value for value in REFUSED[path] if is_valid(find_schema(path), value)] == []


@pytest.mark.parametrize("path", ACCEPTED)
def test_value_that_makes_sense_is_accepted(path: str) -> None:
    assert [value for value in ACCEPTED[path] if not is_valid(find_schema(path), value)] == []


@pytest.mark.parametrize("path", OPTIONS)
@given(data=st.data())
def test_controller_takes_each_value_that_the_schema_accepts(path: str, data: st.DataObject) -> None:
    value = data.draw(texts(find_schema(path)).filter(bool))
    command.make_context("controller", [f"{OPTIONS[path]}={value}"])


@given(data=st.data())
def test_controller_takes_each_label_of_monitors_that_the_schema_accepts(data: st.DataObject) -> None:
    ((pattern, value),) = find_schema("services.monitorLabels")["patternProperties"].items()
    key = data.draw(st.from_regex(pattern, fullmatch=True).filter(lambda text: len(text) <= LONGEST_NAME))
    command.make_context("controller", [f"--monitor-label={key}={data.draw(texts(value))}"])


def test_chart_has_the_version_of_the_package() -> None:
    version = re.search(r'^version = "(.*)"', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert version is not None
    assert (chart["version"], chart["appVersion"]) == (version[1], version[1])
