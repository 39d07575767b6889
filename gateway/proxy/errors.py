"""Errors in OpenAI's form: clients' libraries raise the right exception from these, whatever stands behind."""

from http import HTTPStatus

import msgspec
from aiohttp import web


class _Error(msgspec.Struct):
    message: str
    type: str
    param: None
    code: str


class _Body(msgspec.Struct):
    error: _Error


def unauthorized(service: str) -> web.Response:
    """401: no bearer token, or not the service's."""
    return _answer(
        HTTPStatus.UNAUTHORIZED,
        "invalid_api_key",
        f"service {service} wants its bearer token, which is in the Secret <service>-token under the key `token`",
        {"WWW-Authenticate": "Bearer"},
    )


def bad_request(message: str) -> web.Response:
    """400: a request that no server could mean."""
    return _answer(HTTPStatus.BAD_REQUEST, "bad_request", message)


def too_large(limit_bytes: int) -> web.Response:
    """413: a body over the limit."""
    return _answer(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "request_too_large", f"the request body is over {limit_bytes} bytes"
    )


def bad_gateway(service: str) -> web.Response:
    """502: the server took the request and broke off before it answered. It may have worked on it: not repeated."""
    return _answer(HTTPStatus.BAD_GATEWAY, "upstream_failed", f"service {service}: its server broke off the request")


def unavailable(service: str) -> web.Response:
    """503: no server takes requests now; worth asking again soon."""
    return _answer(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "service_unavailable",
        f"service {service} has no server that takes requests now",
        {"Retry-After": "1"},
    )


def _answer(status: HTTPStatus, code: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    body = msgspec.json.encode(_Body(_Error(message=message, type=kind, param=None, code=code)))
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")
