"""The structural OpenAPI schema of a struct, as a CustomResourceDefinition requires it.

msgspec's own JSON schema is not structural: a CRD allows no `$ref`, no `anyOf` with null, no `title`, and requires a
type for every enum. So this module walks the type information itself, with one case for each type of a field.
"""

import json
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

Schema = dict[str, Any]


def field_schema(struct: type[msgspec.Struct], name: str, *, defaults: bool) -> Schema:
    """Return the structural schema of one field of a struct, with all nested fields.

    Args:
        struct: The struct of a kind.
        name: Its field, `spec` or `status`.
        defaults: True if the API server fills in the fields' defaults: in a spec, but never in a status, where a
            default would be a second writer.

    Raises:
        TypeError: A field below has no description or a type that a CRD cannot express.
    """
    info = inspect.type_info(struct)
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{struct} is no struct")
    field = next(field for field in info.fields if field.name == name)
    return _render_field(struct, field, defaults=defaults)


def _render_field(struct: type[msgspec.Struct], field: inspect.Field, *, defaults: bool) -> Schema:
    """Return the schema of a field, with the notes in its annotation: `Annotated[int, "The port.", {"minimum": 1}]`.

    A text among the notes is the description of the field; a dict has further keywords of the schema.
    """
    schema = _render_type(field.type, defaults=defaults)
    hint = get_type_hints(struct, include_extras=True)[field.name]
    for note in getattr(hint, "__metadata__", ()):
        if isinstance(note, str):
            schema["description"] = note
        elif isinstance(note, dict):
            schema = _merge_keywords(schema, note)
    return schema


def _merge_keywords(schema: Schema, keywords: Schema) -> Schema:
    """Return a schema with further keywords; its rules stay beside further ones."""
    rules = [*schema.get("x-kubernetes-validations", ()), *keywords.get("x-kubernetes-validations", ())]
    return schema | keywords | ({"x-kubernetes-validations": rules} if rules else {})


def _render_struct(info: inspect.StructType, *, defaults: bool) -> Schema:
    """Return the schema of a struct as an object, with its fields, and with their defaults if `defaults` is True.

    Raises TypeError for a field without a description, or of a type that a CRD cannot express.
    """
    properties: Schema = {}
    for field in info.fields:
        schema = _render_field(info.cls, field, defaults=defaults)
        if "description" not in schema:
            raise TypeError(f"{info.cls.__name__}.{field.name} has no description: kubectl explain would show nothing")

        # Add what the API server needs: formats of integers, and types of lists.
        if schema.get("type") == "integer":
            # Kubernetes reads integers as 32 or 64 bits: the largest allowed number decides.
            schema.setdefault("format", "int32" if schema["maximum"] < 1 << 31 else "int64")
        elif schema.get("type") == "array":
            schema.setdefault("x-kubernetes-list-type", "atomic")

        # Add the default, to the description as well.
        if defaults:
            default = _find_default(field, schema)
            if default is not None:
                schema["default"] = default
                schema["description"] = _add_default(schema["description"], default)

        properties[field.encode_name] = schema

    out: Schema = {"type": "object"}
    if properties:
        out["properties"] = properties
    required = [field.encode_name for field in info.fields if field.required]
    if required:
        out["required"] = required
    return out


def _find_default(field: inspect.Field, schema: Schema) -> object:
    """Return the default that the API server fills in for an absent field; None: it fills in nothing.

    An empty default means the same as an absent field, so it is not filled in.
    """
    value = field.default
    if value is msgspec.NODEFAULT or value in (None, "", []):
        return None
    if isinstance(value, msgspec.Struct):
        # `{}` lets the API server descend to the defaults inside.
        inner_schemas = schema.get("properties", {}).values()
        return {} if any("default" in inner for inner in inner_schemas) else None
    return msgspec.to_builtins(value)


def _add_default(description: str, default: object) -> str:
    """Return the description with its default, which `kubectl explain` does not show by itself."""
    if "Default:" in description or isinstance(default, dict):
        return description
    return f"{description} Default: {json.dumps(default) if isinstance(default, bool | list) else default}."


def _render_type(info: inspect.Type, *, defaults: bool) -> Schema:
    """Return the schema of a type. Raises TypeError for one that a CRD cannot express."""
    # msgspec describes each type by a class of its own; Metadata is a type with keywords of the schema.
    match info:
        case inspect.Metadata():
            return _merge_keywords(_render_type(info.type, defaults=defaults), info.extra_json_schema or {})
        case inspect.UnionType():
            return _render_union(info, defaults=defaults)
        case inspect.StructType():
            return _render_struct(info, defaults=defaults)
        case inspect.ListType():
            return {"type": "array", "items": _render_type(info.item_type, defaults=defaults)} | _state_bounds(
                minItems=info.min_length, maxItems=info.max_length
            )
        case inspect.DictType():
            return _render_map(info, defaults=defaults)
        case inspect.LiteralType():
            return {"type": "string", "enum": list(info.values)}
        case inspect.StrType():
            return {"type": "string"} | _state_bounds(
                minLength=info.min_length, maxLength=info.max_length, pattern=info.pattern
            )
        case inspect.IntType():
            return {"type": "integer"} | _state_bounds(minimum=info.ge, maximum=info.le)
        case inspect.BoolType():
            return {"type": "boolean"}
        case _:
            raise TypeError(f"a CRD cannot express {info}")


def _render_map(info: inspect.DictType, *, defaults: bool) -> Schema:
    """Render a map; a CRD has no keyword for the length of its keys, so a CEL rule bounds it."""
    schema: Schema = {"type": "object", "additionalProperties": _render_type(info.value_type, defaults=defaults)}
    longest = _render_type(info.key_type, defaults=False).get("maxLength")
    if longest is not None:
        schema["x-kubernetes-validations"] = [
            {"rule": f"self.all(key, size(key) <= {longest})", "message": f"a key has at most {longest} characters"}
        ]
    return schema | _state_bounds(minProperties=info.min_length, maxProperties=info.max_length)


def _render_union(info: inspect.UnionType, *, defaults: bool) -> Schema:
    """Return the schema of an optional type without its null, and of `int | str` as Kubernetes' int-or-string."""
    members = [member for member in info.types if not isinstance(member, inspect.NoneType)]
    if {type(member) for member in members} == {inspect.IntType, inspect.StrType}:
        return {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    if len(members) != 1:
        raise TypeError(f"a CRD cannot express the union {info}")
    return _render_type(members[0], defaults=defaults)


def _state_bounds(**limits: float | str | None) -> Schema:
    return {name: limit for name, limit in limits.items() if limit is not None}
