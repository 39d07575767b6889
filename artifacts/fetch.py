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
    Segment,
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
from artifacts.retry import Backoff, Connections
from artifacts.source import Source, refuse_ollama_source
from crds.size import size_text

ReportProgress = Callable[[int, int | None], None]
"""Called with the number of bytes present and the total number of bytes (None: unknown)."""
MakeRoom = Callable[[int], Awaitable[None]]
"""Called with the number of bytes about to be written; it may free space."""
_TO_ACCEPT = "delete the Model and create it again to accept the new file"


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
        connections=Connections(access.patience, source.display),
    )


async def fetch_file(
    repository: Repository,
    path: str,
    destination: Path,
    expected: ExpectedFile,
    *,
    on_progress: ReportProgress,
    make_room: MakeRoom | None = None,
    connections: Connections,
) -> FetchedArtifact:
    """Download one file of a repository to `destination`, or return the expected file that is already there.

    The destination is locked meanwhile: of several processes one downloads, and the others find the file. Files that
    are fetched at the same time share their `connections`. The other arguments mean the same as in `fetch`.

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
                partial = PartialDownload(destination, source.text)
                async with contextlib.aclosing(partial), repository.open_file(path, expected.revision) as opened:
                    download = _Download(source, opened, expected, on_progress, make_room, connections, partial)
                    record = await download.run()

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


@dataclasses.dataclass
class _Download:
    """One file from one origin, over as many connections and attempts as are allowed.

    An attempt begins with one request for all that follows the first missing byte. If its response shows that the file
    is divisible, it is read for one segment only, and each response brings one more worker for segment after segment.
    """

    source: Source
    opened: ReadableFile
    expected: ExpectedFile
    on_progress: ReportProgress
    make_room: MakeRoom | None
    connections: Connections
    partial: PartialDownload

    # Revision of the first response of an attempt, and None before it; digest that the file must have, if one is known.
    revision: str | None = None
    digest: str | None = None
    is_divisible: bool = True
    workers: int = 1

    async def run(self) -> DownloadRecord:
        """Download the file; after a failure, continue with what is there.

        The loop ends with the complete file, or by the error that `pause_or_raise` raises again: one that no further
        attempt can cure, the last one that patience allows, or one of a server that asks for too long a pause.
        """
        backoff = Backoff(self.connections.patience)
        self.partial.resume()  # the bytes of an earlier process
        while True:
            self.revision, self.workers = None, 1
            try:
                return await self._attempt()
            except ArtifactError as error:
                # Another file has the connections that the origin allows: this one gets its turn.
                if error.is_overload and await self.connections.wait_for_others():
                    continue
                # The position shows progress: enough of it begins a new series of attempts.
                pause = backoff.pause_or_raise(error, self.partial.size_bytes)
                if error.reason == "SourceChanged" or not self.partial.validator:
                    await self.partial.restart()  # without a validator, another version could be continued
            await asyncio.sleep(pause)

    async def _attempt(self) -> DownloadRecord:
        """Fetch the missing bytes; verify the whole file, rename it and return its record. Raises ArtifactError.

        A validator (an entity tag or a date) names the version of the file that the bytes belong to. It goes with each
        request and is compared with its response, so that bytes of two versions are never joined.
        """
        partial = self.partial
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fetch_segments(group))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

        # Verify the file.
        sha256 = partial.digest.hexdigest()
        if self.digest and sha256 != self.digest:
            # Bytes of an earlier process may be damaged by a power failure: one download from the start heals that.
            may_heal, actual = partial.has_inherited_bytes, _digest_if_gguf(partial.partial_path, sha256)
            await partial.restart()
            raise build_mismatch(self.source, self.digest, "the fetched file", actual, retryable=may_heal)
        return await partial.finish(self.revision or "")

    async def _fetch_segments(self, group: asyncio.TaskGroup) -> None:
        """Fetch segments until none is left. Only the last worker raises its error: others leave their bytes to it."""
        try:
            while await self._fetch_segment(group):
                pass
        except RangeRefused:
            raise self._build_changed("file is now shorter than what was already fetched") from None
        except ArtifactError as error:
            if self.revision is not None and not error.retryable:
                # The range may be refused, and not the file: the first request of another attempt shows it.
                self.is_divisible = False
                error.reason, error.retryable = "SourceUnreachable", True
            if self.workers == 1 or error.reason == "SourceChanged":
                raise
        finally:
            self.workers -= 1

    async def _fetch_segment(self, group: asyncio.TaskGroup) -> bool:
        """Request and write a segment, if one is left; return whether it was. Raises ArtifactError and RangeRefused."""
        partial, connections = self.partial, self.connections
        async with connections.open():
            is_first = self.revision is None
            segment = partial.take_segment(connections.limit)
            if segment is None:
                return False
            last = None if is_first else segment.end - 1
            try:
                async with self.opened.read(segment.position, last, partial.validator) as response:
                    is_same = (response.validator, response.size_bytes) == (partial.validator, partial.total_bytes)
                    if is_first:
                        segment = await self._begin(response, segment, is_same=is_same)
                        group.create_task(partial.hash_in_order())
                    elif not is_same:
                        # Or each of several servers has a version of its own: then one connection reads one of them.
                        self.is_divisible = False
                        raise self._build_changed("file changed while it was fetched")
                    elif response.first != segment.position:
                        raise self.source.error("SourceRefused", "the server ignored the range")
                    start = segment.position
                    if self.is_divisible and partial.free and self.workers < connections.limit:
                        self.workers += 1
                        group.create_task(self._fetch_segments(group))
                    async for block in response.blocks:
                        connections.count_bytes(len(block))
                        await partial.write(segment, block[: segment.end - segment.position])
                        self.on_progress(partial.size_bytes, response.size_bytes)
                        if segment.position == segment.end:
                            return True
                # A server may send less than a range. Another request gets the rest, if its version can be known.
                if segment.position < segment.end and not (self.is_divisible and segment.position > start):
                    have = f"{size_text(partial.size_bytes)} of {size_text(partial.total_bytes)}"
                    problem = f"the server ended the response at {have}"
                    raise self.source.error("SourceUnreachable", problem, retryable=True)
            finally:
                partial.give_back(segment)
        return True

    async def _begin(self, response: SourceResponse, segment: Segment, *, is_same: bool) -> Segment:
        """Check the first response, and begin or continue the file; return its segment. Raises ArtifactError."""
        partial = self.partial
        self.digest = self._check_response(response)
        self.is_divisible = self.is_divisible and response.is_divisible
        # Byte 0 comes at the first attempt, of a changed file, and from a server without ranges.
        if not response.first and (segment.position or not is_same or not partial.validator):
            await partial.restart(response.validator, response.size_bytes)
        elif not is_same:
            # The server ignored If-Range: these bytes would be joined with bytes of another version.
            raise self._build_changed("file changed while it was fetched")
        missing_bytes = response.size_bytes - partial.size_bytes
        if self.make_room:
            await self.make_room(missing_bytes)
        require_space(partial.path, missing_bytes)
        self.on_progress(partial.size_bytes, response.size_bytes)  # the bytes of an earlier process, before any other
        self.revision = response.revision
        partial.give_back(segment)
        return partial.take_segment(self.connections.limit if self.is_divisible else 1) or segment

    def _check_response(self, response: SourceResponse) -> str | None:
        """Compare size, digest and revision of a response with the expected file. Raises ArtifactError.

        Return the digest that the downloaded bytes must have; None if neither the caller nor the server states one.
        """
        expected = self.expected

        if expected.size_bytes is not None and response.size_bytes != expected.size_bytes:
            problem = (
                f"has {response.size_bytes} bytes now, not the {expected.size_bytes} that were inspected or listed"
            )
            raise self.source.error("SourceChanged", f"{problem}: {_TO_ACCEPT}")

        if expected.sha256 and response.sha256 and expected.sha256 != response.sha256:
            raise build_mismatch(self.source, expected.sha256, "the file on the hub", response.sha256)

        # The revision counts where nothing else fixes the version of the file.
        digest = expected.sha256 or response.sha256
        # A digest, or the revision in the URL of a hub, decides which bytes come. Other servers send the current file:
        # only its revision, an entity tag or a date, shows that it is another one.
        is_version_fixed = bool(digest) or self.source.scheme == "hf"
        if not is_version_fixed and expected.revision and response.revision != expected.revision:
            problem = f"has revision {response.revision or 'unknown'} now, not {expected.revision}"
            raise self.source.error("SourceChanged", f"{problem}: {_TO_ACCEPT}")
        return digest

    def _build_changed(self, what: str) -> ArtifactError:
        return self.source.error("SourceChanged", f"the {what}; the download starts again", retryable=True)
