"""The weights that processes of this host serve: a model and its further artifacts, locked while they are served."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from artifacts import inspect
from artifacts.errors import ArtifactError
from artifacts.foreign_stores import NO_FOREIGN_STORES, ForeignStores
from artifacts.repositories.address_policy import Networks
from artifacts.repositories.repository import SourceAccess
from artifacts.source import DEFAULT_ENDPOINT, Source, parse
from artifacts.weights_store import CheckWeights, HeldWeights, WeightsStore
from crds.metalprocess import Artifact, MetalProcessSpec
from crds.weights_header import GGUF, Layout

Progress = Callable[[int, int | None], None]
"""Called with the number of bytes on the host and the total, or None if that is unknown."""


class PinnedWeights(msgspec.Struct, frozen=True):
    """The weights of one process, kept on the host until `release`: the model, then the further artifacts in order."""

    held: Sequence[HeldWeights]
    layout: Layout | None = None
    """Layout of the model's own header; of a header that does not state all of it, the size of the weights."""
    draft_layout: Layout | None = None
    """The same of the draft, if there is one."""
    headers: Sequence[GGUF] = ()
    """Facts of the headers, in the order of the weights."""

    @property
    def model(self) -> Path:
        """File or folder of the weights."""
        return self.held[0].path

    @property
    def further(self) -> list[Path]:
        """Paths of `spec.further_artifacts`, in their order."""
        return [held.path for held in self.held[1:]]

    @property
    def exists(self) -> bool:
        """True if everything is still on disk: the owner may delete own files at any time."""
        return all(held.path.exists() for held in self.held)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of locks that an engine inherits and holds until it ends."""
        return [held.descriptor for held in self.held if held.descriptor is not None]

    def release(self) -> None:
        """Release all locks; may be called twice."""
        for held in self.held:
            held.release()


class HostWeights:
    """The weights on this host, in `folder`.

    Sources of file:// are allowed only below `file_root`, and private networks only if `allowed_networks` has them.
    `foreign` are the stores of other programs that may be used.
    """

    def __init__(
        self,
        folder: Path,
        file_root: Path | None,
        allowed_networks: Networks = (),
        foreign: ForeignStores = NO_FOREIGN_STORES,
    ) -> None:
        endpoint = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
        self._access = SourceAccess(endpoint=endpoint, file_root=file_root, allowed_networks=allowed_networks)
        self.store = WeightsStore(folder, self._access, foreign)

    def pin(self, spec: MetalProcessSpec) -> PinnedWeights | None:
        """Lock those weights of a process that are on the host, so that they are not deleted to make room for others.

        Return None if there are none. Weights that cannot be locked are left out; they are fetched when needed. So
        the result may be incomplete: only the result of `fetch` is enough to start an engine.
        """
        held = []
        for artifact in _list_artifacts(spec):
            with contextlib.suppress(ArtifactError, OSError):
                weights = self.store.lock_stored(
                    parse(artifact.source, artifact.files), artifact.revision or None, artifact.sha256 or None
                )
                if weights:
                    held.append(weights)
        return PinnedWeights(held) if held else None

    async def fetch(
        self, namespace: str, spec: MetalProcessSpec, tokens: Sequence[str | None], on_progress: Progress
    ) -> PinnedWeights:
        """Fetch, verify and lock all weights of a process; quick if they are on the host. Raises ArtifactError.

        `tokens` are those of the model's source and of the further artifacts (such as a draft or an adapter), in their
        order. `on_progress` is called for one artifact after the other. `namespace` is the tenant that private weights
        belong to. After an error all locks are released.
        """
        # Of each artifact: its locked weights, and facts of its header.
        held: list[HeldWeights] = []
        layouts: list[Layout] = []
        headers: list[GGUF] = []

        try:
            for artifact, token in zip(_list_artifacts(spec), tokens, strict=True):
                source = parse(artifact.source, artifact.files)

                def check_header(path: Path, source: Source = source) -> None:
                    """Check weights, just fetched or stored before, and keep facts of the header; `obtain` calls it.

                    `source` has a default so that it is the source of this turn of the loop.
                    """
                    facts = inspect.check_stored(source, path)
                    layouts.append(_least_layout(facts))
                    headers.append(facts.gguf)

                held.append(await self.fetch_artifact(namespace, artifact, token, on_progress, check_header))
        except BaseException:
            PinnedWeights(held).release()  # unlocks what was fetched so far
            raise

        # The model's layout is the first; those of the further artifacts follow in their order.
        roles = [further_artifact.role for further_artifact in spec.further_artifacts]
        draft = layouts[1 + roles.index("draft")] if "draft" in roles else None
        return PinnedWeights(held, layout=layouts[0], draft_layout=draft, headers=headers)

    async def fetch_artifact(
        self, namespace: str, artifact: Artifact, token: str | None, on_progress: Progress, check: CheckWeights
    ) -> HeldWeights:
        """Fetch, verify, check and lock the weights of one artifact for a tenant. Raises ArtifactError."""
        source = parse(artifact.source, artifact.files)
        return await self.store.obtain(
            source,
            sha256=artifact.sha256 or None,
            # Which files of a folder are fetched may differ from one version to the next.
            size_bytes=None if source.has_listing else artifact.size_bytes,
            revision=artifact.revision or None,
            token=token,
            on_progress=on_progress,
            tenant=namespace,
            mirrors=artifact.mirrors,
            check=check,
        )

    async def read_layout(self, artifact: Artifact) -> Layout | None:
        """Read the layout, which decides memory use, from the header of a file:// artifact.

        Nothing in the cluster can read such a file. Returns None for any other source, which the controller has
        inspected, and for a header that does not state the whole layout. Raises ArtifactError.
        """
        source = parse(artifact.source, artifact.files)
        if source.scheme != "file":
            return None
        inspection = await inspect.inspect(source, self._access, sha256=artifact.sha256 or None)
        return inspection.layout


def _least_layout(facts: inspect.Inspection) -> Layout:
    """Return the layout, or one with the size of the weights only if the header does not state all of it."""
    return facts.layout or Layout(
        tensor_bytes=facts.tensor_bytes,
        vocabulary_size=0,
        embedding_size=0,
        attention_size=0,
        head_count=0,
        feed_forward_size=0,
        layers=[],
    )


def _list_artifacts(spec: MetalProcessSpec) -> list[Artifact]:
    """Return the artifacts of a process: the model, then the further ones."""
    return [spec.artifact, *(artifact.artifact for artifact in spec.further_artifacts)]
