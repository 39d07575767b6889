"""Artifacts as clients of registries make them, and their push to a registry, over HTTP alone."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import aiohttp

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
TITLE: Final = "org.opencontainers.image.title"
RAW: Final = "application/octet-stream"
_EMPTY: Final = b"{}"


class Artifact(NamedTuple):
    """A manifest, and the blobs that it names."""

    manifest: bytes
    blobs: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """Digest of the manifest: sha256:HEX."""
        return digest_of(self.manifest)


def digest_of(content: bytes) -> str:
    """Return sha256:HEX."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def describe(content: bytes, name: str = "", media_type: str = RAW, **changes: Any) -> dict[str, Any]:
    """Return the descriptor of a layer; `name` is its title."""
    named = {"annotations": {TITLE: name}} if name else {}
    return {"mediaType": media_type, "digest": digest_of(content), "size": len(content), **named, **changes}


def encode_manifest(layers: Sequence[Mapping[str, Any]], **changes: Any) -> bytes:
    """Return a manifest with these layers."""
    config = describe(_EMPTY, media_type="application/vnd.oci.empty.v1+json")
    return json.dumps(
        {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers, **changes}
    ).encode()


def encode_index(*entries: Mapping[str, Any], **changes: Any) -> bytes:
    """Return an index with these manifests."""
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries, **changes}).encode()


def build_artifact(files: Mapping[str, bytes], media_type: str = RAW) -> Artifact:
    """Return the artifact that `oras push` makes of files."""
    layers = [describe(content, name, media_type) for name, content in files.items()]
    blobs = {digest_of(content): content for content in (_EMPTY, *files.values())}
    return Artifact(encode_manifest(layers), blobs)


async def push(url: str, repository: str, tag: str, artifact: Artifact, *, authorization: str = "") -> str:
    """Push an artifact to the registry at `url`, and return its digest."""
    headers = {"Authorization": authorization} if authorization else {}
    async with aiohttp.ClientSession(url, headers=headers, raise_for_status=True) as session:
        for digest, content in artifact.blobs.items():
            async with session.post(f"/v2/{repository}/blobs/uploads/") as begun:
                location = begun.headers["Location"]
            async with session.put(f"{location}&digest={digest}", data=content, headers={"Content-Type": RAW}):
                pass
        media_type = json.loads(artifact.manifest)["mediaType"]
        async with session.put(
            f"/v2/{repository}/manifests/{tag}", data=artifact.manifest, headers={"Content-Type": media_type}
        ) as pushed:
            return pushed.headers["Docker-Content-Digest"]
