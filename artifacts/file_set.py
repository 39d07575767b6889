"""Artifacts of several files: those of a repository or folder that an engine needs, checked and fetched.

Only files that an engine reads are taken, so code beside the weights is left out.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

from artifacts.errors import ArtifactError
from artifacts.fetch import ExpectedFile, FetchedArtifact, ReportProgress, fetch_file, verify_local
from artifacts.file_choice import ADAPTER_CONFIG, INDEX, choose_files, choose_indexed
from artifacts.formats import gguf, safetensors_header
from artifacts.formats.chat_template import MOST_TEMPLATE_BYTES, TEMPLATE, TOKENIZER
from artifacts.formats.folder_config import CHECKED, CONFIG, QUANTIZATION, parse_safe
from artifacts.formats.gguf_split import append_part_header, is_gguf_name
from artifacts.formats.safetensors_header import LENGTH_BYTES, SafetensorsHeader
from artifacts.gguf_reader import read_header
from artifacts.repositories import local_files
from artifacts.repositories.repository import WEIGHTS, Listing, ReadableFile, RepositoryFile, SourceAccess, read_start
from artifacts.repositories.schemes import open_repository
from artifacts.retry import Connections, retry_read
from artifacts.source import Source
from crds.size import size_text

T = TypeVar("T")
_ReadFile = Callable[[ReadableFile, RepositoryFile, str], Awaitable[T]]
"""Reads an opened file, of which it gets the listed size, and the name for messages."""

_CONFIG_BYTES: Final = 1 << 20
_CHECKED_BYTES: Final = 16 << 20
"""Limit of the other configurations: that of a tokenizer lists its added tokens."""
_INDEX_BYTES: Final = 32 << 20
"""Limit of an index, which lists all tensors: that of the largest models has 23 MiB."""
_FIRST_BYTES: Final = 64 << 10
"""Read of each safetensors file at first; most headers are shorter."""
_FILES_AT_ONCE: Final = 4  # enough for small files, and large ones share the connections anyway
_CHECKED_CONFIGS: Final = (*CHECKED, QUANTIZATION)
_CONFIGS_WITH_FACTS: Final = (CONFIG, QUANTIZATION, ADAPTER_CONFIG, TOKENIZER)
"""Configurations that facts are read from; of the others it is enough that they are safe."""


def refuse_digest_of_several_files(source: Source, sha256: str | None) -> None:
    """Raise SourceInvalid for an expected digest of several files: neither the hub nor a user has one."""
    if sha256 and source.has_listing and not source.files:
        what = "a split model" if source.is_split else "a folder"
        raise source.error("SourceInvalid", f"{what} has no sha256: remove it, and pin a commit with @REVISION instead")


class FileSet:
    """The files of a source that is a folder or a split model, and the settings to read them.

    With `is_mounted`, engines mount the whole folder, so that no file of it can be left out.
    """

    def __init__(self, source: Source, access: SourceAccess, *, is_mounted: bool = False) -> None:
        self._source = source
        self._access = access
        # True: engines mount the whole folder, so that no file of it can be left out.
        self._is_mounted = is_mounted
        self._repository = open_repository(source, access)

    async def list_chosen(self, revision: str | None) -> Listing:
        """Return the files that an engine needs at a resolved revision; without one, at the current revision.

        The parts of a GGUF model are in order.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        listing = await self._repository.list_files(revision)
        # Users choose the patterns and servers the names: comparing them may take seconds, so a thread does it.
        files = await asyncio.to_thread(choose_files, self._source, listing)

        # An index, if there is one, names the weights that are taken.
        index = next((file for file in files if file.path == INDEX), None)
        if index is not None:
            text = await self._read(listing, index, _INDEX_BYTES)
            files = await asyncio.to_thread(choose_indexed, self._source, files, text, is_mounted=self._is_mounted)
        return dataclasses.replace(listing, files=files)

    def find_source(self, file: RepositoryFile, listing: Listing) -> Source:
        """Return the source of one listed file, at the revision of the listing."""
        return self._repository.file_source(file.path, listing.revision)

    async def verify_local(self, listing: Listing, sha256: str | None, on_progress: ReportProgress) -> FetchedArtifact:
        """Return the files of a file:// source where they are.

        A single GGUF file must have the digest `sha256`, if one is given. Several files have no common digest, so it is
        refused for a split model; a folder is not hashed.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        # The first file shows whether these are the parts of a GGUF model or a folder of other weights.
        first = listing.files[0]
        if is_gguf_name(first.path):
            if sha256 and len(listing.files) > 1:
                raise self.build_digest_refusal(listing)
            source = self._repository.file_source(first.path, None)
            artifact = await verify_local(source, self._access.file_root, sha256, on_progress)

            # `verify_local` has measured the first part; the listing has the size of all.
            return dataclasses.replace(artifact, size_bytes=listing.size_bytes)

        # A folder is not hashed.
        folder = local_files.locate(self._source, self._access.file_root)
        return FetchedArtifact(path=folder, size_bytes=listing.size_bytes, sha256="", revision=listing.revision)

    async def find_local_file(self) -> Source:
        """Return the source of the one GGUF file, or its first part, that the patterns of a file:// source choose.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        listing = await self.list_chosen(None)
        return self._repository.file_source(listing.files[0].path, None)

    async def read_configs(self, listing: Listing) -> dict[str, bytes]:
        """Check that no configuration of the folder makes a loader run Python.

        Return the texts of those that facts are read from, such as config.json, by file name.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        contents = {}
        for file in listing.files:
            # _CHECKED_CONFIGS: files from which loaders take names of classes, such as tokenizer_config.json.
            # _CONFIGS_WITH_FACTS: those of them that facts are read from; the others must only be safe.
            if file.path in _CHECKED_CONFIGS:
                text = await self._read(listing, file, _find_limit(file.path))
                await asyncio.to_thread(parse_safe, file.path, text, listing.python_files)
                if file.path in _CONFIGS_WITH_FACTS:
                    contents[file.path] = text
            elif file.path == TEMPLATE:  # it is no JSON, and one that is too long makes no weights invalid
                is_read = file.size_bytes <= MOST_TEMPLATE_BYTES
                contents[file.path] = await self._read(listing, file, MOST_TEMPLATE_BYTES) if is_read else b""
        return contents

    async def read_weights(self, listing: Listing) -> SafetensorsHeader:
        """Read the headers of all safetensors files.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        weights = [file for file in listing.files if file.path.endswith(WEIGHTS)]
        headers = [await self._open_and_read(listing, file, _read_safetensors_header) for file in weights]
        return safetensors_header.merge(headers)

    async def read_gguf_headers(self, listing: Listing) -> list[gguf.GGUFHeader]:
        """Read the headers of all parts of a GGUF model.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        headers: list[gguf.GGUFHeader] = []
        for file in listing.files:
            try:
                header = await self._open_and_read(listing, file, _read_gguf_header)
            except ArtifactError as error:
                if error.reason != "HeaderInvalid":
                    raise
                # The header does not know which part it is of.
                raise ArtifactError(error.reason, f"{file.path}: {error.message}") from error
            append_part_header(headers, header, file.path)
        return headers

    async def _read(self, listing: Listing, file: RepositoryFile, most_bytes: int) -> bytes:
        """Return the content of a listed file. Raises ArtifactError, also if it is longer than `most_bytes`."""
        if file.size_bytes > most_bytes:
            raise ArtifactError("HeaderInvalid", f"{file.path} is longer than {size_text(most_bytes)}")
        return await self._open_and_read(listing, file, _read_whole)

    async def _open_and_read(self, listing: Listing, file: RepositoryFile, read: _ReadFile[T]) -> T:
        """Open a file and return what `read` returns; repeat it as patience allows."""
        name = self._repository.file_source(file.path, listing.revision).display

        async def read_once() -> T:
            """Open and read the file once; `retry_read` repeats it."""
            async with self._repository.open_file(file.path, listing.revision) as opened:
                return await read(opened, file, name)

        return await retry_read(read_once, self._access.patience)

    async def fetch(
        self,
        listing: Listing,
        destination_dir: Path,
        sha256: str | None,
        on_progress: ReportProgress,
    ) -> list[FetchedArtifact]:
        """Fetch all listed files, a few at a time; a verified file is not fetched again.

        `sha256` is the expected digest of the file if there is only one; it is refused for several files.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        if sha256 and len(listing.files) > 1:
            raise self.build_digest_refusal(listing)
        connections = Connections(self._access.patience, self._source.display)
        files_at_once = asyncio.Semaphore(_FILES_AT_ONCE)
        present_bytes: dict[str, int] = {}  # by path

        async def fetch_one(file: RepositoryFile) -> FetchedArtifact:
            """Fetch a file, or find it verified already."""

            def advance(file_bytes: int, _total: int | None) -> None:
                """Report the bytes of one file as progress of all files; `fetch_file` calls it."""
                present_bytes[file.path] = file_bytes
                on_progress(sum(present_bytes.values()), listing.size_bytes)

            wanted = ExpectedFile(
                sha256=sha256 or file.sha256, size_bytes=file.size_bytes, revision=file.revision or listing.revision
            )
            async with files_at_once:
                return await fetch_file(
                    self._repository,
                    file.path,
                    destination_dir / file.name,
                    wanted,
                    on_progress=advance,
                    connections=connections,
                )

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(fetch_one(file)) for file in listing.files]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    def build_digest_refusal(self, listing: Listing) -> ArtifactError:
        """Return the error for an expected digest of several files."""
        problem = f"files matches {len(listing.files)} files, which have no one sha256: remove it"
        return self._source.error("SourceInvalid", problem)


def _find_limit(name: str) -> int:
    return _CONFIG_BYTES if name in (CONFIG, QUANTIZATION, ADAPTER_CONFIG) else _CHECKED_BYTES


async def _read_whole(opened: ReadableFile, file: RepositoryFile, name: str) -> bytes:
    return await read_start(opened, name, file.size_bytes, file.size_bytes)


async def _read_gguf_header(opened: ReadableFile, file: RepositoryFile, name: str) -> gguf.GGUFHeader:
    """Return the header of a GGUF file. Raises ArtifactError, also if its size is not the listed one."""
    header, response = await read_header(name, opened)
    if response.size_bytes != file.size_bytes:
        problem = f"is listed with {file.size_bytes} bytes, but the server has {response.size_bytes}"
        raise ArtifactError("SourceRefused", f"{name}: {problem}")
    return header


async def _read_safetensors_header(opened: ReadableFile, file: RepositoryFile, name: str) -> SafetensorsHeader:
    """Return the header of a safetensors file: its length in 8 bytes, then as many bytes of JSON.

    Most headers are within the first read; the beginning of a file with a longer one is read again, up to its end.
    """
    text = await read_start(opened, name, file.size_bytes, _FIRST_BYTES)
    end = LENGTH_BYTES + safetensors_header.parse_length(file.path, text, file.size_bytes)
    if len(text) < end:
        text = await read_start(opened, name, file.size_bytes, end)
    text = text[LENGTH_BYTES:end]  # the longer text, up to 32 MiB, is not kept beside this part
    return await asyncio.to_thread(safetensors_header.parse, file.path, text, file.size_bytes)


def read_stored_configs(folder: Path) -> dict[str, bytes]:
    """Check that no configuration of a folder on this disk makes a loader run Python.

    Return the texts of those that facts are read from, such as config.json, by file name.

    Raises:
        ArtifactError: HeaderInvalid, or CustomCode.
        OSError: a file cannot be read.
    """
    contents: dict[str, bytes] = {}
    python_files = local_files.list_python(folder)
    # _CHECKED_CONFIGS: files from which loaders take names of classes, such as tokenizer_config.json.
    # _CONFIGS_WITH_FACTS: those of them that facts are read from; the others must only be safe.
    for name in _CHECKED_CONFIGS:
        if (folder / name).is_file():
            text = _read_local(folder / name, _find_limit(name))
            parse_safe(name, text, python_files)
            if name in _CONFIGS_WITH_FACTS:
                contents[name] = text
    if (template := folder / TEMPLATE).is_file():
        contents[TEMPLATE] = template.read_bytes() if template.stat().st_size <= MOST_TEMPLATE_BYTES else b""
    return contents


def read_stored_weights(folder: Path) -> SafetensorsHeader:
    """Read the headers of all safetensors files of a folder on this disk.

    Raises:
        ArtifactError: HeaderInvalid.
        OSError: a file cannot be read.
    """
    return safetensors_header.merge(_read_stored_header(path) for path in sorted(folder.glob(f"*{WEIGHTS}")))


def _read_stored_header(path: Path) -> SafetensorsHeader:
    """Read the header of a safetensors file on this disk. Raises ArtifactError and OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = safetensors_header.parse_length(path.name, file.read(LENGTH_BYTES), size)
        return safetensors_header.parse(path.name, file.read(length), size)


def _read_local(path: Path, most_bytes: int) -> bytes:
    """Return the content of a stored file. Raises ArtifactError if it is longer than `most_bytes`, and OSError."""
    with path.open("rb") as file:
        text = file.read(most_bytes + 1)
    if len(text) > most_bytes:
        raise ArtifactError("HeaderInvalid", f"{path.name} is longer than {size_text(most_bytes)}")
    return text
