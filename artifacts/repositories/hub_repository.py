"""Repositories of a hub: `hf://ORG/REPO`. The commit of the listing pins every file, even if the branch moves."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import quote

import msgspec

from artifacts.repositories.http_source import connect
from artifacts.repositories.repository import Listing, ReadableFile, RepositoryFile, SourceAccess, is_wanted
from artifacts.retry import retry_read
from artifacts.source import Source, hub_file, is_digest

_COMMIT: Final = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_LISTING_BYTES: Final = 8 << 20


class _Lfs(msgspec.Struct):
    sha256: str


class _Sibling(msgspec.Struct, rename={"name": "rfilename"}):
    name: str
    size: int | None = None
    lfs: _Lfs | None = None


class _HubAnswer(msgspec.Struct):
    """The answer of the hub's /api/models/REPO/revision/REVISION?blobs=true: the fields that we read."""

    sha: str
    siblings: list[_Sibling]


class HubRepository:
    """The repository, or the one file of it, that an hf:// source names."""

    def __init__(self, source: Source, access: SourceAccess) -> None:
        self._source = source
        self._access = access

    async def list_files(self, revision: str | None) -> Listing:
        """Ask the hub for the files of a revision. Raises ArtifactError."""
        at = quote(revision or self._source.revision, safe="")
        url = f"{self._access.endpoint.rstrip('/')}/api/models/{self._source.repo}/revision/{at}?blobs=true"

        async def read() -> Listing:
            """Request the listing once; `retry_read` repeats it."""
            async with connect(self._source, self._access, url=url) as origin:
                return _parse_listing(self._source, await origin.read_whole(_LISTING_BYTES))

        return await retry_read(read, self._access.patience)

    def file_source(self, path: str, revision: str | None) -> Source:
        """Return the hf:// source of a file at a resolved revision."""
        if path == self._source.path:
            return self._source
        at = revision or self._source.revision
        # The last argument is the name of the file, without its folders.
        return hub_file(self._source.repo, at, path, path.rpartition("/")[2])

    @asynccontextmanager
    async def open_file(self, path: str, revision: str | None) -> AsyncIterator[ReadableFile]:
        """Connect to the hub for one file."""
        async with connect(self.file_source(path, revision), self._access, revision) as origin:
            yield origin


def _parse_listing(source: Source, text: bytes) -> Listing:
    """Return the files of the hub's answer that engines may read. Raises ArtifactError if it cannot be used."""
    try:
        answer = msgspec.json.decode(text, type=_HubAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise source.error("SourceRefused", f"the hub's listing is not valid: {error}") from error
    if not _COMMIT.fullmatch(answer.sha):
        problem = f"names {answer.sha[:100]!r} as its commit, which is none"
        raise source.error("SourceRefused", f"the hub {problem}")

    # `siblings` are all files of the repository; wanted are those that an engine may read.
    wanted = [file for file in answer.siblings if is_wanted(file.name)]
    # The hub states a digest (`lfs`) for large files only.
    if any(file.lfs and not is_digest(file.lfs.sha256) for file in wanted):
        raise source.error("SourceRefused", "the hub states a sha256 that is none")
    unsized = next((file.name for file in wanted if file.size is None or file.size < 0), None)
    if unsized is not None:
        raise source.error("SourceRefused", f"the hub does not say how large {unsized} is")

    files = [RepositoryFile(file.name, file.size or 0, file.lfs.sha256 if file.lfs else None) for file in wanted]
    return Listing(answer.sha, sorted(files, key=lambda entry: entry.path))
