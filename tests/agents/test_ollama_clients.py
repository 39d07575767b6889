"""npm's `ollama` and LangChain's adapter at the router of one machine: what programs written for Ollama see."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import pytest

from crds.serving import ServingOptions
from gateway.proxy.config import Backend, ServedModelFacts, ServiceListener
from gateway.proxy.ollama_api import VERSION
from runtimes.serving import Serving
from tests.agents.programs import ensure_agents
from tests.agents.python_packages import ensure_packages
from tests.agents.test_agents import run
from tests.hosts.test_client_libraries import SAYS, TEMPLATE
from tests.support import llama_server
from tests.support.tiny_models import tiny_gguf
from tests.support.tiny_models.tiny_gguf import SENTENCE
from tests.unit.gateway.proxy.running_router import RunningRouter, serve_router

CALL = {"name": "weather", "arguments": {"city": "Paris"}}


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Backend]]:
    """Real llama.cpp: one that answers, one that thinks and calls, one for vectors, and one that never ends."""
    folder = tmp_path_factory.mktemp("models")
    tiny_gguf.write(folder / "chat")
    tiny_gguf.write(folder / "caller", text=f"<think>so it is</think>{SAYS}")
    tiny_gguf.write(folder / "embed", pooling=gguf.PoolingType.MEAN)
    tiny_gguf.write(folder / "endless", loop=True, n_ctx=1 << 17)
    one_thread = ["-t", "1"]
    options = {
        "chat": ServingOptions(context_length=2048, extra_args=one_thread),
        "caller": ServingOptions(context_length=2048, chat_template=TEMPLATE, extra_args=one_thread),
        "embed": ServingOptions(context_length=2048, mode="embeddings", extra_args=one_thread),
        "endless": ServingOptions(context_length=1 << 17, extra_args=one_thread),
    }
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(llama_server.serve_as(Serving(name, str(folder / name), stated)))
            for name, stated in options.items()
        }
        yield {
            name: Backend(name, server.url, engine="llama.cpp", mode=options[name].mode)
            for name, server in servers.items()
        }


@pytest.fixture
async def router(backends: dict[str, Backend]) -> AsyncIterator[RunningRouter]:
    facts = ServedModelFacts(format="gguf", capabilities=("completion", "tools"))
    services = [
        ServiceListener(f"ns/{name}", "127.0.0.1", 0, "t", (backend,), facts=facts)
        for name, backend in backends.items()
    ]
    async with serve_router(*services) as running:
        yield running


async def test_every_call_of_npms_client(router: RunningRouter, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(ensure_agents())
    shutil.copy(Path(__file__).with_name("ask_ollama.mjs"), tmp_path)
    outcome = await run(["node", "ask_ollama.mjs", router.url], tmp_path, {})
    assert outcome.code == 0, outcome
    seen: dict[str, Any] = json.loads(outcome.output)
    errors = seen.pop("errors")
    (call,) = seen.pop("calls")
    assert call["function"] == {"index": 0, **CALL}
    assert seen == {
        "whole": SENTENCE,
        "stream": SENTENCE,
        "generated": SENTENCE,
        "thought": "so it is",
        "pieces": 3,
        "vectors": [64, 64],
        "older": 64,
        "listed": ["caller:latest", "chat:latest", "embed:latest", "endless:latest"],
        "loaded": 4,
        "shown": "gguf",
        "version": VERSION,
        "pulled": "success",
    }
    assert (errors["unknown"]["status"], errors["create"]["status"], errors["deleted"]["status"]) == (404, 501, 501)
    assert "model 'nobody' not found" in errors["unknown"]["message"]
    assert "`pomona pull`" in errors["pull"]["message"]
    assert "serve it with `pomona up`" in errors["create"]["message"]


async def test_langchains_adapter(router: RunningRouter, tmp_path: Path) -> None:
    script = Path(__file__).with_name("ask_langchain.py")
    outcome = await run([str(ensure_packages()), "-I", str(script), router.url], tmp_path, {})
    assert outcome.code == 0, outcome
    seen: dict[str, Any] = json.loads(outcome.output)
    (call,) = seen.pop("calls")
    assert (call["name"], call["args"]) == (CALL["name"], CALL["arguments"])
    assert "nobody" in seen.pop("unknown")
    assert seen == {
        "whole": SENTENCE,
        "reason": "stop",
        "counts": 18,
        "stream": SENTENCE,
        "thought": "so it is",
        "text": SENTENCE,
        "vectors": [64, 64],
        "json": True,
    }
