"""Sample what the owner's policy depends on, and perform the actions that `pause_policy.step_pause` decides.

The state is written to disk before an action is performed, so that what was stopped stays stopped over a restart of the
agent. A source that the owner has turned off meanwhile holds nothing any more.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import structs

from artifacts import durable
from crds.meta import HOST_PAUSED, PAUSED
from crds.metalprocess import HOLDS_NO_MEMORY
from devices import power, thermal, user_input
from devices.power import Power
from kube.client import Obj
from kube.time import rfc3339
from metal_agent.holds import owner_policy, pause_policy
from metal_agent.holds.hold_gate import HoldableProcess, HoldGate, HostHold
from metal_agent.holds.owner_policy import REASONS, OwnerPolicy, OwnerSample, OwnerSource, SourceState
from metal_agent.holds.pause_policy import PauseState
from metal_agent.memory.pressure_policy import ActionKind, HoldAction
from metal_agent.memory.pressure_watchdog import describe_candidate, save_record
from metal_agent.periodic import run_periodically
from metal_agent.process_events import Evicted, Held

_HELD: Final = "no engine is started before the pause ends"
_EVICTED: Final = "the engine was stopped, and is started again after the pause"
_DISPLACED: Final = "the process serves on until its replacement on another host answers"
_NOTES: Final[dict[ActionKind, str]] = {
    "pause": "no engine is started, and services move to other hosts where they fit",
    "resume": "the owner does not need this host any more: engines are started again",
    "displace": _DISPLACED,
    "cancel": "the process stays on this host: its owner does not need the host any more",
    "evict": _EVICTED,
}

log = structlog.get_logger()


class PauseRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state file `holds.json`: the part of the state that the next agent needs."""

    sources: dict[str, str] = {}
    """Time since when each source holds, in the form of RFC 3339; a source may be one of a later version."""
    displacing: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()


ReadSample = Callable[[tuple[OwnerSource, ...]], OwnerSample]


def read_owner_sample(sources: tuple[OwnerSource, ...]) -> OwnerSample:
    """Read the facts of `sources`, and no others: each costs the start of a program. Blocks for some 50 ms."""
    return OwnerSample(
        moment=datetime.now(UTC),
        idle_seconds=user_input.read_idle_seconds() if "activity" in sources else None,
        power=power.read() if "battery" in sources else Power(),
        thermal=thermal.read() if "heat" in sources else None,
    )


class PauseWatchdog:
    """The pauses of one host by its owner: a `HoldSource`.

    Args:
        path: the state file.
        runners: the processes of this host, by uid of their MetalProcess.
        gate: the gate that sends the holds.
        policy: the owner's policy.
        on_action: called with each action after it was begun, and with a message for the user.
        read: reads the facts of some sources; blocks for a moment.

    Raises OSError when the state file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        runners: Mapping[str, HoldableProcess],
        gate: HoldGate,
        policy: OwnerPolicy,
        on_action: Callable[[HoldAction, str], None],
        *,
        read: ReadSample = read_owner_sample,
    ) -> None:
        """Read the pause that an earlier agent recorded, and become a source of holds of `gate`."""
        self._path, self._runners, self._gate = path, runners, gate
        self._policy, self._on_action, self._read = policy, on_action, read

        # Go on where the agent before ended: what it paused and evicted stays so.
        self._written = record = durable.read(path, PauseRecord) or PauseRecord()
        # By source that holds (a reason of the owner, such as quiet hours), the time since when.
        self._held_since = {source: record.sources[source] for source in policy.sources if source in record.sources}
        self._sources = {source: SourceState(holds=source in self._held_since) for source in self._policy.sources}
        self._sampled_at: float | None = None
        self.state = PauseState(
            is_paused=bool(record.sources),
            displacing=dict.fromkeys(record.displacing, 0.0),  # their time begins anew
            evicted=frozenset(record.evicted),
        )
        gate.add(self)

    async def run(self) -> None:
        """Sample until cancelled; without a policy of the owner there is nothing to sample."""
        if self._policy.sources or self.state.is_paused:
            await run_periodically(self.sample, owner_policy.SAMPLE_SECONDS, name="owner policy")

    async def sample(self) -> None:
        """Take one sample, decide, write the decisions to disk, and perform the actions that follow from them."""
        sample = await asyncio.to_thread(self._read, self._policy.sources)
        now = time.monotonic()
        before = now if self._sampled_at is None else self._sampled_at  # the first sample counts no time
        seconds = min(now - before, owner_policy.LONGEST_STEP_SECONDS)  # a machine that slept took no samples
        self._sampled_at = now
        self._step_sources(sample, seconds)  # which updates `_held_since`

        candidates = [describe_candidate(runner) for runner in self._runners.values()]
        self.state, actions = pause_policy.step_pause(
            self.state,
            candidates,
            seconds,
            is_held=bool(self._held_since),
            pauses_critical=self._policy.pauses_critical,
        )

        sources = {str(source): since for source, since in self._held_since.items()}
        record = PauseRecord(sources, tuple(self.state.displacing), evicted=tuple(sorted(self.state.evicted)))
        # First, so that a later agent finishes the actions if this one ends here.
        self._written = await save_record(self._path, record, self._written)

        for action in actions:
            self._perform(action)
        self._gate.refresh()

    def find_hold(self, uid: str) -> Held | None:
        """Return the hold that keeps the process from starting an engine while the host is paused, or None."""
        if not self._is_pausing or self._is_spared(uid):
            return None
        return Held(HOST_PAUSED, self._explain(_EVICTED if uid in self.state.evicted else _HELD))

    def find_displacement(self, process: HoldableProcess) -> Held | None:
        """Return why the pause displaces the process, which asks the cluster for a replacement; None if it may stay.

        It may stay without a pause, if the owner's pause spares it (it is protected), or if it is Rejected or Stopped.
        """
        uid, state = process.assignment.uid, process.state
        if not self._is_pausing or self._is_spared(uid) or state.phase in HOLDS_NO_MEMORY:
            return None
        # A process without an engine is displaced, too: it would wait here for the end of the pause.
        awaits_end_of_pause = not state.exists
        if not (uid in self.state.displacing or uid in self.state.evicted or awaits_end_of_pause):
            return None
        # _EVICTED: the pause has stopped its engine. _HELD: none was started. _DISPLACED: it serves on.
        message_without_engine = _EVICTED if uid in self.state.evicted else _HELD
        message = _DISPLACED if state.phase == "Ready" else message_without_engine
        return Held(HOST_PAUSED, self._explain(message))

    def list_holds(self) -> list[HostHold]:
        """Return the holds of the owner's policy, one for each source."""
        return [HostHold(source, self._policy.describe(source), since) for source, since in self._held_since.items()]

    def retain(self, uids: set[str]) -> None:
        """Forget stopped processes that are not among `uids`, the uids of all processes assigned to this host."""
        self.state = structs.replace(self.state, evicted=self.state.evicted & uids)

    def paused_condition(self) -> Obj:
        """Return the MetalHost's condition Paused, without lastTransitionTime."""
        if not self._is_pausing:
            message = "engines are started as they are assigned"
            return {"type": PAUSED, "status": "False", "reason": "NotPaused", "message": message}
        first = next((source for source in REASONS if source in self._held_since), None)  # the most important one
        reason = REASONS[first] if first else "Resuming"  # no source holds any more: the pause is ending
        return {"type": PAUSED, "status": "True", "reason": reason, "message": self._describe()}

    @property
    def _is_pausing(self) -> bool:
        """True while the host is paused, or a source of the owner holds."""
        return self.state.is_paused or bool(self._held_since)

    def _is_spared(self, uid: str) -> bool:
        """Return whether the process goes on during a pause: it is protected, and its owner does not pause it."""
        runner = self._runners.get(uid)
        return runner is not None and not self._policy.pauses_critical and describe_candidate(runner).is_protected

    def _describe(self) -> str:
        """Return the reasons of the pause as text."""
        return " and ".join(self._policy.describe(source) for source in self._held_since) or "the pause is ending"

    def _explain(self, consequence: str) -> str:
        """Return a message with the reasons of the pause and its consequence."""
        return f"this host is paused by its owner ({self._describe()}): {consequence}"

    def _step_sources(self, sample: OwnerSample, seconds: float) -> None:
        """Advance the state of each source by the sample; note since when each source holds, and log the changes."""
        for source, before in self._sources.items():
            signal = owner_policy.judge_sample(self._policy, source, sample)
            after = self._sources[source] = owner_policy.step_source(before, signal, seconds, source)
            # _held_since: by source that holds, the time since when.
            if after.holds and not before.holds:
                self._held_since[source] = rfc3339(sample.moment)
            if before.holds and not after.holds:
                del self._held_since[source]
            if after.holds != before.holds:
                log.info("owner_hold_changed", source=source, holds=after.holds, why=self._policy.describe(source))

    def _perform(self, action: HoldAction) -> None:
        """Log and report one action, and perform an eviction; other holds are sent by `HoldGate.refresh`."""
        if action.kind == "evict":
            self._gate.evict(action.uid, Evicted(HOST_PAUSED, self._explain(_EVICTED), is_urgent=False))
        log.info("pause_action", action=action.kind, uid=action.uid)
        # The message names the reasons of the owner, unless there are none any more.
        note = _NOTES[action.kind]
        self._on_action(action, self._explain(note) if self._held_since else note)
