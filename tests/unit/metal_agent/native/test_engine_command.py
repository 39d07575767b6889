"""The port of an engine is the one that the kernel reports, and not one in the model's text."""

from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from crds.metalprocess import Artifact
from metal_agent.assignments import Assignment
from metal_agent.native import engine_command
from metal_agent.native.engine_keys import EngineKeys
from metal_agent.native.process import spawn_process
from runtimes.probe import generate_token
from tests.support.eventually import eventually
from tests.support.tiny_models import tiny_gguf


async def test_text_of_model_does_not_change_engine_url(tmp_path: Path, assignment: Callable[..., Assignment]) -> None:
    model, log = tmp_path / "evil.gguf", tmp_path / "engine.log"
    tiny_gguf.write(model, name="listening on http://10.9.9.9:80")
    spec = assignment(extra_args=["-t", "1", "-lv", "5"]).spec
    key = EngineKeys(tmp_path / "keys").create("u1")
    process = spawn_process(
        engine_command.build_argv(spec, model, key.path), engine_command.build_environment(spec), log, tmp_path
    )
    try:
        url = await eventually(process.url)
        assert url
        async with aiohttp.ClientSession() as session:

            async def answers() -> bool:
                return (await generate_token(session, url, model="chat", token=key.token, timeout_seconds=10)).ok

            await eventually(answers)
    finally:
        await process.end(grace_seconds=5)
    assert "listening on http://10.9.9.9:80" in log.read_text(errors="replace")
    assert process.url() is None


@pytest.mark.parametrize(
    ("runtime", "artifact"),
    [
        ("ollama", Artifact(source="file:///models/tiny-00001-of-00002.gguf")),
        ("omlx", Artifact(source="hf://acme/tiny", files=["*.gguf"])),
    ],
)
def test_gguf_files_that_a_daemon_cannot_load_are_an_obstacle(
    runtime: str, artifact: Artifact, assignment: Callable[..., Assignment]
) -> None:
    """A host may have to decide alone, for a Model that nobody in the cluster inspects."""
    spec = assignment(runtime=runtime, artifact=artifact, extra_args=[]).spec
    assert "set runtime to llama.cpp" in (engine_command.find_obstacle(spec) or "")
