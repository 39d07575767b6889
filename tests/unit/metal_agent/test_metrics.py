"""The agent's metrics as Prometheus reads them."""

import asyncio
import socket

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from metal_agent import metrics
from metal_agent.holds.hold_gate import HOLD_SOURCES
from metal_agent.memory.pressure_policy import Evict
from metal_agent.metrics import AgentMetrics
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, phase


def values(text: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(text.decode())
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


async def test_metrics_are_read_at_each_request(machine: Machine, assignment: MakeAssignment) -> None:
    told = AgentMetrics(machine.ledger, machine.runners, machine.watchdog, machine.gate)
    machine.watchdog.level = None
    before = values(told.text())
    assert before["pomona_agent_memory_pressure unknown"] == 1
    assert before["pomona_agent_memory_pressure normal"] == 0, "unknown is no level"
    for label in ("hold", "ask", "keep", "evict", "release", "return"):
        assert before[f"pomona_agent_pressure_steps_total {label}"] == 0
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
    assert {source: after[f"pomona_agent_hold {source}"] for source in HOLD_SOURCES} == dict.fromkeys(HOLD_SOURCES, 0)


async def text() -> bytes:
    return b"pomona_agent_up 1.0\n"


async def test_metrics_are_served_at_the_given_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = free.getsockname()
    serving = asyncio.create_task(metrics.serve_metrics(place, text))

    async def told() -> bool:
        try:
            async with aiohttp.request("GET", f"http://127.0.0.1:{place[1]}/metrics") as response:
                return await response.read() == await text()
        except aiohttp.ClientError:
            return False

    await eventually(told)
    serving.cancel()
    await asyncio.wait([serving])


async def test_port_in_use_does_not_end_the_agent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        await metrics.serve_metrics(taken.getsockname(), text)
