"""Hostile headers are read within bounds that a host or a Job has room for, by the real command."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from artifacts.formats.folder_config import CHECKED, MOST_VALUES
from controller.models.jobs import MEMORY_MIB

MIB = 1 << 20
HEADER_BYTES = 63 * MIB
KEPT_ELEMENTS = 4096
MOST_MIB = 128
"""The memory that a Job requests; its limit is several times that."""


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _short_arrays() -> Iterator[bytes]:
    """Arrays of small numbers, each short enough to be kept."""
    for number in range(HEADER_BYTES // (KEPT_ELEMENTS + 64)):
        yield _string(b"k%d" % number) + struct.pack("<IIQ", 9, 1, KEPT_ELEMENTS) + b"\x9f" * KEPT_ELEMENTS


def _long_keys() -> Iterator[bytes]:
    for number in range(HEADER_BYTES // 65536):
        yield _string(b"\xff" * 65000 + b"%d" % number) + struct.pack("<I", 0) + b"\1"


def _long_texts() -> Iterator[bytes]:
    for number in range(4):
        yield _string(b"t%d" % number) + struct.pack("<I", 8) + _string(b"\xff" * (15 * MIB))


def _nested_arrays() -> Iterator[bytes]:
    inner = struct.pack("<IQ", 1, KEPT_ELEMENTS) + b"\x9f" * KEPT_ELEMENTS
    count = HEADER_BYTES // len(inner) - 1
    yield _string(b"nested") + struct.pack("<IIQ", 9, 9, count) + inner * count


def _measure_peak(statements: str, *arguments: str) -> int:
    """Run Python code, and return the most memory that its process had, in MiB; that it refuses is no failure."""
    reader = (
        f"import sys\ntry: {statements}\nexcept ValueError as error: print(error)\n"
        "finally: print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    argv = [sys.executable, "-c", reader, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return int(done.stdout.split()[-1]) >> 10


def _measure_inspection(path: str) -> int:
    statements = "from cli.main import main; sys.argv[1:] = ['inspect', *sys.argv[1:]]; main()"
    return _measure_peak(statements, f"file://{path}", "--file-root", "/")


@pytest.mark.parametrize("entries", [_short_arrays, _long_keys, _long_texts, _nested_arrays])
def test_hostile_gguf_is_inspected_within_bounds(entries: Callable[[], Iterator[bytes]], tmp_path: Path) -> None:
    made = list(entries())
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(made)) + b"".join(made) + bytes(4096))
    assert HEADER_BYTES / MIB < _measure_inspection(str(path)) < MOST_MIB < MEMORY_MIB


def _list_members(form: bytes) -> bytes:
    """Return 31 MiB of members; `#` in `form` is a short name."""
    return b",".join(form.replace(b"#", b"%x" % number) for number in range((31 * MIB) // (len(form) + 6)))


@pytest.mark.parametrize(
    ("start", "form", "end"),
    [
        (b"{", b'"#":1', b"}"),
        (b'{"__metadata__":{', b'"#":""', b"}}"),
        (b"{", b'"#":{"dtype":"F4","shape":[0],"data_offsets":[0,0]}', b"}"),
    ],
    ids=["numbers", "metadata", "tensors"],
)
def test_hostile_safetensors_are_inspected_within_bounds(start: bytes, form: bytes, end: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = start + _list_members(form) + end
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert _measure_inspection(f"{tmp_path}/") < MOST_MIB


def test_index_of_millions_of_tensors_is_read_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    index = b'{"weight_map":{' + _list_members(b'"#":"b"') + b"}}"
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    assert len(index) / MIB < _measure_inspection(f"{tmp_path}/") < MOST_MIB


def test_configurations_of_many_values_are_read_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for name in CHECKED:
        is_long = name == "tokenizer_config.json"
        (tmp_path / name).write_text(json.dumps({"a": [{"a": 1}] * (MOST_VALUES // 2 - 1)}) if is_long else "{}")
        with (tmp_path / name).open("a") as file:
            file.write(" " * ((15 if is_long or "processor" in name else 0) * MIB))
    assert _measure_inspection(f"{tmp_path}/") < MOST_MIB


@pytest.mark.parametrize(
    "page", ["b'<a>' * 1390000", "b'<a ' + b' '.join(b'a%d=\"\"' % number for number in range(400000)) + b'/>'"]
)
def test_page_of_a_bucket_is_parsed_within_bounds(page: str) -> None:
    assert _measure_peak(f"from artifacts.repositories.s3_answers import parse_page; parse_page({page})") < MOST_MIB
