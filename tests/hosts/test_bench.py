"""The real llama.cpp server is measured by the tokens that it counts itself."""

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest

from fitness.bench.measurement import BenchPlan, measure_endpoint, summarize
from fitness.bench.streamed_completion import BenchError
from fitness.performance import MeasuredPerformance
from tests.support.engine_process import start_engine

QUICK = BenchPlan(warmup=1, runs=3, tokens=32, prompt_tokens=64, parallel=2)


async def test_llama_server_is_measured(tmp_path: Path, tiny: Path) -> None:
    async with start_engine(tmp_path, tiny, contextLength=512, parallel=2) as engine:
        assert (await engine.ready()).ok
        counted = await _count_tokens(engine.url, engine.token)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {engine.token}"}) as session:
            result = await measure_endpoint(session, engine.url, "chat", QUICK)
        counted = await _count_tokens(engine.url, engine.token) - counted
    # The sentence of the tiny model is shorter than that: it is asked to go on after its end.
    assert [timing.tokens for timing in result.timings] == [32, 32, 32]
    assert all(50 <= timing.prompt_tokens <= 90 for timing in result.timings)
    assert list(result.concurrency) == [1, 2]
    # The engine's own counter: a first request of 16 tokens, a warm-up, three runs, and two streams at once.
    assert counted == 16 + 32 * (1 + 3 + 2)
    record = summarize(result, QUICK)
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


async def _bench(*arguments: str) -> tuple[int, str, str]:
    """Run `pomona bench`; return exit code, output and errors."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "bench", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await program.communicate()
    assert program.returncode is not None
    return program.returncode, output.decode(), errors.decode()


async def test_command_measures_the_engine_at_a_url(tmp_path: Path, tiny: Path) -> None:
    result = tmp_path / "result"
    async with start_engine(tmp_path, tiny, contextLength=512, parallel=2) as engine:
        assert (await engine.ready()).ok
        token = tmp_path / "token"
        token.write_text(f"{engine.token}\n")
        quick = ("--runs", "3", "--warmup", "0", "--parallel", "2", "--token-file", str(token))
        code, output, errors = await _bench(engine.url, *quick, "--result", str(result))
        refused = await _bench(engine.url, "--model", "chat", "--result", str(tmp_path / "refused"))
    assert (code, errors) == (0, "")
    assert [line.split()[0] for line in output.splitlines()] == ["generation", "prompt", "first", "between", "2"]
    record = msgspec.json.decode(result.read_bytes(), type=MeasuredPerformance)
    assert f"{record.tokens_per_second:,.1f} tokens/s" in output
    assert list(record.concurrency) == ["1", "2"]
    assert record.measured_at.endswith("Z")
    assert result.stat().st_size < 4096
    code, output, errors = refused
    assert (code, output) == (2, "")
    assert "answered 401" in errors
    assert json.loads((tmp_path / "refused").read_text())["reason"] == "Unauthorized"


async def test_command_without_an_engine_may_be_tried_again(tmp_path: Path) -> None:
    code, _, errors = await _bench("http://127.0.0.1:1", "--result", str(tmp_path / "result"))
    assert code == 1
    assert errors.startswith("pomona bench: http://127.0.0.1:1: ")
    assert json.loads((tmp_path / "result").read_text())["retryable"] is True
