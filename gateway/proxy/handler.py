"""One request through the proxy: authorized, read, queued, sent to a backend, and its response streamed back.

A token reaches the client as soon as the engine has made it, and a slow client slows the engine's socket instead of
filling the proxy's memory. When one side ends early, the other side is ended too: a client that hangs up leaves the
queue or cancels the engine's work, and an engine that breaks off breaks the client's connection, so that half a
response never looks like a whole one.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPMethod
from typing import Final, NamedTuple

import aiohttp
import msgspec
import structlog
from aiohttp import web

from gateway.proxy import errors, paths, request_body
from gateway.proxy.authorization import authorize
from gateway.proxy.body_budget import BodyBudget, BodyReservation
from gateway.proxy.config import Backend
from gateway.proxy.errors import RequestError
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.request_queue import NoBackendError, QueueFullError
from gateway.proxy.router import Router
from gateway.proxy.service import CLIENT_GONE, InferenceRequest, Service
from gateway.proxy.upstream_request import REQUEST_ID, NotAcceptedError, UpstreamRequest

BODY_LIMIT_BYTES: Final = 64 << 20
BODY_PAUSE_SECONDS: Final = 30.0
"""The longest pause between two pieces of a request body; a client that is slower is refused."""
_VALID_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

_log = structlog.get_logger()


class SharedResources(NamedTuple):
    """Resources that the requests to all services of this host share."""

    in_flight: InFlight
    body_budget: BodyBudget
    session: aiohttp.ClientSession
    health: HealthMonitor


async def handle_request(request: web.BaseRequest, router: Router, shared: SharedResources) -> web.StreamResponse:
    """Answer one client request."""
    try:
        return await _dispatch(request, router, shared)
    except RequestError as error:
        return web.Response(
            status=error.status, body=error.body, headers=error.headers, content_type="application/json"
        )


async def _dispatch(request: web.BaseRequest, router: Router, shared: SharedResources) -> web.StreamResponse:
    """Authorize the request and answer it by its path. Raises RequestError."""
    path, method = request.path, request.method
    if path == paths.HEALTH and method == HTTPMethod.GET:
        return _report_health(router)
    with _refusal_logged(router, path):
        authorize(request.headers, router.token, router.name)
    if path in paths.INFERENCE:
        if method != HTTPMethod.POST:
            raise errors.method_not_allowed(method, path, "POST")
        return await _infer(request, router, shared)
    if path == paths.MODELS or path.startswith(f"{paths.MODELS}/"):
        if method != HTTPMethod.GET:
            raise errors.method_not_allowed(method, path, "GET")
        return _list_models(router, path.removeprefix(paths.MODELS)[1:])
    raise errors.unknown_url(path)


def _report_health(router: Router) -> web.Response:
    if any(service.has_backend for service in router.services().values()):
        return web.json_response({"status": "ok"})
    raise errors.service_unavailable(router.name)


def _list_models(router: Router, only: str) -> web.Response:
    """Return all models or, if `only` is not empty, the model of that name. Raises RequestError."""
    services = router.services()
    if only and only not in services:
        raise errors.model_not_found(only, services)
    models = [
        {"id": name, "object": "model", "created": service.created, "owned_by": "pomona"}
        for name, service in sorted(services.items())
        if not only or name == only
    ]
    body = msgspec.json.encode(models[0] if only else {"object": "list", "data": models})
    return web.Response(body=body, content_type="application/json")


async def _infer(request: web.BaseRequest, router: Router, shared: SharedResources) -> web.StreamResponse:
    """Answer a request for inference by the service that its body names. Raises RequestError."""
    inference = InferenceRequest(request.path, _request_id(request), shared.body_budget.reserve())
    try:
        with _refusal_logged(router, request.path):
            inference.body = await _read_body(request, inference.reservation)
            service = router.find_service(request_body.read_model(inference.body))
        return await _serve_and_record(request, inference, service, shared)
    finally:
        inference.free_body()


async def _serve_and_record(
    request: web.BaseRequest, inference: InferenceRequest, service: Service, shared: SharedResources
) -> web.StreamResponse:
    """Answer the request by `service`, and count and log the outcome. Raises RequestError."""
    service.begin(inference)
    try:
        response = await _serve(request, inference, service, shared)
    except asyncio.CancelledError:
        inference.status = CLIENT_GONE
        raise
    except RequestError as error:
        inference.status = error.status
        error.headers[REQUEST_ID] = inference.request_id
        raise
    else:
        if not response.prepared:
            inference.status = response.status
            response.headers[REQUEST_ID] = inference.request_id
        return response
    finally:
        service.record(inference)


async def _serve(
    request: web.BaseRequest, inference: InferenceRequest, service: Service, shared: SharedResources
) -> web.StreamResponse:
    """Wait for a free slot and send the request; try other backends if one does not accept it. Raises RequestError."""
    if not service.has_backend:
        raise _no_backend(inference, service)
    queued_at = time.monotonic()
    try:
        backend: Backend | None = await service.queue.acquire()
    except NoBackendError as error:
        raise _no_backend(inference, service) from error
    except QueueFullError as error:
        inference.error = "queue_full"
        raise errors.queue_full(service.config.name, error.retry_seconds) from error
    began = time.monotonic()
    inference.queued_seconds = began - queued_at
    service.metrics.queue_seconds.observe(inference.queued_seconds)
    tried: set[str] = set()
    try:
        while backend is not None:
            tried.add(backend.uid)
            observer = shared.health.begin(backend.uid, inference.body)
            try:
                return await UpstreamRequest(request, inference, service, backend, observer).send(shared.session)
            except NotAcceptedError as error:
                observer.fail("it accepts no connection")
                _log.warning(
                    "backend_not_accepting", service=service.config.name, backend=backend.uid, error=str(error)
                )
            finally:
                observer.abandon()
                shared.in_flight.end(backend.uid)
            backend = service.take_other_backend(tried)
        raise _no_backend(inference, service)
    finally:
        service.queue.finish_request(time.monotonic() - began)


def _no_backend(inference: InferenceRequest, service: Service) -> RequestError:
    inference.error = "no_server"
    return errors.service_unavailable(f"service {service.config.name}")


async def _read_body(request: web.BaseRequest, reservation: BodyReservation) -> bytes:
    """Read the whole body into memory that is reserved for it. Raises RequestError."""
    if (request.content_length or 0) > BODY_LIMIT_BYTES:
        raise errors.request_too_large(BODY_LIMIT_BYTES)
    if encoding := request.headers.get("Content-Encoding"):
        raise errors.unsupported_encoding(encoding)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # else aiohttp takes the interim response for the start of the final one
    body = bytearray()
    try:
        while not request.content.at_eof():
            async with asyncio.timeout(BODY_PAUSE_SECONDS):
                piece = await request.content.readany()
            body += piece
            if len(body) > BODY_LIMIT_BYTES:
                raise errors.request_too_large(BODY_LIMIT_BYTES)
            if not reservation.grow(len(piece)):
                raise errors.too_busy()
    except TimeoutError as error:
        raise errors.request_timeout(BODY_PAUSE_SECONDS) from error
    except aiohttp.ClientError as error:
        raise errors.bad_request(f"the request body cannot be read: {error}") from error
    return bytes(body)


@contextmanager
def _refusal_logged(router: Router, path: str) -> Iterator[None]:
    """Log a request that is refused before it reaches a service."""
    try:
        yield
    except RequestError as error:
        _log.info("request_refused", listener=router.name, route=paths.route_name(path), status=error.status)
        raise


def _request_id(request: web.BaseRequest) -> str:
    """Return the client's request id if it is harmless in a log, else a new one."""
    given = request.headers.get(REQUEST_ID, "")
    return given if _VALID_REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
