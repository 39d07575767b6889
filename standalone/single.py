"""Serve a model of `--model` without a file: build the Model and InferenceService that a user would write for it."""

from collections.abc import Iterable
from typing import Any, Final

from artifacts.foreign_stores import find_foreign_stores
from artifacts.source import scheme_of
from artifacts.weights_store import WeightsStore
from crds.inferenceservice import InferenceService
from crds.meta import API_VERSION
from crds.model import Model
from kube.resources import ObjectKey
from standalone.inspections import ModelInspector
from standalone.machine import StandaloneOptions
from standalone.manifests import ManifestError, Manifests, accept_manifest
from standalone.model_lookup import ModelChoice, ModelLookup
from standalone.model_names import ModelNameError

TOKEN_SECRET: Final = "hf-token"  # noqa: S105 - the name of a Secret
"""Secret that a Model of `--model` refers to if a download token is in the environment."""


async def add_models(
    manifests: Manifests, names: Iterable[str], options: StandaloneOptions, budget_bytes: int
) -> list[str]:
    """Add a Model and an InferenceService for each name of a model to `manifests`; return what was chosen, in words.

    Each is chosen for `budget_bytes` of memory.

    Raises:
        SourceError: a source is invalid.
        ArtifactError: the hub refuses, or cannot be reached.
        ManifestError: nothing has such a name, or another service has it.
    """
    lookup, notes = open_lookup(options), []
    for name in names:
        try:
            choice = await lookup.find(name, budget_bytes)
        except ModelNameError as error:
            raise ManifestError([f"--model {error}"]) from error
        _add_choice(manifests, choice, token=options.token is not None)
        notes.append(choice.note)
    return [note for note in notes if note]


def open_lookup(options: StandaloneOptions) -> ModelLookup:
    """Return the lookup of names on this machine."""
    access = options.source_access
    store = WeightsStore(options.folder / "weights", access, find_foreign_stores())
    inspector = ModelInspector(options.folder / "inspections", store, access)
    return ModelLookup(options.folder / "names", access, inspector, store.foreign)


def _add_choice(manifests: Manifests, choice: ModelChoice, *, token: bool) -> None:
    """Add the Model and the InferenceService of a choice. Raises ManifestError: its name is taken."""
    model, service = build_manifests(choice, token=token)
    key = ObjectKey(service.metadata.namespace, service.metadata.name)
    if key in manifests.models or any(object_key.name == key.name for object_key in manifests.services):
        raise ManifestError([f"--model {choice.source}: the name {key.name} is taken already: serve them from files"])
    manifests.models[key], manifests.services[key] = model, service


def build_manifests(choice: ModelChoice, *, token: bool) -> tuple[Model, InferenceService]:
    """Return the Model and the InferenceService of a choice; `token` is True if there is a download token."""
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
    service = {**model, "kind": "InferenceService", "spec": {"modelRef": choice.name, "mode": choice.mode}}
    return accept_manifest(model, Model), accept_manifest(service, InferenceService)
