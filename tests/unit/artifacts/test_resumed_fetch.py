"""Downloads that are interrupted: resumed where they were cut, bounded in retries, and never mixed with others."""

import asyncio
import dataclasses
import errno
import gc
import hashlib
import os
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from artifacts import durable
from artifacts.errors import ArtifactError
from artifacts.partial_download import PartialDownload, Segment, in_thread
from artifacts.retry import Backoff, Patience
from tests.support.eventually import eventually
from tests.support.file_server import FileServer, TransferFault
from tests.support.live_processes import run_beside
from tests.unit.artifacts.fetch_call import FetchCall
from tests.unit.artifacts.stored_weights import HURRIED

MIB = 1 << 20


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _rewrite(path: Path, content: bytes) -> None:
    """Write another version, with another entity tag even if the clock is coarse."""
    before = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before + 10**9, before + 10**9))


async def _cut(call: FetchCall, server: FileServer) -> int:
    """Leave a partial download, as a process that gave up does, and return its size."""
    server.faults.append(TransferFault(3 * MIB))
    impatient = dataclasses.replace(HURRIED, attempts=1)
    error = await call.refused(server.url + "/weights.gguf", patience=impatient)
    assert error.reason == "SourceUnreachable"
    assert error.retryable
    size = _part(call).stat().st_size
    # Only the data in the client's buffer is lost when the connection breaks.
    assert 2 * MIB < size <= 3 * MIB
    return size


def _part(call: FetchCall) -> Path:
    return call.to / "weights.gguf.part"


async def test_cut_download_is_resumed_within_one_call(call: FetchCall, server: FileServer, weights: bytes) -> None:
    server.faults.extend([TransferFault(MIB), TransferFault(2 * MIB), TransferFault(0)])
    fetched = await call(server.url + "/weights.gguf")
    assert fetched.path.read_bytes() == weights
    starts = [int((seen.range or "bytes=0-")[6:-1]) for seen in server.requests]
    assert starts == sorted(starts)
    assert 0 < starts[1] < starts[2] == starts[3]


async def test_shorter_range_than_requested_is_continued(call: FetchCall, server: FileServer, weights: bytes) -> None:
    server.faults.append(TransferFault(2 * MIB))
    server.range_bytes = MIB
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights
    assert {seen.status for seen in server.requests[1:]} == {206}
    assert len(server.requests) > 2


@pytest.mark.usefixtures("weights")
async def test_ranges_without_progress_end_the_retries(call: FetchCall, server: FileServer) -> None:
    await _cut(call, server)
    server.range_bytes = 0
    error = await call.refused(server.url + "/weights.gguf")
    assert (error.reason, error.retryable) == ("SourceUnreachable", True)


async def test_later_call_resumes_the_partial_download(call: FetchCall, server: FileServer, weights: bytes) -> None:
    size = await _cut(call, server)
    fetched = await call(server.url + "/weights.gguf", sha256=_sha256(weights))
    assert fetched.path.read_bytes() == weights
    assert server.requests[-1].range == f"bytes={size}-"
    assert server.requests[-1].bytes_sent == len(weights) - size


async def test_complete_partial_download_is_finished_without_fetching_it_again(
    call: FetchCall, server: FileServer, weights: bytes
) -> None:
    await _cut(call, server)
    _part(call).write_bytes(weights)
    state = _part(call).with_name("weights.gguf.part.json")
    durable.write(state, {**msgspec.json.decode(state.read_bytes()), "missing": []})
    assert (await call(server.url + "/weights.gguf")).sha256 == _sha256(weights)
    assert server.requests[-1].bytes_sent == 1


async def test_deleted_partial_file_is_not_taken_for_bytes(call: FetchCall, server: FileServer, weights: bytes) -> None:
    await _cut(call, server)
    _part(call).unlink()
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights
    assert server.requests[-1].range is None


async def test_changed_upstream_starts_from_zero(call: FetchCall, server: FileServer, weights: bytes) -> None:
    await _cut(call, server)
    _rewrite(server.root / "weights.gguf", weights[::-1])
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights[::-1]


@pytest.mark.parametrize(("size", "status"), [(5 * MIB, 206), (MIB, 416)])
async def test_changed_upstream_is_noticed_when_the_server_ignores_if_range(
    call: FetchCall, server: FileServer, weights: bytes, size: int, status: int
) -> None:
    await _cut(call, server)
    server.conditions = False
    _rewrite(server.root / "weights.gguf", weights[::-1][:size])
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights[::-1][:size]
    assert [seen.status for seen in server.requests] == [200, status, 200]


async def test_partial_download_of_another_source_is_not_continued(
    call: FetchCall, server: FileServer, weights: bytes
) -> None:
    await _cut(call, server)
    (server.root / "other").mkdir()
    (server.root / "other/weights.gguf").write_bytes(weights[::-1])
    assert (await call(server.url + "/other/weights.gguf")).path.read_bytes() == weights[::-1]


@pytest.mark.parametrize("attribute", ["ranges", "etags", "validators"])
async def test_simpler_servers_work_too(call: FetchCall, server: FileServer, weights: bytes, attribute: str) -> None:
    setattr(server, attribute, False)
    server.faults.extend([TransferFault(2 * MIB), TransferFault(3 * MIB)])
    fetched = await call(server.url + "/weights.gguf")
    assert fetched.path.read_bytes() == weights
    assert bool(fetched.revision) == server.validators


async def test_damaged_partial_download_is_healed_by_one_start_from_zero(
    call: FetchCall, server: FileServer, weights: bytes
) -> None:
    await _cut(call, server)
    with _part(call).open("r+b") as file:
        file.write(bytes(4096))
    assert (await call(server.url + "/weights.gguf", sha256=_sha256(weights))).path.read_bytes() == weights


async def test_wrong_digest_deletes_the_partial_download_and_is_permanent(
    call: FetchCall, server: FileServer, weights: bytes
) -> None:
    error = await call.refused(server.url + "/weights.gguf", sha256="0" * 64)
    assert (error.reason, error.retryable) == ("ChecksumMismatch", False)
    assert "0" * 64 in error.message
    assert _sha256(weights) not in error.message
    assert call.names() == {"weights.gguf.lock"}
    assert len(server.requests) == 1


async def test_modified_file_is_fetched_again(call: FetchCall, server: FileServer, weights: bytes) -> None:
    fetched = await call(server.url + "/weights.gguf")
    _rewrite(fetched.path, b"broken")
    again = await call(server.url + "/weights.gguf")
    assert again.path.read_bytes() == weights


async def test_full_volume_keeps_the_partial_download(
    call: FetchCall, server: FileServer, weights: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PartialDownload.write

    async def full(self: PartialDownload, segment: Segment, block: bytes) -> None:
        if self.size_bytes > 2 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        await write(self, segment, block)

    with monkeypatch.context() as patch:
        patch.setattr(PartialDownload, "write", full)
        error = await call.refused(server.url + "/weights.gguf")
    assert (error.reason, error.retryable) == ("NoSpace", True)
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights
    assert server.requests[-1].range


async def test_cancelled_fetch_frees_the_lock_and_keeps_the_partial_download(
    call: FetchCall, server: FileServer, weights: bytes
) -> None:
    server.faults.append(TransferFault(2 * MIB, silent=True))
    reached = asyncio.Event()
    patient = dataclasses.replace(HURRIED, silence_seconds=60)
    show = lambda done, _total: reached.set() if done >= 2 * MIB else None  # noqa: E731
    task = asyncio.ensure_future(call(server.url + "/weights.gguf", patience=patient, on_progress=show))
    await asyncio.wait_for(reached.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights
    assert server.requests[-1].range == f"bytes={2 * MIB}-"


async def test_next_process_finishes_the_download_of_a_killed_one(
    call: FetchCall, server: FileServer, weights: bytes
) -> None:
    server.faults.append(TransferFault(9 * MIB // 2, silent=True))
    command = [sys.executable, "-m", "cli.main", "fetch", server.url + "/weights.gguf", "--to", str(call.to)]
    left = _part(call)
    async with run_beside(*command):
        await eventually(lambda: left.exists() and left.stat().st_size == 9 * MIB // 2)
        await eventually(left.with_name("weights.gguf.part.json").exists)
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights
    assert server.requests[-1].range


async def test_error_after_a_cancellation_is_not_logged_by_the_loop() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    started, go_on = threading.Event(), threading.Event()

    def fail() -> None:
        started.set()
        go_on.wait()
        raise OSError

    running = asyncio.create_task(in_thread(fail))
    await asyncio.to_thread(started.wait)
    running.cancel()
    go_on.set()
    await asyncio.wait([running])
    del running
    gc.collect()
    assert complaints == []


def test_pause_is_not_shorter_than_the_server_asks() -> None:
    backoff = Backoff(Patience(attempts=9, first_pause_seconds=1, longest_pause_seconds=20))
    asked = ArtifactError("SourceUnreachable", "x", retryable=True, retry_after_seconds=15)
    assert backoff.pause_or_raise(asked) == 15
    with pytest.raises(ArtifactError):
        backoff.pause_or_raise(ArtifactError("SourceUnreachable", "x", retryable=True, retry_after_seconds=21))


def test_attempts_without_progress_are_bounded_and_progress_counts_anew() -> None:
    error = ArtifactError("SourceUnreachable", "x", retryable=True)
    backoff = Backoff(Patience(attempts=4, first_pause_seconds=8, longest_pause_seconds=20))
    assert 4 <= backoff.pause_or_raise(error) <= 8
    assert 8 <= backoff.pause_or_raise(error) <= 16
    assert 10 <= backoff.pause_or_raise(error) <= 20
    assert 4 <= backoff.pause_or_raise(error, MIB) <= 8
    for _ in range(2):
        backoff.pause_or_raise(error, MIB)
    with pytest.raises(ArtifactError):
        backoff.pause_or_raise(error, MIB)
