"""Headers of safetensors files: facts of real ones, and a plain error for every hostile one."""

import contextlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from artifacts.errors import ArtifactError
from artifacts.file_set import read_stored_weights
from artifacts.formats import safetensors_header
from artifacts.formats.safetensors_header import MAX_HEADER_BYTES, SafetensorsHeader

NAME = "model.safetensors"


def encode(entries: dict[str, Any], data_bytes: int = 0) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def tensor(begin: int, end: int, *, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def parse(content: bytes) -> SafetensorsHeader:
    length = safetensors_header.parse_length(NAME, content, len(content))
    return safetensors_header.parse(NAME, content[8 : 8 + length], len(content))


def test_facts_of_all_files_of_a_folder_are_added(tmp_path: Path) -> None:
    save_file({"a": np.zeros((3, 4), np.float32)}, tmp_path / "one.safetensors", metadata={"format": "mlx"})
    save_file({"model.experts.0.b": np.zeros((2, 2), np.float16)}, tmp_path / "two.safetensors")
    header = read_stored_weights(tmp_path)
    assert header == SafetensorsHeader(
        tensor_count=2, tensor_bytes=56, written_for="mlx", parameters=16, expert_parameters=4
    )


def test_parameters_of_packed_weights_are_not_known(tmp_path: Path) -> None:
    save_file({"packed": np.zeros(8, np.int32), "scale": np.zeros(2, np.float16)}, tmp_path / "w.safetensors")
    assert read_stored_weights(tmp_path).parameters is None


def test_tensor_without_elements_and_a_scalar_are_valid() -> None:
    header = parse(encode({"none": tensor(0, 0, shape=[0, 4]), "one": tensor(0, 4, dtype="F32", shape=[])}, 4))
    assert (header.tensor_count, header.tensor_bytes) == (2, 4)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "cut or empty"),
        (b"\x02\0\0", "cut or empty"),
        (bytes(8), "a header of 0 bytes"),
        (struct.pack("<Q", 1 << 63), "no safetensors file, or longer than"),
        (struct.pack("<Q", 101_000_000) + b"{}", "no safetensors file, or longer than"),
        (struct.pack("<Q", 100) + b"{}", "has 10 in all: it is cut"),
        (struct.pack("<Q", 2) + b"[]", "does not begin with {"),
        (struct.pack("<Q", 2) + b"{[", "not valid JSON"),
        (struct.pack("<Q", 5) + b'{"\xff":', "not valid JSON"),
        (encode({"__metadata__": {"format": 7}}), "not valid JSON"),
        (encode({"a": 7}), "describes tensor 'a'"),
        (encode({"a": tensor(0, 4, dtype="F77")}, 4), "unknown type 'F77'"),
        (encode({"a": tensor(0, 4) | {"shape": [-4]}}, 4), "describes tensor 'a'"),
        (encode({"a": tensor(0, 4) | {"shape": [1] * 17}}, 4), "describes tensor 'a'"),
        (encode({"a": tensor(0, 4) | {"shape": [1 << 62, 1 << 62]}}, 4), "is not the size of its shape"),
        (encode({"a": tensor(0, 4) | {"data_offsets": [4, 0]}}, 4), "is not the size of its shape"),
        (encode({"a": tensor(0, 4) | {"data_offsets": [0]}}, 4), "describes tensor 'a'"),
        (encode({"a": tensor(0, 1, dtype="F4", shape=[3])}, 1), "is not the size of its shape"),
        (encode({"a": tensor(0, 4), "b": tensor(2, 6)}, 6), "overlap at byte 2"),
        (encode({"a": tensor(0, 4), "b": tensor(5, 8)}, 8), "leave a gap at byte 4"),
        (encode({"a": tensor(4, 8)}, 8), "leave a gap at byte 0"),
        (encode({"a": tensor(0, 9)}, 8), "up to byte 9 of 8"),
        (encode({"a": tensor(0, 4)}, 8), "up to byte 4 of 8"),
    ],
)
def test_hostile_header_is_refused_with_file_and_problem(content: bytes, problem: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        parse(content)
    assert caught.value.reason == "HeaderInvalid"
    assert caught.value.message.startswith(f"{NAME}: ")
    assert problem in caught.value.message
    assert caught.value.message.isprintable()


def test_longest_header_is_read_within_the_memory_of_a_job() -> None:
    entry, share = b'"%07d":{"dtype":"U8","shape":[],"data_offsets":[0,0]}', 16
    text = b"{" + b",".join(entry % number for number in range(MAX_HEADER_BYTES // share // 56)) + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError):
            safetensors_header.parse(NAME, text, 8 + len(text))
        assert tracemalloc.get_traced_memory()[1] * share < 300 << 20, "a Job has 512 MiB"
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_header_or_an_error(content: bytes) -> None:
    for attempt in (content, struct.pack("<Q", len(content)) + content):
        with contextlib.suppress(ArtifactError):
            parse(attempt)
