"""Serve a source of `--model` without a file: build the Model and InferenceService that a user would write for it."""

from pathlib import Path
from urllib.parse import quote

from msgspec import structs

from artifacts.inspect import inspect
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse, scheme_of
from controller.models.served import Served, runtime_of
from controller.services import replica_memory
from controller.services.serving_choice import choose_for_host
from crds.inferenceservice import InferenceService
from crds.model import Model
from devices.vendors import VENDORS
from kube.resources import ObjectKey
from standalone import desired
from standalone.machine import FILE_ROOT, StandaloneOptions
from standalone.manifests import ManifestError, Manifests, build_manifests


async def add_source(manifests: Manifests, source: str, options: StandaloneOptions, budget_bytes: int) -> None:
    """Add a Model and an InferenceService for `source`, a source or the path of a file, to `manifests`.

    The serving options of a local file are chosen for `budget_bytes` of memory.

    Raises:
        SourceError: the source is invalid.
        ArtifactError: the file cannot be read.
        ManifestError: the path does not exist, the name is taken, or the memory cannot be estimated.
    """
    source = _locate_source(source)
    model, service = build_manifests(source, token=options.token is not None)
    key = ObjectKey(service.metadata.namespace, service.metadata.name)
    if key in manifests.models or any(object_key.name == key.name for object_key in manifests.services):
        raise ManifestError([f"--model {source}: the name {key.name} is taken already: serve them from files"])
    if scheme_of(source) == "file":
        model, service = await _state_memory(model, service, options, budget_bytes)
    manifests.models[key], manifests.services[key] = model, service


def _locate_source(text: str) -> str:
    """Return the text as a source; a text without a scheme is a path."""
    if "://" in text:
        return text
    path = Path(text).expanduser()
    if not path.exists():
        form = "hf://ORG/REPO/FILE.gguf, https://HOST/FILE.gguf, or the path of a file or folder"
        raise ManifestError([f"--model {text}: no such file: give {form}"])
    # A link keeps its name: its target may be a blob that is named by its digest, without the other parts beside it.
    located = path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name
    return f"file://{quote(str(located))}{'/' if path.is_dir() else ''}"


async def _state_memory(
    model: Model, service: InferenceService, options: StandaloneOptions, budget_bytes: int
) -> tuple[Model, InferenceService]:
    """Return the Model of a local file with `spec.memoryBytes`, computed from the header of the file, and its service.

    The service has the serving options that are chosen for the memory. In a manifest the user has to state both for a
    file:// source, since nothing in a cluster can read the file.

    Raises:
        ArtifactError: the file cannot be read.
        ManifestError: its memory cannot be estimated.
    """
    # The Model with the facts of its header, by which the memory of a replica is computed.
    access = SourceAccess(endpoint=options.endpoint, file_root=FILE_ROOT)
    inspection = await inspect(parse(model.spec.source), access)
    inspected = desired.with_inspection(model, inspection)
    service = choose_for_host(desired.build_host_service(service), inspected, (), budget_bytes)
    served = Served(inspected, runtime_of(service, inspected, VENDORS))  # by the runtime that fits
    needed = replica_memory.measure_replica(service, served).total_bytes
    if needed is None:
        problem = "its memory cannot be estimated: write a Model with spec.memoryBytes to a file and serve that"
        raise ManifestError([f"--model {model.spec.source}: {problem}"])
    return structs.replace(model, spec=structs.replace(model.spec, memory_bytes=needed)), service
