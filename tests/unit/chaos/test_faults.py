"""The schedule of faults follows from the seed, and only faults explain failures."""

import math

import pytest

from tests.chaos.faults import Breakage, FailedRequest, extend_absences, list_unexplained, plan_faults

HERE, THERE = "10.77.100.1", "10.77.100.2"


def failure(at: float, address: str = HERE, *, plausible: bool = True) -> FailedRequest:
    return FailedRequest(address, at, at + 0.1, "it", plausible)


def test_schedule_of_faults_follows_from_the_seed() -> None:
    assert plan_faults(7, 600, 2) == plan_faults(7, 600, 2)
    assert plan_faults(7, 600, 2) != plan_faults(8, 600, 2)
    assert {fault.kind for fault in plan_faults(7, 600, 2)} == {"agent", "proxy", "engine", "link", "power"}
    assert all(0 <= fault.at < 600 for fault in plan_faults(7, 600, 2))


@pytest.mark.parametrize(
    ("failed", "breakages", "explained"),
    [
        (failure(10), [], False),
        (failure(10), [Breakage("agent", HERE, 9, 12)], False),
        (failure(10), [Breakage("engine", HERE, 9, 9)], True),
        (failure(10), [Breakage("engine", THERE, 9, 9)], False),
        (failure(10, plausible=False), [Breakage("engine", HERE, 9, 9)], False),
        (failure(8), [Breakage("engine", HERE, 9, 9)], False),
        (failure(20), [Breakage("engine", HERE, 9, 9)], False),
        # The agent was not running, so the endpoint was not withdrawn.
        (failure(20), [Breakage("engine", HERE, 9, 9), Breakage("agent", HERE, 8, 13)], True),
        (failure(20), [Breakage("engine", HERE, 9, 9), Breakage("agent", THERE, 8, 13)], False),
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
