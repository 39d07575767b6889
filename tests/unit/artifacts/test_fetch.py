"""Downloads: verified, refused with a message that helps, and never made twice."""

import asyncio
import contextlib
import dataclasses
import hashlib
import shutil
from pathlib import Path

import pytest

from artifacts.source import MAX_NAME_BYTES
from tests.support.file_server import COMMIT, FileServer, TransferFault
from tests.unit.artifacts.fetch_call import FetchCall
from tests.unit.artifacts.stored_weights import HURRIED

MIB = 1 << 20


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_second_fetch_sends_no_request(call: FetchCall, server: FileServer, weights: bytes) -> None:
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


async def test_response_without_size_is_refused(call: FetchCall) -> None:
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
async def test_error_of_an_invalid_redirect_shows_no_signature(call: FetchCall, location: str) -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: {location}\r\n\r\n".encode())
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(redirect, "127.0.0.1", 0) as server:
        error = await call.refused(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/weights.gguf")
    assert error.reason == "SourceRefused"
    assert "hunter2" not in error.message


async def test_an_invalid_host_name_is_reported_as_no_url(call: FetchCall) -> None:
    assert "is no http(s):// URL" in (await call.refused("https://files..example/weights.gguf")).message


async def test_an_entity_tag_that_is_not_ascii_is_ignored(call: FetchCall) -> None:
    async def one_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 4\r\nETag: "\xe9"\r\n\r\nGGUF')
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(one_answer, "127.0.0.1", 0) as server:
        fetched = await call(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/weights.gguf")
    assert fetched.path.read_bytes() == b"GGUF"
    assert fetched.revision == ""


async def test_silent_server_times_out_and_is_retried(call: FetchCall, server: FileServer, weights: bytes) -> None:
    server.faults.append(TransferFault(MIB, silent=True))
    hasty = dataclasses.replace(HURRIED, silence_seconds=0.3)
    assert (await call(server.url + "/weights.gguf", patience=hasty)).path.read_bytes() == weights
    assert len(server.requests) > 1


async def test_server_that_sends_a_byte_now_and_then_counts_as_silent(call: FetchCall) -> None:
    """It would hold a download, and with it the Job, for as long as it likes."""
    sent, answers = 0, list[asyncio.Task[None] | None]()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        answers.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\nETag: "a"\r\n\r\n')
            while not writer.is_closing():
                writer.write(b"G")
                await writer.drain()
                sent += 1
                await asyncio.sleep(0.02)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    impatient = dataclasses.replace(HURRIED, attempts=2, silence_seconds=0.5)
    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        error = await call.refused(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/weights.gguf", patience=impatient
        )
        await asyncio.wait([answer for answer in answers if answer is not None])
    assert (error.reason, error.retryable) == ("SourceUnreachable", True)
    assert "less than 16.0 KiB per second" in error.message
    assert sent > 10, "it was never silent"


async def test_digest_that_differs_from_the_hubs_is_refused_without_a_download(
    call: FetchCall, server: FileServer, weights: bytes
) -> None:
    error = await call.refused("hf://acme/tiny/weights.gguf", sha256="0" * 64)
    assert (error.reason, error.retryable) == ("ChecksumMismatch", False)
    assert f"expected sha256 {'0' * 64}, but the file on the hub has {_sha256(weights)}: correct" in error.message
    assert server.bytes_sent("/weights.gguf") < len(weights)


async def test_other_digest_of_weights_is_told(call: FetchCall, server: FileServer, tmp_path: Path) -> None:
    path, content = server.root / "other.gguf", b"GGUF of another revision"
    path.write_bytes(content)
    for source, holder in ((f"{server.url}/other.gguf", "the fetched file"), (f"file://{path}", "the file")):
        error = await call.refused(source, file_root=tmp_path, sha256="0" * 64)
        assert f"but {holder} has {_sha256(content)}: correct the sha256" in error.message


async def test_existing_file_with_the_expected_digest_is_used(
    call: FetchCall, server: FileServer, weights: bytes
) -> None:
    call.to.mkdir()
    (call.to / "weights.gguf").write_bytes(weights)
    await call(server.url + "/weights.gguf", sha256=_sha256(weights))
    assert server.requests == []


async def test_hub_source_resolves_its_commit_and_digest(call: FetchCall, server: FileServer, weights: bytes) -> None:
    fetched = await call("hf://acme/tiny/weights.gguf")
    assert (fetched.revision, fetched.sha256) == (COMMIT, _sha256(weights))
    assert server.requests[0].path == "/acme/tiny/resolve/main/weights.gguf"
    await call("hf://acme/tiny/weights.gguf", revision=COMMIT)
    assert len(server.requests) == 2


@pytest.mark.usefixtures("weights")
async def test_resolved_revision_is_requested_from_the_hub(call: FetchCall, server: FileServer) -> None:
    await call("hf://acme/tiny/weights.gguf", revision=COMMIT)
    assert server.requests[0].path == f"/acme/tiny/resolve/{COMMIT}/weights.gguf"


@pytest.mark.usefixtures("weights")
async def test_token_reaches_the_hub_and_never_its_cdn(call: FetchCall, server: FileServer) -> None:
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
async def test_http_status_becomes_a_reason(call: FetchCall, server: FileServer, status: int, reason: str) -> None:
    retryable = reason == "SourceUnreachable"
    server.statuses.extend([status] * HURRIED.attempts)
    error = await call.refused(server.url + "/weights.gguf?sig=hunter2", token="hf_hunter2")
    assert (error.reason, error.retryable) == (reason, retryable)
    assert str(status) in error.message
    assert "hunter2" not in error.message
    assert len(server.requests) == (HURRIED.attempts if retryable else 1)
    assert call.names() == {"weights.gguf.lock"}


async def test_overloaded_server_is_retried(call: FetchCall, server: FileServer, weights: bytes) -> None:
    server.statuses.extend([503, 429])
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ("120", 120),
        ("999999999999999999999", 3600),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 3600),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0),
        ("31 Dec 9999 23:59:59", 3600),
        ("Fri, 31 Dec 99999999999 23:59:59 GMT", 0),
        ("Fri, 31 Dec 1999 23:59:59 -999999999999999999999", 0),
        ("-5", 0),
        ("soon", 0),
        ("\N{SUPERSCRIPT TWO}", 0),
        ("", 0),
    ],
)
async def test_pause_that_the_server_asks_for_is_kept(
    call: FetchCall, server: FileServer, asked: str, seconds: int
) -> None:
    server.retry_after = asked
    server.statuses.extend([429] * HURRIED.attempts)
    error = await call.refused(server.url + "/weights.gguf")
    assert error.retry_after_seconds == seconds
    assert len(server.requests) == (1 if seconds else HURRIED.attempts), "a longer pause is left to the caller"


async def test_refused_connection_is_unreachable(call: FetchCall) -> None:
    error = await call.refused("http://127.0.0.1:9/weights.gguf")
    assert (error.reason, error.retryable) == ("SourceUnreachable", True)
    assert "offline" in error.message


async def test_other_revision_than_the_inspected_one_is_refused_unless_the_digest_decides(
    call: FetchCall, server: FileServer, weights: bytes
) -> None:
    error = await call.refused(server.url + "/weights.gguf", revision="inspected")
    assert (error.reason, error.retryable) == ("SourceChanged", False)
    assert "inspected" in error.message
    await call(server.url + "/weights.gguf", revision="inspected", sha256=_sha256(weights))


@pytest.mark.usefixtures("weights")
async def test_space_is_checked_before_a_byte_is_written(
    call: FetchCall, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(server.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=MIB))
    error = await call.refused(server.url + "/weights.gguf")
    assert (error.reason, error.retryable) == ("NoSpace", True)
    assert "needs 5.0 MiB more, 1.0 MiB are free: free 4.0 MiB or" in error.message
    assert call.names() == {"weights.gguf.lock"}


@pytest.mark.usefixtures("weights")
async def test_folder_that_cannot_be_made_is_one_clear_error(call: FetchCall, server: FileServer) -> None:
    call.to.write_bytes(b"a file")
    error = await call.refused(server.url + "/weights.gguf")
    assert error.reason == "StorageFailed"


async def test_two_fetches_of_one_file_download_it_once(call: FetchCall, server: FileServer, weights: bytes) -> None:
    server.pause_seconds = 0.002
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call(server.url + "/weights.gguf")) for _ in range(3)]
    assert {task.result().sha256 for task in tasks} == {_sha256(weights)}
    assert server.bytes_sent("/weights.gguf") == len(weights)


async def test_local_file_is_not_copied(call: FetchCall, tmp_path: Path) -> None:
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


async def test_longest_name_is_fetched(call: FetchCall, server: FileServer) -> None:
    name = "w" * (MAX_NAME_BYTES - len(".gguf")) + ".gguf"
    (server.root / name).write_bytes(b"weights")
    assert (await call(f"{server.url}/{name}")).path.name == name
    assert (await call(f"{server.url}/{name}")).sha256 == _sha256(b"weights")


async def test_local_file_outside_the_root_is_refused(call: FetchCall, tmp_path: Path) -> None:
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
