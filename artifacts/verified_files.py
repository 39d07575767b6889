"""Digests of files that stay where they lie, such as the owner's own: verified once, and again after each change.

A record has the digest with inode, size and time of the file that was hashed; it holds for no other file.
"""

import asyncio
from pathlib import Path
from typing import Final

from artifacts import durable
from artifacts.fetch import ReportProgress, verify_local
from artifacts.manifest import StoredFile
from artifacts.partial_download import in_thread, locked
from artifacts.source import Source, cache_key

_ROOT: Final = Path("/")


class VerifiedFiles:
    """The records in `folder`, one for each file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def verify(
        self, source: Source, path: Path, sha256: str, on_progress: ReportProgress, file_root: Path | None = _ROOT
    ) -> StoredFile:
        """Check that a file:// source, which is the file at `path`, has a digest; hash it only if that is not known.

        Return the file as it was verified.

        Raises:
            ArtifactError: it has another digest, cannot be read, or is not below `file_root`.
            OSError: the file or its record cannot be read.
        """
        record_path = self._folder / f"{cache_key(source.text, '')}.json"
        async with locked(record_path):
            verified = await asyncio.to_thread(durable.read, record_path, StoredFile)
            if verified is None or verified.sha256 != sha256 or not verified.is_at(path):
                # Inode, size and time of before the hashing are recorded, so that a change meanwhile is detected.
                verified = StoredFile.observe(path, sha256)
                await verify_local(source, file_root, sha256, on_progress)
                await in_thread(durable.write, record_path, verified)
        return verified
