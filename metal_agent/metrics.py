"""The agent's own metrics for Prometheus, served together with the proxy's metrics of each service.

Only the first request imports this module: an agent whose metrics nobody reads saves the memory of Prometheus' library.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crds.meta import METRIC_PREFIX
from devices.footprint import cpu_seconds, footprint_bytes
from devices.pressure import PressureLevel
from metal_agent.holds.hold_gate import HOLD_SOURCES, HoldGate
from metal_agent.lifecycle import Phase
from metal_agent.memory.ledger import Ledger
from metal_agent.memory.pressure_policy import PRESSURE_STEPS
from metal_agent.memory.pressure_watchdog import PressureWatchdog
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.service_rates import ServiceRates

_UNKNOWN: Final = "unknown"
_ENGINE_LABELS: Final = ("namespace", "service", "process", "node")
_Labels = tuple[str, ...]


class AgentMetrics(Collector):
    """The metrics of one agent, read at each request.

    Args:
        ledger: the memory of the host.
        runners: its processes by uid.
        watchdog: watches the memory pressure.
        gate: the reasons for which no engine starts.
        rates: the traffic of its services.
        host: name of the host, the label `node`.
        prefix: prefix of metric names that are shared with another project.
    """

    def __init__(
        self,
        ledger: Ledger,
        runners: Mapping[str, Runner],
        watchdog: PressureWatchdog,
        gate: HoldGate,
        rates: ServiceRates,
        *,
        host: str,
        prefix: str = METRIC_PREFIX,
    ) -> None:
        """Note where the numbers are; what engines use is measured by `render`."""
        self._ledger, self._runners, self._watchdog = ledger, runners, watchdog
        self._gate, self._rates = gate, rates
        self._host, self._prefix = host, prefix

        # What `render` measured last, by the labels of the engine.
        self._memory: dict[_Labels, float | None] = {}
        """Memory of each engine, in bytes; None if unknown."""
        self._processor: dict[_Labels, float | None] = {}
        """Processor time of each engine, in seconds; None if unknown."""

    async def render(self) -> bytes:
        """Measure what each engine uses now, and return all metrics in Prometheus' text format."""
        # By the labels of its series, the pid of each engine with a process of its own.
        engines: dict[_Labels, int] = {
            (*runner.assignment.service, runner.assignment.name, self._host): runner.state.pid
            for runner in self._runners.values()
            if runner.state.pid is not None
        }
        # The system is asked about each process of an engine, which takes a moment.
        await asyncio.to_thread(self._measure_engines, engines)
        return self.text()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format; those of engines as they were read last."""
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """Return the families of all metrics; an engine that has ended takes its series with it.

        A state with names, such as the pressure level or the phase, is one series for each name: 1 for the present one.
        """
        ledger, pressure = self._ledger, self._watchdog.state
        level = self._watchdog.level or _UNKNOWN
        holding = {hold.source for hold in self._gate.list_holds()}
        phases = Counter(runner.state.phase for runner in self._runners.values())

        # _gauge: the name, the help text, and the values by their labels; then the names of these labels.
        levels = [((name,), name == level) for name in (*get_args(PressureLevel), _UNKNOWN)]
        level_name = "pomona_agent_memory_pressure"
        yield _gauge(level_name, "Memory pressure level that the operating system reports.", levels, level_name)
        sources = [((source,), source in holding) for source in HOLD_SOURCES]
        yield _gauge("pomona_agent_hold", "1 while this source lets no engine start.", sources, "source")
        counts = [((phase,), phases[phase]) for phase in get_args(Phase)]
        yield _gauge("pomona_agent_processes", "Processes on this host.", counts, "phase")

        for name, text, value in (
            ("under_pressure", "1 while no engine is started for lack of memory.", pressure.is_under_pressure),
            ("evicted_processes", "Processes that wait for memory again.", len(pressure.evicted)),
            ("memory_budget_bytes", "Memory that models may use in all.", ledger.budget_bytes),
            ("memory_reserved_bytes", "Memory that is reserved for processes.", sum(ledger.reserved.values())),
            ("memory_others_bytes", "Memory of the budget that other programs use.", ledger.others_bytes),
        ):
            yield _gauge(f"pomona_agent_{name}", text, [((), value)])

        labels = ("namespace", "model", "backend", "node")
        yield _gauge(
            f"{self._prefix}_tokens_per_second",
            "Tokens that engines of this host generate per second, the mean of a minute.",
            self._sum_tokens().items(),
            *labels,
        )
        yield _gauge(
            "pomona_agent_process_memory_bytes",
            "Memory that an engine takes from its host.",
            self._memory.items(),
            *_ENGINE_LABELS,
        )
        yield from self._collect_counters()

    def _collect_counters(self) -> Iterator[Metric]:
        """Return the families of the counters."""
        processor = CounterMetricFamily(
            "pomona_agent_process_cpu_seconds", "Processor time of an engine since its start.", labels=_ENGINE_LABELS
        )
        for labels, seconds in self._processor.items():
            if seconds is not None:
                processor.add_metric(labels, seconds)
        yield processor

        steps = CounterMetricFamily(
            "pomona_agent_pressure_steps",
            f"Steps taken against memory pressure: {', '.join(PRESSURE_STEPS)}.",
            labels=["step"],
        )
        for kind in PRESSURE_STEPS:
            steps.add_metric([kind], self._watchdog.action_counts[kind])
        yield steps

    def _sum_tokens(self) -> dict[_Labels, float]:
        """Return the tokens per second of each model: services may share one."""
        now = asyncio.get_running_loop().time()
        tokens = defaultdict[_Labels, float](float)
        # By service: the rate of one with several processes counts once.
        specs = {runner.assignment.service: runner.assignment.spec for runner in self._runners.values()}
        for service, spec in specs.items():
            if (rate := self._rates.find_rate(str(service), now)) is not None:
                tokens[service.namespace, spec.model_name, spec.runtime, self._host] += rate.tokens_per_second
        return tokens

    def _measure_engines(self, engines: Mapping[_Labels, int]) -> None:
        """Read the memory and the processor time of each engine. Blocks for a moment."""
        self._memory = {labels: footprint_bytes(pid) for labels, pid in engines.items()}
        self._processor = {labels: cpu_seconds(pid) for labels, pid in engines.items()}


def _gauge(name: str, text: str, values: Iterable[tuple[_Labels, float | None]], *labels: str) -> Metric:
    """Return a gauge with a series for each value that is known, by the values of its labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        if value is not None:
            family.add_metric(label_values, value)
    return family
