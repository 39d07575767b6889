"""Folders and files of this machine: `file://`. They are read where they are, below the folder that the owner chose."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from artifacts.partial_download import storage_faults
from artifacts.repositories import local_files
from artifacts.repositories.repository import (
    Listing,
    RangeRefused,
    ReadableFile,
    RepositoryFile,
    SourceAccess,
    SourceResponse,
    is_wanted,
)
from artifacts.source import Source

_BLOCK_BYTES = 256 << 10


class LocalRepository:
    """The folder, or the one file, that a file:// source names."""

    def __init__(self, source: Source, access: SourceAccess) -> None:
        self._source = source
        self._file_root = access.file_root

    async def list_files(self, revision: str | None) -> Listing:
        """List the folder itself, without folders in it. Raises ArtifactError."""
        del revision  # a local folder has its current files only
        folder = local_files.locate(self._source, self._file_root)
        if not self._source.is_folder:
            folder = folder.parent
        with storage_faults(folder):
            return await asyncio.to_thread(self._list, folder)

    def _list(self, folder: Path) -> Listing:
        files, newest = [], 0
        for path in sorted(folder.iterdir()):
            if is_wanted(path.name) and path.is_file():
                local_files.refuse_outside(self._source, path, self._file_root)
                stat = path.stat()
                files.append(RepositoryFile(path.name, stat.st_size, None))
                newest = max(newest, stat.st_mtime_ns)
        revision = f"{newest:x}-{sum(file.size_bytes for file in files):x}"
        return Listing(revision, files, local_files.list_python(folder))

    def file_source(self, path: str, revision: str | None) -> Source:
        """Return the file:// source of a file in the folder."""
        del revision
        if not self._source.is_folder and path in (self._source.path, self._source.file):
            return self._source
        folder = self._source.path if self._source.is_folder else self._source.path.rpartition("/")[0] + "/"
        return Source(scheme="file", text=f"file://{quote(folder + path)}", file=path, path=folder + path)

    @asynccontextmanager
    async def open_file(self, path: str, revision: str | None) -> AsyncIterator[ReadableFile]:
        """Check that the file is below the owner's folder. Raises ArtifactError."""
        yield _LocalFile(local_files.locate(self.file_source(path, revision), self._file_root))


class _LocalFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    @asynccontextmanager
    async def read(self, first: int = 0, last: int | None = None, validator: str = "") -> AsyncIterator[SourceResponse]:
        """Read from the file; a changed file is noticed by its revision."""
        with storage_faults(self._path), self._path.open("rb") as file:
            size = self._path.stat().st_size
            if first and first >= size:
                raise RangeRefused
            revision = local_files.revision(self._path)
            if validator and validator != revision:
                first = 0
            file.seek(first)
            end = size if last is None else min(last + 1, size)

            async def blocks() -> AsyncIterator[bytes]:
                left = end - first
                while left > 0 and (block := await asyncio.to_thread(file.read, min(_BLOCK_BYTES, left))):
                    left -= len(block)
                    yield block

            yield SourceResponse(first, size, revision, revision, None, blocks())
