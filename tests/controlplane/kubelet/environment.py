"""A container's variables: literals, `$(VAR)` references, fields of the pod, keys of ConfigMaps and Secrets."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

Obj = dict[str, Any]
Lookup = Callable[[str, str], Awaitable[Obj | None]]  # ("configmaps" or "secrets", name) -> the object, None if absent

_REFERENCE = re.compile(r"\$(\$|\(([-._A-Za-z0-9]+)\))")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10) ** 3, "M": Decimal(10) ** 6, "G": Decimal(10) ** 9, "T": Decimal(10) ** 12,
    "Ki": Decimal(2) ** 10, "Mi": Decimal(2) ** 20, "Gi": Decimal(2) ** 30, "Ti": Decimal(2) ** 40,
}  # fmt: skip


class ConfigError(Exception):
    """A container's configuration refers to a missing object, key or field."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by the variable; unknown names stay as they are, `$$(NAME)` gives a literal `$(NAME)`."""

    def replace(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return variables.get(match[2], match[0])

    return _REFERENCE.sub(replace, text)


def quantity(text: str) -> Decimal:
    """Return the value of a Kubernetes quantity such as `500m`, `2Gi` or `1e3`; raises ValueError for anything else."""
    match = re.fullmatch(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)", text)
    if match is None or match[2] not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity")
    return Decimal(match[1]) * _SUFFIXES[match[2]]


def field(pod: Obj, path: str, addresses: Mapping[str, str]) -> str:
    """Return a field of the pod by the downward API's name; `addresses` has status.podIP and status.hostIP."""
    metadata, spec = pod["metadata"], pod["spec"]
    if match := _SUBSCRIPT.fullmatch(path):
        return str(metadata.get(match[1], {}).get(match[2], ""))
    match path:
        case "metadata.labels" | "metadata.annotations":
            pairs: Mapping[str, str] = metadata.get(path.partition(".")[2], {})
            return "\n".join(f'{key}="{value}"' for key, value in sorted(pairs.items()))
        case "metadata.name" | "metadata.namespace" | "metadata.uid":
            return str(metadata[path.partition(".")[2]])
        case "spec.nodeName" | "spec.serviceAccountName":
            return str(spec.get(path.partition(".")[2], ""))
        case "status.podIP" | "status.podIPs":
            return addresses["status.podIP"]
        case "status.hostIP" | "status.hostIPs":
            return addresses["status.hostIP"]
    raise ConfigError(f"fieldPath {path!r} is not supported by the process kubelet")


def resource_field(pod: Obj, reference: Obj, container: Obj | None, allocatable: Mapping[str, str]) -> str:
    """Return a container's limit or request in units of the divisor, rounded up.

    A missing limit of cpu or memory is the allocatable amount of the node; a missing request is the limit, or 0.
    """
    if name := reference.get("containerName"):
        container = next((item for item in pod["spec"]["containers"] if item["name"] == name), None)
    if container is None:
        raise ConfigError(f"resourceFieldRef names container {reference.get('containerName')!r}, which the pod lacks")
    kind, _, resource = reference["resource"].partition(".")
    resources = container.get("resources", {})
    limit = resources.get("limits", {}).get(resource)
    value = limit or allocatable.get(resource, "0")
    if kind == "requests":
        value = resources.get("requests", {}).get(resource) or limit or "0"
    divisor = quantity(reference.get("divisor") or "1") or Decimal(1)
    return str(math.ceil(quantity(value) / divisor))


async def resolve(
    container: Obj,
    pod: Obj,
    base: Mapping[str, str],
    *,
    addresses: Mapping[str, str],
    allocatable: Mapping[str, str],
    lookup: Lookup,
) -> dict[str, str]:
    """Return the container's variables over `base`: `envFrom` first, then `env`, which may refer to earlier variables.

    Raises ConfigError when a source that is not optional is missing.
    """
    variables = dict(base)
    for source in container.get("envFrom", []):
        variables |= await _all_keys(source, lookup)
    for entry in container.get("env", []):
        origin = entry.get("valueFrom")
        if origin is None:
            variables[entry["name"]] = expand(entry.get("value", ""), variables)
            continue
        value: str | None
        if "fieldRef" in origin:
            value = field(pod, origin["fieldRef"]["fieldPath"], addresses)
        elif "resourceFieldRef" in origin:
            value = resource_field(pod, origin["resourceFieldRef"], container, allocatable)
        else:
            value = await _one_key(origin, lookup)
        if value is not None:
            variables[entry["name"]] = value
    return variables


def command(container: Obj, entrypoint: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return the command line: the container's command, else the image's entry point, and args, references expanded."""
    own = [expand(part, variables) for part in container.get("command", [])]
    return [*(own or entrypoint), *(expand(part, variables) for part in container.get("args", []))]


def data(kind: str, obj: Obj) -> dict[str, bytes]:
    """Return the keys of a ConfigMap or Secret as bytes."""
    if kind == "secrets":
        return {key: base64.b64decode(value) for key, value in obj.get("data", {}).items()}
    texts = {key: value.encode() for key, value in obj.get("data", {}).items()}
    return texts | {key: base64.b64decode(value) for key, value in obj.get("binaryData", {}).items()}


async def _all_keys(source: Obj, lookup: Lookup) -> dict[str, str]:
    kind, reference = (
        ("secrets", source["secretRef"]) if "secretRef" in source else ("configmaps", source["configMapRef"])
    )
    found = await lookup(kind, reference["name"])
    if found is None:
        if reference.get("optional"):
            return {}
        raise ConfigError(f"{kind[:-1]} {reference['name']!r} not found")
    return {source.get("prefix", "") + key: value.decode() for key, value in data(kind, found).items()}


async def _one_key(origin: Obj, lookup: Lookup) -> str | None:
    kind, reference = (
        ("secrets", origin["secretKeyRef"]) if "secretKeyRef" in origin else ("configmaps", origin["configMapKeyRef"])
    )
    found = await lookup(kind, reference["name"])
    value = None if found is None else data(kind, found).get(reference["key"])
    if value is None and not reference.get("optional"):
        missing = f"{kind[:-1]} {reference['name']!r} not found"
        raise ConfigError(
            missing if found is None else f"couldn't find key {reference['key']} in {kind[:-1]} {reference['name']}"
        )
    return None if value is None else value.decode()
