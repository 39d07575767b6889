"""The values of the chart: each is described once, in two places, and the default ones are valid."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import yaml

from tests.controlplane.process import CHECKOUT

CHART = CHECKOUT / "deploy" / "chart"
TEXT = (CHART / "values.yaml").read_text()
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
FROM_HELM = "global"
"""Key that Helm itself adds to the values of a chart within another one."""


def described_in_schema(schema: dict[str, Any], *path: str) -> Iterator[tuple[str, str]]:
    """Yield path and description of each value; a section has properties, and refuses all others."""
    for name, each in schema["properties"].items():
        if name == FROM_HELM:
            continue
        if "properties" in each:
            yield from described_in_schema(each, *path, name)
        else:
            yield ".".join((*path, name)), each["description"]
    assert schema["additionalProperties"] is False, path


def described_in_comments(text: str) -> Iterator[tuple[str, str]]:
    """Yield path and description of each value that has a comment."""
    path: list[str] = []
    comment = ""
    for line in text.splitlines():
        if found := re.fullmatch(r" *# -- (.*)", line):
            comment = found[1]
        elif found := re.match(r"( *)(\w+):", line):
            path[len(found[1]) // 2 :] = [found[2]]
            if comment:
                yield ".".join(path), comment
            comment = ""


def values(section: dict[str, Any], described: frozenset[str], *path: str) -> Iterator[str]:
    """Yield the path of each value; what is below a described one is its content."""
    for name, each in section.items():
        where = ".".join((*path, name))
        if isinstance(each, dict) and where not in described:
            yield from values(each, described, *path, name)
        else:
            yield where


def test_each_value_is_described_in_the_same_words_by_comment_and_schema() -> None:
    described = dict(described_in_schema(SCHEMA))
    assert dict(described_in_comments(TEXT)) == described
    assert [*values(yaml.safe_load(TEXT), frozenset(described))] == [*described]
    assert all(re.fullmatch(r"[A-Z].*\.", each) for each in described.values())


def test_default_values_are_valid() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(yaml.safe_load(TEXT), SCHEMA, cls=jsonschema.Draft7Validator)


def test_chart_has_the_version_of_the_package() -> None:
    version = re.search(r'^version = "(.*)"', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert version is not None
    assert (chart["version"], chart["appVersion"]) == (version[1], version[1])
