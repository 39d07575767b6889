"""The parts of a host that all its runners share: where requests come from, memory, weights, keys and records."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import aiohttp
import msgspec
from msgspec import field

from metal_agent.assignments import Assignment
from metal_agent.benchmarks.measurements import Measurements
from metal_agent.daemons import Daemons
from metal_agent.memory.ledger import Ledger
from metal_agent.memory.peaks import Peaks
from metal_agent.native.engine_keys import EngineKeys
from metal_agent.process_events import Held
from metal_agent.supervise.load_queue import LoadQueue
from metal_agent.supervise.records import Records
from metal_agent.weights import HostWeights

if TYPE_CHECKING:
    from metal_agent.supervise.runner import Runner


class Exposure(Protocol):
    """The way of requests to a process."""

    async def withdraw(self, assignment: Assignment, timeout_seconds: float) -> None:
        """Route no new request to the process; takes a bounded time, and raises no error of the API server."""

    async def drain(self, uid: str, timeout_seconds: float) -> None:
        """Send the process no new request, and wait, for a bounded time, until it has none in progress."""

    def requests(self, uid: str) -> int | None:
        """Return the number of requests in progress that the proxy last reported for the process; None if unknown."""

    async def clear_suspicion(self, uid: str) -> None:
        """Tell the proxy that the agent has checked the process and that it works; raises no error of the proxy."""


async def _do_nothing() -> None:
    """Do nothing."""


class RunnerContext(msgspec.Struct, frozen=True):
    """The parts of the host that all its runners share."""

    folder: Path
    records: Records
    keys: EngineKeys
    weights: HostWeights
    ledger: Ledger
    session: aiohttp.ClientSession
    exposure: Exposure
    secret: Callable[[str, str], str | None]
    """Returns the token in a Secret by namespace and name, or None if unknown."""
    changed: Callable[["Runner"], None]
    """Called after each change of state or progress."""
    daemons: Daemons = field(default_factory=lambda: Daemons(Path(), ()))
    loads: LoadQueue = field(default_factory=LoadQueue)
    peaks: Peaks = field(default_factory=Peaks)
    measurements: Measurements = field(default_factory=Measurements)
    measure_memory: Callable[[], Awaitable[None]] = _do_nothing
    """Updates the ledger with the memory in use now."""
    hold: Callable[[str], Held | None] = lambda _uid: None
    """Returns, by uid, the hold that keeps a new runner from starting an engine, or None; later changes are events."""
