"""The agent's metrics as Prometheus reads them."""

import asyncio
import socket

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from metal_agent import metrics
from metal_agent.metrics import Metrics
from metal_agent.pressure import Evict
from tests.eventually import eventually
from tests.machine import Machine, MakeAssignment, phase
from tests.serving import GIB


def values(text: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(text.decode())
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


async def test_metrics_tell_of_the_moment_they_are_asked(machine: Machine, assignment: MakeAssignment) -> None:
    told = Metrics(machine.ledger, machine.runners, machine.watchdog)
    machine.watchdog.level = None
    before = values(told.text())
    assert before["pomona_agent_memory_pressure unknown"] == 1
    assert before["pomona_agent_memory_pressure normal"] == 0, "unknown is no level"
    assert before["pomona_agent_pressure_steps_total evict"] == 0
    machine.supervisor.assign([assignment(runtime="quantum")])
    await phase(machine, "Rejected", "Unsupported")
    machine.ledger.take_over("other", GIB)
    told.count(Evict("u1"))
    after = values(told.text())
    assert after["pomona_agent_processes Rejected"] == 1
    assert after["pomona_agent_processes Ready"] == 0
    assert after["pomona_agent_memory_reserved_bytes"] == GIB
    assert after["pomona_agent_memory_budget_bytes"] == machine.ledger.budget_bytes
    assert after["pomona_agent_pressure_steps_total evict"] == 1


async def text() -> bytes:
    return b"pomona_agent_up 1.0\n"


async def test_metrics_are_told_where_the_owner_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = free.getsockname()
    serving = asyncio.create_task(metrics.serve(place, text))

    async def told() -> bool:
        try:
            async with aiohttp.request("GET", f"http://127.0.0.1:{place[1]}/metrics") as response:
                return await response.read() == await text()
        except aiohttp.ClientError:
            return False

    await eventually(told)
    serving.cancel()
    await asyncio.wait([serving])


async def test_a_port_that_is_taken_ends_no_agent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        await metrics.serve(taken.getsockname(), text)
