"""The line of the log that each request leaves when it has ended."""

from gateway.event_log import EventRecord


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
