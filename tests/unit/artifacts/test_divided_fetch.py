"""A file over several connections: as fast as they are together, never of two versions, and with little done twice."""

import asyncio
import dataclasses
import hashlib
import os
import random
import sys
from pathlib import Path

import pytest

from artifacts import durable, partial_download
from artifacts.fetch import FetchedArtifact
from artifacts.fetch_source import fetch_source
from artifacts.source import parse
from tests.support.eventually import eventually
from tests.support.file_server import COMMIT, FileServer, TransferFault
from tests.support.live_processes import run_beside
from tests.support.source_access import take_access, take_expected
from tests.unit.artifacts.fetch_call import FetchCall
from tests.unit.artifacts.stored_weights import HURRIED

MIB = 1 << 20
SIZE_BYTES = 12 * MIB
NAME = "/large.gguf"


@pytest.fixture
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_download, "SEGMENT_BYTES", MIB)


@pytest.fixture
def large(server: FileServer, _small_segments: None) -> bytes:
    """Bytes of many segments that are served as /large.gguf, a little slowly, so that connections overlap."""
    content = random.Random(1).randbytes(SIZE_BYTES)  # noqa: S311  weights, not a secret
    (server.root / "large.gguf").write_bytes(content)
    server.pause_seconds = 0.001
    return content


def replace(path: Path, content: bytes) -> None:
    """Put another version in the place of a file: who reads the old one reads it to its end."""
    new = path.with_name("new")
    new.write_bytes(content)
    os.utime(new, ns=(10**18, 10**18))
    new.replace(path)


async def test_file_is_fetched_by_eight_connections(call: FetchCall, server: FileServer, large: bytes) -> None:
    progress: list[int] = []
    fetched = await call(server.url + NAME, on_progress=lambda done, _total: progress.append(done))
    assert fetched.path.read_bytes() == large
    assert fetched.sha256 == hashlib.sha256(large).hexdigest()
    assert progress == sorted(progress)
    assert progress[-1] == SIZE_BYTES
    assert 8 <= server.peak_at_once <= 9, "the first connection is closed, which the server may not know yet"
    first, *others = server.requests
    assert first.range is None
    assert {seen.status for seen in others} == {206}
    # Of the first response, some bytes behind its segment are sent before the connection is closed.
    assert server.bytes_sent(NAME) - first.bytes_sent == SIZE_BYTES - MIB
    assert call.names() == {"large.gguf", "large.gguf.lock", "large.gguf.verified.json"}


async def test_file_of_one_segment_is_one_request(call: FetchCall, server: FileServer, weights: bytes) -> None:
    assert (await call(server.url + "/weights.gguf")).path.read_bytes() == weights
    assert len(server.requests) == 1


@pytest.mark.parametrize("lacking", ["ranges", "etags", "validators", "states_ranges"])
async def test_file_that_cannot_be_divided_is_one_request(
    call: FetchCall, server: FileServer, large: bytes, lacking: str
) -> None:
    server.states_ranges = lacking != "ranges"
    setattr(server, lacking, False)
    assert (await call(server.url + NAME)).path.read_bytes() == large
    assert len(server.requests) == 1


async def test_server_that_ignores_ranges_is_read_by_one_connection(
    call: FetchCall, server: FileServer, large: bytes
) -> None:
    server.ranges = False
    assert (await call(server.url + NAME)).path.read_bytes() == large
    assert server.requests[-1].bytes_sent == SIZE_BYTES


@pytest.mark.parametrize("content_range", ["bytes 0-9/12582912", "bytes 7-8/*", "none"])
@pytest.mark.usefixtures("large")
async def test_wrong_range_is_refused(call: FetchCall, server: FileServer, content_range: str) -> None:
    server.content_range = content_range
    error = await call.refused(server.url + NAME)
    assert (error.reason, error.retryable) == ("SourceRefused", False)
    assert "another range" in error.message


@pytest.mark.parametrize("conditions", [True, False])
@pytest.mark.parametrize("size", [SIZE_BYTES, 3 * MIB, 20 * MIB])
async def test_bytes_of_two_versions_are_never_joined(
    call: FetchCall, server: FileServer, large: bytes, conditions: bool, size: int
) -> None:
    other = random.Random(2).randbytes(size)  # noqa: S311  weights, not a secret
    server.conditions = conditions

    def change(done: int, _total: int | None) -> None:
        if 4 * MIB < done < SIZE_BYTES and server.requests[0].path == NAME and not changed:
            changed.append(done)
            replace(server.root / "large.gguf", other)

    changed: list[int] = []
    fetched = await call(server.url + NAME, on_progress=change)
    assert changed
    assert fetched.path.read_bytes() == other
    assert fetched.sha256 == hashlib.sha256(other).hexdigest()
    assert fetched.path.read_bytes() != large


async def test_servers_with_tags_of_their_own_are_read_by_one_connection(
    call: FetchCall, server: FileServer, large: bytes
) -> None:
    """Behind one address, each answer has another entity tag: no two of them can be known to be one version."""
    server.etag_of_each = True
    fetched = await call(server.url + NAME, sha256=hashlib.sha256(large).hexdigest())
    assert fetched.path.read_bytes() == large


@pytest.mark.parametrize("retry_after", ["", "1", "3000"])
async def test_overloaded_server_gets_fewer_connections(
    call: FetchCall, server: FileServer, large: bytes, retry_after: str
) -> None:
    server.most_at_once, server.retry_after = 3, retry_after
    assert (await call(server.url + NAME)).path.read_bytes() == large
    statuses = [seen.status for seen in server.requests]
    assert 0 < statuses.count(429) <= 6
    assert server.peak_at_once <= 3


async def test_cut_connections_do_not_hold_up_the_others(call: FetchCall, server: FileServer, large: bytes) -> None:
    server.faults.extend([TransferFault(200_000 * number) for number in range(1, 5)])
    patient = dataclasses.replace(HURRIED, first_pause_seconds=60, longest_pause_seconds=60)
    assert (await asyncio.wait_for(call(server.url + NAME, patience=patient), 30)).path.read_bytes() == large


async def test_silent_connection_is_given_up(call: FetchCall, server: FileServer, large: bytes) -> None:
    server.faults.extend([TransferFault(300_000, silent=True)] * 2)
    hasty = dataclasses.replace(HURRIED, silence_seconds=0.5)
    assert (await call(server.url + NAME, patience=hasty)).path.read_bytes() == large


async def test_failure_of_all_connections_keeps_what_they_have_written(
    call: FetchCall, server: FileServer, large: bytes
) -> None:
    def break_all(done: int, _total: int | None) -> None:
        if done > 4 * MIB and not server.statuses:
            server.statuses.extend([500] * 100)

    await call.refused(server.url + NAME, patience=dataclasses.replace(HURRIED, attempts=1), on_progress=break_all)
    server.statuses.clear()
    server.requests.clear()
    assert (await call(server.url + NAME)).path.read_bytes() == large
    first, *others = server.requests
    assert first.range != "bytes=0-"
    assert sum(seen.bytes_sent for seen in others) < SIZE_BYTES - 4 * MIB


async def test_hash_follows_the_download_and_reads_each_byte_once(
    call: FetchCall, server: FileServer, large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    step = partial_download._hash_step

    def count(*arguments: object) -> int:
        hashed.append(step(*arguments))  # type: ignore[arg-type]
        return hashed[-1]

    monkeypatch.setattr(partial_download, "_hash_step", count)
    behind: list[int] = []
    fetched = await call(server.url + NAME, on_progress=lambda done, _total: behind.append(done - sum(hashed)))
    assert fetched.sha256 == hashlib.sha256(large).hexdigest()
    assert sum(hashed) == SIZE_BYTES
    assert max(behind) <= 9 * MIB, "the hash is behind by the segments of all connections at most"


@pytest.mark.usefixtures("large")
async def test_state_names_bytes_only_after_they_are_flushed(
    call: FetchCall, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure takes what was not flushed, and holes would be taken for bytes."""
    events: list[str] = []
    fsync, write = os.fsync, durable.write

    def note_flush(descriptor: int) -> None:
        events.append("flush")
        fsync(descriptor)

    def note_write(path: Path, value: object) -> None:
        events.append(path.name)
        write(path, value)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(durable, "write", note_write)
    await call(server.url + NAME)
    written = [index for index, event in enumerate(events) if event == "large.gguf.part.json"]
    assert written
    assert all(events[index - 1] == "flush" for index in written)


async def test_hub_is_asked_once_for_all_ranges_of_a_file(call: FetchCall, server: FileServer, large: bytes) -> None:
    """It counts requests, and its redirect leads to the same place for all of them."""
    (server.root / "acme/tiny").mkdir(parents=True)
    (server.root / "acme/tiny/large.gguf").write_bytes(large)
    server.token = "hf_secret"
    fetched = await call("hf://acme/tiny/large.gguf", token="hf_secret")
    assert (fetched.revision, fetched.path.read_bytes()) == (COMMIT, large)
    assert len(server.seen("/resolve/main/large.gguf")) == 1
    assert {seen.authorization for seen in server.requests if seen.port == server.cdn_port} == {None}


@pytest.mark.parametrize(("uses", "status"), [(1, 403), (3, 403), (10, 403), (3, 400)])
async def test_expired_link_of_a_hub_is_renewed(
    call: FetchCall, server: FileServer, large: bytes, uses: int, status: int
) -> None:
    (server.root / "acme/tiny").mkdir(parents=True)
    (server.root / "acme/tiny/large.gguf").write_bytes(large)
    server.link_uses, server.expired_status = uses, status
    fetched = await call("hf://acme/tiny/large.gguf")
    assert fetched.path.read_bytes() == large
    assert status in [seen.status for seen in server.requests]
    assert len(server.seen("/resolve/main/large.gguf")) > 1


async def test_killed_process_loses_little(call: FetchCall, server: FileServer) -> None:
    size, name, kills = 64 * MIB, "killed.gguf", 3
    content = random.Random(3).randbytes(size)  # noqa: S311  weights, not a secret
    (server.root / name).write_bytes(content)
    server.pause_seconds = 0.05  # the whole file takes many seconds, so that it is not complete before a look at it
    command = [sys.executable, "-m", "cli.main", "fetch", f"{server.url}/{name}", "--to", str(call.to)]
    for kill in range(kills):
        until = server.bytes_sent(name) + (kill + 1) * 7 * MIB

        def is_far_enough(until: int = until) -> bool:
            return server.bytes_sent(name) > until

        async with run_beside(*command, "--allow-private-sources", "127.0.0.0/8"):
            await eventually(is_far_enough)
    server.pause_seconds = 0.0
    assert (await call(f"{server.url}/{name}")).path.read_bytes() == content
    assert server.bytes_sent(name) - size <= kills * 8 * 16 * MIB
    assert server.peak_at_once <= 16


async def test_memory_of_a_download_is_bounded(call: FetchCall, server: FileServer) -> None:
    with (server.root / "sparse.gguf").open("wb") as file:
        file.truncate(300 * MIB)
    code = (
        "import asyncio, pathlib, resource, sys\n"
        "from artifacts.fetch import ExpectedFile, fetch\n"
        "from artifacts.source import parse\n"
        "from tests.support.file_server import ALLOWED_NETWORKS\n"
        "from artifacts.repositories.repository import SourceAccess\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "access = SourceAccess(allowed_networks=ALLOWED_NETWORKS)\n"
        "idle = peak()\n"
        "asyncio.run(fetch(parse(sys.argv[1]), pathlib.Path(sys.argv[2]), access, ExpectedFile(),"
        " on_progress=lambda done, total: None))\n"
        "print(peak() - idle)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, f"{server.url}/sparse.gguf", str(call.to), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert int(printed) < 64 << 10


@pytest.mark.usefixtures("_small_segments")
async def test_files_of_a_folder_share_the_connections(server: FileServer, tmp_path: Path) -> None:
    folder = server.root / "acme/folder"
    folder.mkdir(parents=True)
    contents = {f"model-{part}.safetensors": bytes([part]) * (4 * MIB + part) for part in range(6)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text("{}")
    server.pause_seconds = 0.002
    progress: list[tuple[int, int | None]] = []
    access = take_access({}, endpoint=server.url, patience=HURRIED)
    await fetch_source(
        parse("hf://acme/folder"), tmp_path / "to", access, take_expected({}), lambda *seen: progress.append(seen)
    )
    for name, content in contents.items():
        assert (tmp_path / "to" / name).read_bytes() == content
    assert 4 <= server.peak_at_once <= 8 + 4, "four connections may be closed, which the server does not know yet"
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1]


@pytest.mark.parametrize("seed", range(10))
async def test_any_faults_end_with_the_bytes_of_one_version(
    call: FetchCall, server: FileServer, large: bytes, seed: int
) -> None:
    """Cut, silent and refused connections, other versions, and calls that are cancelled, all at random."""
    rng = random.Random(seed)  # noqa: S311  no secret
    versions = [large, random.Random(seed).randbytes(rng.randrange(1, SIZE_BYTES))]  # noqa: S311
    hasty = dataclasses.replace(HURRIED, attempts=20, silence_seconds=0.3, progress_bytes=1)

    def disturb(_done: int, _total: int | None) -> None:
        event = rng.random()
        if event < 0.02:
            server.faults.append(TransferFault(rng.randrange(MIB), silent=rng.random() < 0.3))
        elif event < 0.03:
            server.statuses.append(rng.choice([429, 500, 503, 403, 416]))
        elif event < 0.032:
            replace(server.root / "large.gguf", rng.choice(versions))
        elif event < 0.035 and calls:
            calls[-1].cancel()

    calls: list[asyncio.Task[FetchedArtifact]] = []
    for _ in range(40):
        calls.append(asyncio.ensure_future(call(server.url + NAME, patience=hasty, on_progress=disturb)))
        await asyncio.wait([calls[-1]])
        if not calls[-1].cancelled() and not calls[-1].exception():
            break
        server.faults.clear()
        server.statuses.clear()
    assert calls[-1].result().path.read_bytes() in versions
