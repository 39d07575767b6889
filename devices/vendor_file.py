"""The administrator's file of accelerators, merged into the built-in table: other images and labels, or new vendors.

The file is YAML: each key is the name of an accelerator, its value has fields of `Vendor`. A field that the file states
replaces the built-in one; images, environment and memoryValues are merged by key. The file is checked when the
controller starts, so that a mistake is an error with its line, and never a pod that does not start or that gets devices
or nodes that it must not have.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from crds.meta import AUTO_ACCELERATOR, LABEL_PATTERN, Toleration
from crds.serving import RuntimeName
from devices.vendors import VENDORS, Vendor, Vendors, explain_device_variable

_MERGED: Final = ("images", "environment", "memoryValues")
_PATH_STEP: Final = re.compile(r"\.([A-Za-z0-9_]+)|\[(\d+)\]")
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_MERGE_KEY: Final = "<<"
"""Key of YAML that includes another mapping."""
_VARIABLE: Final = re.compile(r"[-_A-Za-z][-._A-Za-z0-9]*")
"""Name of a variable that every version of Kubernetes accepts."""
_ROLE_TAINTS: Final = "node-role.kubernetes.io/"
_NODE_TAINTS: Final = ("node.kubernetes.io", "node.cloudprovider.kubernetes.io")
"""Ends of the prefixes of taints that Kubernetes itself gives to nodes: not ready, short of something, or shut down."""
_UNHEALTHY: Final = "unhealthy"
"""Part of the keys by which device plugins and health checks taint nodes."""


class VendorFileError(ValueError):
    """The file is not valid; the message names the line, the field and the way out."""


class VendorProblem(NamedTuple):
    """A field that breaks a rule of all accelerators."""

    path: list[str]
    """Keys and item numbers that lead to it in the vendor's entry."""
    message: str
    """The field, the matter and the way out."""


def parse_vendors(text: str, engines: Collection[RuntimeName], table: Vendors = VENDORS) -> Vendors:
    """Return the table with the entries of a file.

    Args:
        text: the file.
        engines: those that run in pods, for which images may be stated.
        table: the entries that the file changes.

    Raises:
        VendorFileError: the file is not valid.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        entries = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise VendorFileError(_explain_yaml(text, error)) from error
    if entries is None or root is None:
        return table
    if not isinstance(entries, dict):
        raise VendorFileError("line 1: must be a mapping from the name of an accelerator to its fields")
    _refuse_duplicates(root)
    if AUTO_ACCELERATOR in entries:
        line = _find_line(root, [AUTO_ACCELERATOR])
        raise VendorFileError(f"line {line}: auto stands for any accelerator: choose another name")
    vendors = {name: _build_vendor(root, name, fields, table) for name, fields in entries.items()}
    for name, vendor in vendors.items():
        if (problem := find_vendor_problem(vendor, engines)) is not None:
            raise VendorFileError(f"line {_find_line(root, [name, *problem.path])}: {name}: {problem.message}")
    return {**table, **vendors}


def find_vendor_problem(vendor: Vendor, engines: Collection[RuntimeName]) -> VendorProblem | None:
    """Return the first field that no accelerator may have, built-in ones included, or None."""
    for engine in vendor.images:
        if engine not in engines:
            message = f"images names {engine}, which is no engine in pods: use one of {', '.join(engines)}"
            return VendorProblem(["images", engine], message)
    if vendor.resource is not None and vendor.resource.endswith("*"):
        message = f"resource {vendor.resource} ends in *, which only furtherResources may: name one resource"
        return VendorProblem(["resource"], message)
    for variable, value in vendor.environment.items():
        if not _VARIABLE.fullmatch(variable):
            message = (
                f"environment has {variable!r}, which is no name of a variable: use letters, digits, '_', '-' and '.', "
                "beginning with a letter or '_'"
            )
            return VendorProblem(["environment", variable], message)
        if reason := explain_device_variable(variable):
            message = f"environment sets {variable} to {value!r}, {reason}: remove it"
            return VendorProblem(["environment", variable], message)
    for number, toleration in enumerate(vendor.tolerations):
        if wrong := _refuse_toleration(toleration):
            return VendorProblem(["tolerations", str(number)], f"tolerations[{number}] {wrong}")
    return None


def _refuse_toleration(toleration: Toleration) -> str | None:
    """Return why pods on devices may not tolerate a taint, with the way out, or None."""
    key = toleration.key
    if not key:
        return "has no key, so it tolerates every taint: state the key of the vendor's own taint"
    if key.startswith(_ROLE_TAINTS):
        return (
            f"has key {key}, which keeps pods off nodes of another role, such as control planes: remove it; services "
            "that need it state it in spec.tolerations"
        )
    if key.rpartition("/")[0].endswith(_NODE_TAINTS) or _UNHEALTHY in key.lower():
        return f"has key {key}, which keeps pods off unhealthy nodes or devices: remove it"
    return None


def _explain_yaml(text: str, error: yaml.YAMLError | ValueError) -> str:
    """Return why a text is not YAML, after the line if the error tells it."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"line {line}: not valid YAML: character U+{error.character:04X} is not allowed: remove it"
    if isinstance(error, yaml.MarkedYAMLError):
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        return f"line {line}: not valid YAML: {error.problem}"
    return f"not valid YAML: {error}"  # such as a date without such a day


def _refuse_duplicates(root: yaml.Node) -> None:
    """Raise VendorFileError if a mapping has a key twice, of which YAML would drop the first silently."""
    for mapping in _list_mappings(root):
        lines: dict[str, int] = {}
        for key, _ in mapping.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                raise VendorFileError(f"line {line}: {key.value} is stated twice, first in line {first}: merge both")
            if key.value != _MERGE_KEY:
                lines[key.value] = line


def _list_mappings(root: yaml.Node) -> Iterator[yaml.MappingNode]:
    """Yield each mapping of a document once, although anchors may make it a part of itself."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield node
            waiting += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _build_vendor(root: yaml.Node, name: object, fields: object, table: Vendors) -> Vendor:
    line = _find_line(root, [str(name)])
    if not isinstance(name, str) or not re.fullmatch(LABEL_PATTERN, name):
        raise VendorFileError(f"line {line}: {name!r} is no name: use lower-case letters, digits and '-'")
    existing = table.get(name)
    if existing is not None and not existing.in_pods:
        raise VendorFileError(f"line {line}: {name} is outside of the cluster: remove it")
    if not isinstance(fields, dict):
        raise VendorFileError(f"line {line}: {name} must have fields, such as resource: example.com/npu")
    merged: dict[str, Any] = msgspec.to_builtins(existing or Vendor())
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
            pairs: Mapping[str, tuple[yaml.Node, yaml.Node]] = {
                str(key.value): (key, child) for key, child in node.value
            }
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
