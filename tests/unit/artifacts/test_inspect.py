"""Inspection reads the header of a file and not its weights, from a hub, any web server, or a local folder."""

import asyncio
import dataclasses
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from artifacts.errors import ArtifactError
from artifacts.inspect import Inspection, inspect
from artifacts.retry import Patience
from artifacts.source import parse
from tests.support.file_server import COMMIT, FileServer, TransferFault
from tests.support.source_access import take_access
from tests.support.tiny_models import tiny_gguf

HURRIED = Patience(first_pause_seconds=0.001, longest_pause_seconds=0.01, silence_seconds=10, connect_seconds=10)


async def _inspect(server: FileServer, source: str, **options: Any) -> Inspection:
    access = take_access(options, endpoint=server.url, patience=HURRIED)
    return await inspect(parse(source), access, **options)


async def _refused(server: FileServer, source: str, **options: Any) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await _inspect(server, source, **options)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.fixture
def model(server: FileServer) -> Path:
    """A model of some MB, served as /tiny.gguf and as hf://acme/tiny/tiny.gguf."""
    path = server.root / "tiny.gguf"
    tiny_gguf.write(path, n_embd=256, n_ff=512)
    (server.root / "acme/tiny").mkdir(parents=True)
    (server.root / "acme/tiny/tiny.gguf").hardlink_to(path)
    return path


@pytest.fixture
def long_header(server: FileServer) -> Path:
    """A file with a header of 3 MiB, which takes three requests, and a tensor of 16 MiB after it."""
    key = b"tokenizer.ggml.tokens"
    string = struct.pack("<Q", 1016) + bytes(1016)
    array = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, 3072) + string * 3072
    path = server.root / "long.gguf"
    tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 16 << 20, 24, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + array + tensor + bytes((16 << 20) + 32))
    return path


async def test_only_the_header_is_read(server: FileServer, model: Path) -> None:
    inspection = await _inspect(server, server.url + "/tiny.gguf")
    stat = await asyncio.to_thread(model.stat)
    size = stat.st_size
    assert (inspection.file, inspection.size_bytes, inspection.sha256) == ("tiny.gguf", size, "")
    assert inspection.revision == f"{stat.st_mtime_ns:x}-{size:x}"
    assert (inspection.gguf.architecture, inspection.gguf.layer_count) == ("llama", 2)
    assert size - (64 << 10) < inspection.tensor_bytes < size
    assert server.bytes_sent("/tiny.gguf") == 256 << 10


@pytest.mark.usefixtures("model")
async def test_hub_states_commit_and_digest(server: FileServer) -> None:
    inspection = await _inspect(server, "hf://acme/tiny/tiny.gguf")
    assert inspection.revision == COMMIT
    assert inspection.sha256
    assert len(inspection.sha256) == 64
    error = await _refused(server, "hf://acme/tiny/tiny.gguf", sha256="0" * 64)
    assert (error.reason, error.retryable) == ("ChecksumMismatch", False)
    assert f"but the file on the hub has {inspection.sha256}: correct" in error.message


@pytest.mark.usefixtures("model")
async def test_token_reaches_the_hub_and_never_its_cdn(server: FileServer) -> None:
    server.token = "hf_secret"
    error = await _refused(server, "hf://acme/tiny/tiny.gguf")
    assert (error.reason, error.retryable) == ("SourceUnauthorized", False)
    await _inspect(server, "hf://acme/tiny/tiny.gguf", token="hf_secret")
    assert [seen.authorization for seen in server.requests] == [None, "Bearer hf_secret", None]


@pytest.mark.usefixtures("long_header")
async def test_long_header_is_read_in_growing_ranges(server: FileServer) -> None:
    assert (await _inspect(server, server.url + "/long.gguf")).gguf.file_version == 3
    kib = 1024
    assert [seen.range for seen in server.requests] == [
        f"bytes=0-{256 * kib - 1}",
        f"bytes={256 * kib}-{1024 * kib - 1}",
        f"bytes={1024 * kib}-{4096 * kib - 1}",
    ]


@pytest.mark.usefixtures("long_header")
async def test_server_without_ranges_is_read_up_to_the_end_of_the_header(server: FileServer) -> None:
    server.ranges = False
    assert (await _inspect(server, server.url + "/long.gguf")).gguf.file_version == 3
    assert len(server.requests) == 1
    # Data in the socket buffers counts as sent.
    assert server.bytes_sent("/long.gguf") < 16 << 20


@pytest.mark.usefixtures("model")
async def test_cuts_and_overload_are_retried(server: FileServer) -> None:
    server.statuses.append(503)
    server.faults.extend([TransferFault(1000), TransferFault(1000, silent=True)])
    hasty = dataclasses.replace(HURRIED, silence_seconds=0.3)
    assert (await _inspect(server, server.url + "/tiny.gguf", patience=hasty)).gguf.model_name == "tiny-llama"
    assert len(server.requests) >= 4


async def test_missing_file_is_requested_once(server: FileServer) -> None:
    error = await _refused(server, server.url + "/none.gguf")
    assert (error.reason, error.retryable) == ("SourceNotFound", False)
    assert len(server.requests) == 1


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"GGUF\x03\0\0\0" + b"\xff" * 4096])
async def test_a_file_that_is_no_model_is_refused_by_name(server: FileServer, content: bytes) -> None:
    (server.root / "bad.gguf").write_bytes(content)
    for ranges in (True, False):
        server.ranges = ranges
        error = await _refused(server, server.url + "/bad.gguf")
        assert (error.reason, error.retryable) == ("HeaderInvalid", False)
        assert "/bad.gguf" in error.message


async def test_truncated_model_is_refused_without_reading_it(server: FileServer, model: Path) -> None:
    os.truncate(model, 1 << 20)
    assert "cut or corrupted" in (await _refused(server, server.url + "/tiny.gguf")).message


async def test_split_model_is_refused_with_the_way_out(server: FileServer) -> None:
    key = b"split.count"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, 3)
    (server.root / "part.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    error = await _refused(server, server.url + "/part.gguf")
    assert error.reason == "SplitUnsupported"
    assert "name them NAME-00001-of-00003.gguf" in error.message


async def test_local_file_is_inspected_below_the_root_only(server: FileServer, model: Path, long_header: Path) -> None:
    for path in (model, long_header):
        inspection = await _inspect(server, f"file://{path}", file_root=path.parent)
        assert (inspection.file, inspection.size_bytes) == (path.name, path.stat().st_size)
    assert (await _refused(server, f"file://{model}")).reason == "SourceForbidden"
    assert server.requests == []
