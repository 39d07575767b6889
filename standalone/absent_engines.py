"""The services without an engine: models on demand that are not loaded, and what prevents others.

The output shows them, and the proxy lets requests wait for an engine or refuses them with the reason.
"""

import time
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec import structs

from artifacts.transfer_rate import TransferProgress
from gateway.proxy.config import Backend
from kube.resources import ObjectKey
from metal_agent.lifecycle import LOG_HINT
from metal_agent.traffic.exposure import build_backend
from standalone.desired import Decision
from standalone.exposure import ASLEEP_URL, AbsentEngine
from standalone.manifests import list_model_keys

if TYPE_CHECKING:
    from standalone.machine import Machine


class Sleep(NamedTuple):
    """The state of a model on demand that is not loaded."""

    phase: Literal["Idle", "Waiting", "Downloading"]
    """Waiting: it is asked for, and loaded once other models have made room."""
    progress: TransferProgress | None = None
    """Progress of the download of its weights."""
    problem: str = ""
    """The reason why it cannot be loaded now, or its weights cannot be fetched."""


def find_sleep(machine: "Machine", key: ObjectKey) -> Sleep | None:
    """Return the state of a model on demand that is not loaded and may be; None: it is another service."""
    assignments = machine.decisions[key].assignments
    if not assignments or not machine.on_demand.is_unwanted(key):
        return None
    uids, prefetch = [assignment.uid for assignment in assignments], machine.prefetch
    if transfer := next((prefetch.transfers[uid] for uid in uids if uid in prefetch.transfers), None):
        return Sleep("Downloading", transfer.read(time.monotonic()))
    if str(key) in machine.on_demand.short_of_room:
        return Sleep("Waiting")
    problems = [machine.on_demand.too_large.get(str(key)), *map(prefetch.problems.get, uids)]
    return Sleep("Idle", problem=next(filter(None, problems), ""))


def find_absent(machine: "Machine") -> dict[ObjectKey, AbsentEngine]:
    """Return the services that have no engine now, or may have none, each with the reason."""
    if machine.signals.stop.is_set():
        return dict.fromkeys(machine.decisions, AbsentEngine(problem="everything is being stopped"))
    absent = {}
    for key, decision in machine.decisions.items():
        if machine.on_demand.has(key) and _is_being_inspected(machine, key):
            service = machine.manifests.services[key]
            unknown = Backend(str(key), ASLEEP_URL, asleep=True, mode=service.spec.mode)
            absent[key] = AbsentEngine((unknown,), machine.on_demand.estimate_load_seconds(key))
        elif problem := describe_problem(machine, key, decision):
            absent[key] = AbsentEngine(problem=problem)
        elif machine.on_demand.has(key) or key in machine.ever_served:  # replaced or started again: it comes back
            sleeping = tuple(
                structs.replace(build_backend(assignment, ASLEEP_URL), asleep=True)
                for assignment in decision.assignments
            )
            absent[key] = AbsentEngine(sleeping, machine.on_demand.estimate_load_seconds(key))
    return absent


def _is_being_inspected(machine: "Machine", key: ObjectKey) -> bool:
    """Return whether nothing is known yet of a Model of a service, as just after the start."""
    models = map(machine.models.get, list_model_keys(machine.manifests.services[key]))
    return any(model is not None and not model.status.conditions for model in models)


def describe_problem(machine: "Machine", key: ObjectKey, decision: Decision) -> str:
    """Return why a service has no engine; "" if it has one, or will have one by itself."""
    if decision.problem is not None:
        return decision.problem.message
    if reason := machine.on_demand.too_large.get(str(key)):
        return reason
    # One that was refused for lack of memory starts once others have made room, and one that has served starts again.
    states = [runner.state for runner in machine.list_replicas(key)]
    most_failures = 1 if key in machine.ever_served else 0
    failed = [
        state
        for state in states
        if (state.phase == "Rejected" and state.needed_bytes is None)
        or (state.phase == "Failed" and state.failures > most_failures)
    ]
    return failed[0].message.replace(LOG_HINT, "") if failed and len(failed) == len(states) else ""
