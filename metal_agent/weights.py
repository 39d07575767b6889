"""The weights on this host: fetched once, verified, shared by every process that serves the same artifact."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

from artifacts import fetch, inspect
from artifacts.source import DEFAULT_ENDPOINT, cache_key, parse
from crds.metalprocess import Artifact, MetalProcessSpec
from fitness.memory import serving_bytes

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are here and, where it is known, the bytes in all."""


class Weights:
    """Weights in `folder`; sources file:// are allowed below `file_root` only."""

    def __init__(self, folder: Path, file_root: Path | None) -> None:
        self._folder = folder
        self._file_root = file_root
        self._endpoint = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
        # Two processes of one artifact: the second finds what the first has fetched.
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, artifact: Artifact, token: str | None, on_progress: Progress) -> Path:
        """Bring the artifact here, verified; quick when it is. Raises ArtifactError."""
        source = parse(artifact.source)
        folder = self._folder / cache_key(artifact.source, artifact.revision)
        async with self._locks.setdefault(folder, asyncio.Lock()):
            fetched = await fetch.fetch(
                source,
                folder,
                sha256=artifact.sha256 or None,
                token=token,
                endpoint=self._endpoint,
                file_root=self._file_root,
                revision=artifact.revision or None,
                on_progress=on_progress,
            )
        return fetched.path

    async def estimate_bytes(self, spec: MetalProcessSpec) -> int | None:
        """Compute what serving a file:// artifact takes from its own header: nothing in the cluster could read it.

        None for any other source, which the controller has inspected. Raises ArtifactError.
        """
        source = parse(spec.artifact.source)
        if source.scheme != "file":
            return None
        found = await inspect.inspect(
            source, token=None, endpoint=self._endpoint, file_root=self._file_root, sha256=spec.artifact.sha256 or None
        )
        return serving_bytes(
            weights_bytes=found.size_bytes,
            kv_bytes_per_token=found.gguf.kv_bytes_per_token,
            context_length=spec.context_length,
            parallel=spec.parallel,
        )
