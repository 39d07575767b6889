"""Facts about stored weights: the identities of those that are complete, and the records of who may use them.

Weights that came without a token are for all, so that one namespace's private weights do not serve another. Others are
for those who were let in by the server that they came from: a namespace with a source and a token. That is remembered,
so that nobody has to ask again while the server is away.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog

from artifacts import durable
from artifacts.file_set import FileSet
from artifacts.manifest import MANIFEST, Manifest
from artifacts.repositories.repository import RangeRefused, SourceAccess
from artifacts.repositories.schemes import open_repository
from artifacts.source import Source, is_digest, name_identity

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


_MOST_KEYS: Final = 1000
"""The oldest are forgotten; their owners are let in again by the server."""


class WeightsAccess(msgspec.Struct, frozen=True, rename="camel"):
    """The callers that may use one object."""

    public: bool = False
    """True once a server sent the object without a token."""
    keys: tuple[str, ...] = ()
    """The `access_key` of each caller that a server has accepted."""

    def allows(self, key: str) -> bool:
        """Return whether the weights may be used by the owner of `key`."""
        return self.public or key in self.keys


def access_key(tenant: str, source: Source, token: str | None) -> str:
    """Return the name of a namespace with a source and a token; the token cannot be read from it."""
    secret = hashlib.sha256((token or "").encode()).hexdigest()
    return hashlib.sha256(f"{tenant}\0{source.text}\0{secret}".encode()).hexdigest()


class AccessRecords:
    """The records in `folder`, one for each object."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, digest: str) -> WeightsAccess:
        """Return the record of an object, or an empty record if it was lost, which allows no access. Raises OSError."""
        return durable.read(self._path(digest), WeightsAccess) or WeightsAccess()

    def grant(self, digest: str, key: str, *, public: bool) -> None:
        """Record that the caller with this `access_key` may use an object, or with `public` that everybody may.

        The caller holds the lock of the store. Raises OSError.
        """
        record = self.read(digest)
        if record.allows(key):
            return
        # Beyond _MOST_KEYS the oldest keys are forgotten; their callers are let in again by the server.
        keys = record.keys if public else (*record.keys, key)[-_MOST_KEYS:]
        durable.write(self._path(digest), WeightsAccess(record.public or public, keys))

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.json"


async def ask_for_access(source: Source, access: SourceAccess, revision: str | None) -> bool:
    """Request one byte of `source`, or of the first of its files, so that the server decides about the access.

    Return True if the server sends it and still has `revision`, else False.

    Raises:
        ArtifactError: the server refuses, or does not answer.
    """
    path = source.path
    if source.has_listing:
        path = (await FileSet(source, access).list_chosen(revision)).files[0].path

    # One byte is enough to see that the server lets the caller in.
    async with open_repository(source, access).open_file(path, revision) as opened:
        try:
            async with opened.read(0, 0) as response:
                # The URL of a hub has the revision, and a listing was asked for it.
                return source.scheme == "hf" or source.has_listing or revision in (None, response.revision)
        except RangeRefused:
            # The file has not even a first byte now.
            return False
