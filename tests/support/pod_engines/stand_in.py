"""A stand-in for vLLM, SGLang or TGI in a pod, which need a GPU or gigabytes: see `main`.

It takes the engine's own command line and refuses, in the engine's words, an option that the recorded parser of the
real package does not have. It serves a folder of safetensors weights without reading them: every prompt gets the same
sentence, one word for each token.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from aiohttp import web

from runtimes.pod import EngineMetrics
from runtimes.registry import RUNTIMES
from tests.support.pod_engines.dialects import DIALECTS, Dialect

SENTENCE: Final = "Hello from a stand-in, which has no weights, knows nothing, but answers."
WORDS: Final = SENTENCE.split()


class _ArgparseParser(argparse.ArgumentParser):
    """The parser of an engine in Python: argparse's own errors are the engine's."""


class _ClapParser(argparse.ArgumentParser):
    """The parser of TGI's launcher, which is in Rust."""

    def error(self, message: str) -> NoReturn:
        name = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        text = f"unexpected argument '{name}' found" if message.startswith("unrecognized") else message
        tail = f"Usage: {self.prog} [OPTIONS]\n\nFor more information, try '--help'."
        self.exit(2, f"error: {text}\n\n{tail}\n")


def _parse(dialect: Dialect, argv: Sequence[str]) -> Mapping[str, Any]:
    """Return the values of the options by their names; ends the process with status 2 as the engine does."""
    recording = dialect.read_options()
    make = _ClapParser if dialect.engine == "tgi" else _ArgparseParser
    parser = make(prog=dialect.program, add_help=False, allow_abbrev=False)
    for name in recording["positional"]:
        parser.add_argument(name, nargs="?")
    for name, option in recording["options"].items():
        if option["values"] == 0:
            parser.add_argument(name, dest=name, action="store_true")
        else:
            count = None if option["values"] == 1 else option["values"]
            parser.add_argument(name, dest=name, nargs=count, choices=option.get("choices"))
    return vars(parser.parse_args(argv))


@dataclass(frozen=True, kw_only=True)
class _Settings:
    model: Path
    name: str
    host: str
    port: int
    context: int
    key: str | None


def _settings(dialect: Dialect, values: Mapping[str, Any], environment: Mapping[str, str]) -> _Settings:
    model = Path(values[dialect.model] or "")
    if not (model / "config.json").is_file():
        sys.exit(f"{dialect.program}: error: {model} has no config.json")
    stated = values[dialect.served_name] if dialect.served_name else None
    name = stated[0] if isinstance(stated, list) else stated
    key = values[dialect.key_option]
    return _Settings(
        model=model,
        name=name or str(model),
        host=values[dialect.host] or "0.0.0.0",
        port=int(values[dialect.port]),
        context=int(values[dialect.context]),
        key=(key[0] if isinstance(key, list) else key) or environment.get(dialect.key_variable or "") or None,
    )


class StandInServer:
    """The HTTP server of one engine."""

    def __init__(self, dialect: Dialect, settings: _Settings) -> None:
        self._dialect, self._settings = dialect, settings
        pod = RUNTIMES[dialect.engine].pod
        assert pod is not None
        assert pod.metrics is not None
        self._names: EngineMetrics = pod.metrics
        self._types: Mapping[str, str] = dialect.read_metrics()
        self._counts: Counter[str] = Counter()
        """Values of the metrics that change, by name; the sum of a histogram has its name with `_sum`."""

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._check_key])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/invocations", self._chat)
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key = self._settings.key
        if key and self._dialect.guarded(request.path) and request.headers.get("Authorization") != f"Bearer {key}":
            return web.Response(status=401, text=self._dialect.unauthorized, content_type="application/json")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        entry = {
            "id": self._settings.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": self._dialect.owner,
            "root": str(self._settings.model),
            "parent": None,
            "max_model_len": self._settings.context,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = []
        for name, kind in self._types.items():
            lines.append(f"# TYPE {name} {kind}")
            if kind == "histogram":
                lines += [f"{name}_sum {self._counts[f'{name}_sum']}", f"{name}_count {self._counts[f'{name}_count']}"]
            else:
                lines.append(f"{name} {self._counts[name]}")
        return web.Response(text="\n".join([*lines, ""]), content_type="text/plain")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        name = asked.get("model")
        if self._dialect.served_name and name != self._settings.name:
            text = f"The model `{name}` does not exist. Valid aliases: {self._settings.name}."
            error = {"message": text, "type": "NotFoundError", "param": "model", "code": 404}
            return web.json_response({"error": error}, status=404)
        prompt = sum(len(str(message["content"]).split()) for message in asked["messages"]) + 4
        limit, context = asked.get("max_tokens"), self._settings.context
        if prompt + (limit or 1) > context:
            answer = self._dialect.too_long(prompt, limit or 1, context)
            return web.json_response(answer, status=422 if self._dialect.engine == "tgi" else 400)
        words = WORDS[: limit or len(WORDS)]
        self._counts[self._names.requests_running] += 1
        try:
            return await self._answer(request, asked, prompt, words)
        finally:
            self._counts[self._names.requests_running] -= 1
            counted = (self._names.prompt_tokens, prompt), (self._names.generated_tokens, len(words))
            for metric, number in (*counted, (self._names.requests, 1)):
                if metric:
                    self._counts[metric] += number

    async def _answer(
        self, request: web.Request, asked: dict[str, Any], prompt: int, words: Sequence[str]
    ) -> web.StreamResponse:
        reason = "stop" if len(words) == len(WORDS) else "length"
        head = {"id": "chatcmpl-1", "created": int(time.time()), "model": asked.get("model")}
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + len(words), "completion_tokens": len(words)}
        if not asked.get("stream"):
            message = {"role": "assistant", "content": " ".join(words), "refusal": None}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": None}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas = [
            {"role": "assistant", "content": ""},
            *({"content": f" {word}" if number else word} for number, word in enumerate(words)),
        ]
        for number, delta in enumerate(deltas):
            last = number == len(deltas) - 1
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason if last else None}
            await _send(response, {**head, "object": "chat.completion.chunk", "choices": [choice]})
        if (asked.get("stream_options") or {}).get("include_usage"):
            await _send(response, {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, chunk: Mapping[str, Any]) -> None:
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


async def _serve(server: StandInServer, settings: _Settings) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, settings.host, settings.port).start()
    await stopped.wait()
    await runner.cleanup()


def _compile(home: Path) -> None:
    """Print whether compiled code is in the home; without it, leave some there, as of a minute ago."""
    code = home / ".cache/stand-in/graph.so"
    print("found compiled code" if code.exists() else "compiled", flush=True)
    code.parent.mkdir(parents=True, exist_ok=True)
    code.touch()
    os.utime(code, (time.time() - 60, time.time() - 60))


def main(engine: str, argv: Sequence[str]) -> None:
    """Parse the engine's command line, compile what it needs, and serve until SIGTERM."""
    dialect = DIALECTS[engine]
    settings = _settings(dialect, _parse(dialect, argv), os.environ)
    _compile(Path.home())
    asyncio.run(_serve(StandInServer(dialect, settings), settings))
