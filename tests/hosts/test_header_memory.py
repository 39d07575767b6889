"""Hostile headers are read within the memory limit of the Job that reads them, by the real command."""

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller.models.jobs import MEMORY_MIB

MIB = 1 << 20
HEADER_BYTES = 63 * MIB
KEPT_ELEMENTS = 4096


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


@pytest.mark.parametrize("entries", [_short_arrays, _long_keys, _long_texts, _nested_arrays])
def test_hostile_header_is_read_within_the_memory_of_its_job(
    entries: Callable[[], Iterator[bytes]], tmp_path: Path
) -> None:
    made = list(entries())
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(made)) + b"".join(made) + bytes(4096))
    reader = (
        "import resource, sys; from cli.main import main\n"
        "sys.argv[1:] = ['inspect', sys.argv[1], '--file-root', '/']\n"
        "try: main()\n"
        "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", reader, f"file://{path}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak_kib = int(done.stdout.split()[-1])
    assert HEADER_BYTES / 1024 < peak_kib < MEMORY_MIB * 1024
