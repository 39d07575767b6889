"""The supervisor with llama.cpp's real server: to Ready, through crashes and agent restarts, to Stopped."""

import asyncio
import json
import os
import signal
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
from msgspec.structs import replace

from crds.meta import PRIORITY_RANK
from crds.metalprocess import Artifact, MetalProcessStatus
from metal_agent.assignments import UNREADABLE, Assignment
from metal_agent.native.process import identify_process, spawn_process
from metal_agent.process_events import Released
from metal_agent.supervise import runner
from metal_agent.supervise.records import Records
from metal_agent.supervise.runner import Runner
from runtimes.probe import generate_token
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, engines, phase, ready


async def test_assignment_is_served_until_it_is_removed(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    runner = machine.runners["u1"]
    assert runner.url
    async with aiohttp.ClientSession() as session:
        assert (await generate_token(session, runner.url, model="chat", token=runner.api_key, timeout_seconds=60)).ok
    status = runner.build_status(18000)
    assert (status.phase, status.pid, status.port) == ("Ready", pid, 18000)
    assert status.ready_at
    assert machine.ledger.reserved.keys() == {"u1"}

    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    assert machine.exposure.calls == [("withdraw", True), ("drain", True)]
    assert engines(machine) == []
    assert machine.ledger.reserved == {}
    assert Records(machine.folder / "processes").load() == {}


async def test_edit_of_what_is_mutable_is_followed_by_a_running_engine_and_by_the_next_agent(
    machine: Machine, assignment: MakeAssignment
) -> None:
    machine.supervisor.assign([assignment(drain_seconds=30)])
    pid = await ready(machine)
    edited = assignment(priority="high", protected=True, drain_seconds=900)
    machine.supervisor.assign([edited])
    assert machine.runners["u1"].assignment == edited
    assert machine.runners["u1"].priority_rank == PRIORITY_RANK["high"]
    await machine.stop()
    await machine.start()
    assert await ready(machine) == pid
    assert machine.runners["u1"].assignment.spec == edited.spec
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    assert machine.exposure.drain_seconds == [900]


async def test_crash_is_reported_and_the_engine_comes_back(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    os.kill(pid, signal.SIGKILL)
    assert "SIGKILL" in await phase(machine, "Failed", "EngineExited")
    again = await ready(machine)
    status = machine.runners["u1"].build_status(None)
    assert again != pid
    assert status.restarts == 1
    assert status.last_exit
    assert status.last_exit.signal == "SIGKILL"
    assert "listening on" in status.last_exit.log


async def test_engine_that_refuses_arguments_is_reported_with_log(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment(extra_args=["--flash-attn", "perhaps"])])
    assert "exit code 1" in await phase(machine, "Failed", "EngineExited")
    last = machine.runners["u1"].state.last_exit
    assert last
    assert "unknown value 'perhaps'" in last.log


async def test_crash_loop_backs_off_and_reports_last_log_lines(machine: Machine, assignment: MakeAssignment) -> None:
    failed = list[tuple[MetalProcessStatus, list[psutil.Process]]]()

    def note_failure(runner: Runner) -> None:
        if runner.state.phase == "Failed":
            failed.append((runner.build_status(None), engines(machine)))

    machine.on_change = note_failure
    machine.supervisor.assign([assignment(extra_args=["--flash-attn", "perhaps"])])
    await eventually(lambda: len(failed) >= 3)
    for failures, seconds in ((1, 1), (2, 2), (3, 4)):
        status, running = failed[failures - 1]
        assert (status.reason, status.restarts or 0) == ("EngineExited", failures - 1)
        assert f"next try in {seconds} s" in status.message
        assert status.last_exit
        assert "unknown value 'perhaps'" in status.last_exit.log
        assert running == []


async def test_next_agent_adopts_a_running_engine(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    await machine.stop()
    assert psutil.pid_exists(pid), "an agent that ends stops nothing"

    await machine.start()
    assert await ready(machine) == pid
    assert machine.ledger.reserved.keys() == {"u1"}
    machine.supervisor.assign([assignment()])
    assert {change for change in machine.changes if change[1] != "Ready"} == set(), "it never stopped being Ready"
    assert len(engines(machine)) == 1

    os.kill(pid, signal.SIGKILL)
    await phase(machine, "Failed", "EngineExited")
    assert await ready(machine) != pid


async def test_process_removed_without_an_agent_is_stopped(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    await ready(machine)
    await machine.stop()
    await machine.start()
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    assert machine.exposure.calls == [("withdraw", True), ("drain", True)]
    assert engines(machine) == []


@pytest.mark.parametrize("damage", ["half a record", None])
async def test_engine_without_a_good_record_is_killed_before_another_starts(
    machine: Machine, assignment: MakeAssignment, damage: str | None
) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    await machine.stop()
    record = machine.folder / "processes" / "u1.json"
    record.write_text(damage) if damage else record.unlink()
    await machine.start()
    machine.supervisor.assign([assignment()])
    assert await ready(machine) != pid
    assert len(engines(machine)) == 1


async def test_record_whose_pid_is_another_process_now_is_removed(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    await ready(machine)
    await machine.stop()
    records = Records(machine.folder / "processes")
    record = records.load()["u1"]
    bystander = spawn_process(["sleep", "60"], {}, machine.folder / "bystander.log", machine.file_root)
    assert record.identity
    identity = msgspec.structs.replace(record.identity, pid=bystander.pid)
    records.write(msgspec.structs.replace(record, identity=identity))
    await machine.start()
    assert machine.runners == {}
    assert identify_process(bystander.pid), "nobody kills a process for its number"
    await bystander.end(grace_seconds=5)


async def test_process_missing_in_outdated_list_is_served_again(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    before = await ready(machine)
    machine.supervisor.assign([])
    machine.supervisor.assign([assignment()])
    await phase(machine, "Stopped")
    machine.supervisor.assign([assignment()])
    assert await ready(machine) != before
    # A deleted process stays stopped until its object is gone from the API.
    gone = replace(assignment(), deleted=True)
    machine.supervisor.assign([gone])
    await phase(machine, "Stopped")
    machine.supervisor.assign([gone])
    assert machine.runners["u1"].state.phase == "Stopped"


async def test_a_deletion_while_the_engine_starts_ends_it(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    await eventually(lambda: machine.runners["u1"].state.pid)
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    assert engines(machine) == []


async def test_process_deleted_before_it_ran_is_stopped_at_once(machine: Machine, assignment: MakeAssignment) -> None:
    deleted = assignment()
    machine.supervisor.assign([Assignment(deleted.uid, deleted.namespace, deleted.name, deleted.spec, deleted=True)])
    await phase(machine, "Stopped")
    machine.supervisor.assign([])
    assert machine.runners == {}


async def test_two_processes_that_do_not_fit_are_not_both_started(machine: Machine, assignment: MakeAssignment) -> None:
    machine.ledger.budget_bytes = 3 * GIB
    machine.supervisor.assign([assignment("u1", memory_bytes=2 * GIB), assignment("u2", memory_bytes=2 * GIB)])
    await eventually(lambda: {runner.state.phase for runner in machine.runners.values()} == {"Ready", "Rejected"})
    (first,) = machine.ledger.reserved  # the process that was checked first
    assert machine.runners[first].state.phase == "Ready"
    (second,) = machine.runners.keys() - {first}
    message = await phase(machine, "Rejected", "InsufficientMemory", second)
    assert "it needs 2.0 GiB, 1.0 GiB more than the 1.0 GiB that are free of this host's budget of 3.0 GiB" in message
    machine.supervisor.assign([machine.runners[second].assignment])
    assert await phase(machine, "Ready", uid=second) == ""


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        (
            {"runtime": "quantum"},
            "Unsupported",
            "spec.runtime 'quantum' is not installed on this host, which has llama.cpp",
        ),
        ({"memory_bytes": 1}, "MemoryUnderstated", "raise spec.memoryBytes of Model tiny"),
        ({"artifact": Artifact(source="file:///etc/hostname")}, "FileNotAllowed", "--file-root"),
        ({"context_length": 2_000_000}, "MemoryUnderstated", "serving it takes"),
    ],
)
async def test_process_that_this_host_cannot_run_is_rejected(
    machine: Machine, assignment: MakeAssignment, changes: dict[str, object], reason: str, message: str
) -> None:
    machine.supervisor.assign([assignment(**changes)])
    assert message in await phase(machine, "Rejected", reason)
    assert machine.ledger.reserved == {}


async def test_process_of_a_missing_file_is_rejected(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment(artifact=Artifact(source=f"file://{machine.file_root}/none.gguf"))])
    assert "none.gguf" in await phase(machine, "Rejected", "FileNotFound")


async def test_engine_that_cannot_be_started_harms_no_other(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment("u1", extra_args=["--temp", "1\0"]), assignment("u2")])
    assert "cannot be started" in await phase(machine, "Failed", "SpawnFailed")
    await ready(machine, "u2")


async def test_a_defect_in_one_runner_ends_no_other(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = asyncio.Event()

    async def crash(_: Runner) -> None:
        crashed.set()
        raise RuntimeError("a defect")

    with monkeypatch.context() as defective:
        defective.setattr(Runner, "run", crash)
        machine.supervisor.add([assignment("u1")])
        await crashed.wait()
    machine.supervisor.add([assignment("u2")])
    await ready(machine, "u2")


@pytest.mark.parametrize("removed", [False, True])
async def test_the_engine_of_a_runner_that_crashed_is_not_forgotten(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    def crash(*_: object) -> object:
        raise RuntimeError("a defect")

    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    crashed = machine.runners["u1"]
    with monkeypatch.context() as defective:
        defective.setattr(runner, "step", crash)
        crashed.notify(Released())
        assert "internal error of the agent" in await phase(machine, "Ready", "InternalError")
    if removed:
        machine.supervisor.assign([])
    await eventually(lambda: machine.runners["u1"] is not crashed)
    if removed:
        await phase(machine, "Stopped")
        assert engines(machine) == []
    else:
        assert await ready(machine) == pid
        assert machine.runners["u1"].state.reason == ""
        os.kill(pid, signal.SIGKILL)
        await phase(machine, "Failed", "EngineExited")


async def test_record_that_could_not_be_written_is_written_later(machine: Machine, assignment: MakeAssignment) -> None:
    records = machine.folder / "processes"
    records.parent.mkdir(exist_ok=True)
    records.touch()
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    records.unlink()
    machine.runners["u1"].write_record()
    await machine.stop()
    await machine.start()
    assert await ready(machine) == pid


async def test_a_record_that_cannot_be_deleted_ends_no_agent(machine: Machine, assignment: MakeAssignment) -> None:
    records = machine.folder / "processes"
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    (records / "u1.json").unlink()
    (records / "u1.json").mkdir()
    os.kill(pid, signal.SIGKILL)
    await phase(machine, "Failed", "EngineExited")
    assert await ready(machine) != pid


async def test_an_unreadable_assignment_is_rejected(machine: Machine) -> None:
    machine.supervisor.assign([Assignment("u1", "team-a", "chat-1", UNREADABLE, problem="update the agent")])
    assert await phase(machine, "Rejected", "Unsupported") == "update the agent"


async def test_wrong_weights_are_never_served(machine: Machine, assignment: MakeAssignment, model: Path) -> None:
    machine.supervisor.assign([assignment(artifact=Artifact(source=f"file://{model}", sha256="0" * 64))])
    assert "next try in 300 s" in await phase(machine, "Failed", "ChecksumMismatch")
    assert engines(machine) == []


async def test_download_token_that_has_not_arrived_is_waited_for(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment(source_secret="hub")])
    assert "Secret hub" in await phase(machine, "Failed", "SecretUnknown")
    machine.secrets["team-a", "hub"] = "token"
    await ready(machine)


async def test_engine_with_a_value_of_a_newer_version_serves_on(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    await machine.stop()
    path = machine.folder / "processes" / "u1.json"
    record = json.loads(path.read_text())
    record["spec"]["priority"] = "imperial"
    path.write_text(json.dumps(record))
    await machine.start()
    machine.supervisor.assign([replace(assignment(), spec=UNREADABLE, problem="priority 'imperial' is unknown")])
    runner = machine.runners["u1"]
    assert (runner.state.phase, runner.state.pid, runner.model or "chat") == ("Ready", pid, "chat")
    assert json.loads(path.read_text())["spec"]["priority"] == "imperial"
    os.kill(pid, signal.SIGKILL)
    assert "cannot read priority" in await phase(machine, "Failed", "Unsupported")


@pytest.mark.parametrize("damage", ["cut off", "no process has its pid", "of no known engine", "under another path"])
async def test_engine_of_a_damaged_record_is_found_and_its_memory_freed(
    machine: Machine, assignment: MakeAssignment, tmp_path: Path, damage: str
) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    await machine.stop()
    path = machine.folder / "processes" / "u1.json"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    if damage == "no process has its pid":
        path.write_bytes(content.replace(f'"pid":{pid}'.encode(), b'"pid":99999999999'))
    if damage == "of no known engine":
        path.write_bytes(content.replace(b'"runtime":"llama.cpp"', b'"runtime":"warp-drive"'))
    if damage == "under another path":
        other = tmp_path / "other-path"
        other.symlink_to(machine.folder)
        machine.folder = other
    await machine.start()
    assert identify_process(pid) is None, "it has no record, so nothing would ever end it"
    assert not path.exists()
    assert not machine.ledger.reserved
    machine.supervisor.assign([assignment()])
    assert await ready(machine) != pid
