"""Stands in for an Ollama daemon: its store, its memory, and the answers that `recorded/ollama.json` describes.

As in Ollama's scheduler (server/sched.go), memory has one runner for each GGUF: a request for the same file with other
settings loads the file again, and the runner is listed under the name of the request that loaded it.
"""

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.daemons.stand_in import SICK_ANSWER, StandIn, completion, hang, serve

_DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "0.1M",
    "quantization_level": "F32",
}
_FOREVER = "2318-03-01T12:00:00.000000+01:00"
_MINUTES = "2026-11-21T17:00:00.000000+01:00"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Stored:
    """A model in the store: its weights by digest, and its parameters."""

    blob: str
    parameters: dict[str, Any]
    parent: str = ""
    """The model that it was created from."""


@dataclass
class Running:
    """A model in memory."""

    name: str
    size: int
    context_length: int
    stays: bool


class OllamaStandIn(StandIn):
    """An Ollama daemon; a test changes the attributes while it runs."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.blobs: dict[str, bytes] = {}
        self.stored: dict[str, Stored] = {}
        self.running: dict[str, Running] = {}
        """Models in memory, by blob."""
        self.registry: dict[str, bytes] = {}
        """Models that can be pulled, by name."""
        self.pull_error = ""
        self.unloads = True
        """False: a request to unload a model has no effect, as sometimes for minutes."""
        self.loading = asyncio.Event()
        """A model is loaded only while this event is set."""
        self.loading.set()
        self.headers_seen: list[str] = []

    def own(self, name: str, *, size: int) -> None:
        """Add a model of the owner, and load it."""
        blob = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
        self.blobs[blob] = name.encode()
        self.stored[name] = Stored(blob, {})
        self.running[blob] = Running(name, size, 4096, stays=False)

    def evict(self, name: str) -> None:
        self.running = {blob: model for blob, model in self.running.items() if model.name != name}

    def names(self) -> set[str]:
        """Return the names of the models in memory."""
        return {model.name for model in self.running.values()}

    def forget(self) -> None:
        self.running.clear()

    def application(self) -> web.Application:
        application = web.Application(client_max_size=1 << 30, middlewares=[self._note])
        application.add_routes(
            [
                web.get("/", self._root),
                web.get("/api/version", self._version),
                web.get("/api/tags", self._tags),
                web.get("/api/ps", self._ps),
                web.post("/api/generate", self._generate),
                web.post("/api/create", self._create),
                web.post("/api/pull", self._pull),
                web.head("/api/blobs/{digest}", self._has_blob),
                web.post("/api/blobs/{digest}", self._put_blob),
                web.delete("/api/delete", self._delete),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        return application

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        await self.answering.wait()
        self.headers_seen.append(str(request.headers))
        return await handler(request)

    async def _root(self, _: web.Request) -> web.Response:
        return web.Response(text="Ollama is running")

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.31.0"})

    async def _tags(self, _: web.Request) -> web.Response:
        return web.json_response({"models": [self._tag(name, stored) for name, stored in self.stored.items()]})

    def _tag(self, name: str, stored: Stored) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "modified_at": "2026-11-20T10:00:00.123456+01:00",
            "size": len(self.blobs[stored.blob]),
            "digest": hashlib.sha256(f"{name}{stored}".encode()).hexdigest(),
            "details": _DETAILS | {"parent_model": stored.parent},
        }

    async def _ps(self, _: web.Request) -> web.Response:
        models = [
            {
                "name": model.name,
                "model": model.name,
                "size": model.size,
                "digest": hashlib.sha256(model.name.encode()).hexdigest(),
                "details": _DETAILS,
                "expires_at": _FOREVER if model.stays else _MINUTES,
                "size_vram": model.size,
                "context_length": model.context_length,
            }
            for model in self.running.values()
        ]
        return web.json_response({"models": models})

    async def _generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        name, keep_alive = asked["model"], asked.get("keep_alive")
        stored = self.stored.get(name)
        if stored is None:
            return _not_found(name)
        if keep_alive == 0:
            if self.unloads:
                self.running.pop(stored.blob, None)
                self.sick.discard(name)
                self.end_hang(name)
            return web.json_response(_done(name, "unload"))
        await self._load(name, stored, stays=keep_alive == -1)
        return web.json_response(_done(name, "load"))

    async def _load(self, name: str, stored: Stored, *, stays: bool | None) -> None:
        await self.loading.wait()
        context_length = stored.parameters.get("num_ctx", 4096)
        running = self.running.get(stored.blob)
        if running is None or running.context_length != context_length:
            size = len(self.blobs[stored.blob]) + context_length
            self.running[stored.blob] = running = Running(name, size, context_length, stays=False)
        running.stays = running.stays if stays is None else stays

    async def _create(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        source = ""
        if asked.get("from"):
            source = display_name(asked["from"])
            if source not in self.stored:
                return _not_found(source)
            blob = self.stored[source].blob
        else:
            (blob,) = asked["files"].values()
            if blob not in self.blobs:
                return web.json_response({"error": f"blob {blob} does not exist"}, status=400)
        self.stored[asked["model"]] = Stored(blob, asked.get("parameters") or {}, source)
        steps = ["parsing GGUF", f"using existing layer {blob}", "writing manifest", "success"]
        return await _stream(request, [{"status": step} for step in steps])

    async def _pull(self, request: web.Request) -> web.StreamResponse:
        name = display_name((await request.json())["model"])
        if self.pull_error or name not in self.registry:
            # After the first line the status 200 has been sent, so an error is another line.
            error = self.pull_error or "pull model manifest: file does not exist"
            return await _stream(request, [{"status": "pulling manifest"}, {"error": error}])
        weights = self.registry[name]
        digest = f"sha256:{hashlib.sha256(weights).hexdigest()}"
        self.blobs[digest] = weights
        self.stored[name] = Stored(digest, {})
        pulling = {"status": f"pulling {digest[7:19]}", "digest": digest, "total": len(weights)}
        lines: list[dict[str, Any]] = [{"status": "pulling manifest"}]
        lines += [pulling | {"completed": done} for done in (len(weights) // 2, len(weights))]
        lines += [{"status": step} for step in ("verifying sha256 digest", "writing manifest", "success")]
        return await _stream(request, lines)

    async def _has_blob(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if request.match_info["digest"] in self.blobs else 404)

    async def _put_blob(self, request: web.Request) -> web.Response:
        digest, weights = request.match_info["digest"], await request.read()
        if digest != f"sha256:{hashlib.sha256(weights).hexdigest()}":
            return web.json_response({"error": "digest mismatch"}, status=400)
        self.blobs[digest] = weights
        return web.Response(status=201)

    async def _delete(self, request: web.Request) -> web.Response:
        name = display_name((await request.json())["model"])
        stored = self.stored.pop(name, None)
        if stored is None:
            return _not_found(name)
        if stored.blob not in {other.blob for other in self.stored.values()}:
            self.blobs.pop(stored.blob, None)
        return web.Response()

    async def _chat(self, request: web.Request) -> web.Response:
        name = (await request.json())["model"]
        stored = self.stored.get(name)
        if stored is None:
            error = {"message": f"model '{name}' not found", "type": "api_error", "param": None, "code": None}
            return web.json_response({"error": error}, status=404)
        await self._load(name, stored, stays=None)
        await hang(self, request)
        if name in self.sick:
            return web.json_response(SICK_ANSWER, status=500)
        return web.json_response(completion(name) | {"system_fingerprint": "fp_ollama"})


def display_name(name: str) -> str:
    """Return the name that Ollama lists for `name` (types/model/name.go, DisplayShortest)."""
    short = name.removeprefix("registry.ollama.ai/").removeprefix("library/")
    return short if ":" in short else f"{short}:latest"


def _done(name: str, reason: str) -> dict[str, Any]:
    created = "2026-11-20T09:00:00.000000Z"
    return {"model": name, "created_at": created, "response": "", "done": True, "done_reason": reason}


def _not_found(name: str) -> web.Response:
    return web.json_response({"error": f"model '{name}' not found"}, status=404)


async def _stream(request: web.Request, lines: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    for line in lines:
        await response.write(json.dumps(line).encode() + b"\n")
    await response.write_eof()
    return response


def _of_container() -> OllamaStandIn:
    """Return the stand-in for `ollama serve` in a container, whose library has one model."""
    host, port = os.environ["OLLAMA_HOST"].split(":")
    if host != "127.0.0.1":
        raise SystemExit(f"OLLAMA_HOST is {host}: others could get round the proxy")
    Path(os.environ["OLLAMA_MODELS"]).mkdir()  # fails unless the folder is on a volume
    daemon = OllamaStandIn(int(port))
    daemon.registry["tiny:1b"] = b"weights of the library"
    return daemon


if __name__ == "__main__":
    asyncio.run(serve(_of_container() if sys.argv[1] == "serve" else OllamaStandIn(int(sys.argv[1]))))
