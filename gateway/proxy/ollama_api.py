"""Ollama's API at the router of one machine: what is served, what is loaded, and the paths that change it.

Requests for inference are in `ollama_request`. What makes models of others' weights is refused in words: models here
are files and YAML of the user.
"""

import contextlib
import hashlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import msgspec

from gateway.dialects.ollama.answer_lines import JSON_FIELDS, NDJSON_FIELDS, render_error
from gateway.dialects.ollama.request_fields import OllamaFields, read_short_fields
from gateway.http.awaited_exchange import AwaitedExchange
from gateway.http.exchange import BodyTimeoutError, Exchange, RequestReceiver
from gateway.http.request_head import InvalidRequestError
from gateway.proxy import errors, paths
from gateway.proxy.config import ServedModelFacts, ServiceListener
from gateway.proxy.errors import RequestError
from gateway.proxy.inference_request import SharedResources
from gateway.proxy.model_control import ModelControl, PullProgress
from gateway.proxy.ollama_request import OllamaRequest, find_ollama_model, find_service
from gateway.proxy.request_record import log_refusal
from gateway.proxy.router import Router
from gateway.proxy.service import RequestedModel, Service

VERSION: Final = "0.17.4"
"""The version of Ollama whose forms these are: clients refuse older ones."""

_BODY_LIMIT_BYTES: Final = 256 << 10
_RUNNING: Final = b"Ollama is running"
_TEXT_FIELDS: Final = b"Content-Type: text/plain; charset=utf-8\r\n"
_NEVER: Final = "2318-01-01T00:00:00Z"
"""When a model is unloaded that stays: Ollama's own answer is a time in that year."""
_UNITS: Final = ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0))
_REFUSED: Final[Mapping[str, str]] = {
    "/api/create": "a model is a file or a Model in YAML here: serve it with `pomona up`",
    "/api/copy": "give a service the other name in the YAML of `pomona up`",
    "/api/push": "models are not published from here",
    "/api/blobs": "a model is a file or a Model in YAML here: serve it with `pomona up`",
}
"""Paths that are refused, with the way out."""

Answer = Callable[[AwaitedExchange, OllamaFields, Router], Awaitable[None]]


class OllamaApi:
    """Ollama's API for the services of a router; `control` loads, pulls and deletes models."""

    def __init__(self, shared: SharedResources, control: ModelControl) -> None:
        self._shared = shared
        self._control = control
        self._shown: Mapping[str, Callable[[Router], object]] = {
            "/api/version": lambda _: {"version": VERSION},
            "/api/tags": lambda router: {"models": [_describe(*each) for each in router.services().items()]},
            "/api/ps": lambda router: {"models": list(_describe_loaded(router))},
        }
        self._changes: Mapping[str, tuple[str, Answer]] = {
            "/api/show": ("POST", self._show),
            "/api/pull": ("POST", self._pull),
            "/api/delete": ("DELETE", self._delete),
        }

    def serves(self, path: str) -> bool:
        """Return whether a path is of this API."""
        return path == "/" or path.startswith(paths.OLLAMA_PREFIX)

    def begin(self, exchange: Exchange, router: Router) -> RequestReceiver | None:
        """Begin the work on a request of an authorized client; return its receiver, None if the response was sent.

        Raises RequestError.
        """
        method, path = exchange.head.method, exchange.head.path
        if path == "/" or path in self._shown:
            if method not in ("GET", "HEAD"):
                raise errors.method_not_allowed(method, path, "GET")
            if path == "/":
                exchange.respond(HTTPStatus.OK, _TEXT_FIELDS, _RUNNING)
            else:
                exchange.respond(HTTPStatus.OK, JSON_FIELDS, msgspec.json.encode(self._shown[path](router)))
            return None
        if label := paths.OLLAMA_INFERENCE.get(path):
            if method != "POST":
                raise errors.method_not_allowed(method, path, "POST")
            return OllamaRequest(exchange, label, router, self._shared, self._control)
        if path in self._changes:
            stated, answer = self._changes[path]
            if method != stated:
                raise errors.method_not_allowed(method, path, stated)
            return AwaitedExchange(exchange, lambda call: _answer(call, router, answer))
        for refused, way in _REFUSED.items():
            if path == refused or path.startswith(f"{refused}/"):
                message = f"{refused} is not supported here: {way}"
                raise RequestError(HTTPStatus.NOT_IMPLEMENTED, "unsupported_path", message)
        raise errors.unknown_url(path)

    async def _show(self, call: AwaitedExchange, fields: OllamaFields, router: Router) -> None:
        """Answer with all that is known of a model."""
        name, model = find_ollama_model(router, fields.model)
        service = find_service(model)
        facts = _find_facts(service)
        architecture = facts.architecture or "unknown"
        sizes = {
            "context_length": facts.context_length,
            "embedding_length": facts.embedding_size,
            "block_count": facts.layer_count,
            "attention.head_count": facts.head_count,
            "attention.head_count_kv": facts.head_count_kv,
        }
        info: dict[str, Any] = {"general.architecture": architecture}
        if facts.parameter_count:
            info["general.parameter_count"] = facts.parameter_count
        info |= {f"{architecture}.{key}": value for key, value in sizes.items() if value}
        answer: dict[str, Any] = {"license": facts.license} if facts.license else {}
        answer |= {
            "modelfile": f"# {name} is served by Pomona, and has no Modelfile\nFROM {facts.source or name}\n",
            "details": _describe_details(facts),
            "model_info": info,
            "capabilities": list(facts.capabilities) or ["completion"],
            "modified_at": _render_time(model.created),
        }
        call.exchange.respond(HTTPStatus.OK, JSON_FIELDS, msgspec.json.encode(answer))

    async def _pull(self, call: AwaitedExchange, fields: OllamaFields, router: Router) -> None:
        """Answer with the progress of a pull: of a model that is served, all of it at once."""
        exchange, streams = call.exchange, fields.read("stream", bool, default=True)
        async with contextlib.aclosing(self._begin_pull(fields.model, router)) as progress:
            if not streams:
                steps = [step async for step in progress]
                exchange.respond(HTTPStatus.OK, JSON_FIELDS, msgspec.json.encode(steps[-1]))
                return
            exchange.start(HTTPStatus.OK, NDJSON_FIELDS)
            try:
                async for step in progress:
                    exchange.write(_render_line(step))
                    await call.drain()
            except RequestError as error:
                exchange.finish(render_error(str(error)) + b"\n")
            else:
                exchange.finish()

    async def _begin_pull(self, name: str, router: Router) -> AsyncGenerator[PullProgress, None]:
        """Yield the lines of a pull. Raises RequestError."""
        yield PullProgress("pulling manifest")
        try:
            served, model = find_ollama_model(router, name)
        except RequestError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            steps = self._control.pull(name)
        else:
            steps = _pull_served(served, _find_facts(find_service(model)))
        async with contextlib.aclosing(steps):
            async for step in steps:
                yield step

    async def _delete(self, call: AwaitedExchange, fields: OllamaFields, router: Router) -> None:
        """Delete a model."""
        name, _ = find_ollama_model(router, fields.model)
        await self._control.delete(name)
        call.exchange.respond(HTTPStatus.OK, b"", b"")


async def _answer(call: AwaitedExchange, router: Router, answer: Answer) -> None:
    """Read the body of a request and answer it, or refuse it with the status of a RequestError."""
    exchange = call.exchange
    try:
        content = bytearray()
        while piece := await call.read():
            content += piece
            if len(content) > _BODY_LIMIT_BYTES:
                raise errors.request_too_large(_BODY_LIMIT_BYTES)
        await answer(call, read_short_fields(content), router)
    except BodyTimeoutError:
        _refuse(exchange, router, errors.request_timeout())
    except InvalidRequestError as error:
        _refuse(exchange, router, errors.invalid_http(HTTPStatus.BAD_REQUEST, str(error)))
    except RequestError as error:
        _refuse(exchange, router, error)


def _refuse(exchange: Exchange, router: Router, error: RequestError) -> None:
    route = paths.route_name(exchange.head.path)
    log_refusal(router, route, error)
    exchange.respond(error.status, error.fields(), error.encode_body(route))


async def _pull_served(name: str, facts: ServedModelFacts) -> AsyncGenerator[PullProgress, None]:
    """Yield the lines of the pull of a model whose weights are there."""
    digest = _find_digest(name, facts)
    yield PullProgress(f"pulling {digest[:12]}", f"sha256:{digest}", facts.size_bytes, facts.size_bytes)
    for status in ("verifying sha256 digest", "writing manifest", "success"):
        yield PullProgress(status)


def _render_line(step: PullProgress) -> bytes:
    return msgspec.json.encode(step) + b"\n"


def _find_facts(service: Service) -> ServedModelFacts:
    """Return the facts of a service's model; empty ones if they are not known yet."""
    config = service.config
    return (config.facts if isinstance(config, ServiceListener) else None) or ServedModelFacts()


def _find_digest(name: str, facts: ServedModelFacts) -> str:
    """Return the digest of a model; before it is known, one of its name, for clients cut it to its first letters."""
    return facts.digest or hashlib.sha256(name.encode()).hexdigest()


def _describe(name: str, model: RequestedModel) -> dict[str, Any]:
    """Return the entry of a model in the list; it has a tag, as clients expect of each name."""
    facts = _find_facts(find_service(model))
    tagged = name if ":" in name else f"{name}:latest"
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _render_time(model.created),
        "size": facts.size_bytes,
        "digest": _find_digest(name, facts),
        "details": _describe_details(facts),
    }


def _describe_loaded(router: Router) -> list[dict[str, Any]]:
    """Return the entries of the models that are loaded."""
    services = router.services()
    loaded: list[dict[str, Any]] = []
    for name in router.listed_names():
        service = find_service(services[name])
        if service.is_asleep:
            continue
        facts = _find_facts(service)
        entry = _describe(name, services[name])
        del entry["modified_at"]
        entry["size"] = facts.memory_bytes or facts.size_bytes
        entry |= {"size_vram": facts.device_bytes, "context_length": facts.context_length}
        entry["expires_at"] = _find_expiry(service, facts)
        loaded.append(entry)
    return loaded


def _find_expiry(service: Service, facts: ServedModelFacts) -> str:
    """Return the time at which a loaded model is unloaded, if no request comes."""
    limit_seconds = facts.idle_limit_seconds
    if limit_seconds is not None and service.keep_alive_seconds is not None:
        limit_seconds = service.keep_alive_seconds
    if limit_seconds is None or limit_seconds == math.inf:
        return _NEVER
    return _render_time(int(time.time() + limit_seconds - (service.idle_seconds or 0.0)))


def _describe_details(facts: ServedModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": facts.format,
        "family": facts.architecture,
        "families": [facts.architecture] if facts.architecture else [],
        "parameter_size": _render_number(facts.parameter_count),
        "quantization_level": facts.quantization or "unknown",
    }


def _render_number(number: int) -> str:
    """Return a number of parameters as Ollama writes it, such as 8.0B; empty: it is not known."""
    for unit, letter, decimals in _UNITS:
        if number >= unit:
            return f"{number / unit:.{0 if number % unit == 0 else decimals}f}{letter}"
    return str(number) if number else ""


def _render_time(unix_seconds: int) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat().replace("+00:00", "Z")
