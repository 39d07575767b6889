"""The line of the log that each request leaves: when it has ended, or when it is refused before it has a service."""

from typing import TYPE_CHECKING, Final

from gateway.event_log import EventRecord, log

if TYPE_CHECKING:
    from gateway.proxy.errors import RequestError
    from gateway.proxy.router import ListenerRouter, Router

CLIENT_GONE: Final = 499
"""Status in log and metrics of a request whose client hung up; no response has it."""


class RequestRecord(EventRecord, kw_only=True, omit_defaults=True, tag="request_finished"):
    """The log line of a request; it has nothing of the request's content."""

    service: str
    route: str
    status: int
    seconds: float
    queued_seconds: float
    first_token_seconds: float | None
    tokens_in: int | None
    tokens_out: int | None
    request_id: str
    error: str = ""
    key: str = ""
    fallback_from: tuple[str, ...] = ()
    """The services for which this one stood in, each with the cause."""


def log_refusal(router: "Router | ListenerRouter", route: str, error: "RequestError") -> None:
    """Log a request that is refused before it reaches a service."""
    log.info("request_refused", listener=router.name, route=route, status=error.status, code=error.code)
