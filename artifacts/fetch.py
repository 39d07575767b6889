"""Weights to a folder: resumed where they were cut, verified, and under their name only when they are whole.

One call for Job, host and command line. It may be killed at any line and called again: a good file that is there is
not fetched again, an unfinished one goes on where it was, if upstream still has the same bytes.
"""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from artifacts import root
from artifacts.errors import ArtifactError
from artifacts.origin import Answer, Origin, RangeRefused, connect
from artifacts.part import Part, Verified, hash_file, locked, open_part, read_verified, storage_faults, write_verified
from artifacts.patience import DEFAULT_PATIENCE, Backoff, Patience
from artifacts.source import Source, refuse_library
from crds.size import size_text

Progress = Callable[[int, int | None], None]
"""Called with bytes that are there and bytes in all (None: unknown)."""
MakeRoom = Callable[[int], Awaitable[None]]
"""Called with bytes that are about to be written; may free some, and need not."""


@dataclasses.dataclass(frozen=True)
class Fetched:
    """A file that is whole.

    Attributes:
        path: where it is; of a file:// source its own real path.
        size_bytes: its size.
        sha256: its digest; empty for a file:// source without an expected one, which nobody asked to hash.
        revision: what was resolved: commit of hf://, entity tag or date of http(s)://, time and size of file://.

    """

    path: Path
    size_bytes: int
    sha256: str
    revision: str


async def fetch(
    source: Source,
    destination_dir: Path,
    *,
    sha256: str | None,
    token: str | None,
    endpoint: str,
    file_root: Path | None,
    revision: str | None,
    on_progress: Progress,
    patience: Patience = DEFAULT_PATIENCE,
    make_room: MakeRoom | None = None,
) -> Fetched:
    """Bring the file of `source` to `destination_dir` and return it; file:// sources stay where they are.

    Args:
        source: what to fetch.
        destination_dir: folder, made if absent.
        sha256: expected digest, 64 lower-case hexadecimal digits; None takes the hub's own word where it has one.
        token: bearer token for the source's origin.
        endpoint: hub of hf:// sources.
        file_root: folder that file:// sources have to be in; None refuses them.
        revision: resolved revision to fetch; None is what the source says now.
        on_progress: called often, in the event loop.
        patience: time-outs and attempts.
        make_room: is asked for space once the size is known.

    Raises:
        ArtifactError: with a reason and whether to try again later.

    """
    refuse_library(source)
    if source.scheme == "file":
        return await _verify_local(source, file_root, sha256, on_progress)
    path = destination_dir / source.file
    with storage_faults(path):
        async with locked(path):
            record = await _present(path, source, sha256, revision, on_progress)
            if not record:
                async with connect(
                    source, token=token, endpoint=endpoint, revision=revision, patience=patience
                ) as origin:
                    download = _Download(
                        source, origin, sha256=sha256, revision=revision, on_progress=on_progress, make_room=make_room
                    )
                    record = await download.run(path, patience)
    on_progress(record.size_bytes, record.size_bytes)
    return Fetched(path, record.size_bytes, record.sha256, record.revision)


async def _verify_local(source: Source, file_root: Path | None, sha256: str | None, on_progress: Progress) -> Fetched:
    path = root.locate(source, file_root)
    with storage_faults(path):
        revision, size = root.revision(path), path.stat().st_size
        if sha256:
            digest = await _digest(path, on_progress)
            if digest != sha256:
                raise _mismatch(source, sha256, digest, "this file")
    return Fetched(path, size, sha256 or "", revision)


async def _present(
    path: Path, source: Source, sha256: str | None, revision: str | None, on_progress: Progress
) -> Verified | None:
    """Return the record of the file that is there already, if it is the one that is wanted."""
    record = read_verified(path)
    if record:
        same = record.source == source.text and revision in (None, record.revision)
        return record if (record.sha256 == sha256 if sha256 else same) else None
    # Put there by somebody else: its digest says whether it is good; without an expected one nothing does.
    if sha256 and await _digest(path, on_progress) == sha256:
        return write_verified(path, path, source.text, revision or "", sha256)
    return None


async def _digest(path: Path, on_progress: Progress) -> str:
    """Return the digest of a file, empty when there is none."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return (await hash_file(file, size, lambda done: on_progress(done, size))).hexdigest()
    return ""


def _mismatch(source: Source, expected: str, got: str, who: str, *, retryable: bool = False) -> ArtifactError:
    return ArtifactError(
        "ChecksumMismatch",
        f"{source.display}: expected sha256 {expected}, but {who} has {got}: correct the sha256 or the source",
        retryable=retryable,
    )


class _Download:
    """One file from one origin, over as many requests as patience allows."""

    def __init__(
        self,
        source: Source,
        origin: Origin,
        *,
        sha256: str | None,
        revision: str | None,
        on_progress: Progress,
        make_room: MakeRoom | None,
    ) -> None:
        self._source = source
        self._origin = origin
        self._sha256 = sha256
        self._revision = revision
        self._on_progress = on_progress
        self._make_room = make_room

    async def run(self, path: Path, patience: Patience) -> Verified:
        backoff = Backoff(patience)
        with open_part(path, self._source.text) as part:
            await part.resume(lambda done: self._on_progress(done, None))
            while True:
                try:
                    return await self._attempt(part)
                except ArtifactError as error:
                    pause = backoff.pause_seconds(error, part.size_bytes)
                except RangeRefused:
                    changed = self._changed("is shorter than what was fetched of it")
                    pause = backoff.pause_seconds(changed, part.size_bytes)
                    part.discard()
                await asyncio.sleep(pause)

    async def _attempt(self, part: Part) -> Verified:
        """Ask for what is missing, verify all, and make it final."""
        if not part.validator and part.size_bytes:
            part.discard()
        async with self._origin.read(part.size_bytes, validator=part.validator) as answer:
            expected = self._expected(answer)
            if answer.first == 0:
                await part.restart(answer.validator)
            elif answer.validator and answer.validator != part.validator:
                # The server ignored If-Range: these bytes would be glued to those of another version.
                part.discard()
                raise self._changed("changed while it was fetched")
            if self._make_room:
                await self._make_room(answer.size_bytes - part.size_bytes)
            part.require_space(answer.size_bytes)
            async for block in answer.blocks:
                await part.append(block)
                self._on_progress(part.size_bytes, answer.size_bytes)
        if part.size_bytes != answer.size_bytes:
            # An answer to a range may be shorter than asked for: the rest is asked for next.
            have = f"{size_text(part.size_bytes)} of {size_text(answer.size_bytes)}"
            raise ArtifactError(
                "SourceUnreachable", f"{self._source.display}: the server stopped at {have}", retryable=True
            )
        if expected and part.sha256 != expected:
            got, inherited = part.sha256, part.inherited
            part.discard()
            # What an earlier process left may have been spoiled by a power cut: one start from zero heals that.
            raise _mismatch(self._source, expected, got, "what was fetched", retryable=inherited)
        return await part.finish(answer.revision)

    def _expected(self, answer: Answer) -> str | None:
        """Return the digest that the bytes have to have; raises at once when it is clear that they cannot."""
        if self._sha256 and answer.sha256 and self._sha256 != answer.sha256:
            raise _mismatch(self._source, self._sha256, answer.sha256, "the hub's file")
        expected = self._sha256 or answer.sha256
        # The URL of a hub pins the revision; any other server sends what it has now.
        pinned = expected or self._source.scheme == "hf"
        if not pinned and self._revision and answer.revision != self._revision:
            raise ArtifactError(
                "SourceChanged",
                f"{self._source.display}: has revision {answer.revision or 'unknown'} now, not {self._revision}: "
                "make the Model anew to accept it",
            )
        return expected

    def _changed(self, what: str) -> ArtifactError:
        return ArtifactError("SourceChanged", f"{self._source.display}: upstream {what}", retryable=True)
