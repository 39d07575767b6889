"""A seed decides everything, and no failure is explained away."""

import pytest

from tests.chaos.faults import Breakage, Failure, schedule, unexplained

HERE, THERE = "10.77.100.1", "10.77.100.2"


def failure(at: float, address: str = HERE, *, plausible: bool = True) -> Failure:
    return Failure(address, at, at + 0.1, "it", plausible)


def test_a_seed_decides_everything() -> None:
    assert schedule(7, 600, 2) == schedule(7, 600, 2)
    assert schedule(7, 600, 2) != schedule(8, 600, 2)
    assert {fault.kind for fault in schedule(7, 600, 2)} == {"agent", "proxy", "engine", "link", "power"}
    assert all(0 <= fault.at < 600 for fault in schedule(7, 600, 2))


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
        # Nobody was there to withdraw the endpoint.
        (failure(20), [Breakage("engine", HERE, 9, 9), Breakage("agent", HERE, 8, 13)], True),
        (failure(20), [Breakage("engine", HERE, 9, 9), Breakage("agent", THERE, 8, 13)], False),
        (failure(30), [Breakage("link", HERE, 9, 40)], True),
    ],
)
def test_only_what_broke_explains_a_failure(failed: Failure, breakages: list[Breakage], explained: bool) -> None:
    assert (unexplained([failed], breakages) == []) is explained
