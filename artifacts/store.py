"""Weights on one machine by their content: fetched once, verified once, shared, and kept while anything uses them.

An object is a folder named by the digest of what it holds. It comes into being by one rename, when all of it is here
and verified, so that its name is a proof; two sources of the same bytes are one object. Whoever uses it holds a shared
lock on the folder. The kernel keeps that lock for every process that has the descriptor: an engine that inherits it
pins its weights over the death of the agent, and nobody has to remember who uses what. When the disk is short, what is
not locked goes, least recently used first.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, ParamSpec, TypeVar

import msgspec
import structlog

from artifacts import durable, root
from artifacts.errors import ArtifactError
from artifacts.fetch import Fetched, Progress, fetch
from artifacts.folder import Folder, refuse_digest
from artifacts.part import in_thread, locked, storage_faults
from artifacts.patience import DEFAULT_PATIENCE, Patience
from artifacts.source import Source, cache_key, refuse_library
from crds.size import size_text

P = ParamSpec("P")
H = TypeVar("H", bound="Held | None")

SPARE_SHARE: Final = 0.02
"""Share of the volume that fetching leaves free: it may be the disk that the owner works on."""
_MANIFEST: Final = ".manifest.json"

log = structlog.get_logger()


class File(msgspec.Struct, frozen=True, rename="camel"):
    """One verified file; it is the same as long as size and time are these."""

    name: str
    size_bytes: int
    sha256: str
    mtime_nanoseconds: int

    @classmethod
    def of(cls, path: Path, sha256: str) -> "File":
        """Describe the file at `path`. Raises OSError."""
        stat = path.stat()
        return cls(path.name, stat.st_size, sha256, stat.st_mtime_ns)

    def is_at(self, path: Path) -> bool:
        """Return whether the file at `path` is still the one that was verified."""
        try:
            return File.of(path, self.sha256) == self
        except OSError:
            return False


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """What an object is. `source` and `revision` are those that brought it; others may have the same bytes."""

    source: str
    revision: str
    digest: str
    files: tuple[File, ...]
    is_folder: bool = False
    """Engines get the folder, not the one file in it."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def is_in(self, folder: Path) -> bool:
        """Return whether all of it is in `folder` as it was verified."""
        return bool(self.files) and all(file.is_at(folder / file.name) for file in self.files)


class Stored(NamedTuple):
    """One object for people."""

    manifest: Manifest
    used_at: float
    """When something last began or ended to use it, in seconds since 1970."""
    in_use: bool


class Held:
    """Verified weights that stay where they are until `release`, and while any process has `descriptor` open."""

    def __init__(self, path: Path, digest: str, descriptor: int | None = None) -> None:
        self.path = path
        """The file, or the folder of an artifact with several files."""
        self.digest = digest
        """What they are, by content; empty for the owner's own file of which no digest was asked."""
        self.descriptor = descriptor
        """Of the lock, for processes that are to hold it too; None for the owner's own file, which is never deleted."""

    def release(self) -> None:
        """Let go of them; may be called twice."""
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                os.utime(self.descriptor)  # it was used until now
            os.close(self.descriptor)
            self.descriptor = None


class Store:
    """The objects in `folder`, for any number of processes at a time.

    Args:
        folder: made when absent.
        endpoint: hub of hf:// sources.
        file_root: folder that file:// sources have to be in; None refuses them.
        patience: time-outs and attempts.
    """

    def __init__(
        self, folder: Path, *, endpoint: str, file_root: Path | None, patience: Patience = DEFAULT_PATIENCE
    ) -> None:
        self._objects = folder / "objects"
        self._incoming = folder / "incoming"
        self._names = folder / "names"
        self._local = folder / "local"
        self._endpoint = endpoint
        self._file_root = file_root
        self._patience = patience
        self._promised: dict[Path, int] = {}
        """Bytes that each folder of a running fetch may come to have on the disk."""

    async def obtain(
        self, source: Source, *, sha256: str | None, revision: str | None, token: str | None, on_progress: Progress
    ) -> Held:
        """Return the weights of `source`, after fetching and verifying what is not here.

        Args:
            source: what to obtain; file:// sources stay where they are.
            sha256: digest that the file must have; None takes what the source has. A folder has none.
            revision: resolved revision; None is what the source says now, or said when it was fetched.
            token: bearer token for the source's origin.
            on_progress: called often with bytes here and bytes in all.

        Raises:
            ArtifactError: with a reason and whether to try again later.
        """
        refuse_library(source)
        refuse_digest(source, sha256)
        with storage_faults(self._objects):
            if source.scheme == "file":
                return await self._in_place(source, sha256, on_progress)
            held = await _held_in_thread(self.find, source.text, revision, sha256)
            if held:
                return held
            # Of several that want one source, in any process, the others find what the first has fetched.
            async with locked(self._name(source.text, revision)):
                held = await _held_in_thread(self.find, source.text, revision, sha256)
                return held or await self._fetch(source, sha256, revision, token, on_progress)

    def find(self, source: str, revision: str | None, sha256: str | None) -> Held | None:
        """Hold what is here of an hf:// or http(s):// source; None when it is not here whole.

        Nothing is hashed and nobody is asked. Raises OSError and SourceError.
        """
        digest = sha256 or durable.read(self._name(source, revision), str)
        folder = self._objects / digest if digest else None
        descriptor = _lock(folder, fcntl.LOCK_SH) if folder else None
        if folder is None or descriptor is None:
            return None
        with contextlib.ExitStack() as on_return:
            on_return.callback(os.close, descriptor)
            manifest = durable.read(folder / _MANIFEST, Manifest)
            if manifest is None or not manifest.is_in(folder):
                return None
            os.utime(descriptor)  # its time is when it was last used
            on_return.pop_all()
        return Held(folder if manifest.is_folder else folder / manifest.files[0].name, manifest.digest, descriptor)

    def stored(self) -> list[Stored]:
        """Describe what is here, the most recently used first. Raises OSError."""
        found = []
        for folder in _folders(self._objects):
            manifest = durable.read(folder / _MANIFEST, Manifest)
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if manifest is not None:
                    found.append(Stored(manifest, folder.stat().st_mtime, in_use=_is_locked(folder)))
        return sorted(found, key=lambda stored: -stored.used_at)

    def remove(self, digest: str) -> bool:
        """Delete one object; False when something uses it. Raises OSError."""
        with self._alone():
            return self._remove(self._objects / digest) is not None

    def make_room(self, needed_bytes: int, incoming: Path) -> None:
        """Promise that `needed_bytes` more fit into `incoming` and the owner has some space.

        Deletes what nothing uses, least recently used first; nothing when all of it would not be enough.

        Raises OSError, and ArtifactError with reason NoSpace.
        """
        with self._alone():
            self._promised.pop(incoming, None)
            self._make_room(needed_bytes)
            self._promised[incoming] = _disk_bytes(incoming) + needed_bytes

    def _make_room(self, needed_bytes: int) -> None:
        usage = shutil.disk_usage(self._objects.parent)
        spare = int(usage.total * SPARE_SHARE)
        spare += sum(max(0, most - _disk_bytes(folder)) for folder, most in list(self._promised.items()))
        missing = needed_bytes + spare - usage.free
        folders = [*_folders(self._objects), *_folders(self._incoming)] if missing > 0 else []
        unused = [(folder.stat().st_mtime, folder) for folder in folders if not _is_locked(folder)]
        evictable = sum(_disk_bytes(folder) for _, folder in unused)
        if evictable < missing:
            raise ArtifactError(
                "NoSpace",
                f"{self._objects.parent}: needs {size_text(needed_bytes)} more and leaves {size_text(spare)} to the "
                f"owner and to what is fetched beside it; {size_text(usage.free)} are free, and "
                f"{size_text(evictable)} are weights that nothing uses: free {size_text(missing - evictable)}",
                retryable=True,
            )
        for _, folder in sorted(unused):
            if missing <= 0:
                return
            if freed := self._remove(folder):
                missing -= freed
                log.info("weights deleted to make room", object=folder.name, freed=size_text(freed))

    async def _in_place(self, source: Source, sha256: str | None, on_progress: Progress) -> Held:
        """Verify a file of the owner's once, and again when it has changed."""
        path = await asyncio.to_thread(root.locate, source, self._file_root)
        if not sha256:
            return Held(path, "")
        record = self._local / f"{cache_key(source.text, '')}.json"
        async with locked(record):
            known = await asyncio.to_thread(durable.read, record, File)
            if known is None or known.sha256 != sha256 or not known.is_at(path):
                before = File.of(path, sha256)  # or a change while it is hashed would pass as verified
                await fetch(
                    source,
                    self._incoming,
                    sha256=sha256,
                    token=None,
                    endpoint=self._endpoint,
                    file_root=self._file_root,
                    revision=None,
                    on_progress=on_progress,
                )
                await in_thread(durable.write, record, before)
        return Held(path, sha256)

    async def _fetch(
        self, source: Source, sha256: str | None, revision: str | None, token: str | None, on_progress: Progress
    ) -> Held:
        incoming = self._incoming / cache_key(source.text, revision or "")
        with _kept(incoming):
            try:
                fetched, at = await self._download(
                    source, incoming, sha256=sha256, revision=revision, token=token, on_progress=on_progress
                )
            finally:
                self._promised.pop(incoming, None)
            return await _held_in_thread(self._take_in, source, revision, at, incoming, fetched)

    async def _download(
        self,
        source: Source,
        incoming: Path,
        *,
        sha256: str | None,
        revision: str | None,
        token: str | None,
        on_progress: Progress,
    ) -> tuple[list[Fetched], str]:
        """Bring the file or files of a source to `incoming`, and tell their revision."""

        async def make_room(needed_bytes: int) -> None:
            await in_thread(self.make_room, needed_bytes, incoming)

        if not source.is_folder:
            one = await fetch(
                source,
                incoming,
                sha256=sha256,
                token=token,
                endpoint=self._endpoint,
                file_root=None,
                revision=revision,
                on_progress=on_progress,
                patience=self._patience,
                make_room=make_room,
            )
            return [one], one.revision
        folder = Folder(source=source, token=token, endpoint=self._endpoint, file_root=None, patience=self._patience)
        listing = await folder.listing(revision)
        # For all of it, before the first file: better refused now than after hours.
        await make_room(max(0, listing.size_bytes - await asyncio.to_thread(_disk_bytes, incoming)))
        several = await folder.fetch(listing, incoming, on_progress=on_progress, make_room=make_room)
        return several, listing.revision

    def _take_in(
        self, source: Source, asked: str | None, revision: str, incoming: Path, fetched: Sequence[Fetched]
    ) -> Held:
        """Make what was fetched an object: named after its source and described first, then renamed.

        Until the rename it is an unfinished fetch that only this is left to do of, whatever happens between two lines.
        """
        files = tuple(File.of(each.path, each.sha256) for each in fetched)
        digest = _folder_digest(files) if source.is_folder else files[0].sha256
        manifest = Manifest(source.display, revision, digest, files, source.is_folder)
        folder = self._objects / digest
        durable.write(self._name(source.text, asked), digest)
        with self._alone():
            held = self.find(source.text, asked, digest)
            if held:
                self._discard(incoming)  # another source had the same bytes
                return held
            durable.write(incoming / _MANIFEST, manifest)
            if folder.exists():
                self._discard(folder)  # it is damaged
            incoming.rename(folder)
            durable.sync_folder(folder.parent)
            held = self.find(source.text, asked, digest)
        for path in folder.iterdir():
            if path.name not in {_MANIFEST, *(file.name for file in files)}:
                path.unlink()  # what was of use for fetching only
        if held is None:
            raise ArtifactError("StorageFailed", f"{folder}: was changed the moment it was fetched", retryable=True)
        return held

    def _name(self, source: str, revision: str | None) -> Path:
        """Where it is written which object a source held at a revision."""
        return self._names / f"{cache_key(source, revision or '')}.json"

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other thread or process bring or delete an object meanwhile."""
        self._objects.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._objects, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _remove(self, folder: Path) -> int | None:
        """Delete a folder that nothing uses and return the bytes it had on disk; None when something does."""
        descriptor = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is None:
            return None
        try:
            freed, trash = _disk_bytes(folder), self._put_aside(folder)
        finally:
            os.close(descriptor)
        shutil.rmtree(trash)
        return freed

    def _discard(self, folder: Path) -> None:
        shutil.rmtree(self._put_aside(folder))

    def _put_aside(self, folder: Path) -> Path:
        # Gone in one step; if we die before the rest, it is unused, and goes with the next that is.
        self._incoming.mkdir(parents=True, exist_ok=True)
        return folder.rename(self._incoming / f".trash-{secrets.token_hex(4)}")


async def _held_in_thread(hold: Callable[P, H], *args: P.args, **kwargs: P.kwargs) -> H:
    """Run `hold` in a thread, to its end; what it brings for a caller who is cancelled meanwhile is let go."""
    running = asyncio.ensure_future(asyncio.to_thread(hold, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.add_done_callback(_let_go)
        await asyncio.wait([running])
        raise


def _let_go(ended: "asyncio.Future[H]") -> None:
    held: Held | None = None if ended.cancelled() or ended.exception() else ended.result()
    if held:
        held.release()


def _lock(folder: Path, operation: int) -> int | None:
    """Lock a folder and return the descriptor that holds the lock; None when it is gone or may not be locked so.

    Without LOCK_NB it waits, but never long: who has it exclusively renames the folder and lets go.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, operation)
        # It may have been renamed before we had the lock.
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _is_locked(folder: Path) -> bool:
    descriptor = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


@contextlib.contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """Keep what is unfinished, in a folder that is made when absent, from whoever needs room."""
    descriptor = None
    while descriptor is None:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(folder, fcntl.LOCK_SH)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.utime(descriptor)  # it was worked on until now
        os.close(descriptor)


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.exists() else []


def _disk_bytes(folder: Path) -> int:
    """Bytes that deleting `folder` gives back."""
    total = 0
    with contextlib.suppress(FileNotFoundError):  # who works on it may rename it meanwhile
        for path in folder.iterdir():
            total += path.stat().st_blocks * 512
    return total


def _folder_digest(files: Iterable[File]) -> str:
    """Digest of a folder: of its files' digests and names, as `sha256sum *` prints them."""
    lines = sorted(f"{file.sha256}  {file.name}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
