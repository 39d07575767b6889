"""The administrator's file of accelerators, merged into the built-in table: other images and labels, or new vendors.

The file is YAML: each key is the name of an accelerator, its value has fields of `Vendor`. A field that the file states
replaces the built-in one; images, environment and memoryValues are merged by key. The file is checked when the
controller starts, so that a mistake is an error with its line and never a pod that does not start.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
import yaml

from crds.meta import LABEL_PATTERN
from devices.vendors import VENDORS, Vendor, Vendors

_MERGED: Final = ("images", "environment", "memoryValues")
_PATH_STEP: Final = re.compile(r"\.([A-Za-z0-9_]+)|\[(\d+)\]")
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")


class VendorFileError(ValueError):
    """The file is not valid; the message names the line, the field and the way out."""


def parse_vendors(text: str, table: Vendors = VENDORS) -> Vendors:
    """Return the table with the entries of a file.

    Raises:
        VendorFileError: the file is not valid.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        entries = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise VendorFileError(f"line {line}: not valid YAML: {error.problem}") from error
    if entries is None or root is None:
        return table
    if not isinstance(entries, dict):
        raise VendorFileError("line 1: must be a mapping from the name of an accelerator to its fields")
    found = {name: _build_vendor(root, name, fields, table) for name, fields in entries.items()}
    return MappingProxyType({**table, **found})


def _build_vendor(root: yaml.Node, name: object, fields: object, table: Vendors) -> Vendor:
    line = _find_line(root, [str(name)])
    if not isinstance(name, str) or not re.fullmatch(LABEL_PATTERN, name):
        raise VendorFileError(f"line {line}: {name!r} is no name: use lower-case letters, digits and '-'")
    known = table.get(name)
    if known is not None and not known.in_pods:
        raise VendorFileError(f"line {line}: {name} is outside of the cluster: remove it")
    if not isinstance(fields, dict):
        raise VendorFileError(f"line {line}: {name} must have fields, such as resource: example.com/npu")
    merged: dict[str, Any] = msgspec.to_builtins(known or Vendor())
    for field, value in fields.items():
        both = field in _MERGED and isinstance(value, dict)
        merged[field] = {**merged[field], **value} if both else value
    try:
        vendor = msgspec.convert(merged, Vendor)
    except msgspec.ValidationError as error:
        steps = _list_steps(str(error))
        raise VendorFileError(f"line {_find_line(root, [name, *steps])}: {name}: {_explain(str(error))}") from error
    if not vendor.in_pods:
        raise VendorFileError(f"line {_find_line(root, [name, 'inPods'])}: {name}: inPods must be true: remove it")
    return vendor


def _list_steps(error: str) -> list[str]:
    """Return the path in a message of msgspec, such as `$.exporter.port`, with the field that is unknown."""
    path = error.rpartition("at `$")[2] if "at `$" in error else ""
    steps = [name or index for name, index in _PATH_STEP.findall(path)]
    unknown = _UNKNOWN.search(error)
    return [*steps, unknown[1]] if unknown else steps


def _explain(error: str) -> str:
    if not _UNKNOWN.search(error):
        return error
    fields = ", ".join(field.encode_name for field in msgspec.structs.fields(Vendor) if field.name != "in_pods")
    return f"{error}; the fields are {fields}"


def _find_line(root: yaml.Node, path: list[str]) -> int:
    """Return the line of a key or item, or of the last part of the path that the file has."""
    node, line = root, root.start_mark.line
    for step in path:
        if isinstance(node, yaml.MappingNode):
            pairs: Mapping[str, tuple[yaml.Node, yaml.Node]] = {str(key.value): (key, each) for key, each in node.value}
            if step not in pairs:
                break
            key, node = pairs[step]
            line = key.start_mark.line
        elif isinstance(node, yaml.SequenceNode) and step.isdigit() and int(step) < len(node.value):
            node = node.value[int(step)]
            line = node.start_mark.line
        else:
            break
    return line + 1
