"""The headers of Models that no cluster has inspected yet, read for a plan with the credentials of the user."""

import asyncio
from typing import Final

import msgspec

from artifacts.errors import ArtifactError
from artifacts.repositories.address_policy import Networks
from cli.api_objects import Obj
from cli.inspect import InspectedSource, inspect_source
from console.density_models import KnownModel
from controller.placement.cluster_copy import ClusterCopy
from controller.services.planned_models import ModelHeaders, is_header_missing
from crds.model import ModelFacts
from crds.weights_header import GGUF, Layout
from fitness.catalog_entries import load_catalog
from kube.resources import ObjectKey, object_key

_SECONDS: Final = 60.0
"""Time for all headers of a plan."""


async def read_headers(copied: ClusterCopy, manifests: list[Obj], networks: Networks) -> tuple[ModelHeaders, list[str]]:
    """Return what the headers say of Models in manifests that the cluster has not inspected yet.

    A header is read from the source of the weights; if that fails, the figures of the catalog take its place where it
    lists the source. The second result has a line for each failure.

    Args:
        copied: the cluster, whose inspected Models are not read again.
        manifests: the manifests, each with its namespace.
        networks: private networks that sources may lead to.
    """
    headers, problems = dict[ObjectKey, ModelFacts](), list[str]()
    ends_at = asyncio.get_running_loop().time() + _SECONDS  # for all headers together
    for manifest in (entry for entry in manifests if entry["kind"] == "Model" and is_header_missing(copied, entry)):
        key, spec = object_key(manifest), manifest["spec"]
        # 1. Read the header.
        try:
            async with asyncio.timeout_at(ends_at):
                files = tuple(spec.get("files") or ())
                facts = await inspect_source(InspectedSource(spec["source"], files, networks, spec.get("sha256")))
            headers[key] = msgspec.convert(facts, ModelFacts)
        # 2. If that fails: report it, and take the figures of the catalog.
        except (ArtifactError, TimeoutError, msgspec.ValidationError) as error:
            too_slow = f"reading all headers took more than {_SECONDS:.0f} s"
            reason = too_slow if isinstance(error, TimeoutError) else str(error)
            line = f"Model {key}: cannot read its header: {reason}"
            catalog_header = find_catalog_header(spec["source"])
            if catalog_header is not None:
                headers[key] = catalog_header
                line += "; using the figures of the catalog"
            problems.append(line)
    return headers, problems


def find_catalog_header(source: str) -> ModelFacts | None:
    """Return the facts of a source by the catalog; None if the catalog does not list it, or not its layout."""
    for entry in load_catalog().values():
        for listed in entry.sources:
            layout = entry.find_layout(listed) if listed.source == source else None
            if layout is not None:
                return _state_facts(layout, listed.weights_quantization, entry.parameter_count, entry.active_share)
    return None


def build_header(model: KnownModel, accelerator: str | None) -> ModelFacts | None:
    """Return the facts that the header of a model would have; None if its layout is unknown.

    What is loaded may differ by accelerator, as the catalog has several sources of a model: take that of the
    accelerator, or the first one of known layout if nothing is known for it.

    Args:
        model: the model.
        accelerator: the accelerator whose engine loads it; None: any.
    """
    # workloads: what the engine of each accelerator loads of the model
    on_accelerator = model.workloads.get(accelerator or "")
    workloads = [on_accelerator] if on_accelerator is not None else list(model.workloads.values())

    # The first one of known layout.
    for workload in workloads:
        if workload.layout is not None:
            quantization = workload.quantization or model.quantization
            return _state_facts(workload.layout, quantization, model.parameters, model.active_share)
    return None


def _state_facts(layout: Layout, quantization: str, parameters: int | None, active_share: float | None) -> ModelFacts:
    """Return the facts that an inspection would state; `active_share` is the share of the parameters a token uses."""
    return ModelFacts(
        layout=layout,
        size_bytes=layout.tensor_bytes,
        gguf=GGUF(quantization=quantization),
        total_parameters=parameters,
        active_parameters=round(parameters * active_share) if parameters and active_share else None,
    )
