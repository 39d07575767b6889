"""The manifest of an artifact in a registry: the files that its layers are, as a hostile registry may state them.

Nothing is unpacked: a layer is one file, as `oras push`, ModelPack's raw layers, `docker model package` and Ollama make
them. Names, sizes and digests are checked before any of them is used; URLs in a manifest are ignored, because they lead
to servers that the user did not choose.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from artifacts.errors import ArtifactError
from artifacts.repositories.repository import RepositoryFile
from artifacts.source import MAX_NAME_BYTES

MANIFEST_TYPES: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEX_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MAX_MANIFEST_BYTES: Final = 4 << 20
"""The limit of the distribution specification."""
_SCHEMA_VERSION: Final = 2
_MOST_LAYERS: Final = 1000
_MOST_BYTES: Final = (1 << 63) - 1
_SHOWN_LENGTH: Final = 100
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_ORAS_TITLE: Final = "org.opencontainers.image.title"
_NAMES: Final = (_ORAS_TITLE, "org.cncf.model.filepath")
"""Annotations that name the file of a layer."""
_UNPACK: Final = "io.deis.oras.content.unpack"
"""Annotation with which `oras push` marks the archive of a folder; its plain files have the type of an archive, too."""
_UNNAMED: Final = {
    "application/vnd.ollama.image.model": "model.gguf",
    "application/vnd.docker.ai.gguf.v3": "model.gguf",
}
"""By media type: the file name to use when the layer has none."""
_ARCHIVE_TYPE: Final = re.compile(r".*(?:\btar\b|\.rootfs\.diff\b).*|.*[+.](?:gzip|zstd)", re.ASCII)
_MODEL_PACK: Final = "application/vnd.cncf.model."
_RAW: Final = ".raw"


class _Platform(msgspec.Struct):
    os: str = ""
    architecture: str = ""


_PLATFORM: Final = _Platform("linux", "amd64")
"""The platform whose weights are taken from an image for several: weights are the same for all of them."""


class _Descriptor(msgspec.Struct, rename={"media_type": "mediaType"}):
    digest: str
    size: int
    media_type: str = ""
    annotations: dict[str, str] | None = None
    platform: _Platform | None = None


class _Document(msgspec.Struct, rename={"schema_version": "schemaVersion", "media_type": "mediaType"}):
    """A manifest or an index: the fields that are read."""

    schema_version: int
    media_type: str = ""
    layers: list[_Descriptor] | None = None
    manifests: list[_Descriptor] | None = None


@dataclasses.dataclass(frozen=True)
class ArtifactManifest:
    """The content of a manifest.

    Attributes:
        files: the layers that are files, sorted by path; the digest of each names its blob.
        archive_types: media types of the layers that are archives, whose files a registry cannot send one by one.
        size_bytes: bytes of all layers.

    """

    files: Sequence[RepositoryFile]
    archive_types: Sequence[str]
    size_bytes: int


def parse_manifest(name: str, text: bytes) -> ArtifactManifest | str:
    """Return the content of a manifest, or the digest of the manifest that an index names.

    A manifest lists the files (layers) of one artifact, and an index the manifests for several platforms.

    Args:
        name: the reference, for messages.
        text: the document as it came.

    Raises:
        ArtifactError: SourceRefused, with the field that cannot be used.
    """
    try:
        document = msgspec.json.decode(text, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(name, f"the registry's manifest is not valid: {error}") from error
    if document.schema_version != _SCHEMA_VERSION:
        version = f"{document.schema_version}, not {_SCHEMA_VERSION}"
        raise _refusal(name, f"schemaVersion is {version}: push it again with a current client")

    # Only one of both: of a document that is manifest and index at once, two readers could see different content under
    # one digest.
    is_manifest, is_index = document.layers is not None, document.manifests is not None
    if is_manifest == is_index:
        raise _refusal(name, "the manifest must have either `layers` or `manifests`")

    expected = INDEX_TYPES if is_index else MANIFEST_TYPES
    if document.media_type and document.media_type not in expected:
        raise _refusal(name, f"mediaType is {_quote(document.media_type)}, which is none of {', '.join(expected)}")

    # Of an index, choose one manifest; of a manifest, read its layers.
    if document.manifests is not None:
        return _choose_manifest(name, document.manifests)
    return _read_layers(name, document.layers or [])


def require_files(name: str, manifest: ArtifactManifest) -> Sequence[RepositoryFile]:
    """Return the files of an artifact. Raises ArtifactError if it has none: its layers are archives, or unnamed."""
    # The name without its digest, behind @, or its tag, behind a : without a later slash (a port has one).
    repository = re.split(r"[@]|:(?=[^/]*$)", name.removeprefix("oci://"), maxsplit=1)[0]
    push = f"push the files themselves: oras push {repository}:TAG FILE..."
    if manifest.archive_types and not manifest.files:
        media_type = _quote(manifest.archive_types[0])
        problem = f"its layers are archives ({media_type}), whose files cannot be read one by one"
        way_out = f"{push}; or, if it is a container image, let nodes mount it with spec.cache.medium Image"
        raise _refusal(name, f"{problem}: {way_out}")
    if not manifest.files:
        raise _refusal(name, f"none of its layers is a file with a name: {push}")
    return manifest.files


def _choose_manifest(name: str, entries: Sequence[_Descriptor]) -> str:
    """Return the digest of the one manifest of an index that can be used."""
    _limit_entries(name, "manifests", entries)
    # Entries for an unknown system are attestations of a build, not images.
    usable = [
        entry
        for entry in entries
        if entry.media_type in MANIFEST_TYPES and (entry.platform is None or entry.platform.os != "unknown")
    ]
    if len(usable) > 1:
        usable = [entry for entry in usable if entry.platform == _PLATFORM]
    if len(usable) != 1:
        problem = f"manifests has {len(usable)} entries for linux/amd64, and not one manifest for all platforms"
        raise _refusal(name, f"{problem}: give the digest of one: oci://REGISTRY/REPOSITORY@sha256:DIGEST")
    _check_descriptor(name, "manifests", usable[0])
    return usable[0].digest


def _read_layers(name: str, layers: Sequence[_Descriptor]) -> ArtifactManifest:
    """Return the layers as files and archives. Raises ArtifactError for a layer that cannot be used."""
    _limit_entries(name, "layers", layers)
    files: dict[str, RepositoryFile] = {}
    archive_types = []
    for number, layer in enumerate(layers):
        field = f"layers[{number}]"
        _check_descriptor(name, field, layer)
        if _is_archive(layer):
            archive_types.append(layer.media_type)
        elif path := _read_path(name, field, layer):
            # Some file systems take names that differ in case for the same.
            if path.casefold() in files:
                raise _refusal(name, f"{field} has the name of another layer, {_quote(path)}: push each file once")
            files[path.casefold()] = RepositoryFile(path, layer.size, sha256=layer.digest.removeprefix("sha256:"))

    size_bytes = sum(layer.size for layer in layers)
    if size_bytes > _MOST_BYTES:
        raise _refusal(name, f"its layers state {size_bytes} bytes, more than any disk has")
    return ArtifactManifest(sorted(files.values(), key=lambda file: file.path), archive_types, size_bytes)


def _limit_entries(name: str, field: str, entries: Sequence[_Descriptor]) -> None:
    if len(entries) > _MOST_LAYERS:
        raise _refusal(name, f"{field} has {len(entries)} entries, more than {_MOST_LAYERS}")


def _check_descriptor(name: str, field: str, layer: _Descriptor) -> None:
    """Refuse a digest that is no SHA-256, or a size that is none."""
    if not _DIGEST.fullmatch(layer.digest):
        problem = f"{field}.digest is {_quote(layer.digest)}: only sha256 with 64 hexadecimal digits is supported"
        raise _refusal(name, problem)
    if not 0 <= layer.size <= _MOST_BYTES:
        raise _refusal(name, f"{field}.size is {layer.size}, which is no size")


def _is_archive(layer: _Descriptor) -> bool:
    """Decide whether a layer is an archive, or compressed, and not the file itself.

    The tool that pushed the layer decides what shows this: its media type or an annotation.
    """
    annotations: Mapping[str, str] = layer.annotations or {}
    # ModelPack: a plain file has a media type that ends in .raw, or names no archive.
    if layer.media_type.startswith(_MODEL_PACK):
        return not layer.media_type.endswith(_RAW) and _ARCHIVE_TYPE.fullmatch(layer.media_type) is not None
    # oras push: plain files have the media type of an archive, too; only the annotation _UNPACK shows which is one.
    if _ORAS_TITLE in annotations:
        return annotations.get(_UNPACK) == "true"
    # Others: the media type names an archive, such as tar or gzip.
    return _ARCHIVE_TYPE.fullmatch(layer.media_type) is not None


def _read_path(artifact: str, field: str, layer: _Descriptor) -> str:
    """Return the name of a layer's file, which may have folders; empty if it has none."""
    annotations: Mapping[str, str] = layer.annotations or {}
    # _NAMES: annotations that name the file, of oras and of ModelPack.
    key = next((name for name in _NAMES if name in annotations), "")
    if not key:  # Ollama and Docker name the file by the media type only
        return _UNNAMED.get(layer.media_type, "")
    path = annotations[key]
    segments = path.split("/")
    is_name = path.isprintable() and "\\" not in path and len(path.encode(errors="replace")) <= MAX_NAME_BYTES
    if not is_name or any(segment in ("", ".", "..") for segment in segments):
        problem = f"{field}.annotations[{key}] is {_quote(path)}, which is no name of a file inside the artifact"
        raise _refusal(artifact, f"{problem}: push it with plain relative names")
    return path


def _quote(text: str) -> str:
    return repr(text[:_SHOWN_LENGTH])


def _refusal(name: str, problem: str) -> ArtifactError:
    return ArtifactError("SourceRefused", f"{name}: {problem}")
