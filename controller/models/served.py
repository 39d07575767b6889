"""The Models that a service serves: the main Model, its draft, projector and adapters; and the paths of their weights.

A companion is inspected, verified and cached like any other Model, so a service only names it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Final, NamedTuple

from artifacts.source import SourceError, cache_key, parse, scheme_of
from crds.inferenceservice import InferenceService, InferenceServiceSpec
from crds.meta import Accelerator
from crds.model import Model
from crds.serving import Role, RuntimeName
from crds.weights_header import WeightsFormat
from devices.vendors import Vendors
from kube.resources import ObjectKey
from runtimes.registry import RUNTIMES
from runtimes.runtime import RuntimeDemand
from runtimes.runtime_choice import choose_runtime

AUTO: Final = "auto"
"""Value of spec.runtime that leaves the choice to Pomona, as its absence does."""
METAL: Final = "metal"
"""The one accelerator outside of the cluster."""
_SOURCES_KEPT: Final = 1024
"""Each decision about a service asks for its format and path again."""


class Companion(NamedTuple):
    """One Model that is served together with another."""

    role: Role
    field: str
    """The field below spec in which the service names the Model."""
    name: str
    scale: str = "1"
    model: Model | None = None
    """None: no Model has this name."""
    request_name: str | None = None
    """Name by which requests choose an adapter; None: it is applied to each request."""


class Served(NamedTuple):
    """A Model and its companions, all of them usable, as a replica serves them."""

    model: Model
    runtime: RuntimeName
    """Engine that the service states or Pomona chose."""
    companions: tuple[Companion, ...] = ()


def list_companions(spec: InferenceServiceSpec) -> tuple[Companion, ...]:
    """Return the companions that a service names, without their Models, in the order in which hosts get them."""
    companions = []
    if spec.speculative is not None:
        companions.append(Companion("draft", "speculative.draftModelRef", spec.speculative.draft_model_ref))
    if spec.projector_model_ref is not None:
        companions.append(Companion("projector", "projectorModelRef", spec.projector_model_ref))
    for adapter in spec.adapters:
        request_name = adapter.model_ref if adapter.on_request else None
        companions.append(Companion("adapter", "adapters", adapter.model_ref, adapter.scale, request_name=request_name))
    return tuple(companions)


def read_companions(find: Callable[[ObjectKey], Model | None], service: InferenceService) -> tuple[Companion, ...]:
    """Return a service's companions with their Models, as far as `find` returns them."""
    namespace = service.metadata.namespace
    return tuple(
        companion._replace(model=find(ObjectKey(namespace, companion.name)))
        for companion in list_companions(service.spec)
    )


def format_of(model: Model) -> WeightsFormat:
    """Return the format of a Model's weights: as inspected, else as its source shows.

    It is gguf if the source cannot be parsed, which the Model reports.
    """
    return model.status.format or _format_of_source(model.spec.source, tuple(model.spec.files))


@functools.lru_cache(maxsize=_SOURCES_KEPT)
def _format_of_source(text: str, files: tuple[str, ...]) -> WeightsFormat:
    """Return the format that a source shows; gguf if it is invalid, as the Model fails by that in any case."""
    try:
        source = parse(text, files)
    except SourceError:
        return "gguf"
    if source.scheme == "ollama":
        return "ollama"
    # Whether MLX wrote a folder is seen in its files only; on hosts, the engines of both are the same.
    return "gguf" if source.is_gguf else "safetensors"


def is_split(model: Model) -> bool:
    """Return whether the weights are a GGUF model in several files, as inspected or as the source shows."""
    return _is_split(model.spec.source, model.status.file)


@functools.lru_cache(maxsize=_SOURCES_KEPT)
def _is_split(text: str, file: str) -> bool:
    """Return whether the source, or the inspected file of it, is one of several parts; False if it is invalid."""
    try:
        source = parse(text)
    except SourceError:
        return False
    # Either the source names a part itself, or the inspection has found one in it.
    return source.is_split or dataclasses.replace(source, file=file).is_split


def runtime_of(service: InferenceService, model: Model, vendors: Vendors) -> RuntimeName:
    """Return the runtime that the service states, else the one for the Model's format where the service runs."""
    stated = service.spec.runtime
    if stated is not None and stated != AUTO:
        return stated
    has_image = service.spec.image is not None
    return _choose_runtime(model, accelerator_of(service, model), vendors, has_image=has_image)


def default_runtime(model: Model, vendors: Vendors) -> RuntimeName:
    """Return the runtime of a service that states nothing but this Model."""
    return _choose_runtime(model, model.spec.hardware.accelerator, vendors, has_image=False)


def _choose_runtime(model: Model, accelerator: Accelerator, vendors: Vendors, *, has_image: bool) -> RuntimeName:
    in_pods = accelerator != METAL
    return choose_runtime(RuntimeDemand(format_of(model), accelerator, in_pods, vendors=vendors, has_image=has_image))


def accelerator_of(service: InferenceService, model: Model) -> Accelerator:
    """Return the accelerator that the service states, else that of its Model."""
    return service.spec.hardware.accelerator or model.spec.hardware.accelerator


def select_nodes(service: InferenceService, model: Model, vendors: Vendors) -> dict[str, str]:
    """Return the labels of the nodes that can run the pods of a service.

    These are the labels that the engine's image needs, such as that of the processor, and those that the service
    states, which override them.
    """
    accelerator, name = accelerator_of(service, model), runtime_of(service, model, vendors)
    engine = RUNTIMES[name].pod if name in RUNTIMES else None
    if engine is None or accelerator not in vendors:
        return service.spec.node_selector
    image = service.spec.image or engine.find_image(accelerator, vendors[accelerator], name)
    return engine.select_nodes(image) | service.spec.node_selector


def own_claim(model: Model) -> str | None:
    """Return the claim that spec.source names, whose volume has the weights already; None for any other source."""
    claim, _folder = _read_claim_source(model.spec.source)
    return claim or None


@functools.lru_cache(maxsize=_SOURCES_KEPT)
def _read_claim_source(text: str) -> tuple[str, str]:
    """Return claim and folder of a valid pvc:// source; two empty strings for any other source."""
    try:
        source = parse(text) if scheme_of(text) == "pvc" else None
    except SourceError:
        return "", ""
    return (source.repo, source.path.rpartition("/")[0]) if source else ("", "")


def claim_name(model: Model) -> str:
    """Return the name of the Model's first PersistentVolumeClaim, or of its source; successors add a digest."""
    return own_claim(model) or f"{model.metadata.name}-cache"


def is_mounted_image(model: Model) -> bool:
    """Return whether nodes mount the weights as an image, so that no Job and no volume brings them."""
    return model.spec.cache.medium == "Image"


def image_of(source: str, revision: str) -> str:
    """Return the image that nodes mount for an oci:// source at a resolved revision, by its digest.

    Raises:
        SourceError: `source` is not a valid source.
    """
    return f"{parse(source).repo}@{revision}"


def cached_claim(model: Model) -> str:
    """Return the name of the PersistentVolumeClaim that pods mount: the one with the verified weights."""
    cached = model.status.cached
    verified_name = cached.name if cached is not None else ""
    return verified_name or claim_name(model)


def cache_path(model: Model) -> str:
    """Return the path of an inspected Model's weights, below the root of the volume or the image.

    It is the file in the mounted image or in the folder of the user's own claim, else the path on Pomona's volume: that
    of the verified weights, or without any the one to which they will be fetched.

    Raises:
        SourceError: spec.source is not a valid source; such a Model is never inspected.
    """
    # In an image, or on the user's own claim (of a pvc:// source).
    if is_mounted_image(model):
        return model.status.file
    claim, folder = _read_claim_source(model.spec.source)
    if claim:
        return f"{folder}/{model.status.file}".strip("/")

    # On Pomona's volume.
    if model.status.cached is not None:
        return model.status.cached.path
    return weights_path(model.spec.source, model.status.revision, model.status.file, tuple(model.spec.files))


@functools.lru_cache(maxsize=_SOURCES_KEPT)
def weights_path(source: str, revision: str, file: str, files: tuple[str, ...] = ()) -> str:
    """Return the path of weights below the volume's root: the same for the pods that fetch and those that serve.

    It is a file, or the first part of a split model; a folder if `file` is empty.

    Raises:
        SourceError: `source` is not a valid source.
    """
    folder = cache_key(source, revision, files)
    return f"{folder}/{file}" if file else folder
