"""The calls of a control API: their bodies, answers and refusals, for every process that serves one."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec

from crds.size import size_text
from gateway.http.awaited_exchange import AwaitedExchange
from gateway.http.control_messages import JSON_FIELDS, ControlRefusal
from gateway.http.exchange import Exchange

AnswerCall = Callable[[AwaitedExchange], Awaitable[None]]
"""Answers one call; raises ControlError to refuse it."""


class ControlError(Exception):
    """A call that is refused, with its status."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def begin_call(exchange: Exchange, answer: AnswerCall) -> AwaitedExchange:
    """Begin to answer one call, or to refuse it with the status of a ControlError."""

    async def answer_or_refuse(call: AwaitedExchange) -> None:
        try:
            await answer(call)
        except ControlError as error:
            respond(call, ControlRefusal(str(error)), error.status)

    return AwaitedExchange(exchange, answer_or_refuse)


def respond(call: AwaitedExchange, body: msgspec.Struct, status: HTTPStatus = HTTPStatus.OK) -> None:
    """Answer a call with a JSON object."""
    call.exchange.respond(status, JSON_FIELDS, msgspec.json.encode(body))


async def read_body(call: AwaitedExchange, limit_bytes: int) -> bytes:
    """Return the body of a call. Raises ControlError if it is too long."""
    body = bytearray()
    while piece := await call.read():
        body += piece
        if len(body) > limit_bytes:
            problem = f"the body is larger than {size_text(limit_bytes)}"
            raise ControlError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, problem)
    return bytes(body)
