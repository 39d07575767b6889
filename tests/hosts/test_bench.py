"""The real llama.cpp server is measured by the tokens that it counts itself."""

from pathlib import Path

import aiohttp
import pytest

from fitness.bench.measurement import BenchPlan, measure_endpoint, summarize
from fitness.bench.streamed_completion import BenchError
from tests.support.engine_process import start_engine
from tests.support.tiny_models import tiny_gguf

QUICK = BenchPlan(warmup=1, runs=3, tokens=32, prompt_tokens=64, parallel=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_gguf.write(path)
    return path


async def test_llama_server_is_measured(tmp_path: Path, tiny: Path) -> None:
    async with start_engine(tmp_path, tiny, contextLength=512, parallel=2) as engine:
        assert (await engine.ready()).ok
        counted = await _count_tokens(engine.url, engine.token)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {engine.token}"}) as session:
            found = await measure_endpoint(session, engine.url, "chat", QUICK)
        counted = await _count_tokens(engine.url, engine.token) - counted
    # The sentence of the tiny model is shorter than that: it is asked to go on after its end.
    assert [each.tokens for each in found.timings] == [32, 32, 32]
    assert all(50 <= each.prompt_tokens <= 90 for each in found.timings)
    assert list(found.concurrency) == [1, 2]
    # The engine's own counter: a first request of 16 tokens, a warm-up, three runs, and two streams at once.
    assert counted == 16 + 32 * (1 + 3 + 2)
    record = summarize(found, QUICK)
    assert record.tokens_per_second > 0
    assert record.prompt_tokens_per_second is not None
    assert len(record.runs) == 3


async def test_key_that_llama_server_does_not_take_is_named(tmp_path: Path, tiny: Path) -> None:
    async with start_engine(tmp_path, tiny, contextLength=512) as engine, aiohttp.ClientSession() as session:
        assert (await engine.ready()).ok
        with pytest.raises(BenchError) as raised:
            await measure_endpoint(session, engine.url, "chat", QUICK)
    assert raised.value.reason == "Unauthorized"


async def test_prompt_beyond_the_context_of_llama_server_is_named(tmp_path: Path, tiny: Path) -> None:
    async with start_engine(tmp_path, tiny, contextLength=512) as engine:
        assert (await engine.ready()).ok
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {engine.token}"}) as session:
            with pytest.raises(BenchError, match="context") as raised:
                await measure_endpoint(session, engine.url, "chat", QUICK._replace(prompt_tokens=2000))
    assert raised.value.reason == "Refused"


async def _count_tokens(url: str, token: str) -> float:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("llamacpp:tokens_predicted_total "))
