"""Downloads: resumed where they were cut, verified, bounded in retries, and refused with a message that helps."""

import asyncio
import dataclasses
import errno
import gc
import hashlib
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from artifacts import partial_download
from artifacts.errors import ArtifactError
from artifacts.fetch import FetchedArtifact, fetch
from artifacts.partial_download import in_thread
from artifacts.retry import Backoff, Patience
from artifacts.source import MAX_NAME_BYTES, parse
from tests.support.file_server import ALLOWED_NETWORKS, COMMIT, FileServer, TransferFault

HURRIED = Patience(first_pause_seconds=0.001, longest_pause_seconds=0.01, silence_seconds=10, connect_seconds=10)
MIB = 1 << 20


class Call(NamedTuple):
    """A fetch with defaults for the arguments that a test does not set."""

    to: Path
    endpoint: str

    async def __call__(self, source: str, **options: Any) -> FetchedArtifact:
        defaults: dict[str, Any] = {"sha256": None, "token": None, "file_root": None, "revision": None}
        defaults["on_progress"] = lambda _done, _total: None
        return await fetch(
            parse(source),
            self.to,
            **{
                "endpoint": self.endpoint,
                "patience": HURRIED,
                "allowed_networks": ALLOWED_NETWORKS,
                **defaults,
                **options,
            },
        )

    def names(self) -> set[str]:
        return {path.name for path in self.to.iterdir()} if self.to.exists() else set()

    async def refused(self, source: str, **options: Any) -> ArtifactError:
        with pytest.raises(ArtifactError) as caught:
            await self(source, **options)
        assert "\n" not in caught.value.message
        return caught.value


@pytest.fixture
def call(tmp_path: Path, server: FileServer) -> Call:
    return Call(tmp_path / "cache", server.url)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _rewrite(path: Path, content: bytes) -> None:
    """Write another version, with another entity tag even if the clock is coarse."""
    before = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before + 10**9, before + 10**9))


async def _cut(call: Call, server: FileServer) -> int:
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


def _part(call: Call) -> Path:
    return call.to / "weights.gguf.part"


async def test_second_fetch_sends_no_request(call: Call, server: FileServer, weights: bytes) -> None:
    progress: list[tuple[int, int | None]] = []
    source = server.url + "/weights.gguf"
    first = await call(source, on_progress=lambda done, total: progress.append((done, total)))
    assert first.path.read_bytes() == weights
    assert (first.size_bytes, first.sha256) == (len(weights), _sha256(weights))
    etag = f"{(server.root / 'weights.gguf').stat().st_mtime_ns:x}-{len(weights):x}"
    assert first.revision == etag
    assert progress == sorted(progress)
    assert progress[-1] == (len(weights), len(weights))

    assert await call(source) == first
    assert await call(source, sha256=first.sha256) == first
    assert await call(source, revision=etag) == first
    assert len(server.requests) == 1
    assert call.names() == {"weights.gguf", "weights.gguf.lock", "weights.gguf.verified.json"}


async def test_cut_download_is_resumed_within_one_call(call: Call, server: FileServer, weights: bytes) -> None:
    server.faults.extend([TransferFault(MIB), TransferFault(2 * MIB), TransferFault(0)])
    fetched = await call(server.url + "/weights.gguf")
    assert fetched.path.read_bytes() == weights
    starts = [int((seen.range or "bytes=0-")[6:-1]) for seen in server.requests]
    assert starts == sorted(starts)
    assert 0 < starts[1] < starts[2] == starts[3]


async def test_shorter_range_than_requested_is_continued(call: Call, server: FileServer, weights: bytes) -> None:
    server.faults.append(TransferFault(2 * MIB))
    server.range_bytes = MIB
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights
    assert {seen.status for seen in server.requests[1:]} == {206}
    assert len(server.requests) > 2


@pytest.mark.usefixtures("weights")
async def test_ranges_without_progress_end_the_retries(call: Call, server: FileServer) -> None:
    await _cut(call, server)
    server.range_bytes = 0
    error = await call.refused(server.url + "/weights.gguf")
    assert (error.reason, error.retryable) == ("SourceUnreachable", True)


async def test_response_without_size_is_refused(call: Call) -> None:
    async def half_an_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nGGUF")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(half_an_answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await call.refused(f"http://127.0.0.1:{port}/weights.gguf")
    assert (error.reason, error.retryable) == ("SourceRefused", False)
    assert "does not say how large the file is" in error.message
    assert call.names() == {"weights.gguf.lock"}


@pytest.mark.parametrize("location", ["s3://cdn/x?sig=hunter2", "HTTPS://[cdn/x?sig=hunter2", "//[cdn/x?sig=hunter2"])
async def test_error_of_an_invalid_redirect_shows_no_signature(call: Call, location: str) -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: {location}\r\n\r\n".encode())
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(redirect, "127.0.0.1", 0) as server:
        error = await call.refused(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/weights.gguf")
    assert error.reason == "SourceRefused"
    assert "hunter2" not in error.message


async def test_an_invalid_host_name_is_reported_as_no_url(call: Call) -> None:
    assert "is no http(s):// URL" in (await call.refused("https://files..example/weights.gguf")).message


async def test_an_entity_tag_that_is_not_ascii_is_ignored(call: Call) -> None:
    async def one_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 4\r\nETag: "\xe9"\r\n\r\nGGUF')
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(one_answer, "127.0.0.1", 0) as server:
        fetched = await call(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/weights.gguf")
    assert fetched.path.read_bytes() == b"GGUF"
    assert fetched.revision == ""


async def test_silent_server_times_out_and_is_retried(call: Call, server: FileServer, weights: bytes) -> None:
    server.faults.append(TransferFault(MIB, silent=True))
    hasty = dataclasses.replace(HURRIED, silence_seconds=0.3)
    assert (await call(server.url + "/weights.gguf", patience=hasty)).path.read_bytes() == weights
    assert len(server.requests) > 1


async def test_later_call_resumes_the_partial_download(call: Call, server: FileServer, weights: bytes) -> None:
    size = await _cut(call, server)
    fetched = await call(server.url + "/weights.gguf", sha256=_sha256(weights))
    assert fetched.path.read_bytes() == weights
    assert server.requests[-1].range == f"bytes={size - 1}-"
    assert server.requests[-1].bytes_sent == len(weights) - size + 1


async def test_complete_partial_download_is_finished_without_fetching_it_again(
    call: Call, server: FileServer, weights: bytes
) -> None:
    await _cut(call, server)
    _part(call).write_bytes(weights)
    assert (await call(server.url + "/weights.gguf")).sha256 == _sha256(weights)
    assert server.requests[-1].bytes_sent == 1


async def test_changed_upstream_starts_from_zero(call: Call, server: FileServer, weights: bytes) -> None:
    await _cut(call, server)
    _rewrite(server.root / "weights.gguf", weights[::-1])
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights[::-1]


@pytest.mark.parametrize(("size", "status"), [(5 * MIB, 206), (MIB, 416)])
async def test_changed_upstream_is_noticed_when_the_server_ignores_if_range(
    call: Call, server: FileServer, weights: bytes, size: int, status: int
) -> None:
    await _cut(call, server)
    server.conditions = False
    _rewrite(server.root / "weights.gguf", weights[::-1][:size])
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights[::-1][:size]
    assert [seen.status for seen in server.requests] == [200, status, 200]


async def test_partial_download_of_another_source_is_not_continued(
    call: Call, server: FileServer, weights: bytes
) -> None:
    await _cut(call, server)
    (server.root / "other").mkdir()
    (server.root / "other/weights.gguf").write_bytes(weights[::-1])
    assert (await call(server.url + "/other/weights.gguf")).path.read_bytes() == weights[::-1]


@pytest.mark.parametrize("attribute", ["ranges", "etags", "validators"])
async def test_simpler_servers_work_too(call: Call, server: FileServer, weights: bytes, attribute: str) -> None:
    setattr(server, attribute, False)
    server.faults.extend([TransferFault(2 * MIB), TransferFault(3 * MIB)])
    fetched = await call(server.url + "/weights.gguf")
    assert fetched.path.read_bytes() == weights
    assert bool(fetched.revision) == server.validators


async def test_damaged_partial_download_is_healed_by_one_start_from_zero(
    call: Call, server: FileServer, weights: bytes
) -> None:
    await _cut(call, server)
    with _part(call).open("r+b") as file:
        file.write(bytes(4096))
    assert (await call(server.url + "/weights.gguf", sha256=_sha256(weights))).path.read_bytes() == weights


async def test_wrong_digest_deletes_the_partial_download_and_is_permanent(
    call: Call, server: FileServer, weights: bytes
) -> None:
    error = await call.refused(server.url + "/weights.gguf", sha256="0" * 64)
    assert (error.reason, error.retryable) == ("ChecksumMismatch", False)
    assert "0" * 64 in error.message
    assert _sha256(weights) not in error.message
    assert call.names() == {"weights.gguf.lock"}
    assert len(server.requests) == 1


async def test_digest_that_differs_from_the_hubs_is_refused_without_a_download(
    call: Call, server: FileServer, weights: bytes
) -> None:
    error = await call.refused("hf://acme/tiny/weights.gguf", sha256="0" * 64)
    assert (error.reason, error.retryable) == ("ChecksumMismatch", False)
    assert server.bytes_sent("/weights.gguf") < len(weights)


async def test_modified_file_is_fetched_again(call: Call, server: FileServer, weights: bytes) -> None:
    fetched = await call(server.url + "/weights.gguf")
    _rewrite(fetched.path, b"broken")
    again = await call(server.url + "/weights.gguf")
    assert again.path.read_bytes() == weights


async def test_existing_file_with_the_expected_digest_is_used(call: Call, server: FileServer, weights: bytes) -> None:
    call.to.mkdir()
    (call.to / "weights.gguf").write_bytes(weights)
    await call(server.url + "/weights.gguf", sha256=_sha256(weights))
    assert server.requests == []


async def test_hub_source_resolves_its_commit_and_digest(call: Call, server: FileServer, weights: bytes) -> None:
    fetched = await call("hf://acme/tiny/weights.gguf")
    assert (fetched.revision, fetched.sha256) == (COMMIT, _sha256(weights))
    assert server.requests[0].path == "/acme/tiny/resolve/main/weights.gguf"
    await call("hf://acme/tiny/weights.gguf", revision=COMMIT)
    assert len(server.requests) == 2


@pytest.mark.usefixtures("weights")
async def test_resolved_revision_is_requested_from_the_hub(call: Call, server: FileServer) -> None:
    await call("hf://acme/tiny/weights.gguf", revision=COMMIT)
    assert server.requests[0].path == f"/acme/tiny/resolve/{COMMIT}/weights.gguf"


@pytest.mark.usefixtures("weights")
async def test_token_reaches_the_hub_and_never_its_cdn(call: Call, server: FileServer) -> None:
    server.token = "hf_secret"
    await call("hf://acme/tiny/weights.gguf", token="hf_secret")
    hub, cdn = server.requests
    assert hub.authorization == "Bearer hf_secret"
    assert (cdn.port, cdn.authorization) == (server.cdn_port, None)


@pytest.mark.usefixtures("weights")
@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, "SourceUnauthorized"),
        (403, "SourceUnauthorized"),
        (404, "SourceNotFound"),
        (410, "SourceNotFound"),
        (400, "SourceRefused"),
        (429, "SourceUnreachable"),
        (500, "SourceUnreachable"),
        (503, "SourceUnreachable"),
    ],
)
async def test_http_status_becomes_a_reason(call: Call, server: FileServer, status: int, reason: str) -> None:
    retryable = reason == "SourceUnreachable"
    server.statuses.extend([status] * HURRIED.attempts)
    error = await call.refused(server.url + "/weights.gguf?sig=hunter2", token="hf_hunter2")
    assert (error.reason, error.retryable) == (reason, retryable)
    assert str(status) in error.message
    assert "hunter2" not in error.message
    assert len(server.requests) == (HURRIED.attempts if retryable else 1)
    assert call.names() == {"weights.gguf.lock"}


async def test_overloaded_server_is_retried(call: Call, server: FileServer, weights: bytes) -> None:
    server.statuses.extend([503, 429])
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights


async def test_refused_connection_is_unreachable(call: Call) -> None:
    error = await call.refused("http://127.0.0.1:9/weights.gguf")
    assert (error.reason, error.retryable) == ("SourceUnreachable", True)


async def test_other_revision_than_the_inspected_one_is_refused_unless_the_digest_decides(
    call: Call, server: FileServer, weights: bytes
) -> None:
    error = await call.refused(server.url + "/weights.gguf", revision="inspected")
    assert (error.reason, error.retryable) == ("SourceChanged", False)
    assert "inspected" in error.message
    await call(server.url + "/weights.gguf", revision="inspected", sha256=_sha256(weights))


@pytest.mark.usefixtures("weights")
async def test_space_is_checked_before_a_byte_is_written(
    call: Call, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(server.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=MIB))
    error = await call.refused(server.url + "/weights.gguf")
    assert (error.reason, error.retryable) == ("NoSpace", True)
    assert "needs 5.0 MiB more, 1.0 MiB are free: 4.0 MiB are" in error.message
    assert "missing" in error.message
    assert call.names() == {"weights.gguf.lock"}


async def test_full_volume_keeps_the_partial_download(
    call: Call, server: FileServer, weights: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = partial_download.PartialDownload.append

    async def full(self: partial_download.PartialDownload, block: bytes) -> None:
        if self.size_bytes > 2 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        await append(self, block)

    with monkeypatch.context() as patch:
        patch.setattr(partial_download.PartialDownload, "append", full)
        error = await call.refused(server.url + "/weights.gguf")
    assert (error.reason, error.retryable) == ("NoSpace", True)
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights
    assert server.requests[-1].range


@pytest.mark.usefixtures("weights")
async def test_folder_that_cannot_be_made_is_one_clear_error(call: Call, server: FileServer) -> None:
    call.to.write_bytes(b"a file")
    error = await call.refused(server.url + "/weights.gguf")
    assert error.reason == "StorageFailed"


async def test_two_fetches_of_one_file_download_it_once(call: Call, server: FileServer, weights: bytes) -> None:
    server.pause_seconds = 0.002
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call(server.url + "/weights.gguf")) for _ in range(3)]
    assert {task.result().sha256 for task in tasks} == {_sha256(weights)}
    assert server.bytes_sent("/weights.gguf") == len(weights)


async def test_cancelled_fetch_frees_the_lock_and_keeps_the_partial_download(
    call: Call, server: FileServer, weights: bytes
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
    assert server.requests[-1].range == f"bytes={2 * MIB - 1}-"


async def test_next_process_finishes_the_download_of_a_killed_one(
    call: Call, server: FileServer, weights: bytes
) -> None:
    server.faults.append(TransferFault(3 * MIB, silent=True))
    command = [sys.executable, "-m", "cli.main", "fetch", server.url + "/weights.gguf", "--to", str(call.to)]
    process = await asyncio.create_subprocess_exec(*command)
    left = _part(call)
    async with asyncio.timeout(30):
        while not (left.exists() and left.stat().st_size == 3 * MIB):  # noqa: ASYNC110  another process
            await asyncio.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights
    assert server.requests[-1].range


async def test_local_file_is_not_copied(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "models/a.gguf"
    path.parent.mkdir()
    path.write_bytes(b"weights")
    source, root = f"file://{path}", path.parent
    fetched = await call(source, file_root=root)
    assert (fetched.path, fetched.size_bytes, fetched.sha256) == (path, 7, "")
    assert (await call(source, file_root=root, sha256=_sha256(b"weights"))).sha256 == _sha256(b"weights")
    assert (await call.refused(source, file_root=root, sha256="0" * 64)).reason == "ChecksumMismatch"
    assert path.read_bytes() == b"weights"
    assert call.names() == set()


async def test_longest_name_is_fetched(call: Call, server: FileServer) -> None:
    name = "w" * (MAX_NAME_BYTES - len(".gguf")) + ".gguf"
    (server.root / name).write_bytes(b"weights")
    assert (await call(f"{server.url}/{name}")).path.name == name
    assert (await call(f"{server.url}/{name}")).sha256 == _sha256(b"weights")


async def test_local_file_outside_the_root_is_refused(call: Call, tmp_path: Path) -> None:
    root, outside = tmp_path / "models", tmp_path / "secret.gguf"
    root.mkdir()
    outside.write_bytes(b"secret")
    (root / "link.gguf").symlink_to(outside)
    (root / "loop.gguf").symlink_to(root / "loop.gguf")
    (root / "folder.gguf").mkdir()
    for path, file_root, reason in [
        (outside, root, "SourceForbidden"),
        (root / "link.gguf", root, "SourceForbidden"),
        (outside, None, "SourceForbidden"),
        (root / "none.gguf", root, "SourceNotFound"),
        (root / "loop.gguf", root, "SourceNotFound"),
        (root / "folder.gguf", root, "SourceNotFound"),
    ]:
        error = await call.refused(f"file://{path}", file_root=file_root)
        assert (error.reason, error.retryable) == (reason, False)
    assert "--file-root" in (await call.refused(f"file://{outside}")).message


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


def test_attempts_without_progress_are_bounded_and_progress_counts_anew() -> None:
    error = ArtifactError("SourceUnreachable", "x", retryable=True)
    backoff = Backoff(Patience(attempts=4, first_pause_seconds=8, longest_pause_seconds=20))
    assert 4 <= backoff.pause_seconds(error) <= 8
    assert 8 <= backoff.pause_seconds(error) <= 16
    assert 10 <= backoff.pause_seconds(error) <= 20
    assert 4 <= backoff.pause_seconds(error, MIB) <= 8
    for _ in range(2):
        backoff.pause_seconds(error, MIB)
    with pytest.raises(ArtifactError):
        backoff.pause_seconds(error, MIB)
