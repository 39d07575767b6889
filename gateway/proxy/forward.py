"""One request through the proxy: checked, read, given its turn, sent to a backend, its answer passed on as it comes.

A token reaches the client when the engine made it, and a slow client slows the engine's socket instead of filling our
memory. Who leaves early ends the other side: a client that hangs up leaves the queue or cancels the work, and a backend
that breaks off breaks the client's connection, so that half an answer never looks like a whole one.
"""

import asyncio
import hmac
import re
import secrets
import time
from http import HTTPMethod, HTTPStatus
from typing import Final, NamedTuple

import aiohttp
import msgspec
import structlog
from aiohttp import web

from gateway.proxy import asked, errors, routes
from gateway.proxy.asked import NotUnderstoodError
from gateway.proxy.balance import InFlight
from gateway.proxy.bodies import Bodies
from gateway.proxy.config import Backend
from gateway.proxy.entrance import Entrance
from gateway.proxy.exchange import Exchange, NotAcceptedError
from gateway.proxy.service import CLIENT_GONE, Service, Visit
from gateway.proxy.turns import RefusedError

BODY_LIMIT_BYTES: Final = 64 << 20
BODY_PAUSE_SECONDS: Final = 30.0
"""How long the next part of a body may take; an engine's time is not a client's to hold."""
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE)

_log = structlog.get_logger()


class Shared(NamedTuple):
    """What all requests to this host have in common."""

    in_flight: InFlight
    bodies: Bodies
    session: aiohttp.ClientSession


async def answer(request: web.BaseRequest, entrance: Entrance, shared: Shared) -> web.StreamResponse:
    """Answer one client request."""
    path, method = request.path, request.method
    if path == routes.HEALTH and method == HTTPMethod.GET:
        return _health(entrance)
    if entrance.token is None:
        if not _is_local(request):
            return _refused(errors.forbidden(), entrance, routes.name(path))
    elif not _has_token(request, entrance.token):
        return _refused(errors.unauthorized(entrance.name), entrance, routes.name(path))
    if path in routes.INFERENCE:
        if method != HTTPMethod.POST:
            return errors.wrong_method(method, path, "POST")
        return await _infer(request, entrance, shared)
    if path == routes.MODELS or path.startswith(f"{routes.MODELS}/"):
        if method != HTTPMethod.GET:
            return errors.wrong_method(method, path, "GET")
        return _models(entrance, path.removeprefix(routes.MODELS)[1:])
    return errors.unknown_path(path)


def _health(entrance: Entrance) -> web.Response:
    if any(service.open for service in entrance.served().values()):
        return web.json_response({"status": "ok"})
    return errors.unavailable(entrance.name)


def _models(entrance: Entrance, one: str) -> web.Response:
    served = entrance.served()
    if one and one not in served:
        return errors.unknown_model(one, served)
    listed = [
        {"id": name, "object": "model", "created": service.created, "owned_by": "pomona"}
        for name, service in sorted(served.items())
        if not one or name == one
    ]
    body = msgspec.json.encode(listed[0] if one else {"object": "list", "data": listed})
    return web.Response(body=body, content_type="application/json")


async def _infer(request: web.BaseRequest, entrance: Entrance, shared: Shared) -> web.StreamResponse:
    """Have one of the services do what the body asks."""
    visit = Visit(request, _request_id(request), shared.bodies.hold())
    try:
        service = await _understood(visit, entrance)
        if isinstance(service, web.Response):
            return _refused(service, entrance, visit.route)
        return await _visited(visit, service, shared)
    finally:
        visit.forget_body()


async def _visited(visit: Visit, service: Service, shared: Shared) -> web.StreamResponse:
    """Have the service answer, and count what became of it."""
    service.begin(visit)
    try:
        response = await _serve(visit, service, shared)
    except asyncio.CancelledError:
        visit.status = CLIENT_GONE
        raise
    else:
        if not response.prepared:
            visit.status = response.status
            response.headers["X-Request-Id"] = visit.request_id
        return response
    finally:
        service.record(visit)


async def _understood(visit: Visit, entrance: Entrance) -> Service | web.Response:
    """Read the body and find whom it asks, or the error that says why not."""
    body = await _body(visit)
    if isinstance(body, web.Response):
        return body
    visit.body = body
    try:
        return entrance.find(asked.read(body))
    except NotUnderstoodError as error:
        return errors.bad_request(str(error))


def _refused(response: web.Response, entrance: Entrance, route: str) -> web.Response:
    """Write the line of a request that came to no service."""
    _log.info("request refused", entrance=entrance.name, route=route, status=response.status)
    return response


async def _serve(visit: Visit, service: Service, shared: Shared) -> web.StreamResponse:
    """Wait for a turn, and have a backend answer."""
    if not service.open:
        return _unavailable(service, visit)
    lined_up = time.monotonic()
    try:
        backend: Backend | None = await service.turns.begin()
    except RefusedError as error:
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return _unavailable(service, visit)
        visit.error = "queue_full"
        return errors.too_many(service.config.name, error.retry_seconds)
    began = time.monotonic()
    visit.queued_seconds = began - lined_up
    service.metrics.queue.observe(visit.queued_seconds)
    tried: set[str] = set()
    try:
        while backend is not None:
            tried.add(backend.uid)
            try:
                return await Exchange(visit, service, backend).run(shared.session)
            except NotAcceptedError as error:
                _log.warning(
                    "backend does not accept", service=service.config.name, backend=backend.uid, error=str(error)
                )
            finally:
                shared.in_flight.end(backend.uid)
            backend = service.instead(tried)
        return _unavailable(service, visit)
    finally:
        service.turns.end(time.monotonic() - began)


def _unavailable(service: Service, visit: Visit) -> web.Response:
    visit.error = "no_server"
    return errors.unavailable(service.config.name)


async def _body(visit: Visit) -> bytes | web.Response:
    """Read the whole body, or say why not."""
    request = visit.request
    if (request.content_length or 0) > BODY_LIMIT_BYTES:
        return errors.too_large(BODY_LIMIT_BYTES)
    if encoding := request.headers.get("Content-Encoding"):
        return errors.compressed(encoding)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # an interim answer is not yet the answer
    body = bytearray()
    try:
        while not request.content.at_eof():
            async with asyncio.timeout(BODY_PAUSE_SECONDS):
                part = await request.content.readany()
            body += part
            if len(body) > BODY_LIMIT_BYTES:
                return errors.too_large(BODY_LIMIT_BYTES)
            if not visit.held.grow(len(part)):
                return errors.too_busy()
    except TimeoutError:
        return errors.too_slow(BODY_PAUSE_SECONDS)
    except aiohttp.ClientError as error:
        return errors.bad_request(f"the request body cannot be read: {error}")
    return bytes(body)


def _has_token(request: web.BaseRequest, token: str) -> bool:
    """Compare what the client bears; X-Api-Key is how Anthropic's clients say it."""
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        credentials = request.headers.get("X-Api-Key", "")
    return hmac.compare_digest(credentials.strip().encode(errors="surrogateescape"), token.encode())


def _is_local(request: web.BaseRequest) -> bool:
    """Whether a program of this machine asks, and not a web page that its browser shows.

    A page of another origin says so; one that had its own name lead to this address still says that name.
    """
    names = [request.headers.get("Host", "")]
    if (origin := request.headers.get("Origin")) is not None:
        names.append(origin.removeprefix("http://"))
    return all(_LOCAL.fullmatch(name) for name in names)


def _request_id(request: web.BaseRequest) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
