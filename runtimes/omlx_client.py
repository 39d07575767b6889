"""oMLX: MLX models in the daemon that the owner of this machine runs.

oMLX serves the folders below its model directory, so a model of ours is a link in that directory, to the weights in our
own store. oMLX looks for new folders only during a reload, and a reload unloads everything: so the agent requests a
reload only while no model of the owner is loaded and no request is running. Our models are pinned, that is, they stay
until we unload them, and oMLX loads them again by itself when it restarts.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from crds.serving import RuntimeName
from crds.size import size_text
from devices.sockets import LOOPBACK
from runtimes.daemon import NOT_RUNNING, SILENT, UNAUTHORIZED, UNKNOWN_MODEL, DaemonError, OnProgress
from runtimes.omlx import is_installed
from runtimes.serving import Serving

DEFAULT_PORT: Final = 8000
_START_HINT: Final = "start it with `brew services start omlx` or `omlx serve`, or open the oMLX app"
T = TypeVar("T")

_QUERY_TIMEOUT: Final = aiohttp.ClientTimeout(total=10, sock_connect=2)
_NO_LIMIT: Final = aiohttp.ClientTimeout(total=None, sock_connect=2)
_COOKIE: Final = "omlx_admin_session"
_QUOTED_CHARACTERS: Final = 400
_PINNED: Final = {"is_pinned": True, "ttl_seconds": None}
_RELEASED: Final = {"is_pinned": False, "max_context_window": None}


class _Server(msgspec.Struct):
    port: int | None = None


class _Folders(msgspec.Struct):
    model_dirs: list[str] = []
    model_dir: str | None = None


class _Auth(msgspec.Struct):
    api_key: str | None = None


class _Settings(msgspec.Struct):
    """The part of oMLX's settings.json that we read."""

    server: _Server = msgspec.field(default_factory=_Server)
    model: _Folders = msgspec.field(default_factory=_Folders)
    auth: _Auth = msgspec.field(default_factory=_Auth)


class _Entry(msgspec.Struct):
    id: str
    loaded: bool = False
    actual_size: int | None = None
    estimated_size: int | None = None


class _Status(msgspec.Struct):
    models: list[_Entry] = []
    final_ceiling: int | None = None
    current_model_memory: int | None = None


class _Activity(msgspec.Struct):
    active_requests: int = 0
    waiting_requests: int = 0


class Omlx:
    """The oMLX of this machine: a `Daemon`."""

    runtime: RuntimeName = "omlx"
    serve_command: tuple[str, ...] = ("omlx", "serve")
    copies = False

    def __init__(self, environment: Mapping[str, str] = os.environ, home: Path | None = None) -> None:
        self._environment = environment
        # oMLX's own folder, with its settings.
        self._base = _find_base(environment, home or Path.home())
        port_text = environment.get("OMLX_PORT", "")
        port = int(port_text) if port_text.isdecimal() else (self._read_settings().server.port or DEFAULT_PORT)
        self.url = f"http://{LOOPBACK}:{port}"
        self.serve_address = {"OMLX_HOST": LOOPBACK, "OMLX_PORT": str(port)}
        self._session: aiohttp.ClientSession | None = None
        # Cookie of a login as administrator; empty: not logged in.
        self._admin_session = ""

    @property
    def api_key(self) -> str | None:
        """The owner's present key: OMLX_API_KEY of the agent's environment, or the key in oMLX's settings."""
        return self._environment.get("OMLX_API_KEY") or self._read_settings().auth.api_key or None

    def installed(self) -> bool:
        """Return whether oMLX is installed here, or OMLX_PORT is set."""
        return is_installed(self._environment)

    def build_name(self, owner: str, model: str, content: str) -> str:
        """Return the name of a folder; oMLX recognizes rerankers and embedding models by the words in this name."""
        return f"{owner}-{model}-{content}"

    async def list_loaded(self) -> list[tuple[str, int | None]]:
        """List the models in memory, by /v1/models/status."""
        models = (await self._read_status()).models
        return [(model.id, model.actual_size or model.estimated_size) for model in models if model.loaded]

    def identify_content(self, name: str) -> str:
        """Return the name: oMLX loads the weights of each folder, also those that another folder links to."""
        return name

    async def add_model(self, name: str, serving: Serving, on_progress: OnProgress) -> None:
        """Link the weights into oMLX's model directory, reload if needed, pin the model and set its context length."""
        self._make_link(name, Path(serving.model))
        on_progress(0, None)
        if not await self._lists_model(name):
            await self._reload_models(name)
            if not await self._lists_model(name):
                raise DaemonError(
                    UNKNOWN_MODEL,
                    f"oMLX does not find {name} in {self._find_folder()}: see that this is its model directory, and "
                    f"that {serving.model} has a config.json and safetensors",
                )
        # Pinned: oMLX keeps the model until we unload it, and loads it again when it restarts.
        settings = _PINNED | {"max_context_window": serving.options.context_tokens}
        await self._call_admin("PUT", f"/admin/api/models/{name}/settings", settings, f"pin {name}")

    async def load(self, name: str) -> None:
        """Load the model; return when it is in memory."""
        status, answer = await self._send_request("POST", f"/v1/models/{name}/load", f"load {name}", is_slow=True)
        if status == HTTPStatus.INSUFFICIENT_STORAGE:
            raise DaemonError("InsufficientMemory", _describe_shortage(name, answer, await self._read_status()))
        # Reasons by status; any other is a refusal.
        reasons: dict[int, str] = {HTTPStatus.NOT_FOUND: UNKNOWN_MODEL, HTTPStatus.CONFLICT: "DaemonBusy"}
        self._raise_unless_ok(status, answer, f"load {name}", reasons.get(status, "DaemonRefused"))

    async def unload(self, name: str) -> None:
        """Unload the model at once; running requests are aborted, so drain first."""
        status, answer = await self._send_request("POST", f"/v1/models/{name}/unload", f"unload {name}")
        if status not in {HTTPStatus.NOT_FOUND, HTTPStatus.BAD_REQUEST}:
            self._raise_unless_ok(status, answer, f"unload {name}")

    async def list_marked(self, owner: str) -> set[str]:
        """Return the names of our links, and of our loaded models without a link."""
        with self._translate_folder_errors():
            links = {path.name for path in self._find_folder().glob(f"{owner}-*")}
        return links | {name for name, _ in await self.list_loaded() if name.startswith(f"{owner}-")}

    async def remove(self, name: str) -> None:
        """Unload the model, unpin it so that oMLX does not load it at start, and remove the link, never the weights."""
        await self.unload(name)
        if await self._lists_model(name):
            await self._call_admin("PUT", f"/admin/api/models/{name}/settings", _RELEASED, f"unpin {name}")
        link = self._find_folder() / name
        with self._translate_folder_errors():
            if link.is_symlink():
                link.unlink(missing_ok=True)

    async def close(self) -> None:
        """Close connections."""
        if self._session:
            await self._session.close()
        self._session = None

    def _read_settings(self) -> _Settings:
        """Read oMLX's settings file; return oMLX's own defaults if it cannot be read."""
        try:
            return msgspec.json.decode((self._base / "settings.json").read_bytes(), type=_Settings)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return _Settings()

    def _find_folder(self) -> Path:
        """Return the first of oMLX's model directories, by the environment, its settings or its default."""
        model = self._read_settings().model
        folders = [*self._environment.get("OMLX_MODEL_DIR", "").split(","), *model.model_dirs, model.model_dir or ""]
        first = next((folder for folder in folders if folder), None)
        return Path(first).expanduser() if first else self._base / "models"

    def _make_link(self, name: str, weights: Path) -> None:
        """Link the weights into oMLX's model directory."""
        link = self._find_folder() / name
        with self._translate_folder_errors():
            if not link.is_symlink() or link.readlink() != weights:
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(weights, target_is_directory=True)

    @contextlib.contextmanager
    def _translate_folder_errors(self) -> Iterator[None]:
        """Raise every OSError of the block as a DaemonError."""
        try:
            yield
        except OSError as error:
            message = f"cannot use oMLX's model directory {self._find_folder()}: {error}"
            raise DaemonError("ModelFolder", message) from error

    async def _read_status(self) -> _Status:
        """Return the models that oMLX lists, and its memory."""
        return await self._get_answer("/v1/models/status", "say what is loaded", _Status)

    async def _lists_model(self, name: str) -> bool:
        """Return whether oMLX has found the folder of a model."""
        return name in {model.id for model in (await self._read_status()).models}

    async def _reload_models(self, name: str) -> None:
        """Make oMLX look for new folders, which unloads all models; refuse that if it would disturb the owner.

        Raises DaemonError.
        """
        # Names of our models begin with pomona-; all others are the owner's.
        owners_models = [model for model, _ in await self.list_loaded() if not model.startswith("pomona-")]
        if owners_models:
            raise DaemonError(
                "OwnersModelsLoaded",
                f"oMLX finds {name} only by a reload, which would unload the models of its owner "
                f"({', '.join(sorted(owners_models))}): unload them, or restart oMLX",
            )

        activity = await self._get_answer("/api/status", "say what it answers", _Activity)
        if activity.active_requests or activity.waiting_requests:
            raise DaemonError("DaemonBusy", f"oMLX finds {name} only by a reload, which waits until it has no requests")
        await self._call_admin("POST", "/admin/api/reload", None, "look for new models")

    async def _call_admin(self, method: str, path: str, body: dict[str, Any] | None, what: str) -> None:
        """Call an endpoint for administrators, and log in with the key if oMLX requires it."""
        status, answer = await self._send_request(method, path, what, body, is_slow=True)
        if status == HTTPStatus.UNAUTHORIZED:
            await self._log_in()
            status, answer = await self._send_request(method, path, what, body, is_slow=True)
        self._raise_unless_ok(status, answer, what)

    async def _log_in(self) -> None:
        """Log in as administrator with the API key. Raises DaemonError."""
        key = self.api_key
        if key is None:
            raise DaemonError(
                UNAUTHORIZED,
                "oMLX lets only its administrator add models, and has no API key to log in with: set one in its "
                "settings and restart it",
            )
        with self._translate_errors("log in"):
            url = f"{self.url}/admin/api/login"
            async with self._get_session().post(url, json={"api_key": key}, timeout=_QUERY_TIMEOUT) as response:
                answer = await response.read()
                self._raise_unless_ok(response.status, answer, "log in", UNAUTHORIZED)
                self._admin_session = response.cookies[_COOKIE].value if _COOKIE in response.cookies else ""

    async def _send_request(
        self, method: str, path: str, what: str, body: dict[str, Any] | None = None, *, is_slow: bool = False
    ) -> tuple[int, bytes]:
        """Send a request, and return status and body; if `is_slow`, the answer has no time limit."""
        timeout = _NO_LIMIT if is_slow else _QUERY_TIMEOUT
        headers = {}
        if key := self.api_key:
            headers["Authorization"] = f"Bearer {key}"
        if self._admin_session and path.startswith("/admin/"):
            headers["Cookie"] = f"{_COOKIE}={self._admin_session}"
        with self._translate_errors(what):
            async with self._get_session().request(
                method, f"{self.url}{path}", json=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await response.read()

    def _raise_unless_ok(self, status: int, answer: bytes, what: str, reason: str = "DaemonRefused") -> None:
        """Raise DaemonError if the status of an answer is an error."""
        if status in {HTTPStatus.OK, HTTPStatus.ACCEPTED}:
            return
        if status == HTTPStatus.UNAUTHORIZED:
            raise DaemonError(
                UNAUTHORIZED,
                f"oMLX at {self.url} does not take the agent's key: set OMLX_API_KEY for the agent to oMLX's own, or "
                f"let it read {self._base / 'settings.json'}",
            )
        # Whatever reason the caller gives: a later attempt may succeed.
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            reason = "DaemonBusy"
        raise DaemonError(reason, f"oMLX at {self.url} did not {what} ({status}): {_quote_error(answer)}")

    async def _get_answer(self, path: str, what: str, kind: type[T]) -> T:
        """Return the answer of a GET."""
        status, answer = await self._send_request("GET", path, what)
        self._raise_unless_ok(status, answer, what)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DaemonError("DaemonRefused", f"{self.url} does not answer as oMLX does: {error}") from error

    def _get_session(self) -> aiohttp.ClientSession:
        """Return the session, which keeps no cookies."""
        if self._session is None:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    @contextlib.contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Raise every error of the block as a DaemonError; `what` ends its message: "oMLX did not ..."."""
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise DaemonError(NOT_RUNNING, f"no oMLX answers at {self.url}: {_START_HINT}") from error
        except (aiohttp.ClientError, OSError) as error:
            text = str(error) or type(error).__name__
            raise DaemonError(SILENT, f"oMLX at {self.url} did not {what}: {text}") from error


def _find_base(environment: Mapping[str, str], home: Path) -> Path:
    """Find oMLX's own folder as oMLX does: by the environment, the setting of its app, or ~/.omlx."""
    if stated := environment.get("OMLX_BASE_PATH"):
        return Path(stated).expanduser()
    try:
        base = (home / "Library" / "Application Support" / "oMLX" / "base-path").read_text().strip()
    except (OSError, UnicodeDecodeError):
        base = ""
    return Path(base).expanduser() if base else home / ".omlx"


def _quote_error(answer: bytes) -> str:
    """Return the message of an error in either form that oMLX's versions use, so that no JSON is quoted."""
    try:
        body = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = None
    error = body.get("error", body.get("detail")) if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return str(text or answer.decode(errors="replace")).strip()[:_QUOTED_CHARACTERS] or "an empty answer"


def _describe_shortage(name: str, answer: bytes, status: _Status) -> str:
    """Return the message that oMLX lacks memory, with the way out."""
    use = ""
    if status.final_ceiling is not None and status.current_model_memory is not None:
        use = f" It uses {size_text(status.current_model_memory)} of its limit of {size_text(status.final_ceiling)}."
    return (
        f"oMLX has no memory for {name}: {_quote_error(answer)}.{use} Unload something in oMLX, raise its memory limit "
        "(`omlx serve --memory-guard aggressive`, or its settings), or serve a smaller model or quantization"
    )
