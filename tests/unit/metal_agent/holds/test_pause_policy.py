"""The actions of a paused host: what is displaced, what is stopped, and what returns."""

from hypothesis import given
from hypothesis import strategies as st

from crds.meta import Priority
from metal_agent.holds.pause_policy import PauseState, step_pause
from metal_agent.memory.pressure_policy import DISPLACEMENT_SECONDS, EvictionCandidate, HoldAction, MemoryStage


def process(uid: str, stage: MemoryStage = "serving", priority: Priority = "normal") -> EvictionCandidate:
    return EvictionCandidate(uid, priority, stage, 0)


def test_host_without_a_hold_does_nothing() -> None:
    assert step_pause(PauseState(), [process("a")], 10.0, is_held=False) == (PauseState(), ())


def test_pause_displaces_what_serves_and_resume_keeps_it() -> None:
    state, actions = step_pause(PauseState(), [process("a"), process("b", "absent")], 10.0, is_held=True)
    assert actions == (HoldAction("pause"), HoldAction("displace", "a"))
    state, actions = step_pause(state, [process("a")], 10.0, is_held=True)
    assert actions == ()
    state, actions = step_pause(state, [process("a")], 10.0, is_held=False)
    assert (state, actions) == (PauseState(), (HoldAction("cancel", "a"), HoldAction("resume")))


def test_engine_that_loads_is_stopped_at_once() -> None:
    _, actions = step_pause(PauseState(), [process("a", "loading")], 0.0, is_held=True)
    assert actions == (HoldAction("pause"), HoldAction("evict", "a"))


def test_process_without_another_place_is_stopped_after_the_limit() -> None:
    state, _ = step_pause(PauseState(), [process("a")], 10.0, is_held=True)
    seconds = 0.0
    actions: tuple[HoldAction, ...] = ()
    while not actions:
        state, actions = step_pause(state, [process("a")], 10.0, is_held=True)
        seconds += 10.0
    assert (actions, seconds) == ((HoldAction("evict", "a"),), DISPLACEMENT_SECONDS)
    state, actions = step_pause(state, [process("a", "ending")], 10.0, is_held=True)
    assert (actions, state.evicted) == ((), frozenset({"a"}))
    state, actions = step_pause(state, [process("a", "absent")], 10.0, is_held=False)
    assert (actions, state) == ((HoldAction("resume"),), PauseState())


def test_process_of_priority_critical_stays_unless_the_owner_pauses_it_too() -> None:
    protected = [process("a", priority="critical")]
    assert step_pause(PauseState(), protected, 10.0, is_held=True)[1] == (HoldAction("pause"),)
    assert step_pause(PauseState(), protected, 10.0, is_held=True, pauses_critical=True)[1] == (
        HoldAction("pause"),
        HoldAction("displace", "a"),
    )


STAGES = st.sampled_from(["absent", "loading", "serving", "ending"])
STEPS = st.lists(
    st.tuples(st.booleans(), st.dictionaries(st.sampled_from("abc"), STAGES), st.floats(0, 900)), max_size=40
)


@given(STEPS)
def test_only_a_running_process_is_displaced_or_stopped_and_only_during_a_pause(
    steps: list[tuple[bool, dict[str, MemoryStage], float]],
) -> None:
    state, displaced_for = PauseState(), dict.fromkeys("abc", 0.0)
    for is_held, stages, seconds in steps:
        candidates = [process(uid, stage) for uid, stage in stages.items()]
        before = state
        state, actions = step_pause(state, candidates, seconds, is_held=is_held)
        assert state.is_paused is is_held
        assert (HoldAction("pause") in actions) is (is_held and not before.is_paused)
        assert (HoldAction("resume") in actions) is (before.is_paused and not is_held)
        for uid in "abc":
            displaced_for[uid] = displaced_for[uid] + seconds if uid in before.displacing else 0.0
        for action in actions:
            if action.kind in {"displace", "evict"}:
                assert is_held
                assert stages[action.uid] in {"loading", "serving"}
            if action.kind == "evict" and stages[action.uid] == "serving":
                assert action.uid in before.evicted or displaced_for[action.uid] >= DISPLACEMENT_SECONDS - 1e-6
        if not is_held:
            assert (state.displacing, state.evicted) == ({}, frozenset())
