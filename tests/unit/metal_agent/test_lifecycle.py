"""The state machine of a process: its transitions, and invariants under any order of events."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crds.metalprocess import LastExit
from metal_agent import lifecycle as life
from metal_agent.lifecycle import ProcessEvent, ProcessState, step

HELD = life.Held("MemoryPressure", "the host is short of memory")
EVICTED = life.Evicted("MemoryPressure", "the host needs its memory")
CRASH = life.Exited(LastExit(signal="SIGKILL"))
HAPPY: Sequence[ProcessEvent] = (life.Admitted(), life.Fetched(), life.Spawned(7), life.Answered())


def after(*events: ProcessEvent, start: ProcessState | None = None, now: float = 0.0) -> life.ProcessStep:
    state, actions = (start, ()) if start else life.start_lifecycle()
    for event in events:
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
    ("events", "phase", "reason"),
    [
        ([life.Refused("InsufficientMemory", "no")], "Rejected", "InsufficientMemory"),
        ([life.Admitted(), life.Refused("FileNotFound", "no")], "Rejected", "FileNotFound"),
        ([life.Failed("SourceUnreachable", "no")], "Failed", "SourceUnreachable"),
        ([life.Admitted(), life.Failed("ChecksumMismatch", "no", permanent=True)], "Failed", "ChecksumMismatch"),
        ([*HAPPY[:2], life.Failed("SpawnFailed", "no")], "Failed", "SpawnFailed"),
        ([*HAPPY, CRASH], "Failed", "EngineExited"),
        ([*HAPPY, life.Hung("no sign")], "Starting", "EngineHung"),
        ([*HAPPY, life.Hung("no sign"), life.Answered()], "Starting", "EngineHung"),
        ([*HAPPY, life.Hung("no sign"), CRASH], "Failed", "EngineHung"),
        ([*HAPPY[:3], life.Failed("StartTimeout", "no"), CRASH], "Failed", "StartTimeout"),
    ],
)
def test_failure_sets_phase_and_reason(events: list[ProcessEvent], phase: str, reason: str) -> None:
    state, _ = after(*events)
    assert (state.phase, state.reason) == (phase, reason)


def test_permanent_failure_is_retried_after_the_longest_back_off() -> None:
    _, actions = after(life.Admitted(), life.Failed("ChecksumMismatch", "no", permanent=True))
    assert actions == (life.BackOff(life.MAX_BACKOFF_SECONDS),)


def test_failed_step_is_retried() -> None:
    assert after(life.Failed("A", "a"), life.BackoffElapsed())[1] == (life.CheckAdmission(),)
    assert after(life.Admitted(), life.Failed("A", "a"), life.BackoffElapsed())[1] == (life.Fetch(),)
    assert after(*HAPPY, CRASH, life.BackoffElapsed())[1] == (life.Spawn(),)
    assert after(*HAPPY[:2], life.Failed("WeightsMissing", "a"), life.BackoffElapsed())[1] == (life.Fetch(),)


def test_lost_weights_are_fetched_again() -> None:
    assert after(*HAPPY, life.Exited(LastExit(), "ModelMissing", fetched=False), life.BackoffElapsed())[1] == (
        life.Fetch(),
    )


def test_a_crash_loop_backs_off_and_counts_restarts() -> None:
    state, _ = after(*HAPPY)
    waits = []
    for _ in range(11):
        state, actions = step(state, CRASH, 0)
        waits += [action.seconds for action in actions if isinstance(action, life.BackOff)]
        state, _ = after(life.BackoffElapsed(), life.Spawned(8), life.Answered(), start=state)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert state.restarts == 11


def test_an_engine_that_was_stable_starts_the_back_off_anew() -> None:
    looping, _ = after(*HAPPY, CRASH, life.BackoffElapsed(), life.Spawned(8), life.Answered(), now=10)
    assert step(looping, CRASH, 10 + life.STABLE_SECONDS - 1)[1] == (life.BackOff(2),)
    assert step(looping, CRASH, 10 + life.STABLE_SECONDS)[1] == (life.BackOff(1),)


def test_an_engine_that_never_answers_is_ended_before_the_back_off() -> None:
    state, actions = after(*HAPPY[:3], life.Failed("StartTimeout", "no token"))
    assert (actions, state.pid) == ((life.End(),), 7)
    assert after(CRASH, start=state)[1] == (life.BackOff(1),)


def test_wait_for_the_load_slot_is_no_restart() -> None:
    queued, actions = after(*HAPPY[:2], life.LoadSlotBusy())
    assert (queued.phase, queued.reason, actions) == ("Pending", "WaitsToLoad", (life.AwaitLoadSlot(),))
    assert (
        after(life.BackoffElapsed(), life.Admitted(), life.Refused("R", "r"), life.MemoryFreed(), start=queued)[0]
        == queued
    )
    started, actions = after(life.LoadSlotGranted(), start=queued)
    assert (started.phase, started.reason, started.queued, actions) == ("Starting", "", False, (life.Spawn(),))
    again, _ = after(
        *HAPPY,
        CRASH,
        life.BackoffElapsed(),
        life.LoadSlotBusy(),
        life.LoadSlotGranted(),
        life.LoadSlotBusy(),
        life.LoadSlotGranted(),
    )
    assert again.restarts == 1
    assert after(life.Removed(), start=queued)[0].phase == "Stopped"
    held, actions = after(HELD, life.LoadSlotGranted(), start=queued)
    assert (held.reason, held.awaits_release, held.queued, actions) == ("MemoryPressure", True, False, ())


def test_rejected_process_is_checked_again_when_memory_is_freed() -> None:
    refused, _ = after(life.Refused("InsufficientMemory", "no", 5))
    assert refused.needed_bytes == 5
    again, actions = after(life.MemoryFreed(), start=refused)
    assert (again.phase, again.needed_bytes, actions) == ("Pending", None, (life.CheckAdmission(),))
    assert after(*HAPPY, start=again)[0].phase == "Ready"
    other, _ = after(life.Admitted(), life.Refused("FileNotFound", "no"))
    assert after(life.MemoryFreed(), start=other) == (other, ())


def test_an_engine_that_hangs_is_withdrawn_and_gone_before_another_starts() -> None:
    state, actions = after(*HAPPY, life.Hung("no sign"))
    assert actions == (life.Withdraw(), life.End(life.HUNG_GRACE_SECONDS))
    assert (state.phase, state.pid) == ("Starting", 7)
    assert after(life.Removed(), start=state)[0].phase == "Stopping"
    assert after(life.Failed("A", "a"), start=state) == (state, ()), "it is being ended"
    assert after(CRASH, life.BackoffElapsed(), start=state)[1] == (life.Spawn(),)


def test_internal_error_ends_no_ready_engine() -> None:
    ready, _ = after(*HAPPY)
    assert after(life.Failed("InternalError", "ours"), start=ready) == (ready, ())


def test_removal_withdraws_then_drains_then_ends() -> None:
    state, actions = after(*HAPPY, life.Removed())
    assert (state.phase, actions) == ("Stopping", (life.Withdraw(), life.Drain(), life.End()))
    assert after(CRASH, start=state)[0].phase == "Stopped"


@pytest.mark.parametrize(
    "events",
    [
        [],
        HAPPY[:1],
        [life.Refused("A", "a")],
        [life.Failed("A", "a")],
        [*HAPPY, CRASH],
    ],
)
def test_removal_without_an_engine_is_at_once(events: list[ProcessEvent]) -> None:
    assert after(*events, life.Removed())[0].phase == "Stopped"


def test_an_adopted_engine_that_had_answered_stays_ready() -> None:
    assert life.resume_lifecycle(7, ready=True, restarts=2, now=0)[0].phase == "Ready"
    state, actions = life.resume_lifecycle(7, ready=False, restarts=2, now=0)
    assert (state.phase, actions) == ("Starting", (life.ProbeEngine(),))
    assert after(life.Answered(), start=state)[0].phase == "Ready"


def test_held_engine_starts_only_when_released() -> None:
    state, actions = after(HELD, *HAPPY[:2])
    assert (state.phase, state.reason, state.awaits_release, actions) == ("Pending", "MemoryPressure", True, ())
    assert after(life.Released(), start=state)[1] == (life.Spawn(),)
    assert after(*HAPPY[:2], start=life.start_lifecycle(HELD)[0])[0].awaits_release, "held from its first moment"


def test_running_engine_is_held_only_before_its_next_start() -> None:
    state, actions = after(*HAPPY, HELD)
    assert (state.phase, actions) == ("Ready", ())
    state, _ = after(CRASH, life.BackoffElapsed(), start=state)
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
    state, actions = after(life.Released(), start=state)
    assert actions == (life.Spawn(),)
    assert after(life.Spawned(8), life.Answered(), start=state)[0].phase == "Ready"


def test_released_while_stopping_starts_again_after_the_exit() -> None:
    state, actions = after(*HAPPY, EVICTED, life.Released())
    assert (state.phase, actions) == ("Stopping", ())
    assert after(CRASH, start=state)[1] == (life.Spawn(),)


def test_adopted_and_evicted_engine_fetches_its_weights_again() -> None:
    adopted, _ = life.resume_lifecycle(7, ready=True, restarts=0, now=0)
    waiting, _ = after(EVICTED, CRASH, start=adopted)
    assert waiting.awaits_release
    assert after(life.Released(), start=waiting)[1] == (life.Fetch(),)


@pytest.mark.parametrize("removed_first", [True, False])
def test_evicted_and_removed_process_is_stopped_once(*, removed_first: bool) -> None:
    both: list[ProcessEvent] = [life.Removed(), EVICTED] if removed_first else [EVICTED, life.Removed()]
    state, actions = after(*HAPPY, *both)
    assert (state.phase, actions) == ("Stopping", ())
    assert after(CRASH, start=state)[0].phase == "Stopped"
    assert after(*HAPPY, EVICTED, CRASH, life.Removed())[0].phase == "Stopped"


EVENTS = st.one_of(
    st.sampled_from(
        [
            life.Admitted(),
            life.Fetched(),
            life.Answered(),
            life.Hung("h"),
            life.BackoffElapsed(),
            life.Removed(),
            life.Refused("R", "r"),
            life.Refused("InsufficientMemory", "r", 5),
            life.MemoryFreed(),
            life.LoadSlotGranted(),
            HELD,
            EVICTED,
            life.Released(),
        ]
    ),
    st.builds(life.Failed, st.just("F"), st.just("f"), st.booleans()),
    st.just(CRASH),
)


OUTCOMES = st.lists(st.sampled_from(["spawned", "failed", "busy"]), min_size=60, max_size=60)


@given(st.lists(EVENTS, max_size=60), OUTCOMES)
@settings(max_examples=200)
def test_invariants_hold_for_any_order_of_events(events: list[ProcessEvent], spawns: list[str]) -> None:
    """Send events in any order, also impossible ones; the outcome of a Spawn follows at once, as from the runner."""
    outcomes = iter(spawns)
    state, actions = life.start_lifecycle()
    running, answered = False, False
    for now, event in enumerate(events):
        if isinstance(event, life.Exited):
            if not running:
                continue
            running = answered = False
        answered = answered or (isinstance(event, life.Answered) and running)
        before = state
        state, actions = step(state, event, float(now))
        if life.Spawn() in actions:
            assert not running, "a second engine"
            assert not state.hold, "the host held it"
            assert actions == (life.Spawn(),)
            kind = next(outcomes)
            running = kind == "spawned"
            outcome: ProcessEvent = life.Failed("SpawnFailed", "no") if kind == "failed" else life.LoadSlotBusy()
            if running:
                outcome = life.Spawned(now + 1 if now % 2 else None)
            state, actions = step(state, outcome, float(now))
            assert kind != "busy" or (state.queued and actions == (life.AwaitLoadSlot(),))
        assert state.phase == "Pending" or not state.queued
        assert state.exists == running
        assert state.pid is None or running
        assert state.phase != "Ready" or (running and answered), "Ready without a token"
        assert state.phase not in {"Stopped", "Rejected", "Failed", "Pending", "Fetching"} or not running
        if before.phase == "Ready" and any(isinstance(action, life.End) for action in actions):
            steps = [type(action) for action in actions]
            assert steps in ([life.Withdraw, life.Drain, life.End], [life.Withdraw, life.End])
        if before.leaving:
            assert state.leaving, "came back to life"
    state, _ = step(state, life.Removed(), 99.0)
    if running:
        state, _ = step(state, CRASH, 99.0)
    assert state.phase == "Stopped"


@given(st.integers(1, 10_000))
def test_the_back_off_grows_to_its_cap(failures: int) -> None:
    assert (
        1
        <= life.restart_backoff_seconds(failures)
        <= life.restart_backoff_seconds(failures + 1)
        <= life.MAX_BACKOFF_SECONDS
    )
