"""The weights of one machine, stored by content: fetched once, verified once, shared, and kept while in use.

An object is a folder named by the digest of its content. It is created by one rename, when all its files are complete
and verified, so its name proves its content; two sources of the same bytes are one object. Each user of an object holds
a shared lock on the folder. The kernel keeps that lock for every process that has the descriptor: an engine that
inherits it pins its weights even when the agent dies, and no file has to record the users. When the disk is short,
unlocked objects are deleted, least recently used first.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, ParamSpec, TypeVar

import structlog

from artifacts import durable
from artifacts.errors import ArtifactError
from artifacts.fetch import ExpectedFile, FetchedArtifact, ReportProgress, fetch
from artifacts.file_set import FileSet, refuse_digest_of_several_files
from artifacts.folder_lock import is_in_use, protect_from_eviction, try_lock_folder
from artifacts.foreign_stores import NO_FOREIGN_STORES, ForeignStores, WantedFile
from artifacts.manifest import MANIFEST, Manifest, StoredFile, folder_digest
from artifacts.mirrors import parse_mirrors, read_from_any
from artifacts.partial_download import in_thread, locked, translate_os_errors
from artifacts.repositories import local_files
from artifacts.repositories.repository import SourceAccess
from artifacts.retry import Patience
from artifacts.source import Source, cache_key, is_digest, refuse_ollama_source
from artifacts.verified_files import VerifiedFiles
from artifacts.weights_access import AccessRecords, access_key, ask_for_access, list_stored_identities
from crds.size import size_text

P = ParamSpec("P")
H = TypeVar("H", bound="HeldWeights | None")

CheckWeights = Callable[[Path], object]
"""Called with the file or folder of weights; raises ArtifactError if they must not be served."""
SPARE_SHARE: Final = 0.02
"""Share of the volume that downloads leave free: it may be the disk that the owner works on."""

log = structlog.get_logger()


class StoredWeights(NamedTuple):
    """One object, described for users."""

    manifest: Manifest
    used_at: float
    """Time of its last use, in seconds since 1970."""
    in_use: bool


class HeldWeights:
    """Verified weights, not deleted until `release`, nor while any process has `descriptor` open."""

    def __init__(self, path: Path, digest: str, descriptor: int | None = None) -> None:
        self.path = path
        """The file, or the folder of an artifact with several files."""
        self.digest = digest
        """Digest of the content; empty for the owner's own file without an expected digest."""
        self.descriptor = descriptor
        """Descriptor of the lock, for processes to inherit; None for the owner's own file, which is never deleted."""

    def release(self) -> None:
        """Release the lock; may be called twice."""
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                os.utime(self.descriptor)  # the folder's time records its last use
            os.close(self.descriptor)
            self.descriptor = None


class _ObtainRequest(NamedTuple):
    """The arguments of one `obtain`."""

    source: Source
    expected: ExpectedFile
    token: str | None
    check: CheckWeights
    caller_key: str
    """The `access_key` of the caller."""
    mirrors: Sequence[Source]

    @property
    def is_public(self) -> bool:
        """True if nothing secret is needed to fetch it; a query may be a signature."""
        return not self.token and not any("?" in source.text for source in (self.source, *self.mirrors))


class WeightsStore:
    """The store of objects in `folder`, for any number of processes at a time.

    Args:
        folder: made when absent.
        access: settings to read sources, without a token.
        foreign: stores of other programs, for a machine of one owner: nobody is asked who may use their files.
    """

    def __init__(self, folder: Path, access: SourceAccess, foreign: ForeignStores = NO_FOREIGN_STORES) -> None:
        # Complete weights in folders named by their digests, and unfinished downloads.
        self._objects = folder / "objects"
        self._incoming = folder / "incoming"
        self._digest_files = folder / "sources"
        """Folder with one file for each pair of source and revision; the file contains the digest of the object."""
        self._verified = VerifiedFiles(folder / "local")
        """Digests of the owner's own files, and of files of other programs."""
        self.foreign = foreign
        self._access_records = AccessRecords(folder / "access")
        self._settings = access
        self._reserved_bytes: dict[Path, int] = {}
        """The size on disk that each running download may reach, by its folder in `incoming`."""

    async def obtain(
        self,
        source: Source,
        *,
        sha256: str | None,
        revision: str | None,
        token: str | None,
        on_progress: ReportProgress,
        tenant: str = "",
        size_bytes: int | None = None,
        mirrors: Sequence[str] = (),
        check: CheckWeights = lambda _path: None,
    ) -> HeldWeights:
        """Return the weights of `source`, locked against deletion; fetch and verify them first if they are not stored.

        Stored weights that came with a token are used only by a caller whom their server has let in.

        Args:
            source: source of the weights; a file:// source is not copied.
            sha256: expected digest of the file; None accepts any. A folder has none.
            revision: resolved revision; None is the current one, or the one of an earlier download.
            token: bearer token for the source's origin.
            on_progress: called often with the bytes present and the total bytes.
            tenant: namespace that the weights are for.
            size_bytes: size of the file that the inspection found; None accepts any.
            mirrors: further sources of the same weights, asked in order without the token; see `artifacts.mirrors`.
            check: called in a thread with the file or folder; if it raises ArtifactError, a download is not kept.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        expected = ExpectedFile(sha256=sha256, size_bytes=size_bytes, revision=revision)
        mirror_sources = parse_mirrors(source, mirrors, sha256)
        caller_key = access_key(tenant, source, token)
        request = _ObtainRequest(source, expected, token, check, caller_key, mirror_sources)
        refuse_ollama_source(source)
        refuse_digest_of_several_files(source, sha256)

        with translate_os_errors(self._objects):
            if source.scheme == "file":
                return await _check_or_release(await self._hold_local_file(source, sha256, on_progress), check)
            held = await self._find_allowed(request)
            if held:
                return await _check_or_release(held, check)
            # If several tasks or processes need one source, the first fetches it and the others find it.
            async with locked(self._digest_path(source, revision)):
                held = await self._find_allowed(request)
                return await _check_or_release(held, check) if held else await self._fetch_object(request, on_progress)

    async def _find_allowed(self, request: _ObtainRequest) -> HeldWeights | None:
        """Lock and return the stored weights if they are complete and the caller may use them; else None."""
        expected = request.expected
        held = await _hold_in_thread(self.lock_stored, request.source, expected.revision, expected.sha256)
        if held is None:
            return None
        try:
            if await self._may_use(request, held.digest):
                return held
        except BaseException:
            held.release()
            raise
        held.release()
        return None

    async def _may_use(self, request: _ObtainRequest, digest: str) -> bool:
        """Decide whether the caller may use a stored object.

        If no record allows it, ask the server of the source with the caller's token, and record that it has let the
        caller in. Raises ArtifactError.
        """
        revision = request.expected.revision
        access_record = await asyncio.to_thread(self._access_records.read, digest)
        if access_record.allows(request.caller_key):
            return True
        if durable.read(self._digest_path(request.source, revision), str) != digest:
            # This source has not delivered the object, so its answer proves nothing: it has to send all of it.
            return False
        if durable.read(self._object_path(digest) / MANIFEST, Manifest) is None:  # it is not complete
            return False
        settings = dataclasses.replace(self._settings, token=request.token)
        if not await ask_for_access(request.source, settings, revision):
            return False
        await in_thread(self._grant_access, request, digest)
        return True

    def _grant_access(self, request: _ObtainRequest, digest: str) -> None:
        with self._lock_objects():
            self._access_records.grant(digest, request.caller_key, public=request.is_public)

    def lock_stored(self, source: Source, revision: str | None, sha256: str | None) -> HeldWeights | None:
        """Lock and return the stored weights of a source, which counts as their last use; None: absent or incomplete.

        Only sizes and times are compared; nothing is hashed or requested. Raises OSError and ArtifactError.
        """
        digest = sha256 or durable.read(self._digest_path(source, revision), str)
        if not digest:
            return None
        folder = self._object_path(digest)
        descriptor = try_lock_folder(folder, fcntl.LOCK_SH)
        if descriptor is None:
            return None
        with contextlib.ExitStack() as on_return:  # unlocks the folder, except when the weights are returned
            on_return.callback(os.close, descriptor)
            manifest = durable.read(folder / MANIFEST, Manifest)
            if manifest is None or not manifest.is_in(folder):
                return None
            os.utime(descriptor)  # the folder's time records its last use
            on_return.pop_all()  # the lock is kept
        path = folder if manifest.is_folder else folder / manifest.files[0].name
        return HeldWeights(path, manifest.digest, descriptor)

    def stored(self) -> list[StoredWeights]:
        """Describe all objects, the most recently used first. Raises OSError."""
        weights = []
        for folder in _list_folders(self._objects):
            manifest = durable.read(folder / MANIFEST, Manifest)
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if manifest is not None:
                    weights.append(StoredWeights(manifest, folder.stat().st_mtime, in_use=is_in_use(folder)))
        return sorted(weights, key=lambda stored: stored.used_at, reverse=True)

    def identities(self) -> Sequence[str]:
        """Return the `weights_identity` of all complete objects, the most recently used first. Never raises."""
        return list_stored_identities(self._objects, self._digest_files)

    def remove(self, digest: str) -> bool:
        """Delete one object; return False when it is in use. Raises OSError and ArtifactError."""
        with self._lock_objects():
            return self._remove_unused(self._object_path(digest)) is not None

    def make_room(self, needed_bytes: int, incoming: Path) -> None:
        """Reserve `needed_bytes` more for the download in the folder `incoming`, after evicting what is not in use.

        Raises OSError, and ArtifactError with reason NoSpace.
        """
        with self._lock_objects():
            # Its own former reservation must not count as taken.
            self._reserved_bytes.pop(incoming, None)
            self._evict_until_free(needed_bytes)
            self._reserved_bytes[incoming] = _disk_bytes(incoming) + needed_bytes

    def _evict_until_free(self, needed_bytes: int) -> None:
        """Delete unused objects and downloads, least recently used first, until `needed_bytes` are free.

        What is left for the owner of the disk, and reserved for running downloads, does not count as free. If deleting
        all would not be enough, delete nothing and raise ArtifactError with reason NoSpace. Raises OSError.
        """
        usage = shutil.disk_usage(self._objects.parent)
        # Kept free: a share for the owner, and the bytes that running downloads may still write.
        spare = int(usage.total * SPARE_SHARE)
        spare += sum(max(0, most - _disk_bytes(folder)) for folder, most in list(self._reserved_bytes.items()))

        missing = needed_bytes + spare - usage.free
        folders = [*_list_folders(self._objects), *_list_folders(self._incoming)] if missing > 0 else []
        unused = [(folder.stat().st_mtime, folder) for folder in folders if not is_in_use(folder)]
        evictable = sum(_disk_bytes(folder) for _, folder in unused)
        if evictable < missing:
            raise ArtifactError(
                "NoSpace",
                f"{self._objects.parent}: needs {size_text(needed_bytes)} more; {size_text(usage.free)} are free, "
                f"{size_text(spare)} are kept for the owner and other downloads, and deleting weights that "
                f"nothing uses gives {size_text(evictable)}: free {size_text(missing - evictable)}",
                retryable=True,
            )

        for _, folder in sorted(unused):
            if missing <= 0:
                return
            if freed := self._remove_unused(folder):
                missing -= freed
                log.info("weights_evicted", object=folder.name, freed=size_text(freed))

    async def _hold_local_file(self, source: Source, sha256: str | None, on_progress: ReportProgress) -> HeldWeights:
        """Return the owner's own file or folder; hash a file with an expected digest once, and again after a change."""
        if source.files:
            source = await FileSet(source, self._settings).find_local_file()
        path = await asyncio.to_thread(local_files.locate, source, self._settings.file_root)
        if not sha256:
            return HeldWeights(path, digest="")
        await self._verified.verify(source, path, sha256, on_progress, self._settings.file_root)
        return HeldWeights(path, sha256)

    async def _fetch_object(self, request: _ObtainRequest, on_progress: ReportProgress) -> HeldWeights:
        """Download the weights, check them, and add them to the store; return them locked."""
        source = request.source
        # The folder of a download with a token or a signature is named after its caller, so that no other continues it.
        version = f"{request.expected.revision or ''}{'' if request.is_public else request.caller_key}"
        incoming = self._incoming / cache_key(source.text, version, source.files)
        with protect_from_eviction(incoming):
            try:
                fetched, server, revision = await self._fetch_from_any(request, incoming, on_progress)
            finally:
                # The bytes are on disk now, or do not come any more.
                self._reserved_bytes.pop(incoming, None)
            try:
                await in_thread(request.check, incoming if _is_folder(source, fetched) else fetched[0].path)
            except ArtifactError:
                await in_thread(self._delete, incoming)
                raise
            return await _hold_in_thread(self._add_object, request, server, revision, incoming, fetched)

    async def _fetch_from_any(
        self, request: _ObtainRequest, incoming: Path, on_progress: ReportProgress
    ) -> tuple[list[FetchedArtifact], Source, str]:
        """Fetch the weights from their source, or from a mirror; return the files, their server and its revision."""

        async def read(server: Source, patience: Patience) -> tuple[list[FetchedArtifact], str]:
            """Fetch from `server`, the source or a mirror; `read_from_any` calls it for one after the other."""
            server_request = request  # of the source itself
            if server is not request.source:
                # A mirror has revisions of its own; its bytes are verified by their digest.
                expected = dataclasses.replace(request.expected, revision=None)
                server_request = request._replace(source=server, token=None, expected=expected)
            return await self._download(server_request, incoming, on_progress, patience)

        (files, revision), server = await read_from_any(request.source, request.mirrors, read, self._settings.patience)
        return files, server, revision

    async def _download(
        self, request: _ObtainRequest, incoming: Path, on_progress: ReportProgress, patience: Patience
    ) -> tuple[list[FetchedArtifact], str]:
        """Fetch the file or files of one server to `incoming`; return them and their revision."""
        source, expected = request.source, request.expected
        access = dataclasses.replace(self._settings, token=request.token, patience=patience)

        async def make_room(needed_bytes: int) -> None:
            """Reserve space for this download, off the event loop, before its bytes are written, if there are any."""
            if needed_bytes:
                await in_thread(self.make_room, needed_bytes, incoming)

        if not source.has_listing:
            if expected.sha256:
                wanted = WantedFile(source, expected.sha256)
                await self.foreign.link_file(wanted, incoming / source.file, self._verified, on_progress)
            one = await fetch(source, incoming, access, expected, on_progress=on_progress, make_room=make_room)
            return [one], one.revision
        files, listing = await self.foreign.list_chosen(source, access, expected.revision)
        linked_bytes = await self.foreign.link_files(files, listing, incoming, self._verified, on_progress)
        # Reserve space for all files before the first: a refusal now is better than a refusal after hours.
        await make_room(max(0, listing.size_bytes - linked_bytes - await asyncio.to_thread(_disk_bytes, incoming)))
        return await files.fetch(listing, incoming, expected.sha256, on_progress), listing.revision

    def _add_object(
        self, request: _ObtainRequest, server: Source, revision: str, incoming: Path, fetched: Sequence[FetchedArtifact]
    ) -> HeldWeights:
        """Make the fetched files an object of the store and return it locked.

        1. Write the digest file, by which later requests for the source at that revision find the object. Bytes of a
           mirror or of another revision get none, unless the source itself names their digest.
        2. Rename the download's folder to the digest of its content. If another source had the same bytes, use these.
           Until the rename it is an unfinished download: after a crash the next call repeats this step.
        3. Delete what the download kept beside the files.
        """
        source, requested_revision = request.source, request.expected.revision
        files = tuple(StoredFile.of(artifact.path, artifact.sha256) for artifact in fetched)
        is_folder = _is_folder(source, fetched)
        digest = folder_digest(files) if is_folder or len(files) > 1 else files[0].sha256

        # 1. Record the digest of the source.
        is_digest_stated = source.scheme == "oci" and source.is_pinned
        # True if the source itself sent the bytes, and at the requested revision if there is one.
        is_delivered = server is source and requested_revision in {None, "", revision}
        folder = self._object_path(digest)  # it refuses a digest that is none, before that is written
        if is_digest_stated or (is_delivered and all(artifact.is_of_source for artifact in fetched)):
            durable.write(self._digest_path(source, requested_revision), digest)

        # 2. Add the object.
        manifest = Manifest(source=server.display, revision=revision, digest=digest, files=files, is_folder=is_folder)
        with self._lock_objects():
            # A file of another program may have come with a token.
            is_public = request.is_public and not any(file.inode for file in files)
            self._access_records.grant(digest, request.caller_key, public=is_public)
            held = self.lock_stored(source, requested_revision, digest)
            if held:
                self._delete(incoming)  # another source had the same bytes
                return held
            durable.write(incoming / MANIFEST, manifest)
            if folder.exists():
                self._delete(folder)  # it is damaged
            incoming.rename(folder)
            durable.sync_folder(folder.parent)
            held = self.lock_stored(source, requested_revision, digest)

        # 3. Delete what the download kept beside the files.
        for path in folder.iterdir():
            if path.name not in {MANIFEST, *(file.name for file in files)}:
                path.unlink()
        if held is None:
            problem = "another process changed it right after the download"
            raise ArtifactError("StorageFailed", f"{folder}: {problem}", retryable=True)
        return held

    def _object_path(self, digest: str) -> Path:
        """Return the folder of an object. Raises SourceInvalid for a digest that would name another file."""
        if not is_digest(digest):
            problem = f"sha256 {digest[:80]!r} is none: give 64 lower-case hexadecimal digits"
            raise ArtifactError("SourceInvalid", problem)
        return self._objects / digest

    def _digest_path(self, source: Source, revision: str | None) -> Path:
        """Return the path of the file with the digest of the object of a source at a revision."""
        return self._digest_files / f"{cache_key(source.text, revision or '', source.files)}.json"

    @contextlib.contextmanager
    def _lock_objects(self) -> Iterator[None]:
        """Lock the folder of objects: no other thread or process adds or deletes an object meanwhile."""
        self._objects.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._objects, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _remove_unused(self, folder: Path) -> int | None:
        """Delete a folder and return the bytes it had on disk; delete nothing and return None when it is in use."""
        descriptor = try_lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is None:
            return None
        try:
            # Renamed under the lock, so that no process can lock a folder that is only partly deleted.
            freed, trash = _disk_bytes(folder), self._move_to_trash(folder)
        finally:
            os.close(descriptor)
        shutil.rmtree(trash)
        return freed

    def _delete(self, folder: Path) -> None:
        shutil.rmtree(self._move_to_trash(folder))

    def _move_to_trash(self, folder: Path) -> Path:
        """Rename a folder in one step, and return its new path; if the process dies, a later eviction deletes it."""
        self._incoming.mkdir(parents=True, exist_ok=True)
        return folder.rename(self._incoming / f".trash-{secrets.token_hex(4)}")


async def _hold_in_thread(hold: Callable[P, H], *args: P.args, **kwargs: P.kwargs) -> H:
    """Run `hold`, which locks weights, in a thread to its end; unlock them if the caller is cancelled meanwhile."""
    running = asyncio.ensure_future(asyncio.to_thread(hold, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        # Nobody gets the lock any more, so it is released as soon as it is there.
        running.add_done_callback(_release_unclaimed)
        await asyncio.wait([running])
        raise


async def _check_or_release(held: HeldWeights, check: CheckWeights) -> HeldWeights:
    """Return `held` after its check; release it if the check fails."""
    try:
        await in_thread(check, held.path)
    except BaseException:
        held.release()
        raise
    return held


def _is_folder(source: Source, fetched: Sequence[FetchedArtifact]) -> bool:
    """Return whether engines get the folder of these files, and not the first of them."""
    return source.is_folder and not fetched[0].is_gguf


def _release_unclaimed(ended: "asyncio.Future[H]") -> None:
    """Release the weights that a call returned, whose caller was cancelled."""
    held: HeldWeights | None = None if ended.cancelled() or ended.exception() else ended.result()
    if held:
        held.release()


def _list_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.exists() else []


def _disk_bytes(folder: Path) -> int:
    """Return the bytes that deleting `folder` frees."""
    total = 0
    with contextlib.suppress(FileNotFoundError):  # another process may rename it meanwhile
        for path in folder.iterdir():
            total += path.lstat().st_blocks * 512  # the unit of st_blocks, whatever the file system has
    return total
