"""Artifacts of several files: the folder of a repository, as MLX has its weights.

The hub lists what a revision holds; only what an engine reads is taken, which leaves out code that came with the
weights. The commit of the listing pins every file, so a branch that moves meanwhile mixes no two versions.
"""

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from artifacts import root
from artifacts.errors import ArtifactError
from artifacts.fetch import Fetched, MakeRoom, Progress, fetch
from artifacts.origin import connect
from artifacts.part import storage_faults
from artifacts.patience import DEFAULT_PATIENCE, Backoff, Patience
from artifacts.source import MAX_NAME_BYTES, Source
from crds.size import size_text

CONFIG: Final = "config.json"
_ADAPTER_CONFIG: Final = "adapter_config.json"
"""What a folder has in its place whose weights are a LoRA adapter."""
WEIGHTS: Final = ".safetensors"
_SUFFIXES: Final = (WEIGHTS, ".json", ".txt", ".model", ".jinja", ".tiktoken")
_OURS: Final = (".verified.json", ".part.json")
"""Of files that lie beside a download."""
_COMMIT: Final = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_LISTING_BYTES: Final = 8 << 20
_CONFIG_BYTES: Final = 1 << 20
_MOST_FILES: Final = 1000


@dataclasses.dataclass(frozen=True)
class Entry:
    """One file of a folder. `sha256` is the hub's word, which it has for large files only."""

    name: str
    size_bytes: int
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class Listing:
    """What a folder holds at `revision`: a commit, or of a local folder its newest time and its size."""

    revision: str
    entries: Sequence[Entry]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def is_adapter(self) -> bool:
        """Whether it is a LoRA adapter, which is served on top of a model only."""
        names = {entry.name for entry in self.entries}
        return _ADAPTER_CONFIG in names and CONFIG not in names


class _Lfs(msgspec.Struct):
    sha256: str


class _Sibling(msgspec.Struct, rename={"name": "rfilename"}):
    name: str
    size: int | None = None
    lfs: _Lfs | None = None


class _Repository(msgspec.Struct):
    """The answer of the hub's /api/models/REPO/revision/REVISION?blobs=true, as far as it is read."""

    sha: str
    siblings: list[_Sibling]


def refuse_digest(source: Source, sha256: str | None) -> None:
    """Raise SourceInvalid for an expected digest of a folder, which has none that the hub or a user could know."""
    if sha256 and source.is_folder:
        raise ArtifactError(
            "SourceInvalid",
            f"{source.display}: a folder has no sha256: remove it, and pin a commit with @REVISION instead",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """A source that is a folder, with what it takes to read it; as the arguments of `fetch.fetch`."""

    source: Source
    token: str | None
    endpoint: str
    file_root: Path | None
    patience: Patience = DEFAULT_PATIENCE

    async def listing(self, revision: str | None) -> Listing:
        """Tell what is in it at a resolved revision; None is what the source says now.

        Raises:
            ArtifactError: with a reason and whether to try again later.
        """
        if self.source.scheme == "file":
            folder = root.locate(self.source, self.file_root)
            with storage_faults(folder):
                listing = await asyncio.to_thread(_list_local, self.source, folder, self.file_root)
        else:
            at = quote(revision or self.source.revision, safe="")
            url = f"{self.endpoint.rstrip('/')}/api/models/{self.source.repo}/revision/{at}?blobs=true"
            listing = _parse(self.source, await self._read(url, _LISTING_BYTES))
        names = {entry.name for entry in listing.entries}
        if names.isdisjoint({CONFIG, _ADAPTER_CONFIG}) or not any(name.endswith(WEIGHTS) for name in names):
            raise ArtifactError(
                "SourceNotFound",
                f"{self.source.display}: has no {CONFIG} with *{WEIGHTS} beside it, so it is no folder of MLX weights; "
                "a GGUF file needs its name in the source: hf://ORG/REPO/FILE.gguf",
            )
        return listing

    async def config(self, listing: Listing) -> bytes:
        """Return the text of its configuration; an adapter has none.

        Raises:
            ArtifactError: with a reason and whether to try again later.
        """
        size = next(entry.size_bytes for entry in listing.entries if entry.name == CONFIG)
        if size > _CONFIG_BYTES:
            raise ArtifactError("HeaderInvalid", f"{CONFIG} is longer than {size_text(_CONFIG_BYTES)}")
        if self.source.scheme == "file":
            path = root.locate(self.source, self.file_root) / CONFIG
            with storage_faults(path):
                return await asyncio.to_thread(path.read_bytes)
        return await self._read(self._file(listing, CONFIG).url(self.endpoint), _CONFIG_BYTES)

    async def fetch(
        self, listing: Listing, destination_dir: Path, *, on_progress: Progress, make_room: MakeRoom
    ) -> list[Fetched]:
        """Bring all files of an hf:// folder as listed, one after the other; what is there is not fetched again.

        Raises:
            ArtifactError: with a reason and whether to try again later.
        """
        fetched: list[Fetched] = []
        done = 0
        for entry in listing.entries:

            def advance(here: int, _total: int | None, before: int = done) -> None:
                on_progress(before + here, listing.size_bytes)

            each = await fetch(
                self._file(listing, entry.name),
                destination_dir,
                sha256=entry.sha256,
                token=self.token,
                endpoint=self.endpoint,
                file_root=None,
                revision=listing.revision,
                on_progress=advance,
                make_room=make_room,
                patience=self.patience,
            )
            if each.size_bytes != entry.size_bytes:
                # What was reckoned with, on the disk and in memory, was another.
                problem = f"listed {entry.name} with {entry.size_bytes} bytes, but sent {each.size_bytes}"
                raise ArtifactError("SourceRefused", f"{self.source.display}: the hub {problem}")
            fetched.append(each)
            done += each.size_bytes
        return fetched

    def _file(self, listing: Listing, name: str) -> Source:
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
                    revision=None,
                    patience=self.patience,
                    url=url,
                ) as origin:
                    return await origin.read_whole(most_bytes)
            except ArtifactError as error:
                pause = backoff.pause_seconds(error)
            await asyncio.sleep(pause)


def _list_local(source: Source, folder: Path, file_root: Path | None) -> Listing:
    entries, newest = [], 0
    for path in sorted(folder.iterdir()):
        if _is_wanted(path.name) and path.is_file():
            root.refuse_outside(source, path, file_root)
            stat = path.stat()
            entries.append(Entry(path.name, stat.st_size, None))
            newest = max(newest, stat.st_mtime_ns)
    return Listing(f"{newest:x}-{sum(entry.size_bytes for entry in entries):x}", entries)


def _parse(source: Source, text: bytes) -> Listing:
    try:
        repository = msgspec.json.decode(text, type=_Repository)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError("SourceRefused", f"{source.display}: the hub's listing makes no sense: {error}") from error
    if not _COMMIT.fullmatch(repository.sha):
        problem = f"names {repository.sha[:100]!r} as its commit, which is none"
        raise ArtifactError("SourceRefused", f"{source.display}: the hub {problem}")
    wanted = [each for each in repository.siblings if _is_wanted(each.name)]
    unsized = [each.name for each in wanted if each.size is None or each.size < 0]
    if unsized or len(wanted) > _MOST_FILES:
        problem = f"does not say how large {unsized[0]} is" if unsized else f"lists more than {_MOST_FILES} files"
        raise ArtifactError("SourceRefused", f"{source.display}: the hub {problem}")
    entries = [Entry(each.name, each.size or 0, each.lfs.sha256 if each.lfs else None) for each in wanted]
    return Listing(repository.sha, sorted(entries, key=lambda entry: entry.name))


def _is_wanted(name: str) -> bool:
    """Whether an engine reads this file; engines look at the top of the folder only."""
    is_name = (
        "/" not in name and not name.startswith(".") and name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES
    )
    return is_name and name.endswith(_SUFFIXES) and not name.endswith(_OURS)
