"""One engine that exists: what a runner asks of it, whether it is a process of its own or a model in a shared daemon.

The life of a service is the same for both: it is started, generates its first token, ends by itself or on request, and
is taken over by the next agent. Only how that is done differs, and that is all behind this interface.
"""

from typing import Protocol

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """Tells a process from every other one, before and after it: no pid is used twice within the same moment."""

    pid: int
    start_time: str
    boot_id: str


class Exit(msgspec.Struct, frozen=True):
    """How an engine ended; all of it is empty for a process that was no child of ours, so that nobody told us."""

    code: int | None = None
    signal: str | None = None
    reason: str = ""
    """One CamelCase word, where an engine without a process of its own says why; `message` has the way out."""
    message: str = ""


class Handle(Protocol):
    """One running engine, started or adopted. Needs a running event loop."""

    @property
    def pid(self) -> int | None:
        """Its process, where it has one of its own."""

    @property
    def identity(self) -> Identity | None:
        """Its process, told from every other one; None where it has none of its own, or that ended at once."""

    @property
    def model(self) -> str | None:
        """Name by which the engine knows what it serves; None where that is the service's own name."""

    @property
    def token(self) -> str | None:
        """Bearer token that the engine itself asks for. Never logged, never in a status."""

    def url(self) -> str | None:
        """Find where the engine listens on loopback; None while it does not. May block: called in a thread."""

    async def wait(self) -> Exit:
        """Wait for its end, whoever brings it about."""

    async def end(self, grace_seconds: float) -> None:
        """End it, by force after the grace where that is possible, and wait until it is gone."""

    def release(self) -> None:
        """Stop watching; the engine goes on."""
