"""The weights that a name means on this machine: for `pomona up --model`, and all commands that take a model's name.

Of a repository of GGUF files without a quantization, the best that fits the memory is chosen, and stays chosen: what
was found is recorded beside the inspections, so that a name which was used before needs no server.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec

from artifacts import durable
from artifacts.errors import ArtifactError
from artifacts.foreign_stores import ForeignStores, find_foreign_stores
from artifacts.inspect import inspect
from artifacts.ollama_store import OllamaModel
from artifacts.partial_download import translate_os_errors
from artifacts.quantized_models import QuantizedModel, list_quantized_models, match_quantization
from artifacts.repositories.repository import Listing, SourceAccess
from artifacts.repositories.schemes import open_repository
from artifacts.retry import SHORT_PATIENCE, Patience
from artifacts.source import parse, scheme_of
from artifacts.weights_store import WeightsStore
from crds.inferenceservice import InferenceService
from crds.meta import API_VERSION
from crds.model import Model
from crds.serving import LEAST_CONTEXT, Mode
from crds.text import make_name, name_model
from fitness.catalog_entries import CatalogEntry, load_catalog
from standalone.inspections import ModelInspector
from standalone.manifests import accept_manifest, derive_name
from standalone.model_names import (
    CLIENT_FORMS,
    FORMS,
    CatalogName,
    HubName,
    ModelNameError,
    OllamaName,
    SourceName,
    parse_model_name,
)
from standalone.quantization_choice import choose_quantization, is_held

_ACCELERATORS: Final = ("metal", "cpu") if sys.platform == "darwin" else ("cpu", "metal")
"""Those of the catalog whose engines run on this machine, the first preferred."""
_PATIENCE: Final = Patience(connect_seconds=10.0, silence_seconds=20.0, attempts=2, longest_pause_seconds=5.0)
"""Patience with the hub while the user waits for the first sign of life."""
_MOST_LISTED: Final = 12
TOKEN_SECRET: Final = "hf-token"  # noqa: S105 - the name of a Secret
"""Secret that a Model of `--model` refers to if a download token is in the environment."""


class ModelChoice(NamedTuple):
    """The Model and the service that a name means."""

    name: str
    """The name of the Model and of its service."""
    source: str
    sha256: str | None = None
    memory_bytes: int | None = None
    """Stated by the catalog; None: computed from the header."""
    mode: Mode = "chat"
    is_thinking: bool = False
    note: str = ""
    """The choice that was made, and why, for the user; "": there was none."""


class _FoundFile(msgspec.Struct, frozen=True, rename="camel"):
    """The record of a file that was found for a repository of the hub."""

    source: str
    quantization: str
    quantizations: int
    """Number of those that there were to choose from."""


class ModelLookup:
    """Finds the weights that names mean.

    Args:
        folder: for the records of names; made when absent.
        access: settings to read sources, with the token for the hub.
        inspector: knows which weights are stored.
        foreign: the stores of other programs on this machine.
    """

    def __init__(self, folder: Path, access: SourceAccess, inspector: ModelInspector, foreign: ForeignStores) -> None:
        self._folder = folder
        self._access = dataclasses.replace(access, patience=_PATIENCE)
        self._inspector = inspector
        self._foreign = foreign

    async def find(self, text: str, budget_bytes: int, *, is_client: bool = False) -> ModelChoice:
        """Return the weights that `text` means, for `budget_bytes` of memory.

        A client of the endpoint names models of the catalog, of Ollama's store and of the hub only: by paths and URLs,
        it would have this machine read what the client itself may not read.

        Raises:
            ModelNameError: nothing has this name, or it means several models.
            SourceError: it is an invalid source.
            ArtifactError: the hub refuses or cannot be reached, and nothing is known of an earlier use of the name.
        """
        catalog = load_catalog()
        try:
            name = parse_model_name(
                text,
                catalog=catalog,
                ollama=self._foreign.ollama.list_names(),
                is_path=lambda path: not is_client and Path(path).expanduser().exists(),
            )
            if isinstance(name, OllamaName):
                return self._choose_of_ollama(text, name.name)
        except ModelNameError as error:
            raise (ModelNameError(text, CLIENT_FORMS) if is_client else error) from None
        if is_client and isinstance(name, SourceName):
            raise ModelNameError(text, CLIENT_FORMS)
        if isinstance(name, CatalogName):
            return self._choose_of_catalog(name.name, catalog[name.name])
        if isinstance(name, HubName):
            with translate_os_errors(self._folder):
                return await self._choose_of_hub(text, name, budget_bytes)
        return ModelChoice(derive_name(parse(name.source)), name.source)

    @staticmethod
    def _choose_of_catalog(name: str, entry: CatalogEntry) -> ModelChoice:
        """Return the source of an entry for this machine. Raises ModelNameError: there is none."""
        sources = [source for wanted in _ACCELERATORS for source in entry.sources if wanted in source.accelerators]
        # A source of Ollama's library needs its daemon; a file is served by what is installed here.
        sources.sort(key=lambda source: scheme_of(source.source) == "ollama")
        if not sources:
            others = ", ".join(sorted({vendor for source in entry.sources for vendor in source.accelerators}))
            problem = f"the catalog has weights of it for {others} only: give ORG/REPO of a repository of GGUF files"
            raise ModelNameError(name, problem)
        chosen = sources[0]
        return ModelChoice(name, chosen.source, None, chosen.memory_bytes, entry.mode, entry.thinking)

    def _choose_of_ollama(self, text: str, name: str) -> ModelChoice:
        """Return a model of Ollama's store. Raises ModelNameError: Ollama has not got it."""
        stored = self._foreign.ollama.find_model(name)
        if stored is None:
            raise ModelNameError(
                text,
                f"Ollama has no such model here, or one without a GGUF file: get it by `ollama pull {name}`, or let "
                "Ollama itself serve it, by a Model with this source and its memoryBytes in a file",
            )
        return _serve_in_place(make_name(name), stored)

    async def _choose_of_hub(self, text: str, name: HubName, budget_bytes: int) -> ModelChoice:
        """Return the file of a repository that serves the name, or the repository if it has no GGUF files."""
        whole = ModelChoice(derive_name(parse(name.source)), name.source)
        if not name.quantization and self._inspector.find_stored(name.source):
            return whole  # a repository without GGUF files, which was served before

        record_path = self._folder / f"{hashlib.sha256(':'.join(name).encode()).hexdigest()[:16]}.json"
        record = durable.read(record_path, _FoundFile)
        stored = self._inspector.find_stored(record.source) if record else None
        if record and stored and (name.quantization or is_held(stored, budget_bytes, LEAST_CONTEXT)):
            return _choose_file(name, record, "chosen before, and stored here")

        # Not used before, or its weights are gone.
        try:
            listing, access = await self._list_repository(name)
        except ArtifactError as error:
            if error.reason in {"SourceNotFound", "SourceUnauthorized"}:
                raise ModelNameError(text, f"{error.message}; else give {FORMS}") from error
            if record and stored and error.reason == "SourceUnreachable":
                return _choose_file(name, record, "stored here, and the hub cannot be asked for a smaller one")
            raise
        found, reason = await self._choose_model(text, name, listing, access, budget_bytes)
        if found is not None:
            if access.hub_cache is None:  # the cache may lack other quantizations
                durable.write(record_path, found)
            return _choose_file(name, found, reason)
        if name.quantization:
            problem = f"{name.repo} has no GGUF files to choose from: {name.repo} alone means the whole repository"
            raise ModelNameError(text, problem)
        return whole

    async def _list_repository(self, name: HubName) -> tuple[Listing, SourceAccess]:
        """Return the files of a repository, and the settings to read them: at the hub, or in its cache.

        Raises:
            ArtifactError: the hub refuses; or it cannot be reached, and its client has stored nothing of it.
        """
        source, access = parse(name.source), self._access
        cached = self._foreign.find_access(source, access)
        if cached is not None:
            access = dataclasses.replace(access, patience=SHORT_PATIENCE)
        try:
            return await open_repository(source, access).list_files(None), access
        except ArtifactError as error:
            if error.reason != "SourceUnreachable" or cached is None:
                raise
            return await open_repository(source, cached).list_files(None), cached

    @staticmethod
    async def _choose_model(
        text: str, name: HubName, listing: Listing, access: SourceAccess, budget_bytes: int
    ) -> tuple[_FoundFile | None, str]:
        """Return the GGUF model of a listing that the name means, and the reason of the choice; None: it has none.

        Raises:
            ModelNameError: it has no such quantization, or several models.
            ArtifactError: a header cannot be read.
        """
        models = list_quantized_models(listing.files)
        if not models:
            return None, ""
        matching = match_quantization(models, name.quantization) if name.quantization else _drop_unnamed(models)
        if not matching:
            shown = _list_some(sorted({model.quantization or model.path for model in models}))
            raise ModelNameError(text, f"{name.repo} has no {name.quantization}: it has {shown}")
        quantizations = {model.quantization for model in matching}
        if len(quantizations) < len(matching):
            shown = _list_some(model.path for model in matching)
            problem = f"{name.repo} has several models: name one of their files, hf://{name.repo}/FILE.gguf: {shown}"
            raise ModelNameError(text, problem)

        chosen, reason = matching[0], ""
        if len(matching) > 1:
            # Their layers are the same, so that one header is enough; the shortest download is the smallest file's.
            source = _build_source(name, matching[-1].path)
            header = await inspect(parse(source), access)
            chosen, reason = choose_quantization(matching, header, budget_bytes)
        return _FoundFile(_build_source(name, chosen.path), chosen.quantization, len(matching)), reason


def _drop_unnamed(models: Sequence[QuantizedModel]) -> list[QuantizedModel]:
    """Return the models whose names state a quantization, or all if none does: others are drafts and the like."""
    return [model for model in models if model.quantization] or list(models)


def _build_source(name: HubName, path: str) -> str:
    """Return the source of a file of a repository."""
    at = "" if name.revision == "main" else f"@{name.revision}"
    return f"hf://{name.repo}{at}/{quote(path)}"


def _choose_file(name: HubName, found: _FoundFile, reason: str) -> ModelChoice:
    """Return the choice of a file; it has the name of its repository, with the quantization if that was stated."""
    note = ""
    if not name.quantization and found.quantizations > 1:
        note = f"{name.repo}: {found.quantization} of {found.quantizations} quantizations: {reason}"
    return ModelChoice(name_model(f"{name.repo}:{name.quantization}"), found.source, note=note)


def _serve_in_place(name: str, stored: OllamaModel) -> ModelChoice:
    """Return the choice of a file of Ollama's store, which is verified by its digest where it lies."""
    source = f"file://{quote(str(stored.blob))}"
    return ModelChoice(name, source, stored.sha256, note=f"{stored.name}: served from Ollama's store, without a copy")


def _list_some(names: Iterable[str]) -> str:
    """Return the first names for a message."""
    shown = list(names)
    more = f" and {len(shown) - _MOST_LISTED} more" if len(shown) > _MOST_LISTED else ""
    return ", ".join(shown[:_MOST_LISTED]) + more


def open_lookup(folder: Path, access: SourceAccess) -> ModelLookup:
    """Return the lookup of names by the stores and records of a state folder."""
    store = WeightsStore(folder / "weights", access, find_foreign_stores())
    return ModelLookup(folder / "names", access, ModelInspector(folder / "inspections", store, access), store.foreign)


def build_manifests(choice: ModelChoice, *, token: bool, on_demand: bool = False) -> tuple[Model, InferenceService]:
    """Return the Model and the InferenceService of a choice.

    Args:
        choice: the weights, and how they are served.
        token: there is a download token.
        on_demand: the model is loaded by requests, and unloaded when idle.
    """
    spec: dict[str, Any] = {"source": choice.source}
    if token and scheme_of(choice.source) == "hf":
        spec["sourceSecretRef"] = {"name": TOKEN_SECRET}
    if choice.sha256 is not None:
        spec["sha256"] = choice.sha256
    if choice.memory_bytes is not None:
        spec["memoryBytes"] = choice.memory_bytes
    if choice.is_thinking:
        spec["thinking"] = True
    metadata = {"name": choice.name}
    model = {"apiVersion": API_VERSION, "kind": "Model", "metadata": metadata, "spec": spec}
    serving: dict[str, Any] = {"modelRef": choice.name, "mode": choice.mode}
    if on_demand:
        serving["scaling"] = {"minReplicas": 0}
    service = {**model, "kind": "InferenceService", "spec": serving}
    return accept_manifest(model, Model), accept_manifest(service, InferenceService)
