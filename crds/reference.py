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
        lines += _render_fields(schema["properties"][part], part, definition.kind, listed)
        lines.append("")
    rules = [f"* {rule}" for rule in _list_rules(schema)]
    lines += [f"### {definition.kind}: rules", "", *rules] if rules else []
    return "\n".join(lines).rstrip() + "\n"


def _render_fields(schema: Schema, path: str, kind: str, listed: dict[str, str]) -> Iterator[str]:
    """Yield a row for each field below an object, before those of the fields below it.

    `listed` has the place of each long description and of each group of fields: later rows name the first place.
    """
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
        shown = text.replace("|", "\\|").replace("\n", " ") if first_text == place else f"As `{first_text}`."
        further = "" if first_fields == place else f" Its fields are those of `{first_fields}`."
        type_ = f"{_render_type(inner)}, required" if name in required else _render_type(inner)
        yield f"| `{below}` | {type_} | {shown}{further} |"
        if fields and first_fields == place:
            yield from _render_fields(item, f"{below}[]" if "items" in inner else below, kind, listed)


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
