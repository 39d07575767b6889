"""One request through the proxy: authorized, read, queued, sent to a backend, and its response streamed back.

A token reaches the client as soon as the engine has made it, and a slow client slows the engine's socket instead of
filling the proxy's memory. When one side ends early, the other side is ended too: a client that hangs up leaves the
queue or cancels the engine's work, and an engine that breaks off breaks the client's connection, so that half a
response never looks like a whole one.
"""

import asyncio
import os
import re
import time
from typing import Final, NamedTuple

import msgspec
import structlog

from gateway.http.exchange import BodyTimeoutError, Exchange
from gateway.http.headers import Field
from gateway.http.request_head import InvalidRequestError
from gateway.http.upstream_pool import NotAcceptedError, UpstreamPool
from gateway.proxy import errors, paths
from gateway.proxy.authorization import authorize
from gateway.proxy.body_budget import BodyBudget, BodyReservation
from gateway.proxy.config import Backend
from gateway.proxy.errors import RequestError
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.request_body import BodyReader, count_copied_bytes
from gateway.proxy.request_queue import NoBackendError, QueueFullError
from gateway.proxy.router import Router
from gateway.proxy.service import CLIENT_GONE, InferenceRequest, Service
from gateway.proxy.upstream_request import REQUEST_ID, UpstreamRequest

BODY_LIMIT_BYTES: Final = 64 << 20
_VALID_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_JSON: Final[tuple[Field, ...]] = ((b"Content-Type", b"application/json"),)

_log = structlog.get_logger()


class SharedResources(NamedTuple):
    """Resources that the requests to all services of this host share."""

    in_flight: InFlight
    body_budget: BodyBudget
    body_reader: BodyReader
    pool: UpstreamPool
    health: HealthMonitor


async def handle_request(exchange: Exchange, router: Router, shared: SharedResources) -> None:
    """Answer one client request."""
    try:
        await _dispatch(exchange, router, shared)
    except RequestError as error:
        exchange.respond(error.status, error.fields(), error.body)


def render_invalid_request(status: int, reason: str) -> tuple[list[Field], bytes]:
    """Return the fields and the body of a response to bytes that are no request."""
    error = errors.invalid_http(status, reason)
    return error.fields(), error.body


async def _dispatch(exchange: Exchange, router: Router, shared: SharedResources) -> None:
    """Authorize the request and answer it by its path. Raises RequestError."""
    path, method = exchange.head.path, exchange.head.method
    if path == paths.HEALTH and method == "GET":
        _report_health(exchange, router)
        return
    try:
        authorize(exchange.head.headers, router.tokens)
    except RequestError as error:
        _log_refusal(router, path, error)
        raise
    if path in paths.INFERENCE:
        if method != "POST":
            raise errors.method_not_allowed(method, path, "POST")
        await _infer(exchange, router, shared)
    elif path == paths.MODELS or path.startswith(f"{paths.MODELS}/"):
        if method != "GET":
            raise errors.method_not_allowed(method, path, "GET")
        _list_models(exchange, router, path.removeprefix(paths.MODELS)[1:])
    else:
        raise errors.unknown_url(path)


def _report_health(exchange: Exchange, router: Router) -> None:
    """Say whether requests are answered here; to anyone, so without a name. Raises RequestError."""
    if not any(service.has_backend for service in router.services().values()):
        raise errors.service_unavailable("this endpoint")
    exchange.respond(200, _JSON, b'{"status":"ok"}')


def _list_models(exchange: Exchange, router: Router, only: str) -> None:
    """Return all models or, if `only` is not empty, the model of that name. Raises RequestError."""
    services = router.services()
    if only and only not in services:
        raise errors.model_not_found(only, services)
    models = [
        {"id": name, "object": "model", "created": service.created, "owned_by": "pomona"}
        for name, service in sorted(services.items())
        if not only or name == only
    ]
    exchange.respond(200, _JSON, msgspec.json.encode(models[0] if only else {"object": "list", "data": models}))


async def _infer(exchange: Exchange, router: Router, shared: SharedResources) -> None:
    """Answer a request for inference by the service that its body names. Raises RequestError."""
    inference = InferenceRequest(exchange.head.path, _request_id(exchange), shared.body_budget.reserve())
    try:
        try:
            content = await _read_content(exchange, inference.reservation)
            inference.body = await shared.body_reader.read(content)
            service = router.find_service(inference.body.model)
        except RequestError as error:
            _log_refusal(router, inference.path, error)
            raise
        await _serve_and_record(exchange, inference, service, shared)
    finally:
        inference.free_body()


async def _serve_and_record(
    exchange: Exchange, inference: InferenceRequest, service: Service, shared: SharedResources
) -> None:
    """Answer the request by `service`, and count and log the outcome. Raises RequestError."""
    service.begin(inference)
    try:
        await _serve(exchange, inference, service, shared)
    except asyncio.CancelledError:
        inference.status = CLIENT_GONE
        raise
    except RequestError as error:
        inference.status = error.status
        error.headers[REQUEST_ID] = inference.request_id
        raise
    finally:
        service.record(inference)


async def _serve(exchange: Exchange, inference: InferenceRequest, service: Service, shared: SharedResources) -> None:
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
            observer = shared.health.begin(backend.uid, inference.body.content)
            try:
                await UpstreamRequest(exchange, inference, service, backend, observer).send(shared.pool)
            except NotAcceptedError as error:
                observer.fail("it accepts no connection")
                _log.warning(
                    "backend_not_accepting", service=service.config.name, backend=backend.uid, error=str(error)
                )
            else:
                return
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


async def _read_content(exchange: Exchange, reservation: BodyReservation) -> bytes | bytearray:
    """Read the whole body into memory that is reserved for it. Raises RequestError."""
    head = exchange.head
    if (head.content_length or 0) > BODY_LIMIT_BYTES:
        raise errors.request_too_large(BODY_LIMIT_BYTES)
    if encoding := head.headers.get("Content-Encoding"):
        raise errors.unsupported_encoding(encoding)
    exchange.send_continue()
    content: bytes | bytearray = b""
    try:
        while piece := await exchange.read():
            if len(content) + len(piece) > BODY_LIMIT_BYTES:
                raise errors.request_too_large(BODY_LIMIT_BYTES)
            if not reservation.grow(len(piece)):
                raise errors.too_busy()
            # A buffer that grows: to join the pieces of a large body would block all requests for a while.
            if not content:
                content = piece
            else:
                content = content if isinstance(content, bytearray) else bytearray(content)
                content += piece
    except BodyTimeoutError as error:
        raise errors.request_timeout() from error
    except InvalidRequestError as error:
        raise errors.invalid_http(400, str(error)) from error
    if not reservation.grow(count_copied_bytes(content)):
        raise errors.too_busy()
    return content


def _log_refusal(router: Router, path: str, error: RequestError) -> None:
    """Log a request that is refused before it reaches a service."""
    _log.info("request_refused", listener=router.name, route=paths.route_name(path), status=error.status)


def _request_id(exchange: Exchange) -> str:
    """Return the client's request id if it is harmless in a log, else a new one."""
    given = exchange.head.headers.get(REQUEST_ID)
    return given if given and _VALID_REQUEST_ID.fullmatch(given) else os.urandom(8).hex()
