"""How an engine is started and found."""

from collections.abc import Callable
from pathlib import Path

import aiohttp

from metal_agent import engine, spawn
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
    process = spawn.spawn(engine.argv(spec, model), engine.environment(spec), log, tmp_path)
    try:
        url = await eventually(process.url)
        assert url
        async with aiohttp.ClientSession() as session:

            async def answers() -> bool:
                return (await generate_token(session, url, model="chat", token=None, timeout_seconds=10)).ok

            await eventually(answers)
    finally:
        await process.end(grace_seconds=5)
    assert "listening on http://10.9.9.9:80" in log.read_text(errors="replace")
    assert process.url() is None
