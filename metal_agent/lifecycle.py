"""The state machine of one native process: `step` returns the next state and its actions, as a pure function.

The runner performs the actions and feeds their outcome back as events. The following is excluded here, where it can be
tested without a process: two engines at once, Ready before the first token, a stop before the endpoint is withdrawn, a
tight restart loop.
"""

from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from crds.metalprocess import LastExit
from kube.backoff import EXACT, backoff_seconds
from metal_agent import process_events as events
from metal_agent.engine_health import REFUTED_SECONDS, Suspicion
from metal_agent.process_events import Held, ProcessEvent
from runtimes.engine_errors import find_cause

Phase = Literal["Pending", "Fetching", "Starting", "Ready", "Stopping", "Stopped", "Failed", "Rejected"]

LOG_HINT: Final = "; its last lines are in status.lastExit.log"
"""End of a message that a user of the cluster reads; `pomona up` shows the lines themselves instead."""
FIRST_BACKOFF_SECONDS: Final = 1.0
MAX_BACKOFF_SECONDS: Final = 300.0
STABLE_SECONDS: Final = 60.0
"""An engine that was Ready for so long is not in a crash loop: its next failure resets the back-off."""
START_TIMEOUT_SECONDS: Final = 1800.0
"""Time to load and to generate the first token. Large weights from a slow disk take many minutes."""
WITHDRAW_SECONDS: Final = 5.0
"""Time for the API server to accept a withdrawal; then the process stops without it, and requests fail at the proxy."""
SICK_DRAIN_SECONDS: Final = 30.0
"""Time for the requests of an engine that fails although it answers; it gets no new ones before its restart."""
GRACE_SECONDS: Final = 10.0
"""Time between SIGTERM and SIGKILL. Requests were drained before, and llama-server may hang on SIGTERM."""
HUNG_GRACE_SECONDS: Final = 3.0
"""The same for an engine that hangs, which hardly reacts to SIGTERM."""
END_LIMIT_SECONDS: Final = 10.0
"""Time to end after the grace, when SIGKILL was sent; then the process counts as one that cannot be ended."""
UNLOAD_LIMIT_SECONDS: Final = 60.0
"""The same for a model that its daemon does not unload."""
FAILED_CHECK_SECONDS: Final = 10.0
"""Pause after a check of a Ready engine that failed by an error of the agent, such as a lack of threads."""
EVICTION_SECONDS: Final = (1.0, 4.0, 3.0)
"""Withdrawal, drain and grace of an eviction: the host runs out of memory, and the engine is gone in ten seconds."""


class ProcessAction(msgspec.Struct, frozen=True):
    """An action of the runner for one process."""


class CheckAdmission(ProcessAction, frozen=True):
    """Check that the host can run the process, and reserve its memory. Outcome: Admitted, Refused or Failed."""


class Fetch(ProcessAction, frozen=True):
    """Fetch and verify the weights. Outcome: Fetched, Refused or Failed."""


class Spawn(ProcessAction, frozen=True):
    """Start the engine. Outcome, before any other event is handled: Spawned, LoadSlotBusy or Failed.

    Spawned is followed by Exited when the engine ends.
    """


class AwaitLoadSlot(ProcessAction, frozen=True):
    """Wait for the load slot of this host, by priority. Outcome: LoadSlotGranted."""


class ProbeEngine(ProcessAction, frozen=True):
    """Request a token until the engine generates one. Outcome: Answered, or Failed after the time-out."""

    timeout_seconds: float = START_TIMEOUT_SECONDS


class WatchLiveness(ProcessAction, frozen=True):
    """Check at intervals that the engine still answers. Outcome: Hung when it certainly does not."""


class CheckSuspect(ProcessAction, frozen=True):
    """Request a token from the suspect engine. Outcome: Trusted, or Hung."""

    suspicion: Suspicion
    pause_seconds: float = 0.0
    """Time to wait before."""


class BackOff(ProcessAction, frozen=True):
    """Wait. Outcome: BackoffElapsed."""

    seconds: float


class Withdraw(ProcessAction, frozen=True):
    """Make the endpoint not ready, so that no new request is routed here."""

    timeout_seconds: float = WITHDRAW_SECONDS


class Drain(ProcessAction, frozen=True):
    """Wait, for a bounded time, until running requests have ended."""

    timeout_seconds: float | None = None
    """The longest wait; None for the drain time of the service."""


class End(ProcessAction, frozen=True):
    """Stop the engine: SIGTERM to its group, a grace, SIGKILL; or have its daemon unload it. Outcome: Exited."""

    grace_seconds: float = GRACE_SECONDS
    even_if_shared: bool = False
    """True if a model in a daemon is unloaded although it serves another process too: the model is sick."""


class ProcessState(msgspec.Struct, frozen=True):
    """The state of one process; `exists` is true as long as its engine may exist, times are of a monotonic clock."""

    phase: Phase = "Pending"
    reason: str = ""
    message: str = ""
    exists: bool = False
    pid: int | None = None
    """Process id of an engine that exists and has a process of its own."""
    admitted: bool = False
    fetched: bool = False
    failures: int = 0
    """Failures in a row; the back-off grows with them."""
    restarts: int = 0
    ready_since: float | None = None
    last_exit: LastExit | None = None
    hold: Held | None = None
    """Set while no engine may be started."""
    needed_bytes: int | None = None
    """Set if Rejected because so much memory was not free."""
    queued: bool = False
    """Pending only because another engine is loading."""
    awaits_release: bool = False
    """Pending only because it is held; its memory stays reserved."""
    evicting: bool = False
    """Stopping because of an eviction: then it is Pending until Released instead of Stopped."""
    is_hastened: bool = False
    """Stopping without the time that the service gives its answers: the host needs the memory."""
    suspicion: Suspicion | None = None
    """Set while the Ready engine is suspect and is being checked."""
    trusted_at: float | None = None
    """Time at which this engine last passed a check. A suspicion that was refuted counts for nothing more."""

    @property
    def is_drained(self) -> bool:
        """True if the engine is suspect and gets no new request until it is checked."""
        return self.suspicion is not None and self.suspicion.is_drained

    @property
    def has_ended(self) -> bool:
        """True if it is Stopped and has no engine: a new runner may take its place."""
        return self.phase == "Stopped" and not self.exists

    @property
    def leaving(self) -> bool:
        """True if the process is stopped, or is being stopped, for good."""
        return self.phase == "Stopped" or (self.phase == "Stopping" and not self.evicting)


ProcessStep = tuple[ProcessState, tuple[ProcessAction, ...]]
"""The next state and its actions, in order. Actions replace those still running; an empty tuple lets them go on."""


def start_lifecycle(hold: Held | None = None) -> ProcessStep:
    """Return the first state and actions of a newly assigned process."""
    return ProcessState(hold=hold), (CheckAdmission(),)


def resume_lifecycle(
    pid: int | None, *, ready: bool, restarts: int, now: float, hold: Held | None = None
) -> ProcessStep:
    """Return the state and actions for an adopted engine, which was admitted when it was started.

    With `ready` it had generated a token before: it is watched at once. Otherwise it still has to answer first.
    Admitted means that its memory is reserved. `hold` is the reason for which the host starts no engine now, if any;
    the adopted one goes on.
    """
    state = ProcessState("Starting", exists=True, pid=pid, admitted=True, restarts=restarts, hold=hold)
    if ready:
        return replace(state, phase="Ready", ready_since=now), (WatchLiveness(),)
    return state, (ProbeEngine(),)


def restart_backoff_seconds(failures: int) -> float:
    """Return the pause before an engine, or its runner, is started again after `failures` (1 or more) in a row.

    It has no jitter, since the status shows it and engines of one host wait for each other anyway.
    """
    return backoff_seconds(failures, first=FIRST_BACKOFF_SECONDS, most=MAX_BACKOFF_SECONDS, jitter=EXACT)


def step(state: ProcessState, event: ProcessEvent, now: float) -> ProcessStep:
    """Return the next state and its actions. An event that arrives too late to fit the state changes nothing.

    No actions let those that still run go on; new ones replace them.
    """
    match event:
        case events.Removed():  # it is no longer assigned to this host
            return _on_removed(state)
        case Held() | events.Evicted() | events.Released():  # the host holds, stops or releases it
            return _on_hold_change(state, event)
        case events.Exited():
            return _on_exited(state, event, now)
        case events.EndOverdue() if state.exists:
            return _on_end_overdue(state, event), ()
        case events.Failed():  # an action of this process has failed
            return _on_failed(state, event)
        case events.Admitted() | events.Refused() | events.MemoryFreed():
            return _on_admission(state, event)
        case events.LoadSlotBusy() | events.LoadSlotGranted():  # one engine of a host loads at a time
            return _on_load_slot(state, event)
        case events.Spawned() | events.StartProblem() | events.Answered():
            return _on_start(state, event, now)
        case events.Suspected() | events.Trusted() | events.Hung() if state.phase == "Ready":  # it may be sick
            return _on_health(state, event, now)
        case events.Fetched() if state.phase == "Fetching":
            return _start_engine(replace(state, fetched=True))
        case events.BackoffElapsed() if state.phase == "Failed":
            return _resume(state)
        case _:
            return state, ()


def _enter_phase(state: ProcessState, phase: Phase) -> ProcessState:
    """Return the state in another phase, without the reason of the one before."""
    return replace(state, phase=phase, reason="", message="", suspicion=None, is_hastened=False)


def _start_engine(state: ProcessState) -> ProcessStep:
    """Start the engine, or wait if a hold forbids that, until it is released; a start after an exit is a restart."""
    if state.hold:
        return _await_release(state, state.hold)
    is_restart = state.last_exit is not None
    restarts = state.restarts + 1 if is_restart else state.restarts
    return replace(_enter_phase(state, "Starting"), restarts=restarts), (Spawn(),)


def _resume(state: ProcessState) -> ProcessStep:
    """Start the step again that failed or was interrupted: admission check, fetch of the weights, or engine start.

    A held process that was admitted waits instead; its memory stays reserved.
    """
    if state.hold and state.admitted:
        return _await_release(state, state.hold)
    if state.fetched:  # its weights are on this host
        return _start_engine(state)
    if state.admitted:  # its memory is reserved
        return _enter_phase(state, "Fetching"), (Fetch(),)
    return _enter_phase(state, "Pending"), (CheckAdmission(),)


def _on_admission(state: ProcessState, event: ProcessEvent) -> ProcessStep:
    """Fetch the weights of an admitted process, reject a refused one, and check that again once memory is free.

    Weights that were fetched are refused too if they need more memory than was stated.
    """
    # A process that is Pending because of a hold or of the load slot was admitted before: no outcome is awaited.
    awaits_outcome = not state.awaits_release and not state.queued
    match event:
        case events.Admitted() if state.phase == "Pending" and awaits_outcome:
            return replace(state, phase="Fetching", admitted=True), (Fetch(),)
        case events.Refused() if state.phase in {"Pending", "Fetching"} and awaits_outcome:
            refused = replace(state, phase="Rejected", reason=event.reason, message=event.message, admitted=False)
            return replace(refused, needed_bytes=event.needed_bytes), ()
        # `needed_bytes` is set only if it was rejected for lack of memory.
        case events.MemoryFreed() if state.phase == "Rejected" and state.needed_bytes is not None:
            return replace(_enter_phase(state, "Pending"), needed_bytes=None), (CheckAdmission(),)
        case _:
            return state, ()


def _on_start(state: ProcessState, event: ProcessEvent, now: float) -> ProcessStep:
    """Probe an engine that was started until its first token, then watch it; show a problem that it has until then."""
    is_being_ended = bool(state.reason)  # a start that failed; the reason is shown
    if state.phase != "Starting" or is_being_ended:
        return state, ()
    match event:
        # exists: an engine was spawned, and has not exited. A new one has passed no check yet (trusted_at).
        case events.Spawned() if not state.exists:
            return replace(state, exists=True, pid=event.pid, trusted_at=None), (ProbeEngine(),)
        case events.StartProblem() if state.exists:  # it answers, but without a token
            return replace(state, message=event.message), ()
        case events.Answered() if state.exists:
            return replace(_enter_phase(state, "Ready"), ready_since=now), (WatchLiveness(),)
        case _:
            return state, ()


def _on_health(state: ProcessState, event: ProcessEvent, now: float) -> ProcessStep:
    """Check a Ready engine that is suspect, serve on with one that works (Trusted), and end one that is sick (Hung).

    A sick engine that still answers is drained first. It is then ended even if another process shares it.
    """
    match event:
        case events.Suspected(suspicion):
            # A check goes on, unless the new reason is graver: only one for slowness gives way.
            is_being_checked = state.suspicion is not None and not suspicion.outranks(state.suspicion)
            if is_being_checked:
                return state, ()

            suspect = replace(state, reason="EngineSuspect", message=f"checking the engine: {suspicion.message}")
            # A client whose requests are at fault may repeat them: no check within some seconds of one that was passed.
            pause_seconds = 0.0 if state.trusted_at is None else max(0.0, REFUTED_SECONDS - (now - state.trusted_at))
            return replace(suspect, suspicion=suspicion), (CheckSuspect(suspicion, pause_seconds),)
        case events.Trusted() if state.suspicion:
            return replace(_enter_phase(state, "Ready"), trusted_at=now), (WatchLiveness(),)
        case events.Hung():
            # The back-off begins with Exited. The requests of an engine that does not answer are lost.
            # Starting with a reason stands for an engine that is being ended.
            ending = replace(state, phase="Starting", reason=event.reason, message=event.message, suspicion=None)
            if event.answers:
                return ending, (Withdraw(), Drain(SICK_DRAIN_SECONDS), End(even_if_shared=True))
            return ending, (Withdraw(), End(HUNG_GRACE_SECONDS, even_if_shared=True))
        case _:
            return state, ()


def _on_load_slot(state: ProcessState, event: ProcessEvent) -> ProcessStep:
    """Wait for the load slot if it is taken, and start the engine once it is granted."""
    match event:
        case events.LoadSlotBusy() if state.phase == "Starting" and not state.exists:
            # The engine was not started: take back the restart that `_start_engine` has counted.
            restarts = state.restarts if state.last_exit is None else state.restarts - 1
            message = "waiting to load: another engine is loading; one loads at a time on a host, by priority"
            queued = replace(state, phase="Pending", reason="WaitsToLoad", message=message, restarts=restarts)
            return replace(queued, queued=True), (AwaitLoadSlot(),)
        case events.LoadSlotGranted() if state.queued:
            return _start_engine(replace(state, queued=False))
        case _:
            return state, ()


def _on_removed(state: ProcessState) -> ProcessStep:
    """Stop the process for good: withdraw its endpoint, drain requests and end its engine, if there is one."""
    if state.leaving:
        return state, ()  # it is stopped already, or is being stopped, for good
    if state.evicting:
        # The same actions run already, for the eviction; afterwards the process is now Stopped instead of Pending.
        return replace(_enter_phase(state, "Stopping"), evicting=False, is_hastened=state.is_hastened), ()
    if not state.exists:
        return replace(_enter_phase(state, "Stopped"), awaits_release=False, queued=False), ()
    return _enter_phase(state, "Stopping"), (Withdraw(), Drain(), End())


def _on_hold_change(state: ProcessState, event: Held | events.Evicted | events.Released) -> ProcessStep:
    """Hold, evict or release the process; a release starts it only if nothing but the hold kept it waiting."""
    match event:
        case Held():
            return _on_held(state, event)
        case events.Evicted():
            return _on_evicted(state, event)
    released = replace(state, hold=None, awaits_release=False)
    # awaits_release: it is Pending because of the hold alone. Otherwise it goes on as it is.
    return _resume(released) if state.awaits_release else (released, ())


def _on_held(state: ProcessState, hold: Held) -> ProcessStep:
    """Note the hold; a running engine goes on, and a process that waits shows the new reason."""
    held = replace(state, hold=hold)
    return _await_release(held, hold) if state.awaits_release else (held, ())


def _await_release(state: ProcessState, hold: Held) -> ProcessStep:
    """Wait as Pending until the hold is released."""
    return replace(state, phase="Pending", reason=hold.reason, message=hold.message, awaits_release=True), ()


def _on_evicted(state: ProcessState, event: events.Evicted) -> ProcessStep:
    """Stop the engine, in seconds if that is urgent, and hold the process: it starts again after Released.

    By the state of the process:
    * Stopping with time for its requests, and the eviction is urgent: it is hastened, with short times instead.
    * Without an engine, or with one that is ending already: it is only held.
    * Loading: the engine ends at once, since it has no endpoint and no request.
    * Ready: its endpoint is withdrawn, its requests are drained, then the engine ends.
    """
    hold = Held(event.reason, event.message)
    withdraw, drain, end = Withdraw(), Drain(), End()
    if event.is_urgent:
        withdraw_seconds, drain_seconds, grace_seconds = EVICTION_SECONDS
        withdraw, drain, end = Withdraw(withdraw_seconds), Drain(drain_seconds), End(grace_seconds)

    # exists: an engine was spawned, and has not exited
    can_be_hastened = state.phase == "Stopping" and state.exists and not state.is_hastened
    if event.is_urgent and can_be_hastened:
        return replace(state, hold=hold, is_hastened=True), (withdraw, drain, end)

    is_loading = state.phase == "Starting" and not state.reason  # with a reason, the start has failed: it is ending
    if not state.exists or not (is_loading or state.phase == "Ready"):
        return _on_held(state, hold)

    stopping = replace(_enter_phase(state, "Stopping"), reason=event.reason, message=event.message, hold=hold)
    stopping = replace(stopping, evicting=True, is_hastened=event.is_urgent)
    if is_loading:
        return stopping, (end,)
    return stopping, (withdraw, drain, end)


def _on_exited(state: ProcessState, event: events.Exited, now: float) -> ProcessStep:
    """Go on after the end of the engine.

    An evicted process waits for its release, and one that was stopped for good is Stopped. Any other exit is a failure:
    back off before the next start, longer after each failure in a row; one after a stable run counts as the first.
    """
    if not state.exists:
        return state, ()  # its exit was handled before
    # Without `event.fetched` the weights are gone, too, as from a daemon that does not know them.
    gone = replace(state, exists=False, pid=None, fetched=state.fetched and event.fetched)
    gone = replace(gone, ready_since=None, last_exit=event.last, suspicion=None)

    if state.evicting:
        return _resume(replace(gone, evicting=False))  # waits until the hold is released, if there is still one
    if state.leaving:
        return replace(gone, phase="Stopped"), ()

    # A failure. In Starting, a reason is set if the agent ended the engine because of it; it is then the cause of the
    # exit. In Ready, the reason may be a suspicion, which is no cause.
    was_ended = state.phase == "Starting" and bool(state.reason)
    reason, message = (state.reason, state.message) if was_ended else (event.reason, event.message)
    was_stable = state.ready_since is not None and now - state.ready_since >= STABLE_SECONDS
    failures = 0 if was_stable else state.failures  # before this one

    code = "unknown" if event.last.code is None else event.last.code
    exit_text, cause = event.last.signal or f"exit code {code}", find_cause(event.last.log)
    exited = f"the engine exited with {exit_text}{': ' if cause else ''}{cause}{LOG_HINT}"
    return _back_off(replace(gone, failures=failures), reason or "EngineExited", message or exited)


def _on_end_overdue(state: ProcessState, event: events.EndOverdue) -> ProcessState:
    """Show that the engine does not end, and keep its memory reserved while it exists.

    A stop for good is over nevertheless (Stopped), so that nothing waits for the process for ever.
    """
    if state.phase == "Stopping" and not state.evicting:
        return replace(state, phase="Stopped", reason="EngineNotEnded", message=event.message)
    cause = f"{state.message}; " if state.message else ""
    return replace(state, message=f"{cause}{event.message}")


def _on_failed(state: ProcessState, event: events.Failed) -> ProcessStep:
    """Back off before the next try of the action that failed.

    An engine that failed to start is ended first. A Ready engine, of which only a check failed by an error of the
    agent, serves on, and is watched again after a pause.
    """
    if state.phase == "Starting" and state.exists:
        is_being_ended = bool(state.reason)
        if is_being_ended:
            return state, ()
        # The engine must be gone before another is started: the back-off begins with its Exited.
        return replace(state, reason=event.reason, message=event.message), (End(),)

    # A process that awaits its release performs no action that could fail.
    if state.phase in {"Pending", "Fetching", "Starting"} and not state.awaits_release:
        # After a permanent failure it is tried again rarely, in case somebody has repaired the cause.
        least_seconds = MAX_BACKOFF_SECONDS if event.permanent else event.retry_after_seconds
        return _back_off(replace(state, fetched=False, queued=False), event.reason, event.message, least_seconds)

    if state.phase == "Ready":
        # The action that failed has ended, so nothing checks the engine any more.
        return _enter_phase(state, "Ready"), (BackOff(FAILED_CHECK_SECONDS), WatchLiveness())
    return state, ()


def _back_off(state: ProcessState, reason: str, message: str, least_seconds: float = 0.0) -> ProcessStep:
    """Enter Failed, and wait before the next try: longer after each failure in a row, and at least `least_seconds`."""
    failures = state.failures + 1
    seconds = max(restart_backoff_seconds(failures), least_seconds)
    text = f"{message} (failure {failures}; next try in {seconds:.0f} s)"
    return replace(state, phase="Failed", reason=reason, message=text, failures=failures), (BackOff(seconds),)
