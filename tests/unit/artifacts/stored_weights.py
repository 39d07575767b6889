"""Fill a store of weights from a file server, and limit the disk that it is on."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from artifacts.errors import ArtifactError
from artifacts.repositories.repository import SourceAccess
from artifacts.retry import Patience
from artifacts.source import parse
from artifacts.weights_store import HeldWeights, WeightsStore
from tests.support.file_server import ALLOWED_NETWORKS, FileServer

HURRIED = Patience(first_pause_seconds=0.001, longest_pause_seconds=0.01, silence_seconds=10, connect_seconds=10)
SMALL = 64 << 10


class _Usage(NamedTuple):
    total: int
    free: int


def again(store: WeightsStore, tmp_path: Path, server: FileServer) -> WeightsStore:
    """Return the same store as another process opens it."""
    del store
    access = SourceAccess(endpoint=server.url, allowed_networks=ALLOWED_NETWORKS, patience=HURRIED)
    return WeightsStore(tmp_path / "weights", access)


async def obtain(store: WeightsStore, source: str, **options: Any) -> HeldWeights:
    defaults: dict[str, Any] = {"sha256": None, "revision": None, "token": None, "on_progress": lambda _a, _b: None}
    return await store.obtain(parse(source), **(defaults | options))


async def refused(store: WeightsStore, source: str, **options: Any) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await obtain(store, source, **options)
    return caught.value


def publish(server: FileServer, name: str, *, size_bytes: int = SMALL) -> str:
    """Serve a file with unique content and return its source."""
    path = server.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(hashlib.sha256(name.encode()).digest() * (size_bytes // 32))
    return f"{server.url}/{name}"


def disk(monkeypatch: pytest.MonkeyPatch, store_folder: Path, total_bytes: int) -> None:
    """Simulate a disk of this size that has only the files of the store."""

    def usage(_path: Path) -> _Usage:
        used = sum(
            path.lstat().st_size for path in store_folder.rglob("*") if path.is_file() and path.lstat().st_size > 999
        )
        return _Usage(total_bytes, total_bytes - used)

    monkeypatch.setattr("artifacts.weights_store.shutil.disk_usage", usage)
