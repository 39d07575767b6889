"""The Model and the InferenceService that `pomona deploy` applies: from options, from the catalog, or from files."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import click

from artifacts.source import SourceError, parse
from cli.api_objects import Obj
from cli.lazy import program_name
from crds import validation
from crds.meta import API_VERSION
from fitness.catalog_entries import CatalogError, choose_source, load_catalog
from standalone.manifests import ManifestError, derive_name, find_duplicates, load_documents

_SCHEME: Final = "://"
_OPTION_OF_FIELD: Final[Mapping[validation.Path, str]] = {
    ("spec", "source"): "--model",
    ("spec", "modelRef"): "--model",
    ("spec", "sourceSecretRef", "name"): "--source-secret",
    ("spec", "memoryBytes"): "--memory",
    ("spec", "replicas"): "--replicas",
    ("spec", "contextLength"): "--context-length",
    ("spec", "parallel"): "--parallel",
    ("spec", "priority"): "--priority",
    ("spec", "runtime"): "--runtime",
    ("spec", "image"): "--image",
    ("spec", "hardware", "accelerator"): "--accelerator",
    ("spec", "hardware", "count"): "--devices",
}
"""Fields by which the user has stated something, for messages."""


class DeployError(click.ClickException):
    """Nothing can be applied; the message is one line for each reason."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The options of `pomona deploy`; None is what the user has not stated."""

    name: str
    model: str | None = None
    """A source, or the name of a Model that exists."""
    model_name: str | None = None
    files: tuple[str, ...] = ()
    source_secret: str | None = None
    memory_bytes: int | None = None
    accelerator: str | None = None
    devices: int | None = None
    replicas: int | None = None
    context_length: int | None = None
    parallel: int | None = None
    runtime: str | None = None
    image: str | None = None
    priority: str | None = None


def build_objects(options: ServiceOptions, namespace: str | None) -> list[Obj]:
    """Return the objects to apply, the Model first; only the service if --model names a Model.

    Raises:
        DeployError: they would be refused, or the name is in no catalog.
    """
    # 1. --model is left out, a source, or the name of a Model.
    # _SCHEME is ://, which a source has and a name has not.
    if options.model is None:
        objects = _build_from_catalog(options)
    elif _SCHEME in options.model:
        model = _build_model(options, options.model)
        objects = [model, _build_service(options, model["metadata"]["name"])]
    elif "/" in options.model:
        raise DeployError(
            f"--model {options.model}: neither a source, such as hf://ORG/REPO/FILE.gguf, nor the name of a Model"
        )
    else:
        # The name of a Model, which states its source itself: options of a source would do nothing.
        source_options = {
            "--model-name": options.model_name,
            "--files": options.files,
            "--source-secret": options.source_secret,
            "--memory": options.memory_bytes,
        }
        unusable = [name for name, value in source_options.items() if value]
        if unusable:
            raise DeployError(
                f"{', '.join(unusable)} belong to a source, and --model {options.model} is the name of a Model: leave "
                "them out, or give a source such as hf://ORG/REPO/FILE.gguf"
            )
        objects = [_build_service(options, options.model)]

    # 2. Check them as the API server will; a problem is told by the option that states the field.
    placed = [_place_in_namespace(manifest, namespace) for manifest in objects]
    problems = []
    for manifest in placed:
        # _OPTION_OF_FIELD: the option that states a field, by its path
        title = f"{manifest['kind']} {manifest['metadata']['name']}"
        invalid_fields = validation.problems(manifest)
        problems += [f"{_OPTION_OF_FIELD.get(problem.path, title)}: {problem}" for problem in invalid_fields]
    if problems:
        raise DeployError("\n".join(problems))
    return placed


def load_files(paths: Sequence[Path], namespace: str | None) -> list[Obj]:
    """Return the objects of files to apply, Models first; documents of others are named on standard error.

    Raises:
        DeployError: a document is invalid, or is of another namespace than --namespace.
    """
    try:
        # ours: the Models and InferenceServices; others: documents of other kinds
        ours, others = load_documents([Path("/dev/stdin") if str(path) == "-" else path for path in paths])
    except ManifestError as error:
        raise DeployError(str(error)) from error

    # 1. Collect all problems.
    problems = list(find_duplicates(ours, is_one_machine=False))
    for our in ours:
        stated = our.manifest["metadata"].get("namespace")
        if namespace and stated and stated != namespace:
            problem = f"is in namespace {stated}, and --namespace is {namespace}: change one of them"
            problems.append(our.describe(problem, ("metadata", "namespace")))
    if not ours:
        problems.append(f"{', '.join(map(str, paths))}: neither a Model nor an InferenceService found")
    if problems:
        raise DeployError("\n".join(problems))

    # 2. Place the objects, and name the documents that are left out.
    objects = [_place_in_namespace(our.manifest, namespace) for our in ours]
    for other in others:
        line = other.describe("ignored: `pomona deploy` applies Models and InferenceServices; use kubectl apply")
        print(line, file=sys.stderr)
    return sorted(objects, key=lambda manifest: manifest["kind"] != "Model")


def _build_from_catalog(options: ServiceOptions) -> list[Obj]:
    """Return the Model and the service of a catalog entry, with the options in place of its own. Raises DeployError."""
    # 1. The entry, and the source of it that is for the accelerator.
    catalog = load_catalog()
    entry = catalog.get(options.name)
    if entry is None:
        near = get_close_matches(options.name, catalog, n=1)
        hint = f"did you mean {near[0]}? Otherwise add" if near else "add"
        raise DeployError(
            f"{options.name} is not in the catalog (`{program_name()} catalog` lists it): {hint} --model SOURCE, "
            "such as hf://ORG/REPO/FILE.gguf, or --model NAME of a Model"
        )
    try:
        accelerator, chosen = choose_source(options.name, entry, options.accelerator)
    except CatalogError as error:
        raise DeployError(str(error)) from error

    # 2. The Model.
    model = _build_model(options, chosen.source)
    if chosen.memory_bytes and options.memory_bytes is None:
        model["spec"]["memoryBytes"] = chosen.memory_bytes
    if entry.thinking:
        model["spec"]["thinking"] = True

    # 3. The service.
    service = _build_service(options, model["metadata"]["name"])
    if entry.mode != "chat":
        service["spec"]["mode"] = entry.mode
    # The hardware of the entry is for its own accelerator. What the user states goes before it.
    entry_hardware = entry.hardware if accelerator == entry.accelerator else {}
    stated_hardware = service["spec"].get("hardware", {})
    service["spec"]["hardware"] = {"accelerator": accelerator, **entry_hardware, **stated_hardware}
    return [model, service]


def _build_model(options: ServiceOptions, source: str) -> Obj:
    """Return the Model of a source; fields that the user has not stated are left out. Raises DeployError."""
    spec: Obj = {"source": source}
    if options.files:
        spec["files"] = list(options.files)
    if options.source_secret:
        spec["sourceSecretRef"] = {"name": options.source_secret}
    if options.memory_bytes is not None:
        spec["memoryBytes"] = options.memory_bytes
    return _build_object("Model", _name_model(source, options.model_name), spec)


def _build_service(options: ServiceOptions, model: str) -> Obj:
    """Return the service of a Model; fields that the user has not stated are left out."""
    stated = {
        "replicas": options.replicas,
        "contextLength": options.context_length,
        "parallel": options.parallel,
        "runtime": options.runtime,
        "image": options.image,
        "priority": options.priority,
        "hardware": {
            name: value
            for name, value in (("accelerator", options.accelerator), ("count", options.devices))
            if value is not None
        },
    }
    # None and {}: not stated, so that the API server fills in its default.
    spec = {"modelRef": model} | {name: value for name, value in stated.items() if value not in (None, {})}
    return _build_object("InferenceService", options.name, spec)


def _build_object(kind: str, name: str, spec: Obj) -> Obj:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _place_in_namespace(obj: Obj, namespace: str | None) -> Obj:
    """Return the object with a namespace, unless it has one or none is known."""
    metadata = obj["metadata"]
    if not namespace or metadata.get("namespace"):
        return obj
    return {**obj, "metadata": {**metadata, "namespace": namespace}}


def _name_model(source: str, stated: str | None) -> str:
    """Return the name of the Model of a source: the stated one, or as `pomona up` names it. Raises DeployError."""
    try:
        parsed = parse(source)
    except SourceError as error:
        raise DeployError(f"--model: {error.message}") from error
    return stated or derive_name(parsed)
