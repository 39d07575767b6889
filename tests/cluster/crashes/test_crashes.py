"""The controller dies before and after each single write of each scenario, and the result is the same as without.

`make crash` tries every write. Otherwise each scenario gets a sample: the queue in `make test`, all others in
`make test-long`.
"""

import asyncio
import secrets
import time
from typing import Final

import pytest

from kube.transport import Request
from tests.cluster.crashes.conftest import MakeWorld
from tests.support.api_faults import EVERYTHING, Fault, Plan
from tests.support.crash_scenarios import SCENARIOS
from tests.support.crash_world import CrashWorld

pytestmark = pytest.mark.long

SAMPLES: Final = 3
"""Crash points of one scenario in a sample; which ones changes from run to run."""
SAMPLE_LIMIT: Final = 4
"""Samples that are tried until a crash happens: a few writes of a scenario are not made in every run."""
WORLDS: Final = 12
"""Worlds at once; they wait more than they work."""
WORLD_SECONDS: Final = 300
"""Limit of one world, whose crash point is named when it hangs."""

Point = tuple[str, Fault]
"""A crash before or after the write of this name."""


def at_write(world: CrashWorld, name: str, fault: Fault) -> Plan:
    """Return a plan with `fault` at the write of this name."""
    seen: dict[str, int] = {}

    def plan(request: Request) -> Fault | None:
        write = world.write_name(request)
        if write is None:
            return None
        seen[write] = seen.get(write, 0) + 1
        return fault if f"{write} #{seen[write]}" == name else None

    return plan


def choose(points: list[Point]) -> list[list[Point]]:
    """Return the samples of crash points to try, one after the other until a crash happens."""
    if EVERYTHING:
        return [points]
    stride = max(1, len(points) // SAMPLES)
    first = secrets.randbelow(stride)
    return [points[(first + number) % stride :: stride] for number in range(min(SAMPLE_LIMIT, stride))]


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_crash_at_any_write_does_not_change_the_result(
    make_world: MakeWorld, scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    async with make_world(None) as undisturbed, undisturbed.running():
        await SCENARIOS[scenario](undisturbed)
    writes = undisturbed.writes()
    points = [(write, fault) for write in writes for fault in (Fault.CRASH_BEFORE, Fault.CRASH_AFTER)]
    slots = asyncio.Semaphore(WORLDS)

    async def crash(write: str, fault: Fault) -> bool:
        try:
            async with slots, asyncio.timeout(WORLD_SECONDS), make_world(undisturbed) as world:
                world.transport.plan = at_write(world, write, fault)
                async with world.running():
                    await SCENARIOS[scenario](world)
                assert world.created == undisturbed.created, "nothing is created twice"
        except BaseException as error:
            error.add_note(f"{scenario}: {fault.name} {write}")
            raise
        return world.crashes > 0

    for sample in choose(points):
        async with asyncio.TaskGroup() as group:
            crashes = [group.create_task(crash(*point)) for point in sample]
        crashed = sum(task.result() for task in crashes)
        if crashed:
            break
    if EVERYTHING:
        with capsys.disabled():
            seconds = time.monotonic() - began
            print(f"{scenario}: {len(writes)} writes, {crashed} crashes at {len(points)} points, {seconds:.0f} s")
        assert crashed >= len(points) / 2, "most of these writes are made in every run"
    assert crashed, "each sample has writes that are made in most runs"
