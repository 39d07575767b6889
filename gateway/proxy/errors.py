"""Errors in OpenAI's form: clients' libraries raise the right exception from these, whatever stands behind.

Engines have forms of their own: llama.cpp numbers as codes, mlx_lm and Ollama a bare text, oMLX the details of FastAPI.
"""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from gateway.proxy import routes

_LONGEST_TEXT = 2000
_CODES = {"exceed_context_size_error": "context_length_exceeded"}
"""Engines' own words for what OpenAI's clients look for by name."""
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class Error(msgspec.Struct, frozen=True):
    """What OpenAI's clients read."""

    message: str
    type: str
    param: str | None
    code: str


class _Body(msgspec.Struct):
    error: Error


def unauthorized(service: str) -> web.Response:
    """401: no bearer token, or not the service's."""
    return answer(
        HTTPStatus.UNAUTHORIZED,
        "invalid_api_key",
        f"{service} wants its bearer token; a service's is in the Secret <service>-token under the key `token`",
        {"WWW-Authenticate": "Bearer"},
    )


def forbidden() -> web.Response:
    """403: a web page, or somebody who calls this machine by another name, at a router without a token."""
    return answer(
        HTTPStatus.FORBIDDEN,
        "foreign_origin",
        "without a token this serves programs on this machine that call it localhost or 127.0.0.1, and no web pages",
    )


def bad_request(message: str) -> web.Response:
    """400: a request that no server could mean."""
    return answer(HTTPStatus.BAD_REQUEST, "bad_request", message)


def unknown_path(path: str) -> web.Response:
    """404: not one of the paths that are served."""
    return answer(
        HTTPStatus.NOT_FOUND, "unknown_url", f"{path[:_LONGEST_TEXT]} is not served here: use {routes.LISTED}"
    )


def wrong_method(method: str, path: str, allowed: str) -> web.Response:
    """405: a path that is served, asked in another way."""
    message = f"{path} takes {allowed}, not {method}"
    return answer(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", message, {"Allow": allowed})


def no_model(known: Iterable[str]) -> web.Response:
    """400: a request to the router that does not say whom it is for."""
    message = f"the request names no model; these are served: {', '.join(sorted(known)) or 'none'}"
    return answer(HTTPStatus.BAD_REQUEST, "missing_model", message, param="model")


def unknown_model(model: str, known: Iterable[str]) -> web.Response:
    """404: nothing is served by that name."""
    listed = ", ".join(sorted(known)) or "none"
    message = f"the model {model[:_LONGEST_TEXT]!r} is not served here; these are: {listed}"
    return answer(HTTPStatus.NOT_FOUND, "model_not_found", message, param="model")


def too_large(limit_bytes: int) -> web.Response:
    """413: a body over the limit."""
    message = f"the request body is over {limit_bytes} bytes"
    return answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "request_too_large", message)


def too_slow(seconds: float) -> web.Response:
    """408: a body whose next part did not arrive."""
    return answer(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", f"nothing of the request came for {seconds:g} s")


def compressed(encoding: str) -> web.Response:
    """415: a body that would have to be unpacked before it can be read."""
    message = f"Content-Encoding {encoding[:_LONGEST_TEXT]!r} is not taken: send the request body uncompressed"
    return answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_encoding", message)


def too_many(service: str, retry_seconds: int) -> web.Response:
    """429: the queue is full."""
    return answer(
        HTTPStatus.TOO_MANY_REQUESTS,
        "queue_full",
        f"service {service} works on all that it can, and its queue is full: try again later",
        {"Retry-After": str(retry_seconds)},
    )


def too_busy() -> web.Response:
    """503: the bodies of other requests have the memory that there is for them."""
    return answer(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "too_busy",
        "this host holds too many large requests that wait for an engine: try again later, or send smaller ones",
        {"Retry-After": "1"},
    )


def bad_gateway(service: str) -> web.Response:
    """502: the server took the request and broke off before it answered. It may have worked on it: not repeated."""
    return answer(HTTPStatus.BAD_GATEWAY, "upstream_failed", f"service {service}: its server broke off the request")


def unavailable(service: str) -> web.Response:
    """503: no server takes requests now; worth asking again soon."""
    return answer(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "service_unavailable",
        f"service {service} has no server that takes requests now",
        {"Retry-After": "1"},
    )


def of_engine(status: int, body: bytes, service: str) -> tuple[int, bytes]:
    """Say in OpenAI's form what an engine said in its own, and under which status."""
    message, kind, code, param = _said(body)
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        # The client's token was right: it is ours for the engine that is not.
        status = HTTPStatus.BAD_GATEWAY
        message = f"service {service}: its engine refuses the proxy ({message})"
    elif status < HTTPStatus.BAD_REQUEST:
        status = HTTPStatus.BAD_GATEWAY  # wherever it sends, nobody may follow
    elif status == HTTPStatus.NOT_IMPLEMENTED:
        # No failure of a server, which clients would repeat: this one serves something else.
        status = HTTPStatus.BAD_REQUEST
        message = f"service {service} does not serve this: its spec.mode is another one ({message})"
    if kind in _CODES:
        code, kind = _CODES[kind], ""
    elif kind and not code:
        code = kind
    error = Error(
        message=message or f"service {service}: its engine answered {status} and no reason",
        type=_kind(status),
        param=param,
        code=code or "engine_error",
    )
    return status, msgspec.json.encode(_Body(error))


def answer(
    status: HTTPStatus, code: str, message: str, headers: dict[str, str] | None = None, *, param: str | None = None
) -> web.Response:
    """Build an error of our own."""
    body = msgspec.json.encode(_Body(Error(message=message, type=_kind(status), param=param, code=code)))
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")


def _kind(status: int) -> str:
    other = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return _TYPES.get(HTTPStatus(status), other) if status in _STATUSES else other


_STATUSES = frozenset(HTTPStatus)


def _said(body: bytes) -> tuple[str, str, str, str | None]:
    """Find message, type, code and parameter in an engine's error."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.decode(errors="replace").strip()[:_LONGEST_TEXT], "", "", None
    if not isinstance(said, dict):
        return str(said)[:_LONGEST_TEXT], "", "", None
    error = said.get("error", said)
    if not isinstance(error, dict):
        return str(error), "", "", None
    message = error.get("message") or _detail(error.get("detail"))
    return str(message or ""), _text(error.get("type")), _text(error.get("code")), _text(error.get("param")) or None


def _text(value: Any) -> str:
    # A number as code repeats the status.
    return value if isinstance(value, str) else ""


def _detail(detail: Any) -> str:
    """Read FastAPI's details: a text, or what is wrong with which field."""
    if not isinstance(detail, list):
        return str(detail or "")
    problems = [problem for problem in detail if isinstance(problem, dict)]
    return "; ".join(
        f"{'.'.join(str(part) for part in problem.get('loc', []))}: {problem.get('msg', '')}" for problem in problems
    )
