"""The administrator's file of accelerators, merged into the built-in table: other images and labels, or new vendors.

The file is YAML: each key is the name of an accelerator, its value has fields of `Vendor`. A field that the file states
replaces the built-in one; images, environment and memoryValues are merged by key. The file is checked when the
controller starts, so that a mistake is an error with its line, and never a pod that does not start or that gets devices
or nodes that it must not have.
"""

import re
from collections.abc import Collection
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from crds.meta import AUTO_ACCELERATOR, LABEL_PATTERN, Toleration
from crds.serving import RuntimeName
from crds.yaml_reader import StrictLoader, find_line
from devices.vendors import VENDORS, Vendor, Vendors, explain_device_variable

_FIELDS_MERGED_BY_KEY: Final = ("images", "environment", "memoryValues")
_PATH_STEP: Final = re.compile(r"\.([A-Za-z0-9_]+)|\[(\d+)\]")
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
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


def parse_vendors(text: str, engines: Collection[RuntimeName]) -> Vendors:
    """Return the built-in table with the entries of a file.

    Args:
        text: the file.
        engines: those that run in pods, for which images may be stated.

    Raises:
        VendorFileError: the file is not valid.
    """
    # Read the file into a tree of nodes (`root`), which knows the line of each field, and the tree into plain values.
    try:
        loader = StrictLoader(text)
        root = loader.get_single_node()
        entries = loader.construct_document(root) if root else None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        cause = f"character U+{error.character:04X} is not allowed: remove it"
        raise VendorFileError(f"line {line}: not valid YAML: {cause}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise VendorFileError(f"line {line}: not valid YAML: {error.problem}") from error

    # An empty file changes nothing.
    if entries is None or root is None:
        return VENDORS
    if not isinstance(entries, dict):
        raise VendorFileError("line 1: must be a mapping from the name of an accelerator to its fields")
    if AUTO_ACCELERATOR in entries:
        line = find_line(root, [AUTO_ACCELERATOR])
        raise VendorFileError(f"line {line}: auto stands for any accelerator: choose another name")

    # Build the entries, and check each.
    vendors = {name: _build_vendor(root, name, fields) for name, fields in entries.items()}
    for name, vendor in vendors.items():
        if (problem := find_vendor_problem(vendor, engines)) is not None:
            raise VendorFileError(f"line {find_line(root, [name, *problem.path])}: {name}: {problem.message}")
    return {**VENDORS, **vendors}


def find_vendor_problem(vendor: Vendor, engines: Collection[RuntimeName]) -> VendorProblem | None:
    """Return the first field with a value that no accelerator may have, or None: in the file or in the built-in table.

    Refused are images for engines that do not run in pods, a resource that is a pattern, variables with an invalid name
    or that choose devices, and tolerations without a key, or of taints of roles or of unhealthy nodes and devices.
    """
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
        if refusal := _refuse_toleration(toleration):
            return VendorProblem(["tolerations", str(number)], f"tolerations[{number}] {refusal}")
    return None


def _refuse_toleration(toleration: Toleration) -> str | None:
    """Return why the pods of a vendor may not have a toleration, with the way out; None if they may.

    They would run on nodes of another role, or on nodes and devices that are unhealthy.
    """
    key = toleration.key
    if not key:
        return "has no key, so it tolerates every taint: state the key of the vendor's own taint"

    # Prefix of taints that keep a node for a role.
    if key.startswith(_ROLE_TAINTS):
        return (
            f"has key {key}, which keeps pods off nodes of another role, such as control planes: remove it; services "
            "that need it state it in spec.tolerations"
        )

    # Taints that Kubernetes gives to nodes that are not well, and those of device plugins and health checks.
    if key.rpartition("/")[0].endswith(_NODE_TAINTS) or _UNHEALTHY in key.lower():
        return f"has key {key}, which keeps pods off unhealthy nodes or devices: remove it"
    return None


def _build_vendor(root: yaml.Node, name: object, fields: object) -> Vendor:
    """Return an entry of the file, merged into the built-in entry of the same name, if there is one.

    A field of the file replaces the built-in one, except those that are merged key by key.

    Raises:
        VendorFileError: the name or a field is not valid, or the accelerator is not one of pods.
    """
    line = find_line(root, [str(name)])
    if not isinstance(name, str) or not re.fullmatch(LABEL_PATTERN, name):
        raise VendorFileError(f"line {line}: {name!r} is no name: use lower-case letters, digits and '-'")

    # in_pods is False for metal, whose replicas are processes of hosts: no file changes that.
    existing = VENDORS.get(name)
    if existing is not None and not existing.in_pods:
        raise VendorFileError(f"line {line}: {name} is outside of the cluster: remove it")

    if not isinstance(fields, dict):
        raise VendorFileError(f"line {line}: {name} must have fields, such as resource: example.com/npu")

    # Merge the fields into the built-in entry, or into an empty one.
    merged: dict[str, Any] = msgspec.to_builtins(existing or Vendor())
    for field, value in fields.items():
        # _FIELDS_MERGED_BY_KEY: mappings of which the file may change single entries, such as the image of one engine
        is_merged = field in _FIELDS_MERGED_BY_KEY and isinstance(value, dict)
        merged[field] = {**merged[field], **value} if is_merged else value

    # Convert the merged fields, which checks their types.
    try:
        vendor = msgspec.convert(merged, Vendor)
    except msgspec.ValidationError as error:
        line = find_line(root, [name, *_list_steps(str(error))])
        raise VendorFileError(f"line {line}: {name}: {_explain(str(error))}") from error
    if not vendor.in_pods:
        raise VendorFileError(f"line {find_line(root, [name, 'inPods'])}: {name}: inPods must be true: remove it")
    return vendor


def _list_steps(error: str) -> list[str]:
    """Return the steps of the path that ends a message of msgspec: exporter and port of "... at `$.exporter.port`".

    If the error is an unknown field, its name is the last step, which msgspec's path does not have.
    """
    path = error.rpartition("at `$")[2] if "at `$" in error else ""
    # Each step of the path is the name of a field, or the index of an item.
    steps = [name or index for name, index in _PATH_STEP.findall(path)]
    # _UNKNOWN: "unknown field `NAME`" in the message
    unknown = _UNKNOWN.search(error)
    return [*steps, unknown[1]] if unknown else steps


def _explain(error: str) -> str:
    """Return msgspec's error, with the fields that there are if one is unknown."""
    # _UNKNOWN: "unknown field `NAME`" in the message
    if not _UNKNOWN.search(error):
        return error
    # inPods is left out: a file can only repeat its default.
    fields = ", ".join(field.encode_name for field in msgspec.structs.fields(Vendor) if field.name != "in_pods")
    return f"{error}; the fields are {fields}"
