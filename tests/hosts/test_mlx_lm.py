"""mlx_lm.server for real, on the processor: what a service can ask of it, and how it fails."""

import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from crds.metalprocess import Artifact, FurtherArtifact
from metal_agent.supervise import liveness
from runtimes.registry import RUNTIMES
from tests.support.api_objects import GIB
from tests.support.engine_process import start_engine
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment
from tests.support.tiny_models import tiny_mlx
from tests.support.tiny_models.tiny_gguf import SENTENCE

MLX: dict[str, Any] = {"runtime": "mlx-lm"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    # Quantization of the cache works on groups of 64 values of one head.
    tiny_mlx.write(folder, n_embd=128, n_head=2, n_head_kv=1)
    return folder


def further(role: str) -> dict[str, Any]:
    return {"role": role, "artifact": {"source": "file:///of-the-test"}}


async def test_a_chat_is_answered_whatever_the_engine_is_called(tmp_path: Path, tiny: Path) -> None:
    async with start_engine(tmp_path, tiny, **MLX, parallel=2, chatTemplate="{{ 'x' * 50 }}") as engine:
        found = await engine.ready()
        assert (found.reason, found.message) == ("Generated", f"{engine.url} generated a token")
        assert await engine.says() == SENTENCE
        answer = await engine.chat(max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == 50
        # It keeps a conversation for each slot, and no more.
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 49
        assert str(tiny) in await engine.get("/v1/models")
        assert "Hi" not in engine.log


async def test_a_model_that_cannot_be_loaded_is_told_though_the_server_says_that_it_is_well(
    tmp_path: Path, tiny: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (broken / name).write_bytes((tiny / name).read_bytes())
    os.truncate(broken / "model.safetensors", 1000)
    async with start_engine(tmp_path, broken, **MLX) as engine:
        found = await engine.ready()
        assert (found.reason, found.message) == (
            "Broken",
            f"{engine.url} answered 404: generation thread died",
        )
        assert "Traceback" in engine.log
        # A Ready one whose thread died later is found out by its pulse.
        async with aiohttp.ClientSession() as session:
            asked = await liveness.probe_liveness(session, engine.url, pulse=RUNTIMES["mlx-lm"].pulse, model="chat")
        assert asked.problem.endswith("/health answered 503")


async def test_draft_and_quantized_cache_are_taken(tmp_path: Path, tiny: Path) -> None:
    async with start_engine(
        tmp_path,
        tiny,
        [tiny],
        **MLX,
        furtherArtifacts=[further("draft")],
        draftMaxTokens=3,
        cacheTypeK="q8_0",
        cacheTypeV="q8_0",
    ) as engine:
        await engine.ready()
        assert await engine.says() == SENTENCE


async def test_a_process_of_mlx_weights_and_an_adapter_is_brought_and_served(
    machine: Machine, assignment: MakeAssignment
) -> None:
    tiny_mlx.write(machine.file_root / "mlx")
    tiny_mlx.write_adapter(machine.file_root / "adapter")
    sources = [Artifact(source=f"file://{machine.file_root}/{name}/") for name in ("mlx", "adapter")]
    machine.supervisor.assign(
        [
            assignment(
                runtime="mlx-lm",
                artifact=sources[0],
                further_artifacts=[FurtherArtifact(role="adapter", artifact=sources[1])],
                memory_bytes=4 * GIB,
                extra_args=[],
            )
        ]
    )
    runner = machine.runners["u1"]
    await eventually(lambda: runner.state.phase == "Ready")
    assert runner.url
    # Any other name would have it load something else, so this is what the proxy asks it for.
    assert runner.model == "default_model"
    question = {"model": runner.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{runner.url}/v1/chat/completions", json=question) as response,
    ):
        said = (await response.json())["choices"][0]["message"]["content"]
    # What the adapter makes of the sentence is noise.
    assert said
    assert not SENTENCE.startswith(said)
