"""The layout of the cache of a hub's client, such as `hf download` makes."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.file_server import COMMIT, LARGE


def move_to_cache(files: Iterable[Path], root: Path) -> Path:
    """Move files to blobs below `root` that are named by their digest; return the folder with links of their names."""
    blobs, snapshot = root / "blobs", root / "snapshots" / ("b" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in files:
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def add_to_hub_cache(cache: Path, repo: str, files: Mapping[str, bytes]) -> Path:
    """Add files of a repository to a cache, at the commit of the file server; return the folder of the commit.

    Small files are named by their Git object, and large ones by their SHA-256.
    """
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for part in ("blobs", "refs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "refs/main").write_text(COMMIT)
    for name, content in files.items():
        git_object = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
        blob = (hashlib.sha256(content) if name.endswith(LARGE) else git_object).hexdigest()
        (folder / "blobs" / blob).write_bytes(content)
        path = snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(Path(*[".."] * len(path.relative_to(folder).parent.parts)) / "blobs" / blob)
    return snapshot
