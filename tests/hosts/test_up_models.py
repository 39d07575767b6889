"""The Models of `pomona up`: local files, names, and weights in the caches of other programs; engines are real."""

import asyncio
import sys
from pathlib import Path

import pytest

from kube.resources import MODELS
from tests.support.file_server import FileServer
from tests.support.ollama.server import OllamaServer
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_gguf, tiny_mlx
from tests.support.up_command import Start, ask, manifest, service


async def test_local_files_of_a_manifest_state_no_memory(start: Start, tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    tiny_mlx.write(tmp_path / "folder", written_for="pt")
    up = start(
        manifest(
            tmp_path / "local.yaml",
            make_manifest(MODELS, name="tiny", source=f"file://{tmp_path}/tiny.gguf"),
            service("chat", "tiny", contextLength=None),
            make_manifest(MODELS, name="folder", source=f"file://{tmp_path}/folder/"),
            service("other", "folder", extraArgs=[]),
        )
    )
    url = await up.url()
    for name in ("chat", "other"):
        await up.says(f"{name}: Ready")
        assert await ask(url, name) == (200, tiny_gguf.SENTENCE)


async def test_repository_is_served_by_the_best_quantization_and_offline_ever_after(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub/acme/Tiny-GGUF"
    repository.mkdir(parents=True)
    tiny_gguf.write(repository / "Tiny-Q8_0.gguf", text="Eight bits speak.", n_ff=1024)
    tiny_gguf.write(repository / "Tiny-Q4_K_M.gguf", text="Four bits speak.")
    async with FileServer(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        up = start("--model", "acme/Tiny-GGUF", "--model=acme/Tiny-GGUF:q4_k_m", "--memory-budget=4GiB")
        url = await up.url()
        await up.says("acme/Tiny-GGUF: Q8_0 of 2 quantizations: the best that fits 2 GiB")
        await up.says("tiny: Ready")
        await up.says("tiny-q4-k-m: Ready")
        assert await ask(url, "tiny") == (200, "Eight bits speak.")
        assert await ask(url, "tiny-q4-k-m") == (200, "Four bits speak.")
        assert await up.process.stop() == 0

    offline = start("--model", "acme/Tiny-GGUF", "--memory-budget=4GiB")
    url = await offline.url()
    await offline.says("tiny: Ready")
    assert await ask(url, "tiny") == (200, "Eight bits speak.")


async def test_model_of_a_real_ollama_is_served_where_it_lies(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    ollama = OllamaServer(tmp_path / "ollama", unused_tcp_port)
    await ollama.start()
    ollama.add("tiny:1b")
    await ollama.stop()
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama/models"))
    up = start("--model", "tiny:1b")
    url = await up.url()
    await up.says("tiny:1b: served from Ollama's store, without a copy")
    await up.says("tiny-1b: Ready")
    assert await ask(url, "tiny-1b") == (200, tiny_gguf.SENTENCE)
    assert list((up.state / "weights").rglob("*.gguf")) == []


async def test_weights_that_the_hubs_own_client_has_stored_serve_without_a_copy_and_offline(
    start: Start, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub/acme/Tiny-GGUF").mkdir(parents=True)
    tiny_gguf.write(tmp_path / "hub/acme/Tiny-GGUF/Tiny-Q4_K_M.gguf")
    tiny_mlx.write(tmp_path / "hub/acme/folder", written_for="pt")
    async with FileServer(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for path in (tmp_path / "hub").glob("*/*/*"):
            await _download_by_the_hubs_client(path.relative_to(tmp_path / "hub"))

    stored = read_times(home)
    up = start("--model=acme/Tiny-GGUF:Q4_K_M", "--model=hf://acme/folder")
    url = await up.url()
    for name in ("tiny-q4-k-m", "folder"):
        await up.says(f"{name}: Ready - Model {name}: the stored weights serve, since their source could not be asked")
        assert await ask(url, name) == (200, tiny_gguf.SENTENCE)
    linked = {path.name for path in (up.state / "weights/objects").rglob("*") if path.is_symlink()}
    assert linked >= {"Tiny-Q4_K_M.gguf", "model.safetensors"}
    assert await up.process.stop() == 0
    assert read_times(home) == stored


def read_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


async def _download_by_the_hubs_client(path: Path) -> None:
    """Download ORG/REPO/FILE to the cache, as `hf download` does."""
    program = "import sys, huggingface_hub; huggingface_hub.hf_hub_download(*sys.argv[1:])"
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(path.parent), path.name)
    assert await client.wait() == 0


async def test_name_that_nothing_has_is_answered_at_once(start: Start) -> None:
    up = start("--model", "qwen3-8")
    up.process.start()
    assert await up.ends() == 2
    assert "--model qwen3-8: no model and no file has this name: did you mean qwen3-8b?" in up.said
