"""A client whose requests are wrong is told so, and takes no engine from another client; on the real engines."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kube.resources import MODELS
from metal_agent.native.process import kill_strays
from tests.support.api_objects import GIB
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_companions, tiny_gguf, tiny_mlx
from tests.support.up_command import Up, ask, manifest, service
from tests.support.wrong_requests import send_wrong_requests


def write_mlx(folder: Path) -> None:
    tiny_mlx.write(folder, n_embd=128, n_head=2, n_head_kv=1)


@pytest.mark.parametrize(("name", "write"), [("shared.gguf", tiny_gguf.write), ("shared", write_mlx)])
async def test_wrong_requests_of_one_client_disturb_no_other(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    model = tmp_path / name
    write(model)
    source = make_manifest(MODELS, name="shared", source=f"file://{model}{'/' * model.is_dir()}", memoryBytes=GIB)
    shared = service("shared", "shared", extraArgs=[], parallel=2)
    up = Up(tmp_path, manifest(tmp_path / "shared.yaml", source, shared), "--port=0")
    statuses: list[int] = []

    async def ask_without_pause(url: str) -> None:
        while True:
            status, _ = await ask(url, "shared", max_tokens=2)
            statuses.append(status)

    try:
        url = await up.url()
        await up.says("shared: Ready")
        other = asyncio.create_task(ask_without_pause(url))
        assert await send_wrong_requests(url, "shared") == []
        other.cancel()
        assert set(statuses) == {200}
        assert len(statuses) > 40
        assert "checking the engine" not in up.said
        assert "Failed" not in up.said
    finally:
        if up.process.running:
            await up.process.kill()
        await kill_strays(tmp_path / "state", ())


async def test_client_switches_no_adapter_off(tmp_path: Path) -> None:
    """llama.cpp would take what it computed without the adapter for the begin of the next client's prompt, too."""
    tiny_gguf.write(tmp_path / "tiny.gguf")
    tiny_companions.write_adapter(tmp_path / "style.gguf", first=8)
    models = [
        make_manifest(MODELS, name=name, source=f"file://{tmp_path}/{name}.gguf", memoryBytes=GIB)
        for name in ("tiny", "style")
    ]
    styled = service("styled", "tiny", adapters=[{"modelRef": "style"}])
    up = Up(tmp_path, manifest(tmp_path / "styled.yaml", *models, styled), "--port=0")
    try:
        url = await up.url()
        await up.says("styled: Ready")
        for chosen in ([], [{"id": 0, "scale": 0}], [{"id": 1, "scale": 1}]):
            status, text = await ask(url, "styled", max_tokens=4, temperature=0, lora=chosen)
            assert (status, text.strip()[:6]) == (200, "It was")
    finally:
        if up.process.running:
            await up.process.kill()
        await kill_strays(tmp_path / "state", ())
