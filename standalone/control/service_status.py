"""The status of a running `pomona up`, put together from its decisions, its processes and the proxy's counts."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

from artifacts.source import without_secrets
from artifacts.transfer_rate import TransferProgress
from devices.footprint import footprint_bytes
from gateway.proxy.build import BUILD
from gateway.proxy.config import ListenerState
from gateway.proxy.model_control import AddProgress
from kube.resources import ObjectKey
from metal_agent.native.log_files import engine_log_name
from metal_agent.supervise.runner import Runner
from standalone.absent_engines import describe_problem
from standalone.control.up_status import UpEngineStatus, UpServiceStatus, UpStatus
from standalone.desired import Decision
from standalone.machine import Machine
from standalone.row_text import describe_detail
from standalone.served_facts import describe_served_model
from standalone.service_rows import ServiceRow, ServiceRowReader


async def describe_up(machine: Machine, *, started_at: str, folder: Path) -> UpStatus:
    """Return the status of `machine`, whose state is in `folder`; it waits a few seconds for the proxy at most."""
    # All that takes time comes first, so that the services are those of one moment.
    state = await machine.exposure.read_state()
    pids = [runner.state.pid for runner in machine.runners.values() if runner.state.pid]
    used_bytes = await asyncio.to_thread(lambda: {pid: footprint_bytes(pid) for pid in pids})
    listeners = {listener.name: listener for listener in state.services} if state else {}
    rows = ServiceRowReader(machine).read_rows(time.monotonic(), listeners, used_bytes)
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
            _describe_service(machine, key, row, listeners.get(str(key)), folder)
            for key, row in zip(machine.decisions, rows, strict=True)
        ],
    )


def read_progress(machine: Machine, key: ObjectKey) -> AddProgress:
    """Return how far the weights of a service on demand are."""
    # 1. Without a process yet, or with a reason why there is none.
    decision = machine.decisions.get(key)
    if decision is None:
        return AddProgress(problem=f"{key.name} is not served any more")
    if decision.problem is not None and decision.problem.phase == "Pending":
        return AddProgress()  # it is being inspected
    problem = describe_problem(machine, key, decision)
    if not decision.assignments:
        return AddProgress(problem=problem)

    # 2. Its weights are there, if they are held for its next load, or an engine has them; else they are fetched.
    assignment = decision.assignments[0]  # all replicas have the same
    uid, runner = assignment.uid, machine.runners.get(assignment.uid)
    model = machine.models.get(ObjectKey(key.namespace, assignment.spec.model_name))
    digest = describe_served_model(assignment.spec, model).digest
    if machine.prefetch.has(assignment) or (runner and runner.state.phase in {"Starting", "Ready"}):
        is_listed = key in machine.exposure.forwarded_services  # a client asks for it at once
        return AddProgress(digest=digest, is_stored=is_listed, problem=problem)
    meter = machine.prefetch.transfers.get(uid)
    transfer = meter.read(time.monotonic()) if meter else TransferProgress(0)
    problem = problem or machine.prefetch.problems.get(uid, "")
    return AddProgress(bytes=transfer.bytes, total_bytes=transfer.total_bytes, digest=digest, problem=problem)


def _describe_service(
    machine: Machine, key: ObjectKey, row: ServiceRow, listener: ListenerState | None, folder: Path
) -> UpServiceStatus:
    """Return the status of one service.

    Args:
        machine: the machine that serves it.
        key: the service.
        row: the facts about it that the output of `pomona up` shows, too.
        listener: the proxy's state of it; None: not known.
        folder: the state folder.
    """
    decision, runners = machine.decisions[key], machine.list_replicas(key)
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
        detail=describe_detail(row),
        problem="" if row.phase == "Pending" else describe_problem(machine, key, decision),
        fetched_bytes=row.bytes,
        total_bytes=row.total_bytes,
        reserved_bytes=row.reserved_bytes or 0,
        used_bytes=row.memory_bytes,
        context_length=spec.context_length if spec else service_spec.context_length,
        running=row.running or 0,
        waiting=row.waiting or 0,
        requests=row.requests or 0,
        failed=row.failed_requests or 0,
        idle_seconds=_measure_idle(machine, key, listener, runners),
        unload_seconds=row.unload_seconds,
        engines=_list_engines(decision, runners, folder),
    )


def _measure_idle(
    machine: Machine, key: ObjectKey, listener: ListenerState | None, runners: Sequence[Runner]
) -> float | None:
    """Return the time of a loaded service without a request; None: it is not loaded."""
    if not any(runner.state.phase == "Ready" for runner in runners):
        return None
    reported = [backend.idle_seconds for backend in listener.backends if not backend.draining] if listener else []
    known = [seconds for seconds in reported if seconds is not None]
    return machine.on_demand.measure_idle(key, min(known, default=None), time.monotonic())


def _list_engines(decision: Decision, runners: Sequence[Runner], folder: Path) -> list[UpEngineStatus]:
    """Return the engines of a service, or those that its next load starts."""
    if runners:
        return [UpEngineStatus(str(runner.log_path), runner.state.phase, runner.state.pid) for runner in runners]
    names = [engine_log_name(assignment.namespace, assignment.name) for assignment in decision.assignments]
    return [UpEngineStatus(str(folder / "logs" / name)) for name in names]
