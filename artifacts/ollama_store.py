"""The models in Ollama's own store, which are served where they lie: nothing is written or deleted there.

A manifest at `manifests/HOST/NAMESPACE/NAME/TAG` names the digests of a model's layers, each the file
`blobs/sha256-DIGEST`.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from artifacts.source import is_digest

_REGISTRY: Final = "registry.ollama.ai"
_OFFICIAL: Final = "library"
_LATEST: Final = "latest"
_WEIGHTS: Final = "application/vnd.ollama.image.model"
_NAME: Final = re.compile(
    r"(?:(?:(?P<host>\w[\w.-]*)/)?(?P<namespace>\w[\w.-]*)/)?(?P<name>\w[\w.-]*)(?::(?P<tag>\w[\w.-]*))?", re.ASCII
)
_MOST_MANIFEST_BYTES: Final = 1 << 20
_MOST_NAMES: Final = 1000
_FOLDERS: Final = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
"""The store of a user, and that of the service which Ollama's installer makes on Linux."""


class _Layer(msgspec.Struct, rename="camel"):
    media_type: str
    digest: str


class _Manifest(msgspec.Struct):
    layers: list[_Layer] = []


class OllamaModel(NamedTuple):
    """One model of the store."""

    name: str
    """As Ollama lists it, with its tag."""
    blob: Path
    """The GGUF file."""
    sha256: str
    """Digest that the manifest states; the file is not hashed yet."""


class OllamaStore:
    """The stores in `folders`, asked in their order.

    A folder that does not exist, or that this user may not read, counts as empty.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def find_model(self, name: str) -> OllamaModel | None:
        """Return the model that `ollama run NAME` means, or None if it is not stored whole, or has no GGUF file."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        host, namespace, tag = match["host"] or _REGISTRY, match["namespace"] or _OFFICIAL, match["tag"] or _LATEST
        for folder in self._folders:
            sha256 = _read_weights_digest(folder / "manifests" / host / namespace / match["name"] / tag)
            blob = _blob_path(folder, sha256) if sha256 else None
            if blob is not None:
                listed = "/".join(filter(None, (match["host"], match["namespace"], match["name"])))
                return OllamaModel(f"{listed}:{tag}", blob, sha256)
        return None

    def find_blob(self, sha256: str) -> Path | None:
        """Return the file that is named by a digest; its content is not checked."""
        found = (_blob_path(folder, sha256) for folder in self._folders)
        return next((blob for blob in found if blob is not None), None)

    def list_names(self) -> list[str]:
        """Return the names of the models of Ollama's library, with their tags, for messages: 1,000 at most."""
        names = []
        for folder in self._folders:
            for path in _list_manifests(folder / "manifests" / _REGISTRY):
                namespace, name, tag = path.parts[-3:]
                names.append(f"{name}:{tag}" if namespace == _OFFICIAL else f"{namespace}/{name}:{tag}")
                if len(names) == _MOST_NAMES:
                    return names
        return names


def find_ollama_store(environment: Mapping[str, str] = os.environ) -> OllamaStore:
    """Return the store of this machine's Ollama: `OLLAMA_MODELS`, else the folders in which it keeps models."""
    stated = environment.get("OLLAMA_MODELS", "").strip("\"' ")
    return OllamaStore([Path(folder).expanduser() for folder in ([stated] if stated else _FOLDERS)])


def _read_weights_digest(path: Path) -> str:
    """Return the SHA-256 of the GGUF file that a manifest names; "" if it is absent, or names none."""
    try:
        with path.open("rb") as file:
            manifest = msgspec.json.decode(file.read(_MOST_MANIFEST_BYTES), type=_Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    # Weights in several layers, as of safetensors, are no GGUF model.
    digests = [layer.digest.removeprefix("sha256:") for layer in manifest.layers if layer.media_type == _WEIGHTS]
    return digests[0] if len(digests) == 1 and is_digest(digests[0]) else ""


def _blob_path(folder: Path, sha256: str) -> Path | None:
    """Return the path of a blob, or None if it is absent; `sha256` must be a digest."""
    path = folder / "blobs" / f"sha256-{sha256}"
    try:
        return path if is_digest(sha256) and path.is_file() else None
    except OSError:  # a folder that this user may not read
        return None


def _list_manifests(folder: Path) -> Iterator[Path]:
    """Yield the manifests of a registry, NAMESPACE/NAME/TAG below its folder."""
    try:
        yield from sorted(path for path in folder.glob("*/*/*") if path.is_file())
    except OSError:  # a folder that this user may not read
        return
