"""The layout of Ollama's store, as `ollama pull` and `ollama create` make it."""

import hashlib
import json
from pathlib import Path


def add_to_ollama(folder: Path, name: str, weights: bytes) -> Path:
    """Add a model NAME:TAG or NAMESPACE/NAME:TAG to the store in `folder`; return the file of its weights."""
    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    layers = []
    for kind, content in (("template", b"{{ .Prompt }}"), ("model", weights)):
        digest = hashlib.sha256(content).hexdigest()
        (blobs / f"sha256-{digest}").write_bytes(content)
        media = f"application/vnd.ollama.image.{kind}"
        layers.append({"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)})
    path, _, tag = name.partition(":")
    manifest = folder / "manifests/registry.ollama.ai" / (path if "/" in path else f"library/{path}") / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
    return blobs / f"sha256-{hashlib.sha256(weights).hexdigest()}"
