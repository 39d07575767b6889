"""Write the status of a MetalProcess, and an Event for each outcome: Ready, Stopped, Failed, Rejected."""

from datetime import UTC, datetime
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from crds.rate import format_rate
from kube.apply import apply_status, merge_conditions
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.events import EventRecorder, EventType
from kube.resources import METAL_PROCESSES
from kube.store import Store
from metal_agent.cluster.endpoint_slices import FIELD_MANAGER
from metal_agent.cluster.exposure import ClusterExposure
from metal_agent.supervise.runner import Runner

_OUTCOMES: Final = frozenset({"Ready", "Stopped", "Failed", "Rejected"})
"""Phases that are sent as Events."""


class ProcessReporter:
    """Status and Events of the processes of `host` in the API; `store` has their objects as they were last seen."""

    def __init__(self, client: Client, store: Store, sink: EventRecorder, host: str, exposed: ClusterExposure) -> None:
        """Write statuses by `client` and Events by `sink`; `exposed` knows traffic and problems of the services."""
        self._client, self._store, self._events = client, store, sink
        self._host, self._exposure = host, exposed
        self._recorded: WeakKeyDictionary[Runner, str] = WeakKeyDictionary()
        """The last outcome of each runner that was sent as an Event."""

    async def report(self, runner: Runner, disruption: Obj | None) -> None:
        """Write the status of one process if its object is still there, then send an Event of a new outcome.

        `disruption` is the condition DisruptionTarget, by which the cluster replaces a process that the host displaces;
        None if it may stay. Raises ApiError and Unreachable.
        """
        assignment = runner.assignment
        observed = self._store.get(METAL_PROCESSES, assignment.name, assignment.namespace)
        if observed is None or observed["metadata"]["uid"] != assignment.uid:
            return  # it is gone, or another one has its name

        body = self._build_status(runner)
        if disruption:
            before = observed.get("status", {}).get("conditions", [])
            body["conditions"] = merge_conditions(before, [disruption], datetime.now(UTC))

        try:
            written = await apply_status(self._client, METAL_PROCESSES, observed, body, FIELD_MANAGER)
        except NotFound:
            return
        self._store.put(METAL_PROCESSES, written)  # before the watch brings it
        await self._record_outcome(runner, observed)

    def _build_status(self, runner: Runner) -> dict[str, Any]:
        """Return the status to write: that of the runner with its traffic, and with the reason if it is not exposed."""
        service = runner.assignment.service
        status = runner.build_status(self._exposure.find_port(service))

        if (traffic := self._exposure.traffic.find(runner.assignment.uid)) is not None:
            status = msgspec.structs.replace(
                status,
                tokens_per_second=format_rate(traffic.tokens_per_second),
                requests_per_minute=traffic.requests_per_minute,
                average_latency_ms=traffic.average_ms,
            )

        problem = self._exposure.find_problem(service)
        if problem and status.phase == "Ready":
            status = msgspec.structs.replace(status, reason="NotExposed", message=problem)

        # `to_builtins` leaves out a field with its default, as the phase Pending, and a status always has a phase.
        body: dict[str, Any] = {"phase": status.phase, **msgspec.to_builtins(status)}
        return body

    async def _record_outcome(self, runner: Runner, observed: Obj) -> None:
        """Send an Event if the process has reached an outcome that was not sent yet."""
        state = runner.state
        outcome = f"{state.phase} {state.reason} {state.failures}"  # the next failure is another outcome
        # _OUTCOMES: Ready, Stopped, Failed and Rejected.
        if state.phase in _OUTCOMES and self._recorded.get(runner) != outcome:
            event_type: EventType = "Normal" if state.phase in {"Ready", "Stopped"} else "Warning"
            note = state.message or f"{state.phase} on host {self._host}"
            await self._events.event(observed, event_type, state.reason or state.phase, note, "Serving")
            self._recorded[runner] = outcome
