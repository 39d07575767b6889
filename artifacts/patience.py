"""How long a server may take and how often it is asked again: plain numbers and a pure back-off, no clock."""

import dataclasses
import math
import random

from artifacts.errors import ArtifactError, Reason

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
    """Counts failures. Bounded, since the furthest position only grows: a server cannot keep it going for ever."""

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
            ArtifactError: `error` itself, when another attempt is pointless or one too many.

        """
        if position >= self._furthest + self._patience.progress_bytes:
            self._furthest = position
            self._failures = 0
        self._failures += 1
        if not error.retryable or error.reason not in _WORTH_ANOTHER_TRY or self._failures >= self._patience.attempts:
            raise error
        pause = math.ldexp(self._patience.first_pause_seconds, self._failures - 1)
        # Half of it is drawn, so that many hosts that lost one server do not come back as one.
        return min(pause, self._patience.longest_pause_seconds) * random.uniform(0.5, 1.0)  # noqa: S311  not a secret
