"""The store of weights: what is shared, what is kept, and what goes when the disk is short."""

import asyncio
import contextlib
import dataclasses
import errno
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from artifacts import durable
from artifacts.errors import ArtifactError
from artifacts.fetch import fetch
from artifacts.patience import Patience
from artifacts.source import parse
from artifacts.store import Held, Store
from tests.eventually import eventually
from tests.web import COMMIT, Fault, FileServer

HURRIED = Patience(first_pause_seconds=0.001, longest_pause_seconds=0.01, silence_seconds=10, connect_seconds=10)
SMALL = 64 << 10


class _Usage(NamedTuple):
    total: int
    free: int


@pytest.fixture
def store(tmp_path: Path, server: FileServer) -> Store:
    return Store(tmp_path / "weights", endpoint=server.url, file_root=tmp_path / "files", patience=HURRIED)


def again(store: Store, tmp_path: Path, server: FileServer) -> Store:
    """The same store in another process."""
    del store
    return Store(tmp_path / "weights", endpoint=server.url, file_root=None, patience=HURRIED)


async def obtain(store: Store, source: str, **options: Any) -> Held:
    defaults: dict[str, Any] = {"sha256": None, "revision": None, "token": None, "on_progress": lambda _a, _b: None}
    return await store.obtain(parse(source), **(defaults | options))


async def refused(store: Store, source: str, **options: Any) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await obtain(store, source, **options)
    return caught.value


def publish(server: FileServer, name: str, *, size_bytes: int = SMALL) -> str:
    """Serve a file with content of its own and return its source."""
    path = server.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(hashlib.sha256(name.encode()).digest() * (size_bytes // 32))
    return f"{server.url}/{name}"


def disk(monkeypatch: pytest.MonkeyPatch, store_folder: Path, total_bytes: int) -> None:
    """A volume of this size, with nothing on it but what the store has."""

    def usage(_path: Path) -> _Usage:
        used = sum(
            path.stat().st_size for path in store_folder.rglob("*") if path.is_file() and path.stat().st_size > 999
        )
        return _Usage(total_bytes, total_bytes - used)

    monkeypatch.setattr("artifacts.store.shutil.disk_usage", usage)


async def test_two_sources_of_the_same_bytes_are_one_object(store: Store, server: FileServer, weights: bytes) -> None:
    first = await obtain(store, "hf://acme/tiny/weights.gguf")
    second = await obtain(store, f"{server.url}/weights.gguf")

    assert first.path == second.path
    assert first.path.read_bytes() == weights
    assert first.digest == hashlib.sha256(weights).hexdigest()
    assert [stored.manifest.source for stored in store.stored()] == ["hf://acme/tiny@main/weights.gguf"]


async def test_what_is_here_is_taken_without_asking_or_hashing(
    store: Store, server: FileServer, weights: bytes, tmp_path: Path
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


async def test_two_at_once_fetch_once(store: Store, server: FileServer, weights: bytes) -> None:
    source = f"{server.url}/weights.gguf"
    one, two = await asyncio.gather(obtain(store, source), obtain(store, source))
    assert one.path == two.path
    assert server.bytes_sent("/weights.gguf") == len(weights)


async def test_two_processes_at_once_fetch_once(
    store: Store, server: FileServer, weights: bytes, tmp_path: Path
) -> None:
    source = f"{server.url}/weights.gguf"
    server.pause_seconds = 0.002
    one, two = await asyncio.gather(obtain(store, source), obtain(again(store, tmp_path, server), source))
    assert one.path == two.path
    assert server.bytes_sent("/weights.gguf") == len(weights)


async def test_the_same_bytes_of_two_sources_at_once_stay_for_both(
    store: Store, server: FileServer, weights: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    del weights
    meeting = threading.Barrier(2, timeout=0.2)

    def met(path: Path, value: object) -> None:
        if path.name == ".manifest.json":
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait()
        durable_write(path, value)

    durable_write = durable.write
    monkeypatch.setattr("artifacts.store.durable.write", met)
    (server.root / "other.gguf").write_bytes((server.root / "weights.gguf").read_bytes())
    held = await asyncio.gather(*(obtain(store, f"{server.url}/{name}.gguf") for name in ("weights", "other")))
    assert all(each.path.exists() for each in held)


@pytest.mark.parametrize("written", [".manifest.json", "names"])
async def test_weights_that_are_here_survive_a_full_disk_at_the_last_line(
    store: Store, server: FileServer, weights: bytes, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    def full(path: Path, value: object) -> None:
        if written in (path.name, path.parent.name):
            raise OSError(errno.ENOSPC, "full")
        durable_write(path, value)

    durable_write = durable.write
    source = f"{server.url}/weights.gguf"
    with monkeypatch.context() as patch:
        patch.setattr("artifacts.store.durable.write", full)
        assert (await refused(store, source)).reason == "NoSpace"

    held = await obtain(store, source)

    assert server.bytes_sent("/weights.gguf") == len(weights), "nothing is fetched twice"
    assert [path.name for path in held.path.parent.iterdir() if path != held.path] == [".manifest.json"]


async def test_a_cut_fetch_goes_on_in_the_next_process(
    store: Store, server: FileServer, weights: bytes, tmp_path: Path
) -> None:
    server.faults.append(Fault(3 << 20))
    source = f"{server.url}/weights.gguf"
    impatient = Store(
        tmp_path / "weights",
        endpoint=server.url,
        file_root=None,
        patience=dataclasses.replace(HURRIED, attempts=1),
    )
    assert (await refused(impatient, source)).retryable

    held = await obtain(store, source)

    assert held.path.read_bytes() == weights
    assert server.requests[-1].range


async def test_a_changed_object_is_fetched_again(store: Store, server: FileServer, weights: bytes) -> None:
    source = f"{server.url}/weights.gguf"
    held = await obtain(store, source)
    held.path.write_bytes(b"spoiled")

    mended = await obtain(store, source)

    assert mended.path.read_bytes() == weights


async def test_a_wrong_digest_leaves_no_object(store: Store, server: FileServer, weights: bytes) -> None:
    del weights
    error = await refused(store, f"{server.url}/weights.gguf", sha256="0" * 64)
    assert error.reason == "ChecksumMismatch"
    assert store.stored() == []


class TestRoom:
    async def test_the_least_recently_used_goes_first(
        self, store: Store, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    async def test_what_is_held_stays_and_the_error_says_what_is_missing(
        self, store: Store, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    async def test_some_of_the_disk_is_left_to_the_owner(
        self, store: Store, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk(monkeypatch, tmp_path / "weights", SMALL + 10)
        assert (await refused(store, publish(server, "all.gguf"))).reason == "NoSpace"

    async def test_what_was_served_until_now_was_used_until_now(self, store: Store, server: FileServer) -> None:
        served, tried = [await obtain(store, publish(server, f"{name}.gguf")) for name in "ab"]
        tried.release()
        for age, held in ((2000, served), (1000, tried)):
            os.utime(held.path.parent, (time.time() - age, time.time() - age))
        served.release()
        assert [stored.manifest.digest for stored in store.stored()] == [served.digest, tried.digest]

    async def test_room_that_another_fetch_was_promised_is_not_given_twice(
        self, store: Store, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk(monkeypatch, tmp_path / "weights", 3 * SMALL)
        server.faults.append(Fault(0, silent=True))
        running = asyncio.create_task(obtain(store, publish(server, "first.gguf", size_bytes=2 * SMALL)))
        await eventually(lambda: next((tmp_path / "weights").rglob("*.part.json"), None))
        await eventually(lambda: server.seen("first.gguf"))

        error = await refused(store, publish(server, "second.gguf", size_bytes=2 * SMALL))

        assert error.reason == "NoSpace"
        running.cancel()
        await asyncio.wait([running])
        (await obtain(store, f"{server.url}/second.gguf")).release()

    async def test_a_fetch_that_was_cut_just_now_goes_after_what_was_used_before(
        self, store: Store, server: FileServer, tmp_path: Path
    ) -> None:
        server.faults.append(Fault(SMALL // 2, silent=True))
        running = asyncio.create_task(obtain(store, publish(server, "slow.gguf")))
        part = await eventually(lambda: next((tmp_path / "weights").rglob("*.part"), None))
        assert part
        await eventually(lambda: part.stat().st_size)
        os.utime(part.parent, (1000, 1000))
        running.cancel()
        await asyncio.wait([running])
        assert part.parent.stat().st_mtime > time.time() - 60

    async def test_an_unfinished_fetch_is_kept_while_it_runs(
        self, store: Store, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.faults.append(Fault(SMALL // 2, silent=True))
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
    async def test_who_is_cancelled_holds_nothing(
        self, store: Store, server: FileServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = publish(server, "a.gguf")
        (await obtain(store, source)).release()
        found, go_on = threading.Event(), threading.Event()

        def find(*arguments: Any) -> Held | None:
            held = Store.find(store, *arguments)
            found.set()
            go_on.wait()
            return held

        monkeypatch.setattr(store, "find", find)
        running = asyncio.create_task(obtain(store, source))
        await asyncio.to_thread(found.wait)
        running.cancel()
        go_on.set()
        await asyncio.wait([running])
        assert [stored.in_use for stored in store.stored()] == [False]

    @pytest.mark.parametrize("manifest", [b'{"source":"","revision":"","digest":"","files":[]}', b"{", None])
    async def test_what_is_damaged_is_not_held(self, store: Store, server: FileServer, manifest: bytes | None) -> None:
        source = publish(server, "a.gguf")
        held = await obtain(store, source)
        held.release()
        path = held.path.parent / ".manifest.json"
        path.unlink()
        if manifest is None:
            path.mkdir()  # cannot be read
            with pytest.raises(IsADirectoryError):
                store.find(source, None, None)
        else:
            path.write_bytes(manifest)
            assert store.find(source, None, None) is None
        assert store.remove(held.digest)

    async def test_a_process_that_inherits_the_lock_keeps_the_weights(self, store: Store, server: FileServer) -> None:
        held = await obtain(store, publish(server, "a.gguf"))
        assert held.descriptor is not None
        process = await asyncio.create_subprocess_exec("cat", stdin=-1, pass_fds=[held.descriptor])
        held.release()
        assert [stored.in_use for stored in store.stored()] == [True]
        assert not store.remove(held.digest)

        process.kill()
        await process.wait()

        assert [stored.in_use for stored in store.stored()] == [False]
        assert store.remove(held.digest)
        assert store.stored() == []
        assert not held.path.exists()

    async def test_what_is_deleted_is_fetched_again(self, store: Store, server: FileServer) -> None:
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

    async def test_it_stays_and_is_verified_once(
        self, store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[object] = []

        async def counted(*arguments: Any, **options: Any) -> Any:
            calls.append(arguments)
            return await fetch(*arguments, **options)

        monkeypatch.setattr("artifacts.store.fetch", counted)
        for _ in range(2):
            held = await obtain(store, f"file://{file}", sha256=self.DIGEST)
            assert held.path == file
        assert len(calls) == 1

        os.truncate(file, SMALL - 1)
        assert (await refused(store, f"file://{file}", sha256=self.DIGEST)).reason == "ChecksumMismatch"

    async def test_a_folder_is_served_where_it_is(self, store: Store, file: Path) -> None:
        assert (await obtain(store, f"file://{file.parent}/")).path == file.parent
        assert "slash" in (await refused(store, f"file://{file.parent}")).message


class TestFolders:
    @pytest.fixture
    def repository(self, server: FileServer) -> Path:
        folder = server.root / "acme" / "mlx"
        (folder / "extra").mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "tokenizer.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"w" * SMALL)
        (folder / "modeling.py").write_text("print('code that came with the weights')")
        (folder / "extra" / "config.json").write_text("{}")
        return folder

    async def test_a_repository_becomes_one_folder_of_what_an_engine_reads(
        self, store: Store, server: FileServer, repository: Path
    ) -> None:
        told: list[tuple[int, int | None]] = []
        held = await obtain(store, "hf://acme/mlx", on_progress=lambda here, total: told.append((here, total)))

        assert {path.name for path in held.path.iterdir() if not path.name.startswith(".")} == {
            "config.json",
            "tokenizer.json",
            "model.safetensors",
        }
        assert (held.path / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
        total = sum(stored.manifest.size_bytes for stored in store.stored())
        assert told[-1] == (total, total)
        assert all(f"/resolve/{COMMIT}/" in each.path for each in server.seen(".json") if "/resolve/" in each.path)
        server.requests.clear()
        assert (await obtain(store, "hf://acme/mlx")).path == held.path
        assert not server.requests

    async def test_a_cut_repository_goes_on(self, store: Store, server: FileServer, repository: Path) -> None:
        del repository
        server.faults.extend([Fault(1)] * HURRIED.attempts)
        assert (await refused(store, "hf://acme/mlx")).reason == "SourceUnreachable"
        server.faults.clear()
        assert (await obtain(store, "hf://acme/mlx")).path.is_dir()

    @pytest.mark.parametrize("lacking", ["config.json", "model.safetensors"])
    async def test_a_repository_without_weights_is_refused(self, store: Store, repository: Path, lacking: str) -> None:
        (repository / lacking).unlink()
        error = await refused(store, "hf://acme/mlx")
        assert error.reason == "SourceNotFound"
        assert "FILE.gguf" in error.message

    async def test_room_is_made_for_all_files_before_the_first(
        self,
        store: Store,
        server: FileServer,
        repository: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        (repository / "another.safetensors").write_bytes(b"a" * SMALL)
        disk(monkeypatch, tmp_path / "weights", SMALL + SMALL // 2)
        assert (await refused(store, "hf://acme/mlx")).reason == "NoSpace"
        assert not server.seen(".safetensors")

    async def test_names_with_blanks_are_fetched(self, store: Store, repository: Path) -> None:
        (repository / "NOTICE of acme@home #1 50%.txt").write_text("free")
        held = await obtain(store, "hf://acme/mlx")
        assert (held.path / "NOTICE of acme@home #1 50%.txt").read_text() == "free"

    async def test_a_hub_that_lies_about_a_size_is_not_believed(
        self, store: Store, server: FileServer, repository: Path
    ) -> None:
        del repository
        server.sizes["model.safetensors"] = 7
        error = await refused(store, "hf://acme/mlx")
        assert error.reason == "SourceRefused"
        assert "model.safetensors" in error.message
        assert store.stored() == []

    @pytest.mark.parametrize("commit", ["", "../..", "\x1b[31m", "c" * 500])
    async def test_a_hub_that_names_no_commit_is_refused(
        self, store: Store, server: FileServer, repository: Path, commit: str
    ) -> None:
        del repository
        server.commit = commit
        error = await refused(store, "hf://acme/mlx")
        assert error.reason == "SourceRefused"
        assert error.message.isprintable()

    async def test_a_hub_that_answers_a_listing_with_416_is_refused(
        self, store: Store, server: FileServer, repository: Path
    ) -> None:
        del repository
        server.statuses.append(416)
        assert (await refused(store, "hf://acme/mlx")).reason == "SourceRefused"

    async def test_a_digest_for_a_folder_is_refused(self, store: Store, repository: Path) -> None:
        del repository
        error = await refused(store, "hf://acme/mlx", sha256="0" * 64)
        assert error.reason == "SourceInvalid"
        assert "@REVISION" in error.message
