"""Watches this host's memory and does what `pressure.step` decides: the thin shell around it.

What was begun is written down before it is done, so that whatever an earlier agent evicted stays so, and returns. It
looks each second, which is cheap; who was idle for how long is asked only while there is pressure.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import structlog

from artifacts import durable
from crds.meta import DISRUPTION_TARGET, MEMORY_PRESSURE
from devices.pressure import Level, Reading
from kube.client import Obj
from metal_agent import lifecycle, pressure
from metal_agent.ledger import Ledger
from metal_agent.pressure import Action, Ask, Candidate, Evict, Hold, Keep, Release, Return, Stage, State
from metal_agent.runner import Runner
from metal_agent.upkeep import again_and_again

_HOLD: Final = "this host is short of memory, and starts nothing until that is over"
_EVICTED: Final = "this host is short of memory: stopped, and started again when that is over"
_ASKED: Final = "this host is short of memory: it goes on until it answers from another one"
_NOTES: Final[dict[type[Action], str]] = {
    Hold: _HOLD,
    Ask: _ASKED,
    Keep: "it stays on this host: the pressure is over, or no other host took it",
    Evict: _EVICTED,
    Release: "this host has memory again: what waited is started, what was evicted returns one after the other",
    Return: "this host has memory again: it is started",
}

log = structlog.get_logger()


class Remembered(msgspec.Struct, frozen=True):
    """What an agent must know of the pressure that one before it saw."""

    pressed: bool = False
    asking: str | None = None
    evicted: tuple[str, ...] = ()
    needed_calm_seconds: float = pressure.CALM_SECONDS

    @classmethod
    def of(cls, state: State) -> "Remembered":
        """Take what matters from `state`."""
        return cls(state.pressed, state.asking, state.evicted, state.needed_calm_seconds)

    @property
    def state(self) -> State:
        """Go on from there: nothing is seen yet."""
        return State(
            pressed=self.pressed,
            asking=self.asking,
            evicted=self.evicted,
            needed_calm_seconds=self.needed_calm_seconds,
        )


@dataclass(frozen=True, slots=True)
class Senses:
    """Where a watchdog looks."""

    read: Callable[[], Reading]
    """Blocks for a moment; called in a thread."""
    idle_seconds: Callable[[], Awaitable[Mapping[str, float | None]]]
    """By uid; None was never asked anything, and who is missing is not known."""
    ledger: Ledger


class Watchdog:
    """The pressure on one host with these `runners`; `path` is where it is remembered.

    `told` hears of each step, with a sentence for a person, after it was begun.

    Raises OSError when what an earlier agent evicted cannot be read.
    """

    def __init__(
        self, path: Path, runners: Mapping[str, Runner], senses: Senses, told: Callable[[Action, str], None]
    ) -> None:
        self._path = path
        self._runners = runners
        self._senses = senses
        self._told = told
        self._written = durable.read(path, Remembered) or Remembered()
        self.state = self._written.state
        self.level: Level | None = None
        """What the last look saw."""
        self._known = False

    async def run(self) -> None:
        """Watch for ever."""
        await again_and_again(self.look, pressure.SAMPLE_SECONDS, failed="memory pressure not looked at")

    async def look(self) -> None:
        """Look once, and do what follows."""
        reading = await asyncio.to_thread(self._senses.read)
        if reading.level != self.level:
            log.info("memory pressure", pressure=reading.level, available_bytes=reading.available_bytes)
        self.level = reading.level
        self._known = self._known or reading.level is not None
        calm = reading.level in {None, "normal"}
        idle = {} if calm else await self._senses.idle_seconds()
        now = time.monotonic()
        candidates = [self._candidate(uid, runner, idle, now) for uid, runner in self._runners.items()]
        self.state, actions = pressure.step(self.state, reading.level, candidates, now)
        await self._remember()
        for action in actions:
            self._perform(action)

    def hold(self, uid: str) -> lifecycle.Held | None:
        """Say why the process must not start an engine now; None when it may."""
        if uid in self.state.evicted:
            return lifecycle.Held(MEMORY_PRESSURE, _EVICTED)
        return lifecycle.Held(MEMORY_PRESSURE, _HOLD) if self.state.pressed else None

    def keep(self, uids: set[str]) -> None:
        """Forget what is not among `uids`, which is all that this host has to run."""
        gone = set(self.state.evicted) - uids
        if gone:
            evicted = tuple(uid for uid in self.state.evicted if uid in uids)
            self.state = replace(self.state, evicted=evicted)

    def condition(self) -> Obj:
        """Return the MetalHost's condition MemoryPressure, without lastTransitionTime."""
        if self.state.pressed:
            status, reason, message = (
                "True",
                MEMORY_PRESSURE,
                f"{_HOLD}; {len(self.state.evicted)} processes are stopped",
            )
        elif self._known:
            status, reason, message = "False", "MemorySuffices", "engines are started as they come"
        else:
            status, reason, message = "Unknown", "LevelUnknown", "the system does not say how short memory is"
        return {"type": MEMORY_PRESSURE, "status": status, "reason": reason, "message": message}

    def disruption(self, runner: Runner) -> Obj | None:
        """Return the MetalProcess's condition DisruptionTarget, without lastTransitionTime; None: it may stay."""
        uid, state = runner.assignment.uid, runner.state
        if uid != self.state.asking and uid not in self.state.evicted and not state.waits:
            return None
        message = _ASKED if state.phase == "Ready" else _EVICTED if uid in self.state.evicted else _HOLD
        return {"type": DISRUPTION_TARGET, "status": "True", "reason": MEMORY_PRESSURE, "message": message}

    def _candidate(self, uid: str, runner: Runner, idle: Mapping[str, float | None], now: float) -> Candidate:
        idle_seconds = idle.get(uid)
        if idle_seconds is None and uid in idle and runner.state.ready_since is not None:
            idle_seconds = now - runner.state.ready_since
        spec = runner.assignment.spec
        return Candidate(
            uid=uid,
            priority=spec.priority if spec else "normal",
            stage=stage(runner.state),
            memory_bytes=self._senses.ledger.reserved.get(uid, 0),
            idle_seconds=idle_seconds,
        )

    async def _remember(self) -> None:
        wanted = Remembered.of(self.state)
        if wanted == self._written:
            return
        try:
            await asyncio.to_thread(durable.write, self._path, wanted)
        except OSError as error:
            # The host's memory is worth more than what the next agent knows of it; tried again at the next look.
            log.warning("cannot write down what is evicted", path=str(self._path), error=str(error))
        else:
            self._written = wanted

    def _perform(self, action: Action) -> None:
        match action:
            case Hold():
                for runner in self._runners.values():
                    runner.tell(lifecycle.Held(MEMORY_PRESSURE, _HOLD))
            case Release():
                for uid, runner in self._runners.items():
                    if uid not in self.state.evicted:
                        runner.tell(lifecycle.Released())
            case Evict(uid):
                self._runners[uid].tell(lifecycle.Evicted(MEMORY_PRESSURE, _EVICTED))
            case Return(uid):
                self._runners[uid].tell(lifecycle.Released())
            case Ask() | Keep():
                pass  # what is reported of it changes
        log.warning(
            "memory pressure step", step=type(action).__name__, uid=getattr(action, "uid", None), level=self.level
        )
        self._told(action, _NOTES[type(action)])


def stage(state: lifecycle.State) -> Stage:
    """Tell where a process stands, as far as memory is concerned."""
    if state.phase == "Stopping":
        return "ending"
    if not state.exists:
        return "absent"
    if state.phase == "Starting":
        return "ending" if state.reason else "loading"
    return "serving"
