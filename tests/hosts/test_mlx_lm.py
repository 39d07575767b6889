"""The real mlx_lm.server, on the processor: the options of a service, and its failures."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from crds.metalprocess import Artifact, FurtherArtifact
from gateway.proxy.config import Backend
from metal_agent.supervise.engine_checks import ProbedEngine, probe_liveness
from runtimes.registry import RUNTIMES
from tests.support.api_objects import GIB
from tests.support.engine_process import start_engine
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment
from tests.support.tiny_models import tiny_mlx
from tests.support.tiny_models.tiny_gguf import SENTENCE
from tests.unit.gateway.cluster.running_gateway import SECRET, gateway_in_process
from tests.unit.gateway.proxy.running_proxy import TOKEN, proxy_in_process

MLX: dict[str, Any] = {"runtime": "mlx-lm"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    # Quantization of the cache works on groups of 64 values of one head.
    tiny_mlx.write(folder, n_embd=128, n_head=2, n_head_kv=1)
    return folder


def further(role: str) -> dict[str, Any]:
    return {"role": role, "artifact": {"source": "file:///of-the-test"}}


async def test_chat_is_answered_with_a_template_and_a_prompt_cache(tmp_path: Path, tiny: Path) -> None:
    async with start_engine(tmp_path, tiny, **MLX, parallel=2, chatTemplate="{{ 'x' * 50 }}") as engine:
        result = await engine.ready()
        assert (result.reason, result.message) == ("Generated", f"{engine.url} generated a token")
        assert await engine.says() == SENTENCE
        answer = await engine.chat(max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == 50
        # The server keeps one conversation for each slot, and no more.
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 49
        assert str(tiny) in await engine.get("/v1/models")
        assert "Hi" not in engine.log


async def test_gateway_answers_and_streams_by_way_of_the_proxy(tmp_path: Path, tiny: Path) -> None:
    question: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(start_engine(tmp_path, tiny, **MLX))
        assert (await engine.ready()).ok
        backend = Backend("mlx", engine.url, model=engine.model, api_key=engine.token, engine="mlx-lm", mode="chat")
        _, url = await stack.enter_async_context(proxy_in_process(backend))
        gateway = await stack.enter_async_context(gateway_in_process())
        gateway.cluster.put_key()
        gateway.cluster.serve("team-a", "tiny", url, token=TOKEN)
        library = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=SECRET, max_retries=0)
        client = await stack.enter_async_context(library)

        answer = await client.chat.completions.create(**question)
        assert (answer.model, answer.choices[0].message.content) == ("tiny", SENTENCE)
        text = ""
        async for chunk in await client.chat.completions.create(**question, stream=True):
            assert chunk.model == "tiny"
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        assert text == SENTENCE


async def test_model_that_cannot_be_loaded_fails_although_the_server_is_healthy(tmp_path: Path, tiny: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (broken / name).write_bytes((tiny / name).read_bytes())
    os.truncate(broken / "model.safetensors", 1000)
    async with start_engine(tmp_path, broken, **MLX) as engine:
        result = await engine.ready()
        assert (result.reason, result.message) == ("Broken", f"{engine.url} answered 404: generation thread died")
        assert "Traceback" in engine.log
        # The pulse endpoint reports a Ready engine whose thread died later.
        async with aiohttp.ClientSession() as session:
            pulse = RUNTIMES["mlx-lm"].pulse
            asked = await probe_liveness(ProbedEngine(session, engine.url, "chat", engine.token, "chat", None, pulse))
        assert asked.problem.endswith("/health answered 503")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("extra", [[], ["--trust-remote-code"]])
async def test_classes_that_a_model_names_are_never_run(tmp_path: Path, name: str, extra: list[str]) -> None:
    """The real mlx-lm and transformers: the engine's own classes are used, even beside the Python that is named."""
    tiny_mlx.write(tmp_path / "tiny")
    ran = tmp_path / "ran"
    (tmp_path / "tiny" / "evil.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    path = tmp_path / "tiny" / name
    classes = {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None], "AutoModelForCausalLM": "evil.Evil"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": classes}))
    async with start_engine(tmp_path, tmp_path / "tiny", **MLX, extraArgs=extra) as engine:
        assert (await engine.ready()).ok
        assert await engine.says() == SENTENCE
    assert not ran.exists()


async def test_draft_and_quantized_cache_are_accepted(tmp_path: Path, tiny: Path) -> None:
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


async def test_mlx_weights_with_an_adapter_are_fetched_and_served(machine: Machine, assignment: MakeAssignment) -> None:
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
    # With any other name the engine would load another model, so the proxy requests this name.
    assert runner.model == "default_model"
    question = {"model": runner.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{runner.url}/v1/chat/completions", json=question, headers={"Authorization": f"Bearer {runner.api_key}"}
        ) as response,
    ):
        said = (await response.json())["choices"][0]["message"]["content"]
    # The adapter turns the sentence into noise.
    assert said
    assert not SENTENCE.startswith(said)
