"""The precedence of admissions over reconciles.

Each admission of the queue changes a service, which is decided and written anew, several times. All at once these would
take the processor and the API server from the admissions that follow, for which users wait. So as long as units are
being admitted, objects are reconciled one after the other.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Final

LONGEST_WAIT_SECONDS: Final = 5.0
"""An object waits no longer than this for admissions to end: a slow API server holds up nothing else for long."""


class AdmissionPrecedence:
    """Admissions and reconciles of one controller."""

    def __init__(self) -> None:
        self._no_admissions = asyncio.Event()
        self._no_admissions.set()
        self._reconciles = 0
        """Objects that are being reconciled now."""

    @contextlib.contextmanager
    def admitting(self) -> Iterator[None]:
        """Hold other reconciles back while units are admitted in this context."""
        self._no_admissions.clear()
        try:
            yield
        finally:
            self._no_admissions.set()

    @contextlib.asynccontextmanager
    async def reconciling(self) -> AsyncIterator[None]:
        """Reconcile an object in this context, after a wait if units are being admitted.

        During admissions one object is reconciled at a time: only if another one is, this one waits until they end, and
        no longer than `LONGEST_WAIT_SECONDS`.
        """
        # Wait until admissions end, if another object is being reconciled meanwhile.
        if self._reconciles and not self._no_admissions.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_WAIT_SECONDS):
                    await self._no_admissions.wait()

        # Count this one while it is reconciled, whether or not the wait was too long.
        self._reconciles += 1
        try:
            yield
        finally:
            self._reconciles -= 1
