"""Listings and split models of hostile servers take bounded memory, and no time of an agent's event loop."""

import asyncio
import dataclasses
import threading
import tracemalloc
from pathlib import Path

import pytest

from artifacts import file_set
from artifacts.errors import ArtifactError
from artifacts.file_choice import INDEX, choose_files
from artifacts.file_set import FileSet
from artifacts.formats.folder_config import CONFIG, MOST_VALUES, parse_safe
from artifacts.formats.gguf import GGUFHeader, Value
from artifacts.formats.gguf_split import MOST_TENSORS, append_part_header, merge_headers
from artifacts.repositories.repository import Listing, RepositoryFile, SourceAccess
from artifacts.source import Source, parse
from crds.size import MIB


def part(number: int, count: int, tensors: int = 1) -> GGUFHeader:
    metadata: dict[str, Value] = {"split.no": number, "split.count": count, "general.name": "x" * 4096}
    shapes: dict[str, tuple[int, ...]] = {f"t{number}.{index}": (1,) for index in range(tensors)}
    return GGUFHeader(3, metadata, tensors, 4 * tensors, {"F32": 4 * tensors}, shapes, 0, tensors)


def test_metadata_of_later_parts_is_not_kept() -> None:
    kept: list[GGUFHeader] = []
    for number in range(3):
        append_part_header(kept, part(number, 3), f"part {number}")
    assert [len(header.metadata) for header in kept] == [3, 2, 2]
    assert merge_headers(kept, ["a", "b", "c"]).metadata == part(0, 3).metadata


def test_parts_with_more_tensors_than_any_model_are_refused_before_the_others_are_read() -> None:
    kept: list[GGUFHeader] = []
    append_part_header(kept, dataclasses.replace(part(0, 3), tensor_count=MOST_TENSORS), "part 0")
    with pytest.raises(ArtifactError, match=f"part 1: its parts have {MOST_TENSORS + 1} tensors or more"):
        append_part_header(kept, part(1, 3), "part 1")
    assert len(kept) == 1


async def test_event_loop_goes_on_while_patterns_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    went_on = threading.Event()

    def choose_slowly(source: Source, listing: Listing) -> list[RepositoryFile]:
        assert went_on.wait(10)
        return choose_files(source, listing)

    monkeypatch.setattr(file_set, "choose_files", choose_slowly)
    (tmp_path / "tiny.gguf").touch()
    access = SourceAccess(token=None, endpoint="", file_root=tmp_path)
    asyncio.get_running_loop().call_later(0.01, went_on.set)
    listing = await FileSet(parse(f"file://{tmp_path}/", ["*.gguf"]), access).list_chosen(None)
    assert [file.path for file in listing.files] == ["tiny.gguf"]


@pytest.mark.parametrize("function", ["choose_indexed", "parse_safe"])
async def test_event_loop_goes_on_while_configurations_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    loop, went_on = asyncio.get_running_loop(), threading.Event()
    parse_quickly = getattr(file_set, function)

    def parse_slowly(*args: object, **options: object) -> object:
        loop.call_soon_threadsafe(went_on.set)
        assert went_on.wait(10)
        return parse_quickly(*args, **options)

    monkeypatch.setattr(file_set, function, parse_slowly)
    (tmp_path / CONFIG).write_text("{}")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model.safetensors"}}')
    (tmp_path / "model.safetensors").touch()
    files = FileSet(parse(f"file://{tmp_path}/"), SourceAccess(token=None, endpoint="", file_root=tmp_path))
    assert CONFIG in await files.read_configs(await files.list_chosen(None))


def test_configuration_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    text = b'{"a":[' + b"{}," * MOST_VALUES + b"0]}"
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match=r"tokenizer_config\.json has more than 600000 values"):
            parse_safe("tokenizer_config.json", text)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MIB


def test_configuration_with_many_added_tokens_is_parsed() -> None:
    token = b'"content":"t","lstrip":false,"normalized":false,"rstrip":false,"single_word":false,"special":true'
    tokens = b",".join(b'"%d":{%b}' % (number, token) for number in range(50_000))
    assert parse_safe("tokenizer_config.json", b'{"added_tokens_decoder":{%b}}' % tokens)
