"""Weights of the hub's client and of Ollama serve where they lie: verified once, and fetched if they have changed."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from artifacts.fetch import verify_local
from artifacts.foreign_stores import ForeignStores, find_foreign_stores
from artifacts.ollama_store import OllamaStore
from artifacts.repositories.repository import SourceAccess
from artifacts.weights_store import HeldWeights, WeightsStore
from tests.support.file_server import ALLOWED_NETWORKS, COMMIT, FileServer
from tests.support.hub_cache import add_to_hub_cache
from tests.support.ollama_layout import add_to_ollama
from tests.unit.artifacts.stored_weights import HURRIED, again, disk, obtain, refused

SOURCE = "hf://acme/tiny/weights.gguf"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def store(tmp_path: Path, server: FileServer, cache: Path) -> WeightsStore:
    access = SourceAccess(endpoint=server.url, allowed_networks=ALLOWED_NETWORKS, patience=HURRIED)
    return WeightsStore(tmp_path / "weights", access, ForeignStores(cache, OllamaStore([tmp_path / "ollama"])))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The files that were hashed."""
    calls: list[object] = []

    async def counted(*arguments: Any) -> Any:
        calls.append(arguments[0])
        return await verify_local(*arguments)

    monkeypatch.setattr("artifacts.verified_files.verify_local", counted)
    return calls


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[None]:
    """Assert at the end of a test that the stores of the other programs are as they were when it began to use them."""
    yield
    paths = [path for folder in ("hub", "ollama") for path in (tmp_path / folder).rglob("*")]
    assert not [path for path in paths if path.name.startswith(".") or ".lock" in path.name]


@pytest.fixture
def unasked(server: FileServer) -> Iterator[None]:
    """Assert that a test asks no server."""
    yield
    assert server.requests == []


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.usefixtures("untouched", "unasked")
@pytest.mark.parametrize("holder", ["hub", "ollama"])
async def test_file_with_the_digest_is_linked_and_hashed_once(
    store: WeightsStore, weights: bytes, tmp_path: Path, hashed: list[object], holder: str
) -> None:
    if holder == "hub":
        add_to_hub_cache(tmp_path / "hub", "acme/tiny", {"weights.gguf": weights})
    else:
        add_to_ollama(tmp_path / "ollama", "tiny:1b", weights)
    held = await obtain(store, SOURCE, sha256=digest(weights), revision=COMMIT)
    assert held.path.name == "weights.gguf"
    assert held.path.resolve().is_relative_to(tmp_path / holder)
    assert held.path.read_bytes() == weights
    held.release()
    await obtain(store, SOURCE, sha256=digest(weights), revision=COMMIT)
    assert len(hashed) == 1
    assert [path for path in (tmp_path / "weights/objects").rglob("*") if path.is_file() and not path.is_symlink()] == [
        tmp_path / f"weights/objects/{digest(weights)}/.manifest.json"
    ]


async def test_deleted_object_is_linked_again_without_hashing(
    store: WeightsStore, weights: bytes, cache: Path, hashed: list[object]
) -> None:
    """The digest is remembered by inode, size and time of the file, and the file itself stays."""
    snapshot = add_to_hub_cache(cache, "acme/tiny", {"weights.gguf": weights})
    (await obtain(store, SOURCE, sha256=digest(weights))).release()
    assert store.remove(digest(weights))
    assert (snapshot / "weights.gguf").read_bytes() == weights
    held = await obtain(store, SOURCE, sha256=digest(weights))
    assert held.path.is_symlink()
    assert len(hashed) == 1


async def test_file_that_was_replaced_is_fetched_from_its_source(
    store: WeightsStore, server: FileServer, weights: bytes, cache: Path, hashed: list[object]
) -> None:
    """The size and time are those of the file that was verified: only the inode shows that it is another one."""
    blob = (add_to_hub_cache(cache, "acme/tiny", {"weights.gguf": weights}) / "weights.gguf").resolve()
    held = await obtain(store, SOURCE, sha256=digest(weights), revision=COMMIT)
    stamp = blob.stat()
    other = blob.with_name("other")
    other.write_bytes(b"x" * len(weights))
    other.replace(blob)
    os.utime(blob, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))

    fetched = await obtain(store, SOURCE, sha256=digest(weights), revision=COMMIT)
    assert not fetched.path.is_symlink()
    assert fetched.path.read_bytes() == weights
    assert server.bytes_sent("weights.gguf") >= len(weights)
    assert len(hashed) == 2
    assert blob.read_bytes() == b"x" * len(weights), "the file of the other program is left alone"
    held.release()


async def test_file_that_vanishes_is_fetched(store: WeightsStore, weights: bytes, cache: Path) -> None:
    blob = (add_to_hub_cache(cache, "acme/tiny", {"weights.gguf": weights}) / "weights.gguf").resolve()
    held = await obtain(store, SOURCE, sha256=digest(weights), revision=COMMIT)
    with held.path.open("rb") as engine:
        blob.unlink()
        assert not held.path.exists()
        other = await obtain(store, SOURCE, sha256=digest(weights), revision=COMMIT)
        assert (other.path.read_bytes(), engine.read()) == (weights, weights)


async def test_file_that_its_name_lies_about_is_not_used(
    store: WeightsStore, weights: bytes, tmp_path: Path, cache: Path
) -> None:
    snapshot = add_to_hub_cache(cache, "acme/tiny", {"weights.gguf": weights})
    (snapshot / "weights.gguf").resolve().write_bytes(b"damaged")
    add_to_ollama(tmp_path / "ollama", "tiny:1b", weights).write_bytes(b"damaged")
    held = await obtain(store, SOURCE, sha256=digest(weights), revision=COMMIT)
    assert held.path.read_bytes() == weights
    assert not held.path.is_symlink()


async def test_digest_of_the_user_says_nothing_of_the_source(
    store: WeightsStore, server: FileServer, weights: bytes, tmp_path: Path
) -> None:
    """A Model without the digest gets what the source sends, and not what another Model has named for it."""
    add_to_ollama(tmp_path / "ollama", "tiny:1b", b"other bytes")
    await obtain(store, f"{server.url}/weights.gguf", sha256=digest(b"other bytes"))
    held = await obtain(store, f"{server.url}/weights.gguf")
    assert held.path.read_bytes() == weights


async def test_linked_weights_are_not_public(
    store: WeightsStore, server: FileServer, weights: bytes, tmp_path: Path, cache: Path
) -> None:
    """The hub's client may have had a token, so an agent that finds the object asks the hub for another caller."""
    add_to_hub_cache(cache, "acme/tiny", {"weights.gguf": weights})
    (await obtain(store, SOURCE, sha256=digest(weights), revision=COMMIT)).release()
    assert server.requests == []
    agent = again(store, tmp_path, server)
    held = await obtain(agent, SOURCE, sha256=digest(weights), revision=COMMIT, tenant="team")
    assert held.path.read_bytes() == weights
    assert server.requests


async def test_linked_bytes_take_no_space(
    store: WeightsStore, weights: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk serves both the file and the split model."""
    parts = {f"split-0000{number}-of-00002.gguf": weights[number:] for number in (1, 2)}
    add_to_hub_cache(tmp_path / "hub", "acme/tiny", {"weights.gguf": weights, **parts})
    disk(monkeypatch, tmp_path / "weights", 0)
    held = await obtain(store, SOURCE, sha256=digest(weights), revision=COMMIT)
    split = await obtain(store, "hf://acme/tiny/split-00001-of-00002.gguf", revision=COMMIT)
    assert {path.name for path in split.path.parent.glob("*.gguf")} == set(parts)
    assert all(path.is_symlink() for path in [held.path, *split.path.parent.glob("*.gguf")])


def make_folder(server: FileServer) -> dict[str, bytes]:
    """Publish a folder of weights; return its files."""
    files = {"config.json": b"{}", "tokenizer.json": b'{"version": "1.0"}', "model.safetensors": b"x" * 100_000}
    (server.root / "acme/folder").mkdir(parents=True)
    for name, content in files.items():
        (server.root / "acme/folder" / name).write_bytes(content)
    return files


def assert_served_in_place(held: HeldWeights, files: dict[str, bytes]) -> None:
    assert {path.name: path.read_bytes() for path in held.path.iterdir() if path.name[0] != "."} == files
    assert [path.name for path in held.path.iterdir() if path.is_symlink()] == ["model.safetensors"]


async def test_small_files_that_the_cache_lacks_are_fetched(
    store: WeightsStore, server: FileServer, cache: Path
) -> None:
    files = make_folder(server)
    add_to_hub_cache(cache, "acme/folder", {name: files[name] for name in ("config.json", "model.safetensors")})
    assert_served_in_place(await obtain(store, "hf://acme/folder", revision=COMMIT), files)
    assert server.bytes_sent("folder/model.safetensors") == 0
    assert server.bytes_sent("folder/tokenizer.json") > 0


async def test_folder_in_the_cache_needs_no_server(store: WeightsStore, server: FileServer, cache: Path) -> None:
    files = make_folder(server)
    add_to_hub_cache(cache, "acme/folder", files)
    server.statuses.extend([503] * 50)
    assert_served_in_place(await obtain(store, "hf://acme/folder", revision=COMMIT), files)


async def test_part_that_the_cache_lacks_is_no_model_of_it(
    store: WeightsStore, server: FileServer, weights: bytes, cache: Path
) -> None:
    first, second = (f"split-0000{number}-of-00002.gguf" for number in (1, 2))
    for name in (first, second):
        (server.root / "acme/tiny" / name).write_bytes(weights)
    add_to_hub_cache(cache, "acme/tiny", {first: weights})
    split = await obtain(store, f"hf://acme/tiny/{first}", revision=COMMIT)
    assert split.path.with_name(second).read_bytes() == weights
    server.statuses.extend([503] * 50)
    assert (await refused(store, f"hf://acme/tiny/{first}", revision="main")).reason == "SourceUnreachable"


async def test_link_out_of_a_repository_is_not_followed(
    store: WeightsStore, server: FileServer, tmp_path: Path, cache: Path
) -> None:
    files = make_folder(server)
    snapshot = add_to_hub_cache(cache, "acme/folder", files)
    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "extra.json").symlink_to(tmp_path / "secret.json")
    server.statuses.extend([503] * 50)
    assert_served_in_place(await obtain(store, "hf://acme/folder", revision=COMMIT), files)


def test_stores_are_where_their_programs_keep_them(home: Path) -> None:
    assert find_foreign_stores({}).hub_cache == home / ".cache/huggingface/hub"
    assert find_foreign_stores({"XDG_CACHE_HOME": "/c"}).hub_cache == Path("/c/huggingface/hub")
    assert find_foreign_stores({"HF_HOME": "/h"}).hub_cache == Path("/h/hub")
    assert find_foreign_stores({"HF_HOME": "/h", "HF_HUB_CACHE": "~/cache"}).hub_cache == home / "cache"
