"""Kubeconfig files read as data: the cluster and the user of a context.

Files of $KUBECONFIG are merged as kubectl does (the first definition of a name wins), and relative paths are made
absolute against the file that holds them, so that an entry can be used without knowing its file.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


class CredentialsError(Exception):
    """The configuration cannot be used; the message names file, entry and the way out."""


@dataclass(frozen=True, slots=True)
class KubeconfigEntry:
    """The cluster and the user of a context; `source` names them in messages. The user holds secrets."""

    source: str
    cluster: Mapping[str, Any]
    user: Mapping[str, Any] = field(repr=False)
    namespace: str = ""
    """Namespace of the context; empty if it states none."""
    context: str = ""
    """Name of the context."""


def read_kubeconfig(paths: Sequence[Path], context_name: str | None = None) -> KubeconfigEntry:
    """Return the entry of a context. Files of `paths` that do not exist are skipped.

    Args:
        paths: the files.
        context_name: the context; None: the current one.

    Raises:
        CredentialsError: no file exists, one is not a kubeconfig, or the context is missing or incomplete.
    """
    source = os.pathsep.join(map(str, paths))
    existing = [path for path in paths if path.is_file()]
    if not existing:
        raise CredentialsError(f"kubeconfig {source}: no such file; pass --kubeconfig or set KUBECONFIG")

    # Merge the files: by section, then by name.
    current = context_name or ""
    sections: dict[str, dict[str, dict[str, Any]]] = {"contexts": {}, "clusters": {}, "users": {}}
    for path in existing:
        config = _parse_file(path)
        current = current or config.get("current-context") or ""
        for section, entries in sections.items():
            for name, entry in _list_entries(path, config, section):
                # As in kubectl, the first file that has a name wins.
                entries.setdefault(name, _make_paths_absolute(entry, path.parent))

    # A context names a cluster and a user.
    if not current:
        raise CredentialsError(f"kubeconfig {source}: no current-context; run kubectl config use-context NAME")
    context = _pick_entry(source, sections, "contexts", current)
    cluster = _pick_entry(source, sections, "clusters", context.get("cluster", ""))
    user = _pick_entry(source, sections, "users", context["user"]) if context.get("user") else {}
    namespace = str(context.get("namespace") or "")
    return KubeconfigEntry(f"kubeconfig {source}, context {current}", cluster, user, namespace, current)


def _parse_file(path: Path) -> dict[str, Any]:
    """Return the content of a kubeconfig. Raises CredentialsError, which quotes nothing of it."""
    import yaml  # noqa: PLC0415 - a host that has joined reads no kubeconfig, and saves a MiB

    try:
        config = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        # The parser's own message quotes lines of the file, which may hold a token.
        raise CredentialsError(f"kubeconfig {path}: cannot be read as YAML ({type(error).__name__})") from None
    if not isinstance(config, dict):
        raise CredentialsError(f"kubeconfig {path}: holds no mapping")
    return config


def _list_entries(path: Path, config: dict[str, Any], section: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of a section with their names. Raises CredentialsError."""
    field_name = section.removesuffix("s")  # each item of `clusters` has a field `cluster`
    items = config.get(section) or []
    for item in items if isinstance(items, list) else [items]:
        entry = (item.get(field_name) or {}) if isinstance(item, dict) else None
        if not isinstance(entry, dict) or not isinstance(item.get("name"), str):
            raise CredentialsError(f"kubeconfig {path}: {section} must be a list of entries with name and {field_name}")
        yield item["name"], entry


def _make_paths_absolute(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `entry` with paths made absolute; a command without a slash is looked up on PATH and stays."""
    paths: dict[str, Any] = {key: str((folder / entry[key]).absolute()) for key in _PATHS if entry.get(key)}
    plugin = entry.get("exec")
    if plugin and "/" in plugin.get("command", ""):
        paths["exec"] = {**plugin, "command": str((folder / plugin["command"]).absolute())}
    return {**entry, **paths}


def _pick_entry(
    source: str, sections: Mapping[str, Mapping[str, dict[str, Any]]], section: str, name: str
) -> dict[str, Any]:
    """Return the entry of this name in a section. Raises CredentialsError with the names that there are."""
    try:
        return sections[section][name]
    except KeyError:
        problem = f"{section} has no entry named {name!r}: there are {', '.join(sections[section]) or 'none'}"
        raise CredentialsError(f"kubeconfig {source}: {problem}") from None
