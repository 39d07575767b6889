"""The one error of this package: a CamelCase reason for conditions, a sentence for people, and whether to try again."""

from typing import Final, Literal

RETRYABLE_EXIT: Final = 1
"""Exit code of `pomona inspect` and `pomona fetch` for a failure that may pass by itself."""
PERMANENT_EXIT: Final = 2
"""Their exit code for what trying again cannot heal: the controller makes no further Job."""

Reason = Literal[
    "SourceInvalid",  # the text is no source that can exist
    "SourceNotFound",  # the server says that it is not there
    "SourceUnauthorized",  # the server wants a token, or another one
    "SourceForbidden",  # this machine does not give the file out
    "SourceRefused",  # the server does not serve it in a way that can be used
    "SourceUnreachable",  # network, time-out, overload
    "SourceChanged",  # upstream is no longer what was asked for
    "ChecksumMismatch",
    "HeaderInvalid",  # no GGUF, a broken or a hostile one
    "SplitUnsupported",
    "NoSpace",
    "StorageFailed",
]


class ArtifactError(Exception):
    """Weights could not be fetched or inspected.

    Attributes:
        reason: CamelCase, fit for a Kubernetes condition.
        message: one line that names the object, the value and the way out; holds no secret.
        retryable: True when the same call may succeed later without anybody changing anything here.

    """

    def __init__(self, reason: Reason, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message
        self.retryable = retryable
