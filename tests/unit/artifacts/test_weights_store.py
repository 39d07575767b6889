"""The store of weights: shared by content, kept while in use, and evicted when the disk is short."""

import asyncio
import contextlib
import dataclasses
import errno
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from artifacts import durable
from artifacts.errors import ArtifactError
from artifacts.fetch import verify_local
from artifacts.manifest import StoredFile
from artifacts.partial_download import read_download_record
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from artifacts.weights_store import HeldWeights, WeightsStore
from tests.support.eventually import eventually
from tests.support.file_server import ALLOWED_NETWORKS, FileServer, TransferFault
from tests.support.live_processes import run_beside
from tests.unit.artifacts.stored_weights import HURRIED, SMALL, again, disk, obtain, publish, refused

ARABIC_ZERO = "\N{ARABIC-INDIC DIGIT ZERO}"


async def test_two_sources_of_the_same_bytes_share_one_object(
    store: WeightsStore, server: FileServer, weights: bytes
) -> None:
    first = await obtain(store, "hf://acme/tiny/weights.gguf")
    second = await obtain(store, f"{server.url}/weights.gguf")

    assert first.path == second.path
    assert first.path.read_bytes() == weights
    assert first.digest == hashlib.sha256(weights).hexdigest()
    assert [stored.manifest.source for stored in store.stored()] == ["hf://acme/tiny@main/weights.gguf"]


async def test_stored_weights_are_used_without_request_or_hashing(
    store: WeightsStore, server: FileServer, weights: bytes, tmp_path: Path
) -> None:
    source = f"{server.url}/weights.gguf"
    held = await obtain(store, source, revision="")
    held.release()
    server.requests.clear()
    inode = held.path.stat().st_ino

    by_name = await obtain(again(store, tmp_path, server), source)
    by_digest = await obtain(store, "hf://acme/other/of-the-same.gguf", sha256=hashlib.sha256(weights).hexdigest())

    assert by_name.path.stat().st_ino == by_digest.path.stat().st_ino == inode
    assert not server.requests


async def test_two_callers_at_once_fetch_once(store: WeightsStore, server: FileServer, weights: bytes) -> None:
    source = f"{server.url}/weights.gguf"
    one, two = await asyncio.gather(obtain(store, source), obtain(store, source))
    assert one.path == two.path
    assert server.bytes_sent("/weights.gguf") == len(weights)


async def test_two_processes_at_once_fetch_once(
    store: WeightsStore, server: FileServer, weights: bytes, tmp_path: Path
) -> None:
    source = f"{server.url}/weights.gguf"
    server.pause_seconds = 0.002
    one, two = await asyncio.gather(obtain(store, source), obtain(again(store, tmp_path, server), source))
    assert one.path == two.path
    assert server.bytes_sent("/weights.gguf") == len(weights)


async def test_same_bytes_fetched_from_two_sources_at_once_are_kept_for_both(
    store: WeightsStore, server: FileServer, weights: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    del weights
    meeting = threading.Barrier(2, timeout=0.2)

    def met(path: Path, value: object) -> None:
        if path.name == ".manifest.json":
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait()
        durable_write(path, value)

    durable_write = durable.write
    monkeypatch.setattr("artifacts.weights_store.durable.write", met)
    (server.root / "other.gguf").write_bytes((server.root / "weights.gguf").read_bytes())
    held = await asyncio.gather(*(obtain(store, f"{server.url}/{name}.gguf") for name in ("weights", "other")))
    assert all(held_weights.path.exists() for held_weights in held)


@pytest.mark.parametrize("written", [".manifest.json", "sources"])
async def test_fetched_weights_survive_a_full_disk_at_the_last_write(
    store: WeightsStore, server: FileServer, weights: bytes, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    def full(path: Path, value: object) -> None:
        if written in (path.name, path.parent.name):
            raise OSError(errno.ENOSPC, "full")
        durable_write(path, value)

    durable_write = durable.write
    source = f"{server.url}/weights.gguf"
    with monkeypatch.context() as patch:
        patch.setattr("artifacts.weights_store.durable.write", full)
        assert (await refused(store, source)).reason == "NoSpace"

    held = await obtain(store, source)

    assert server.bytes_sent("/weights.gguf") == len(weights), "nothing is fetched twice"
    assert [path.name for path in held.path.parent.iterdir() if path != held.path] == [".manifest.json"]


@pytest.mark.parametrize("digest", ["../sources", "..", "a" * 63, "A" * 64, ARABIC_ZERO * 64, f"{'a' * 64}\n"])
async def test_digest_that_would_name_another_file_is_refused(
    store: WeightsStore, server: FileServer, weights: bytes, tmp_path: Path, digest: str
) -> None:
    del weights
    await obtain(store, f"{server.url}/weights.gguf")
    kept = sorted((tmp_path / "weights").rglob("*"))

    error = await refused(store, f"{server.url}/weights.gguf", sha256=digest)
    assert error.reason == "SourceInvalid"
    with pytest.raises(ArtifactError, match="64 lower-case"):
        store.remove(digest)
    assert set(kept) <= set((tmp_path / "weights").rglob("*"))


async def test_a_cut_fetch_is_resumed_by_the_next_process(
    store: WeightsStore, server: FileServer, weights: bytes, tmp_path: Path
) -> None:
    server.faults.append(TransferFault(3 << 20))
    source = f"{server.url}/weights.gguf"
    patience = dataclasses.replace(HURRIED, attempts=1)
    access = SourceAccess(endpoint=server.url, allowed_networks=ALLOWED_NETWORKS, patience=patience)
    impatient = WeightsStore(tmp_path / "weights", access)
    assert (await refused(impatient, source)).retryable

    held = await obtain(store, source)

    assert held.path.read_bytes() == weights
    assert server.requests[-1].range


async def test_a_changed_object_is_fetched_again(store: WeightsStore, server: FileServer, weights: bytes) -> None:
    source = f"{server.url}/weights.gguf"
    held = await obtain(store, source)
    held.path.write_bytes(b"spoiled")

    mended = await obtain(store, source)

    assert mended.path.read_bytes() == weights


async def test_a_wrong_digest_leaves_no_object(store: WeightsStore, server: FileServer, weights: bytes) -> None:
    del weights
    error = await refused(store, f"{server.url}/weights.gguf", sha256="0" * 64)
    assert error.reason == "ChecksumMismatch"
    assert store.stored() == []


class TestRoom:
    async def test_the_least_recently_used_is_evicted_first(
        self, store: WeightsStore, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sources = [publish(server, f"{name}.gguf") for name in "abc"]
        for age, source in enumerate(sources):
            held = await obtain(store, source)
            held.release()
            os.utime(held.path.parent, (1000 + age, 1000 + age))
        (await obtain(store, sources[0])).release()  # used again just now
        disk(monkeypatch, tmp_path / "weights", int(3.5 * SMALL))

        await obtain(store, publish(server, "d.gguf"))

        assert {stored.manifest.source for stored in store.stored()} == {f"{server.url}/{name}.gguf" for name in "acd"}

    async def test_held_weights_are_kept_and_the_error_names_the_missing_space(
        self, store: WeightsStore, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = await obtain(store, publish(server, "held.gguf"))
        unused = await obtain(store, publish(server, "unused.gguf"))
        unused.release()
        disk(monkeypatch, tmp_path / "weights", int(2.5 * SMALL))

        error = await refused(store, publish(server, "big.gguf", size_bytes=2 * SMALL))

        assert error.reason == "NoSpace"
        assert error.retryable
        assert "nothing uses" in error.message
        assert held.path.exists()
        assert unused.path.exists(), "deleted in vain"

    async def test_some_of_the_disk_stays_free_for_the_owner(
        self, store: WeightsStore, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk(monkeypatch, tmp_path / "weights", SMALL + 10)
        assert (await refused(store, publish(server, "all.gguf"))).reason == "NoSpace"

    async def test_release_counts_as_a_use(self, store: WeightsStore, server: FileServer) -> None:
        served, tried = [await obtain(store, publish(server, f"{name}.gguf")) for name in "ab"]
        tried.release()
        for age, held in ((2000, served), (1000, tried)):
            os.utime(held.path.parent, (time.time() - age, time.time() - age))
        served.release()
        assert [stored.manifest.digest for stored in store.stored()] == [served.digest, tried.digest]

    async def test_space_reserved_for_one_fetch_is_not_given_to_another(
        self, store: WeightsStore, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk(monkeypatch, tmp_path / "weights", 3 * SMALL)
        server.faults.append(TransferFault(0, silent=True))
        running = asyncio.create_task(obtain(store, publish(server, "first.gguf", size_bytes=2 * SMALL)))
        await eventually(lambda: store._reserved_bytes)

        error = await refused(store, publish(server, "second.gguf", size_bytes=2 * SMALL))

        assert error.reason == "NoSpace"
        running.cancel()
        await asyncio.wait([running])
        (await obtain(store, f"{server.url}/second.gguf")).release()

    async def test_cancelled_fetch_counts_as_recently_used(
        self, store: WeightsStore, server: FileServer, tmp_path: Path
    ) -> None:
        server.faults.append(TransferFault(SMALL // 2, silent=True))
        running = asyncio.create_task(obtain(store, publish(server, "slow.gguf")))
        part = await eventually(lambda: next((tmp_path / "weights").rglob("*.part"), None))
        assert part
        await eventually(lambda: part.stat().st_size)
        os.utime(part.parent, (1000, 1000))
        running.cancel()
        await asyncio.wait([running])
        assert part.parent.stat().st_mtime > time.time() - 60

    async def test_an_unfinished_fetch_is_kept_while_it_runs(
        self, store: WeightsStore, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.faults.append(TransferFault(SMALL // 2, silent=True))
        running = asyncio.create_task(obtain(store, publish(server, "slow.gguf")))
        part = await eventually(lambda: next((tmp_path / "weights").rglob("*.part"), None))
        assert part
        disk(monkeypatch, tmp_path / "weights", 3 * SMALL)

        error = await refused(store, publish(server, "next.gguf", size_bytes=3 * SMALL))
        assert error.reason == "NoSpace"
        assert part.exists()

        running.cancel()
        await asyncio.wait([running])
        (await obtain(store, publish(server, "next.gguf", size_bytes=2 * SMALL + SMALL // 2))).release()
        assert not part.exists(), "it is nobody's now"


class TestUse:
    async def test_a_cancelled_caller_holds_nothing(
        self, store: WeightsStore, server: FileServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = publish(server, "a.gguf")
        (await obtain(store, source)).release()
        event, go_on = threading.Event(), threading.Event()

        def lock_stored(*arguments: Any) -> HeldWeights | None:
            held = WeightsStore.lock_stored(store, *arguments)
            event.set()
            go_on.wait()
            return held

        monkeypatch.setattr(store, "lock_stored", lock_stored)
        running = asyncio.create_task(obtain(store, source))
        await asyncio.to_thread(event.wait)
        running.cancel()
        go_on.set()
        await asyncio.wait([running])
        assert [stored.in_use for stored in store.stored()] == [False]

    @pytest.mark.parametrize("manifest", [b'{"source":"","revision":"","digest":"","files":[]}', b"{", None])
    async def test_a_damaged_object_is_not_held(
        self, store: WeightsStore, server: FileServer, manifest: bytes | None
    ) -> None:
        source = publish(server, "a.gguf")
        held = await obtain(store, source)
        held.release()
        path = held.path.parent / ".manifest.json"
        path.unlink()
        if manifest is None:
            path.mkdir()  # cannot be read
            with pytest.raises(IsADirectoryError):
                store.lock_stored(parse(source), None, None)
        else:
            path.write_bytes(manifest)
            assert store.lock_stored(parse(source), None, None) is None
        assert store.remove(held.digest)

    async def test_a_process_that_inherits_the_lock_keeps_the_weights(
        self, store: WeightsStore, server: FileServer
    ) -> None:
        held = await obtain(store, publish(server, "a.gguf"))
        assert held.descriptor is not None
        async with run_beside("cat", stdin=-1, pass_fds=[held.descriptor]):
            held.release()
            assert [stored.in_use for stored in store.stored()] == [True]
            assert not store.remove(held.digest)

        assert [stored.in_use for stored in store.stored()] == [False]
        assert store.remove(held.digest)
        assert store.stored() == []
        assert not held.path.exists()

    async def test_removed_weights_are_fetched_again(self, store: WeightsStore, server: FileServer) -> None:
        source = publish(server, "a.gguf")
        held = await obtain(store, source)
        held.release()
        assert store.remove(held.digest)
        assert (await obtain(store, source)).path.exists()


class TestLocalFiles:
    DIGEST = hashlib.sha256(b"x" * SMALL).hexdigest()

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "files" / "own.gguf"
        path.parent.mkdir()
        path.write_bytes(b"x" * SMALL)
        return path

    async def test_local_file_is_not_copied_and_is_verified_once(
        self, store: WeightsStore, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[object] = []

        async def counted(*arguments: Any, **options: Any) -> Any:
            calls.append(arguments)
            return await verify_local(*arguments, **options)

        monkeypatch.setattr("artifacts.verified_files.verify_local", counted)
        for _ in range(2):
            held = await obtain(store, f"file://{file}", sha256=self.DIGEST)
            assert held.path == file
        assert len(calls) == 1

        os.truncate(file, SMALL - 1)
        assert (await refused(store, f"file://{file}", sha256=self.DIGEST)).reason == "ChecksumMismatch"

    async def test_local_folder_is_not_copied(self, store: WeightsStore, file: Path) -> None:
        assert (await obtain(store, f"file://{file.parent}/")).path == file.parent
        assert "slash" in (await refused(store, f"file://{file.parent}")).message


def test_records_on_disk_keep_their_keys(tmp_path: Path) -> None:
    """An update that does not read them would hash or fetch all weights again."""
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    stamp = {"sizeBytes": 4, "sha256": "ab" * 32, "mtimeNanoseconds": file.stat().st_mtime_ns}
    durable.write(tmp_path / "a.gguf.verified.json", {"source": "hf://acme/a/a.gguf", "revision": "main", **stamp})
    record = read_download_record(file)
    assert record is not None
    assert msgspec.to_builtins(record) == {"source": "hf://acme/a/a.gguf", "revision": "main", **stamp}
    durable.write(tmp_path / "local.json", {"name": "a.gguf", **stamp})
    stored = durable.read(tmp_path / "local.json", StoredFile)
    assert stored == StoredFile.of(file, "ab" * 32)
    assert stored.is_at(file)
    assert msgspec.to_builtins(stored) == {"name": "a.gguf", **stamp}
    file.write_bytes(b"changed")
    assert read_download_record(file) is None
    assert not stored.is_at(file)
