"""Stands in for an oMLX daemon: it finds, loads and pins models, with the answers that `recorded/omlx.json` describes.

As in oMLX (admin/routes.py), folders are discovered at the start and at a reload. A reload first unloads all models and
then loads the pinned ones again.
"""

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.controlplane.process import CHECKOUT
from tests.support.daemons.daemon import Daemon

_COOKIE = "omlx_admin_session"
_SICK_ANSWER = {"error": {"message": "Compute error.", "type": "server_error", "code": 500}}
"""The answer of an engine after a Metal out-of-memory error; oMLX passes it on."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Entry:
    """A discovered model."""

    path: Path
    size: int
    loaded: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


class OmlxStandIn(Daemon):
    """An oMLX with its folder at `base`; a test changes the attributes while it runs.

    `stop` is its crash, and `start` starts it at the same port.
    """

    def __init__(self, port: int, base: Path, api_key: str | None = "sk-owner") -> None:
        super().__init__(port)
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request."""
        self.answering = asyncio.Event()
        """Every request waits for this event: while it is cleared, the daemon hangs."""
        self.answering.set()
        self.sick: set[str] = set()
        """Names of models that answer every request with an error until they are unloaded."""
        self.hung: dict[str, asyncio.Event] = {}
        """Models that answer nothing, while the daemon answers, by name; the event is set when they are unloaded."""
        self._runner: web.AppRunner | None = None
        self.base = base
        self.api_key = api_key
        self.ceiling = 1 << 30
        self.active_requests = 0
        self.entries: dict[str, Entry] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        """Settings by model, which survive a restart."""
        self.sessions: set[str] = set()
        self.models = base / "models"
        self.models.mkdir(parents=True)
        kept = {"version": "1.0", "server": {"host": "127.0.0.1", "port": port}, "model": {"model_dirs": []}}
        (base / "settings.json").write_text(json.dumps(kept | {"auth": {"api_key": api_key}}))

    def own(self, name: str, *, size: int) -> None:
        """Add a model of the owner, and load it."""
        folder = self.models / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"0")
        self.entries[name] = Entry(folder, size, loaded=True)

    def names(self) -> set[str]:
        """Return the names of the models in memory."""
        return {name for name, entry in self.entries.items() if entry.loaded}

    def evict(self, name: str) -> None:
        self.entries[name].loaded = False

    async def start(self) -> None:
        self._discover()
        self._runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        self.answering.set()
        for name in tuple(self.hung):
            self.end_hang(name)
        if self._runner:
            await self._runner.cleanup()
            self._runner = None
        self.entries.clear()
        self.sessions.clear()

    def hang(self, name: str) -> Callable[[], bool]:
        """Make a model hang until it is unloaded; return a function that tells whether it was."""
        event = self.hung[name] = asyncio.Event()
        return event.is_set

    def end_hang(self, name: str) -> None:
        """Break off what a model was asked while it hung."""
        if event := self.hung.pop(name, None):
            event.set()

    def freeze(self) -> None:
        """Answer nothing until `thaw`."""
        self.answering.clear()

    def thaw(self) -> None:
        self.answering.set()

    def changes(self) -> list[tuple[str, str]]:
        """Return the requests that change something, in order."""
        return [(method, path) for method, path in self.asked if method not in {"GET", "HEAD"}]

    def _discover(self) -> None:
        """Unload all models, discover the folders again, and load the pinned models."""
        owned = {name: entry.size for name, entry in self.entries.items()}
        self.entries.clear()
        for path in sorted(self.models.iterdir()):
            if path.is_dir() and (path / "config.json").exists():
                size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
                settings = self.settings.setdefault(path.name, {})
                self.entries[path.name] = Entry(
                    path, owned.get(path.name, size), bool(settings.get("is_pinned")), settings
                )

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard])
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models/status", self._status),
                web.post("/v1/models/{id}/load", self._load),
                web.post("/v1/models/{id}/unload", self._unload),
                web.post("/v1/chat/completions", self._chat),
                web.get("/api/status", self._activity),
                web.post("/admin/api/login", self._login),
                web.post("/admin/api/reload", self._reload),
                web.put("/admin/api/models/{id}/settings", self._set),
            ]
        )
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        await self.answering.wait()
        if request.path in {"/health", "/admin/api/login"}:
            return await handler(request)
        if request.path.startswith("/admin/"):
            if request.cookies.get(_COOKIE) not in self.sessions:
                return web.json_response({"detail": "Admin authentication required"}, status=401)
        elif self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return _error(401, "Invalid API key", "authentication_error")
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        pool = {
            "model_count": len(self.entries),
            "loaded_count": len(self.names()),
            "final_ceiling": self.ceiling,
            "current_model_memory": self._used(),
        }
        default = next(iter(self.entries), "")
        return web.json_response({"status": "healthy", "default_model": default, "engine_pool": pool, "mcp": None})

    def _used(self) -> int:
        return sum(entry.size for entry in self.entries.values() if entry.loaded)

    async def _status(self, _: web.Request) -> web.Response:
        models = [
            {
                "id": name,
                "model_path": str(entry.path),
                "loaded": entry.loaded,
                "is_loading": False,
                "estimated_size": entry.size,
                "actual_size": entry.size if entry.loaded else None,
                "pinned": bool(entry.settings.get("is_pinned")),
                "engine_type": "batched",
                "model_type": "llm",
                "max_context_window": entry.settings.get("max_context_window") or 40960,
                "max_tokens": 32768,
                "last_access": 1763629200.5,
            }
            for name, entry in self.entries.items()
        ]
        counts = {"model_count": len(models), "loaded_count": len(self.names()), "load_seconds_per_gb_estimate": 0.4}
        memory = {"final_ceiling": self.ceiling, "current_model_memory": self._used()}
        return web.json_response(memory | counts | {"models": models})

    async def _load(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        entry = self.entries.get(name)
        if entry is None:
            return _error(404, f"Model not found: {name}", "not_found_error")
        if entry.loaded:
            return web.json_response({"status": "ok", "model_id": name, "message": f"Already loaded: {name}"})
        if self._used() + entry.size > self.ceiling:
            text = f"Model '{name}' does not fit under the static memory ceiling. Raise memory_guard_tier."
            return _error(507, text, "server_error")
        entry.loaded = True
        return web.json_response({"status": "ok", "model_id": name, "message": f"Loaded {name}"})

    async def _unload(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        entry = self.entries.get(name)
        if entry is None:
            return _error(404, f"Model not found: {name}", "not_found_error")
        if not entry.loaded:
            return _error(400, f"Model not loaded: {name}", "invalid_request_error")
        entry.loaded = False
        self.sick.discard(name)
        self.end_hang(name)
        return web.json_response({"status": "ok", "model_id": name})

    async def _chat(self, request: web.Request) -> web.Response:
        name = (await request.json())["model"]
        if name not in self.entries:
            return _error(404, f"Model '{name}' not found.", "not_found_error")
        self.entries[name].loaded = True
        if event := self.hung.get(name):
            await event.wait()
            if request.transport:
                request.transport.close()
        if name in self.sick:
            return web.json_response(_SICK_ANSWER, status=500)
        return web.json_response(_completion(name))

    async def _activity(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "status": "ok",
                "version": "0.7.0",
                "models_discovered": len(self.entries),
                "models_loaded": len(self.names()),
                "active_requests": self.active_requests,
                "waiting_requests": 0,
                "model_memory_used": self._used(),
                "model_memory_max": self.ceiling,
            }
        )

    async def _login(self, request: web.Request) -> web.Response:
        if self.api_key is None:
            return web.json_response({"detail": "No API key is set"}, status=400)
        if (await request.json())["api_key"] != self.api_key:
            return web.json_response({"detail": "Invalid API key"}, status=401)
        session = f"session-{len(self.sessions)}"
        self.sessions.add(session)
        response = web.json_response({"success": True})
        response.set_cookie(_COOKIE, session, httponly=True)
        return response

    async def _reload(self, _: web.Request) -> web.Response:
        self._discover()
        message = f"Re-discovered {len(self.entries)} models from 1 directory"
        return web.json_response({"status": "ok", "message": message})

    async def _set(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name not in self.entries:
            return web.json_response({"detail": f"Model not found: {name}"}, status=404)
        settings = self.entries[name].settings
        settings.update(await request.json())
        return web.json_response({"success": True, "settings": settings, "requires_reload": False})


def write_program(folder: Path) -> None:
    """Write a program `omlx` that is the stand-in, with its folder and port in oMLX's variables, until SIGTERM."""
    folder.mkdir()
    program = folder / "omlx"
    program.write_text(f"#!/bin/sh\nPYTHONPATH='{CHECKOUT}' exec '{sys.executable}' -m {__name__} \"$@\"\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


async def _run(base: Path, port: int) -> None:
    """Be an oMLX until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with OmlxStandIn(port, base):
        await ended.wait()


def _error(status: int, message: str, kind: str) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": None}
    return web.json_response({"error": error}, status=status)


def _completion(model: str) -> dict[str, object]:
    """Return a completion of one token in OpenAI's form."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1763629200,
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    }


if __name__ == "__main__":
    asyncio.run(_run(Path(os.environ["OMLX_BASE_PATH"]), int(os.environ["OMLX_PORT"])))
