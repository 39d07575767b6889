"""The layout of the cache of a hub's client, such as `hf download` makes."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


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
