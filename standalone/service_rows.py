"""The facts about each service of a machine at one moment, apart from their words, for tables, lines and programs.

`build_row` is a pure function of what is known about one service; a `ServiceRowReader` reads that from the machine, the
proxy's counts and the memory that the engines use now.
"""

import asyncio
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import structs

from artifacts.transfer_rate import TransferProgress
from crds.metalprocess import MetalProcessStatus
from devices.footprint import footprint_bytes
from gateway.proxy.config import ListenerState, ServiceStats
from kube.resources import ObjectKey
from metal_agent.lifecycle import LOG_HINT
from metal_agent.supervise.runner import Runner
from standalone.absent_engines import Sleep, find_sleep
from standalone.desired import Decision
from standalone.machine import Machine

DOWNLOAD_PHASES: Final = frozenset({"Fetching", "Downloading"})
"""Phases with the progress of a download: of a model that is awaited, and of one that is fetched ahead."""
# The phases of a replica, the worst last.
_PHASES: Final = ("Ready", "Stopped", "Stopping", "Starting", "Fetching", "Pending", "Failed", "Rejected")


class ServiceRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The facts about one service. Names in JSON never change; a fact that is absent does not apply or is not known."""

    service: str
    phase: str
    """That of its worst replica; or Degraded, Suspended, Idle, Waiting (for memory) or Downloading (ahead)."""
    message: str = ""
    """The reason for its phase, in words."""
    note: str = ""
    """A remark, in words: on weights that serve, or on an edit that does not."""
    replicas: int | None = None
    ready_replicas: int | None = None
    bytes: int | None = None
    """Bytes of the weights that have come, while they are downloaded."""
    total_bytes: int | None = None
    bytes_per_second: float | None = None
    seconds_left: float | None = None
    """Time until it is downloaded, or loaded; 0: its load takes longer than usual."""
    memory_bytes: int | None = None
    """Memory that its engines use now."""
    reserved_bytes: int | None = None
    """Memory that is reserved for them."""
    idle_limit_seconds: int | None = None
    """Time without a request after which it is unloaded; absent: it stays loaded."""
    unload_seconds: float | None = None
    """Time until then; absent: it has requests."""
    requests: int | None = None
    """Requests that have ended."""
    failed_requests: int | None = None
    running: int | None = None
    """Requests that its engines work on."""
    waiting: int | None = None
    """Requests that wait for an engine, or for a free slot of one."""
    tokens_per_second: float | None = None


class ReplicaFacts(NamedTuple):
    """The facts about one replica."""

    status: MetalProcessStatus
    transfer: TransferProgress | None = None
    """Progress of the download of its weights."""
    reserved_bytes: int | None = None
    used_bytes: int | None = None


class ServiceLoad(NamedTuple):
    """The facts about the load of a service's model, and about its end."""

    seconds_left: float | None = None
    """Time that the load probably still takes; None: none is running."""
    idle_limit_seconds: int | None = None
    idle_seconds: float | None = None
    """Time without a request; None: that is not known."""


_NO_LOAD: Final = ServiceLoad()


def render_json(row: ServiceRow) -> dict[str, Any]:
    """Return the row as members of a JSON object, with times and rates in tenths."""
    members = msgspec.to_builtins(row)
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in members.items()}


def build_row(
    name: str,
    decision: Decision,
    replicas: Iterable[ReplicaFacts] = (),
    *,
    stats: ServiceStats | None = None,
    tokens_per_second: float | None = None,
    answers: bool = True,
    sleep: Sleep | None = None,
    load: ServiceLoad = _NO_LOAD,
) -> ServiceRow:
    """Return the row of one service.

    Args:
        name: the service.
        decision: the decision for it, whose problem is shown while it has no replica.
        replicas: its replicas.
        stats: the proxy's counts; None: they are not known.
        tokens_per_second: rate since the last reading; None if it is not known.
        answers: True if the endpoint forwards to the service.
        sleep: the state of its model while it is loaded on demand, and not loaded.
        load: the facts about its load.
    """
    # 1. Without a replica: no process was decided yet, or none can be.
    # _PHASES: the phases of a replica, the worst last
    worst_last = sorted(replicas, key=lambda replica: _PHASES.index(replica.status.phase))
    if not worst_last:
        if sleep is not None:
            row = ServiceRow(service=name, phase=sleep.phase, message=sleep.problem)
            return _add_counts(_add_download(row, sleep.progress), stats)
        if decision.problem is None:
            return ServiceRow(service=name, phase="Pending")
        return ServiceRow(service=name, phase=decision.problem.phase, message=decision.problem.message)

    # 2. With replicas: the facts that belong to their phase.
    worst = worst_last[-1]
    ready = sum(replica.status.phase == "Ready" for replica in worst_last)
    phase, message = _judge_phase(worst.status, ready, len(worst_last), answers=answers)
    measured = [replica.used_bytes for replica in worst_last if replica.used_bytes]
    row = ServiceRow(
        service=name,
        phase=phase,
        message=message,
        note=_describe_note(decision, phase),
        replicas=len(worst_last),
        ready_replicas=ready,
        memory_bytes=sum(measured) if measured else None,
        reserved_bytes=sum(replica.reserved_bytes or 0 for replica in worst_last) or None,
        seconds_left=load.seconds_left if worst.status.phase == "Starting" else None,
        tokens_per_second=tokens_per_second,
    )
    if worst.status.phase == "Fetching":
        row = _add_download(row, worst.transfer)
    if phase == "Ready":
        row = _add_unload(row, load, stats)
    return _add_counts(row, stats)


def _judge_phase(worst: MetalProcessStatus, ready: int, replicas: int, *, answers: bool) -> tuple[str, str]:
    """Return the phase of a service and its message: all replicas are ready, or some, or the worst one says why not."""
    if ready and not answers:  # the proxy does not know the loaded engine yet
        return "Starting", "loaded; waiting for the endpoint"
    phase = worst.phase if ready in {0, replicas} else "Degraded"
    return phase, worst.message.replace(LOG_HINT, "")


def _describe_note(decision: Decision, phase: str) -> str:
    """Return the remark on a service with replicas."""
    notes = [decision.note if phase == "Ready" else ""]
    if decision.problem is not None:  # of an edit: the replicas are those from before
        notes.append(f"the last edit is not served: {decision.problem.message}")
    return "; ".join(filter(None, notes))


def _add_download(row: ServiceRow, progress: TransferProgress | None) -> ServiceRow:
    """Return the row with the progress of a download, if there is one."""
    return row if progress is None else structs.replace(row, **progress._asdict())


def _add_unload(row: ServiceRow, load: ServiceLoad, stats: ServiceStats | None) -> ServiceRow:
    """Return the row of a loaded model with the time until it is unloaded, if it is and has no request."""
    if load.idle_limit_seconds is None:
        return row
    is_in_use = stats is None or stats.in_flight + stats.queued > 0
    left = None
    if load.idle_seconds is not None and not is_in_use:
        left = max(0.0, load.idle_limit_seconds - load.idle_seconds)
    return structs.replace(row, idle_limit_seconds=load.idle_limit_seconds, unload_seconds=left)


def _add_counts(row: ServiceRow, stats: ServiceStats | None) -> ServiceRow:
    """Return the row with the proxy's counts, if they are known."""
    if stats is None:
        return row
    counts = {"running": stats.in_flight, "waiting": stats.queued}
    return structs.replace(row, requests=stats.requests, failed_requests=stats.errors, **counts)


def count_load_seconds_left(usual_seconds: float, started_at: str | None, now: datetime) -> float | None:
    """Return the time that a load probably still takes, 0 if it takes longer than usual; None if it has not begun.

    Args:
        usual_seconds: the time that it took before, or an estimate.
        started_at: RFC 3339, when the engine was started.
        now: the present time.
    """
    if started_at is None:
        return None
    return max(0.0, usual_seconds - max(0.0, (now - datetime.fromisoformat(started_at)).total_seconds()))


class ServiceRowReader:
    """Reader of the rows of a machine; it keeps the last counts to compute the rates of tokens."""

    def __init__(self, machine: Machine) -> None:
        """Begin without rates, which need two readings."""
        self._machine = machine
        # Time and tokens of the last reading, by service.
        self._last_counts: Mapping[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}  # tokens per second, by service

    async def read_measured_rows(self, now: float) -> list[ServiceRow]:
        """Return a row for each service, in the order of the files, with the proxy's counts and the memory in use.

        Args:
            now: the seconds of a monotonic clock.
        """
        # stats: the proxy's counts of each service, by its name; without the proxy the last rates stay
        state = await self._machine.exposure.read_state()
        listeners = {listener.name: listener for listener in state.services} if state else {}
        self._update_rates({name: listener.stats for name, listener in listeners.items()}, now)

        pids = [runner.state.pid for runner in self._machine.runners.values() if runner.state.pid]
        used_bytes = {pid: await asyncio.to_thread(footprint_bytes, pid) for pid in pids}
        return self.read_rows(now, listeners, used_bytes)

    def read_rows(
        self,
        now: float,
        listeners: Mapping[str, ListenerState] | None = None,
        used_bytes: Mapping[int, int | None] | None = None,
    ) -> list[ServiceRow]:
        """Return a row for each service, in the order of the files.

        Args:
            now: the seconds of a monotonic clock.
            listeners: the proxy's state of each service by `<namespace>/<service>`; by default, the counts are unknown.
            used_bytes: the memory that each process uses, by pid; by default, it is not known.
        """
        rows = []
        for key, decision in self._machine.decisions.items():
            listener, runners = (listeners or {}).get(str(key)), self._machine.list_replicas(key)
            replicas = [_read_replica(runner, now, used_bytes or {}) for runner in runners]
            row = build_row(
                key.name,
                decision,
                replicas,
                stats=listener.stats if listener else None,
                tokens_per_second=self._rates.get(str(key)) if listener else None,
                answers=key in self._machine.exposure.forwarded_services,
                sleep=find_sleep(self._machine, key),
                load=self._read_load(key, runners, listener, now),
            )
            rows.append(row)
        return rows

    def _read_load(
        self, key: ObjectKey, runners: Iterable[Runner], listener: ListenerState | None, now: float
    ) -> ServiceLoad:
        """Return the facts about the load of a service's model, and how long it has had no request."""
        # 1. A load that is running. Replicas are loaded one after the other.
        usual_seconds, seconds_left = self._machine.on_demand.estimate_load_seconds(key), None
        loading = [runner for runner in runners if runner.state.phase == "Starting" and runner.state.exists]
        if loading and loading[0].record:
            seconds_left = count_load_seconds_left(usual_seconds, loading[0].record.started_at, datetime.now(UTC))

        # 2. A model on demand is idle since it was loaded at most: what the proxy reports may be of an earlier load.
        service = self._machine.manifests.services.get(key)
        scaling = service.spec.scaling if service else None
        ready_at = [runner.state.ready_since for runner in runners if runner.state.ready_since is not None]
        if scaling is None or not self._machine.on_demand.has(key) or listener is None or not ready_at:
            return ServiceLoad(seconds_left)
        idle = [backend.idle_seconds for backend in listener.backends if backend.idle_seconds is not None]
        return ServiceLoad(seconds_left, scaling.idle_seconds, min([now - max(ready_at), *idle]))

    def _update_rates(self, stats: Mapping[str, ServiceStats], now: float) -> None:
        """Update the rate of each service by the tokens since the last counts, and keep the new counts."""
        for name, stat in stats.items():
            if name in self._last_counts:
                last_at, last_tokens = self._last_counts[name]  # of the last reading
                self._rates[name] = max(0, stat.tokens_out - last_tokens) / max(now - last_at, 1e-6)
        self._last_counts = {name: (now, stat.tokens_out) for name, stat in stats.items()}


def _read_replica(runner: Runner, now: float, used_bytes: Mapping[int, int | None]) -> ReplicaFacts:
    """Return the facts about the replica of a runner."""
    status, reserved_bytes = runner.build_status(port=None), runner.assignment.spec.memory_bytes
    transfer = runner.transfer.read(now) if status.progress else None
    return ReplicaFacts(status, transfer, reserved_bytes, used_bytes.get(status.pid) if status.pid else None)
