"""`file://` sources: files below the one folder that the owner chose; no link or `..` leads out of the folder."""

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from artifacts.formats.gguf_split import list_part_names
from artifacts.partial_download import translate_os_errors
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


def locate(source: Source, file_root: Path | None) -> Path:
    """Return the path of a file:// source after checking that it stays below `file_root`.

    A link is not replaced by its target, since engines find the further parts of a split model by the name of the link.

    Raises:
        ArtifactError: SourceForbidden when it, or a part of it, leads out of `file_root` or `file_root` is None;
            SourceNotFound.

    """
    path = Path(source.path)
    # Where a path leads is compared before it is known to exist: the error must not tell what exists elsewhere.
    _require_inside(source, path, file_root)

    # Engines open the further parts of a split model beside the first one.
    parts = list_part_names(source.file)
    if parts and source.file == parts[0]:
        for name in parts[1:]:
            _require_inside(source, path.with_name(name), file_root, f"{name} ")

    # It must exist, and be what the source says: a folder or a file.
    try:
        path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        # Python raises RuntimeError, which has no strerror, for a loop of links.
        problem = getattr(error, "strerror", None) or "a loop of links"
        raise source.error("SourceNotFound", problem) from error
    if source.is_folder and not path.is_dir():
        raise source.error("SourceNotFound", "is no folder: remove the slash at its end")
    if not source.is_folder and not path.is_file():
        way_out = ": end it with a slash to serve the folder" if path.is_dir() else ""
        raise source.error("SourceNotFound", f"is no regular file{way_out}")

    _require_inside(source, path, file_root)  # it may have been replaced meanwhile
    return path


def _require_inside(source: Source, path: Path, file_root: Path | None, name: str = "") -> None:
    """Raise SourceForbidden if `path`, with its links followed, is not below `file_root`, or if that is None.

    `name` begins the message if `path` is not the file that the source names.
    """
    if file_root is None:
        problem = "local files are not allowed here: start with --file-root DIR, a folder above this file"
        raise source.error("SourceForbidden", problem)
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(file_root)):
        raise source.error(
            "SourceForbidden",
            f"{name}is not below --file-root {file_root}, or is a link out of it: move it there or widen the root",
        )


def locate_mounted(source: Source, file_root: Path | None) -> Source:
    """Return a pvc:// source as files below `file_root`, where its volume is mounted; any other source as it is.

    Raises:
        ArtifactError: SourceForbidden; no volume is mounted here.
    """
    if source.scheme != "pvc":
        return source
    if file_root is None:
        problem = "only a pod can mount a claim: with its volume mounted at DIR, add --file-root DIR"
        raise source.error("SourceForbidden", problem)
    return dataclasses.replace(source, scheme="file", path=f"{file_root}/{source.path}")


def read_revision(path: Path) -> str:
    """Return the revision of a local file, its time and size: it changes when the file is written."""
    stat = path.stat()
    return f"{stat.st_mtime_ns:x}-{stat.st_size:x}"


def list_python(folder: Path) -> list[str]:
    """Return the names of the Python files in a folder, which a loader would find there. Raises OSError."""
    return sorted(path.name for path in folder.glob("*.py"))


class LocalRepository:
    """The folder, or the one file, that a file:// source names."""

    def __init__(self, source: Source, access: SourceAccess) -> None:
        self._source = source
        self._file_root = access.file_root

    async def list_files(self, revision: str | None) -> Listing:
        """List the folder itself, without folders in it. Raises ArtifactError."""
        del revision  # a local folder has its current files only
        folder = locate(self._source, self._file_root)
        if not self._source.is_folder:
            folder = folder.parent
        with translate_os_errors(folder):
            return await asyncio.to_thread(self._list_folder, folder)

    def _list_folder(self, folder: Path) -> Listing:
        """Return the files of a folder that engines may read; its newest time and its size are the revision."""
        files, newest = [], 0
        for path in sorted(folder.iterdir()):
            if is_wanted(path.name) and path.is_file():
                if path.is_symlink():
                    _require_inside(self._source, path, self._file_root, f"{path.name} ")
                stat = path.stat()
                files.append(RepositoryFile(path.name, stat.st_size, sha256=None))
                newest = max(newest, stat.st_mtime_ns)
        revision = f"{newest:x}-{sum(file.size_bytes for file in files):x}"
        return Listing(revision, files, list_python(folder))

    def file_source(self, path: str, revision: str | None) -> Source:
        """Return the file:// source of a file in the folder."""
        del revision
        # The one file that the source names is listed by its name.
        if not self._source.is_folder and path in (self._source.path, self._source.file):
            return self._source
        # Listed paths are below the source's folder, or below the one that contains its file.
        folder = self._source.path if self._source.is_folder else self._source.path.rpartition("/")[0] + "/"
        return Source(scheme="file", text=f"file://{quote(folder + path)}", file=path, path=folder + path)

    @asynccontextmanager
    async def open_file(self, path: str, revision: str | None) -> AsyncIterator[ReadableFile]:
        """Check that the file is below the owner's folder. Raises ArtifactError."""
        yield LocalFile(locate(self.file_source(path, revision), self._file_root))


class LocalFile:
    """A file of this machine, opened for each read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @asynccontextmanager
    async def read(self, first: int = 0, last: int | None = None, validator: str = "") -> AsyncIterator[SourceResponse]:
        """Yield the bytes from `first` to `last` (inclusive, None is the end), or from the start of a changed file.

        The file has changed if a `validator` is given that is not its revision. Raises RangeRefused: it has no byte
        `first`.
        """
        with translate_os_errors(self._path), self._path.open("rb") as file:
            size = self._path.stat().st_size
            if first and first >= size:
                raise RangeRefused

            # A changed file is read from its start.
            current = read_revision(self._path)
            if validator and validator != current:
                first = 0

            file.seek(first)
            end = size if last is None else min(last + 1, size)

            async def blocks() -> AsyncIterator[bytes]:
                """Yield the bytes from `first` to before `end`, each block read in a thread."""
                remaining = end - first
                while remaining > 0 and (block := await asyncio.to_thread(file.read, min(_BLOCK_BYTES, remaining))):
                    remaining -= len(block)
                    yield block

            yield SourceResponse(
                first=first, size_bytes=size, validator=current, revision=current, sha256=None, blocks=blocks()
            )
