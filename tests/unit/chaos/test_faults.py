"""The schedule of faults follows from the seed, and only faults explain failures."""

import itertools
import math

import pytest

from tests.chaos.faults import (
    FAULTS,
    NO_ANSWER,
    OUTAGES,
    Breakage,
    FailedRequest,
    extend_absences,
    list_unexplained,
    measure_lateness,
    plan_faults,
    plan_outages,
)

HERE, THERE = "10.77.100.1", "10.77.100.2"


def failure(at: float, address: str = HERE, status: int = NO_ANSWER) -> FailedRequest:
    return FailedRequest(address, at, at, at + 0.1, "chat", "it", status)


def test_schedule_of_faults_follows_from_the_seed() -> None:
    assert plan_faults(7, 600, 2) == plan_faults(7, 600, 2)
    assert plan_faults(7, 600, 2) != plan_faults(8, 600, 2)


@pytest.mark.parametrize("seed", range(20))
def test_each_run_has_all_faults_and_ends_in_time(seed: int) -> None:
    faults = plan_faults(seed, 90, 2)
    assert {fault.kind for fault in faults} == {*FAULTS, "mute"}
    assert {fault.kind for fault in plan_outages(seed, 90)} == set(OUTAGES)
    assert all(0 <= fault.at <= fault.at + fault.seconds <= 90 for fault in [*faults, *plan_outages(seed, 90)])


def test_host_has_one_fault_at_a_time_besides_a_full_disk() -> None:
    for host in range(2):
        mine = [fault for fault in plan_faults(7, 600, 2) if fault.host == host and fault.kind != "disk"]
        assert all(first.at + first.seconds <= second.at for first, second in itertools.pairwise(mine))


def test_address_that_was_ready_at_the_look_explains_a_late_request() -> None:
    """An address before it did not answer for seconds."""
    engine = Breakage("engine", HERE, 10.0, 10.0, "chat")
    late = [FailedRequest(HERE, looked, 14.0, 14.1, "chat", "it") for looked in (9.0, 10.5, 11.5)]
    assert list_unexplained(late, [engine]) == late[2:]


def test_agent_lives_as_long_as_it_observes_a_silent_engine() -> None:
    for seed in range(20):
        silent, *faults = plan_faults(seed, 90, 2)
        assert silent.kind == "mute"
        assert not [fault for fault in faults if (fault.kind, fault.host) == ("agent", silent.host)]


def test_outages_of_the_api_server_take_turns() -> None:
    outages = plan_outages(7, 600)
    assert outages == plan_outages(7, 600)
    assert [outage.kind for outage in outages[:3]] == ["apiserver", "stuck", "apiserver"]


@pytest.mark.parametrize(
    ("failed", "breakages", "explained"),
    [
        (failure(10), [], False),
        (failure(10), [Breakage("agent", HERE, 9, 12)], False),
        (failure(10), [Breakage("engine", HERE, 9, 9)], True),
        (failure(10), [Breakage("engine", THERE, 9, 9)], False),
        (failure(10, status=404), [Breakage("engine", HERE, 9, 9)], False),
        (failure(10, status=500), [Breakage("engine", HERE, 9, 9)], False),
        (failure(10, status=500), [Breakage("failing", HERE, 9, 12)], True),
        (failure(10), [Breakage("engine", HERE, 9, 9, "chat")], True),
        (failure(10), [Breakage("engine", HERE, 9, 9, "other")], False),
        (failure(8), [Breakage("engine", HERE, 9, 9)], False),
        (failure(10.5), [Breakage("engine", HERE, 9, 9)], False),
        (failure(20), [Breakage("engine", HERE, 9, 9)], False),
        (failure(20), [Breakage("mute", HERE, 9, 25)], True),
        (failure(10), [Breakage("disk", HERE, 9, 12)], False),
        (failure(10), [Breakage("apiserver", HERE, 9, 12)], False),
        # Nothing could withdraw the endpoint.
        (failure(12), [Breakage("engine", HERE, 9, 9), Breakage("stuck", HERE, 8, 13)], True),
        # The Lease has expired, and the controller has withdrawn the endpoints.
        (failure(70), [Breakage("link", HERE, 9, 90)], False),
        (failure(70), [Breakage("link", HERE, 9, 90), Breakage("apiserver", HERE, 40, 50)], True),
        # The agent was not running, so the endpoint was not withdrawn.
        (failure(17), [Breakage("engine", HERE, 9, 9), Breakage("agent", HERE, 8, 13)], True),
        (failure(17), [Breakage("engine", HERE, 9, 9), Breakage("agent", THERE, 8, 13)], False),
        (failure(30), [Breakage("link", HERE, 9, 40)], True),
    ],
)
def test_failure_is_explained_only_by_a_fault_on_its_host(
    failed: FailedRequest, breakages: list[Breakage], explained: bool
) -> None:
    assert (list_unexplained([failed], breakages) == []) is explained


def test_an_absence_lasts_until_the_host_has_renewed_its_lease() -> None:
    engine, agent, power = (
        Breakage("engine", HERE, 1, 1),
        Breakage("agent", HERE, 2, 4),
        Breakage("power", HERE, 12, 15),
    )

    assert extend_absences([engine, agent, power], [1.5, 3.5, 9.0, 11.0]) == [
        engine,
        Breakage("agent", HERE, 2, 9.0),
        Breakage("power", HERE, 12, math.inf),
    ]


def test_lateness_of_a_failure_is_that_after_the_last_fault_that_explains_it() -> None:
    breakages = [
        Breakage("engine", HERE, 9, 9),
        Breakage("proxy", HERE, 20, 20),
        Breakage("proxy", THERE, 21, 21),
        Breakage("disk", HERE, 21, 22),
    ]

    late = measure_lateness([failure(9.5), failure(20.25), failure(20.75), failure(21, status=404)], breakages)

    assert late == {"engine": 0.5, "proxy": 0.75}
