"""Serve a model of `--model` without a file: build the Model and InferenceService that a user would write for it."""

from collections.abc import Iterable

from kube.resources import ObjectKey
from standalone.machine import StandaloneOptions
from standalone.manifests import ManifestError, Manifests
from standalone.model_lookup import ModelChoice, build_manifests, open_lookup
from standalone.model_names import ModelNameError


async def add_models(
    manifests: Manifests,
    names: Iterable[str],
    options: StandaloneOptions,
    budget_bytes: int,
    *,
    on_demand: bool = False,
) -> list[str]:
    """Add a Model and an InferenceService for each name of a model to `manifests`; return what was chosen, in words.

    Each is chosen for `budget_bytes` of memory, and loaded by requests if it is `on_demand`.

    Raises:
        SourceError: a source is invalid.
        ArtifactError: the hub refuses, or cannot be reached.
        ManifestError: nothing has such a name, or another service has it.
    """
    lookup, notes = open_lookup(options.folder, options.source_access), []
    for name in names:
        try:
            choice = await lookup.find(name, budget_bytes)
        except ModelNameError as error:
            raise ManifestError([f"--model {error}"]) from error
        _add_choice(manifests, choice, token=options.token is not None, on_demand=on_demand)
        notes.append(choice.note)
    return [note for note in notes if note]


def _add_choice(manifests: Manifests, choice: ModelChoice, *, token: bool, on_demand: bool) -> None:
    """Add the Model and the InferenceService of a choice. Raises ManifestError: its name is taken."""
    model, service = build_manifests(choice, token=token, on_demand=on_demand)
    key = ObjectKey(service.metadata.namespace, service.metadata.name)
    if key in manifests.models or any(object_key.name == key.name for object_key in manifests.services):
        raise ManifestError([f"--model {choice.source}: the name {key.name} is taken already: serve them from files"])
    manifests.models[key], manifests.services[key] = model, service
