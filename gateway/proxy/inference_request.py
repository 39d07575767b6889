"""One request for inference: its body is read, it waits for a slot, and is sent to a backend; the outcome is recorded.

Each step is called by the one before it, or by the connection on which something has come; only what takes long, the
scan of a large body and a new connection to a backend, is a task. So a short request costs little beside its parsing.
When one side ends early, the other side is ended too: a client that hangs up leaves the queue or cancels the engine's
work, and after an engine that breaks off the client gets an error, in the stream if that has begun, so that half a
response never looks like a whole one.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Final, NamedTuple

from crds.modelroute import Cause
from gateway.event_log import log
from gateway.http.exchange import BodyTimeoutError, Exchange
from gateway.http.request_head import InvalidRequestError
from gateway.http.upstream_pool import NotAcceptedError, UpstreamPool
from gateway.proxy import errors
from gateway.proxy.attempts import Attempts
from gateway.proxy.config import Backend
from gateway.proxy.content_coding import decode_body
from gateway.proxy.errors import RequestError
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.inference_head import REQUEST_ID, InferenceHead
from gateway.proxy.keep_alive import STREAM_FIELDS, STREAMED_ROUTES, KeepAlive, render_comment
from gateway.proxy.request_body import (
    NO_BODY,
    BodyBudget,
    RequestBody,
    count_copied_bytes,
    read_short_body,
    run_in_turns,
    scan_large_body,
)
from gateway.proxy.request_form import scan_form
from gateway.proxy.request_record import CLIENT_GONE, log_refusal
from gateway.proxy.request_schemas import check_engines
from gateway.proxy.response_body import ResponseTranslator
from gateway.proxy.responses_stream import open_stream
from gateway.proxy.router import RequestAdmission, Router
from gateway.proxy.served_routes import check_route
from gateway.proxy.service import SERVICE_HEADER, Service
from gateway.proxy.token_counts import NO_TOKENS, TokenCount
from gateway.proxy.token_lanes import ALONE, UNKNOWN, read_demand, read_limit
from gateway.proxy.upstream_request import UpstreamRequest, count_prompt

BODY_LIMIT_BYTES: Final = 64 << 20

_process_id: Final = os.urandom(4).hex()
_numbers = itertools.count()


class SharedResources(NamedTuple):
    """Resources that all requests of this process share."""

    body_budget: BodyBudget
    scan_turns: asyncio.Lock
    """Held while a piece of a large body is scanned."""
    pool: UpstreamPool
    health: HealthMonitor
    keep_alive: KeepAlive


class InferenceRequest:
    """The receiver of a request's body, of a slot in the queue, and of the response. Raises RequestError."""

    translator: ResponseTranslator | None = None
    """The translation of the response for a client of another API; None: it gets OpenAI's or Anthropic's."""
    keep_alive_seconds: float | None = None
    """The time for which the client wants the model to stay loaded; inf: without end; None: it has not said."""

    def __init__(self, exchange: Exchange, head: InferenceHead, router: Router, shared: SharedResources) -> None:
        """Begin with the head alone; the connection then calls `take_body`. Raises RequestError: it is too large."""
        if (exchange.content_length or 0) > BODY_LIMIT_BYTES:
            raise errors.request_too_large(BODY_LIMIT_BYTES)

        # The request. `id_line` is the field by which the engine and the client get its id;
        # `client_fields` has that, and those about the client's limits.
        self.arrived = time.monotonic()
        self.head = head
        self.route = head.route
        self.request_id = head.request_id or f"{_process_id}-{next(_numbers)}"
        self.id_line = self.client_fields = f"{REQUEST_ID}: {self.request_id}\r\n".encode()
        self.exchange = exchange
        self.router = router
        self._shared = shared

        # The outcome, for log and metrics.
        self.status = CLIENT_GONE  # until a response or an error begins, and again if the client hangs up
        self.queued_seconds = 0.0
        self.first_token_seconds: float | None = None
        self.error = ""

        # The body: its pieces as they come, the memory that is reserved for it, the task that scans a large one, and
        # what was read of it (empty before that, and when it is needed no more).
        self._content: bytes | bytearray = b""
        self.body_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self.body: RequestBody = NO_BODY

        self.hides_usage = False
        """The engine is asked for its counts of tokens, and the client has not asked for them."""
        self._admission: RequestAdmission | None = None
        """That by the limits of the client; None: it has none, or the request is not admitted yet."""

        # The way to a backend.
        self.attempts = Attempts()
        self._service: Service | None = None
        """The service that is asked; None before the body is read, and when the request is recorded."""
        self.phase_began = self.arrived
        """The time at which it began to wait in the queue or, later, got its slot: a backend works on it."""
        self._upstream: UpstreamRequest | None = None
        """The request to a backend, one of whose slots it holds."""
        self.has_answer = False
        """The client has got some of a backend's response, and not only comments of `keep_open`."""
        self.last_sent = self.arrived
        """The time at which the client has got a piece of a stream last."""
        self.affinity: int | None = None
        """The number of its conversation, whose turns a gateway sends to one endpoint; None: it has none."""
        self.adapter = ""
        """The adapter that it chooses; empty: none."""
        self.demand = ALONE
        """The tokens that it may use, read where slots share cells; `reserved` is what a backend keeps for it."""
        self.reserved = 0

        router.remember(self)
        exchange.send_continue()

    @property
    def tokens(self) -> TokenCount:
        """The engine's report so far."""
        return self._upstream.tokens if self._upstream else NO_TOKENS

    @property
    def generation_seconds(self) -> float | None:
        """Time from the first to the last token; None: unknown."""
        return self._upstream.generation_seconds if self._upstream else None

    # The body

    def take_body(self, piece: bytes, *, is_last: bool) -> None:
        """Keep a piece of the body, in memory that is reserved for it.

        With the last piece the body is read, and the request goes to its service: at once if the body is short, else
        after a scan in a task of its own. A failure is sent as the response.
        """
        try:
            if len(self._content) + len(piece) > BODY_LIMIT_BYTES:
                raise errors.request_too_large(BODY_LIMIT_BYTES)
            self._reserve(len(piece))

            # A body that comes at once is not copied. The pieces of another are put into a buffer that grows: to join
            # them at the end would block all requests for a while.
            if not self._content:
                self._content = piece
            elif piece:
                if not isinstance(self._content, bytearray):
                    self._content = bytearray(self._content)
                self._content += piece

            # read_short_body returns None for a large body, and for one that may have media.
            if is_last:
                self._reserve(count_copied_bytes(self._content))  # reading it takes memory beside its content
                if self.head.is_plain and (body := read_short_body(self._content)):
                    self._begin(body)
                else:
                    self._task = asyncio.get_running_loop().create_task(self._scan())
        except RequestError as error:
            self.send_error(error)

    def fail_body(self, error: InvalidRequestError | BodyTimeoutError) -> None:
        """Refuse the request, whose body does not come."""
        late = isinstance(error, BodyTimeoutError)
        self.send_error(errors.request_timeout() if late else errors.invalid_http(400, str(error)))

    async def _scan(self) -> None:
        """Read a body in several steps, and find its service; answer the client whatever fails."""
        try:
            if coding := self.head.coding:
                decoding = decode_body(self._content, coding, BODY_LIMIT_BYTES, self._reserve)
                self._replace_content(await run_in_turns(decoding, self._shared.scan_turns))
            if body := await self._read_body():
                self._begin(body)
        except RequestError as error:
            self.send_error(error)
        except Exception:  # noqa: BLE001 - the client gets an answer to whatever fails here
            self.fail()

    async def _read_body(self) -> RequestBody | None:
        """Read a body that is large, was compressed or is a form; None: the client has got its answer."""
        turns = self._shared.scan_turns
        if boundary := self.head.boundary:
            return await run_in_turns(scan_form(self._content, boundary), turns)
        return read_short_body(self._content) or await scan_large_body(self._content, turns)

    def _replace_content(self, content: bytes | bytearray) -> None:
        """Go on with another content: memory is reserved for it in place of that for the one before."""
        self._content = content
        self._reserve(len(content) + count_copied_bytes(content) - self.body_bytes)

    def _reserve(self, more_bytes: int) -> None:
        """Reserve memory for the body. Raises RequestError."""
        self._shared.body_budget.reserve(more_bytes, self.router.namespace)
        self.body_bytes += more_bytes

    def free_body(self) -> None:
        """Free the request body: no other backend gets it now, and the response may last for hours."""
        if self.body_bytes:
            self.body = NO_BODY
            self._content = b""
            self._shared.body_budget.free(self.body_bytes, self.router.namespace)
            self.body_bytes = 0

    # The queue

    def _begin(self, body: RequestBody) -> None:
        """Find the service that the body names, or that its route chooses, and let the client's limits admit it there.

        Raises RequestError.
        """
        self.body = body
        if body.streams and self.router.keeps_open and self.head.label in STREAMED_ROUTES:
            self.last_sent = time.monotonic()  # the seconds without a comment begin now
            self._shared.keep_alive.add(self)
        model = self.attempts.model = self.router.find_model(body.model)
        service = model.choose_service(self)
        self._enter(service)
        self.error = "not_admitted"  # if it raises
        admission = self.router.admit(self, service)
        if isinstance(admission, Awaitable):
            self._task = asyncio.get_running_loop().create_task(self._await_admission(admission, service))
        else:
            self._take_admission(service, admission)

    def _enter(self, service: Service) -> None:
        """Make it a request of a service. Raises RequestError, if that is known to have no answer."""
        self._service = service
        service.begin_request(self)  # counts it as running
        check_route(self.route, self.exchange.head.path, service.config)
        check_engines(self.body.schema_demand, service.config)  # raises if its schemas would make an engine crash

    async def _await_admission(self, admission: Awaitable[RequestAdmission], service: Service) -> None:
        """Go on once the request is admitted; answer the client whatever fails."""
        try:
            self._take_admission(service, await admission)
        except RequestError as error:
            self.send_error(error)
        except Exception:  # noqa: BLE001 - the client gets an answer to whatever fails here
            self.fail()

    def _take_admission(self, service: Service, admission: RequestAdmission | None) -> None:
        """Send the request, which is admitted, or let it wait. Raises RequestError."""
        self.error = ""
        body, self._admission = self.body, admission
        if admission:
            self.client_fields += admission.render_fields()
        if self.router.counts_tokens and body.streams:
            self.hides_usage = body.include_usage(self.route)
        self._send_or_enqueue(service)

    def _send_or_enqueue(self, service: Service) -> None:
        """Send the request to a backend that has a free slot, or let it wait in the queue. Raises RequestError."""
        # A free slot means that a backend may work on one more request.
        self.phase_began = time.monotonic()
        if service.sharing:
            self.demand = read_demand(self.route, self.body.fields)
        if backend := service.queue.take_free_slot(self):
            self.take_slot(backend)
        elif not service.takes(self):
            self._leave_without_backend(service)
        else:
            self.error = "queue_full"  # if it raises
            service.enqueue(self)
            self.error = ""
            if service.sharing:
                self._task = asyncio.get_running_loop().create_task(self._count_tokens(service))

    async def _count_tokens(self, service: Service) -> None:
        """Count the tokens of a request that waits, once an engine is loaded; a few may start in the short lane."""
        await service.wait_awake()
        backend = service.sharing  # may be another one, or asleep again
        shared_tokens = (backend.shared_tokens or 0) if backend and not backend.asleep else 0
        limit = read_limit(self.route, self.body.fields) if self.demand == UNKNOWN else 0
        if backend and 0 < limit < shared_tokens and len(self.body.content) < 1 << 20:
            async with service.counting:
                tokens = limit + await count_prompt(self._shared.pool, backend, self.route, self.body)
            self.demand = tokens if tokens <= shared_tokens else UNKNOWN
        service.queue.admit_waiting()

    def refuse_slot(self) -> None:
        """Leave the service, because it has lost its last backend."""
        if self._service:
            self._leave_without_backend(self._service)

    def take_slot(self, backend: Backend) -> None:
        """Send the request to a backend that has a free slot."""
        now = time.monotonic()
        self.queued_seconds, self.phase_began = now - self.phase_began, now
        if service := self._service:  # not None: its body was read, and it has not ended
            self._send_to(backend, service)
            service.metrics.queue_seconds.observe(self.queued_seconds)

    def _leave_without_backend(self, service: Service) -> None:
        """Send the request to another service of its route, since no backend of this one takes it, or an error."""
        self.error = "no_server"  # for the metrics
        if not self._fall_back(service, "Unavailable"):
            self.send_error(service.explain_absence())

    # The backend

    def _send_to(self, backend: Backend, service: Service) -> None:
        self._upstream = UpstreamRequest(self, service, backend, self._shared)
        self._upstream.send()

    def try_other_backend(self, backend: Backend, error: NotAcceptedError) -> None:
        """Send the request to a backend that was not tried yet, because `backend` accepts no connection.

        If none is left, another service of its route gets it, or the client an error.
        """
        if service := self._service:  # else it has ended already
            log.warning("backend_not_accepting", service=service.config.name, backend=backend.uid, error=str(error))
            if not self._move(backend, service):
                self._leave_without_backend(service)

    def try_elsewhere(self, backend: Backend, error: RequestError) -> bool:
        """Send the request to another backend, because this one has failed with `error` before it answered.

        Another one of the service is tried, within the service's budget of such tries, and then another service of the
        route. Return False if there is none.
        """
        service, attempts = self._service, self.attempts
        if service is None or self.body is NO_BODY:
            return False
        if self.adapter and error.status == HTTPStatus.NOT_FOUND and self._move(backend, service):
            return True  # without work: the replica is of an earlier spec, which has no such adapter
        if not (cause := attempts.find_cause(error)):
            return False
        if attempts.may_move(cause) and service.may_try_elsewhere(backend) and self._move(backend, service):
            attempts.note_move()
            self.error = ""
            return True
        return self._fall_back(service, cause)

    def _fall_back(self, service: Service, cause: Cause) -> bool:
        """Send the request to the service of its route that stands in for this one; return False if there is none.

        From then on it is a request of the other service, which counts and logs it.
        """
        other = self.attempts.find_fallback(service, cause)
        if other is None:
            return False
        self._free_slot(service)
        self._upstream = None
        service.hand_over_request(self, cause)
        self.error = ""
        try:
            self._enter(other)
            self._send_or_enqueue(other)
        except RequestError as last:
            self.send_error(last)
        return True

    def _move(self, backend: Backend, service: Service) -> bool:
        """Send the request to a backend that was not tried yet, in place of this one; return False if there is none."""
        self.attempts.uids.append(backend.uid)
        reserved = self.reserved  # of this backend; the next one reserves its own
        other = service.take_backend(self, self.attempts.uids)
        if other is None:
            self.reserved = reserved
            return False
        if self._upstream:
            self._upstream.forget_answer()
        service.free_backend(backend.uid, reserved)
        self._send_to(other, service)
        return True

    # The end

    def send_comment(self, now: float) -> None:
        """Send a comment of a stream that waits; the first one begins the response."""
        if self.exchange.started:
            self.exchange.write(render_comment(self.route))
        else:
            self.status = HTTPStatus.OK
            fields = STREAM_FIELDS + self.client_fields + self.attempts.header_line
            self.exchange.start(self.status, fields, render_comment(self.route))
        self.last_sent = now

    @property
    def is_between_events(self) -> bool:
        """True if the client has got whole events only, so that a comment may follow."""
        return not self._upstream or self._upstream.is_between_events

    def resume_writing(self) -> None:
        """Read the engine again."""
        if self._upstream:
            self._upstream.resume_reading()

    def stop(self) -> None:
        """Answer with an error, or end a stream with one, because the proxy stops."""
        name = self._service.title if self._service else self.router.name
        self.interrupt("stopped", errors.gateway_stopped() if self.router.namespace else errors.replica_stopped(name))

    def interrupt(self, reason: str, error: RequestError) -> None:
        """End the work, and answer with an error, or end a stream with one; `reason` is for metrics and log."""
        self.error = reason
        try:
            self._cancel()
            self.send_error(error)
        except Exception:  # noqa: BLE001 - whoever ends this request has others to end, and keys to watch
            self.fail()

    def hang_up(self) -> None:
        """Leave the queue or cancel the engine's work, because the client is gone, and record the request."""
        self.status = CLIENT_GONE
        self._cancel()
        self.end()

    def _cancel(self) -> None:
        """Cancel the scan of the body, and the backend's work or the wait in the queue."""
        if self._task:
            self._task.cancel()
        if self._upstream:
            self._upstream.cancel()
        elif self._service:
            self._service.queue.leave(self)

    def send_error(self, error: RequestError) -> None:
        """Send an error as the response or, if that has begun, as the last event of a stream, and record the request.

        A response that has begun in a form without a place for an error is broken off. A request that is refused before
        its service is known is logged instead of recorded.
        """
        # 1. The response has begun. `end` records the request, and forgets the one to the backend: so the error is
        #    rendered first.
        exchange = self.exchange
        if exchange.started:
            if self._upstream and self.has_answer:
                rendered = self._upstream.render_error(error)
            else:
                rendered = open_stream(self.route, "").break_off(error)
            self.end()
            if rendered:  # empty if the form of the response has no place for an error
                exchange.finish(rendered)
            else:
                exchange.break_off()
            return

        # 2. It has not: the error is the whole response, which is sent after the request is recorded.
        if self._service:
            self.status = error.status
            error.headers[REQUEST_ID] = self.request_id
            error.headers[SERVICE_HEADER] = self._service.config.name
        else:  # the service is not known yet, so `end` has nothing to record
            log_refusal(self.router, self.head.label, error)
        self.end()
        exchange.respond(error.status, error.fields(), error.encode_body(self.head.label))

    def fail(self) -> None:
        """Answer after a defect, and log it."""
        log.exception("request_failed")
        self._cancel()
        if self.exchange.started:
            self.end()
            if not self.exchange.ended:
                self.exchange.break_off()
        else:
            self.send_error(errors.invalid_http(500, "the proxy failed to answer it"))

    def end(self) -> None:
        """Free the body and the slot of the request, and record it; called before the last of the response is sent.

        Calling it again, or before the service of the request is known, only frees the body.
        """
        self.free_body()
        self._shared.keep_alive.discard(self)
        self.router.forget(self)
        service = self._service
        if service is None:
            return
        self._service = None  # so that another call does nothing more
        if self._admission:
            was_left = self.status == CLIENT_GONE and self._upstream is not None and self._upstream.was_sent
            self._admission.settle(service, self.tokens, was_served=self.has_answer, was_left=was_left)
        self._free_slot(service)
        service.record_request(self)
        self._upstream = None  # it refers to this object, which must not wait for the garbage collector

    def _free_slot(self, service: Service) -> None:
        """Give back the slot that it holds, if any."""
        if upstream := self._upstream:
            upstream.forget_answer()
            upstream.free_slot()
            service.queue.finish_request(time.monotonic() - self.phase_began)  # the time in the slot
