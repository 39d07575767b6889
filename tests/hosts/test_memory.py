"""Memory of one host, with real engines: its reservation, waiting for it, and the order of loading."""

import re

from crds.metalprocess import MetalProcessSpec
from fitness.memory import Workload, estimate
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, phase


async def test_rejected_process_starts_when_memory_is_freed(machine: Machine, assignment: MakeAssignment) -> None:
    machine.ledger.budget_bytes = 3 * GIB
    machine.supervisor.assign([assignment("u1", memory_bytes=2 * GIB)])
    await phase(machine, "Ready")
    lower = assignment("u2", memory_bytes=2 * GIB, priority="low")
    higher = assignment("u3", memory_bytes=2 * GIB, priority="high")
    machine.supervisor.add([lower, higher])
    for uid in ("u2", "u3"):
        message = await phase(machine, "Rejected", "InsufficientMemory", uid)
        assert "it needs 2.0 GiB, 1.0 GiB more than the 1.0 GiB that are free" in message
        assert re.search(r"header \d+\.\d MiB are enough: lower spec.memoryBytes of Model \w+, or free", message)
    machine.supervisor.assign([lower, higher])
    await phase(machine, "Ready", uid="u3")
    assert machine.runners["u2"].state.phase == "Rejected"
    machine.ledger.observe_others(3 * GIB)
    machine.supervisor.assign([lower])
    await phase(machine, "Stopped", uid="u3")
    assert machine.runners["u2"].state.phase == "Rejected"
    machine.ledger.observe_others(0)
    await phase(machine, "Ready", uid="u2")


async def test_refusal_names_the_context_that_would_fit(machine: Machine, assignment: MakeAssignment) -> None:
    wanted = assignment(context_length=131_072, memory_bytes=2 * GIB)
    layout = await machine.host.weights.read_layout(wanted.spec.artifact)
    needed = estimate(Workload(layout), wanted.spec)
    assert needed
    machine.ledger.budget_bytes = needed.total_bytes - 1
    made = assignment(context_length=131_072, memory_bytes=needed.total_bytes)
    machine.supervisor.assign([made])
    assert "a contextLength of 130816 would fit" in await phase(machine, "Rejected", "InsufficientMemory")


async def test_one_engine_loads_at_a_time_by_priority(machine: Machine, assignment: MakeAssignment) -> None:
    machine.host.loads.occupy("another")
    priorities = {"u1": "low", "u2": "critical", "u3": "normal"}
    machine.supervisor.assign([assignment(uid, priority=priority) for uid, priority in priorities.items()])
    for uid in priorities:
        await phase(machine, "Pending", "WaitsToLoad", uid)
    del machine.changes[:]
    machine.host.loads.release("another")
    for uid in priorities:
        await phase(machine, "Ready", uid=uid)
    order = [(uid, change) for uid, change in machine.changes if change in {"Starting", "Ready"}]
    deduplicated = list(dict.fromkeys(order))
    assert deduplicated == [(uid, each) for uid in ("u2", "u3", "u1") for each in ("Starting", "Ready")]


async def test_engine_that_crashes_while_it_loads_passes_slot_on(machine: Machine, assignment: MakeAssignment) -> None:
    broken = assignment("u1", extra_args=["--seed", "none"])
    machine.supervisor.assign([broken, assignment("u2"), assignment("u3", extra_args=["--seed", "none"])])
    await eventually(lambda: all(machine.runners[uid].state.failures > 1 for uid in ("u1", "u3")))
    await phase(machine, "Ready", uid="u2")


async def test_measured_peak_is_reserved_by_the_next_agent_too(machine: Machine, assignment: MakeAssignment) -> None:
    made = assignment()
    machine.supervisor.assign([made])
    await phase(machine, "Ready")
    await machine.usage.measure()
    seen = _peak(machine, made.spec)
    assert seen > 10 * 2**20
    # As if more than the estimate had been measured.
    machine.host.peaks.observe({"earlier": (made.spec, GIB)})
    machine.ledger.reserved["u1"] = GIB
    await machine.stop()
    await machine.start()
    assert machine.ledger.reserved == {"u1": GIB}
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    machine.supervisor.assign([])
    machine.ledger.budget_bytes = GIB - 1
    machine.supervisor.assign([made])
    message = await phase(machine, "Rejected", "InsufficientMemory")
    assert "it needs 1.0 GiB" in message
    assert "which is the peak measured here before" in message


def _peak(machine: Machine, spec: MetalProcessSpec) -> int:
    (runs,) = machine.host.peaks._runs.values()
    assert machine.host.peaks.needed_bytes(spec) == spec.memory_bytes
    return runs[-1].bytes


async def test_running_engine_is_counted_beyond_a_smaller_budget(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    await phase(machine, "Ready")
    machine.ledger.budget_bytes = GIB // 4
    await machine.stop()
    await machine.start()
    assert (machine.runners["u1"].state.phase, machine.ledger.available_bytes) == ("Ready", 0)
