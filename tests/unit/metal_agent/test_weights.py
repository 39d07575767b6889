"""The weights of a host: what a server sends there must be what was inspected, and no code."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from artifacts.errors import ArtifactError
from artifacts.inspect import Inspection, inspect
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from crds.metalprocess import Artifact, FurtherArtifact, MetalProcessSpec
from crds.serving import Role
from metal_agent.memory.admission import find_understatement
from metal_agent.weights import HostWeights, PinnedWeights
from tests.support.file_server import ALLOWED_NETWORKS, FileServer
from tests.support.tiny_models import tiny_gguf, tiny_mlx

CODE: list[tuple[str, dict[str, Any]]] = [
    ("config.json", {"model_file": "evil.py"}),
    ("config.json", {"text_config": {"model_file": "evil.py"}}),
    ("config.json", {"auto_map": {"AutoModel": "evil--modeling.Evil"}}),
    ("config.json", {"auto_map": {"AutoConfig": "configuration.Fine", "AutoModel": "../../evil.Evil"}}),
    ("config.json", {"auto_map": {"AutoModel": "sub/evil.Evil"}}),
    ("config.json", {"auto_map": "evil--modeling.Evil"}),
    ("config.json", {"auto_map": [7]}),
    ("config.json", {"custom_generate": "acme/evil"}),
    ("config.json", {"_attn_implementation_internal": "evil/kernel"}),
    ("config.json", {"vision": [{"attn_implementation": "evil/kernel"}]}),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil--tokenizer.Evil", None]}}),
    ("processor_config.json", {"auto_map": {"AutoProcessor": "https://evil.example/processing.Evil"}}),
]
BESIDE: list[tuple[str, dict[str, Any]]] = [
    ("config.json", {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}),
    ("config.json", {"text_config": {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}}),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}),
]
"""Keys of real conversions: classes in Python files of the repository, which are never fetched."""


def _spec(artifact: Artifact) -> MetalProcessSpec:
    return MetalProcessSpec(
        service_name="chat",
        model_name="tiny",
        runtime="llama.cpp",
        artifact=artifact,
        memory_bytes=1 << 30,
        token_secret="chat-token",
    )


async def _fetch(weights: HostWeights, artifact: Artifact) -> PinnedWeights:
    return await weights.fetch("team", _spec(artifact), [None], lambda _done, _total: None)


async def _refuse(weights: HostWeights, artifact: Artifact) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        (await _fetch(weights, artifact)).release()
    assert weights.store.stored() == []
    return caught.value


async def _inspect(source: str, endpoint: str, file_root: Path | None = None) -> Inspection:
    access = SourceAccess(endpoint=endpoint, file_root=file_root, allowed_networks=ALLOWED_NETWORKS)
    return await inspect(parse(source), access)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FileServer]:
    (tmp_path / "www").mkdir()
    async with FileServer(tmp_path / "www") as running:
        yield running


@pytest.fixture
def weights(tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> HostWeights:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return HostWeights(tmp_path / "weights", tmp_path, ALLOWED_NETWORKS)


@pytest.mark.parametrize("longer_by", [0, 4096])
async def test_server_that_sends_the_host_something_else_puts_nothing_there(
    weights: HostWeights, server: FileServer, longer_by: int, tmp_path: Path
) -> None:
    server.etag = "same"
    path = server.root / "tiny.gguf"
    tiny_gguf.write(path)
    inspection = await _inspect(f"{server.url}/tiny.gguf", server.url)
    path.write_bytes(b"import os\n" + bytes(inspection.size_bytes - 10 + longer_by))

    artifact = Artifact(
        source=f"{server.url}/tiny.gguf", revision=inspection.revision, size_bytes=inspection.size_bytes
    )
    error = await _refuse(weights, artifact)

    assert (error.reason, error.retryable) == ("SourceChanged" if longer_by else "HeaderInvalid", False)
    assert f"{server.url}/tiny.gguf: " in error.message
    left = [file.name for file in (tmp_path / "weights").rglob("*") if file.is_file()]
    assert not [name for name in left if name.startswith("tiny.gguf") and not name.endswith(".lock")]


async def test_fetched_weights_state_their_layout(weights: HostWeights, server: FileServer) -> None:
    tiny_gguf.write(server.root / "tiny.gguf")
    held = await _fetch(weights, Artifact(source=f"{server.url}/tiny.gguf"))
    assert held.layout
    assert held.layout == (await _inspect(f"{server.url}/tiny.gguf", server.url)).layout
    held.release()


async def test_weights_of_which_only_size_is_known_take_at_least_that(weights: HostWeights, server: FileServer) -> None:
    tiny_gguf.write(server.root / "tiny.gguf")
    unknown = (server.root / "tiny.gguf").read_bytes().replace(b"llama", b"lemma")
    (server.root / "unknown.gguf").write_bytes(unknown)
    source = f"{server.url}/unknown.gguf"
    assert (await _inspect(source, server.url)).layout is None, "a host that states one lies"
    held = await _fetch(weights, Artifact(source=source))
    held.release()
    spec = _spec(Artifact(source=source))
    assert find_understatement(msgspec.structs.replace(spec, memory_bytes=1), held.layout) is not None
    assert find_understatement(msgspec.structs.replace(spec, memory_bytes=1 << 30), held.layout) is None


async def test_memory_of_a_fetched_draft_counts(weights: HostWeights, server: FileServer) -> None:
    tiny_gguf.write(server.root / "tiny.gguf")
    artifact = Artifact(source=f"{server.url}/tiny.gguf")
    roles: tuple[Role, ...] = ("adapter", "draft")
    further = [FurtherArtifact(role=role, artifact=artifact) for role in roles]
    spec = msgspec.structs.replace(_spec(artifact), further_artifacts=further)
    held = await weights.fetch("team", spec, [None] * 3, lambda _done, _total: None)
    held.release()
    assert held.draft_layout == held.layout
    refused = find_understatement(msgspec.structs.replace(spec, memory_bytes=1), held.layout, held.draft_layout)
    assert refused is not None
    assert " the draft" in refused.message


def _write_folder(server: FileServer, name: str, keys: dict[str, Any]) -> Path:
    """Write acme/mlx, with more keys in the file of this name."""
    folder = server.root / "acme" / "mlx"
    folder.parent.mkdir()
    tiny_mlx.write(folder)
    path = folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | keys))
    return folder


@pytest.mark.parametrize(("name", "keys"), CODE)
async def test_folder_that_names_code_is_refused_by_inspection_and_by_the_host(
    weights: HostWeights, server: FileServer, name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    local = f"file://{_write_folder(server, name, keys)}/"
    for source, endpoint, root in (("hf://acme/mlx", server.url, None), (local, server.url, tmp_path)):
        with pytest.raises(ArtifactError) as caught:
            await _inspect(source, endpoint, root)
        assert (caught.value.reason, caught.value.retryable) == ("CustomCode", False)
        assert f"{source.partition('@')[0]}" in caught.value.message
        assert (await _refuse(weights, Artifact(source=source))).reason == "CustomCode"


@pytest.mark.parametrize(("name", "keys"), BESIDE)
async def test_folder_whose_classes_are_in_python_files_of_its_own_is_served_without_them(
    weights: HostWeights, server: FileServer, name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    folder = _write_folder(server, name, keys)
    (folder / "modeling_evil.py").write_text("raise SystemExit\n")
    assert (await _inspect("hf://acme/mlx", server.url)).size_bytes
    (await _fetch(weights, Artifact(source="hf://acme/mlx"))).release()
    kept = {file.suffix for file in (tmp_path / "weights").rglob("*") if file.is_file()}
    assert ".safetensors" in kept
    assert ".py" not in kept, "code of a repository is never fetched"

    # In the owner's own folder a loader would find them.
    local = f"file://{folder}/"
    with pytest.raises(ArtifactError, match=r"modeling_evil\.py is beside it: remove the Python files") as caught:
        await _inspect(local, server.url, tmp_path)
    assert caught.value.reason == "CustomCode"
    with pytest.raises(ArtifactError, match=r"modeling_evil\.py is beside it"):
        await _fetch(weights, Artifact(source=local))
    (folder / "modeling_evil.py").unlink()
    assert (await _inspect(local, server.url, tmp_path)).size_bytes
    (await _fetch(weights, Artifact(source=local))).release()


async def test_folder_without_code_is_fetched(weights: HostWeights, server: FileServer) -> None:
    folder = server.root / "acme" / "mlx"
    folder.parent.mkdir()
    tiny_mlx.write(folder)
    held = await _fetch(weights, Artifact(source="hf://acme/mlx"))
    assert held.layout
    held.release()


class TestMirrors:
    """Weights that the source lost, with a copy at another address."""

    async def test_mirrors_are_asked_in_order_without_the_token(self, weights: HostWeights, server: FileServer) -> None:
        tiny_gguf.write(server.root / "copy.gguf")
        content = (server.root / "copy.gguf").read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        mirrors = [f"{server.url}/absent.gguf", f"{server.url}/copy.gguf"]
        artifact = Artifact(source=f"{server.url}/tiny.gguf", revision='"etag"', sha256=sha256, mirrors=mirrors)
        held = await weights.fetch("team", _spec(artifact), ["open-sesame"], lambda _done, _total: None)
        assert (held.model.name, held.model.read_bytes()) == ("tiny.gguf", content)
        held.release()
        assert {request.authorization for request in server.seen("tiny.gguf")} == {"Bearer open-sesame"}
        assert [request.authorization for request in server.seen("absent.gguf") + server.seen("copy.gguf")] == [
            None,
            None,
        ]
        pinned = weights.pin(_spec(artifact))
        assert pinned
        pinned.release()

    async def test_mirror_with_other_bytes_puts_nothing_there(self, weights: HostWeights, server: FileServer) -> None:
        tiny_gguf.write(server.root / "copy.gguf", name="forged")
        mirrors = [f"{server.url}/copy.gguf"]
        error = await _refuse(weights, Artifact(source=f"{server.url}/tiny.gguf", sha256="a" * 64, mirrors=mirrors))
        assert error.reason == "ChecksumMismatch"

    async def test_mirror_without_a_digest_is_not_asked(self, weights: HostWeights, server: FileServer) -> None:
        tiny_gguf.write(server.root / "copy.gguf")
        mirrors = [f"{server.url}/copy.gguf"]
        error = await _refuse(weights, Artifact(source=f"{server.url}/tiny.gguf", mirrors=mirrors))
        assert (error.reason, server.seen("copy.gguf")) == ("SourceInvalid", [])
