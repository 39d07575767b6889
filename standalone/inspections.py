"""Inspection of the Models of `pomona up`, from their source or, while it cannot be asked, from weights stored here.

What the source said at the last inspection is kept beside the store: its revision names the weights there. Weights of a
pinned revision never change, so their source is not asked again once they are stored.
"""

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import msgspec

from artifacts import durable
from artifacts.errors import ArtifactError
from artifacts.inspect import Inspection, check_stored, inspect, inspect_with_mirrors
from artifacts.partial_download import translate_os_errors
from artifacts.repositories.repository import SourceAccess
from artifacts.retry import SHORT_PATIENCE, Patience
from artifacts.source import Source, cache_key, parse
from artifacts.weights_store import WeightsStore
from crds.model import Model, ModelSpec


class SourceRecord(msgspec.Struct, frozen=True, rename="camel"):
    """The facts that a source stated about its weights at the last inspection; their header is in the store."""

    revision: str
    file: str
    sha256: str | None
    size_bytes: int


class ModelInspector:
    """Inspector of Models, with records in `folder`.

    Args:
        folder: made when absent.
        store: the weights of this machine.
        access: settings to read sources, with the token for those Models that have a Secret.
    """

    def __init__(self, folder: Path, store: WeightsStore, access: SourceAccess) -> None:
        self._folder = folder
        self._store = store
        self._access = access

    async def inspect(self, model: Model) -> tuple[Inspection, str]:
        """Return the facts of a Model, and why its source could not be asked; "" if it was, or need not be.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        with translate_os_errors(self._folder):
            return await self._inspect(model.spec)

    def find_stored(self, text: str) -> Inspection | None:
        """Return the facts of the stored weights of a source; None: it was never inspected here, or they are gone.

        Raises:
            ArtifactError: the source is invalid, or the stored weights cannot be read.
        """
        with translate_os_errors(self._folder):
            return self._find_stored(parse(text), None)

    async def _inspect(self, spec: ModelSpec) -> tuple[Inspection, str]:
        """Return the facts of a Model's weights, and why its source could not be asked; "" if it was, or need not be.

        1. Weights of a fixed revision never change: if they are stored, or the hub's client has them, nobody is asked.
        2. Other sources are asked; while one is unreachable, the facts of those weights count.
        3. What a source stated is recorded for the next run, in which it may be unreachable.
        """
        source = parse(spec.source, spec.files)
        stored = await asyncio.to_thread(self._find_stored, source, spec.sha256)
        known = stored or await self._inspect_cached(source, spec.sha256)

        def access(server: Source, patience: Patience) -> SourceAccess:
            """Return how a server, the source or a mirror of it, is read; `inspect_with_mirrors` calls it for each.

            Mirrors get no token, and there is little patience if the weights are on this machine.
            """
            token = self._access.token if spec.source_secret_ref and server is source else None
            return dataclasses.replace(self._access, token=token, patience=SHORT_PATIENCE if known else patience)

        problem = ""
        if known is not None and source.is_pinned:  # step 1
            inspection = known
        else:
            try:
                inspection = await inspect_with_mirrors(source, spec.mirrors, access, sha256=spec.sha256)  # step 2
            except ArtifactError as error:
                if known is None or error.reason != "SourceUnreachable":
                    raise
                inspection, problem = known, error.message
        if source.scheme != "file" and inspection is not stored:  # step 3
            record = SourceRecord(inspection.revision, inspection.file, inspection.sha256, inspection.size_bytes)
            await asyncio.to_thread(durable.write, self._build_record_path(source, spec.sha256), record)
        return inspection, problem

    async def _inspect_cached(self, source: Source, sha256: str | None) -> Inspection | None:
        """Return the facts of weights that the hub's client has stored; None: it has not got all of them."""
        cached = self._store.foreign.find_access(source, self._access)
        if cached is not None:
            with contextlib.suppress(ArtifactError):
                return await inspect(source, cached, sha256=sha256)
        return None

    def _find_stored(self, source: Source, sha256: str | None) -> Inspection | None:
        """Return the facts of the stored weights that the source stated at its last inspection.

        None: the source was never inspected here, or those weights are not in the store. The layout is read from their
        header; revision, file, checksum and size are those that the source stated.
        """
        record = durable.read(self._build_record_path(source, sha256), SourceRecord)
        held_weights = self._store.lock_stored(source, record.revision or None, record.sha256) if record else None
        if record is None or held_weights is None:
            return None
        try:
            facts = check_stored(source, held_weights.path)  # locked meanwhile, so that they are not deleted
        finally:
            held_weights.release()
        stated_facts = msgspec.structs.asdict(record) | {"sha256": record.sha256 or ""}
        return msgspec.structs.replace(facts, **stated_facts)

    def _build_record_path(self, source: Source, sha256: str | None) -> Path:
        """Return the file of the record of a source."""
        return self._folder / f"{cache_key(source.text, sha256 or '', source.files)}.json"
