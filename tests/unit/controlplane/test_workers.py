"""Distribution of tests over parallel workers: long tests first, beside short ones."""

import shlex
from types import SimpleNamespace
from typing import Any, cast

import pytest
from execnet.gateway_io import popen_args
from execnet.xspec import XSpec

from tests.controlplane.workers import TwoEndedScheduling, select_long, sort_longest_first, worker_spec


class StubItem:
    def __init__(self, nodeid: str, *fixturenames: str) -> None:
        self.nodeid = nodeid
        self.fixturenames = fixturenames


class StubWorker:
    """A stand-in for a worker of xdist, which queues the tests that it is sent; `run_next` ends one test."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self.shutting_down = False
        self.gateway = SimpleNamespace(id="gw0")

    def send_runtest_some(self, indices: list[int]) -> None:
        self.pending += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def run_next(self, scheduling: TwoEndedScheduling) -> int:
        index = self.pending.pop(0)
        scheduling.mark_test_complete(cast("Any", self), index)
        return index


class StubConfig:
    def __init__(self, workers: int) -> None:
        self._options = {"tx": ["popen"] * workers, "maxschedchunk": 1}

    def getvalue(self, name: str) -> object:
        return self._options[name]

    getoption = getvalue


def scheduled(workers: int, tests: int) -> tuple[TwoEndedScheduling, list[StubWorker]]:
    scheduling = TwoEndedScheduling(cast("pytest.Config", StubConfig(workers)))
    stubs = [StubWorker() for _ in range(workers)]
    for stub in stubs:
        scheduling.add_node(cast("Any", stub))
        scheduling.add_node_collection(cast("Any", stub), [f"test_{number}" for number in range(tests)])
    scheduling.schedule()
    return scheduling, stubs


def test_longest_test_comes_first_and_unknown_ones_last_in_their_order() -> None:
    items = [StubItem(name) for name in ("new", "short", "long", "another")]

    sort_longest_first(cast("list[pytest.Item]", items), {"short": 4, "long": 40, "deleted": 90})

    assert [item.nodeid for item in items] == ["long", "short", "new", "another"]


def test_tests_with_the_controller_are_neighbours_among_those_of_about_the_same_duration() -> None:
    durations = {"a": 60, "b": 50, "c": 40, "d": 30, "e": 20, "f": 16}
    items = [StubItem(name, *(["controller"] if name in "bdf" else [])) for name in durations]

    sort_longest_first(cast("list[pytest.Item]", items), durations)

    assert [item.nodeid for item in items] == ["b", "a", "c", "e", "d", "f"]


def test_only_long_tests_are_in_the_table() -> None:
    assert select_long({"b": 3.6, "a": 120.2, "c": 2.9}) == {"a": 120, "b": 4}


def test_workers_begin_at_both_ends() -> None:
    _, (first, second) = scheduled(2, 8)

    assert (first.pending, second.pending) == ([0, 1], [7, 6])


def test_workers_continue_from_their_end_until_every_test_has_run_once() -> None:
    scheduling, (first, second) = scheduled(2, 8)

    assert [first.run_next(scheduling) for _ in range(2)] == [0, 1]
    assert [second.run_next(scheduling) for _ in range(3)] == [7, 6, 5]
    assert [first.run_next(scheduling) for _ in range(2)] == [2, 3]
    assert second.run_next(scheduling) == 4
    assert scheduling.tests_finished


def test_a_single_worker_runs_everything_in_order() -> None:
    scheduling, (worker,) = scheduled(1, 4)

    assert [worker.run_next(scheduling) for _ in range(4)] == [0, 1, 2, 3]


def test_worker_is_started_with_the_whole_command() -> None:
    command = ["/a folder/python", "-m", "sandbox", "--", "/a folder/python"]

    argv = popen_args(XSpec(worker_spec(command)))

    assert argv[: len(command)] == command, shlex.join(argv)
