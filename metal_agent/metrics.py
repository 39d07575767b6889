"""The agent's own metrics, for a Prometheus on this machine; what the proxy counts of each service comes with them.

They are told on loopback unless the owner says otherwise: names of models are nobody's business. That nobody can listen
there is no reason not to serve.
"""

import asyncio
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, get_args

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Enum as EnumMetric

from devices.pressure import Level
from metal_agent.ledger import Ledger
from metal_agent.lifecycle import Phase
from metal_agent.pressure import Action
from metal_agent.runner import Runner
from metal_agent.watchdog import Watchdog

_UNKNOWN: Final = "unknown"

log = structlog.get_logger()


class Metrics:
    """What one agent counts of its host, read when somebody asks."""

    def __init__(self, ledger: Ledger, runners: Mapping[str, Runner], watchdog: Watchdog) -> None:
        self._registry = registry = CollectorRegistry()
        self._runners = runners
        self._watchdog = watchdog
        self._level = EnumMetric(
            "pomona_agent_memory_pressure",
            "How short of memory the system says that it is.",
            states=[*get_args(Level), _UNKNOWN],
            registry=registry,
        )
        self._steps = Counter(
            "pomona_agent_pressure_steps",
            "What was done about memory pressure: hold, ask, keep, evict, release, return.",
            ["step"],
            registry=registry,
        )
        for step in get_args(Action):
            self._steps.labels(step.__name__.lower())
        self._phases = Gauge("pomona_agent_processes", "Processes on this host.", ["phase"], registry=registry)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"pomona_agent_{name}", text, registry=registry).set_function(value)

        gauge("under_pressure", "1 while nothing is started.", lambda: watchdog.state.pressed)
        gauge("evicted_processes", "Processes that wait for memory again.", lambda: len(watchdog.state.evicted))
        gauge("memory_budget_bytes", "Memory that models may use in all.", lambda: ledger.budget_bytes)
        gauge("memory_reserved_bytes", "Memory that is promised.", lambda: sum(ledger.reserved.values()))
        gauge("memory_others_bytes", "Memory of the budget that other programs use.", lambda: ledger.others_bytes)

    def count(self, step: Action) -> None:
        """Count a step that was taken."""
        self._steps.labels(type(step).__name__.lower()).inc()

    def text(self) -> bytes:
        """All of them, in Prometheus' text form."""
        self._level.state(self._watchdog.level or _UNKNOWN)
        phases = Tally(runner.state.phase for runner in self._runners.values())
        for phase in get_args(Phase):
            self._phases.labels(phase).set(phases[phase])
        return generate_latest(self._registry)


async def serve(place: tuple[str, int], text: Callable[[], Awaitable[bytes]]) -> None:
    """Answer GET /metrics at `place`, an address and a port, until cancelled; returns where that cannot be had."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=await text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.router.add_get("/metrics", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, *place).start()
        log.info("metrics", address=place[0], port=place[1])
        await asyncio.Event().wait()
    except OSError as error:
        log.warning("no metrics: give --metrics-address another address and port", error=str(error))
    finally:
        await runner.cleanup()
