"""Ollama's store is read as Ollama reads it, and what is damaged or not readable in it counts as absent."""

import hashlib
import json
from pathlib import Path

import pytest

from artifacts.ollama_store import OllamaStore, find_ollama_store
from tests.support.ollama_layout import add_to_ollama

WEIGHTS = b"GGUF of a test"
SHA = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> OllamaStore:
    return OllamaStore([tmp_path / "absent", tmp_path / "models"])


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "library/tiny", "registry.ollama.ai/library/tiny:latest"])
def test_model_is_found_by_each_form_of_its_name(store: OllamaStore, tmp_path: Path, name: str) -> None:
    blob = add_to_ollama(tmp_path / "models", "tiny:latest", WEIGHTS)
    found = store.find_model(name)
    assert found is not None
    assert (found.blob, found.sha256) == (blob, SHA)
    assert found.name.endswith("tiny:latest")
    assert store.find_blob(SHA) == blob
    assert store.list_names() == ["tiny:latest"]


@pytest.mark.parametrize("name", ["tiny:2b", "other/tiny:latest", "../tiny:latest", "a/b/c/tiny", "", "tiny:../x"])
def test_other_names_are_not_found(store: OllamaStore, tmp_path: Path, name: str) -> None:
    add_to_ollama(tmp_path / "models", "tiny:latest", WEIGHTS)
    assert store.find_model(name) is None


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b"\xff",
        json.dumps({"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../x"}]}).encode(),
        json.dumps({"layers": 2 * [{"mediaType": "application/vnd.ollama.image.model", "digest": SHA}]}).encode(),
        json.dumps({"layers": [{"mediaType": "application/vnd.ollama.image.tensor", "digest": SHA}]}).encode(),
        b" " * (2 << 20) + b"{}",
    ],
)
def test_manifest_that_names_no_file_is_no_model(store: OllamaStore, tmp_path: Path, manifest: bytes) -> None:
    add_to_ollama(tmp_path / "models", "tiny:latest", WEIGHTS)
    (tmp_path / "models/manifests/registry.ollama.ai/library/tiny/latest").write_bytes(manifest)
    assert store.find_model("tiny") is None


def test_model_whose_weights_are_gone_is_absent(store: OllamaStore, tmp_path: Path) -> None:
    blob = add_to_ollama(tmp_path / "models", "tiny:latest", WEIGHTS)
    blob.rename(blob.with_name(f"{blob.name}-partial"))
    assert store.find_model("tiny") is None
    assert store.find_blob(SHA) is None


@pytest.mark.parametrize("environment", [{}, {"OLLAMA_MODELS": ""}, {"OLLAMA_MODELS": "'~/elsewhere'"}])
def test_store_is_where_ollama_keeps_it(home: Path, environment: dict[str, str]) -> None:
    add_to_ollama(home / ("elsewhere" if environment.get("OLLAMA_MODELS") else ".ollama/models"), "tiny:1b", WEIGHTS)
    assert find_ollama_store(environment).find_model("tiny:1b") is not None
