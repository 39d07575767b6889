"""Artifacts of several files: a folder of a repository, the form of MLX weights.

The hub lists the files of a revision. Only files that an engine reads are fetched, so code beside the weights is
left out. The commit of the listing pins every file, so two versions are never mixed, even if the branch moves.
"""

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from artifacts import local_files
from artifacts.address_policy import Networks
from artifacts.errors import ArtifactError
from artifacts.fetch import FetchedArtifact, MakeRoom, ReportProgress, fetch
from artifacts.http_source import connect
from artifacts.mlx_config import CHECKED, CONFIG, parse_safe
from artifacts.partial_download import storage_faults
from artifacts.retry import DEFAULT_PATIENCE, Backoff, Patience
from artifacts.source import MAX_NAME_BYTES, Source, is_digest
from crds.size import size_text

_ADAPTER_CONFIG: Final = "adapter_config.json"
"""The configuration of a folder whose weights are a LoRA adapter."""
WEIGHTS: Final = ".safetensors"
_PYTHON: Final = ".py"
_SUFFIXES: Final = (WEIGHTS, ".json", ".txt", ".model", ".jinja", ".tiktoken")
_OURS: Final = (".verified.json", ".part.json")
"""Suffixes of the files that this package keeps beside a download."""
_COMMIT: Final = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_LISTING_BYTES: Final = 8 << 20
_CONFIG_BYTES: Final = 1 << 20
_CHECKED_BYTES: Final = 32 << 20
"""Limit of the other files that are checked: a tokenizer's configuration lists its added tokens."""
_MOST_FILES: Final = 1000


@dataclasses.dataclass(frozen=True)
class FolderFile:
    """One file of a folder. The hub states `sha256` for large files only."""

    name: str
    size_bytes: int
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class FolderListing:
    """The files of a folder at `revision`: a commit; of a local folder, its newest time and its size.

    `python_files` are those of a local folder, which an engine would find there; those of a repository are not fetched.
    """

    revision: str
    files: Sequence[FolderFile]
    python_files: Sequence[str] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def is_adapter(self) -> bool:
        """True for a LoRA adapter, which can only be served with a model."""
        names = {file.name for file in self.files}
        return _ADAPTER_CONFIG in names and CONFIG not in names


class _Lfs(msgspec.Struct):
    sha256: str


class _Sibling(msgspec.Struct, rename={"name": "rfilename"}):
    name: str
    size: int | None = None
    lfs: _Lfs | None = None


class _Repository(msgspec.Struct):
    """The answer of the hub's /api/models/REPO/revision/REVISION?blobs=true: the fields that we read."""

    sha: str
    siblings: list[_Sibling]


def refuse_digest(source: Source, sha256: str | None) -> None:
    """Raise SourceInvalid for an expected digest of a folder: neither the hub nor a user has one."""
    if sha256 and source.is_folder:
        raise ArtifactError(
            "SourceInvalid",
            f"{source.display}: a folder has no sha256: remove it, and pin a commit with @REVISION instead",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """A source that is a folder, with the settings to read it, which mean the same as in `fetch.fetch`."""

    source: Source
    token: str | None
    endpoint: str
    file_root: Path | None
    allowed_networks: Networks = ()
    patience: Patience = DEFAULT_PATIENCE

    async def listing(self, revision: str | None) -> FolderListing:
        """List the files at a resolved revision; None is the current one.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        if self.source.scheme == "file":
            folder = local_files.locate(self.source, self.file_root)
            with storage_faults(folder):
                listing = await asyncio.to_thread(_list_local, self.source, folder, self.file_root)
        else:
            at = quote(revision or self.source.revision, safe="")
            url = f"{self.endpoint.rstrip('/')}/api/models/{self.source.repo}/revision/{at}?blobs=true"
            listing = _parse_listing(self.source, await self._read(url, _LISTING_BYTES))
        names = {file.name for file in listing.files}
        if names.isdisjoint({CONFIG, _ADAPTER_CONFIG}) or not any(name.endswith(WEIGHTS) for name in names):
            raise ArtifactError(
                "SourceNotFound",
                f"{self.source.display}: has no {CONFIG} with *{WEIGHTS} beside it, so it is no folder of MLX weights; "
                "a GGUF file needs its name in the source: hf://ORG/REPO/FILE.gguf",
            )
        return listing

    async def config(self, listing: FolderListing) -> bytes:
        """Return the text of the folder's config.json; an adapter has none.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        size = next(file.size_bytes for file in listing.files if file.name == CONFIG)
        if size > _CONFIG_BYTES:
            raise ArtifactError("HeaderInvalid", f"{CONFIG} is longer than {size_text(_CONFIG_BYTES)}")
        return await self._read_file(listing, CONFIG, _CONFIG_BYTES)

    async def refuse_code(self, listing: FolderListing) -> None:
        """Check the configurations beside config.json.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        for file in listing.files:
            if file.name in CHECKED and file.name != CONFIG:
                parse_safe(file.name, await self._read_file(listing, file.name, _CHECKED_BYTES), listing.python_files)

    async def fetch(
        self, listing: FolderListing, destination_dir: Path, *, on_progress: ReportProgress, make_room: MakeRoom
    ) -> list[FetchedArtifact]:
        """Fetch all listed files of an hf:// folder, one after the other; a verified file is not fetched again.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        fetched: list[FetchedArtifact] = []
        done = 0
        for file in listing.files:

            def advance(here: int, _total: int | None, before: int = done) -> None:
                on_progress(before + here, listing.size_bytes)

            each = await fetch(
                self._source_of(listing, file.name),
                destination_dir,
                sha256=file.sha256,
                token=self.token,
                endpoint=self.endpoint,
                file_root=None,
                revision=listing.revision,
                on_progress=advance,
                make_room=make_room,
                allowed_networks=self.allowed_networks,
                patience=self.patience,
            )
            if each.size_bytes != file.size_bytes:
                # Disk and memory were reserved for the listed size.
                problem = f"listed {file.name} with {file.size_bytes} bytes, but sent {each.size_bytes}"
                raise ArtifactError("SourceRefused", f"{self.source.display}: the hub {problem}")
            fetched.append(each)
            done += each.size_bytes
        return fetched

    async def _read_file(self, listing: FolderListing, name: str, most_bytes: int) -> bytes:
        if self.source.scheme == "file":
            path = local_files.locate(self.source, self.file_root) / name
            with storage_faults(path):
                return await asyncio.to_thread(_read_local, path, most_bytes)
        return await self._read(self._source_of(listing, name).url(self.endpoint), most_bytes)

    def _source_of(self, listing: FolderListing, name: str) -> Source:
        repo, revision = self.source.repo, listing.revision
        return Source("hf", f"hf://{repo}@{revision}/{name}", name, repo, revision, name)

    async def _read(self, url: str, most_bytes: int) -> bytes:
        backoff = Backoff(self.patience)
        while True:
            try:
                async with connect(
                    self.source,
                    token=self.token,
                    endpoint=self.endpoint,
                    allowed_networks=self.allowed_networks,
                    revision=None,
                    patience=self.patience,
                    url=url,
                ) as origin:
                    return await origin.read_whole(most_bytes)
            except ArtifactError as error:
                pause = backoff.pause_seconds(error)
            await asyncio.sleep(pause)


def refuse_stored_code(folder: Path) -> bytes | None:
    """Check the configurations of a folder on this disk, and return its config.json; None if it has none.

    Raises:
        ArtifactError: HeaderInvalid, or CustomCode.
        OSError: a file cannot be read.
    """
    found = None
    python_files = _list_python(folder)
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


def _list_local(source: Source, folder: Path, file_root: Path | None) -> FolderListing:
    files, newest = [], 0
    for path in sorted(folder.iterdir()):
        if _is_wanted(path.name) and path.is_file():
            local_files.refuse_outside(source, path, file_root)
            stat = path.stat()
            files.append(FolderFile(path.name, stat.st_size, None))
            newest = max(newest, stat.st_mtime_ns)
    return FolderListing(f"{newest:x}-{sum(file.size_bytes for file in files):x}", files, _list_python(folder))


def _list_python(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*{_PYTHON}"))


def _parse_listing(source: Source, text: bytes) -> FolderListing:
    try:
        repository = msgspec.json.decode(text, type=_Repository)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError("SourceRefused", f"{source.display}: the hub's listing is not valid: {error}") from error
    if not _COMMIT.fullmatch(repository.sha):
        problem = f"names {repository.sha[:100]!r} as its commit, which is none"
        raise ArtifactError("SourceRefused", f"{source.display}: the hub {problem}")
    if any(each.lfs and not is_digest(each.lfs.sha256) for each in repository.siblings):
        raise ArtifactError("SourceRefused", f"{source.display}: the hub states a sha256 that is none")
    wanted = [each for each in repository.siblings if _is_wanted(each.name)]
    unsized = [each.name for each in wanted if each.size is None or each.size < 0]
    if unsized or len(wanted) > _MOST_FILES:
        problem = f"does not say how large {unsized[0]} is" if unsized else f"lists more than {_MOST_FILES} files"
        raise ArtifactError("SourceRefused", f"{source.display}: the hub {problem}")
    files = [FolderFile(each.name, each.size or 0, each.lfs.sha256 if each.lfs else None) for each in wanted]
    return FolderListing(repository.sha, sorted(files, key=lambda file: file.name))


def _is_wanted(name: str) -> bool:
    """Decide whether an engine reads this file; engines read the top level of the folder only."""
    is_name = (
        "/" not in name and not name.startswith(".") and name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES
    )
    return is_name and name.endswith(_SUFFIXES) and not name.endswith(_OURS)
