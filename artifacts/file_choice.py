"""The files of a listing that an engine gets: one GGUF model, or one folder of safetensors and what belongs to it.

Pure functions. A listing comes from a server, so names in it are only compared and shown, and none is a path here.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

import msgspec

from artifacts.errors import ArtifactError
from artifacts.formats.folder_config import CONFIG
from artifacts.formats.gguf_split import is_gguf_name, list_part_names
from artifacts.formats.json_members import read_members
from artifacts.repositories.repository import WEIGHTS, Listing, RepositoryFile, is_safe_path
from artifacts.source import Source, advise_files, quote_pattern

ADAPTER_CONFIG: Final = "adapter_config.json"
"""The configuration of a folder whose weights are a LoRA adapter."""
INDEX: Final = "model.safetensors.index.json"
"""File that names the parts of the weights; a repository may have the same weights in other files, too."""
_INDEX_SUFFIX: Final = ".safetensors.index.json"
_SHARD: Final = re.compile(r"(?P<stem>.*?)(?P<number>\d{1,8})-of-(?P<total>\d{1,8})\.safetensors", re.ASCII)
"""Name of one of several files of weights, such as model-00001-of-00002.safetensors; some count from 0."""
_AUTHORS_COPY: Final = "consolidated"
"""Beginning of the names of the same weights in the layout of the model's author."""
_MOST_FILES: Final = 1000
_MOST_TENSORS: Final = 1 << 20
_MOST_SHOWN: Final = 5


class _Index(msgspec.Struct):
    weight_map: msgspec.Raw


def choose_files(source: Source, listing: Listing) -> list[RepositoryFile]:
    """Return the files of `source`: all parts of a GGUF model in order, or the files of a folder by name.

    Raises:
        ArtifactError: SourceNotFound for what is missing; SourceInvalid for patterns that do not choose one model.
    """
    # The source names the first part, from whose name the others follow. A hub lists whole paths, others only names.
    if source.is_split:
        return _find_parts(source, listing, source.path if source.scheme == "hf" else source.file)

    # Each pattern must match a file.
    for pattern in source.files:
        if not any(_is_match(file, pattern) for file in listing.files):
            way_out = "" if is_gguf_name(pattern) else "; a pattern for GGUF files ends in .gguf"
            there = _list_some(file.path for file in listing.files)
            problem = f"files has {pattern!r}, which matches nothing: there is {there}{way_out}"
            raise source.error("SourceNotFound", problem)

    # Choose among the files that a pattern matches; without patterns there are none.
    matched = [file for file in listing.files if any(_is_match(file, pattern) for pattern in source.files)]
    if any(is_gguf_name(file.path) for file in matched):
        return _choose_gguf(source, listing, matched)

    # Patterns choose among the weights (*.safetensors) of a folder; its configurations are always taken.
    return _choose_folder(source, listing, {file.path for file in matched if file.path.endswith(WEIGHTS)})


def choose_indexed(
    source: Source, files: Sequence[RepositoryFile], index: bytes, *, is_mounted: bool = False
) -> list[RepositoryFile]:
    """Return the files of a folder with an index: a JSON file that names the weight file of every tensor.

    Without patterns in `source`, the index decides:
    - All files that it names are there: they are taken, and other weights are left out.
    - Only some of them are there: the weights are incomplete.
    - None of them is there: all weights are taken and the index is left out. Conversions often keep the index of their
      original.

    With patterns, all weights in `files` are taken, and the index only if it names exactly these.

    From a folder that engines mount (`is_mounted`), nothing can be left out, and engines load what its index names. So
    an index about other weights is refused there.

    Raises:
        ArtifactError: HeaderInvalid for an index that is not valid; SourceNotFound for a file that is missing;
            SourceInvalid for a mounted index about other weights.
    """
    try:
        indexed = _read_indexed_names(index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError("HeaderInvalid", f"{INDEX} is not valid: {error}") from error

    # Compare the names in the index with the weights that are there.
    weights = [file for file in files if file.path.endswith(WEIGHTS)]
    present = {file.path for file in weights}
    missing = sorted(indexed - present)

    # 1. Take the weights that the index names if they are all there; refuse them if only some are.
    if source.files:
        # With patterns, the index is taken only if it names exactly the weights that they choose.
        if indexed == present:
            return list(files)
        problem = f"{INDEX} names other weights than `files` chooses, and engines load what it names: change either"
    else:
        # Without patterns: all, some or none of the indexed weights are there.
        if not missing:
            return [file for file in files if file.path in indexed or not file.path.endswith(WEIGHTS)]
        if len(missing) < len(indexed):
            way_out = _suggest_complete_files(weights)
            incomplete = f"{INDEX} names {missing[0]}, which is missing: the weights are not whole{way_out}"
            raise source.error("SourceNotFound", incomplete)
        problem = f"{INDEX} names none of the weights beside it, so engines would load none: delete it there"

    # 2. The index is about other weights, so it is left out.
    if is_mounted:
        raise source.error("SourceInvalid", problem)
    _require_all_shards(source, weights)
    return [file for file in files if file.path != INDEX]


def _read_indexed_names(index: bytes) -> set[str]:
    """Return the names of the weight files in an index, whose `weight_map` has the file of each tensor.

    Raises msgspec.DecodeError, and ArtifactError for too many entries, or a name that is no weight file beside it.
    """
    # Many tensors share one file, so each different value is decoded once.
    values: set[bytes] = set()
    # `weight_map` is raw JSON, of which `read_members` yields one tensor name with its file at a time.
    members = read_members(memoryview(msgspec.json.decode(index, type=_Index).weight_map))
    for number, (_, value) in enumerate(members, start=1):
        values.add(value)
        if len(values) > _MOST_FILES or number > _MOST_TENSORS:
            problem = f"names more than {_MOST_FILES} files or {_MOST_TENSORS} tensors, and no model has so many"
            raise ArtifactError("HeaderInvalid", f"{INDEX} {problem}")

    # Each must be a weight file beside the index.
    names = {msgspec.json.decode(value, type=str) for value in values}
    for name in sorted(names):
        if "/" in name or not is_safe_path(name) or not name.endswith(WEIGHTS):
            raise ArtifactError("HeaderInvalid", f"{INDEX} names {name[:100]!r}, which is no *{WEIGHTS} file beside it")
    return names


def _require_all_shards(source: Source, weights: Sequence[RepositoryFile]) -> None:
    """Raise SourceNotFound if a shard is missing: `model-00001-of-00002.safetensors` says that there are two."""
    for series, numbers in _group_shards(weights).items():
        if missing := series.find_missing_shard(numbers):
            way_out = _suggest_complete_files(weights)
            raise source.error("SourceNotFound", f"{missing} is missing: the weights are not whole{way_out}")


class _ShardNames(NamedTuple):
    """The names of weights in several files, which differ in the number: STEM-00001-of-00002.safetensors."""

    stem: str
    total: str
    digits: int

    @property
    def pattern(self) -> str:
        """Pattern that matches all of them, and no whole file."""
        return f"{quote_pattern(self.stem)}*-of-{self.total}{WEIGHTS}"

    def find_missing_shard(self, numbers: Collection[int]) -> str:
        """Return the name of the first shard whose number is not in `numbers`; empty if all are there.

        Shards are numbered from 1, or from 0 if there is a shard 0.
        """
        first = 0 if 0 in numbers else 1
        for number in range(first, first + int(self.total)):
            if number not in numbers:
                return f"{self.stem}{number:0{self.digits}}-of-{self.total}{WEIGHTS}"
        return ""


def _group_shards(weights: Iterable[RepositoryFile]) -> dict[_ShardNames, set[int]]:
    """Return the numbers of the shards that are there, for each set of shards; other files are ignored."""
    numbers: dict[_ShardNames, set[int]] = {}
    for file in weights:
        # _SHARD matches names such as model-00001-of-00002.safetensors.
        if match := _SHARD.fullmatch(file.path):
            series = _ShardNames(stem=match["stem"], total=match["total"], digits=len(match["number"]))
            numbers.setdefault(series, set()).add(int(match["number"]))
    return numbers


def _suggest_complete_files(weights: Sequence[RepositoryFile]) -> str:
    """Return the end of a message: patterns that choose complete weights of the folder; empty if there are none."""
    numbered = _group_shards(weights)
    single_files = [file.path for file in weights if not _SHARD.fullmatch(file.path)]
    patterns = list(map(quote_pattern, single_files))
    # Of sets of shards, advise only the complete ones.
    patterns += [series.pattern for series, numbers in numbered.items() if not series.find_missing_shard(numbers)]
    # The field `files` in YAML, with the first valid one of these patterns.
    example = advise_files(patterns)
    return f", or name others in files, for example {example}" if example else ""


def _is_match(file: RepositoryFile, pattern: str) -> bool:
    """Decide whether a pattern chooses the file."""
    # A pattern ends in .gguf or matches no GGUF file: so the format is known before anything is listed.
    is_gguf = is_gguf_name(file.path)
    return (is_gguf_name(pattern) or not is_gguf) and fnmatchcase(file.path, pattern)


def _choose_gguf(source: Source, listing: Listing, matched: Sequence[RepositoryFile]) -> list[RepositoryFile]:
    """Return all parts of the one GGUF model that the patterns match. Raises ArtifactError if they match others."""
    others = [file.path for file in matched if not is_gguf_name(file.path)]
    first_parts = {_name_first_part(file.path) for file in matched if is_gguf_name(file.path)}
    if others:
        raise source.error(
            "SourceInvalid",
            f"files matches two formats, {_list_some(first_parts)} and {_list_some(others)}: give patterns "
            f"that end in .gguf only, or none of these",
        )

    if len(first_parts) > 1:
        # The advice names a first part that the patterns match: others may not exist.
        matched_parts = sorted(first_parts.intersection(file.path for file in matched))
        raise source.error(
            "SourceInvalid",
            f"files matches {len(first_parts)} models, {_list_some(first_parts)}: write the one to serve"
            f"{_advise_files(matched_parts)}",
        )

    # One model is left.
    (first_part,) = first_parts
    return _find_parts(source, listing, first_part)


def _name_first_part(path: str) -> str:
    """Return the path of the first part of the model that the file at `path` is, or is a part of."""
    folder, slash, name = path.rpartition("/")
    try:
        parts = list_part_names(name)
    except ValueError:  # the name has the form of a part with an impossible number
        parts = []
    return f"{folder}{slash}{parts[0]}" if parts else path


def _find_parts(source: Source, listing: Listing, first_path: str) -> list[RepositoryFile]:
    """Return all parts, in order, of the GGUF model whose first part, or only file, is at `first_path`."""
    folder, slash, name = first_path.rpartition("/")
    try:
        names = list_part_names(name) or [name]
    except ValueError as error:
        raise source.error("SourceInvalid", f"{first_path} {error}") from error
    by_path = {file.path: file for file in listing.files}
    missing = [part for part in names if f"{folder}{slash}{part}" not in by_path]
    if missing:
        raise source.error("SourceNotFound", f"{missing[0]} is missing: the model needs all of its {len(names)} files")
    return [by_path[f"{folder}{slash}{part}"] for part in names]


def _choose_folder(source: Source, listing: Listing, matched: set[str]) -> list[RepositoryFile]:
    """Return the weights, and the files beside them that engines read, at the top of the folder.

    `matched` are the paths of weights that the patterns of the source match. If it is empty, all weights are taken,
    except a copy in the layout of the model's author (`consolidated*`) beside the usual files.

    Raises:
        ArtifactError: it is no folder of weights, weights are missing or in a subfolder, or there are too many files.
    """
    # 1. Files that engines read are at the top.
    top = [
        file
        for file in listing.files
        if "/" not in file.path
        and not is_gguf_name(file.path)
        # Of indexes (_INDEX_SUFFIX: *.safetensors.index.json) only the usual one is read.
        and (file.path == INDEX or not file.path.endswith(_INDEX_SUFFIX))
    ]

    # 2. Choose the weights among them.
    weight_files = [file for file in top if file.path.endswith(WEIGHTS)]
    if matched:
        weight_files = [file for file in weight_files if file.path in matched]
    else:
        without_original = [file for file in weight_files if not file.path.startswith(_AUTHORS_COPY)]
        weight_files = without_original or weight_files

    # 3. Refuse what is not complete. Weights that a pattern matches and that are not at the top are in a subfolder.
    has_nested_weights = len(weight_files) < len(matched)
    if has_nested_weights:
        raise source.error(
            "SourceInvalid",
            f"files matches weights in a folder of the repository, {_list_some(matched)}: engines read none there",
        )
    if not weight_files or not any(file.path in (CONFIG, ADAPTER_CONFIG) for file in top):
        ggufs = [file.path for file in listing.files if is_gguf_name(file.path)]
        way_out = (
            f": name one of its GGUF files in files{_advise_files(ggufs)}"
            if ggufs
            else "; a GGUF file needs its name in the source: hf://ORG/REPO/FILE.gguf"
        )
        problem = f"has no {CONFIG} with *{WEIGHTS} beside it, so it is no folder of weights{way_out}"
        raise source.error("SourceNotFound", problem)
    if all(file.path != INDEX for file in top):
        _require_all_shards(source, weight_files)

    # 4. Take the chosen weights, and each file that is no weights.
    chosen = [file for file in top if file in weight_files or not file.path.endswith(WEIGHTS)]
    if len(chosen) > _MOST_FILES:
        raise source.error("SourceRefused", f"has more than {_MOST_FILES} files for an engine")
    return chosen


def _advise_files(paths: Iterable[str]) -> str:
    """Return the end of a message: an example of `files` with the first of `paths` that it can have."""
    example = advise_files(map(quote_pattern, paths))
    return f", for example {example}" if example else ""


def _list_some(paths: Iterable[str]) -> str:
    """Return the first paths for a message."""
    shown = sorted(paths)
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return (", ".join(shown[:_MOST_SHOWN]) or "nothing that an engine reads") + more
