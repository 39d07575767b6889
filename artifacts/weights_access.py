"""Records of who may use stored weights, so that one namespace's private weights do not serve another.

Weights that came without a token are for all. Others are for those who were let in by the server that they came from:
a namespace with a source and a token. That is remembered, so that nobody has to ask again while the server is away.
"""

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from artifacts import durable
from artifacts.file_set import FileSet
from artifacts.repositories.repository import RangeRefused, SourceAccess
from artifacts.repositories.schemes import open_repository
from artifacts.source import Source

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
