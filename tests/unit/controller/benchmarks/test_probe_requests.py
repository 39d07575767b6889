"""A service gets an answer at once, and again when what is measured for it changes."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from controller.benchmarks.benchmark_job import BenchmarkKey
from controller.benchmarks.probe_requests import HELD_SECONDS, NO_PROBES, PlannedProbes, ProbeRequests
from controller.services.probe_wait import ENDING_SECONDS, PROBE_SECONDS
from kube.resources import ObjectKey
from tests.support.api_objects import NOW

CHAT, OTHER = ObjectKey("team", "chat"), ObjectKey("team", "other")
UNTIL = NOW + timedelta(seconds=PROBE_SECONDS)
A, B = BenchmarkKey("team", "hash", "a"), BenchmarkKey("team", "hash", "b")
NOTHING = frozenset[BenchmarkKey]()


def requests() -> ProbeRequests:
    """Return the requests of a service that was told that both classes are about to be measured, after look 1."""
    found = ProbeRequests()
    found.put(CHAT, "ab", UNTIL, look=1, keys={"a": A, "b": B}, told=frozenset("ab"))
    return found


def test_pairs_are_wanted_until_the_wait_is_about_to_end_and_held_for_a_while_afterwards() -> None:
    found, ending = requests(), PROBE_SECONDS - ENDING_SECONDS
    both = frozenset({A, B})
    assert found.plan(NOW) == PlannedProbes(both, again_seconds=ending)
    late = found.plan(NOW + timedelta(seconds=ending))
    assert late == PlannedProbes(held=both, again_seconds=ENDING_SECONDS + HELD_SECONDS)
    assert found.plan(UNTIL + timedelta(seconds=HELD_SECONDS)) == NO_PROBES
    assert CHAT not in found


def test_pair_for_which_another_service_waits_is_not_held() -> None:
    found = requests()
    found.put(OTHER, "a", UNTIL + timedelta(seconds=60), look=1, keys={"a": A}, told=frozenset("a"))
    made = found.plan(UNTIL)
    assert (made.wanted, made.held) == (frozenset({A}), frozenset({B}))


def test_answer_holds_until_jobs_could_be_started() -> None:
    found = requests()
    assert found.answer(NOTHING, NOTHING, 1, NOW) == []
    assert found.find(CHAT) == frozenset({"a", "b"})
    assert found.answer({A}, NOTHING, 2, NOW) == [CHAT], "the other one had no device"
    assert found.find(CHAT) == frozenset({"a"})
    assert found.answer({A}, NOTHING, 2, NOW) == []


def test_devices_are_held_as_soon_as_nothing_is_measured() -> None:
    found = requests()
    assert found.answer(NOTHING, NOTHING, 2, NOW) == [CHAT]
    assert found.find(CHAT) == frozenset()
    assert found.plan(NOW) == PlannedProbes(held=frozenset({A, B}), again_seconds=HELD_SECONDS)


def test_request_before_the_first_look_is_answered_after_it() -> None:
    found = ProbeRequests()
    found.put(CHAT, "ab", UNTIL, look=0)
    assert (found.find(CHAT), CHAT in found) == (None, True)
    found.find_keys({CHAT: {"a": A, "c": B}})
    assert found.plan(NOW).wanted == {A}
    assert found.answer({A}, NOTHING, 1, NOW) == [CHAT]
    assert found.find(CHAT) == frozenset({"a"})


def test_wait_goes_on_while_jobs_of_the_last_leader_leave_their_devices() -> None:
    found = ProbeRequests()
    found.put(CHAT, "a", UNTIL, look=0)
    found.find_keys({CHAT: {"a": A}})
    assert found.answer(NOTHING, {A}, 1, NOW) == []
    assert found.answer(NOTHING, NOTHING, 1, NOW) == [], "no look has found the idle device yet"
    assert found.answer({A}, NOTHING, 2, NOW) == [CHAT]
    assert found.find(CHAT) == frozenset({"a"})


def test_forgotten_service_is_not_answered() -> None:
    found = requests()
    found.forget(CHAT)
    assert (found.find(CHAT), found.plan(NOW), found.answer(NOTHING, NOTHING, 2, NOW)) == (None, NO_PROBES, [])
    found = requests()
    found.clear()
    assert CHAT not in found


@given(st.lists(st.tuples(st.integers(0, 60), st.frozensets(st.sampled_from([A, B])), st.booleans()), max_size=20))
def test_request_ends_in_time_and_is_told_of_each_change(
    steps: list[tuple[int, frozenset[BenchmarkKey], bool]],
) -> None:
    found, now, look, told = requests(), NOW, 1, requests().find(CHAT)
    for seconds, measured, is_look in steps:
        now, look = now + timedelta(seconds=seconds), look + is_look
        made = found.plan(now)
        assert made.wanted.isdisjoint(made.held)
        assert not made.wanted or now < UNTIL - timedelta(seconds=ENDING_SECONDS)
        assert (CHAT in found) == bool(made.wanted | made.held)
        changed = found.answer(measured, NOTHING, look, now)
        if CHAT not in found:
            return
        assert (changed == [CHAT]) == (found.find(CHAT) != told)
        told = found.find(CHAT)
