"""Fetch the weights of a source into the store of this machine ahead, as a service of it would.

The source is inspected first, so that a later `pomona up` finds the weights by what the source stated, also offline.
"""

import functools

from artifacts.errors import ArtifactError
from artifacts.inspect import check_stored
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from controller.services.metal_processes import build_artifact
from crds.model import Model
from metal_agent.weights import HostWeights, Progress
from standalone import desired
from standalone.inspections import ModelInspector
from standalone.manifests import NAMESPACE
from standalone.model_lookup import ModelLookup, build_manifests


class WeightsPuller:
    """Fetches weights into a store.

    Args:
        weights: the weights of this machine.
        inspector: inspects Models, with records beside that store.
        access: settings to read sources, with the token for the hub.
        lookup: finds the source that a name means.
        budget_bytes: the memory that all models may use, by which a quantization is chosen.
    """

    def __init__(
        self,
        weights: HostWeights,
        inspector: ModelInspector,
        access: SourceAccess,
        lookup: ModelLookup,
        budget_bytes: int,
    ) -> None:
        self.store = weights.store
        self._weights, self._inspector, self._access = weights, inspector, access
        self._lookup, self._budget_bytes = lookup, budget_bytes

    async def pull(self, name: str, on_progress: Progress) -> str:
        """Fetch the weights that a name means, resumed where an earlier fetch has stopped; return their digest.

        `on_progress` gets the bytes that are there first, also those of an earlier fetch; it is not called if all are.

        Raises:
            ModelNameError: nothing has this name.
            SourceError: it is an invalid source.
            ArtifactError: the weights cannot be fetched, or are no model.
        """
        choice = await self._lookup.find(name, self._budget_bytes)
        parsed = parse(choice.source)
        if parsed.scheme in {"file", "ollama"}:
            way_out = "serve it as it is" if parsed.scheme == "file" else "fetch it by `ollama pull`"
            raise ArtifactError(
                "SourceInvalid", f"{parsed.display}: nothing is fetched of {parsed.scheme}://: {way_out}"
            )
        model, _ = build_manifests(choice, token=self._access.token is not None)
        model = desired.drop_unusable_secret(model, self._access.endpoint)
        inspection, _ = await self._inspector.inspect(model)
        return await self._fetch(desired.with_inspection(model, inspection), on_progress)

    async def _fetch(self, model: Model, on_progress: Progress) -> str:
        """Fetch the weights of an inspected Model, and return their digest. Raises ArtifactError."""
        token = self._access.token if model.spec.source_secret_ref else None
        check = functools.partial(check_stored, parse(model.spec.source, model.spec.files))
        held = await self._weights.fetch_artifact(NAMESPACE, build_artifact(model), token, on_progress, check)
        held.release()
        return held.digest
