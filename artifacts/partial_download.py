"""A download on disk: partial beside its final name, locked while a process works on it, renamed when complete.

The files beside `FILE` are `FILE.part` and `FILE.part.json` (source and version of the partial download),
`FILE.verified.json` (the verified digest, with the size and time of the file) and `FILE.lock`. The process may be
killed at any line: the partial file is emptied before its state names another version, and the record of the
verification is written before the rename, since the record is valid only for a file of that size and time.
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from artifacts import durable
from artifacts.errors import ArtifactError
from crds.size import size_text

P = ParamSpec("P")
R = TypeVar("R")

_HASH_STEP_BYTES = 64 << 20
_LOCK_RETRY_SECONDS = 0.2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


class VerifiedFile(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A verified digest, valid for a file while its size and time are these."""

    sha256: str
    size_bytes: int
    mtime_nanoseconds: int

    def holds_for(self, path: Path) -> bool:
        """Return whether the file at `path` still has the size and time that were verified."""
        with contextlib.suppress(OSError):
            status = path.stat()
            return (status.st_size, status.st_mtime_ns) == (self.size_bytes, self.mtime_nanoseconds)
        return False


class DownloadRecord(VerifiedFile, frozen=True, kw_only=True, rename="camel"):
    """The content of `FILE.verified.json`: a verified digest, and the source that the file was fetched from."""

    source: str
    revision: str


class _PartialState(msgspec.Struct, frozen=True, rename="camel"):
    source: str
    validator: str


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
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
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

    def hash_step() -> int:
        """Hash the next bytes of `file` into `digest`, at most `_HASH_STEP_BYTES`; return how many are hashed then."""
        end = min(size_bytes, hashed_bytes + _HASH_STEP_BYTES)
        position = hashed_bytes
        while position < end and (block := file.read(min(1 << 20, end - position))):
            digest.update(block)
            position += len(block)
        return position

    # Report the progress after each step.
    while hashed_bytes < size_bytes:
        hashed_before = hashed_bytes
        hashed_bytes = await in_thread(hash_step)
        if hashed_bytes == hashed_before:
            break  # the file is shorter than `size_bytes`
        on_hashed(hashed_bytes)
    return digest


@contextlib.asynccontextmanager
async def locked(path: Path) -> AsyncIterator[None]:
    """Lock the download of `path`; wait while another process has it. The kernel frees the lock of a dead process."""
    lock = path.with_name(f"{path.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        # A blocking flock in a thread could not be cancelled, so it is tried again and again.
        while not _try_lock(descriptor):  # noqa: ASYNC110  the holder may be another process
            await asyncio.sleep(_LOCK_RETRY_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock an open file; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_download_record(path: Path) -> DownloadRecord | None:
    """Return the record of `path`; None if there is none, or the file has changed since."""
    record = durable.read(path.with_name(f"{path.name}.verified.json"), DownloadRecord)
    return record if record and record.holds_for(path) else None


def write_download_record(path: Path, current_path: Path, source: str, revision: str, sha256: str) -> DownloadRecord:
    """Write the record of the verified file that is, or will be, at `path`; at present it is at `current_path`."""
    status = current_path.stat()
    record = DownloadRecord(
        source=source, revision=revision, sha256=sha256, size_bytes=status.st_size, mtime_nanoseconds=status.st_mtime_ns
    )
    durable.write(path.with_name(f"{path.name}.verified.json"), record)
    return record


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


class PartialDownload:
    """The partial download of `path`; made and closed under the lock."""

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        """The file with its final name."""
        self.partial_path = path.with_name(f"{path.name}.part")
        """The file with the bytes so far."""

        # Open the partial file, but follow no link: one that somebody planted would have another file overwritten.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.partial_path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "is no regular file: delete it", str(self.partial_path))
        # Unbuffered: every counted byte is written, and closing cannot fail on buffered bytes.
        self._file = os.fdopen(descriptor, "r+b", buffering=0)

        # Text of the source, and the file that names it and the version of the bytes so far.
        self._source = source
        self._state_path = path.with_name(f"{path.name}.part.json")

        # State of the bytes so far, which the methods keep up to date: SHA-256, number, version and origin.
        self._digest = hashlib.sha256()
        self.size_bytes = 0
        self.validator = ""
        """HTTP validator of the bytes so far, for If-Range; empty when they cannot be continued."""
        self.has_inherited_bytes = False
        """True when the file has bytes of an earlier process, which a power failure may have damaged."""

    @property
    def sha256(self) -> str:
        """Digest of the bytes so far."""
        return self._digest.hexdigest()

    async def resume(self, on_hashed: Callable[[int], None]) -> None:
        """Continue the download of an earlier process: hash its bytes and keep all but the last one.

        Nothing is done if it is of another source or has fewer than two bytes; or if it has no validator, an entity tag
        or date that shows whether the server still has the same version.
        """
        state = durable.read(self._state_path, _PartialState)
        if state is None or state.source != self._source or not state.validator:
            return
        # The last byte is requested again: a complete file then gets a 206, and not a 416, which names no version.
        kept_bytes = os.fstat(self._file.fileno()).st_size - 1
        if kept_bytes < 1:
            return

        # Hash the kept bytes, and continue behind them.
        self._file.seek(0)
        self._digest = await hash_file(self._file, kept_bytes, on_hashed)
        self._file.truncate(kept_bytes)
        self._file.seek(kept_bytes)
        self.size_bytes = kept_bytes
        self.validator = state.validator
        self.has_inherited_bytes = True

    async def restart(self, validator: str) -> None:
        """Empty the file, and start the version that `validator` names."""
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self.size_bytes, self.validator, self.has_inherited_bytes = 0, validator, False
        # Written after the file was emptied, so that it never names the version of other bytes.
        await in_thread(durable.write, self._state_path, _PartialState(self._source, validator))

    async def append(self, block: bytes) -> None:
        """Write and hash the next bytes, off the event loop."""

        def write() -> None:
            """Write all of `block`, then hash and count it."""
            unwritten = memoryview(block)
            while unwritten:  # one write may take only a part
                unwritten = unwritten[self._file.write(unwritten) :]
            self._digest.update(block)
            # Counted here, not after the await: the bytes are written even if the caller is cancelled.
            self.size_bytes += len(block)

        await in_thread(write)

    async def finish(self, revision: str) -> DownloadRecord:
        """Turn the partial file into the final file: flush it to disk, write the record, rename the file."""

        def finish() -> DownloadRecord:
            """Flush, record and rename, in an order that a crash may interrupt after any step."""
            os.fsync(self._file.fileno())
            record = write_download_record(self.path, self.partial_path, self._source, revision, self.sha256)
            # The record comes first: without it, the complete file would not be known as verified.
            self.partial_path.replace(self.path)
            self._state_path.unlink(missing_ok=True)
            durable.sync_folder(self.path.parent)
            return record

        return await in_thread(finish)

    def discard(self) -> None:
        """Delete the downloaded bytes; the next attempt starts from the beginning."""
        self._file.seek(0)
        self._file.truncate()
        self._state_path.unlink(missing_ok=True)
        self._digest = hashlib.sha256()
        self.size_bytes, self.validator, self.has_inherited_bytes = 0, "", False

    def close(self) -> None:
        """Close the file; delete it when it is empty."""
        self._file.close()
        # 0: no bytes that a later process could continue.
        if not self.size_bytes:
            self.partial_path.unlink(missing_ok=True)
            self._state_path.unlink(missing_ok=True)
