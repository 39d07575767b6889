"""Decides the life of one native process: what follows from each event, as a pure function of state, event and time.

The supervisor's shell executes the actions and feeds their outcome back as events. All that must never happen lives
here, where it can be tested without a process: two engines at once, Ready before a token, a stop before the endpoint
is withdrawn, a tight restart loop.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

from crds.metalprocess import LastExit

Phase = Literal["Pending", "Fetching", "Starting", "Ready", "Stopping", "Stopped", "Failed", "Rejected"]

LAST_LINES: Final = "; its last lines are in status.lastExit.log"
"""Ends a message for who reads it in a cluster."""
BACKOFF_CAP_SECONDS: Final = 300.0
STABLE_SECONDS: Final = 60.0
"""An engine that was Ready for so long is not in a crash loop: its next failure starts the back-off anew."""
START_TIMEOUT_SECONDS: Final = 1800.0
"""Time to load and to generate the first token. Large weights from a slow disk take many minutes."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The host can run it, and its memory is reserved."""


@dataclass(frozen=True, slots=True)
class Refused:
    """This host cannot run it as it is."""

    reason: str
    message: str
    needed_bytes: int | None = None
    """Memory that it is refused for the lack of: with so much free it is looked at again."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Verified weights are on the host."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An action failed. A permanent failure is tried again too, but rarely: the source may be mended."""

    reason: str
    message: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Freed:
    """The host has as much memory free as it was refused for the lack of."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Another engine of this host loads: this one has not been started."""


@dataclass(frozen=True, slots=True)
class Turn:
    """No other engine loads any more: this one may."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """The engine exists; under this process id, where it has a process of its own."""

    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """The engine generated a token."""


@dataclass(frozen=True, slots=True)
class Hung:
    """The engine that had answered does not any more, and does nothing else either."""

    message: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The engine is gone: its process, or the model out of the daemon that had it loaded."""

    last: LastExit
    reason: str = ""
    message: str = ""
    """Why, where more is known than the exit itself says."""
    fetched: bool = True
    """False: what was brought to the engine is gone too, and has to be brought again."""


@dataclass(frozen=True, slots=True)
class Elapsed:
    """The back-off is over."""


@dataclass(frozen=True, slots=True)
class Removed:
    """The API says that it is no longer wanted here."""


@dataclass(frozen=True, slots=True)
class Held:
    """The host starts no engine now: this one waits for Released. One that runs goes on."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """The host needs the memory: the engine ends, drained first, and is not started again before Released."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Released:
    """The host can start it again."""


Event = (
    Admitted
    | Refused
    | Freed
    | Fetched
    | Busy
    | Turn
    | Failed
    | Spawned
    | Answered
    | Hung
    | Exited
    | Elapsed
    | Removed
    | Held
    | Evicted
    | Released
)


@dataclass(frozen=True, slots=True)
class Check:
    """Find out whether the host can run it, and reserve its memory: Admitted, Refused or Failed."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the weights: Fetched, Refused or Failed."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the engine: Spawned, Busy or Failed, before any other event is looked at.

    Exited follows Spawned some day.
    """


@dataclass(frozen=True, slots=True)
class Queue:
    """Wait until no other engine of this host loads, the most important one first: Turn."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the engine for a token until it generates one: Answered, or Failed after the time-out."""

    timeout_seconds: float = START_TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True)
class Attend:
    """Look again and again whether the engine still answers: Hung when it certainly does not."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Let time pass: Elapsed."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Make the endpoint not ready, so that no new request is routed here."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Let requests that run end, for a bounded time."""


@dataclass(frozen=True, slots=True)
class End:
    """Stop the engine: SIGTERM to its group, a grace, SIGKILL; or have its daemon unload it. Exited follows."""


Action = Check | Fetch | Spawn | Queue | Probe | Attend | Wait | Withdraw | Drain | End


@dataclass(frozen=True, slots=True)
class State:
    """Where one process stands; `exists` exactly while its engine may, times are of a monotonic clock."""

    phase: Phase = "Pending"
    reason: str = ""
    message: str = ""
    exists: bool = False
    pid: int | None = None
    """Of an engine that exists and has a process of its own."""
    admitted: bool = False
    fetched: bool = False
    failures: int = 0
    """Failures in a row; the back-off grows with them."""
    restarts: int = 0
    ready_since: float | None = None
    last_exit: LastExit | None = None
    hold: Held | None = None
    """Why no engine may be started now."""
    needed_bytes: int | None = None
    """Rejected for the lack of so much memory."""
    queued: bool = False
    """Pending for nothing but its turn to load."""
    waits: bool = False
    """Pending for nothing but Released; its memory stays reserved."""
    evicting: bool = False
    """Stopping, and then it waits instead of being Stopped."""

    @property
    def leaving(self) -> bool:
        """Whether it is on its way out for good, or gone."""
        return self.phase == "Stopped" or (self.phase == "Stopping" and not self.evicting)


Step = tuple[State, tuple[Action, ...]]
"""The next state and what to do now, in this order. Actions replace those that still run; none lets them go on."""


def start(hold: Held | None = None) -> Step:
    """Begin the life of a newly assigned process."""
    return State(hold=hold), (Check(),)


def adopt(pid: int | None, *, ready: bool, restarts: int, now: float, hold: Held | None = None) -> Step:
    """Take over an engine that an earlier agent started, and that had generated a token if `ready`."""
    if ready:
        state = State("Ready", exists=True, pid=pid, admitted=True, restarts=restarts, ready_since=now, hold=hold)
        return state, (Attend(),)
    return State("Starting", exists=True, pid=pid, admitted=True, restarts=restarts, hold=hold), (Probe(),)


def backoff_seconds(failures: int) -> float:
    """Delay before the next try after so many failures in a row (1 or more), in seconds."""
    return min(BACKOFF_CAP_SECONDS, 2.0 ** min(failures - 1, 16))


def step(state: State, event: Event, now: float) -> Step:
    """Decide what follows from `event`; one that no longer fits the state, for it crossed another, changes nothing."""
    match event:
        case Removed():
            return _removed(state)
        case Held() | Evicted() | Released():
            return _heed(state, event)
        case Exited():
            return _exited(state, event, now)
        case Failed():
            return _failed(state, event)
        case Admitted() | Refused() | Freed():
            return _judged(state, event)
        case Busy() | Turn():
            return _in_turn(state, event)
        case Spawned() if state.phase == "Starting" and not state.exists:
            return replace(state, exists=True, pid=event.pid), (Probe(),)
        case Answered() if state.phase == "Starting" and state.exists and not state.reason:
            return replace(state, phase="Ready", ready_since=now), (Attend(),)
        case Hung() if state.phase == "Ready":
            # What it was asked is lost: there is nothing to drain. The back-off begins with its Exited.
            return replace(state, phase="Starting", reason="EngineHung", message=event.message), (Withdraw(), End())
        case Fetched() if state.phase == "Fetching":
            return _begin(replace(state, fetched=True))
        case Elapsed() if state.phase == "Failed":
            return _again(state)
        case _:
            return state, ()


def _clear(state: State, phase: Phase) -> State:
    return replace(state, phase=phase, reason="", message="")


def _begin(state: State) -> Step:
    """Start the engine, unless the host holds it; every start after an exit counts as a restart."""
    if state.hold:
        return _wait(state, state.hold)
    restarts = state.restarts + (state.last_exit is not None)
    return replace(_clear(state, "Starting"), restarts=restarts), (Spawn(),)


def _again(state: State) -> Step:
    """Take up the life where it failed or was ended, once the host lets it."""
    if state.hold and state.admitted:
        return _wait(state, state.hold)
    if state.fetched:
        return _begin(state)
    return (_clear(state, "Fetching"), (Fetch(),)) if state.admitted else (_clear(state, "Pending"), (Check(),))


def _judged(state: State, event: Admitted | Refused | Freed) -> Step:
    looked_at = not state.waits and not state.queued
    match event:
        case Admitted() if state.phase == "Pending" and looked_at:
            return replace(state, phase="Fetching", admitted=True), (Fetch(),)
        case Refused() if state.phase in {"Pending", "Fetching"} and looked_at:
            refused = replace(state, phase="Rejected", reason=event.reason, message=event.message, admitted=False)
            return replace(refused, needed_bytes=event.needed_bytes), ()
        case Freed() if state.phase == "Rejected" and state.needed_bytes is not None:
            return replace(_clear(state, "Pending"), needed_bytes=None), (Check(),)
        case _:
            return state, ()


def _in_turn(state: State, event: Busy | Turn) -> Step:
    match event:
        case Busy() if state.phase == "Starting" and not state.exists:
            # It was not started, so that is none of its restarts.
            restarts = state.restarts - (state.last_exit is not None)
            message = "another engine of this host is loading; this one is next by priority"
            queued = replace(state, phase="Pending", reason="WaitsToLoad", message=message, restarts=restarts)
            return replace(queued, queued=True), (Queue(),)
        case Turn() if state.queued:
            return _begin(replace(state, queued=False))
        case _:
            return state, ()


def _removed(state: State) -> Step:
    if state.leaving:
        return state, ()
    if state.evicting:
        # What was begun is the same, only its end is not.
        return replace(_clear(state, "Stopping"), evicting=False), ()
    if not state.exists:
        return replace(_clear(state, "Stopped"), waits=False, queued=False), ()
    return _clear(state, "Stopping"), (Withdraw(), Drain(), End())


def _heed(state: State, event: Held | Evicted | Released) -> Step:
    match event:
        case Held():
            return _held(state, event)
        case Evicted():
            return _evicted(state, event)
        case Released():
            released = replace(state, hold=None, waits=False)
            return _again(released) if state.waits else (released, ())


def _held(state: State, hold: Held) -> Step:
    held = replace(state, hold=hold)
    return _wait(held, hold) if state.waits else (held, ())


def _wait(state: State, hold: Held) -> Step:
    return replace(state, phase="Pending", reason=hold.reason, message=hold.message, waits=True), ()


def _evicted(state: State, event: Evicted) -> Step:
    hold = Held(event.reason, event.message)
    if not state.exists or state.phase not in {"Starting", "Ready"} or (state.phase == "Starting" and state.reason):
        # It does not run, or ends already.
        return _held(state, hold)
    stopping = replace(state, phase="Stopping", reason=event.reason, message=event.message, hold=hold, evicting=True)
    return stopping, (Withdraw(), Drain(), End())


def _exited(state: State, event: Exited, now: float) -> Step:
    if not state.exists:
        return state, ()
    fetched = state.fetched and event.fetched
    gone = replace(state, exists=False, pid=None, fetched=fetched, ready_since=None, last_exit=event.last)
    if state.evicting:
        return _again(replace(gone, evicting=False))
    if state.phase == "Stopping":
        return replace(gone, phase="Stopped"), ()
    stable = state.ready_since is not None and now - state.ready_since >= STABLE_SECONDS
    how = event.last.signal or f"exit code {'unknown' if event.last.code is None else event.last.code}"
    return _back_off(
        replace(gone, failures=0 if stable else state.failures),
        state.reason or event.reason or "EngineExited",
        state.message or event.message or f"the engine ended with {how}{LAST_LINES}",
    )


def _failed(state: State, event: Failed) -> Step:
    if state.phase == "Starting" and state.exists:
        if state.reason:
            return state, ()
        # The engine must be gone before another is started: the back-off begins with its Exited.
        return replace(state, reason=event.reason, message=event.message), (End(),)
    if state.phase in {"Pending", "Fetching", "Starting"} and not state.waits:
        return _back_off(
            replace(state, fetched=False, queued=False), event.reason, event.message, permanent=event.permanent
        )
    return state, ()


def _back_off(state: State, reason: str, message: str, *, permanent: bool = False) -> Step:
    failures = state.failures + 1
    seconds = BACKOFF_CAP_SECONDS if permanent else backoff_seconds(failures)
    text = f"{message} (failure {failures}; next try in {seconds:.0f} s)"
    return replace(state, phase="Failed", reason=reason, message=text, failures=failures), (Wait(seconds),)
