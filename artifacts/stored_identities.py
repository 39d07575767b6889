"""The identities of the weights that a store has complete, by which others know what is there."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from artifacts import durable
from artifacts.manifest import MANIFEST, Manifest
from artifacts.source import is_digest, name_identity

T = TypeVar("T")

log = structlog.get_logger()


def list_stored_identities(objects: Path, names: Path) -> Sequence[str]:
    """Return the `weights_identity` of each complete object, by its digest and by each of its sources.

    Nothing is hashed. The most recently used object comes first. Never raises: what cannot be read is left out.

    Args:
        objects: the folder of objects, each a folder named by its digest.
        names: the folder of files that each have the digest of a source's object; the file is named by the `cache_key`
            of source and revision.
    """
    try:
        digests = [digest for _, digest in sorted(_list_objects(objects), reverse=True)]
    except OSError as error:
        _report(objects, error)
        return ()

    # The identities of each complete object: its digest, then one for each source.
    complete = {digest: [digest] for digest in digests if _is_complete(objects / digest)}
    for path in sorted(names.glob("*.json")):
        # The file contains a digest, and its name is the `cache_key` of a source.
        named = complete.get(_read(path, str) or "")
        if named is not None:  # a file may name an object that was deleted
            named.append(name_identity(path.stem))
    return [identity for identities in complete.values() for identity in identities]


def _list_objects(folder: Path) -> list[tuple[int, str]]:
    """Return the digests of all objects, each with the time of its folder, which records its last use."""
    objects = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if is_digest(entry.name):
                    objects.append((entry.stat().st_mtime_ns, entry.name))
    return objects


def _is_complete(folder: Path) -> bool:
    manifest = _read(folder / MANIFEST, Manifest)
    return manifest is not None and manifest.is_in(folder)


def _read(path: Path, type_: type[T]) -> T | None:
    """Return a stored value; None if it is absent or damaged, or cannot be read, which is logged."""
    try:
        return durable.read(path, type_)
    except OSError as error:
        _report(path, error)
        return None


def _report(path: Path, error: OSError) -> None:
    log.warning("stored_weights_unreadable", path=str(path), error=str(error))
