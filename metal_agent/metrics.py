"""The agent's own metrics for Prometheus, served together with the proxy's metrics of each service.

Only the first request imports this module: an agent whose metrics nobody reads saves the memory of Prometheus' library.
"""

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client import Enum as EnumMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crds.meta import METRIC_PREFIX
from devices.footprint import cpu_seconds, footprint_bytes
from devices.pressure import PressureLevel
from metal_agent.holds.hold_gate import HOLD_SOURCES, HoldGate
from metal_agent.lifecycle import Phase
from metal_agent.memory.ledger import Ledger
from metal_agent.memory.pressure_policy import ACTION_LABELS
from metal_agent.memory.pressure_watchdog import PressureWatchdog
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.service_rates import ServiceRates

_UNKNOWN: Final = "unknown"


class AgentMetrics:
    """The metrics of one agent, read at each request.

    Args:
        ledger: the memory of the host.
        runners: its processes by uid.
        watchdog: watches the memory pressure.
        gate: the reasons for which no engine starts.
        rates: the traffic of its services.
        host: name of the host, the label `node`.
        prefix: beginning of the names that another project has, too.
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
        self._registry = registry = CollectorRegistry()
        self._host = host
        self._rates = rates
        self._tokens = Gauge(
            f"{prefix}_tokens_per_second",
            "Tokens that engines of this host generate per second, the mean of a minute.",
            ["namespace", "model", "backend", "node"],
            registry=registry,
        )
        self._runners = runners
        self._watchdog = watchdog
        self._gate = gate
        self._level = EnumMetric(
            "pomona_agent_memory_pressure",
            "Memory pressure level that the operating system reports.",
            states=[*get_args(PressureLevel), _UNKNOWN],
            registry=registry,
        )
        self._holds = Gauge(
            "pomona_agent_hold", "1 while this source lets no engine start.", ["source"], registry=registry
        )
        self._usage = _UsageCollector()
        registry.register(_StepCollector(watchdog))
        registry.register(self._usage)
        self._phases = Gauge("pomona_agent_processes", "Processes on this host.", ["phase"], registry=registry)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"pomona_agent_{name}", text, registry=registry).set_function(value)

        gauge(
            "under_pressure",
            "1 while no engine is started for lack of memory.",
            lambda: watchdog.state.is_under_pressure,
        )
        gauge("evicted_processes", "Processes that wait for memory again.", lambda: len(watchdog.state.evicted))
        gauge("memory_budget_bytes", "Memory that models may use in all.", lambda: ledger.budget_bytes)
        gauge("memory_reserved_bytes", "Memory that is reserved for processes.", lambda: sum(ledger.reserved.values()))
        gauge("memory_others_bytes", "Memory of the budget that other programs use.", lambda: ledger.others_bytes)

    async def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, with what each engine takes now."""
        engines = {
            (service.namespace, service.name, runner.assignment.name, self._host): runner.state.pid
            for runner in self._runners.values()
            if runner.state.pid is not None and (service := runner.assignment.service) is not None
        }
        # The system is asked about each process of an engine, which takes a moment.
        self._usage.usage = await asyncio.to_thread(_read_usage, engines)
        return self.text()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format; those of engines as they were read last."""
        self._level.state(self._watchdog.level or _UNKNOWN)
        holding = {hold.source for hold in self._gate.list_holds()}
        for source in HOLD_SOURCES:
            self._holds.labels(source).set(source in holding)
        phases = Tally(runner.state.phase for runner in self._runners.values())
        for phase in get_args(Phase):
            self._phases.labels(phase).set(phases[phase])
        self._show_tokens()
        return generate_latest(self._registry)

    def _show_tokens(self) -> None:
        """Set the tokens per second of each model: services may share one."""
        self._tokens.clear()
        now = asyncio.get_running_loop().time()
        specs = {runner.assignment.service: runner.assignment.spec for runner in self._runners.values()}
        for service, spec in specs.items():
            rate = self._rates.find_rate(str(service), now) if service is not None else None
            if service is not None and spec is not None and rate is not None:
                series = self._tokens.labels(service.namespace, spec.model_name, spec.runtime, self._host)
                series.inc(rate.tokens_per_second)


class _EngineUsage(NamedTuple):
    """The memory and the processor time of an engine; None: unknown."""

    memory_bytes: int | None
    cpu_seconds: float | None


_Labels = tuple[str, str, str, str]


def _read_usage(engines: Mapping[_Labels, int]) -> dict[_Labels, _EngineUsage]:
    return {labels: _EngineUsage(footprint_bytes(pid), cpu_seconds(pid)) for labels, pid in engines.items()}


class _UsageCollector(Collector):
    """Series of the engines that run: one that has ended takes its series with it."""

    def __init__(self) -> None:
        self.usage: Mapping[_Labels, _EngineUsage] = {}

    def collect(self) -> Iterator[Metric]:
        names = ("namespace", "service", "process", "node")
        memory = GaugeMetricFamily(
            "pomona_agent_process_memory_bytes", "Memory that an engine takes from its host.", labels=names
        )
        processor = CounterMetricFamily(
            "pomona_agent_process_cpu_seconds", "Processor time of an engine since its start.", labels=names
        )
        for labels, usage in self.usage.items():
            if usage.memory_bytes is not None:
                memory.add_metric(labels, usage.memory_bytes)
            if usage.cpu_seconds is not None:
                processor.add_metric(labels, usage.cpu_seconds)
        yield memory
        yield processor


class _StepCollector(Collector):
    """Counters of the steps that a watchdog has taken."""

    def __init__(self, watchdog: PressureWatchdog) -> None:
        self._watchdog = watchdog

    def collect(self) -> Iterator[Metric]:
        steps = CounterMetricFamily(
            "pomona_agent_pressure_steps",
            "Steps taken against memory pressure: hold, displace, cancel, evict, hasten, release, return.",
            labels=["step"],
        )
        for action, label in ACTION_LABELS.items():
            steps.add_metric([label], self._watchdog.taken[action])
        yield steps
