"""Processes that are over while their host still reports their memory as taken.

An agent reports each process and its host in two writes. Between these, the room of a process is neither taken by a
unit nor free. Without this module, a unit that was promised it would lose it, and others would be evicted in vain.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from controller.placement.units import Unit
from kube.resources import METAL_HOSTS
from kube.store import Store

UNREPORTED_SECONDS: Final = 30.0
"""Time in which a host certainly reports the end: one that does not has an engine that it cannot end."""


class _UnreportedEnd(NamedTuple):
    unit: Unit
    until: float


class UnreportedEnds:
    """The processes of the last round, and the ended ones whose memory their host still reports as taken.

    Args:
        wake: called when a host has not reported an end in time.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """Start without processes; `add_to` learns them from round to round."""
        self._wake = wake
        # By uid: the processes with a host at the last call, and the ended ones that their host still counts.
        self._last_placed: dict[str, Unit] = {}
        self._ends: dict[str, _UnreportedEnd] = {}

    def add_to(self, units: tuple[Unit, ...], store: Store) -> tuple[Unit, ...]:
        """Return the units, with ended processes added as ending units while their host reports their memory as taken.

        Otherwise this memory would seem to be lost between the two reports of an agent, of the process and of its host.
        Processes that have gone since the last call are noted as ended; they are forgotten once the host has reported
        it, or after UNREPORTED_SECONDS.
        """
        loop = asyncio.get_running_loop()

        # 1. Note processes that were placed at the last call and are gone now, if their host still counts them.
        placed = {unit.uid: unit for unit in units if unit.key.kind == "process" and unit.cells}
        for uid in self._last_placed.keys() - placed.keys():
            unit = msgspec.structs.replace(self._last_placed[uid], state="ending")
            if _is_reported(store, unit):
                self._ends[uid] = _UnreportedEnd(unit, loop.time() + UNREPORTED_SECONDS)
                loop.call_later(UNREPORTED_SECONDS, self._wake)
        self._last_placed = placed

        # 2. Forget those that the host has reported, that are back, or that took too long.
        for uid, end in list(self._ends.items()):
            if end.until <= loop.time() or uid in placed or not _is_reported(store, end.unit):
                del self._ends[uid]
        return (*units, *(end.unit for end in self._ends.values()))


def _is_reported(store: Store, unit: Unit) -> bool:
    """Return whether the host of a process reports its memory as taken."""
    host = store.get(METAL_HOSTS, unit.cells[0].removeprefix("host/"))
    if host is None:
        return False
    processes = (host.get("status") or {}).get("processes") or ()
    return any(process["uid"] == unit.uid for process in processes)
