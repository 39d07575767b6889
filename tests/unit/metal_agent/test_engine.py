"""How an engine is started and found."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp

from metal_agent import engine
from metal_agent.assignments import Assignment
from runtimes.probe import generate_token
from tests import tiny_gguf
from tests.eventually import eventually


async def test_a_model_cannot_say_where_its_engine_listens(
    tmp_path: Path, assignment: Callable[..., Assignment]
) -> None:
    model, log = tmp_path / "evil.gguf", tmp_path / "engine.log"
    tiny_gguf.write(model, name="listening on http://10.9.9.9:80")
    spec = assignment(extra_args=["-t", "1", "-lv", "5"]).spec
    assert spec
    argv = engine.argv(spec, model)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*argv, stdout=output, stderr=output)
    try:
        url = await eventually(lambda: engine.listening_url(process.pid))
        assert url
        async with aiohttp.ClientSession() as session:

            async def answers() -> bool:
                return (await generate_token(session, url, model="chat", token=None, timeout_seconds=10)).ok

            await eventually(answers)
    finally:
        process.kill()
        await process.wait()
    assert "listening on http://10.9.9.9:80" in log.read_text(errors="replace")
    assert engine.listening_url(process.pid) is None
