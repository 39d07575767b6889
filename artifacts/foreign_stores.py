"""Weights that other programs of this machine have stored: the hub's client and Ollama. They are used, never changed.

A file of theirs takes the place of a download as a link: the object of our own store has its name and its digest, which
was verified, and the bytes stay where they lie. If the file is changed or deleted, the object counts as absent.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import structlog

from artifacts.errors import ArtifactError
from artifacts.fetch import ReportProgress
from artifacts.file_set import FileSet
from artifacts.ollama_store import OllamaStore, find_ollama_store
from artifacts.partial_download import locked, read_download_record, write_link_record
from artifacts.repositories.hub_cache import find_cached_blob, find_hub_cache, has_cached_files
from artifacts.repositories.repository import Listing, SourceAccess
from artifacts.retry import SHORT_PATIENCE
from artifacts.source import Source, parse
from artifacts.verified_files import VerifiedFiles

log = structlog.get_logger()


class WantedFile(NamedTuple):
    """A file that is to be fetched, with its digest."""

    source: Source
    sha256: str
    is_stated: bool = False
    """True if the source itself has stated the digest, and not the user."""


@dataclasses.dataclass(frozen=True)
class ForeignStores:
    """The stores of other programs on this machine, for the sources of one owner.

    Attributes:
        hub_cache: the cache of the hub's client; None: none is used.
        ollama: Ollama's store.

    """

    hub_cache: Path | None = None
    ollama: OllamaStore = OllamaStore(())  # noqa: RUF009 - it does not change

    def find_access(self, source: Source, access: SourceAccess, revision: str | None = None) -> SourceAccess | None:
        """Return the settings to read an hf:// source from the hub's cache; None if the cache does not have it."""
        if source.scheme != "hf" or self.hub_cache is None or not has_cached_files(self.hub_cache, source, revision):
            return None
        return dataclasses.replace(access, hub_cache=self.hub_cache)

    async def list_chosen(self, source: Source, access: SourceAccess, revision: str | None) -> tuple[FileSet, Listing]:
        """Return the files of a source that an engine needs: as its server lists them, or the hub's cache in its place.

        The cache is enough for a GGUF model, all parts of which it has. Of a folder it may lack some files, so that it
        counts only while the hub cannot be reached.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        at_server, cached_access = FileSet(source, access), self.find_access(source, access, revision)
        if cached_access is None:
            return at_server, await at_server.list_chosen(revision)
        cached = FileSet(source, cached_access)
        if source.is_gguf:
            with contextlib.suppress(ArtifactError):  # it lacks a part
                return cached, await cached.list_chosen(revision)
        try:
            hurried = FileSet(source, dataclasses.replace(access, patience=SHORT_PATIENCE))
            return at_server, await hurried.list_chosen(revision)
        except ArtifactError as error:
            if error.reason != "SourceUnreachable":
                raise
            with contextlib.suppress(ArtifactError):
                return cached, await cached.list_chosen(revision)
            raise

    async def link_files(
        self,
        files: FileSet,
        listing: Listing,
        folder: Path,
        verified: VerifiedFiles,
        on_progress: ReportProgress,
    ) -> int:
        """Link the listed files that other programs have stored into `folder`; return their bytes. Raises OSError."""
        linked_bytes = 0
        for file in listing.files:
            if file.sha256:
                source = files.find_source(file, listing)
                wanted = WantedFile(source, file.sha256, is_stated=True)
                linked_bytes += await self.link_file(wanted, folder / file.name, verified, on_progress)
        return linked_bytes

    async def link_file(
        self, wanted: WantedFile, destination: Path, verified: VerifiedFiles, on_progress: ReportProgress
    ) -> int:
        """Make `destination` a link to a stored file with a digest, with the record of a file that was verified.

        Return the bytes that need not be fetched: the size of the file, or 0 if no program has stored it. A file with
        another digest than its name says is left alone.

        Raises:
            OSError: the link or its record cannot be written.
        """
        source, sha256 = wanted.source, wanted.sha256
        if not any(self._find_blobs(source, sha256)):
            return 0
        async with locked(destination):
            present = read_download_record(destination)
            if present is not None and present.sha256 == sha256:
                return 0  # it is counted as a file on the disk
            for blob in self._find_blobs(source, sha256):
                try:
                    file = await verified.verify(parse(f"file://{quote(str(blob))}"), blob, sha256, on_progress)
                except (ArtifactError, OSError) as error:
                    log.warning("foreign_weights_refused", path=str(blob), error=str(error))
                    continue
                _link_file(destination, blob)
                # Only what the source itself has stated may be found by its name later.
                origin = source.text if wanted.is_stated else ""
                write_link_record(destination, file, origin, source.revision)
                log.info("foreign_weights_linked", path=str(blob), source=source.display)
                return file.size_bytes
        return 0

    def _find_blobs(self, source: Source, sha256: str) -> Iterator[Path]:
        """Yield the files that are named by a digest, with absolute paths."""
        if self.hub_cache is not None and source.scheme == "hf":
            with contextlib.suppress(OSError):
                if cached := find_cached_blob(self.hub_cache, source.repo, sha256):
                    yield cached.absolute()
        if blob := self.ollama.find_blob(sha256):
            yield blob.absolute()


NO_FOREIGN_STORES: Final = ForeignStores()


def find_foreign_stores(environment: Mapping[str, str] = os.environ) -> ForeignStores:
    """Return the stores of this machine's programs, as their own variables say."""
    return ForeignStores(find_hub_cache(environment), find_ollama_store(environment))


def _link_file(destination: Path, target: Path) -> None:
    """Make a path a link, in one step. Raises OSError."""
    temporary = destination.with_name(f".{destination.name}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(destination)
