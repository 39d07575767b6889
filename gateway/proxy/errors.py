"""Errors in OpenAI's form, so that clients' libraries raise the right exception with every engine.

Engines use other forms: llama.cpp sends numbers as codes, mlx_lm and Ollama a plain text, oMLX FastAPI's details.
"""

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Final

import msgspec

from crds.modelroute import Cause
from gateway.http.headers import remove_port
from gateway.proxy import paths
from gateway.proxy.config import HOST_PATTERN, ORIGIN_PATTERN
from runtimes.engine_errors import judge_error, read_error
from runtimes.registry import find_runtime

_LONGEST_TEXT = 2000
_MOST_NAMED = 20
"""Models that an error names."""
_CONTEXT_EXCEEDED: Final = "context_length_exceeded"
_RETRY_PROBLEM_SECONDS: Final = 30
"""Problems of an engine that are known take a while, or a person."""
_CODES = {"exceed_context_size_error": _CONTEXT_EXCEEDED}
"""Error types of engines, with the code that OpenAI's clients look for."""
_SEND_LESS: Final = ": send less, or set spec.contextLength of the InferenceService"
"""End of messages about more tokens than the context has; a gateway recognises that of a proxy by it."""
_CAUSES: Final[Mapping[int, Cause]] = {
    HTTPStatus.TOO_MANY_REQUESTS: "NoCapacity",
    HTTPStatus.BAD_GATEWAY: "Unavailable",
    HTTPStatus.SERVICE_UNAVAILABLE: "Unavailable",
}
_UNKNOWN_PATHS = frozenset({"File Not Found", "Not Found", "404 page not found", ""})
"""Messages about an unknown path: of llama.cpp, of mlx-lm and all that uses FastAPI, of Ollama, and of TGI."""
_TOO_LONG: Final = (
    *("This model's maximum context length is", "max_tokens=", "Input validation error: `inputs` "),
    *("Requested token count exceeds the model's maximum context length", "The input ("),
)
"""Begins of messages about more tokens than the context has: of vLLM (twice) and llama-cpp-python, TGI and SGLang."""
_TYPES: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_REFUSED_KEY: Final[Mapping[str, str]] = {"WWW-Authenticate": "Bearer", "x-should-retry": "false"}
"""Headers of 401. Without the second, Claude Code tries a wrong key again for minutes and says nothing meanwhile."""
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    **_TYPES,
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


class RequestError(Exception):
    """An error response in the form of the path's API: its status, its JSON body and its headers."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        param: str | None = None,
    ) -> None:
        """Render the body in OpenAI's form, whose `code` names the error, and `param` the field at fault, if any.

        Its type follows from the status: `_TYPES` has statuses with one of their own.
        """
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})
        error = {"message": message, "type": _error_type(status, _TYPES, "server_error"), "param": param, "code": code}
        self.body = msgspec.json.encode({"error": error})

    def encode_body(self, route: str) -> bytes:
        """Return the body in the form of Ollama's or Anthropic's API if `route`, a name of a path, is one of its.

        Any other path has OpenAI's form.
        """
        if route in paths.OLLAMA_ROUTES:
            return msgspec.json.encode({"error": str(self)})
        if route not in paths.ANTHROPIC_ROUTES:
            return self.body
        error = {"type": _error_type(self.status, _ANTHROPIC_TYPES, "api_error"), "message": str(self)}
        return msgspec.json.encode({"type": "error", "error": error})

    def fields(self) -> bytes:
        """Return the lines of the header fields of the response."""
        headers = {"Content-Type": "application/json", **self.headers}
        return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode(errors="surrogateescape")


# The proxy's own errors, each under the name of its code.


def invalid_api_key() -> RequestError:
    """401: no bearer token, or a wrong one. It names nothing, for whoever asks may not know what is served here."""
    message = "the bearer token is missing or wrong; a service's is in the Secret <service>-token under the key `token`"
    return RequestError(HTTPStatus.UNAUTHORIZED, "invalid_api_key", message, _REFUSED_KEY)


def invalid_gateway_key() -> RequestError:
    """401: no key, or one that admits nobody. It says nothing of keys that exist."""
    message = "the key is missing, wrong, suspended or expired: send a valid one as a bearer token or in X-Api-Key"
    return RequestError(HTTPStatus.UNAUTHORIZED, "invalid_api_key", message, _REFUSED_KEY)


def key_revoked(key: str) -> RequestError:
    """401, or in an event: the key of a running request admits nobody any more."""
    message = f"{key} was revoked, suspended or replaced, or has expired, before the answer ended: use a valid key"
    return RequestError(HTTPStatus.UNAUTHORIZED, "key_revoked", message, _REFUSED_KEY)


def invalid_router_key() -> RequestError:
    """401: no key, or one that is not in the file of `pomona up`."""
    message = (
        "the key is missing or wrong: send one of the file of `pomona up --api-key` as a bearer token or in X-Api-Key"
    )
    return RequestError(HTTPStatus.UNAUTHORIZED, "invalid_api_key", message, _REFUSED_KEY)


def foreign_origin(field: str, value: str) -> RequestError:
    """403: a web page, or a client that uses another name of this machine; `field` is Host or Origin.

    The value is named in an option only if it may be one, for people copy that.
    """
    stated = value.encode("ascii", "backslashreplace").decode()[:_LONGEST_TEXT]
    if field == "Host":
        host = remove_port(value).lower()
        allowed = host if re.fullmatch(HOST_PATTERN, host, re.ASCII) else "NAME"
        way = f"use localhost or 127.0.0.1, or start `pomona up` with --allow-host {allowed}, or with --api-key"
    elif re.fullmatch(ORIGIN_PATTERN, value, re.ASCII):
        way = f"start `pomona up` with --allow-origin {value}"
    else:
        way = "start `pomona up` with --api-key and --allow-origin '*'"
    message = f"the {field} {stated!r} is not served: {way}"
    return RequestError(HTTPStatus.FORBIDDEN, "foreign_origin", message)


def bad_request(message: str) -> RequestError:
    """400: a request that no engine could understand."""
    return RequestError(HTTPStatus.BAD_REQUEST, "bad_request", message)


def remote_media(medium: str) -> RequestError:
    """400: an image, a sound or a file that the engine would have to fetch."""
    message = f"{medium} is at a URL, which no engine may fetch: send it as a data: URL (data:image/png;base64,...)"
    return RequestError(HTTPStatus.BAD_REQUEST, "remote_media", message, param=medium)


def invalid_schema(field: str, problem: str) -> RequestError:
    """400: a schema, pattern or grammar that no engine can follow."""
    return RequestError(HTTPStatus.BAD_REQUEST, "invalid_schema", f"{field}: {problem}", param=field)


def dangerous_schema(service: str, problem: str) -> RequestError:
    """400: a schema by which the engine of the service would end, for all of its clients."""
    message = f"service {service}: {problem}: leave it out of the schema, or use a service of another engine"
    return RequestError(HTTPStatus.BAD_REQUEST, "invalid_schema", message)


def unknown_url(path: str) -> RequestError:
    """404: a path that is not served."""
    message = f"{path[:_LONGEST_TEXT]} is not served here: use {paths.SERVED}"
    return RequestError(HTTPStatus.NOT_FOUND, "unknown_url", message)


def unsupported_path(service: str, path: str, way: str, reason: str = "") -> RequestError:
    """400: a path that the engine of a service does not serve; `way` says what clients may do instead."""
    detail = f" ({reason})" if reason else ""
    message = f"service {service}: its engine does not serve {path}{detail}: {way}"
    return RequestError(HTTPStatus.BAD_REQUEST, "unsupported_path", message)


def method_not_allowed(method: str, path: str, allowed: str) -> RequestError:
    """405: a path that is served, with another method."""
    message = f"{path} does not take {method}: use {allowed}"
    return RequestError(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", message, {"Allow": allowed})


def websocket_not_served() -> RequestError:
    """426: a handshake for a WebSocket, after which clients go on with HTTP at once; no other status tells them so.

    The answer offers no protocol in its turn: HTTP/1.1, by which the client came, is all that there is.
    """
    message = "no WebSocket is served here: send the request by POST; with `stream` it is streamed"
    return RequestError(HTTPStatus.UPGRADE_REQUIRED, "websocket_not_served", message)


def missing_model(served: Iterable[str]) -> RequestError:
    """400: a request to the router without a model."""
    message = f"the request names no model: {_advise_model(served)}"
    return RequestError(HTTPStatus.BAD_REQUEST, "missing_model", message, param="model")


def model_not_found(model: str, served: Iterable[str]) -> RequestError:
    """404: a model that is not served."""
    message = f"the model {model[:_LONGEST_TEXT]!r} is not served here: {_advise_model(served)}"
    return RequestError(HTTPStatus.NOT_FOUND, "model_not_found", message, param="model")


def adapter_not_found(
    model: str, adapters: Iterable[str], reason: str = "requests choose no such adapter"
) -> RequestError:
    """404: the name of an adapter that requests do not choose; `adapters` are those of the service that they choose."""
    service = model.partition(":")[0][:_LONGEST_TEXT]
    ways = [service, *(f"{service}:{adapter}" for adapter in sorted(adapters))]
    message = f"the model {model[:_LONGEST_TEXT]!r} is not served here: {reason}: set `model` to {' or '.join(ways)}"
    return RequestError(HTTPStatus.NOT_FOUND, "model_not_found", message, param="model")


def unsupported_adapter_path(model: str, path: str, service: str) -> RequestError:
    """400: a path on which the engine of the service chooses no adapters."""
    message = f"{path} does not take the adapter of the model {model!r}: use /v1/chat/completions or /v1/responses, or"
    return RequestError(HTTPStatus.BAD_REQUEST, "unsupported_path", f"{message} set `model` to {service}")


def request_too_large(limit_bytes: int) -> RequestError:
    """413: a body over the limit."""
    message = f"the request body is larger than {limit_bytes} bytes"
    return RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "request_too_large", message)


def request_timeout() -> RequestError:
    """408: a body whose next piece did not arrive."""
    message = "the rest of the request body did not arrive in time"
    return RequestError(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", message)


def unsupported_encoding(encoding: str) -> RequestError:
    """415: a body in a coding that is not decoded, or in several."""
    stated = encoding[:_LONGEST_TEXT]
    message = f"Content-Encoding {stated!r} is not supported: send the request body with gzip or zstd, or uncompressed"
    accepted = {"Accept-Encoding": "gzip, zstd"}
    return RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_encoding", message, accepted)


def invalid_encoding(coding: str, reason: str) -> RequestError:
    """400: a body that cannot be decoded."""
    return bad_request(f"the request body is not the {coding} data that its Content-Encoding names: {reason}")


def queue_full(service: str, retry_seconds: int) -> RequestError:
    """429: the queue is full."""
    message = f"service {service}: all slots are busy and the queue is full: try again in {retry_seconds} s"
    return RequestError(HTTPStatus.TOO_MANY_REQUESTS, "queue_full", message, {"Retry-After": str(retry_seconds)})


def rate_limit_exceeded(limit: str, retry_seconds: int, headers: Mapping[str, str]) -> RequestError:
    """429: a limit that is used up, with its object, its field and its value; it admits more in `retry_seconds`."""
    message = f"{limit} is used up: try again in {retry_seconds} s"
    headers = {**headers, "Retry-After": str(retry_seconds)}
    return RequestError(HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_exceeded", message, headers)


def request_over_limit(limit: str, tokens: int) -> RequestError:
    """400: a request that no waiting would help, because it may use more tokens than its limit has in a minute."""
    message = f"{limit} is less than the {tokens} tokens that this request may use"
    message += ": lower its max tokens, send a shorter prompt, or raise the limit"
    return RequestError(HTTPStatus.BAD_REQUEST, "request_over_limit", message, {"x-should-retry": "false"})


def limits_unavailable(limit: str, retry_seconds: int) -> RequestError:
    """503: a limit of tokens that cannot be counted, because the store that all replicas count in does not answer."""
    message = f"{limit} cannot be counted, because Redis (gateway.redis.secret) does not answer"
    message += f": try again in {retry_seconds} s"
    headers = {"Retry-After": str(retry_seconds)}
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "limits_unavailable", message, headers)


def too_busy() -> RequestError:
    """503: the bodies of other requests take all the memory for bodies."""
    message = "waiting requests take all the memory for request bodies: try again later, or send a smaller request"
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "too_busy", message, {"Retry-After": "1"})


def upstream_failed(service: str) -> RequestError:
    """502: the engine broke off before it responded; a gateway has tried another one, if there is one."""
    message = f"service {service}: its engine broke off the request before it responded"
    return RequestError(HTTPStatus.BAD_GATEWAY, "upstream_failed", message)


def response_broken_off(service: str) -> RequestError:
    """502 in an event, because the status was sent before: the engine broke off its response."""
    message = f"service {service}: its engine broke off the response, which is not complete"
    return RequestError(HTTPStatus.BAD_GATEWAY, "upstream_failed", message)


def gateway_stopped() -> RequestError:
    """503, or in an event: the time that a gateway which stops has for its answers is over."""
    message = "the gateway was stopped before the answer ended: ask again"
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "gateway_stopped", message, {"Retry-After": "1"})


def replica_stopped(listener: str) -> RequestError:
    """503, or in an event: the time that a replica which stops has for its answers is over."""
    message = f"{listener}: its replica stopped before the answer ended: ask again, or raise spec.drainSeconds"
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "replica_stopped", message, {"Retry-After": "1"})


def invalid_http(status: int, reason: str) -> RequestError:
    """400 or 408: bytes that are no valid request of HTTP."""
    return RequestError(status, "invalid_request", f"the request is not served: {reason}")


def service_unavailable(listener: str, problem: str = "") -> RequestError:
    """503: no engine takes requests now; `problem` is the reason, if it is known."""
    message = f"{listener} has no engine that takes requests now: {problem or 'try again later'}"
    headers = {"Retry-After": str(_RETRY_PROBLEM_SECONDS if problem else 1)}
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable", message, headers)


def too_many_held(listener: str, retry_seconds: int) -> RequestError:
    """503: too many requests, or too large ones, wait until the engine is loaded."""
    message = f"{listener}: too many requests wait until its model is loaded: try again in {retry_seconds} s"
    headers = {"Retry-After": str(retry_seconds)}
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "model_loading", message, headers)


def not_loaded_in_time(listener: str, retry_seconds: int) -> RequestError:
    """503, or in an event: the engine was not loaded in the time for which requests wait."""
    message = f"{listener}: its model is still not loaded: try again in {retry_seconds} s"
    headers = {"Retry-After": str(retry_seconds)}
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "model_loading", message, headers)


def translate_engine_error(
    status: int, body: bytes, service: str, engine: str | None = None, *, path: str = "this path", way: str = ""
) -> RequestError:
    """Return an engine's error in OpenAI's form, with a status to which clients react correctly.

    Args:
        status: the engine's status, of an error or a redirect.
        body: the body of its answer.
        service: the name of the service, for the message.
        engine: the name of the engine, whose table of known errors may state another status for the client.
        path: the path that was asked.
        way: what clients may ask instead, if the engine lacks that path.
    """
    # kind: the engine's type of the error; param: the field of the request at fault, if it names one
    message, kind, code, param = read_error(body)
    # The status for the client, by the table of errors that are known of this engine.
    client_status, _lesson, advice = judge_error(find_runtime(engine).errors, status, message)
    if client_status not in HTTPStatus._value2member_map_:  # each would be a series of its own in the metrics
        client_status = HTTPStatus.BAD_REQUEST if client_status < 500 else HTTPStatus.BAD_GATEWAY  # noqa: PLR2004 - 5xx
    if client_status < HTTPStatus.INTERNAL_SERVER_ERROR and kind == "server_error":
        kind = ""  # llama.cpp's word for some mistakes of the client, which must not become the code

    # 1. Status and message: some answers of an engine would mislead its client.
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        # The client's token was right; the engine refuses the proxy's key.
        client_status = HTTPStatus.BAD_GATEWAY
        message = f"service {service}: its engine refuses the proxy's key ({message})"
    elif status < HTTPStatus.BAD_REQUEST:
        client_status = HTTPStatus.BAD_GATEWAY  # a client must not follow a redirect of an engine
    elif status == HTTPStatus.NOT_IMPLEMENTED:
        return unsupported_path(service, path, way, message)
    elif status == HTTPStatus.NOT_FOUND and message in _UNKNOWN_PATHS:
        return unsupported_path(service, path, way)
    elif kind in _CODES or message.startswith(_TOO_LONG) or message.endswith(_SEND_LESS):
        client_status, kind = HTTPStatus.BAD_REQUEST, "exceed_context_size_error"
        message = message.removesuffix(_SEND_LESS).rstrip(".") + _SEND_LESS

    # 2. Code: the one that OpenAI's clients look for, else the engine's own code, else its type of the error.
    if kind in _CODES:
        code = _CODES[kind]
    elif kind and not code:
        code = kind

    if advice:
        message = f"service {service}: {message}; {advice}"
    message = message or f"service {service}: its engine answered {status} without a reason"
    return RequestError(client_status, code or "engine_error", message, param=param)


def find_cause(error: RequestError) -> Cause | None:
    """Return why a backend has not answered a request that another one may answer; None: no other one would."""
    return "ContextTooLong" if error.code == _CONTEXT_EXCEEDED else _CAUSES.get(error.status)


def _advise_model(served: Iterable[str]) -> str:
    names = sorted(served)
    if not names:
        return "no model is served here now: try again later"
    more = f" and {len(names) - _MOST_NAMED} more, which {paths.MODELS} lists" if len(names) > _MOST_NAMED else ""
    return f"set `model` to one that is: {', '.join(names[:_MOST_NAMED])}{more}"


def _error_type(status: int, types: Mapping[int, str], server_error_type: str) -> str:
    """Return the type of an error: that of its status in `types`, else a general one of the server or the request."""
    general_type = server_error_type if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return types.get(status, general_type)
