"""A container's variables: literals, `$(VAR)` references, fields of the pod, keys of Secrets."""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

Obj = dict[str, Any]
Lookup = Callable[[str, str], Awaitable[Obj | None]]  # ("configmaps" or "secrets", name) -> the object, None if absent

_REFERENCE = re.compile(r"\$(\$|\(([-._A-Za-z0-9]+)\))")


class ConfigError(Exception):
    """A container's configuration refers to a missing object, key or field."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by the variable; unknown names stay as they are, `$$(NAME)` gives a literal `$(NAME)`."""

    def replace(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return variables.get(match[2], match[0])

    return _REFERENCE.sub(replace, text)


def field(pod: Obj, path: str, addresses: Mapping[str, str]) -> str:
    """Return a field of the pod by the downward API's name; `addresses` has status.podIP and status.hostIP."""
    match path:
        case "metadata.name" | "metadata.namespace" | "metadata.uid":
            return str(pod["metadata"][path.partition(".")[2]])
        case "spec.nodeName" | "spec.serviceAccountName":
            return str(pod["spec"].get(path.partition(".")[2], ""))
        case "status.podIP" | "status.hostIP":
            return addresses[path]
    raise ConfigError(f"fieldPath {path!r} is not supported by the process kubelet")


async def resolve(
    container: Obj, pod: Obj, base: Mapping[str, str], *, addresses: Mapping[str, str], lookup: Lookup
) -> dict[str, str]:
    """Return the container's variables over `base`, each of which may refer to earlier ones.

    Raises ConfigError when a source that is not optional is missing, or is not supported.
    """
    variables = dict(base)
    for entry in container.get("env", []):
        origin = entry.get("valueFrom")
        if origin is None:
            variables[entry["name"]] = expand(entry.get("value", ""), variables)
            continue
        value: str | None
        if "fieldRef" in origin:
            value = field(pod, origin["fieldRef"]["fieldPath"], addresses)
        elif "secretKeyRef" in origin:
            value = await _read_key(origin["secretKeyRef"], lookup)
        else:
            raise ConfigError(f"{', '.join(origin)} of a variable is not supported by the process kubelet")
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


async def _read_key(reference: Obj, lookup: Lookup) -> str | None:
    secret = await lookup("secrets", reference["name"])
    value = None if secret is None else data("secrets", secret).get(reference["key"])
    if value is None and not reference.get("optional"):
        missing = f"secret {reference['name']!r} not found"
        raise ConfigError(
            missing if secret is None else f"couldn't find key {reference['key']} in secret {reference['name']}"
        )
    return None if value is None else value.decode()
