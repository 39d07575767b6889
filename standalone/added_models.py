"""Models that are added to a running `pomona up`: by `pomona run`, and by clients of Ollama's API that pull them.

They are on demand, so that one which nobody asks for takes no memory. What was chosen for each name is recorded in the
state folder, where the next `pomona up` finds it: weights that are stored and not served would be of no use.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from artifacts import durable
from kube.resources import ObjectKey
from standalone.live_files import LiveFiles, find_taken
from standalone.machine import Machine
from standalone.manifests import ManifestError, Manifests
from standalone.model_lookup import ModelChoice, build_manifests

MOST_ADDED: Final = 100
_RECORD: Final = "added-models.json"

log = structlog.get_logger()


def read_added(folder: Path) -> list[ModelChoice]:
    """Return the models that were added to the `pomona up` of a state folder. Raises OSError."""
    return durable.read(folder / _RECORD, list[ModelChoice]) or []


def build_added(choices: Sequence[ModelChoice], *, token: bool) -> Manifests:
    """Return the Models and services of added models; `token`: there is a download token."""
    manifests = Manifests()
    for choice in choices:
        model, service = build_manifests(choice, token=token, on_demand=True)
        key = ObjectKey(service.metadata.namespace, service.metadata.name)
        manifests.models[key], manifests.services[key] = model, service
    return manifests


class AddedModels:
    """The models that are added to `machine`, whose state is in `folder`.

    Args:
        machine: serves them.
        files: has the other Models and services.
        folder: has the record of them.
        token: there is a download token.
    """

    def __init__(self, machine: Machine, files: LiveFiles, folder: Path, *, token: bool) -> None:
        self._machine, self._files, self._path, self._token = machine, files, folder / _RECORD, token
        self._choices = read_added(folder)

    async def add(self, text: str, *, is_client: bool) -> tuple[ModelChoice, bool]:
        """Serve the model that a name means on demand; return what it means, and whether it was not served before.

        Args:
            text: as `pomona up --model` takes it.
            is_client: a client of the endpoint has sent it: no file and no URL is meant by it.

        Raises:
            ModelNameError: nothing has this name.
            SourceError: it is an invalid source.
            ArtifactError: the hub refuses or cannot be reached.
            ManifestError: another model has its name, or too many are added.
            OSError: it cannot be recorded.
        """
        share_bytes = self._machine.manifests.divide(self._machine.ledger.budget_bytes, further_on_demand=1)
        choice = await self._machine.lookup.find(text, share_bytes, is_client=is_client)

        # From here on nothing is awaited: two calls for one name add it once.
        services, models = self._machine.manifests.services, self._machine.manifests.models
        for key, service in services.items():
            model = models.get(ObjectKey(key.namespace, service.spec.model_ref))
            # A client asks for it by the name that it has pulled.
            if model and model.spec.source == choice.source and (key.name == choice.name or not is_client):
                return choice._replace(name=key.name), False
        if taken := find_taken(build_added([choice], token=self._token), self._machine.manifests):
            raise ManifestError([f"{text}: the name {taken[0]} is taken: serve it from a file, by another name"])
        if len(self._choices) >= MOST_ADDED:
            raise ManifestError([f"{text}: {MOST_ADDED} models are added already: remove one by `pomona delete NAME`"])
        self._serve([*self._choices, choice])
        return choice, True

    def remove(self, name: str) -> bool:
        """Serve an added model no more, once its running requests have ended; return False if it is none.

        Raises OSError: that cannot be recorded.
        """
        left = [choice for choice in self._choices if choice.name != name]
        is_added = len(left) < len(self._choices)
        if is_added:
            self._serve(left)
        return is_added

    def _serve(self, choices: list[ModelChoice]) -> None:
        """Record and serve these added models. Raises OSError."""
        durable.write(self._path, choices)
        self._choices = choices
        self._files.replace_added(build_added(choices, token=self._token))
