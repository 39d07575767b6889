"""Sample the memory pressure of this host and perform the actions that `pressure_policy.step` decides.

The state is written to disk before an action is performed, so that a process that was evicted stays evicted over a
restart of the agent, and returns later. A sample is taken each second, which is cheap; idle times need a request to the
proxy, so they are read only while there is pressure.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from artifacts import durable
from crds.meta import MEMORY_PRESSURE
from devices.pressure import PressureLevel, PressureReading
from kube.client import Obj
from kube.time import rfc3339
from metal_agent import lifecycle
from metal_agent import process_events as events
from metal_agent.holds.hold_gate import HoldableProcess, HoldGate, HostHold
from metal_agent.memory import pressure_policy
from metal_agent.memory.ledger import Ledger
from metal_agent.memory.pressure_policy import ActionKind, EvictionCandidate, HoldAction, MemoryStage, PressureState
from metal_agent.periodic import run_periodically

_HOLD: Final = "this host is short of memory: no engine is started here until the pressure is over"
_EVICTED: Final = "this host is short of memory: the engine was stopped, and is started again when the pressure is over"
_DISPLACED: Final = "this host is short of memory: the process serves on until its replacement on another host answers"
_MESSAGES: Final[dict[ActionKind, str]] = {
    "hold": _HOLD,
    "displace": _DISPLACED,
    "cancel": "the process stays on this host: the pressure is over, or no other host has room for it",
    "evict": _EVICTED,
    "hasten": "this host is short of memory: the engine, which drains, is stopped now",
    "release": "this host has memory again: held processes are started, evicted ones return one after the other",
    "return": "this host has memory again: the evicted process is started",
}

log = structlog.get_logger()

Record = TypeVar("Record", bound=msgspec.Struct)


class PressureRecord(msgspec.Struct, frozen=True):
    """The state file `pressure.json`: the fields of the pressure state that the next agent needs."""

    is_under_pressure: bool = False
    displacing: str | None = None
    evicted: tuple[str, ...] = ()
    needed_calm_seconds: float = pressure_policy.CALM_SECONDS


class PressureWatchdog:
    """The memory pressure of one host: a `HoldSource`.

    Args:
        path: the state file.
        runners: the processes of this host, by uid of their MetalProcess.
        gate: the gate that sends the holds.
        ledger: the reservations of the processes.
        on_action: called with each action after it was begun, and with a message for the user.
        read: reads level and free memory; blocks for a moment, so it is called in a thread.
        idle_seconds: returns by uid the time since the last request: None if there was none; unknown processes are
            left out.

    Raises OSError when the state file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        runners: Mapping[str, HoldableProcess],
        gate: HoldGate,
        ledger: Ledger,
        on_action: Callable[[HoldAction, str], None],
        *,
        read: Callable[[], PressureReading],
        idle_seconds: Callable[[], Awaitable[Mapping[str, float | None]]],
    ) -> None:
        """Read the decisions that an earlier agent recorded, and become a source of holds of `gate`."""
        self._path, self._runners, self._gate = path, runners, gate
        self._ledger, self._on_action = ledger, on_action
        self._read, self._idle_seconds = read, idle_seconds

        # Go on where the agent before ended: what it evicted stays evicted.
        # _written: the record as it is on disk. `state` has its decisions, and clocks that begin anew.
        self._written = durable.read(path, PressureRecord) or PressureRecord()
        self.state = msgspec.convert(self._written, PressureState, from_attributes=True)
        self.level: PressureLevel | None = None
        """The level of the last sample; None if the system reports none."""
        self.action_counts: Counter[ActionKind] = Counter()
        """The number of actions of each kind that this agent has performed."""

        self._has_level = False  # True once the system has reported a level
        self._is_first_sample = True
        self._pressure_since = datetime.now(UTC)
        """Start of the present pressure, or of the agent if that was later."""
        gate.add(self)

    async def run(self) -> None:
        """Sample until cancelled."""
        await run_periodically(self.sample, pressure_policy.SAMPLE_SECONDS, name="pressure sample")

    async def sample(self) -> None:
        """Take one sample, decide, write the decisions to disk, and perform the actions that follow from them.

        Idle times, which decide what goes first, are read only under pressure, as the proxy has to be asked. A process
        that never had a request counts as idle since it became Ready.
        """
        reading = await asyncio.to_thread(self._read)
        if reading.level != self.level:
            log.info("pressure_level_changed", pressure=reading.level, available_bytes=reading.available_bytes)
        self.level = reading.level
        self._has_level = self._has_level or reading.level is not None

        is_calm = reading.level in {None, "normal"}  # None: the system reports no level
        if self._is_first_sample and is_calm and not (self.state.evicted or self.state.displacing):
            self.state = replace(self.state, is_under_pressure=False)  # it ended while no agent ran
        self._is_first_sample = False

        idle_by_uid = {} if is_calm else await self._idle_seconds()
        now = time.monotonic()
        candidates = []
        for uid, runner in self._runners.items():
            idle_seconds, ready_since = idle_by_uid.get(uid), runner.state.ready_since
            if uid in idle_by_uid and idle_seconds is None and ready_since is not None:  # it never had a request
                idle_seconds = now - ready_since
            candidates.append(describe_candidate(runner, self._ledger.reserved.get(uid, 0), idle_seconds))

        self.state, actions = pressure_policy.step(self.state, reading.level, candidates, now)
        record = msgspec.convert(self.state, PressureRecord, from_attributes=True)
        self._written = await save_record(self._path, record, self._written)

        for action in actions:
            self._perform(action)
        self._gate.refresh()

    def find_hold(self, uid: str) -> events.Held | None:
        """Return the hold that keeps the process from starting an engine now, or None if it may start one."""
        if uid in self.state.evicted:
            return events.Held(MEMORY_PRESSURE, _EVICTED)
        return events.Held(MEMORY_PRESSURE, _HOLD) if self.state.is_under_pressure else None

    def retain(self, uids: set[str]) -> None:
        """Forget evicted processes that are not among `uids`, the uids of all processes assigned to this host."""
        self.state = replace(self.state, evicted=tuple(uid for uid in self.state.evicted if uid in uids))

    def pressure_condition(self) -> Obj:
        """Return the MetalHost's condition MemoryPressure, without lastTransitionTime."""
        if self.state.is_under_pressure:
            stopped = f"{_HOLD}; {len(self.state.evicted)} processes were stopped"
            status, reason, message = "True", MEMORY_PRESSURE, stopped
        elif self._has_level:
            status, reason, message = "False", "MemorySuffices", "engines are started as they are assigned"
        else:
            status, reason, message = "Unknown", "LevelUnknown", "the operating system reports no memory pressure level"
        return {"type": MEMORY_PRESSURE, "status": status, "reason": reason, "message": message}

    def find_displacement(self, process: HoldableProcess) -> events.Held | None:
        """Return why the process is displaced for lack of memory, so that the cluster replaces it; None if it may stay.

        Displaced is the process that the policy has chosen, which serves on while it is Ready, and each process without
        an engine that this pressure keeps from starting: evicted, or held (`awaits_release`).
        """
        uid, state = process.assignment.uid, process.state
        if uid == self.state.displacing and state.phase == "Ready":
            return events.Held(MEMORY_PRESSURE, _DISPLACED)
        if uid == self.state.displacing or uid in self.state.evicted or state.awaits_release:
            return self.find_hold(uid)  # the reason; None if this pressure does not hold it
        return None

    def list_holds(self) -> list[HostHold]:
        """Return the hold of the whole host while it is short of memory."""
        return [HostHold("pressure", _HOLD, rfc3339(self._pressure_since))] if self.state.is_under_pressure else []

    def _perform(self, action: HoldAction) -> None:
        """Count, log and report one action, and perform an eviction; other holds are sent by `HoldGate.refresh`."""
        if action.kind == "hold":
            self._pressure_since = datetime.now(UTC)  # for `list_holds`
        elif action.kind in {"evict", "hasten"}:
            self._gate.evict(action.uid, events.Evicted(MEMORY_PRESSURE, _EVICTED))
        self.action_counts[action.kind] += 1
        log.warning("pressure_action", action=action.kind, uid=action.uid, pressure=self.level)
        self._on_action(action, _MESSAGES[action.kind])


async def save_record(path: Path, wanted: Record, written: Record) -> Record:
    """Write the decisions of a watchdog, before they are performed, if they have changed; return the record on disk.

    On a full disk they are performed all the same, and the next sample tries again.
    """
    if wanted != written:
        try:
            await asyncio.to_thread(durable.write, path, wanted)
        except OSError as error:
            log.warning("watchdog_record_not_written", path=str(path), error=str(error))
            return written
    return wanted


def describe_candidate(
    process: HoldableProcess, memory_bytes: int = 0, idle_seconds: float | None = None
) -> EvictionCandidate:
    """Return the facts about a process by which the policies pick one for displacement or eviction."""
    spec = process.assignment.spec
    return EvictionCandidate(
        uid=process.assignment.uid,
        priority=spec.priority,
        stage=memory_stage(process.state),
        memory_bytes=memory_bytes,
        idle_seconds=idle_seconds,
        has_protection=spec.protected,
    )


def memory_stage(state: lifecycle.ProcessState) -> MemoryStage:
    """Return the stage of a process, by the memory that it holds or frees, for the pressure policy.

    absent: no engine. loading: not Ready yet. serving: Ready. draining: stopped once its requests have ended. ending:
    being stopped now, because that was hastened (urgent), or because an engine in Starting has failed: it has a reason.
    """
    if state.phase == "Stopping":
        return "draining" if state.exists and not state.is_hastened else "ending"
    if not state.exists:
        return "absent"
    if state.phase == "Starting":
        return "ending" if state.reason else "loading"
    return "serving"
