"""The reader of GGUF headers agrees with the gguf package, and refuses damaged and hostile headers."""

import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf as oracle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import ArtifactError
from artifacts.formats.gguf import MAX_HEADER_BYTES, TENSOR_TYPES, GGUFHeader, HeaderTruncated, parse
from artifacts.formats.gguf_facts import FILE_TYPES, summarize
from tests.support.tiny_models import tiny_gguf


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _file(*entries: bytes, version: int = 3, tensors: tuple[bytes, ...] = (), data: bytes = b"") -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(entries))
    return b"GGUF" + counts + b"".join(entries) + b"".join(tensors) + data


def _tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def _parse(data: bytes) -> GGUFHeader:
    return parse(data, len(data))


def _refusal(data: bytes, file_bytes: int | None = None) -> str:
    with pytest.raises(ArtifactError) as caught:
        parse(data, len(data) if file_bytes is None else file_bytes)
    assert caught.value.reason == "HeaderInvalid"
    assert not caught.value.retryable
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"ftype": "f16", "n_layer": 5, "n_embd": 96, "n_head": 6, "n_head_kv": 6},
        {"ftype": "q8_0", "n_head_kv": 1, "n_ff": 256, "n_ctx": 131072},
        {"n_layer": 3, "n_head_kv": [2, 0, 4]},
        {"ftype": "q8_0", "n_layer": 1, "name": "Größe", "text": "word " * 300},
    ],
)
def test_reader_agrees_with_the_gguf_package(tmp_path: Path, shape: dict[str, Any]) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path, **shape)
    header, expected = _parse(path.read_bytes()), oracle.GGUFReader(path)

    assert header.tensor_count == len(expected.tensors)
    assert header.tensor_bytes == sum(int(tensor.n_bytes) for tensor in expected.tensors)
    assert header.data_offset == expected.data_offset
    fields = {key: field for key, field in expected.fields.items() if not key.startswith("GGUF.")}
    assert list(header.metadata) == list(fields)
    for key, value in header.metadata.items():
        said = fields[key].contents()
        if value is not None:
            assert value == (tuple(said) if isinstance(said, list) else said), key
    for key in ("tokenizer.ggml.tokens",):
        assert header.metadata[key] is None


def test_every_quantization_is_sized_as_the_gguf_package_does(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = oracle.GGUFWriter(path, "llama")
    for kind, (_, block_bytes) in oracle.GGML_QUANT_SIZES.items():
        writer.add_tensor(f"as.{kind.name}", np.zeros((3, 2 * block_bytes), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    assert {number: (name, *sizes) for number, (name, *sizes) in TENSOR_TYPES.items()} == {
        kind.value: (kind.name, *sizes) for kind, sizes in oracle.GGML_QUANT_SIZES.items()
    }
    by_type = {tensor.tensor_type.name: int(tensor.n_bytes) for tensor in oracle.GGUFReader(path).tensors}
    assert _parse(path.read_bytes()).bytes_by_type == by_type


def test_file_types_are_those_of_the_gguf_package() -> None:
    names = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in oracle.LlamaFileType}
    del names[oracle.LlamaFileType.GUESSED.value]
    assert names == FILE_TYPES


def test_all_value_types_are_read_in_version_2_and_3() -> None:
    values: dict[int, tuple[str, Any]] = {
        0: ("<B", 200),
        1: ("<b", -7),
        2: ("<H", 60000),
        3: ("<h", -300),
        4: ("<I", 1 << 31),
        5: ("<i", -(1 << 31)),
        6: ("<f", 0.5),
        7: ("<?", True),
        10: ("<Q", 1 << 63),
        11: ("<q", -(1 << 63)),
        12: ("<d", 1e300),
    }
    entries = [_entry(f"k{kind}", kind, struct.pack(form, value)) for kind, (form, value) in values.items()]
    arrays = [
        _entry(f"a{kind}", 9, struct.pack("<IQ", kind, 2) + struct.pack(form, value) * 2)
        for kind, (form, value) in values.items()
    ]
    for version in (2, 3):
        metadata = _parse(_file(*entries, *arrays, _entry("s", 8, _string("text")), version=version)).metadata
        assert metadata == {
            **{f"k{kind}": value for kind, (_, value) in values.items()},
            **{f"a{kind}": (value, value) for kind, (_, value) in values.items()},
            "s": "text",
        }


def test_summary_has_the_facts_of_the_header(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path, ftype="q8_0", n_layer=3, n_head_kv=[2, 0, 4])
    summary = summarize(_parse(path.read_bytes()))
    assert (summary.architecture, summary.model_name, summary.quantization) == ("llama", "tiny-llama", "Q8_0")
    assert (summary.context_length, summary.embedding_size, summary.layer_count) == (4096, 64, 3)
    assert (summary.head_count, summary.head_count_kv, summary.license) == (4, 4, "CC0-1.0")


@pytest.mark.parametrize(
    ("options", "modes"),
    [
        ({}, ["chat"]),
        ({"pooling": oracle.PoolingType.MEAN}, ["chat", "embeddings"]),
        ({"pooling": oracle.PoolingType.NONE}, ["chat"]),
        ({"pooling": oracle.PoolingType.RANK}, ["chat"]),
        ({"pooling": oracle.PoolingType.RANK, "scores": True}, ["chat", "rerank"]),
    ],
)
def test_summary_has_the_modes_that_the_model_is_made_for(
    tmp_path: Path, options: dict[str, Any], modes: list[str]
) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path, **options)
    assert summarize(_parse(path.read_bytes())).modes == modes


@pytest.mark.parametrize(
    ("architecture", "keys", "sizes", "modes"),
    [
        ("llama", {"embedding_length": 64, "attention.head_count": 4}, (16, 16), ["chat"]),
        (
            "gemma4",
            {"attention.key_length": 512, "attention.key_length_swa": 256, "attention.value_length": 80},
            (256, 80),
            ["chat"],
        ),
        ("llama", {"embedding_length": 64}, (None, None), ["chat"]),
        ("llama", {"embedding_length": 64, "attention.head_count": 0}, (None, None), ["chat"]),
        ("nomic-bert", {"pooling_type": 1}, (None, None), ["embeddings"]),
        ("clip", {}, (None, None), []),
    ],
)
def test_summary_has_the_size_of_heads(
    architecture: str, keys: dict[str, int], sizes: tuple[int | None, int | None], modes: list[str]
) -> None:
    stated = [_entry(f"{architecture}.{key}", 4, struct.pack("<I", value)) for key, value in keys.items()]
    summary = summarize(_parse(_file(_entry("general.architecture", 8, _string(architecture)), *stated)))
    assert (summary.key_head_size, summary.value_head_size) == sizes
    assert summary.modes == modes


def test_invalid_facts_are_left_out_and_control_characters_removed() -> None:
    data = _file(
        _entry("general.architecture", 8, _string("llama")),
        _entry("general.name", 8, _string("a\x1b[31m\n" + "x" * 5000)),
        _entry("general.license", 4, struct.pack("<I", 5)),
        _entry("llama.context_length", 5, struct.pack("<i", -1)),
        _entry("llama.block_count", 10, struct.pack("<Q", (1 << 64) - 1)),
    )
    summary = summarize(_parse(data))
    assert summary.model_name.isprintable()
    assert len(summary.model_name) <= 256
    assert (summary.license, summary.context_length, summary.layer_count) == ("", None, None)


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"", "ends"),
        (b"<htm", "no GGUF"),
        (b"PK", "no GGUF"),
        (b"GGUF", "the version"),
        (_file(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "metadata entries"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors"),
        (_file(struct.pack("<Q", (1 << 64) - 1)), "a metadata key"),
        (_file(_entry("k", 8, struct.pack("<Q", 1 << 62))), "'k'"),
        (_file(_entry("k", 9, struct.pack("<IQ", 4, 1 << 62))), "elements"),
        (_file(_entry("k", 9, struct.pack("<IQ", 8, 1 << 40))), "elements"),
        (_file(_entry("k", 9, struct.pack("<IQ", 9, 1) * 3)), "deeper"),
        (_file(_entry("k", 13, b"")), "unknown type 13"),
        (_file(_entry("k", 7, b"\1"), _entry("k", 7, b"\1")), "twice"),
        (_file(_entry("general.alignment", 4, struct.pack("<I", 0))), "general.alignment"),
        (_file(_entry("general.alignment", 8, _string("x"))), "general.alignment"),
        (_file(tensors=(_tensor("t", (1, 1, 1, 1, 1)),)), "5 dimensions"),
        (_file(tensors=(_tensor("t", (8,), kind=99),)), "unknown tensor type 99"),
        (_file(tensors=(_tensor("t", (31,), kind=8),)), "whole blocks"),
        (_file(tensors=(_tensor("t", ((1 << 63) - 1,) * 4),)), "cut or corrupted"),
        (_file(tensors=(_tensor("t", (1,)),) * 2, data=bytes(64)), "twice"),
        (_file(tensors=(_tensor("t", (1,), offset=4),), data=bytes(64)), "multiple"),
        (_file(tensors=(_tensor("t", (8,)),), data=bytes(8)), "cut or corrupted"),
    ],
)
def test_hostile_header_is_refused(data: bytes, hint: str) -> None:
    assert hint in _refusal(data)


def test_file_smaller_than_the_sum_of_its_tensors_is_refused() -> None:
    tensors = tuple(_tensor(f"t{number}", (32,)) for number in range(8))
    assert "cut or corrupted" in _refusal(_file(tensors=tensors, data=bytes(256)))


def test_header_longer_than_the_limit_is_refused_before_it_is_read() -> None:
    strings = struct.pack("<Q", 15 << 20) + bytes(15 << 20)
    data = _file(_entry("k", 9, struct.pack("<IQ", 8, 5) + strings * 5))
    assert "64 MiB" in _refusal(data[: MAX_HEADER_BYTES + 1], len(data))


def test_claimed_sizes_allocate_nothing() -> None:
    claim = _file(_entry("k", 9, struct.pack("<IQ", 10, 7 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(HeaderTruncated):
            parse(claim, 1 << 50)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_every_prefix_needs_more_bytes_and_the_whole_header_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path)
    data = path.read_bytes()
    header = _parse(data)
    end = header.data_offset - 31
    for length in [*range(64), *range(64, end, 211)]:
        with pytest.raises(HeaderTruncated):
            parse(data[:length], len(data))
    assert parse(data[: header.data_offset], len(data)) == header


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf.write(path, n_embd=32, n_ff=32, n_layer=1, n_head_kv=[2])
    return path.read_bytes()


@given(changes=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4))
def test_mutated_header_parses_or_is_refused_in_bounded_time(tiny: bytes, changes: list[tuple[float, bytes]]) -> None:
    data = bytearray(tiny)
    header_bytes = _parse(tiny).data_offset
    for where, what in changes:
        at = int(where * header_bytes)
        data[at : at + len(what)] = what
    start = time.process_time()
    try:
        summarize(_parse(bytes(data)))
    except ArtifactError as error:
        assert error.reason == "HeaderInvalid"  # noqa: PT017  either outcome is right
    assert time.process_time() - start < 1


@given(st.binary(max_size=400), st.integers(0, 1 << 62))
def test_random_bytes_are_refused_with_an_artifact_error(tail: bytes, file_bytes: int) -> None:
    data = b"GGUF" + struct.pack("<I", 3) + tail
    try:
        parse(data, max(file_bytes, len(data)))
    except HeaderTruncated:
        assert file_bytes > len(data)
    except ArtifactError as error:
        assert error.reason == "HeaderInvalid"  # noqa: PT017  either outcome is right


def test_file_that_goes_on_behind_its_tensors_is_refused() -> None:
    whole = _file(tensors=(_tensor("a", (32,)),), data=bytes(32 * 4))
    assert parse(whole, len(whole) + (1 << 20)).tensor_count == 1, "some writers pad"
    assert "bytes behind its last tensor, which no engine reads" in _refusal(whole, len(whole) + (1 << 40))
