"""Serve a source of `--model` without a file: build the Model and InferenceService that a user would write for it."""

from pathlib import Path
from urllib.parse import quote

from kube.resources import ObjectKey
from standalone.manifests import ManifestError, Manifests, build_manifests


def add_source(manifests: Manifests, source: str, *, token: bool) -> None:
    """Add a Model and an InferenceService for `source`, a source or the path of a file, to `manifests`.

    `token` is True if there is a download token.

    Raises:
        SourceError: the source is invalid.
        ManifestError: the path does not exist, or the name is taken.
    """
    source = _locate_source(source)
    model, service = build_manifests(source, token=token)
    key = ObjectKey(service.metadata.namespace, service.metadata.name)
    if key in manifests.models or any(object_key.name == key.name for object_key in manifests.services):
        raise ManifestError([f"--model {source}: the name {key.name} is taken already: serve them from files"])
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
