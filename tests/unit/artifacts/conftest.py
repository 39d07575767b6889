"""A file server on loopback and weights to serve from it."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from artifacts.repositories.repository import SourceAccess
from artifacts.weights_store import WeightsStore
from tests.support.file_server import ALLOWED_NETWORKS, FileServer
from tests.unit.artifacts.fetch_call import FetchCall
from tests.unit.artifacts.stored_weights import HURRIED

SIZE_BYTES = 5 << 20


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in ("HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FileServer]:
    root = tmp_path / "www"
    root.mkdir()
    async with FileServer(root) as running:
        yield running


@pytest.fixture
def weights(server: FileServer) -> bytes:
    """Bytes that are served as /weights.gguf and as hf://acme/tiny/weights.gguf."""
    content = random.Random(0).randbytes(SIZE_BYTES)  # noqa: S311  weights, not a secret
    (server.root / "acme/tiny").mkdir(parents=True)
    for name in ("weights.gguf", "acme/tiny/weights.gguf"):
        (server.root / name).write_bytes(content)
    return content


@pytest.fixture
def store(tmp_path: Path, server: FileServer) -> WeightsStore:
    return WeightsStore(
        tmp_path / "weights",
        SourceAccess(
            endpoint=server.url, file_root=tmp_path / "files", allowed_networks=ALLOWED_NETWORKS, patience=HURRIED
        ),
    )


@pytest.fixture
def call(tmp_path: Path, server: FileServer) -> FetchCall:
    return FetchCall(tmp_path / "cache", server.url)
