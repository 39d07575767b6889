"""The reference of all resources as a document: the same schema that `kubectl explain` shows, in one page."""

import json
from collections.abc import Iterator
from typing import Final

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


def render_reference() -> str:
    """Return the document, in Markdown."""
    first_rows: dict[str, str] = {}
    return "\n".join([_HEAD, *(_render_kind(definition, first_rows) for definition in DEFINITIONS)])


def _render_kind(definition: Definition, first_rows: dict[str, str]) -> str:
    """Return the section of a kind: a table of the fields of spec and status, and its rules.

    `first_rows` is for all kinds, as `_render_fields` keeps it: what was written for one kind is not repeated.
    """
    # A kind has one version.
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

    # A table for spec and one for status.
    for part in (section for section in ("spec", "status") if section in schema["properties"]):
        lines += [f"### {definition.kind}: {part}", "", "| field | type | description |", "|---|---|---|"]
        lines += _render_fields(schema["properties"][part], part, definition.kind, first_rows)
        lines.append("")

    rules = [f"* {rule}" for rule in _list_rules(schema)]
    lines += [f"### {definition.kind}: rules", "", *rules] if rules else []
    return "\n".join(lines).rstrip() + "\n"


def _render_fields(schema: Schema, path: str, kind: str, first_rows: dict[str, str]) -> Iterator[str]:
    """Yield a row for each field of an object, each followed by those of the fields within it.

    A long description, and a group of nested fields, is written once: `first_rows` has the path of the field at which
    each of them was written first, by its text, and later rows refer to that path.
    """
    required = schema.get("required", ())
    for name, field_schema in schema.get("properties", {}).items():
        field_path = f"{path}.{name}"
        # item: the schema of the entries of a list, or of the field itself
        item = field_schema.get("items", field_schema)

        # The fields within it, each with a row of its own below.
        fields = item.get("properties", {})
        if fields.keys() == _CONDITION_FIELDS:  # metav1.Condition is Kubernetes' own
            fields = {}
        full_path, text = f"{kind} {field_path}", field_schema.get("description", "")

        # The path of the first row with these fields or this text: this row itself, if there was none before.
        row_of_fields = first_rows.setdefault(json.dumps(fields), full_path) if len(fields) > 1 else full_path
        row_of_text = first_rows.setdefault(text, full_path) if len(text) > _LONG_DESCRIPTION else full_path

        # A description or fields that were written before are only referred to.
        shown = text.replace("|", "\\|").replace("\n", " ") if row_of_text == full_path else f"As `{row_of_text}`."
        fields_note = "" if row_of_fields == full_path else f" Its fields are those of `{row_of_fields}`."
        type_ = f"{_render_type(field_schema)}, required" if name in required else _render_type(field_schema)

        yield f"| `{field_path}` | {type_} | {shown}{fields_note} |"
        if fields and row_of_fields == full_path:
            item_path = f"{field_path}[]" if "items" in field_schema else field_path
            yield from _render_fields(item, item_path, kind, first_rows)


def _render_type(schema: Schema) -> str:
    """Return the type of a field in words, such as `list of string`, with its bounds.

    Left out are a minimum of 0, and a maximum that is only the largest number that the type can hold.
    """
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in schema:
        # The empty value of an enum means that none is chosen, and is not shown.
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
