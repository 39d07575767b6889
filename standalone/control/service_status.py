"""The status of a running `pomona up`, put together from its decisions, its processes and the proxy's counts."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from artifacts.source import without_secrets
from devices.footprint import footprint_bytes
from gateway.proxy.build import BUILD
from gateway.proxy.config import ListenerState, ServiceStats
from kube.resources import ObjectKey
from metal_agent.native.log_files import engine_log_name
from metal_agent.supervise.runner import Runner
from standalone.absent_engines import describe_problem, find_sleep
from standalone.control.up_status import UpEngineStatus, UpServiceStatus, UpStatus
from standalone.desired import Decision
from standalone.machine import Machine
from standalone.view import build_row


async def describe_up(machine: Machine, *, started_at: str, folder: Path) -> UpStatus:
    """Return the status of `machine`, whose state is in `folder`; it waits a few seconds for the proxy at most."""
    # All that takes time comes first, so that the services are those of one moment.
    state = await machine.exposure.read_state()
    pids = [runner.state.pid for runner in machine.runners.values() if runner.state.pid]
    used_bytes = await asyncio.to_thread(lambda: {pid: footprint_bytes(pid) for pid in pids})
    listeners = {listener.name: listener for listener in state.services} if state else {}
    return UpStatus(
        version=BUILD,
        pid=os.getpid(),
        started_at=started_at,
        endpoint=machine.exposure.url,
        problem=machine.exposure.problem,
        stopping=machine.signals.stop.is_set(),
        budget_bytes=machine.ledger.budget_bytes,
        available_bytes=machine.ledger.available_bytes,
        log=str(folder / "up.log"),
        services=[
            _describe_service(machine, key, listeners.get(str(key)), used_bytes, folder) for key in machine.decisions
        ],
    )


def _describe_service(
    machine: Machine,
    key: ObjectKey,
    listener: ListenerState | None,
    used_bytes: Mapping[int, int | None],
    folder: Path,
) -> UpServiceStatus:
    """Return the status of one service.

    Args:
        machine: the machine that serves it.
        key: the service.
        listener: the proxy's state of it; None: not known.
        used_bytes: the memory that processes use, by pid.
        folder: the state folder.
    """
    # 1. Its processes: of each the status, the memory that is reserved for it, and what it uses.
    decision, runners = machine.decisions[key], machine.list_replicas(key)
    replicas = [
        (
            runner.build_status(port=None),
            machine.ledger.reserved.get(runner.assignment.uid, 0),
            used_bytes.get(runner.state.pid or 0),
        )
        for runner in runners
    ]
    answers, sleep = key in machine.exposure.forwarded_services, find_sleep(machine, key)
    row = build_row(key.name, decision, replicas, None, None, answers=answers, sleep=sleep)
    fetches = [status.progress for status, _, _ in replicas if status.progress]
    progress = fetches[0] if fetches else sleep.progress if sleep else None

    # 2. Its requests, and what is served.
    stats = listener.stats if listener else ServiceStats()
    idle_seconds, unload_seconds = _measure_times(machine, key, listener, runners)
    service_spec = machine.manifests.services[key].spec
    model = machine.models.get(ObjectKey(key.namespace, service_spec.model_ref))
    spec = decision.assignments[0].spec if decision.assignments else None
    return UpServiceStatus(
        name=key.name,
        namespace=key.namespace,
        model=service_spec.model_ref,
        source=without_secrets(model.spec.source) if model else "",
        runtime=spec.runtime if spec else "",
        on_demand=machine.on_demand.has(key),
        phase=row.phase,
        detail=row.detail,
        problem=describe_problem(machine, key, decision),
        fetched_bytes=progress.bytes if progress else None,
        total_bytes=progress.total_bytes if progress else None,
        reserved_bytes=sum(reserved for _, reserved, _ in replicas),
        used_bytes=sum(used for _, _, used in replicas if used) or None,
        context_length=spec.context_length if spec else service_spec.context_length,
        running=stats.in_flight,
        waiting=stats.queued,
        requests=stats.requests,
        failed=stats.errors,
        idle_seconds=idle_seconds,
        unload_seconds=unload_seconds,
        engines=_list_engines(decision, runners, folder),
    )


def _measure_times(
    machine: Machine, key: ObjectKey, listener: ListenerState | None, runners: Sequence[Runner]
) -> tuple[float | None, float | None]:
    """Return the time of a loaded service without a request, and that after which it is unloaded; None: it is not."""
    if not any(runner.state.phase == "Ready" for runner in runners):
        return None, None
    reported = [backend.idle_seconds for backend in listener.backends if not backend.draining] if listener else []
    known = [seconds for seconds in reported if seconds is not None]
    idle_seconds = machine.on_demand.measure_idle(key, min(known, default=None), time.monotonic())
    scaling = machine.manifests.services[key].spec.scaling
    is_busy = listener is not None and listener.stats.in_flight + listener.stats.queued > 0
    if not machine.on_demand.has(key) or scaling is None or is_busy:
        return idle_seconds, None
    return idle_seconds, max(0.0, scaling.idle_seconds - idle_seconds)


def _list_engines(decision: Decision, runners: Sequence[Runner], folder: Path) -> list[UpEngineStatus]:
    """Return the engines of a service, or those that its next load starts."""
    if runners:
        return [UpEngineStatus(str(runner.log_path), runner.state.phase, runner.state.pid) for runner in runners]
    names = [engine_log_name(assignment.namespace, assignment.name) for assignment in decision.assignments]
    return [UpEngineStatus(str(folder / "logs" / name)) for name in names]
