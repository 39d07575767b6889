"""Identities of stored weights: those of complete objects only, as a process that needs them computes its own."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from artifacts.source import weights_identity
from artifacts.weights_store import HeldWeights, WeightsStore
from tests.support.file_server import COMMIT, FileServer, TransferFault
from tests.unit.artifacts.stored_weights import HURRIED, SMALL, again, obtain, publish, refused

DIGEST = "a" * 64


def use(held: HeldWeights, seconds: int) -> None:
    """Make a moment the last use of an object, however exact the clock of the disk is."""
    held.release()
    os.utime(held.path.parent, (seconds, seconds))


@pytest.mark.parametrize(
    ("source", "revision", "sha256", "has_one"),
    [
        ("hf://acme/tiny/a.gguf", "", DIGEST, True),
        ("hf://acme/tiny/a.gguf", COMMIT, "", True),
        ("hf://acme/tiny", COMMIT, "", True),
        ("hf://acme/tiny/a.gguf", "", "", False),
        ("file:///models/a.gguf", "1-2", DIGEST, False),
        ("ollama://qwen3:8b", "latest", DIGEST, False),
        ("hf://acme", COMMIT, "", False),
        ("tiny", COMMIT, DIGEST, False),
    ],
)
def test_weights_that_may_change_or_are_in_no_store_have_no_identity(
    source: str, revision: str, sha256: str, *, has_one: bool
) -> None:
    identity = weights_identity(source, revision, (), sha256)
    assert (identity == sha256) if has_one and sha256 else (len(identity) == (64 if has_one else 0))


def test_identity_is_that_of_source_revision_and_files() -> None:
    identity = weights_identity("hf://acme/tiny", COMMIT, ("*.gguf",), "")
    assert identity == weights_identity("hf://acme/tiny@main", COMMIT, ["*.gguf"], "")
    others = [("hf://acme/tall", COMMIT, ("*.gguf",)), ("hf://acme/tiny", "b" * 40, ("*.gguf",))]
    for source, revision, files in (*others, ("hf://acme/tiny", COMMIT, ())):
        assert weights_identity(source, revision, files, "") != identity


async def test_complete_weights_are_known_by_digest_and_by_each_source(
    store: WeightsStore, server: FileServer, weights: bytes, tmp_path: Path
) -> None:
    del weights
    assert list(store.identities()) == []
    source, other = "hf://acme/tiny/weights.gguf", f"{server.url}/weights.gguf"
    held = await obtain(store, source, revision=COMMIT)
    by_source = weights_identity(source, COMMIT, (), "")
    assert list(store.identities()) == [held.digest, by_source]
    assert weights_identity(source, COMMIT, (), held.digest) == held.digest
    await obtain(store, other)
    assert {held.digest, by_source} < set(store.identities())
    assert list(again(store, tmp_path, server).identities()) == list(store.identities())


async def test_folder_is_known_by_its_source(store: WeightsStore, server: FileServer) -> None:
    folder = server.root / "acme/mlx"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * SMALL)
    await obtain(store, "hf://acme/mlx", revision=COMMIT)
    assert weights_identity("hf://acme/mlx", COMMIT, (), "") in store.identities()


async def test_incomplete_or_removed_weights_are_not_there(store: WeightsStore, server: FileServer) -> None:
    source = publish(server, "a.gguf")
    server.faults.extend([TransferFault(1)] * HURRIED.attempts)
    await refused(store, source)
    assert list(store.identities()) == []
    server.faults.clear()
    held = await obtain(store, source)
    assert held.digest in store.identities()
    held.path.unlink()
    assert list(store.identities()) == []
    held.release()
    held = await obtain(store, source)
    assert len(store.identities()) == 2
    held.release()
    assert store.remove(held.digest)
    assert list(store.identities()) == [], "the name is left, and names nothing"


async def test_most_recently_used_weights_come_first(store: WeightsStore, server: FileServer) -> None:
    held = [await obtain(store, publish(server, name)) for name in ("a.gguf", "b.gguf", "c.gguf")]

    def order(found: Sequence[str]) -> list[int]:
        return [number for digest in found for number, one in enumerate(held) if one.digest == digest]

    for number, seconds in enumerate((20, 30, 10)):
        use(held[number], seconds)
    assert order(store.identities()) == [1, 0, 2]
    use(held[2], 40)
    assert order(store.identities()) == [2, 1, 0]


async def test_what_cannot_be_read_hides_nothing_else(store: WeightsStore, server: FileServer) -> None:
    held, broken = [await obtain(store, publish(server, name)) for name in ("a.gguf", "b.gguf")]
    manifest = broken.path.parent / ".manifest.json"
    manifest.unlink()
    manifest.mkdir()
    (held.path.parents[1] / "Copy of an object").symlink_to(held.path.parent)
    assert len(store.identities()) == 2
    manifest.rmdir()
    manifest.write_bytes(b"{")
    assert set(store.identities()) & {held.digest, broken.digest} == {held.digest}


def test_store_of_a_new_host_is_no_problem(store: WeightsStore) -> None:
    with capture_logs() as logs:
        assert list(store.identities()) == []
    assert logs == []


async def test_weights_without_a_name_are_known_by_their_digest(store: WeightsStore, server: FileServer) -> None:
    held = await obtain(store, publish(server, "a.gguf"))
    shutil.rmtree(held.path.parents[2] / "sources")
    assert list(store.identities()) == [held.digest]


def test_unreadable_store_has_nothing(store: WeightsStore, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "objects").write_text("no folder")
    assert list(store.identities()) == []
