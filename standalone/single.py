"""Serve models of `--model` without a file: build the Models and InferenceServices that a user would write for them."""

from collections.abc import Iterable

from kube.resources import ObjectKey
from standalone.live_files import find_taken
from standalone.machine import StandaloneOptions
from standalone.manifests import ManifestError, Manifests
from standalone.model_lookup import build_manifests, open_lookup
from standalone.model_names import ModelNameError


async def choose_models(
    names: Iterable[str], of_files: Manifests, options: StandaloneOptions, budget_bytes: int
) -> tuple[Manifests, list[str]]:
    """Return a Model and an InferenceService for each name of a model, and what was chosen, in words.

    Each is chosen for `budget_bytes` of memory.

    Raises:
        SourceError: a source is invalid.
        ArtifactError: the hub refuses, or cannot be reached.
        ManifestError: nothing has such a name, or another service has it.
    """
    lookup, chosen, notes = open_lookup(options.folder, options.source_access), Manifests(), list[str]()
    for name in names:
        try:
            choice = await lookup.find(name, budget_bytes)
        except ModelNameError as error:
            raise ManifestError([f"--model {error}"]) from error
        model, service = build_manifests(choice, token=options.token is not None)
        key = ObjectKey(service.metadata.namespace, service.metadata.name)
        one = Manifests({key: model}, {key: service})
        if find_taken(one, of_files) or find_taken(one, chosen):
            problem = f"--model {choice.source}: the name {key.name} is taken already: serve them from files"
            raise ManifestError([problem])
        chosen.models[key], chosen.services[key] = model, service
        notes.append(choice.note)
    return chosen, [note for note in notes if note]
