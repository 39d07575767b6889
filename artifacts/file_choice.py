"""The files of a listing that an engine gets: one GGUF model, or one folder of safetensors and what belongs to it.

Pure functions. A listing comes from a server, so names in it are only compared and shown, and none is a path here.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from artifacts.errors import ArtifactError
from artifacts.formats.folder_config import CONFIG
from artifacts.formats.gguf_split import name_parts
from artifacts.repositories.repository import GGUF_WEIGHTS, WEIGHTS, Listing, RepositoryFile, is_safe_path
from artifacts.source import Source

ADAPTER_CONFIG: Final = "adapter_config.json"
"""The configuration of a folder whose weights are a LoRA adapter."""
INDEX: Final = "model.safetensors.index.json"
"""File that names the parts of the weights; a repository may have the same weights in other files, too."""
_INDEX_SUFFIX: Final = ".safetensors.index.json"
_ORIGINAL: Final = "consolidated"
"""Beginning of the names of the same weights in the layout of the model's author."""
_MOST_FILES: Final = 1000
_MOST_SHOWN: Final = 5


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def choose_files(source: Source, listing: Listing) -> list[RepositoryFile]:
    """Return the files of `source`: all parts of a GGUF model in order, or the files of a folder by name.

    Raises:
        ArtifactError: SourceNotFound for what is missing; SourceInvalid for patterns that do not choose one model.
    """
    if source.is_split:
        return _find_parts(source, listing, source.path if source.scheme == "hf" else source.file)
    for pattern in source.files:
        if not any(_is_match(file, pattern) for file in listing.files):
            way_out = "" if pattern.endswith(GGUF_WEIGHTS) else "; a pattern for GGUF files ends in .gguf"
            there = _show(file.path for file in listing.files)
            problem = f"files has {pattern!r}, which matches nothing: there is {there}{way_out}"
            raise ArtifactError("SourceNotFound", f"{source.display}: {problem}")
    matched = [file for file in listing.files if any(_is_match(file, pattern) for pattern in source.files)]
    if any(file.path.endswith(GGUF_WEIGHTS) for file in matched):
        return _choose_gguf(source, listing, matched)
    return _choose_folder(source, listing, {file.path for file in matched if file.path.endswith(WEIGHTS)})


def choose_indexed(source: Source, files: Sequence[RepositoryFile], index: bytes) -> list[RepositoryFile]:
    """Return `files` with no other weights than those that the index names; without the index if `source` names some.

    Raises:
        ArtifactError: HeaderInvalid for an index that is not valid, SourceNotFound for a file that is missing.
    """
    try:
        named = set(msgspec.json.decode(index, type=_Index).weight_map.values())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError("HeaderInvalid", f"{INDEX} is not valid: {error}") from error
    present = {file.path for file in files if file.path.endswith(WEIGHTS)}
    if source.files:
        return [file for file in files if file.path != INDEX or named == present]
    for name in sorted(named):
        if "/" in name or not is_safe_path(name) or not name.endswith(WEIGHTS):
            raise ArtifactError("HeaderInvalid", f"{INDEX} names {name[:100]!r}, which is no *{WEIGHTS} file beside it")
        if name not in present:
            raise ArtifactError(
                "SourceNotFound", f"{source.display}: {INDEX} names {name}, which is missing: the weights are not whole"
            )
    return [file for file in files if file.path in named or not file.path.endswith(WEIGHTS)]


def _is_match(file: RepositoryFile, pattern: str) -> bool:
    # A pattern ends in .gguf or matches no GGUF file: so the format is known before anything is listed.
    is_gguf = file.path.endswith(GGUF_WEIGHTS)
    return (pattern.endswith(GGUF_WEIGHTS) or not is_gguf) and fnmatchcase(file.path, pattern)


def _choose_gguf(source: Source, listing: Listing, matched: Sequence[RepositoryFile]) -> list[RepositoryFile]:
    others = [file.path for file in matched if not file.path.endswith(GGUF_WEIGHTS)]
    first = {_first_part(file.path) for file in matched if file.path.endswith(GGUF_WEIGHTS)}
    if others:
        raise ArtifactError(
            "SourceInvalid",
            f"{source.display}: files matches two formats, {_show(first)} and {_show(others)}: give patterns "
            f"that end in {GGUF_WEIGHTS} only, or none of these",
        )
    if len(first) > 1:
        raise ArtifactError(
            "SourceInvalid",
            f"{source.display}: files matches {len(first)} models, {_show(first)}: write the one to serve, "
            f"for example files: [{min(first)!r}]",
        )
    return _find_parts(source, listing, next(iter(first)))


def _first_part(path: str) -> str:
    """Return the path of the first part of the model that the file at `path` is, or is a part of."""
    folder, slash, name = path.rpartition("/")
    try:
        parts = name_parts(name)
    except ValueError:
        parts = []
    return f"{folder}{slash}{parts[0]}" if parts else path


def _find_parts(source: Source, listing: Listing, first: str) -> list[RepositoryFile]:
    folder, slash, name = first.rpartition("/")
    names = name_parts(name) or [name]
    by_path = {file.path: file for file in listing.files}
    missing = [each for each in names if f"{folder}{slash}{each}" not in by_path]
    if missing:
        raise ArtifactError(
            "SourceNotFound",
            f"{source.display}: {missing[0]} is missing: the model needs all of its {len(names)} files",
        )
    return [by_path[f"{folder}{slash}{each}"] for each in names]


def _choose_folder(source: Source, listing: Listing, weights: set[str]) -> list[RepositoryFile]:
    top = [
        file
        for file in listing.files
        if "/" not in file.path
        and not file.path.endswith(GGUF_WEIGHTS)
        and (file.path == INDEX or not file.path.endswith(_INDEX_SUFFIX))
    ]
    found = [file for file in top if file.path.endswith(WEIGHTS) and (not weights or file.path in weights)]
    if not weights:
        found = [file for file in found if not file.path.startswith(_ORIGINAL)] or found
    if len(found) < len(weights):
        raise ArtifactError(
            "SourceInvalid",
            f"{source.display}: files matches weights in a folder of the repository, {_show(weights)}: engines "
            "read none there",
        )
    if not found or not any(file.path in (CONFIG, ADAPTER_CONFIG) for file in top):
        ggufs = [file for file in listing.files if file.path.endswith(GGUF_WEIGHTS)]
        way_out = (
            f": name one of its GGUF files in files, for example files: [{ggufs[0].path!r}]"
            if ggufs
            else ("; a GGUF file needs its name in the source: hf://ORG/REPO/FILE.gguf")
        )
        raise ArtifactError(
            "SourceNotFound",
            f"{source.display}: has no {CONFIG} with *{WEIGHTS} beside it, so it is no folder of weights{way_out}",
        )
    chosen = [file for file in top if file in found or not file.path.endswith(WEIGHTS)]
    if len(chosen) > _MOST_FILES:
        raise ArtifactError("SourceRefused", f"{source.display}: has more than {_MOST_FILES} files for an engine")
    return chosen


def _show(paths: Iterable[str]) -> str:
    """Return the first paths for a message."""
    shown = sorted(paths)
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return (", ".join(shown[:_MOST_SHOWN]) or "nothing that an engine reads") + more
