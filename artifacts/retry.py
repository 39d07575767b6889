"""Patience of a download: how long it waits for a server, and how often it tries again."""

import dataclasses

from artifacts.errors import ArtifactError, Reason
from kube.backoff import BELOW, backoff_seconds

_WORTH_ANOTHER_TRY: frozenset[Reason] = frozenset({"SourceUnreachable", "SourceChanged", "ChecksumMismatch"})


@dataclasses.dataclass(frozen=True)
class Patience:
    """Bounds on waiting.

    Attributes:
        connect_seconds: for a connection, including name resolution and TLS.
        silence_seconds: between two bytes of an answer.
        attempts: requests in a row that may fail without progress.
        first_pause_seconds: pause after the first failure; it doubles with each up to `longest_pause_seconds`.
        progress_bytes: how much further than ever before counts as progress, and starts the counting anew.

    """

    connect_seconds: float = 30.0
    silence_seconds: float = 60.0
    attempts: int = 5
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 30.0
    progress_bytes: int = 1 << 20


DEFAULT_PATIENCE = Patience()


class Backoff:
    """Counts failures in a row until `patience` ends.

    Only a position further than ever before counts as progress, so that no server can keep a download going for ever.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._failures = 0
        self._furthest = 0

    def pause_seconds(self, error: ArtifactError, position: int = 0) -> float:
        """Return how long to wait before the next attempt.

        Args:
            error: what went wrong.
            position: how far this attempt got, in bytes from the start of the file.

        Raises:
            ArtifactError: `error` itself, when the error is permanent or was the last attempt that `patience` allows.

        """
        if position >= self._furthest + self._patience.progress_bytes:
            self._furthest = position
            self._failures = 0
        self._failures += 1
        if not error.retryable or error.reason not in _WORTH_ANOTHER_TRY or self._failures >= self._patience.attempts:
            raise error
        return backoff_seconds(
            self._failures,
            first=self._patience.first_pause_seconds,
            most=self._patience.longest_pause_seconds,
            jitter=BELOW,
        )
