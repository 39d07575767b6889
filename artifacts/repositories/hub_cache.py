"""The cache of the hub's own client, as `hf download` and many programs fill it: read only, nothing is deleted there.

`models--ORG--REPO` has each file once, in `blobs`, named by its SHA-256 or, if it is small, by its Git object;
`snapshots/COMMIT` has links of the files' names to them, and `refs/BRANCH` the commit of a branch.
"""

import dataclasses
import itertools
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from artifacts.formats.gguf_split import is_gguf_name
from artifacts.partial_download import translate_os_errors
from artifacts.repositories.local_files import LocalFile
from artifacts.repositories.repository import (
    WEIGHTS,
    Listing,
    ReadableFile,
    RepositoryFile,
    SourceResponse,
    is_safe_path,
    is_wanted,
)
from artifacts.source import Source, hub_file, is_commit, is_digest

_MOST_FILES: Final = 10_000
_MOST_REVISION_BYTES: Final = 100


def find_hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which the hub's client keeps models, by its own variables; it may not exist."""
    if cache := environment.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environment.get("HF_HOME") or f"{caches}/huggingface").expanduser() / "hub"


def find_cached_blob(cache: Path, repo: str, sha256: str) -> Path | None:
    """Return the file of a repository that is named by a digest; its content is not checked."""
    path = _repository_folder(cache, repo) / "blobs" / sha256
    return path if is_digest(sha256) and path.is_file() else None


def find_snapshot(cache: Path, source: Source, revision: str | None) -> Path | None:
    """Return the folder of a revision of a repository; None if the cache has none of it. Raises OSError.

    Without a `revision`, that of the source counts: a branch is the commit that it was when it was asked last.
    """
    folder, at = _repository_folder(cache, source.repo), revision or source.revision
    if not is_commit(at):
        reference = folder / "refs" / at
        if not is_safe_path(at) or not reference.is_file():
            return None
        with reference.open("rb") as file:
            at = file.read(_MOST_REVISION_BYTES).decode("ascii", "replace").strip()
    snapshot = folder / "snapshots" / at
    return snapshot if is_commit(at) and snapshot.is_dir() else None


def has_cached_files(cache: Path, source: Source, revision: str | None = None) -> bool:
    """Return whether the cache has the file of a source, or some files of its repository, at a revision."""
    try:
        snapshot = find_snapshot(cache, source, revision)
        return snapshot is not None and (snapshot / source.path).exists()
    except OSError:
        return False


class CachedHubRepository:
    """The repository, or the one file of it, that an hf:// source names, as far as a cache has it."""

    def __init__(self, source: Source, cache: Path) -> None:
        self._source = source
        self._cache = cache

    async def list_files(self, revision: str | None) -> Listing:
        """List the files of a revision that the cache has. Raises ArtifactError: it has none."""
        with translate_os_errors(self._cache):
            snapshot = self._find_snapshot(revision)
            files = [self._describe(snapshot, path) for path in _walk(snapshot) if is_wanted(path)]
        # Weights are taken by their digests only: without links, as on some file systems, there are none.
        listed = [file for file in files if file and (file.sha256 or not _is_weights(file.path))]
        return Listing(snapshot.name, sorted(listed, key=lambda entry: entry.path))

    def file_source(self, path: str, revision: str | None) -> Source:
        """Return the hf:// source of a file at a resolved revision, as that of the hub."""
        if path == self._source.path:
            return self._source
        return hub_file(self._source.repo, revision or self._source.revision, path, path.rpartition("/")[2])

    @asynccontextmanager
    async def open_file(self, path: str, revision: str | None) -> AsyncIterator[ReadableFile]:
        """Find a file in the cache. Raises ArtifactError: it is not there."""
        with translate_os_errors(self._cache):
            snapshot = self._find_snapshot(revision)
            file = self._describe(snapshot, path) if is_safe_path(path) else None
        if file is None:
            raise self._source.error("SourceNotFound", f"the hub's cache has no {path} of it")
        yield _CachedFile(LocalFile(snapshot / path), snapshot.name, file.sha256)

    def _find_snapshot(self, revision: str | None) -> Path:
        snapshot = find_snapshot(self._cache, self._source, revision)
        if snapshot is None:
            raise self._source.error("SourceNotFound", "the hub's cache has nothing of it")
        return snapshot

    def _describe(self, snapshot: Path, path: str) -> RepositoryFile | None:
        """Return a file of a snapshot; None if it is gone, or a link out of its repository."""
        blob = Path(os.path.realpath(snapshot / path))
        if not blob.is_file() or not blob.is_relative_to(os.path.realpath(snapshot.parents[1])):
            return None
        return RepositoryFile(path, blob.stat().st_size, blob.name if is_digest(blob.name) else None)


class _CachedFile:
    """A file of the cache, which states the revision and the digest as the hub does."""

    def __init__(self, file: LocalFile, commit: str, sha256: str | None) -> None:
        self._file = file
        self._commit = commit
        self._sha256 = sha256

    @asynccontextmanager
    async def read(self, first: int = 0, last: int | None = None, validator: str = "") -> AsyncIterator[SourceResponse]:
        """Yield the bytes from `first` to `last` (inclusive, None is the end). Raises RangeRefused."""
        async with self._file.read(first, last, validator) as response:
            yield dataclasses.replace(response, revision=self._commit, sha256=self._sha256)


def _repository_folder(cache: Path, repo: str) -> Path:
    return cache / f"models--{repo.replace('/', '--')}"


def _is_weights(path: str) -> bool:
    return is_gguf_name(path) or path.endswith(WEIGHTS)


def _walk(folder: Path) -> Iterator[str]:
    """Yield the paths of the files below a folder, relative to it, but not of too many; no link to a folder counts."""
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    for path in itertools.islice(paths, _MOST_FILES):
        yield str(path.relative_to(folder))
