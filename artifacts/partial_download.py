"""A download on disk: partial beside its final name, locked while a process works on it, renamed when complete.

The files beside `FILE` are `FILE.part` and `FILE.part.json` (source, version and missing ranges of the partial file),
`FILE.verified.json` (the verified digest, with the size and time of the file) and `FILE.lock`. The process may be
killed at any line: bytes are flushed before the state counts them, which is deleted before the file is emptied, and the
record of the verification is written before the rename, since it is valid only for a file of that size and time.
"""

import asyncio
import bisect
import contextlib
import dataclasses
import errno
import functools
import hashlib
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import msgspec

from artifacts import durable
from artifacts.errors import ArtifactError
from artifacts.folder_lock import try_lock
from crds.size import size_text

P = ParamSpec("P")
R = TypeVar("R")

_THREADS = ThreadPoolExecutor(8, "weights")  # not the default ones: a slow disk must not hold up anything else
_HASH_STEP_BYTES = 64 << 20
SEGMENT_BYTES: Final = 16 << 20
"""The most bytes of one request: enough for few requests, and few enough that the hash is never far behind."""
_LOCK_RETRY_SECONDS = 0.2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


class VerifiedFile(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A verified digest, valid for a file while its size and time are these."""

    sha256: str
    size_bytes: int
    mtime_nanoseconds: int
    inode: int | None = None
    """The inode of a file that others may replace; None for a file of our own."""

    def holds_for(self, path: Path) -> bool:
        """Return whether the file at `path` still has the size and time that were verified, and the inode if known."""
        with contextlib.suppress(OSError):
            status = path.stat()
            is_same = (status.st_size, status.st_mtime_ns) == (self.size_bytes, self.mtime_nanoseconds)
            return is_same and self.inode in (None, status.st_ino)
        return False


class DownloadRecord(VerifiedFile, frozen=True, kw_only=True, rename="camel"):
    """The content of `FILE.verified.json`: a verified digest, and the source that the file was fetched from."""

    source: str
    revision: str


class _PartialState(msgspec.Struct, frozen=True, rename="camel"):
    source: str
    validator: str
    size_bytes: int  # of the complete file
    missing: list[tuple[int, int]]  # first byte of each range that is not on disk, and the one behind its last


@contextlib.contextmanager
def translate_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into an ArtifactError."""
    try:
        yield
    except OSError as error:
        # _NO_SPACE: a full disk or quota. _NOT_ALLOWED: missing permission, or a read-only volume.
        if error.errno in _NO_SPACE:
            raise ArtifactError(
                "NoSpace",
                f"{path}: the volume is full: free some space; the download then continues where it stopped",
                retryable=True,
            ) from error
        problem = _describe_refusal(path) if error.errno in _NOT_ALLOWED else error.strerror or error
        raise ArtifactError("StorageFailed", f"{path}: {problem}", retryable=True) from error


def _describe_refusal(path: Path) -> str:
    """Return why this process may not read `path`, or not write to it: the file or folder, its owner, the way out."""
    # The path itself may not exist yet: the nearest folder above it that exists decides.
    folder = next((ancestor for ancestor in (path, *path.parents) if os.path.lexists(ancestor)), path)

    # Read its volume, owner and mode, as far as that is allowed.
    is_read_only = False
    owner = ""
    with contextlib.suppress(OSError):
        is_read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
        status = folder.stat()
        owner = f" has owner {status.st_uid}, group {status.st_gid} and mode {stat.S_IMODE(status.st_mode):o};"

    # The volume is read-only for everybody.
    if is_read_only:
        return f"{folder} is on a read-only volume: mount it for writing, or use another volume"

    # Else owner and mode decide.
    problem = f"permission denied: {folder}{owner} this process is user {os.geteuid()}, group {os.getegid()}"
    # What can be read must have been refused for writing.
    needed_access = os.R_OK | os.X_OK if folder.is_dir() else os.R_OK
    if not os.access(folder, needed_access):
        return f"{problem}: make it readable for that user or group"
    return (
        f"{problem}: change owner or mode of it. In a Job, the volume has ignored fsGroup, as NFS and hostPath volumes "
        f"do: make its root writable for group {os.getegid()}, or use a StorageClass that honours fsGroup"
    )


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `function` in a thread; a cancellation waits for its end, so nothing writes after the lock is released."""
    running = asyncio.get_running_loop().run_in_executor(_THREADS, functools.partial(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        # An exception that nobody fetches would be logged.
        if not running.cancelled():
            running.exception()  # the caller is cancelled and cannot handle it
        raise


async def hash_file(
    file: FileIO | BufferedReader, size_bytes: int, on_hashed: Callable[[int], None]
) -> "hashlib._Hash":
    """Return the SHA-256 state over the first `size_bytes` from the current position, in steps off the event loop."""
    digest = hashlib.sha256()
    hashed_bytes = 0
    # Report the progress after each step.
    while hashed_bytes < size_bytes:
        step_bytes = await in_thread(_hash_step, file, size_bytes - hashed_bytes, digest)
        if not step_bytes:
            break  # the file is shorter than `size_bytes`
        hashed_bytes += step_bytes
        on_hashed(hashed_bytes)
    return digest


def _hash_step(file: FileIO | BufferedReader, most_bytes: int, digest: "hashlib._Hash") -> int:
    """Hash the next bytes of `file` into `digest`, at most `_HASH_STEP_BYTES`; return how many."""
    left = step_bytes = min(most_bytes, _HASH_STEP_BYTES)
    while left and (block := file.read(min(1 << 20, left))):
        digest.update(block)
        left -= len(block)
    return step_bytes - left


@contextlib.asynccontextmanager
async def locked(path: Path) -> AsyncIterator[None]:
    """Lock the download of `path`; wait while another process has it. The kernel frees the lock of a dead process."""
    lock = path.with_name(f"{path.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        # A blocking flock in a thread could not be cancelled, so it is tried again and again.
        while not try_lock(descriptor):  # noqa: ASYNC110  the holder may be another process
            await asyncio.sleep(_LOCK_RETRY_SECONDS)
        yield
    finally:
        os.close(descriptor)


def read_download_record(path: Path) -> DownloadRecord | None:
    """Return the record of `path`; None if there is none, or the file has changed since."""
    record = durable.read(path.with_name(f"{path.name}.verified.json"), DownloadRecord)
    return record if record and record.holds_for(path) else None


def write_download_record(path: Path, current_path: Path, source: str, revision: str, sha256: str) -> DownloadRecord:
    """Write the record of the verified file that is, or will be, at `path`; at present it is at `current_path`."""
    status = current_path.stat()
    record = DownloadRecord(
        source=source,
        revision=revision,
        sha256=sha256,
        size_bytes=status.st_size,
        mtime_nanoseconds=status.st_mtime_ns,
    )
    durable.write(path.with_name(f"{path.name}.verified.json"), record)
    return record


def write_link_record(path: Path, verified: VerifiedFile, source: str, revision: str) -> None:
    """Write the record of a link at `path` to a file as it was verified, which others may change. Raises OSError."""
    facts = {name: getattr(verified, name) for name in VerifiedFile.__struct_fields__}
    record = DownloadRecord(source=source, revision=revision, **facts)
    durable.write(path.with_name(f"{path.name}.verified.json"), record)


def require_space(path: Path, needed_bytes: int) -> None:
    """Raise NoSpace unless `needed_bytes` fit on the volume of `path`, which is a folder or a file in one."""
    free = shutil.disk_usage(path if path.is_dir() else path.parent).free
    if needed_bytes > free:
        raise ArtifactError(
            "NoSpace",
            f"{path}: needs {size_text(needed_bytes)} more, {size_text(free)} are free: free "
            f"{size_text(needed_bytes - free)} or use a larger volume",
            retryable=True,
        )


@dataclasses.dataclass(eq=False)
class Segment:
    """Bytes that one connection fetches: from `position`, the next one to write, to the one before `end`."""

    position: int
    end: int


class PartialDownload:
    """The partial download of `path`, to which several connections write; made and closed under the lock."""

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        """The file with its final name."""
        self.partial_path = path.with_name(f"{path.name}.part")
        """The file with the bytes so far, each at its final offset."""

        # Open the partial file, but follow no link: one that somebody planted would have another file overwritten.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.partial_path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "is no regular file: delete it", str(self.partial_path))
        # Unbuffered: every counted byte is written, and closing cannot fail. Its position is where the hash is.
        self._file = os.fdopen(descriptor, "r+b", buffering=0)

        # Text of the source, and the file that names it, the version of the bytes so far, and those that are missing.
        self._source = source
        self._state_path = path.with_name(f"{path.name}.part.json")
        self._state_lock = asyncio.Lock()
        self._written = asyncio.Event()
        self._forget("", SEGMENT_BYTES)

    def _forget(self, validator: str, total_bytes: int) -> None:
        """Begin without any bytes; a file counts as one segment until a server states its size."""
        self.validator = validator
        """HTTP validator of the bytes so far, for If-Range; empty when they cannot be continued."""
        self.total_bytes = total_bytes
        self.has_inherited_bytes = False
        """True when the file has bytes of an earlier process, which a power failure may have damaged."""
        self.digest = hashlib.sha256()
        """SHA-256 state over the bytes that `hash_in_order` has hashed."""
        self.free = [(0, total_bytes)]
        """The missing ranges, sorted, but those in `_taken`, which connections fetch."""
        self._taken: set[Segment] = set()
        self._unrecorded_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that are on disk."""
        return self.total_bytes - sum(end - first for first, end in self._list_missing())

    def _list_missing(self) -> list[tuple[int, int]]:
        """Return the ranges that are not on disk, sorted."""
        unwritten = [(segment.position, segment.end) for segment in self._taken if segment.position < segment.end]
        return sorted(self.free + unwritten)

    def resume(self) -> None:
        """Continue the download of an earlier process, if it is of this source and has a validator of its version."""
        state = durable.read(self._state_path, _PartialState)
        if state is None or state.source != self._source or not state.validator:
            return
        end = state.size_bytes
        for first, behind in reversed(state.missing):
            end = first if behind == end else end
        if os.fstat(self._file.fileno()).st_size >= end:  # else somebody has cut it
            self._forget(state.validator, state.size_bytes)
            # The last byte of a complete file is requested again: a 206 names its version, and a 416 does not.
            self.free = state.missing or [(end - 1, end)]
            self.has_inherited_bytes = True

    async def restart(self, validator: str = "", total_bytes: int = SEGMENT_BYTES) -> None:
        """Delete the bytes, and start the version that `validator` names."""
        self._state_path.unlink(missing_ok=True)
        self._file.seek(0)
        await in_thread(self._file.truncate)
        self._forget(validator, total_bytes)

    def take_segment(self, connections: int) -> Segment | None:
        """Return the next bytes for one of several connections; None if the others fetch all that is missing.

        The last segments are shorter, so that all connections end at about the same time.
        """
        if not self.free:
            return None
        share = sum(end - first for first, end in self.free) // connections
        first, end = self.free.pop(0)
        if connections > 1 and self.total_bytes > SEGMENT_BYTES:
            behind, end = end, min(end, first + max(SEGMENT_BYTES // 16, min(SEGMENT_BYTES, share)))
            self.free[:0] = [(end, behind)] if end < behind else []
        segment = Segment(first, end)
        self._taken.add(segment)
        return segment

    def give_back(self, segment: Segment) -> None:
        """End the work on a segment; what is missing of it is for others."""
        if segment in self._taken and segment.position < segment.end:
            bisect.insort(self.free, (segment.position, segment.end))
        self._taken.discard(segment)

    async def write(self, segment: Segment, block: bytes) -> None:
        """Write the next bytes of a segment, off the event loop."""

        def write() -> None:
            """Write and count all of `block`."""
            unwritten = memoryview(block)
            while unwritten:  # one write may take only a part
                written = os.pwrite(self._file.fileno(), unwritten, segment.position)
                unwritten = unwritten[written:]
                # Counted here, not after the await: the bytes are written even if the caller is cancelled.
                segment.position += written

        await in_thread(write)
        self._written.set()
        self._unrecorded_bytes += len(block)
        # While one connection writes the state, the others may fetch as many bytes again: a kill loses no more.
        most_bytes = SEGMENT_BYTES // 4 * len(self._taken)
        if self._unrecorded_bytes >= most_bytes:
            async with self._state_lock:
                if self._unrecorded_bytes >= most_bytes:  # else another connection has written it meanwhile
                    self._unrecorded_bytes = 0
                    await in_thread(self._write_state, self._list_missing())

    def _write_state(self, missing: list[tuple[int, int]]) -> None:
        os.fsync(self._file.fileno())  # the state must not name bytes that a power failure can still take
        durable.write(self._state_path, _PartialState(self._source, self.validator, self.total_bytes, missing))

    async def hash_in_order(self) -> None:
        """Hash the bytes up to the first missing one, and those that come, until the file is complete."""
        while (hashed_bytes := self._file.tell()) < self.total_bytes:
            self._written.clear()
            end = min([first for first, _ in self._list_missing()], default=self.total_bytes)
            if hashed_bytes == end:
                await self._written.wait()
            elif not await in_thread(_hash_step, self._file, end - hashed_bytes, self.digest):
                raise OSError(errno.EIO, "was cut while it was fetched", str(self.partial_path))

    async def finish(self, revision: str) -> DownloadRecord:
        """Turn the partial file into the final file: flush it to disk, write the record, rename the file."""

        def finish() -> DownloadRecord:
            """Flush, record and rename, in an order that a crash may interrupt after any step."""
            os.fsync(self._file.fileno())
            sha256 = self.digest.hexdigest()
            record = write_download_record(self.path, self.partial_path, self._source, revision, sha256)
            # The record comes first: without it, the complete file would not be known as verified.
            self.partial_path.replace(self.path)
            self._state_path.unlink(missing_ok=True)
            durable.sync_folder(self.path.parent)
            self.validator = ""  # there is nothing left to continue
            return record

        return await in_thread(finish)

    async def aclose(self) -> None:
        """Close the file, and record which bytes it has; delete it if they cannot be continued."""
        with self._file, contextlib.suppress(OSError):  # an earlier state names fewer bytes
            if self.size_bytes and self.validator:
                await in_thread(self._write_state, self._list_missing())
            else:
                self.partial_path.unlink(missing_ok=True)
                self._state_path.unlink(missing_ok=True)
