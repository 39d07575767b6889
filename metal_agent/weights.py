"""The weights that processes of this host serve: a model and what goes with it, held while they are served."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from artifacts import inspect
from artifacts.errors import ArtifactError
from artifacts.source import DEFAULT_ENDPOINT, parse
from artifacts.store import Held, Store
from crds.metalprocess import Artifact, MetalProcessSpec
from crds.model import Layout

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are here and, where it is known, the bytes in all."""

log = structlog.get_logger()


class Pinned:
    """All that one process serves, here until `release`: the model, then the further artifacts in their order."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held

    @property
    def model(self) -> Path:
        """File or folder of the weights."""
        return self._held[0].path

    @property
    def further(self) -> list[Path]:
        """Where each of `spec.further_artifacts` is."""
        return [held.path for held in self._held[1:]]

    @property
    def exists(self) -> bool:
        """Whether everything is still there: the owner's own files may go at any time."""
        return all(held.path.exists() for held in self._held)

    @property
    def descriptors(self) -> list[int]:
        """Locks that an engine is to hold for as long as it lives."""
        return [held.descriptor for held in self._held if held.descriptor is not None]

    def release(self) -> None:
        """Let go of all of it; may be called twice."""
        for held in self._held:
            held.release()


class Weights:
    """Weights in `folder`; sources file:// are allowed below `file_root` only."""

    def __init__(self, folder: Path, file_root: Path | None) -> None:
        self._file_root = file_root
        self._endpoint = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
        self.store = Store(folder, endpoint=self._endpoint, file_root=file_root)

    def pin(self, spec: MetalProcessSpec) -> Pinned | None:
        """Hold what a process serves as far as it is here, so that making room for another does not take it.

        None when there is nothing to hold. Never raises: what cannot be held is fetched when it is needed. Only what
        `fetch` returns is whole, so that an engine can be started with it.
        """
        held = []
        for artifact in _artifacts(spec):
            with contextlib.suppress(ArtifactError, OSError):
                found = self.store.find(artifact.source, artifact.revision or None, artifact.sha256 or None)
                held += [found] if found else []
        return Pinned(held) if held else None

    async def fetch(self, spec: MetalProcessSpec, tokens: Sequence[str | None], on_progress: Progress) -> Pinned:
        """Bring everything here that a process serves, verified; quick when it is. Raises ArtifactError.

        `tokens` are those of the model's source and of the further artifacts, in their order. `on_progress` tells of
        one artifact after the other.
        """
        held: list[Held] = []
        try:
            for artifact, token in zip(_artifacts(spec), tokens, strict=True):
                held.append(
                    await self.store.obtain(
                        parse(artifact.source),
                        sha256=artifact.sha256 or None,
                        revision=artifact.revision or None,
                        token=token,
                        on_progress=on_progress,
                    )
                )
        except BaseException:
            Pinned(held).release()
            raise
        return Pinned(held)

    async def layout(self, artifact: Artifact) -> Layout | None:
        """Read from the header of a file:// artifact what decides its memory: nothing in the cluster could read it.

        None for any other source, which the controller has inspected, and for a header that does not tell all of it.
        Raises ArtifactError.
        """
        source = parse(artifact.source)
        if source.scheme != "file":
            return None
        found = await inspect.inspect(
            source, token=None, endpoint=self._endpoint, file_root=self._file_root, sha256=artifact.sha256 or None
        )
        return found.layout


def _artifacts(spec: MetalProcessSpec) -> list[Artifact]:
    return [spec.artifact, *(each.artifact for each in spec.further_artifacts)]
