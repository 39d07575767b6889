"""Download of one file: resumed where it was interrupted, verified, and renamed to its final name only when complete.

Jobs, hosts and the command line use the same call. It may be killed at any line and repeated: a verified file is not
fetched again, and a partial download continues if the server still has the same bytes.
"""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from artifacts.errors import ArtifactError
from artifacts.formats.gguf import MAGIC
from artifacts.formats.gguf_split import is_gguf_name
from artifacts.partial_download import (
    DownloadRecord,
    PartialDownload,
    hash_file,
    locked,
    open_partial_download,
    read_download_record,
    storage_faults,
    write_download_record,
)
from artifacts.repositories import local_files
from artifacts.repositories.repository import RangeRefused, ReadableFile, Repository, SourceAccess, SourceResponse
from artifacts.repositories.schemes import open_repository
from artifacts.retry import DEFAULT_PATIENCE, Backoff, Patience, SpeedFloor
from artifacts.source import Source, refuse_library
from crds.size import size_text

ReportProgress = Callable[[int, int | None], None]
"""Called with the number of bytes present and the total number of bytes (None: unknown)."""
MakeRoom = Callable[[int], Awaitable[None]]
"""Called with the number of bytes about to be written; it may free space."""


@dataclasses.dataclass(frozen=True)
class FetchedArtifact:
    """A complete file.

    Attributes:
        path: path of the file; for a file:// source, its own path, which may be a link.
        size_bytes: its size.
        sha256: its digest; empty for a file:// source without an expected digest, which is not hashed.
        revision: the resolved revision: commit of hf://, entity tag or date of http(s)://, time and size of file://.
        is_of_source: False for a file that was present already and came from another server, such as a mirror.

    """

    path: Path
    size_bytes: int
    sha256: str
    revision: str
    is_of_source: bool = True

    @property
    def is_gguf(self) -> bool:
        """True for a GGUF file, which engines get by its path; of other files they get the folder."""
        return is_gguf_name(self.path.name)


async def fetch(
    source: Source,
    destination_dir: Path,
    access: SourceAccess,
    *,
    sha256: str | None,
    size_bytes: int | None = None,
    revision: str | None,
    on_progress: ReportProgress,
    make_room: MakeRoom | None = None,
) -> FetchedArtifact:
    """Download the file `source` to `destination_dir` and return it; a file:// source is not copied.

    Args:
        source: the file.
        destination_dir: folder, made if absent.
        access: settings to read the source.
        sha256: expected digest; None takes the digest that the hub states, if any.
        size_bytes: size that the inspection found; a file of another size is refused before it is fetched.
        revision: resolved revision to fetch; None is the current one.
        on_progress: called often, in the event loop.
        make_room: called with the missing bytes.

    Raises:
        ArtifactError: with a reason and whether a retry may help.
    """
    refuse_library(source)
    if source.scheme == "file":
        return await verify_local(source, access.file_root, sha256, on_progress)
    return await fetch_file(
        open_repository(source, access),
        source.path,
        destination_dir / source.file,
        sha256=sha256,
        size_bytes=size_bytes,
        revision=revision,
        on_progress=on_progress,
        make_room=make_room,
        patience=access.patience,
    )


async def fetch_file(
    repository: Repository,
    path: str,
    destination: Path,
    *,
    sha256: str | None,
    size_bytes: int | None = None,
    revision: str | None,
    on_progress: ReportProgress,
    make_room: MakeRoom | None = None,
    patience: Patience = DEFAULT_PATIENCE,
) -> FetchedArtifact:
    """Download one file of a repository to `destination`; the other arguments mean the same as in `fetch`.

    Raises:
        ArtifactError: with a reason and whether a retry may help.
    """
    source = repository.file_source(path, revision)
    with storage_faults(destination):
        async with locked(destination):
            record = await _find_present(destination, source, sha256, revision, on_progress)
            if not record:
                async with repository.open_file(path, revision) as opened:
                    record = await _Download(
                        source,
                        opened,
                        sha256=sha256,
                        size_bytes=size_bytes,
                        revision=revision,
                        on_progress=on_progress,
                        make_room=make_room,
                    ).run(destination, patience)
    on_progress(record.size_bytes, record.size_bytes)
    return FetchedArtifact(
        destination, record.size_bytes, record.sha256, record.revision, is_of_source=record.source == source.text
    )


async def verify_local(
    source: Source, file_root: Path | None, sha256: str | None, on_progress: ReportProgress
) -> FetchedArtifact:
    """Return a file:// source where it is, after a check of its digest. Raises ArtifactError."""
    path = local_files.locate(source, file_root)
    with storage_faults(path):
        revision, size = local_files.revision(path), path.stat().st_size
        if sha256 and (digest := await _hash_path(path, on_progress)) != sha256:
            raise build_mismatch(source, sha256, "the file", _if_weights(path, digest))
    return FetchedArtifact(path, size, sha256 or "", revision)


async def _find_present(
    path: Path, source: Source, sha256: str | None, revision: str | None, on_progress: ReportProgress
) -> DownloadRecord | None:
    """Return the record of the file that is already present, if it is the wanted one."""
    record = read_download_record(path)
    if record:
        same = record.source == source.text and revision in (None, record.revision)
        return record if (record.sha256 == sha256 if sha256 else same) else None
    # Without a record, only an expected digest can show that the file is the wanted one.
    if sha256 and await _hash_path(path, on_progress) == sha256:
        return write_download_record(path, path, source.text, revision or "", sha256)
    return None


async def _hash_path(path: Path, on_progress: ReportProgress) -> str:
    """Return the digest of the file at `path`; empty when there is none."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return (await hash_file(file, size, lambda done: on_progress(done, size))).hexdigest()
    return ""


def build_mismatch(
    source: Source, expected: str, holder: str, actual: str = "", *, retryable: bool = False
) -> ArtifactError:
    """Return the error for a digest that is not the expected one; `actual` is that of weights, which may be told."""
    return ArtifactError(
        "ChecksumMismatch",
        f"{source.display}: expected sha256 {expected}, but {holder} has {actual or 'another'}: correct the sha256 or "
        "the source",
        retryable=retryable,
    )


def _if_weights(path: Path, digest: str) -> str:
    """Return the digest of a GGUF file, else "": it would prove what a short file of another system contains."""
    with path.open("rb") as file:
        return digest if file.read(len(MAGIC)) == MAGIC else ""


class _Download:
    """One file from one origin, over as many requests as patience allows."""

    def __init__(
        self,
        source: Source,
        opened: ReadableFile,
        *,
        sha256: str | None,
        size_bytes: int | None,
        revision: str | None,
        on_progress: ReportProgress,
        make_room: MakeRoom | None,
    ) -> None:
        self._source = source
        self._opened = opened
        self._sha256 = sha256
        self._size_bytes = size_bytes
        self._revision = revision
        self._on_progress = on_progress
        self._make_room = make_room

    async def run(self, path: Path, patience: Patience) -> DownloadRecord:
        backoff = Backoff(patience)
        with open_partial_download(path, self._source.text) as partial:
            await partial.resume(lambda done: self._on_progress(done, None))
            while True:
                try:
                    return await self._attempt(partial, patience)
                except ArtifactError as error:
                    pause = backoff.pause_seconds(error, partial.size_bytes)
                except RangeRefused:
                    changed = self._build_changed("file is now shorter than what was already fetched")
                    pause = backoff.pause_seconds(changed, partial.size_bytes)
                    partial.discard()
                await asyncio.sleep(pause)

    async def _attempt(self, partial: PartialDownload, patience: Patience) -> DownloadRecord:
        """Request the missing bytes, verify the whole file, and give it its final name."""
        if not partial.validator and partial.size_bytes:
            partial.discard()
        async with self._opened.read(partial.size_bytes, validator=partial.validator) as response:
            expected = self._expected(response)
            if response.first == 0:
                await partial.restart(response.validator)
            elif response.validator and response.validator != partial.validator:
                # The server ignored If-Range: these bytes would be appended to bytes of another version.
                partial.discard()
                raise self._build_changed("file changed while it was fetched")
            if self._make_room:
                await self._make_room(response.size_bytes - partial.size_bytes)
            partial.require_space(response.size_bytes)
            floor = SpeedFloor(patience, self._source.display)
            async for block in response.blocks:
                floor.add(len(block))
                await partial.append(block)
                self._on_progress(partial.size_bytes, response.size_bytes)
        if partial.size_bytes != response.size_bytes:
            # A server may send less than the requested range: the next attempt requests the rest.
            have = f"{size_text(partial.size_bytes)} of {size_text(response.size_bytes)}"
            raise ArtifactError(
                "SourceUnreachable", f"{self._source.display}: the server ended the response at {have}", retryable=True
            )
        if expected and partial.sha256 != expected:
            inherited, actual = partial.inherited, _if_weights(partial.partial_path, partial.sha256)
            partial.discard()
            # Bytes of an earlier process may be damaged by a power failure: one download from the start heals that.
            raise build_mismatch(self._source, expected, "the fetched file", actual, retryable=inherited)
        return await partial.finish(response.revision)

    def _expected(self, response: SourceResponse) -> str | None:
        """Return the digest to verify, if any. Raises ArtifactError when the response already contradicts it."""
        if self._size_bytes is not None and response.size_bytes != self._size_bytes:
            raise ArtifactError(
                "SourceChanged",
                f"{self._source.display}: has {response.size_bytes} bytes now, not the {self._size_bytes} that were "
                "inspected: delete the Model and create it again to accept the new file",
            )
        if self._sha256 and response.sha256 and self._sha256 != response.sha256:
            raise build_mismatch(self._source, self._sha256, "the file on the hub", response.sha256)
        expected = self._sha256 or response.sha256
        # The URL of a hub pins the revision; any other server sends its current file.
        pinned = expected or self._source.scheme == "hf"
        if not pinned and self._revision and response.revision != self._revision:
            raise ArtifactError(
                "SourceChanged",
                f"{self._source.display}: has revision {response.revision or 'unknown'} now, not {self._revision}: "
                "delete the Model and create it again to accept the new file",
            )
        return expected

    def _build_changed(self, what: str) -> ArtifactError:
        return ArtifactError(
            "SourceChanged", f"{self._source.display}: the {what}; the download starts again", retryable=True
        )
