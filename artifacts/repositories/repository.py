"""The files of a source and their bytes: what each scheme of a source provides, and everything above is built on.

A scheme is a module with a `Repository`: it lists files at a resolved revision, and opens one of them for ranged reads.
Choice, inspection, download and verification of files are the same for all of them; see `file_set`.
"""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Protocol

from artifacts.errors import ArtifactError
from artifacts.formats.gguf_split import is_gguf_name
from artifacts.repositories.address_policy import Networks
from artifacts.repositories.s3_access import ANONYMOUS_S3, S3Access
from artifacts.retry import DEFAULT_PATIENCE, Patience
from artifacts.source import DEFAULT_ENDPOINT, MAX_NAME_BYTES, Source

WEIGHTS: Final = ".safetensors"
_SUFFIXES: Final = (WEIGHTS, ".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of files beside GGUF that engines read; code beside the weights is none of them."""
_MOST_PATH_CHARACTERS: Final = 1024
"""Messages quote paths; S3 has no longer ones."""
_OURS: Final = (".verified.json", ".part.json")
"""Suffixes of the files that this package keeps beside a download."""


class RangeRefused(Exception):  # noqa: N818  a signal between modules, it never leaves the package
    """HTTP 416: the file is shorter than the requested range."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceAccess:
    """The settings to read a source.

    Attributes:
        token: bearer token for the source's origin.
        endpoint: hub of hf:// sources.
        file_root: folder that file:// sources have to be in; None refuses them.
        allowed_networks: private networks that the source may lead to.
        patience: time-outs and attempts.
        hub_cache: cache of the hub's client, from which hf:// sources are read; None asks the hub.
        s3: service and keys of s3:// sources; by default AWS, without keys.

    """

    token: str | None = None
    endpoint: str = DEFAULT_ENDPOINT
    file_root: Path | None = None
    allowed_networks: Networks = ()
    patience: Patience = DEFAULT_PATIENCE
    hub_cache: Path | None = None
    s3: S3Access = ANONYMOUS_S3


@dataclasses.dataclass(frozen=True)
class SourceResponse:
    """The response of a server to a request for bytes of a file.

    Attributes:
        first: offset in the file of the first byte of `blocks`; 0 when the server ignores ranges or the file changed.
        size_bytes: size of the whole file.
        validator: identifies these bytes in a later `read`; empty when the server sends none.
        revision: the resolved revision: commit of a hub, else entity tag or date, else empty.
        sha256: digest that the server states, or None.
        blocks: the bytes.
        is_divisible: whether several requests may fetch the file: it has ranges, and an entity tag names the version.

    """

    first: int
    size_bytes: int
    validator: str
    revision: str
    sha256: str | None
    blocks: AsyncIterator[bytes]
    is_divisible: bool = False


@dataclasses.dataclass(frozen=True)
class RepositoryFile:
    """One file of a repository.

    Attributes:
        path: path below the repository's root, checked by `is_safe_path`.
        size_bytes: its size.
        sha256: its digest if the server states one; a hub does for large files only.
        revision: revision of this file, where each file has its own; empty: that of the listing.

    """

    path: str
    size_bytes: int
    sha256: str | None
    revision: str = ""

    @property
    def name(self) -> str:
        """Name in the folder that it is fetched to."""
        return self.path.rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of a repository that engines may read, at `revision`; sorted by path.

    `revision` is a commit; of a local folder, its newest time and its size. `python_files` are those of a local folder,
    which an engine would find there; those of a server are not fetched.
    """

    revision: str
    files: Sequence[RepositoryFile]
    python_files: Sequence[str] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


class ReadableFile(Protocol):
    """One file, opened for any number of reads."""

    def read(
        self, first: int = 0, last: int | None = None, validator: str = ""
    ) -> AbstractAsyncContextManager[SourceResponse]:
        """Read the bytes from `first` to `last` (inclusive, None is the end), if they still match `validator`.

        Raises:
            ArtifactError: the server refuses or is unreachable, also while the blocks are read.
            RangeRefused: the file has no byte `first`.
        """


class Repository(Protocol):
    """The files of one source; that of a single file has one, at `source.path`."""

    async def list_files(self, revision: str | None) -> Listing:
        """List the files that `is_wanted`, at a resolved revision; None is the current one.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """

    def file_source(self, path: str, revision: str | None) -> Source:
        """Return the source of the file at `path`: its name in messages, and in the record of its download."""

    def open_file(self, path: str, revision: str | None) -> AbstractAsyncContextManager[ReadableFile]:
        """Open the file at `path`, at a resolved revision; None is the current one. Raises ArtifactError."""


def is_wanted(path: str) -> bool:
    """Decide whether an engine may read the file at `path`, a path that a server or a folder lists."""
    is_read = is_gguf_name(path) or path.endswith(_SUFFIXES)
    return is_read and is_safe_path(path) and not path.endswith(_OURS)


def is_safe_path(path: str) -> bool:
    """Return whether `path` is short, and its segments are safe as names of files: printable, short, no leading dot."""
    return len(path) <= _MOST_PATH_CHARACTERS and all(
        segment and not segment.startswith(".") and segment.isprintable() and len(segment.encode()) <= MAX_NAME_BYTES
        for segment in path.split("/")
    )


async def read_start(opened: ReadableFile, name: str, size_bytes: int, most_bytes: int) -> bytes:
    """Return the first bytes of the file `name` of `size_bytes`: `most_bytes`, or all of a shorter file.

    Raises:
        ArtifactError: the server refuses, is unreachable, or has a file of another size than the listed one.
    """
    wanted = min(most_bytes, size_bytes)
    text = bytearray()
    other_size = f"{name}: is listed with {size_bytes} bytes, but the server has "
    try:
        # Both ends are inclusive, so an empty file is asked for byte 0, too.
        async with opened.read(0, max(0, wanted - 1)) as response:
            if response.size_bytes != size_bytes:
                raise ArtifactError("SourceRefused", f"{other_size}{response.size_bytes}")
            async for block in response.blocks:
                text += block
                if len(text) >= wanted:
                    break
    except RangeRefused as error:
        if size_bytes:  # an empty file has not even a first byte
            raise ArtifactError("SourceRefused", f"{other_size}none") from error

    # The response was cut.
    if len(text) < wanted:
        problem = f"the server sent {len(text)} of {wanted} bytes"
        raise ArtifactError("SourceUnreachable", f"{name}: {problem}", retryable=True)
    del text[wanted:]  # the last block may end behind them
    return bytes(text)
