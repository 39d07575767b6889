"""Engines of a machine without a cluster continue when it joins one: the same process, under another name."""

import errno

import psutil
import pytest
from msgspec import structs

from metal_agent import lifecycle
from metal_agent import process_events as events
from metal_agent.assignments import STANDALONE
from metal_agent.supervise.records import Records
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, engines, ready

ALONE = f"{STANDALONE}1"


async def left_running(machine: Machine, assignment: MakeAssignment) -> int:
    """Start an engine as `pomona up` does, and adopt it by an agent; return its pid."""
    machine.supervisor.assign([assignment(ALONE)])
    pid = await ready(machine, ALONE)
    await machine.stop()
    await machine.start()
    assert machine.runners[ALONE].state.pid == pid
    return pid


async def test_engine_is_handed_over_to_process_of_the_cluster(machine: Machine, assignment: MakeAssignment) -> None:
    pid = await left_running(machine, assignment)
    machine.supervisor.assign(
        [assignment("u1", service_name="talk", memory_bytes=GIB, token_secret="talk-token")], keep_unclaimed=True
    )
    assert list(machine.runners) == ["u1"]
    assert await ready(machine) == pid
    assert machine.ledger.reserved == {"u1": GIB}
    assert [record.uid for record in Records(machine.folder / "processes").load().values()] == ["u1"]
    assert len(engines(machine)) == 1

    # The next agent has only the new name of the engine, and the log moved with it.
    await machine.stop()
    await machine.start()
    assert await ready(machine) == pid
    assert "listening on" in machine.runners["u1"].log_path.read_text()
    machine.supervisor.assign([])
    await eventually(lambda: machine.runners["u1"].state.phase == "Stopped")
    assert engines(machine) == []


async def test_engine_is_handed_over_without_an_api_server_too(machine: Machine, assignment: MakeAssignment) -> None:
    pid = await left_running(machine, assignment)
    machine.supervisor.add([assignment("u1")])
    assert list(machine.runners) == ["u1"]
    assert await ready(machine) == pid
    assert len(engines(machine)) == 1


async def test_engine_with_two_records_is_adopted_once(machine: Machine, assignment: MakeAssignment) -> None:
    pid = await left_running(machine, assignment)
    records = Records(machine.folder / "processes")
    await machine.stop()
    records.write(structs.replace(records.load()[ALONE], uid="u1", name="chat-u1"))
    await machine.start()
    assert {uid: runner.state.pid for uid, runner in machine.runners.items()} == {"u1": pid}
    assert list(records.load()) == ["u1"]


async def test_unclaimed_engine_stays_for_a_while_only(machine: Machine, assignment: MakeAssignment) -> None:
    pid = await left_running(machine, assignment)
    machine.supervisor.assign([assignment("u1", parallel=2)], keep_unclaimed=True)
    other = await ready(machine)
    assert other != pid
    assert machine.runners[ALONE].state.phase == "Ready"
    machine.supervisor.assign([assignment("u1", parallel=2)])
    await eventually(lambda: machine.runners[ALONE].state.phase == "Stopped")
    assert [process.pid for process in engines(machine)] == [other]
    assert (ALONE, True) not in machine.exposure.calls


async def test_unclaimed_engine_is_stopped_before_a_process_in_its_memory_starts(
    machine: Machine, assignment: MakeAssignment
) -> None:
    await left_running(machine, assignment)
    machine.ledger.budget_bytes = GIB
    wanted = [assignment("u1", parallel=2, memory_bytes=GIB)]
    machine.supervisor.assign(wanted, keep_unclaimed=True)
    assert "u1" not in machine.runners
    await eventually(lambda: machine.runners[ALONE].state.phase == "Stopped")
    machine.supervisor.assign(wanted, keep_unclaimed=True)
    await ready(machine)
    assert list(machine.runners) == ["u1"]


async def test_engine_whose_record_cannot_be_written_is_not_handed_over(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left_running(machine, assignment)

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(machine.host.records, "write", full)
    before = psutil.Process().num_fds()
    for _ in range(3):
        assert not machine.supervisor._hand_over_engine(ALONE, assignment("u1"))
    # Nobody watches it twice; other tasks and threads open and close files meanwhile.
    await eventually(lambda: psutil.Process().num_fds() <= before)
    assert machine.runners[ALONE].state.phase == "Ready"


async def test_ending_engine_is_not_claimed(machine: Machine, assignment: MakeAssignment) -> None:
    await left_running(machine, assignment)
    runner = machine.runners[ALONE]
    assert machine.supervisor.unclaimed().keys() == {ALONE}
    for event in (events.Evicted("MemoryPressure", "short"), events.Hung("it hangs")):
        ready = runner.state
        runner.state, actions = lifecycle.step(ready, event, 0)
        assert any(isinstance(action, lifecycle.End) for action in actions)
        assert machine.supervisor.unclaimed() == {}
        runner.state = ready
