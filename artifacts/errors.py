"""The one error of this package: a CamelCase reason for conditions, a message for users, and whether to retry."""

from typing import Final, Literal, get_args

RETRYABLE_EXIT: Final = 1
"""Exit code of `pomona inspect` and `pomona fetch` for a failure that a retry may heal."""
PERMANENT_EXIT: Final = 2
"""Exit code of the same commands for a failure that no retry heals: the controller creates no further Job."""

Reason = Literal[
    "SourceInvalid",  # the text is not a valid source
    "SourceNotFound",  # the server has no such file, repository or revision
    "SourceUnauthorized",  # the server requires a token, or a different token
    "SourceForbidden",  # outside --file-root
    "SourceRefused",  # the server refused, or its response cannot be used
    "SourceUnreachable",  # network, time-out, overload
    "SourceChanged",  # the file on the server has another revision now
    "ChecksumMismatch",
    "HeaderInvalid",  # not a GGUF header, or a damaged or hostile one
    "CustomCode",  # the artifact names Python that a loader would run
    "SplitUnsupported",
    "NoSpace",
    "StorageFailed",
]
REASONS: Final[frozenset[str]] = frozenset(get_args(Reason))
"""All reasons, by which those that another machine states are checked."""


class ArtifactError(Exception):
    """Weights could not be fetched or inspected.

    Attributes:
        reason: CamelCase, fit for a Kubernetes condition.
        message: one line that names the object, the value and the remedy; contains no secret.
        retryable: True when the same call may succeed later without any change on this side.
        retry_after_seconds: the pause that the server asks for (Retry-After), at most an hour; 0 if it asks for none.
        is_overload: True when the server has too many requests or connections (HTTP 429, 503).

    """

    def __init__(
        self, reason: Reason, message: str, *, retryable: bool = False, retry_after_seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message
        # True: the same call may succeed later. The pause is what the server asks for, 0 if it asks for none.
        self.retryable = retryable
        self.retry_after_seconds = retry_after_seconds
        self.is_overload = False
