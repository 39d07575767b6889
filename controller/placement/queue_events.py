"""The Events about admissions and preemptions, which the loop that decides them sends."""

import asyncio
from typing import Final

from controller.placement.units import Unit
from controller.reconcile.plan import Event, Leading
from kube.resources import INFERENCE_SERVICES, ObjectKey

_ACTION: Final = "Queue"


class QueueEventSender:
    """Sends Events one by one: many admissions at once are not slowed down by as many Events."""

    def __init__(self, leading: Leading) -> None:
        """Send with the event recorder of this leader."""
        self._leading = leading
        self._sending = asyncio.Lock()

    async def send(self, service: ObjectKey, event: Event) -> None:
        """Send an Event about a service, after the Events before it; nothing is sent if the service is gone."""
        async with self._sending:
            stored = self._leading.store.get(INFERENCE_SERVICES, service.name, service.namespace)
            if stored is not None:
                await self._leading.recorder.event(stored, event.type, event.reason, event.note, event.action)


def describe_admission(unit: Unit, cells: tuple[str, ...]) -> Event:
    """Return the Event about the service of a unit that gets its cells; without cells, an autoscaler adds a node."""
    place = ", ".join(cells) if cells else "a node that an autoscaler adds"
    return Event("Normal", "Admitted", f"{unit.key} gets {place}", _ACTION)


def describe_failure(name: str, cell: str, error: str) -> Event:
    """Return the Event about an admission that fails again and again: the condition only says that the unit waits."""
    note = f"{name} is not admitted to {cell or 'any node'}, and tried again: {error}"
    return Event("Warning", "AdmissionFailed", note, "Admit")


def describe_preemption(victim: Unit, preemptor: Unit) -> Event:
    """Return the Event about the service of a unit that ends for another one."""
    cause = f"{name_service(preemptor.service, victim.key.namespace)} ({preemptor.priority})"
    note = f"Preempted by {cause}: {victim.key} ({victim.priority}) ends, and waits again at its old place in the queue"
    return Event("Warning", "Preempted", note, _ACTION)


def name_service(service: ObjectKey, reader: str) -> str:
    """Return the name of a service for those who may read a namespace: they see no name of another one."""
    return str(service) if service.namespace == reader else "a service of another namespace"
