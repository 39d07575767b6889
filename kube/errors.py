"""The two ways in which a call to the API server fails: the server refused (ApiError) or did not answer (Unreachable).

The difference matters to every caller: after Unreachable a write may or may not have happened, and an object that
could not be read is unknown, never absent. NotOurs is neither: the server would accept the write, but the object is
not ours.
"""

# ruff: noqa: N818 - the names of these errors are those of the API's own reasons


class Unreachable(Exception):
    """No answer: connecting, TLS or a time-out failed, or the connection was cut. A write may have happened."""


class NotOurs(Exception):
    """The object of the needed name belongs to another owner."""


class NotDeletedYet(NotOurs):
    """It belongs to a former object of the owner's name, and goes by itself."""


class LeadershipLost(Exception):
    """The lease could not be renewed in time, or another process holds it: the led work must not write any more."""


class ApiError(Exception):
    """The server's refusal.

    Attributes:
        call: verb, resource and name.
        status: the HTTP status code.
        reason: the server's CamelCase reason, such as `AlreadyExists`.
        message: the server's message.
        retry_after_seconds: the wait that the server requests, if any.
        causes: the fields that the server complains about, as (field, message).
    """

    def __init__(
        self,
        call: str,
        *,
        status: int,
        reason: str = "",
        message: str = "",
        retry_after_seconds: float | None = None,
        causes: tuple[tuple[str, str], ...] = (),  # of each: the field, the message
    ) -> None:
        super().__init__(f"{call}: {status} {reason or 'no reason'}: {message or 'no message'}")
        self.call = call
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.causes = causes


class Unauthorized(ApiError):
    """401: the credentials are not, or no longer, accepted."""


class Forbidden(ApiError):
    """403: RBAC or an admission policy refused."""


class NotFound(ApiError):
    """404: the object, or the resource itself, does not exist."""


class Conflict(ApiError):
    """409, or a failed `test` of a JSON patch: another client was faster; read again and decide again."""


class Gone(ApiError):
    """410: the resourceVersion is too old to continue from; list again."""


class Invalid(ApiError):
    """422: the object breaks its schema or a CEL rule, or changes an immutable field; the same write never succeeds."""


BY_STATUS: dict[int, type[ApiError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
}
