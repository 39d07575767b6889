"""Clients of OpenAI's and Anthropic's APIs ask `pomona up` for a model that is loaded by their request.

The load takes longer than the time after which clients get comments, as that of a large model does.
"""

import json
import shutil
import sys
from pathlib import Path

import openai
import pytest

from gateway.proxy.keep_alive import FIRST_COMMENT_SECONDS
from kube.resources import MODELS
from tests.agents.conftest import CONTEXT_LENGTH
from tests.agents.programs import ensure_agents
from tests.agents.test_agents import Agent, agent, run
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.on_demand_up import find_engines
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_gguf
from tests.support.tiny_models.tiny_gguf import SENTENCE
from tests.support.up_command import Start, Up, manifest, service

__all__ = ["agent"]

LOAD_SECONDS = FIRST_COMMENT_SECONDS + 1


@pytest.fixture
def up(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Up:
    """A `pomona up` with the model `chat`, which is slow to load, and unloaded soon."""
    slow = tmp_path / "llama-server"
    slow.write_text(f'#!/bin/sh\nsleep {LOAD_SECONDS}\nexec {sys.executable} -P -m runtimes.llama_launcher "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("LLAMA_SERVER_BIN", str(slow))
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    weights = tmp_path / "chat.gguf"
    tiny_gguf.write(weights, n_ctx=CONTEXT_LENGTH)
    scaling = {"minReplicas": 0, "idleSeconds": 1}
    model = make_manifest(MODELS, name="chat", source=weights.as_uri(), memoryBytes=GIB)
    return start(
        manifest(tmp_path / "chat.yaml", model, service("chat", "chat", contextLength=CONTEXT_LENGTH, scaling=scaling))
    )


async def wait_unloaded(up: Up) -> None:
    """Wait until no engine runs."""
    await eventually(lambda: not find_engines(up.state))


async def test_agent_loads_the_model_by_each_of_its_questions(up: Up, agent: Agent) -> None:
    url = await up.url()
    for number in range(2):
        await wait_unloaded(up)
        outcome = await agent.ask(url, goes_on=number > 0)
        assert (outcome.code, outcome.output.strip()) == (0, SENTENCE), f"{outcome}\n{up.said}"


@pytest.mark.parametrize("way", ["stream", "whole"])
async def test_library_of_npm_loads_the_model(up: Up, tmp_path: Path, way: str) -> None:
    (tmp_path / "node_modules").symlink_to(ensure_agents())
    shutil.copy(Path(__file__).with_name("ask.mjs"), tmp_path)
    url = await up.url()
    outcome = await run(["node", "ask.mjs", f"{url}/v1", way], tmp_path, {"POMONA_API_KEY": "any"})
    assert outcome.code == 0, outcome
    assert json.loads(outcome.output) == {"text": SENTENCE, "error": None, "reason": "stop"}


async def test_library_of_openai_loads_the_model(up: Up) -> None:
    async with openai.AsyncOpenAI(base_url=f"{await up.url()}/v1", api_key="any", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["chat"]
        assert not find_engines(up.state), "a list wakes nothing"
        stream = await client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        words = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(words) == SENTENCE
        await wait_unloaded(up)
        answer = await client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "Hi"}])
        assert answer.choices[0].message.content == SENTENCE
