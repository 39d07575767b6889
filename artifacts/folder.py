"""Artifacts of several files: the folder of a repository, as MLX has its weights.

The hub lists what a revision holds; only what an engine reads is taken, which leaves out code that came with the
weights. The commit of the listing pins every file, so a branch that moves meanwhile mixes no two versions.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from artifacts import root
from artifacts.errors import ArtifactError
from artifacts.fetch import Fetched, MakeRoom, Progress, fetch
from artifacts.origin import connect
from artifacts.patience import DEFAULT_PATIENCE, Backoff, Patience
from artifacts.source import Source, parse

CONFIG: Final = "config.json"
_WEIGHTS: Final = ".safetensors"
_SUFFIXES: Final = (_WEIGHTS, ".json", ".txt", ".model", ".jinja", ".tiktoken")
_LISTING_BYTES: Final = 8 << 20
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


async def list_folder(
    source: Source,
    *,
    token: str | None,
    endpoint: str,
    file_root: Path | None,
    revision: str | None,
    patience: Patience = DEFAULT_PATIENCE,
) -> Listing:
    """Tell what is in the folder of `source`; the arguments are those of `fetch.fetch`.

    Raises:
        ArtifactError: with a reason and whether to try again later.
    """
    if source.scheme == "file":
        listing = await asyncio.to_thread(_list_local, root.locate(source, file_root))
    else:
        listing = await _list_hub(source, token, endpoint, revision, patience)
    names = {entry.name for entry in listing.entries}
    if CONFIG not in names or not any(name.endswith(_WEIGHTS) for name in names):
        raise ArtifactError(
            "SourceNotFound",
            f"{source.display}: has no {CONFIG} with *{_WEIGHTS} beside it, so it is no folder of MLX weights; a GGUF "
            "file needs its name in the source: hf://ORG/REPO/FILE.gguf",
        )
    return listing


async def fetch_folder(
    source: Source,
    listing: Listing,
    destination_dir: Path,
    *,
    token: str | None,
    endpoint: str,
    on_progress: Progress,
    make_room: MakeRoom | None = None,
    patience: Patience = DEFAULT_PATIENCE,
) -> list[Fetched]:
    """Bring all files of an hf:// folder as listed to `destination_dir`, one after the other.

    Raises:
        ArtifactError: with a reason and whether to try again later; what is there is not fetched again.
    """
    fetched: list[Fetched] = []
    done = 0
    for entry in listing.entries:

        def advance(here: int, _total: int | None, before: int = done) -> None:
            on_progress(before + here, listing.size_bytes)

        each = await fetch(
            parse(f"hf://{source.repo}@{listing.revision}/{entry.name}"),
            destination_dir,
            sha256=entry.sha256,
            token=token,
            endpoint=endpoint,
            file_root=None,
            revision=listing.revision,
            on_progress=advance,
            make_room=make_room,
            patience=patience,
        )
        fetched.append(each)
        done += each.size_bytes
    return fetched


def _list_local(folder: Path) -> Listing:
    entries, newest = [], 0
    for path in sorted(folder.iterdir()):
        if _is_wanted(path.name) and path.is_file():
            stat = path.stat()
            entries.append(Entry(path.name, stat.st_size, None))
            newest = max(newest, stat.st_mtime_ns)
    return Listing(f"{newest:x}-{sum(entry.size_bytes for entry in entries):x}", entries)


async def _list_hub(
    source: Source, token: str | None, endpoint: str, revision: str | None, patience: Patience
) -> Listing:
    at = quote(revision or source.revision, safe="")
    url = f"{endpoint.rstrip('/')}/api/models/{source.repo}/revision/{at}?blobs=true"
    backoff = Backoff(patience)
    while True:
        try:
            async with connect(
                source, token=token, endpoint=endpoint, revision=revision, patience=patience, url=url
            ) as origin:
                text = await origin.read_whole(_LISTING_BYTES)
            return _parse(source, text)
        except ArtifactError as error:
            pause = backoff.pause_seconds(error)
        await asyncio.sleep(pause)


def _parse(source: Source, text: bytes) -> Listing:
    try:
        repository = msgspec.json.decode(text, type=_Repository)
    except msgspec.DecodeError as error:
        raise ArtifactError("SourceRefused", f"{source.display}: the hub's listing makes no sense: {error}") from error
    wanted = [each for each in repository.siblings if _is_wanted(each.name)]
    unsized = [each.name for each in wanted if each.size is None or each.size < 0]
    if unsized or len(wanted) > _MOST_FILES:
        problem = f"does not say how large {unsized[0]} is" if unsized else f"lists more than {_MOST_FILES} files"
        raise ArtifactError("SourceRefused", f"{source.display}: the hub {problem}")
    entries = [Entry(each.name, each.size or 0, each.lfs.sha256 if each.lfs else None) for each in wanted]
    return Listing(repository.sha, sorted(entries, key=lambda entry: entry.name))


def _is_wanted(name: str) -> bool:
    """Whether an engine reads this file; engines look at the top of the folder only."""
    return name.endswith(_SUFFIXES) and "/" not in name and not name.startswith(".") and name.isprintable()
