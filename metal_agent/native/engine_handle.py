"""The handle of a running engine, which is a process of its own or a model in a shared daemon.

Both have the same lifecycle: an engine is started, generates its first token, ends by itself or on request, and is
adopted by the next agent. Only the way to do this differs, and the handle hides it from the runner.
"""

import asyncio
from abc import ABC, abstractmethod
from typing import Annotated, Final

import msgspec

from metal_agent.native.engine_keys import EngineKey

LAST_PID: Final = 2**31 - 1
"""The last value of the system's own type: a call with a larger one, from a damaged record, would be an overflow."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identity of a process among all others, earlier and later: a pid is not used twice with the same start time."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=LAST_PID)]
    start_time: str
    boot_id: str


class EngineExit(msgspec.Struct, frozen=True):
    """The exit of an engine; empty for an adopted process, whose exit status the system does not report to us."""

    code: int | None = None
    signal: str | None = None
    reason: str = ""
    """CamelCase reason, if an engine without a process of its own reports one; `message` has the way out."""
    message: str = ""


class EngineHandle(ABC):
    """A running engine, started or adopted. Needs a running event loop."""

    pid: int | None = None
    """Process id, if it has a process of its own."""
    identity: ProcessIdentity | None = None
    """Identity of its process; None if it has no process of its own, or if the process ended at once."""
    model: str | None = None
    """Name of the model in requests to the engine; None if that is the service's name."""
    key: EngineKey | None = None
    """The key of its process; None if it has no process of its own, or was started without a key."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[EngineExit] = self._loop.create_future()

    @property
    def token(self) -> str | None:
        """Bearer token that the engine itself requires. Never logged, never in a status."""
        return self.key.token if self.key else None

    @property
    def has_ended(self) -> bool:
        """True once the engine has ended, or is not watched any more."""
        return self._exit.done()

    async def wait(self) -> EngineExit:
        """Wait until the engine has ended, for any reason; return its exit."""
        return await asyncio.shield(self._exit)

    @abstractmethod
    def url(self) -> str | None:
        """Return the URL at which the engine listens on loopback, or None. It may block: called in a thread."""

    @abstractmethod
    async def end(self, grace_seconds: float, *, even_if_shared: bool = False) -> None:
        """Stop the engine, by force after the grace if possible, and wait until it is gone.

        With `even_if_shared`, a model in a daemon is unloaded although it serves another process of ours too.
        """

    @abstractmethod
    def release(self) -> None:
        """Stop watching the engine, which goes on."""
