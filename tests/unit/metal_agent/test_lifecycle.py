"""The state machine of a process: its transitions, and invariants under any order of events."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.metalprocess import LastExit
from metal_agent import lifecycle as life
from metal_agent import process_events as events
from metal_agent.engine_health import REFUTED_SECONDS, Suspicion
from metal_agent.lifecycle import ProcessState, step
from metal_agent.process_events import ProcessEvent

HELD = events.Held("MemoryPressure", "the host is short of memory")
EVICTED = events.Evicted("MemoryPressure", "the host needs its memory")
CRASH = events.Exited(LastExit(signal="SIGKILL"))
FAILING = Suspicion("Failing", "the last 5 requests failed: 500")
SILENT = Suspicion("Silent", "no data for 12 s within a stream")
SLOW = Suspicion("Slow", "the first token took 90 s, 40 times as long as before")
HAPPY: Sequence[ProcessEvent] = (events.Admitted(), events.Fetched(), events.Spawned(7), events.Answered())


def after(*happened: ProcessEvent, start: ProcessState | None = None, now: float = 0.0) -> life.ProcessStep:
    state, actions = (start, ()) if start else life.start_lifecycle()
    for event in happened:
        state, actions = step(state, event, now)
    return state, actions


def test_each_step_to_ready_starts_the_next() -> None:
    state, actions = life.start_lifecycle()
    seen = [(state.phase, actions)]
    for event in HAPPY:
        state, actions = step(state, event, 0)
        seen.append((state.phase, actions))
    assert seen == [
        ("Pending", (life.CheckAdmission(),)),
        ("Fetching", (life.Fetch(),)),
        ("Starting", (life.Spawn(),)),
        ("Starting", (life.ProbeEngine(),)),
        ("Ready", (life.WatchLiveness(),)),
    ]


@pytest.mark.parametrize(
    ("happened", "phase", "reason"),
    [
        ([events.Refused("InsufficientMemory", "no")], "Rejected", "InsufficientMemory"),
        ([events.Admitted(), events.Refused("FileNotFound", "no")], "Rejected", "FileNotFound"),
        ([events.Failed("SourceUnreachable", "no")], "Failed", "SourceUnreachable"),
        (
            [events.Admitted(), events.Failed("ChecksumMismatch", "no", permanent=True)],
            "Failed",
            "ChecksumMismatch",
        ),
        ([*HAPPY[:2], events.Failed("SpawnFailed", "no")], "Failed", "SpawnFailed"),
        ([*HAPPY, CRASH], "Failed", "EngineExited"),
        ([*HAPPY, events.Hung("no sign")], "Starting", "EngineHung"),
        ([*HAPPY, events.Hung("no sign"), events.Answered()], "Starting", "EngineHung"),
        ([*HAPPY, events.Hung("no sign"), CRASH], "Failed", "EngineHung"),
        ([*HAPPY[:3], events.Failed("StartTimeout", "no"), CRASH], "Failed", "StartTimeout"),
    ],
)
def test_failure_sets_phase_and_reason(happened: list[ProcessEvent], phase: str, reason: str) -> None:
    state, _ = after(*happened)
    assert (state.phase, state.reason) == (phase, reason)


def test_permanent_failure_is_retried_after_the_longest_back_off() -> None:
    _, actions = after(events.Admitted(), events.Failed("ChecksumMismatch", "no", permanent=True))
    assert actions == (life.BackOff(life.MAX_BACKOFF_SECONDS),)


def test_pause_that_the_server_of_the_weights_asks_for_is_kept() -> None:
    _, actions = after(events.Admitted(), events.Failed("SourceUnreachable", "no", retry_after_seconds=120))
    assert actions == (life.BackOff(120),)


def test_failed_step_is_retried() -> None:
    assert after(events.Failed("A", "a"), events.BackoffElapsed())[1] == (life.CheckAdmission(),)
    assert after(events.Admitted(), events.Failed("A", "a"), events.BackoffElapsed())[1] == (life.Fetch(),)
    assert after(*HAPPY, CRASH, events.BackoffElapsed())[1] == (life.Spawn(),)
    assert after(*HAPPY[:2], events.Failed("WeightsMissing", "a"), events.BackoffElapsed())[1] == (life.Fetch(),)


def test_lost_weights_are_fetched_again() -> None:
    assert after(*HAPPY, events.Exited(LastExit(), "ModelMissing", fetched=False), events.BackoffElapsed())[1] == (
        life.Fetch(),
    )


def test_a_crash_loop_backs_off_and_counts_restarts() -> None:
    state, _ = after(*HAPPY)
    waits = []
    for _ in range(11):
        state, actions = step(state, CRASH, 0)
        waits += [action.seconds for action in actions if isinstance(action, life.BackOff)]
        state, _ = after(events.BackoffElapsed(), events.Spawned(8), events.Answered(), start=state)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert state.restarts == 11


def test_an_engine_that_was_stable_starts_the_back_off_anew() -> None:
    looping, _ = after(*HAPPY, CRASH, events.BackoffElapsed(), events.Spawned(8), events.Answered(), now=10)
    assert step(looping, CRASH, 10 + life.STABLE_SECONDS - 1)[1] == (life.BackOff(2),)
    assert step(looping, CRASH, 10 + life.STABLE_SECONDS)[1] == (life.BackOff(1),)


def test_an_engine_that_never_answers_is_ended_before_the_back_off() -> None:
    state, actions = after(*HAPPY[:3], events.Failed("StartTimeout", "no token"))
    assert (actions, state.pid) == ((life.End(),), 7)
    assert after(CRASH, start=state)[1] == (life.BackOff(1),)


def test_wait_for_the_load_slot_is_no_restart() -> None:
    queued, actions = after(*HAPPY[:2], events.LoadSlotBusy())
    assert (queued.phase, queued.reason, actions) == ("Pending", "WaitsToLoad", (life.AwaitLoadSlot(),))
    assert (
        after(
            events.BackoffElapsed(),
            events.Admitted(),
            events.Refused("R", "r"),
            events.MemoryFreed(),
            start=queued,
        )[0]
        == queued
    )
    started, actions = after(events.LoadSlotGranted(), start=queued)
    assert (started.phase, started.reason, started.queued, actions) == ("Starting", "", False, (life.Spawn(),))
    again, _ = after(
        *HAPPY,
        CRASH,
        events.BackoffElapsed(),
        events.LoadSlotBusy(),
        events.LoadSlotGranted(),
        events.LoadSlotBusy(),
        events.LoadSlotGranted(),
    )
    assert again.restarts == 1
    assert after(events.Removed(), start=queued)[0].phase == "Stopped"
    held, actions = after(HELD, events.LoadSlotGranted(), start=queued)
    assert (held.reason, held.awaits_release, held.queued, actions) == ("MemoryPressure", True, False, ())


def test_rejected_process_is_checked_again_when_memory_is_freed() -> None:
    refused, _ = after(events.Refused("InsufficientMemory", "no", 5))
    assert refused.needed_bytes == 5
    again, actions = after(events.MemoryFreed(), start=refused)
    assert (again.phase, again.needed_bytes, actions) == ("Pending", None, (life.CheckAdmission(),))
    assert after(*HAPPY, start=again)[0].phase == "Ready"
    other, _ = after(events.Admitted(), events.Refused("FileNotFound", "no"))
    assert after(events.MemoryFreed(), start=other) == (other, ())


def test_an_engine_that_hangs_is_withdrawn_and_gone_before_another_starts() -> None:
    state, actions = after(*HAPPY, events.Hung("no sign"))
    assert actions == (life.Withdraw(), life.End(life.HUNG_GRACE_SECONDS, even_if_shared=True))
    assert (state.phase, state.pid) == ("Starting", 7)
    assert after(events.Removed(), start=state)[0].phase == "Stopping"
    assert after(events.Failed("A", "a"), start=state) == (state, ()), "it is being ended"
    assert after(CRASH, events.BackoffElapsed(), start=state)[1] == (life.Spawn(),)


@pytest.mark.parametrize(("suspicion", "is_drained"), [(FAILING, False), (SILENT, True)])
def test_suspect_engine_is_checked_and_drained_only_if_it_is_silent(suspicion: Suspicion, is_drained: bool) -> None:
    """While an engine that fails is checked, it gets the requests of those whose requests are in order."""
    suspect, actions = after(*HAPPY, events.Suspected(suspicion))
    assert actions == (life.CheckSuspect(suspicion),)
    assert (suspect.phase, suspect.reason, suspect.is_drained) == ("Ready", "EngineSuspect", is_drained)
    assert suspicion.message in suspect.message
    assert after(events.Suspected(suspicion), start=suspect) == (suspect, ()), "the check goes on"
    serving, actions = after(events.Trusted(), start=suspect)
    assert actions == (life.WatchLiveness(),)
    assert (serving.phase, serving.reason, serving.message, serving.is_drained) == ("Ready", "", "", False)


def test_slow_engine_is_checked_and_keeps_its_queue() -> None:
    slow, actions = after(*HAPPY, events.Suspected(SLOW))
    assert (slow.is_drained, actions) == (False, (life.CheckSuspect(SLOW),))
    for graver, is_drained in ((FAILING, False), (SILENT, True)):
        checked, actions = after(events.Suspected(graver), start=slow)
        assert (checked.is_drained, actions) == (is_drained, (life.CheckSuspect(graver),))
        assert after(events.Suspected(SLOW), start=checked) == (checked, ()), "the shorter check goes on"


def test_failing_engine_is_drained_ended_and_started_again_with_its_answer_in_the_status() -> None:
    answer = "the engine answered 500: Compute error."
    sick = events.Hung(answer, "EngineFailing", answers=True)
    state, actions = after(*HAPPY, events.Suspected(FAILING), sick)
    assert actions == (life.Withdraw(), life.Drain(life.SICK_DRAIN_SECONDS), life.End(even_if_shared=True))
    state, actions = after(CRASH, start=state)
    assert (state.phase, state.reason, actions) == ("Failed", "EngineFailing", (life.BackOff(1),))
    assert state.message.startswith(answer)


def test_suspicion_that_a_check_refuted_counts_for_nothing() -> None:
    """One client may send what fails without end: the engine serves on, and is not checked without end."""
    state, _ = after(*HAPPY)
    pauses = []
    for now in range(100):
        state, (check,) = after(events.Suspected(FAILING), start=state, now=now)
        assert isinstance(check, life.CheckSuspect)
        pauses.append(check.pause_seconds)
        state, actions = after(events.Trusted(), start=state, now=now)
        assert (state.phase, state.reason, actions) == ("Ready", "", (life.WatchLiveness(),))
    assert pauses == [0, *[REFUTED_SECONDS - 1] * 99]
    assert after(events.Suspected(FAILING), start=state, now=99 + REFUTED_SECONDS)[1] == (life.CheckSuspect(FAILING),)
    again, _ = after(
        events.Hung("it hangs"), CRASH, events.BackoffElapsed(), events.Spawned(8), events.Answered(), start=state
    )
    assert after(events.Suspected(FAILING), start=again, now=99)[1] == (life.CheckSuspect(FAILING),), "another engine"


def test_exit_of_a_suspect_engine_is_reported_as_an_exit() -> None:
    state, _ = after(*HAPPY, events.Suspected(FAILING), CRASH)
    assert (state.phase, state.reason, state.suspicion) == ("Failed", "EngineExited", None)
    assert "SIGKILL" in state.message


def test_problem_of_a_starting_engine_is_shown_until_it_is_ready() -> None:
    starting, actions = after(*HAPPY[:3], events.StartProblem("the engine answered 500: oh"))
    assert (starting.phase, starting.message, actions) == ("Starting", "the engine answered 500: oh", ())
    assert after(events.Answered(), start=starting)[0].message == ""
    assert "SIGKILL" in after(CRASH, start=starting)[0].message, "the exit is the cause now"


def test_engine_that_does_not_end_blocks_no_removal_and_exists_until_its_exit() -> None:
    stopping, _ = after(*HAPPY, events.Removed())
    overdue, actions = after(events.EndOverdue("it does not end"), start=stopping)
    assert (overdue.phase, overdue.reason, overdue.message) == ("Stopped", "EngineNotEnded", "it does not end")
    assert (overdue.exists, overdue.pid, actions) == (True, 7, ())
    gone, _ = after(CRASH, start=overdue)
    assert (gone.phase, gone.exists, gone.pid) == ("Stopped", False, None)


def test_sick_engine_that_does_not_end_is_not_started_again() -> None:
    ending, _ = after(*HAPPY, events.Hung("it hangs"))
    overdue, actions = after(events.EndOverdue("it does not end"), start=ending)
    assert (overdue.phase, overdue.message, actions) == ("Starting", "it hangs; it does not end", ())
    assert overdue.exists
    assert after(CRASH, start=overdue)[0].phase == "Failed"


def test_failed_check_of_a_ready_engine_is_repeated_while_the_engine_serves() -> None:
    ready, _ = after(*HAPPY)
    failed = events.Failed("InternalError", "CheckSuspect: can't start new thread")
    state, actions = after(events.Suspected(FAILING), failed, start=ready)
    assert (state.phase, state.reason, state.is_drained) == ("Ready", "", False)
    assert actions == (life.BackOff(life.FAILED_CHECK_SECONDS), life.WatchLiveness())
    assert after(failed, start=ready) == (ready, actions)
    assert after(events.BackoffElapsed(), start=state) == (state, ()), "the engine is watched now"


def test_removal_withdraws_then_drains_then_ends() -> None:
    state, actions = after(*HAPPY, events.Removed())
    assert (state.phase, actions) == ("Stopping", (life.Withdraw(), life.Drain(), life.End()))
    assert after(CRASH, start=state)[0].phase == "Stopped"


@pytest.mark.parametrize(
    "happened",
    [
        [],
        HAPPY[:1],
        [events.Refused("A", "a")],
        [events.Failed("A", "a")],
        [*HAPPY, CRASH],
    ],
)
def test_removal_without_an_engine_is_at_once(happened: list[ProcessEvent]) -> None:
    assert after(*happened, events.Removed())[0].phase == "Stopped"


def test_an_adopted_engine_that_had_answered_stays_ready() -> None:
    assert life.resume_lifecycle(7, ready=True, restarts=2, now=0)[0].phase == "Ready"
    state, actions = life.resume_lifecycle(7, ready=False, restarts=2, now=0)
    assert (state.phase, actions) == ("Starting", (life.ProbeEngine(),))
    assert after(events.Answered(), start=state)[0].phase == "Ready"


def test_held_engine_starts_only_when_released() -> None:
    state, actions = after(HELD, *HAPPY[:2])
    assert (state.phase, state.reason, state.awaits_release, actions) == ("Pending", "MemoryPressure", True, ())
    assert after(events.Released(), start=state)[1] == (life.Spawn(),)
    assert after(*HAPPY[:2], start=life.start_lifecycle(HELD)[0])[0].awaits_release, "held from its first moment"


def test_running_engine_is_held_only_before_its_next_start() -> None:
    state, actions = after(*HAPPY, HELD)
    assert (state.phase, actions) == ("Ready", ())
    state, _ = after(CRASH, events.BackoffElapsed(), start=state)
    assert (state.phase, state.awaits_release) == ("Pending", True)


def test_eviction_of_an_engine_that_was_never_ready_ends_it_at_once() -> None:
    loading, _ = after(*HAPPY[:-1])
    assert loading.phase == "Starting"
    state, actions = after(EVICTED, start=loading)
    assert (state.phase, actions) == ("Stopping", (life.End(3.0),))


def test_eviction_withdraws_then_drains_then_ends_and_keeps_the_admission() -> None:
    state, actions = after(*HAPPY, EVICTED)
    assert (state.phase, state.reason) == ("Stopping", "MemoryPressure")
    assert actions == (life.Withdraw(1.0), life.Drain(4.0), life.End(3.0))
    state, actions = after(CRASH, start=state)
    assert (state.phase, state.reason, state.admitted, state.failures) == ("Pending", "MemoryPressure", True, 0)
    state, actions = after(events.Released(), start=state)
    assert actions == (life.Spawn(),)
    assert after(events.Spawned(8), events.Answered(), start=state)[0].phase == "Ready"


def test_released_while_stopping_starts_again_after_the_exit() -> None:
    state, actions = after(*HAPPY, EVICTED, events.Released())
    assert (state.phase, actions) == ("Stopping", ())
    assert after(CRASH, start=state)[1] == (life.Spawn(),)


def test_adopted_and_evicted_engine_fetches_its_weights_again() -> None:
    adopted, _ = life.resume_lifecycle(7, ready=True, restarts=0, now=0)
    waiting, _ = after(EVICTED, CRASH, start=adopted)
    assert waiting.awaits_release
    assert after(events.Released(), start=waiting)[1] == (life.Fetch(),)


@pytest.mark.parametrize("removed_first", [True, False])
def test_evicted_and_removed_process_is_stopped_once(*, removed_first: bool) -> None:
    both: list[ProcessEvent] = [events.Removed(), EVICTED] if removed_first else [EVICTED, events.Removed()]
    state, actions = after(*HAPPY, *both)
    assert (state.phase, state.is_hastened) == ("Stopping", True)
    assert actions == ((life.Withdraw(1.0), life.Drain(4.0), life.End(3.0)) if removed_first else ())
    assert after(CRASH, start=state)[0].phase == "Stopped"
    assert after(*HAPPY, EVICTED, CRASH, events.Removed())[0].phase == "Stopped"


EVENTS = st.one_of(
    st.sampled_from(
        [
            events.Admitted(),
            events.Fetched(),
            events.Answered(),
            events.Hung("h"),
            events.BackoffElapsed(),
            events.Removed(),
            events.Refused("R", "r"),
            events.Refused("InsufficientMemory", "r", 5),
            events.MemoryFreed(),
            events.LoadSlotGranted(),
            HELD,
            EVICTED,
            events.Released(),
            events.StartProblem("it answered 500"),
            events.EndOverdue("it does not end"),
            events.Suspected(FAILING),
            events.Suspected(SLOW),
            events.Trusted(),
            events.Hung("it answered 500", "EngineFailing", answers=True),
        ]
    ),
    st.builds(events.Failed, st.just("F"), st.just("f"), st.booleans()),
    st.just(CRASH),
)


OUTCOMES = st.lists(st.sampled_from(["spawned", "failed", "busy"]), min_size=60, max_size=60)


@given(st.lists(EVENTS, max_size=60), OUTCOMES)
def test_invariants_hold_for_any_order_of_events(happened: list[ProcessEvent], spawns: list[str]) -> None:
    """Send events in any order, also impossible ones; the outcome of a Spawn follows at once, as from the runner."""
    outcomes = iter(spawns)
    state, actions = life.start_lifecycle()
    running, answered = False, False
    for now, event in enumerate(happened):
        if isinstance(event, events.Exited):
            if not running:
                continue
            running = answered = False
        answered = answered or (isinstance(event, events.Answered) and running)
        before = state
        state, actions = step(state, event, float(now))
        if life.Spawn() in actions:
            assert not running, "a second engine"
            assert not state.hold, "the host held it"
            assert actions == (life.Spawn(),)
            kind = next(outcomes)
            running = kind == "spawned"
            outcome: ProcessEvent = events.Failed("SpawnFailed", "no") if kind == "failed" else events.LoadSlotBusy()
            if running:
                outcome = events.Spawned(now + 1 if now % 2 else None)
            state, actions = step(state, outcome, float(now))
            assert kind != "busy" or (state.queued and actions == (life.AwaitLoadSlot(),))
        assert state.phase == "Pending" or not state.queued
        assert state.exists == running
        assert state.pid is None or running
        assert state.phase != "Ready" or (running and answered), "Ready without a token"
        assert state.phase not in {"Rejected", "Failed", "Pending", "Fetching"} or not running
        assert state.phase != "Stopped" or not running or state.reason == "EngineNotEnded"
        assert state.suspicion is None or state.phase == "Ready"
        if before.phase == "Ready" and any(isinstance(action, life.End) for action in actions):
            steps = [type(action) for action in actions]
            assert steps in ([life.Withdraw, life.Drain, life.End], [life.Withdraw, life.End])
        if before.leaving:
            assert state.leaving, "came back to life"
    state, _ = step(state, events.Removed(), 99.0)
    if running:
        state, _ = step(state, CRASH, 99.0)
    assert state.phase == "Stopped"


@pytest.mark.parametrize("begun", [events.Removed(), events.Evicted("HostPaused", "the owner", is_urgent=False)])
def test_urgent_eviction_hastens_an_engine_that_drains(begun: events.ProcessEvent) -> None:
    draining, actions = after(*HAPPY, begun)
    assert actions == (life.Withdraw(), life.Drain(), life.End()), "its answers have the time that the service states"
    urgent = events.Evicted("MemoryPressure", "no memory")
    hastened, actions = after(urgent, start=draining)
    withdraw, drain, grace = life.EVICTION_SECONDS
    assert actions == (life.Withdraw(withdraw), life.Drain(drain), life.End(grace))
    assert (hastened.leaving, hastened.is_hastened) == (draining.leaving, True)
    assert after(urgent, start=hastened) == (hastened, ()), "it is ending already"
    gone, _ = after(events.Exited(LastExit(code=0)), start=hastened)
    assert gone.phase == ("Stopped" if draining.leaving else "Pending")
