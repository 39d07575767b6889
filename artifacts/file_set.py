"""Artifacts of several files: the folder of a repository whose files an engine needs, chosen, checked and fetched.

Only files that an engine reads are taken, so code beside the weights is left out.
"""

import asyncio
import dataclasses
from pathlib import Path
from typing import Final

from artifacts import local_files
from artifacts.errors import ArtifactError
from artifacts.fetch import FetchedArtifact, MakeRoom, ReportProgress, fetch_file
from artifacts.folder_config import CHECKED, CONFIG, parse_safe
from artifacts.repositories import open_repository
from artifacts.repository import WEIGHTS, Listing, RepositoryFile, SourceAccess, read_file
from artifacts.retry import Backoff
from artifacts.source import Source
from crds.size import size_text

ADAPTER_CONFIG: Final = "adapter_config.json"
"""The configuration of a folder whose weights are a LoRA adapter."""
_CONFIG_BYTES: Final = 1 << 20
_CHECKED_BYTES: Final = 32 << 20
"""Limit of the other files that are checked: a tokenizer's configuration lists its added tokens."""
_MOST_FILES: Final = 1000


def refuse_digest(source: Source, sha256: str | None) -> None:
    """Raise SourceInvalid for an expected digest of a folder: neither the hub nor a user has one."""
    if sha256 and source.is_folder:
        raise ArtifactError(
            "SourceInvalid",
            f"{source.display}: a folder has no sha256: remove it, and pin a commit with @REVISION instead",
        )


class FileSet:
    """The files of a source that is a folder, with the settings to read them."""

    def __init__(self, source: Source, access: SourceAccess) -> None:
        self._source = source
        self._access = access
        self._repository = open_repository(source, access)

    async def list_chosen(self, revision: str | None) -> Listing:
        """List the files for an engine at a resolved revision; None is the current one.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        listing = await self._repository.list_files(revision)
        files = [file for file in listing.files if "/" not in file.path and not file.path.endswith(".gguf")]
        names = {file.name for file in files}
        if names.isdisjoint({CONFIG, ADAPTER_CONFIG}) or not any(name.endswith(WEIGHTS) for name in names):
            raise ArtifactError(
                "SourceNotFound",
                f"{self._source.display}: has no {CONFIG} with *{WEIGHTS} beside it, so it is no folder of MLX "
                "weights; a GGUF file needs its name in the source: hf://ORG/REPO/FILE.gguf",
            )
        if len(files) > _MOST_FILES:
            problem = f"lists more than {_MOST_FILES} files"
            raise ArtifactError("SourceRefused", f"{self._source.display}: the server {problem}")
        return dataclasses.replace(listing, files=files)

    async def read_config(self, listing: Listing) -> bytes | None:
        """Check the configurations of the folder, and return the text of config.json; None for an adapter.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        found = None
        for file in listing.files:
            if file.path in CHECKED:
                text = await self._read(listing, file, _CONFIG_BYTES if file.path == CONFIG else _CHECKED_BYTES)
                parse_safe(file.path, text, listing.python_files)
                found = text if file.path == CONFIG else found
        return found

    async def _read(self, listing: Listing, file: RepositoryFile, most_bytes: int) -> bytes:
        if file.size_bytes > most_bytes:
            raise ArtifactError("HeaderInvalid", f"{file.path} is longer than {size_text(most_bytes)}")
        backoff = Backoff(self._access.patience)
        while True:
            try:
                async with self._repository.open_file(file.path, listing.revision) as opened:
                    return await read_file(opened, file)
            except ArtifactError as error:
                pause = backoff.pause_seconds(error)
            await asyncio.sleep(pause)

    async def fetch(
        self,
        listing: Listing,
        destination_dir: Path,
        *,
        on_progress: ReportProgress,
        make_room: MakeRoom | None = None,
    ) -> list[FetchedArtifact]:
        """Fetch all listed files, one after the other; a verified file is not fetched again.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        fetched: list[FetchedArtifact] = []
        done = 0
        for file in listing.files:

            def advance(here: int, _total: int | None, before: int = done) -> None:
                on_progress(before + here, listing.size_bytes)

            each = await fetch_file(
                self._repository,
                file.path,
                destination_dir / file.name,
                sha256=file.sha256,
                revision=file.revision or listing.revision,
                on_progress=advance,
                make_room=make_room,
                patience=self._access.patience,
            )
            if each.size_bytes != file.size_bytes:
                # Disk and memory were reserved for the listed size.
                problem = f"listed {file.path} with {file.size_bytes} bytes, but sent {each.size_bytes}"
                raise ArtifactError("SourceRefused", f"{self._source.display}: the server {problem}")
            fetched.append(each)
            done += each.size_bytes
        return fetched


def refuse_stored_code(folder: Path) -> bytes | None:
    """Check the configurations of a folder on this disk, and return its config.json; None if it has none.

    Raises:
        ArtifactError: HeaderInvalid, or CustomCode.
        OSError: a file cannot be read.
    """
    found = None
    python_files = local_files.list_python(folder)
    for name in CHECKED:
        if (folder / name).is_file():
            text = _read_local(folder / name, _CHECKED_BYTES)
            parse_safe(name, text, python_files)
            found = text if name == CONFIG else found
    return found


def _read_local(path: Path, most_bytes: int) -> bytes:
    with path.open("rb") as file:
        text = file.read(most_bytes + 1)
    if len(text) > most_bytes:
        raise ArtifactError("HeaderInvalid", f"{path.name} is longer than {size_text(most_bytes)}")
    return text
