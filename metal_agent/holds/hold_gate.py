"""The gate of a host's engines: a process is held as long as any source holds it.

The sources know nothing of each other. After a change of one of them the gate computes the hold of each process anew,
and sends only what differs, so that the end of one hold frees nothing that another source holds.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from crds.meta import DISRUPTION_TARGET
from metal_agent.process_events import Evicted, Held, Released

if TYPE_CHECKING:
    from kube.client import Obj
    from metal_agent.assignments import Assignment
    from metal_agent.lifecycle import ProcessState

HOLD_SOURCES: Final = ("pressure", "schedule", "activity", "battery", "heat")


class HoldableProcess(Protocol):
    """A process that may be held or evicted; a runner is one."""

    @property
    def assignment(self) -> "Assignment":
        """The MetalProcess that it runs."""

    @property
    def state(self) -> "ProcessState":
        """Its state."""

    def notify(self, event: Held | Evicted | Released) -> None:
        """Send the event that it is held, evicted or released."""


class HostHold(msgspec.Struct, frozen=True, rename="camel"):
    """One reason for which this host starts no engine, as the control socket reports it, too."""

    source: str
    """One of `HOLD_SOURCES`."""
    message: str
    since: str
    """In the form of RFC 3339."""


class HoldSource(Protocol):
    """A source of holds, such as memory pressure."""

    def find_hold(self, uid: str) -> Held | None:
        """Return the hold of this source that keeps the process from starting an engine, or None."""

    def find_displacement(self, process: HoldableProcess) -> Held | None:
        """Return why this source displaces the process, or None if it may stay."""

    def list_holds(self) -> list[HostHold]:
        """Return the holds of the whole host."""


class HoldGate:
    """The sources of holds of one host, the most important one first; `runners` are its processes by uid."""

    def __init__(self, runners: Mapping[str, HoldableProcess]) -> None:
        """Begin without sources: nothing is held."""
        self._runners = runners
        self._sources: list[HoldSource] = []  # such as memory pressure; the most important first
        self._sent_holds: dict[str, Held | None] = {}
        """The hold that was last sent to each process, by uid."""

    def add(self, source: HoldSource) -> None:
        """Add a source of holds; the first ones added are the most important."""
        self._sources.append(source)

    def admit_runner(self, uid: str) -> Held | None:
        """Return the hold with which a new runner of the process begins; changes of it are sent as events later."""
        self._sent_holds[uid] = self._find_hold(uid)
        return self._sent_holds[uid]

    def refresh(self) -> None:
        """Send each process its hold if that has changed. A source calls it after each change of its own."""
        # _sent_holds: by uid, the hold that was sent last; None: it is not held.
        self._sent_holds = {uid: hold for uid, hold in self._sent_holds.items() if uid in self._runners}
        for uid, runner in self._runners.items():
            hold = self._find_hold(uid)
            if hold != self._sent_holds.get(uid):
                self._sent_holds[uid] = hold
                runner.notify(Released() if hold is None else hold)

    def evict(self, uid: str, event: Evicted) -> None:
        """Send a process its eviction, unless it was removed meanwhile; it counts as held until the next `refresh`."""
        if runner := self._runners.get(uid):
            runner.notify(event)
            self._sent_holds[uid] = Held(event.reason, event.message)

    def displacement_condition(self, process: HoldableProcess) -> "Obj | None":
        """Return the condition that asks the cluster to replace the process on another host; None if it may stay.

        That is DisruptionTarget of the MetalProcess, without lastTransitionTime, by the most important source.
        """
        for source in self._sources:  # the most important one first
            if hold := source.find_displacement(process):
                return {"type": DISRUPTION_TARGET, "status": "True", "reason": hold.reason, "message": hold.message}
        return None

    def list_holds(self) -> list[HostHold]:
        """Return the holds of the host by all sources."""
        return [hold for source in self._sources for hold in source.list_holds()]

    def _find_hold(self, uid: str) -> Held | None:
        """Return the hold of the most important source that holds the process; None if none does."""
        holds = (source.find_hold(uid) for source in self._sources)
        return next((hold for hold in holds if hold), None)
