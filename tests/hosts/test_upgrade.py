"""A new version of the agent on the state of an old one: `state-2026-11` is what agents of that month have written."""

import json
from pathlib import Path

import msgspec

from metal_agent import assignments, engine, spawn
from metal_agent.assignments import Memory
from metal_agent.ports import Ports
from metal_agent.records import Record
from tests.eventually import eventually
from tests.machine import Machine, engines, phase, ready

STATE = Path(__file__).parent / "state-2026-11"


async def test_an_engine_that_an_older_agent_started_is_taken_over_as_it_runs(machine: Machine, model: Path) -> None:
    await machine.stop()
    record = json.loads((STATE / "record.json").read_text())
    record["spec"]["artifact"]["source"] = f"file://{model}"
    spec = msgspec.convert(record, Record).spec
    running = spawn.spawn(
        engine.argv(spec, model), engine.environment(spec), machine.folder / "logs" / "it.log", machine.folder
    )
    record["url"] = await eventually(running.url)
    record["identity"] = msgspec.to_builtins(running.identity)
    running.release()
    (machine.folder / "processes").mkdir(exist_ok=True)
    (machine.folder / "processes" / "u1.json").write_text(json.dumps(record))

    await machine.start()
    assert await ready(machine) == running.pid
    assert machine.runners["u1"].status(18000).restarts == 2
    assert machine.ledger.reserved == {"u1": 562000000}
    (known,) = Memory(STATE / "assignments.json").load().processes
    machine.supervisor.assign([assignments.read(known)])
    assert {change for _, change in machine.changes} <= {"Ready"}, "nothing about it changed"
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    assert engines(machine) == []


def test_what_an_older_agent_knew_is_known() -> None:
    known = Memory(STATE / "assignments.json").load()
    assert known.secret == {"team-a_chat-token_token": "dG9rZW4="}
    found = [assignments.read(each) for each in known.processes]
    assert [(each.uid, each.problem, each.service) for each in found] == [("u1", "", ("team-a", "chat"))]
    assert Ports(STATE / "ports.json", 18000, 18999).get("team-a/chat") == 18000
