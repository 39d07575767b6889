"""The reference of all resources as a document: the same schema that `kubectl explain` shows, in one page."""

import json
from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec import structs

from crds.definitions import DEFINITIONS, Definition
from crds.meta import UNSTATED_LIMITS, Condition
from crds.schema import Schema

_HEAD: Final = (
    "# Reference of the resources\n\n"
    "Generated from the structs in `crds/` by `make crds`; do not edit. `kubectl explain isvc.spec` shows the same.\n"
)
_LONG_DESCRIPTION: Final = 80
"""Characters from which on the same description is not repeated."""
_CONDITION_FIELDS: Final = frozenset(field.encode_name for field in structs.fields(Condition))


class _Row(NamedTuple):
    path: str
    schema: Schema
    is_required: bool
    same_fields: str = ""
    """Place of an earlier row whose fields are those of this one; empty if the fields follow."""
    same_text: str = ""
    """Place of an earlier row with the same long description; empty: this one has it."""


def render_reference() -> str:
    """Return the document, in Markdown."""
    listed: dict[str, str] = {}
    return "\n".join([_HEAD, *(_render_kind(definition, listed) for definition in DEFINITIONS)])


def _render_kind(definition: Definition, listed: dict[str, str]) -> str:
    (version,) = definition.render()["spec"]["versions"]
    schema: Schema = version["schema"]["openAPIV3Schema"]
    scope = "Cluster-scoped" if definition.cluster_scoped else "Namespaced"
    columns = ", ".join(column["name"] for column in version["additionalPrinterColumns"])
    lines = [
        f"## {definition.kind}",
        "",
        f"{schema['description']} Short name: `{definition.short}`. {scope}. Columns of `kubectl get`: {columns}.",
        "",
    ]
    for part in (section for section in ("spec", "status") if section in schema["properties"]):
        lines += [f"### {definition.kind}: {part}", "", "| field | type | description |", "|---|---|---|"]
        lines += [_render_row(row) for row in _walk(schema["properties"][part], part, definition.kind, listed)]
        lines.append("")
    rules = [f"* {rule}" for rule in _list_rules(schema)]
    lines += [f"### {definition.kind}: rules", "", *rules] if rules else []
    return "\n".join(lines).rstrip() + "\n"


def _walk(schema: Schema, path: str, kind: str, listed: dict[str, str]) -> Iterator[_Row]:
    """Yield the fields below an object, each before the fields below it; the same fields are listed once."""
    required = schema.get("required", ())
    for name, inner in schema.get("properties", {}).items():
        below = f"{path}.{name}"
        item = inner.get("items", inner)
        fields = item.get("properties", {})
        if fields.keys() == _CONDITION_FIELDS:  # metav1.Condition is Kubernetes' own
            fields = {}
        place, text = f"{kind} {below}", inner.get("description", "")
        first_fields = listed.setdefault(json.dumps(fields), place) if len(fields) > 1 else place
        first_text = listed.setdefault(text, place) if len(text) > _LONG_DESCRIPTION else place
        same_fields, same_text = (first if first != place else "" for first in (first_fields, first_text))
        yield _Row(below, inner, name in required, same_fields, same_text)
        if fields and not same_fields:
            yield from _walk(item, f"{below}[]" if "items" in inner else below, kind, listed)


def _render_row(row: _Row) -> str:
    schema = row.schema
    type_ = f"{_render_type(schema)}, required" if row.is_required else _render_type(schema)
    text = schema.get("description", "").replace("|", "\\|").replace("\n", " ")
    text = f"As `{row.same_text}`." if row.same_text else text
    further = f" Its fields are those of `{row.same_fields}`." if row.same_fields else ""
    return f"| `{row.path}` | {type_} | {text}{further} |"


def _render_type(schema: Schema) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"] if value)
    if schema["type"] == "array":
        return f"list of {_render_type(schema['items'])}"
    if schema["type"] == "object" and "additionalProperties" in schema:
        return f"map to {_render_type(schema['additionalProperties'])}"
    bounds = [f">= {schema['minimum']}"] if schema.get("minimum") else []
    bounds += [f"<= {schema['maximum']}"] if "maximum" in schema and schema["maximum"] not in UNSTATED_LIMITS else []
    return " ".join([schema["type"], ", ".join(bounds)]).strip()


def _list_rules(schema: Schema) -> Iterator[str]:
    """Yield the messages of all rules of an object, at any depth."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["message"]
    for inner in schema.get("properties", {}).values():
        yield from _list_rules(inner)
    if "items" in schema:
        yield from _list_rules(schema["items"])
