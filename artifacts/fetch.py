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
    read_download_record,
    require_space,
    translate_os_errors,
    write_download_record,
)
from artifacts.repositories import local_files
from artifacts.repositories.repository import RangeRefused, ReadableFile, Repository, SourceAccess, SourceResponse
from artifacts.repositories.schemes import open_repository
from artifacts.retry import DEFAULT_PATIENCE, Backoff, Patience, SpeedFloor
from artifacts.source import Source, refuse_ollama_source
from crds.size import size_text

ReportProgress = Callable[[int, int | None], None]
"""Called with the number of bytes present and the total number of bytes (None: unknown)."""
MakeRoom = Callable[[int], Awaitable[None]]
"""Called with the number of bytes about to be written; it may free space."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedFile:
    """The file that a server has to send.

    Attributes:
        sha256: its digest; None takes the digest that the hub states, if any.
        size_bytes: its size as the inspection found it; a file of another size is refused before it is fetched.
        revision: its resolved revision; None is the current one.

    """

    sha256: str | None = None
    size_bytes: int | None = None
    revision: str | None = None


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
    expected: ExpectedFile,
    *,
    on_progress: ReportProgress,
    make_room: MakeRoom | None = None,
) -> FetchedArtifact:
    """Download the file `source` to `destination_dir` and return it; a file:// source is verified in its place.

    Args:
        source: the file.
        destination_dir: folder, made if absent.
        access: settings to read the source.
        expected: digest, size and revision of the file.
        on_progress: called often, in the event loop.
        make_room: called with the number of bytes still to download, before they are written; may delete other files.

    Raises:
        ArtifactError: with a reason and whether a retry may help.
    """
    # Only Ollama itself can fetch from its library.
    refuse_ollama_source(source)

    # A file of this machine is used where it is.
    if source.scheme == "file":
        return await verify_local(source, access.file_root, expected.sha256, on_progress)

    # Any other file is downloaded.
    repository = open_repository(source, access)
    return await fetch_file(
        repository,
        source.path,
        destination_dir / source.file,
        expected,
        on_progress=on_progress,
        make_room=make_room,
        patience=access.patience,
    )


async def fetch_file(
    repository: Repository,
    path: str,
    destination: Path,
    expected: ExpectedFile,
    *,
    on_progress: ReportProgress,
    make_room: MakeRoom | None = None,
    patience: Patience = DEFAULT_PATIENCE,
) -> FetchedArtifact:
    """Download one file of a repository to `destination`, or return the expected file that is already there.

    The destination is locked meanwhile: of several processes one downloads, and the others find the file. The other
    arguments mean the same as in `fetch`.

    Raises:
        ArtifactError: with a reason and whether a retry may help.
    """
    # This one file as a source of its own, without the other files of the repository.
    source = repository.file_source(path, expected.revision)

    # Take the file that is there, or download it.
    with translate_os_errors(destination):
        async with locked(destination):
            # A record names source, revision, digest and size of a file that was verified before.
            record = await _find_present(destination, source, expected, on_progress)
            if not record:
                async with repository.open_file(path, expected.revision) as opened:
                    download = _Download(source, opened, expected, on_progress, make_room)
                    record = await download.run(destination, patience)

    # Progress ends with all bytes, also if none were downloaded.
    on_progress(record.size_bytes, record.size_bytes)
    # A file that was already there may be of another server with the same bytes, such as a mirror.
    is_of_source = record.source == source.text
    return FetchedArtifact(destination, record.size_bytes, record.sha256, record.revision, is_of_source)


async def verify_local(
    source: Source, file_root: Path | None, sha256: str | None, on_progress: ReportProgress
) -> FetchedArtifact:
    """Return a file:// source where it is, after a check of its digest if one is expected. Raises ArtifactError."""
    path = local_files.locate(source, file_root)
    with translate_os_errors(path):
        revision, size = local_files.read_revision(path), path.stat().st_size
        if sha256 and (digest := await _hash_path(path, on_progress)) != sha256:
            # The message has the digest of a GGUF only: that of a short file would reveal its content.
            raise build_mismatch(source, sha256, "the file", _digest_if_gguf(path, digest))
    return FetchedArtifact(path=path, size_bytes=size, sha256=sha256 or "", revision=revision)


async def _find_present(
    path: Path, source: Source, expected: ExpectedFile, on_progress: ReportProgress
) -> DownloadRecord | None:
    """Return the record of the file that is already at `path`; None if it has to be downloaded.

    None: there is no file, or it is not the expected one. A file without a record, such as one that a user has copied
    here, is accepted only if it has the expected digest; then it gets a record.
    """
    sha256, revision = expected.sha256, expected.revision

    # A record exists only for a file that was verified before.
    record = read_download_record(path)
    if record:
        # An expected digest decides alone: equal bytes of another source will do.
        # A revision of None accepts any revision of the source.
        is_same_source = record.source == source.text and revision in (None, record.revision)
        is_expected = record.sha256 == sha256 if sha256 else is_same_source
        return record if is_expected else None

    # Without a record, only an expected digest can show that the file is the wanted one.
    if sha256 and await _hash_path(path, on_progress) == sha256:
        return write_download_record(
            path, current_path=path, source=source.text, revision=revision or "", sha256=sha256
        )
    return None


async def _hash_path(path: Path, on_progress: ReportProgress) -> str:
    """Return the digest of the file at `path`, or an empty text if there is no file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return (await hash_file(file, size, lambda done: on_progress(done, size))).hexdigest()
    return ""


def build_mismatch(
    source: Source, expected: str, holder: str, actual: str = "", *, retryable: bool = False
) -> ArtifactError:
    """Return the error for a digest that is not the expected one.

    `holder` names what has the other digest. `actual` is that digest; empty if the file is no GGUF, since the digest of
    a short file would reveal its content.
    """
    return source.error(
        "ChecksumMismatch",
        f"expected sha256 {expected}, but {holder} has {actual or 'another'}: correct the sha256 or the source",
        retryable=retryable,
    )


def _digest_if_gguf(path: Path, digest: str) -> str:
    """Return `digest` if the file is a GGUF, else "": in a message it would reveal what another short file contains."""
    with path.open("rb") as file:
        return digest if file.read(len(MAGIC)) == MAGIC else ""


@dataclasses.dataclass(frozen=True)
class _Download:
    """One file from one origin, over as many requests as patience allows."""

    source: Source
    opened: ReadableFile
    expected: ExpectedFile
    on_progress: ReportProgress
    make_room: MakeRoom | None

    async def run(self, path: Path, patience: Patience) -> DownloadRecord:
        """Download the file to `path`; after a failure, continue where it stopped.

        The loop ends with the complete file, or by the error that `pause_or_raise` raises again: one that no further
        attempt can cure, the last one that `patience` allows, or one of a server that asks for too long a pause.
        """
        backoff = Backoff(patience)
        with contextlib.closing(PartialDownload(path, self.source.text)) as partial:
            # Keep the bytes of an earlier process. The size of the whole file is not known yet (None).
            await partial.resume(lambda done: self.on_progress(done, None))

            while True:
                try:
                    return await self._attempt(partial, patience)
                except ArtifactError as error:
                    # The position shows progress: enough of it begins a new series of attempts.
                    pause = backoff.pause_or_raise(error, partial.size_bytes)
                # The server's file has no byte at the position to continue from.
                except RangeRefused:
                    changed = self._build_changed("file is now shorter than what was already fetched")
                    pause = backoff.pause_or_raise(changed, partial.size_bytes)
                    partial.discard()
                await asyncio.sleep(pause)

    async def _attempt(self, partial: PartialDownload, patience: Patience) -> DownloadRecord:
        """Make one request for the missing bytes; verify the whole file, rename it and return its record.

        A validator (an entity tag or a date) names the version of the file that the bytes belong to. It goes with the
        request and is compared with the response, so that bytes of two versions are never joined.

        Raises ArtifactError, and RangeRefused if the file on the server is shorter than what was fetched.
        """
        if not partial.validator and partial.size_bytes:
            partial.discard()  # without a validator, the server may continue with bytes of another version

        # Request the bytes from our position on. If the validator does not match, the server sends the whole file.
        async with self.opened.read(partial.size_bytes, validator=partial.validator) as response:
            # 1. Check that the response continues the file, or begins it.
            expected_digest = self._check_response(response)
            # Byte 0 comes at the first attempt, of a changed file, and from a server without ranges.
            if response.first == 0:
                await partial.restart(response.validator)
            elif response.validator and response.validator != partial.validator:
                # The server ignored If-Range: these bytes would be appended to bytes of another version.
                partial.discard()
                raise self._build_changed("file changed while it was fetched")

            # 2. Write its bytes.
            missing_bytes = response.size_bytes - partial.size_bytes
            if self.make_room:
                await self.make_room(missing_bytes)
            require_space(partial.path, missing_bytes)
            floor = SpeedFloor(patience, self.source.display)
            async for block in response.blocks:
                floor.count_bytes(len(block))
                await partial.append(block)
                self.on_progress(partial.size_bytes, response.size_bytes)

        # 3. Verify the file.
        if partial.size_bytes != response.size_bytes:
            # A server may send less than the requested range: the next attempt requests the rest.
            have = f"{size_text(partial.size_bytes)} of {size_text(response.size_bytes)}"
            raise self.source.error("SourceUnreachable", f"the server ended the response at {have}", retryable=True)

        if expected_digest and partial.sha256 != expected_digest:
            # Bytes of an earlier process may be damaged by a power failure: one download from the start heals that.
            may_heal, actual = partial.has_inherited_bytes, _digest_if_gguf(partial.partial_path, partial.sha256)
            partial.discard()
            raise build_mismatch(self.source, expected_digest, "the fetched file", actual, retryable=may_heal)
        return await partial.finish(response.revision)

    def _check_response(self, response: SourceResponse) -> str | None:
        """Compare size, digest and revision of a response with the expected file. Raises ArtifactError.

        Return the digest that the downloaded bytes must have; None if neither the caller nor the server states one.
        """
        expected = self.expected

        if expected.size_bytes is not None and response.size_bytes != expected.size_bytes:
            raise self.source.error(
                "SourceChanged",
                f"has {response.size_bytes} bytes now, not the {expected.size_bytes} that were inspected: delete the "
                "Model and create it again to accept the new file",
            )

        if expected.sha256 and response.sha256 and expected.sha256 != response.sha256:
            raise build_mismatch(self.source, expected.sha256, "the file on the hub", response.sha256)

        # The revision counts where nothing else fixes the version of the file.
        digest = expected.sha256 or response.sha256
        # A digest, or the revision in the URL of a hub, decides which bytes come. Other servers send the current file:
        # only its revision, an entity tag or a date, shows that it is another one.
        is_version_fixed = bool(digest) or self.source.scheme == "hf"
        if not is_version_fixed and expected.revision and response.revision != expected.revision:
            raise self.source.error(
                "SourceChanged",
                f"has revision {response.revision or 'unknown'} now, not {expected.revision}: delete the Model and "
                "create it again to accept the new file",
            )
        return digest

    def _build_changed(self, what: str) -> ArtifactError:
        return self.source.error("SourceChanged", f"the {what}; the download starts again", retryable=True)
