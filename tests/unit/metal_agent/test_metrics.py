"""The agent's metrics as Prometheus reads them."""

import asyncio
import re
import socket

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from gateway.proxy.load_balancer import InFlight
from gateway.proxy.metrics import render_metrics
from gateway.proxy.service import Service
from metal_agent import metrics_listener
from metal_agent.holds.hold_gate import HOLD_SOURCES
from metal_agent.metrics import AgentMetrics
from metal_agent.traffic.service_rates import ServiceRates
from tests.controlplane.process import CHECKOUT
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, phase
from tests.unit.gateway.proxy.running_proxy import make_service
from tests.unit.metal_agent.traffic.test_service_rates import proxy_state

DOCUMENT = CHECKOUT / "docs" / "metrics.md"


def values(text: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(text.decode())
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


async def test_metrics_are_read_at_each_request(machine: Machine, assignment: MakeAssignment) -> None:
    rates = ServiceRates()
    told = AgentMetrics(
        *(machine.ledger, machine.runners, machine.watchdog, machine.gate, rates),
        host="studio-1",
        prefix="flexinfer",
    )
    machine.watchdog.level = None
    before = values(told.text())
    assert before["pomona_agent_memory_pressure unknown"] == 1
    assert before["pomona_agent_memory_pressure normal"] == 0, "unknown is no level"
    for label in ("hold", "displace", "cancel", "evict", "release", "return"):
        assert before[f"pomona_agent_pressure_steps_total {label}"] == 0
    machine.supervisor.assign([assignment(runtime="quantum")])
    await phase(machine, "Rejected", "Unsupported")
    machine.ledger.take_over("other", GIB)
    machine.watchdog.action_counts["evict"] += 1
    after = values(told.text())
    assert after["pomona_agent_processes Rejected"] == 1
    assert after["pomona_agent_processes Ready"] == 0
    assert after["pomona_agent_memory_reserved_bytes"] == GIB
    assert after["pomona_agent_memory_budget_bytes"] == machine.ledger.budget_bytes
    assert after["pomona_agent_pressure_steps_total evict"] == 1
    assert "flexinfer_tokens_per_second" not in {name.partition(" ")[0] for name in after}, "unknown is not 0"
    (runner,) = machine.runners.values()
    spec, service = runner.assignment.spec, runner.assignment.service
    now = asyncio.get_running_loop().time()
    for seconds in (0, 10):
        rates.note_state(proxy_state(**{str(service): 75 * seconds // 10}), now - 10 + seconds)
    shown = values(told.text())
    assert shown[f"flexinfer_tokens_per_second quantum {spec.model_name} {service.namespace} studio-1"] == 7.5
    assert values(told.text()) == shown, "each request adds up anew"
    assert {source: after[f"pomona_agent_hold {source}"] for source in HOLD_SOURCES} == dict.fromkeys(HOLD_SOURCES, 0)


async def test_engine_has_series_of_its_memory_and_processor_time(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    runners = dict(machine.runners)
    told = AgentMetrics(machine.ledger, runners, machine.watchdog, machine.gate, ServiceRates(), host="studio-1")
    (runner,) = runners.values()
    namespace, service = runner.assignment.service
    engine = f"{namespace} studio-1 {runner.assignment.name} {service}"

    async def is_measured() -> bool:
        shown = values(await told.render())
        assert shown[f"pomona_agent_process_memory_bytes {engine}"] > 0
        assert shown[f"pomona_agent_process_cpu_seconds_total {engine}"] > 0
        return True

    await eventually(is_measured)
    runners.clear()
    assert not [name for name in values(await told.render()) if "_process_" in name], "they go with the engine"


async def test_documented_metrics_are_those_that_are_served(machine: Machine) -> None:
    agent = AgentMetrics(
        *(machine.ledger, machine.runners, machine.watchdog, machine.gate, ServiceRates()), host="studio-1"
    )
    service = Service(make_service(name="team/chat"), InFlight(lambda _: None))
    service.metrics.requests["completions", 500] += 1
    service.metrics.errors["engine_error"] += 1
    service.metrics.key_requests["phone"] += 1
    served = {}
    for family in text_string_to_metric_families((agent.text() + render_metrics({"team/chat": service})).decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if not name.endswith("_created"):
            served[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    # Without an engine, and without traffic, they have no series.
    of_process = {"namespace", "service", "process", "node"}
    served["pomona_agent_process_memory_bytes"] = served["pomona_agent_process_cpu_seconds_total"] = of_process
    served["pomona_tokens_per_second"] = {"namespace", "model", "backend", "node"}
    section = DOCUMENT.read_text().partition("## Metrics of hosts and proxies\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    assert {row[1].strip(" `"): set(re.findall(r"`(\w+)`", row[3])) for row in rows} == served


async def text() -> bytes:
    return b"pomona_agent_up 1.0\n"


async def test_metrics_are_served_at_the_given_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = free.getsockname()
    serving = asyncio.create_task(metrics_listener.serve_metrics(place, text))

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
        await metrics_listener.serve_metrics(taken.getsockname(), text)
