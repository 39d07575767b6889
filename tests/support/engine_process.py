"""One real engine, started in the same way as by the agent, for tests of its behaviour."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from crds.metalprocess import MetalProcessSpec
from metal_agent.native import engine_command
from metal_agent.native.engine_keys import EngineKeys
from metal_agent.native.process import spawn_process
from runtimes.probe import ProbeResult, generate_token
from tests.support.eventually import eventually


class EngineProcess:
    """A running engine; `log` is its output so far, `end` ends it at once."""

    def __init__(
        self,
        spec: MetalProcessSpec,
        url: str,
        session: aiohttp.ClientSession,
        log: Path,
        token: str,
        *,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self.url = url
        self.end = end
        self.token = token
        self._spec = spec
        self._session = session
        self._log = log

    @property
    def model(self) -> str:
        """The engine's name for the model."""
        return engine_command.find_served_name(self._spec) or self._spec.service_name

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    async def probe(self) -> ProbeResult:
        """Send the agent's readiness probe."""
        return await generate_token(
            self._session,
            self.url,
            model=self.model,
            token=self.token,
            timeout_seconds=30,
            mode=self._spec.mode,
            engine=self._spec.runtime,
        )

    async def ready(self) -> ProbeResult:
        """Wait until the engine answers, or is known never to answer, and return the result."""
        results: list[ProbeResult] = []

        async def decided() -> bool:
            results[:] = [await self.probe()]
            return results[0].ok or results[0].reason == "Broken"

        await eventually(decided)
        return results[0]

    async def get(self, path: str) -> str:
        async with self._session.get(f"{self.url}{path}") as response:
            assert response.status == 200
            return await response.text()

    async def ask(self, path: str, **body: Any) -> Any:
        question = {"model": self.model, **body}
        async with self._session.post(f"{self.url}{path}", json=question) as response:
            return await response.json()

    async def chat(self, content: str | Sequence[Mapping[str, Any]] = "Hi", **body: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        return await self.ask("/v1/chat/completions", messages=messages, temperature=0, **body)

    async def says(self, content: str | Sequence[Mapping[str, Any]] = "Hi") -> str:
        answer = await self.chat(content, max_tokens=40)
        return str(answer["choices"][0]["message"]["content"])


@asynccontextmanager
async def start_engine(
    folder: Path, model: Path, further: Sequence[Path] = (), **spec: Any
) -> AsyncIterator[EngineProcess]:
    """Run the engine of a MetalProcess with this spec until the context ends; it may not be ready yet.

    `further` are the files of `furtherArtifacts`, in their order; their artifacts are filled in.
    """
    wanted = {
        "serviceName": "chat",
        "modelName": "tiny",
        "runtime": "llama.cpp",
        "artifact": {"source": f"file://{model}"},
        "memoryBytes": 1,
        "tokenSecret": "chat-token",
        "contextLength": 512,
        "extraArgs": ["-t", "1", "-lv", "4"] if spec.get("runtime", "llama.cpp") == "llama.cpp" else [],
    }
    # Only tests may set the log level: the API server would refuse a MetalProcess with it.
    process_spec = msgspec.convert(wanted | spec, MetalProcessSpec)
    log = folder / "engine.log"
    key = EngineKeys(folder / "keys").create("engine")
    argv = engine_command.build_argv(process_spec, model, key.path, further)
    process = spawn_process(argv, engine_command.build_environment(process_spec), log, folder)
    try:
        url = await eventually(lambda: process.url() or "")
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key.token}"}) as session:
            end = functools.partial(process.end, grace_seconds=0)
            yield EngineProcess(process_spec, url, session, log, key.token, end=end)
    finally:
        await process.end(grace_seconds=5)
