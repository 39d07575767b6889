"""Serves a source alone, without a file: the Model and the InferenceService that a user would write for it."""

from pathlib import Path
from urllib.parse import quote

from msgspec import structs

from artifacts.inspect import inspect
from artifacts.source import parse
from controller import requirements
from controller.parts import Served
from controller.plan import Key
from crds.inferenceservice import InferenceService
from crds.model import Model
from standalone import desired, manifests
from standalone.machine import FILE_ROOT, Options
from standalone.manifests import ManifestError, Wanted


async def add(wanted: Wanted, source: str, options: Options) -> None:
    """Add what serves `source`, a source or the path of a file, to `wanted`.

    Raises:
        SourceError: it is none.
        ArtifactError: it is a file that cannot be read.
        ManifestError: something else has its name, or its memory is not known.
    """
    source = _located(source)
    model, service = manifests.of_source(source, token=options.token is not None)
    key = Key(service.metadata.namespace, service.metadata.name)
    if key in wanted.models or any(each.name == key.name for each in wanted.services):
        raise ManifestError([f"--model {source}: something else is named {key.name} already: serve them from files"])
    if source.startswith("file://"):
        model = await _with_memory(model, service, options)
    wanted.models[key], wanted.services[key] = model, service


def _located(text: str) -> str:
    """Return the source that the text names; what has no scheme is a path."""
    if "://" in text:
        return text
    path = Path(text).expanduser()
    if not path.exists():
        form = "hf://ORG/REPO/FILE.gguf, https://HOST/FILE.gguf, or the path of a file or folder"
        raise ManifestError([f"--model {text}: no such file: give {form}"])
    return f"file://{quote(str(path.resolve()))}{'/' if path.is_dir() else ''}"


async def _with_memory(model: Model, service: InferenceService, options: Options) -> Model:
    """State what a local file takes, which in a cluster the user states."""
    found = await inspect(
        parse(model.spec.source), token=None, endpoint=options.endpoint, file_root=FILE_ROOT, sha256=None
    )
    needed = requirements.memory_bytes(service, Served(desired.inspected(model, found)))
    if needed is None:
        problem = "its header does not tell how much memory it takes: state a Model with spec.memoryBytes in a file"
        raise ManifestError([f"--model {model.spec.source}: {problem}"])
    return structs.replace(model, spec=structs.replace(model.spec, memory_bytes=needed))
