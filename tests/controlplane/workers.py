"""pytest in parallel, each worker in a separate sandbox: `pytest -p tests.controlplane.workers --sandboxes 7`.

The workers are those of pytest-xdist; only their Python is started in a sandbox. So no worker sees the addresses,
ports, processes or /tmp of another, and each has a separate control plane.

Half of the workers take the longest tests first, the other half the shortest. Long tests mostly wait (for a Lease to
expire, for an outage to end) while short tests keep the processors busy, so that both overlap until the end.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScheduling

from tests.controlplane import sandbox

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

DURATIONS = Path(__file__).with_name("durations.json")
LONG_SECONDS = 3.0
"""Shorter tests have no entry in the table of durations."""


class MeasuredDurations:
    """A plugin that measures the duration of each test, with its fixtures, and writes the table."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of a setup, a call or a teardown."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the table, but not after a run that failed."""
        if exitstatus == pytest.ExitCode.OK:
            DURATIONS.write_text(json.dumps(select_long(self._seconds), indent=1) + "\n")


class TwoEndedScheduling(LoadScheduling):
    """A scheduler that gives every second worker the first pending tests, and the other workers the last ones."""

    def _send_tests(self, node: WorkerController, num: int) -> None:
        from_the_end = self.nodes.index(node) % 2 == 1
        if from_the_end:
            self.pending.reverse()
        super()._send_tests(node, num)
        if from_the_end:
            self.pending.reverse()


def select_long(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return the tests of the table of durations, with whole seconds, in the order of their names."""
    return {test: round(taken) for test, taken in sorted(seconds.items()) if taken >= LONG_SECONDS}


def sort_longest_first(items: list[pytest.Item], durations: Mapping[str, int]) -> None:
    """Sort tests by their known duration; tests without one come last.

    Among tests of about the same duration (up to twice the other's), those with the controller are neighbours, because
    neighbours share it; in the next shorter ones they come first if they came last here, and the other way round.
    """

    def key(item: pytest.Item) -> tuple[int, bool, int]:
        seconds = durations.get(item.nodeid, 0)
        magnitude = max(seconds, 1).bit_length()
        controlled = "controller" in getattr(item, "fixturenames", ())
        return -magnitude, controlled == (magnitude % 2 == 1), -seconds

    items.sort(key=key)


def worker_spec(argv: Sequence[str]) -> str:
    """Return an execnet spec that starts a worker with the command `argv` as its Python."""
    return f"popen//python={shlex.join(argv)}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options to pytest's."""
    group = parser.getgroup("sandboxes")
    group.addoption("--sandboxes", type=int, metavar="N", help="run the tests in N workers, each in its own sandbox")
    group.addoption("--write-durations", action="store_true", help=f"write {DURATIONS.name} anew from this run")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Start the workers of xdist in sandboxes."""
    if _is_worker(config) or not config.option.sandboxes:
        return
    try:
        sandbox.check()
    except sandbox.SandboxError as error:
        raise pytest.UsageError(str(error)) from None
    python = [sys.executable, "-m", "tests.controlplane.sandbox", "--", sys.executable]
    config.option.tx = [worker_spec(python)] * config.option.sandboxes
    config.option.dist = "load"
    config.option.maxschedchunk = 1
    config.option.maxworkerrestart = "0"  # the death of a sandbox is a failure and ends the run
    if config.option.write_durations:
        config.pluginmanager.register(MeasuredDurations())


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make a worker use /tmp of its sandbox, because the folder that xdist names is outside of the sandbox."""
    if _is_worker(config):
        config.option.basetemp = None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests in each worker, always in the same order."""
    sort_longest_first(items, json.loads(DURATIONS.read_text()))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> TwoEndedScheduling:
    """Choose the scheduler."""
    return TwoEndedScheduling(config, log)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")
