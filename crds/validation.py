"""Validation of a manifest as the API server does it, without a server: by the generated schema and its CEL rules.

The schema is the one that `make crds` writes, so a manifest that is valid here is valid on a cluster, and the messages
are the API server's. A JSON Schema library walks the schema; the additions of Kubernetes (CEL rules, RE2 patterns,
unknown fields) are keywords added to the library, and defaults are filled in first. Rules about an edit (`oldSelf`) do
not apply to a single manifest.
"""

import json
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, NamedTuple

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from crds.definitions import DEFINITIONS
from crds.meta import API_VERSION, LONGEST_NAME
from crds.quantity import SIZE_FORMS
from crds.schema import Schema
from crds.text import shorten_text

Path = tuple[str | int, ...]
"""Keys and indices that lead to a field."""
Manifest = dict[str, Any]
Errors = Iterator[ValidationError]

_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUBDOMAIN_TEXT: Final = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character"
)
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_TEXT: Final = (
    "a lowercase RFC 1123 label must consist of at most 63 lower case alphanumeric characters or '-', and must start "
    "and end with an alphanumeric character"
)
_IN_BODY: Final = {
    "type": "must be of type {}",
    "anyOf": "must be of type integer or string",
    "format": "must be of type integer",  # the API server reads an integer outside int64 as a number
    "minimum": "should be greater than or equal to {}",
    "maximum": "should be less than or equal to {}",
    "minLength": "should be at least {} chars long",
    "pattern": "should match '{}'",
}
"""The API server's messages, by keyword of JSON Schema; the braces stand for the keyword's value."""
_STRUCTURAL_KEYWORDS: Final = frozenset(
    {"anyOf", "enum", "format", "maxItems", "maxLength", "maxProperties", "required", "type", "unknown"}
)
"""Keywords whose violation keeps the API server from evaluating rules, since those may rely on the structure."""
_SIMILAR: Final = 0.7
"""Likeness of a field that may be meant, of 1: chatTemplate and temperature have 0.6."""
_TOP_LEVEL: Final = ("apiVersion", "kind", "metadata", "spec", "status")


class SchemaViolation(NamedTuple):
    """One reason why a manifest is refused."""

    path: Path
    """The field; empty is the whole object."""
    message: str
    """The problem and the remedy, without the field."""

    def __str__(self) -> str:
        """Return the message as the API server prints it."""
        return f"{_join_path(self.path)}: {self.message}" if self.path else self.message


def kinds() -> tuple[str, ...]:
    """Return the names of the kinds that can be checked."""
    return tuple(definition.kind for definition in DEFINITIONS)


def with_defaults(manifest: Manifest) -> Manifest:
    """Return the manifest with the defaults of the API server; its kind is one of `kinds()`."""
    schema = _schema(manifest["kind"])
    if "spec" not in schema["properties"]:
        return manifest
    return {**manifest, "spec": _fill_defaults(deepcopy(manifest["spec"]), schema["properties"]["spec"])}


def problems(manifest: Manifest) -> list[SchemaViolation]:
    """Return all problems of a manifest of one of `kinds()`; none if the API server would accept it.

    1. Check what Kubernetes checks in every object. If that fails, the rest is not checked.
    2. Fill in the defaults, and check the whole against the schema of the kind.
    3. If the structure is wrong, leave out the violated CEL rules: they may rely on the structure, and the API server
       does not evaluate them then.
    """
    # 1. What Kubernetes checks in every object.
    violations = [*_check_envelope(manifest)]
    if violations:
        return violations

    # 2. A kind without a spec, such as NodeFitness, has a status only.
    spec: Manifest = {"spec": {}} if "spec" in _schema(manifest["kind"])["properties"] else {}
    whole = {"metadata": manifest["metadata"], **with_defaults({**spec, **manifest})}
    errors = sorted(_validator(manifest["kind"]).iter_errors(whole), key=lambda error: [*map(str, error.absolute_path)])

    # 3. _STRUCTURAL_KEYWORDS: keywords of the schema whose violation means that the structure is wrong
    if any(error.validator in _STRUCTURAL_KEYWORDS for error in errors):
        errors = [error for error in errors if error.validator != "x-kubernetes-validations"]
    return [SchemaViolation(_find_path(error), _render_message(error)) for error in errors]


def _check_envelope(manifest: Manifest) -> Iterator[SchemaViolation]:
    """Yield the violations at the top of an object: version, unknown fields, name, namespace, and type of the spec."""
    if manifest.get("apiVersion") != API_VERSION:
        problem = f"Invalid value: {_quote(manifest.get('apiVersion'))}: use {API_VERSION}"
        yield SchemaViolation(("apiVersion",), problem)
    for field in manifest.keys() - set(_TOP_LEVEL):
        yield SchemaViolation((field,), _describe_unknown(field, _TOP_LEVEL))

    # The name and the namespace.
    stated = manifest.get("metadata")
    metadata = stated if isinstance(stated, dict) else {}
    name: object = metadata.get("name")
    # _SUBDOMAIN and _LABEL: what Kubernetes takes for a name and a namespace, each with its message (_TEXT).
    if name is None:
        yield SchemaViolation(("metadata", "name"), "Required value: name is required")
    elif not isinstance(name, str) or len(name) > LONGEST_NAME or not _SUBDOMAIN.fullmatch(name):
        yield SchemaViolation(("metadata", "name"), f"Invalid value: {_quote(name)}: {_SUBDOMAIN_TEXT}")

    namespace: object = metadata.get("namespace")
    if namespace and not (isinstance(namespace, str) and _LABEL.fullmatch(namespace)):
        yield SchemaViolation(("metadata", "namespace"), f"Invalid value: {_quote(namespace)}: {_LABEL_TEXT}")

    # The spec, of which only the type is checked here.
    if "spec" in manifest and not isinstance(manifest["spec"], dict):
        yield SchemaViolation(("spec",), f"Invalid value: {_quote(manifest['spec'])}: must be of type object")


@cache
def _schema(kind: str) -> Schema:
    definition = next(candidate for candidate in DEFINITIONS if candidate.kind == kind)
    schema: Schema = definition.render()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


@cache
def _validator(kind: str) -> Draft202012Validator:
    """Return the validator of a kind: that of JSON Schema, with the keywords that Kubernetes adds or reads differently.

    Those are unknown fields, RE2 patterns, the distinct keys of a list, and CEL rules; integers have 64 bits at most.
    """
    formats = FormatChecker(formats=())
    # True: the value is valid. What is no integer is a violation of the type, not of this format.
    formats.checks("int64")(lambda value: not isinstance(value, int) or -(1 << 63) <= value < 1 << 63)
    keywords = {
        "properties": _check_properties,
        "pattern": _check_pattern,
        "x-kubernetes-list-map-keys": _check_distinct,
        "x-kubernetes-validations": _check_rules,
    }
    kubernetes: Callable[..., Draft202012Validator] = extend(Draft202012Validator, keywords)  # type: ignore[no-untyped-call]
    return kubernetes(_schema(kind), format_checker=formats)


def _fill_defaults(value: Any, schema: Schema) -> Any:
    """Return a value with the defaults of its schema filled in, at every depth, as the API server does.

    Nulls, which YAML reads from a key without a value, are removed before. A mapping is changed in place.
    """
    if isinstance(value, list) and "items" in schema:
        return [_fill_defaults(entry, schema["items"]) for entry in value]
    if not isinstance(value, dict):
        return value

    fields = schema.get("properties", {})
    # The null of an unknown field stays, so that the field is refused.
    for name in [name for name, entry in value.items() if entry is None]:
        if name in fields or "additionalProperties" in schema:
            del value[name]

    for name, field in fields.items():
        if "default" in field and name not in value:
            value[name] = deepcopy(field["default"])
        if name in value:
            value[name] = _fill_defaults(value[name], field)
    return value


def _check_properties(validator: Any, properties: Mapping[str, Schema], value: Any, schema: Schema) -> Errors:
    """Check the fields of an object as JSON Schema does, and refuse unknown ones, as the API server does for kubectl.

    A map, which has `additionalProperties`, and an object whose schema lists no fields may have any.
    """
    if not isinstance(value, dict):
        return
    # The keyword "unknown" is made up: `_render_message` shows its messages as they are. `descend` checks a field by
    # its schema.
    for name in value.keys() - properties.keys():
        if properties and "additionalProperties" not in schema:
            yield ValidationError(_describe_unknown(name, properties), validator="unknown", path=[name])
    for name, field in properties.items():
        if name in value:
            yield from validator.descend(value[name], field, path=name, schema_path=name)


def _describe_unknown(name: str, fields: Collection[str]) -> str:
    """Return the message for an unknown field, with the field that may be meant."""
    folded = {field.casefold(): field for field in fields}
    near = get_close_matches(str(name).casefold(), folded, n=1, cutoff=_SIMILAR)
    return f"unknown field; did you mean {folded[near[0]]}?" if near else "unknown field"


def _check_distinct(_validator: Any, keys: list[str], value: Any, _schema: Schema) -> Errors:
    """Refuse two entries of a list that have the same key."""
    earlier_keys: list[list[object]] = []
    for number, entry in enumerate(_as_list(value)):
        # An entry that is no object has the wrong type, which another check reports: its number makes it distinct here.
        key: list[object] = [entry.get(name) for name in keys] if isinstance(entry, dict) else [number]
        if key in earlier_keys:
            shown = json.dumps(dict(zip(keys, key, strict=True)))
            # Messages of "unknown" are shown as they are.
            yield ValidationError(f"Duplicate value: {shown}", validator="unknown", path=[number])
        earlier_keys.append(key)


def _check_pattern(_validator: Any, pattern: str, value: Any, schema: Schema) -> Errors:
    """Check a text against a pattern as Go's RE2 does, whose `$` matches only the very end, unlike Python's.

    A text that is too long is not matched: its length is a problem already.
    """
    # Without a maxLength, any length will do; `_evaluate` computes a CEL expression.
    if (
        isinstance(value, str)
        and len(value) <= schema.get("maxLength", len(value))
        and not _evaluate("value.matches(pattern)", value=value, pattern=pattern)
    ):
        yield ValidationError("")  # `_render_message` writes the message


def _check_rules(_validator: Any, rules: list[dict[str, str]], value: Any, _schema: Schema) -> Errors:
    """Yield the message of each CEL rule that does not hold for the value, which the rule calls `self`.

    A rule that cannot be evaluated counts as violated, as on the API server.
    """
    for rule in rules:
        if "oldSelf" in rule["rule"]:
            continue  # the rule is about an edit, and compares with the object before it
        try:
            # The rule is a CEL expression; it holds only if its result is True.
            holds = _evaluate(rule["rule"], self=value) is True
        except (ValueError, TypeError, RuntimeError, LookupError) as error:
            yield ValidationError(f"{rule['message']} (the rule cannot be evaluated: {error})")
        else:
            if not holds:
                yield ValidationError(rule["message"])


def _evaluate(expression: str, /, **variables: object) -> object:
    # cel imports its own command line, which loads prompt_toolkit and typer: 10 MiB, and longer than all else together.
    sys.modules.setdefault("cel.cli", types.ModuleType("cel.cli"))
    import cel  # noqa: PLC0415 - only rules need it

    return cel.evaluate(expression, variables)


def _find_path(error: ValidationError) -> Path:
    """Return the path of the field at fault.

    For a required field that is missing, the library states the path of its parent, and the name in the message only:
    the name is appended.
    """
    path = tuple(error.absolute_path)
    missing = error.validator == "required" and isinstance(error.instance, dict)
    if not missing:
        return path
    return (*path, next(name for name in _as_list(error.validator_value) if repr(name) in error.message))


def _render_message(error: ValidationError) -> str:
    """Return the message with which the API server would report this error; it depends on the violated keyword."""
    value, limit = _quote(error.instance), error.validator_value
    match error.validator:
        case "required":
            return "Required value"
        case "unknown":
            return error.message
        case "enum":
            return f"Unsupported value: {value}: supported values: {', '.join(map(json.dumps, _as_list(limit)))}"
        case "maxLength":
            return f"Too long: may not be more than {limit} bytes"
        case "maxItems" | "maxProperties":
            return f"Too many: {_count_items(error.instance)}: must have at most {limit} items"
        case "x-kubernetes-validations":
            return f"Invalid value: {value}: {error.message}"

    # _IN_BODY: the API server's messages for all other keywords; `limit` is the value of the keyword, such as a
    # maximum.
    text = _IN_BODY[str(error.validator)].format(limit) if error.validator in _IN_BODY else error.message
    schema = error.schema if isinstance(error.schema, dict) else {}
    is_quantity = error.validator == "pattern" and schema.get("x-kubernetes-int-or-string")
    way_out = f": give {SIZE_FORMS}" if is_quantity else ""  # the API server has no words for it
    return f"Invalid value: {value}: {_join_path(error.absolute_path)} in body {text}{way_out}"


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _count_items(value: object) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _quote(value: object) -> str:
    """Quote a value; an object or a long text is not repeated, since the manifest shows it at this place."""
    if isinstance(value, dict | list):
        return '"object"'
    return json.dumps(shorten_text(value) if isinstance(value, str) else value, ensure_ascii=False, default=str)


def _join_path(path: Any) -> str:
    """Write a path as the API server does: `spec.extraArgs[1]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
