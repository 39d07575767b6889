"""The Models and services of the files, each Model inspected, and the decision for each service.

The files may change: what is equal in them keeps its inspection and its decision, so that a change of one service
restarts no other one. A decision depends on the share of the memory that each service gets. That is fixed when a
service is decided first for its present spec and Models, and not divided anew when others come or go.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from artifacts.errors import ArtifactError
from artifacts.source import parse
from crds.inferenceservice import InferenceService, is_on_demand
from crds.model import Model
from kube.backoff import backoff_seconds
from kube.resources import ObjectKey
from standalone import desired
from standalone.desired import Decision
from standalone.inspections import ModelInspector
from standalone.manifests import Manifests, list_model_keys

_FIRST_RETRY_SECONDS: Final = 1.0
_LAST_RETRY_SECONDS: Final = 60.0

log = structlog.get_logger()

_Inputs = tuple[InferenceService, tuple[Model | None, ...]]
"""A service and its Models, by which it is decided."""


class ServiceDecisions:
    """The decisions for the services of `manifests`.

    Args:
        manifests: the Models and services.
        inspector: inspects the Models.
        hub_url: the URL of the hub, which alone gets the token of this machine.
        budget_bytes: returns the memory that all models may use.
        changed: called after each inspection.
    """

    def __init__(
        self,
        manifests: Manifests,
        inspector: ModelInspector,
        hub_url: str,
        *,
        budget_bytes: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        """Begin with Models that are not inspected; `inspect_in` does so."""
        self.manifests = Manifests()
        self.models: dict[ObjectKey, Model] = {}
        """The Models, each with the status that is known so far."""
        self._inspector, self._hub_url = inspector, hub_url
        self._budget_bytes, self._changed = budget_bytes, changed
        self._decided: dict[ObjectKey, tuple[_Inputs, Decision]] = {}
        self._decisions: dict[ObjectKey, Decision] | None = None
        """The cache of `decisions`; None: they are looked up when they are read next."""
        self._inspections: dict[ObjectKey, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._take_manifests(manifests)

    @property
    def decisions(self) -> Mapping[ObjectKey, Decision]:
        """The decision for each service, from the present status of its Models."""
        # Cached, because the output reads them twice a second.
        if self._decisions is None:
            services = self.manifests.services
            self._decided = {key: self._decide(key, service) for key, service in services.items()}
            self._decisions = {key: decision for key, (_, decision) in self._decided.items()}
        return self._decisions

    def inspect_in(self, group: asyncio.TaskGroup) -> None:
        """Inspect the Models in tasks of `group`, from now on also those that come."""
        self._group = group
        for key in self.models:
            self._begin_inspection(key)

    def replace_manifests(self, manifests: Manifests) -> None:
        """Decide by other manifests from now on; Models that are equal keep what is known of them."""
        for key, model in self.manifests.models.items():
            if manifests.models.get(key) != model:
                if task := self._inspections.pop(key, None):
                    task.cancel()
                del self.models[key]
        self._take_manifests(manifests)
        self._changed()

    async def end_inspections(self) -> None:
        """End the inspections that go on."""
        tasks = list(self._inspections.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take_manifests(self, manifests: Manifests) -> None:
        """Take the manifests, and inspect the Models that are not known."""
        self.manifests, self._decisions = manifests, None
        for key, model in manifests.models.items():
            if key not in self.models:
                self.models[key] = desired.drop_unusable_secret(model, self._hub_url)
                self._begin_inspection(key)

    def _decide(self, key: ObjectKey, service: InferenceService) -> tuple[_Inputs, Decision]:
        """Return the decision for a service with what it depends on: the last one, if that is still the same."""
        inputs = (service, tuple(map(self.models.get, list_model_keys(service))))
        last = self._decided.get(key)
        if last is not None and last[0] == inputs:
            return last
        # An equal part for each, so that all of the files fit beside each other.
        budget_bytes = self._budget_bytes()
        share_bytes = self.manifests.divide(budget_bytes)
        decision = desired.decide_assignments(service, self.models, share_bytes)
        if is_on_demand(service) and any(one.spec.memory_bytes > share_bytes for one in decision.assignments):
            # It does not fit beside another one on demand, so that it is alone with those that are always loaded.
            alone_bytes = budget_bytes - share_bytes * self.manifests.count_always()
            decision = desired.decide_assignments(service, self.models, alone_bytes)
        return inputs, decision

    def _begin_inspection(self, key: ObjectKey) -> None:
        """Inspect a Model in a task, once tasks can be started."""
        if self._group:
            self._inspections[key] = self._group.create_task(self._inspect_until_known(key))

    async def _inspect_until_known(self, key: ObjectKey) -> None:
        """Inspect a Model until that succeeds or fails for good, and decide again after each try.

        The pause between two tries grows, and is at least what the source asks for.
        """
        failures = 0
        while True:
            error: ArtifactError | None = None
            try:
                self.models[key] = await self._inspect_once(self.models[key])
            except ArtifactError as failure:
                error = failure
                self.models[key] = desired.with_error(self.models[key], error)
                log.warning("inspection_failed", model="/".join(key), reason=error.reason, error=error.message)
            self._decisions = None
            self._changed()
            if error is None or not error.retryable:
                return

            failures += 1
            pause_seconds = backoff_seconds(failures, first=_FIRST_RETRY_SECONDS, most=_LAST_RETRY_SECONDS)
            await asyncio.sleep(max(pause_seconds, error.retry_after_seconds))

    async def _inspect_once(self, model: Model) -> Model:
        """Return the Model with the result of one inspection in its status. Raises ArtifactError if it fails.

        A Model of Ollama's library is not inspected: Ollama pulls it, and the memory that its spec states is used.
        """
        if parse(model.spec.source).scheme == "ollama":
            return desired.assume_ready(model)
        inspection, source_problem = await self._inspector.inspect(model)
        if source_problem:  # the facts are those of the stored weights
            log.warning("source_not_asked", model=model.metadata.name, error=source_problem)
        return desired.with_inspection(model, inspection, source_problem)
