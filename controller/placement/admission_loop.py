"""The leader's loop of admission: wait for a change that matters, then plan and carry out a round of the queue."""

import asyncio
import functools

from controller.placement.admission import LeadershipTerm
from controller.placement.admission_parts import AdmissionParts
from controller.placement.round_pacer import RoundCause, RoundTrigger
from controller.placement.vanished_units import VanishedUnits
from controller.placement.wake_rules import is_decisive
from controller.reconcile.plan import Leading
from kube.client import Obj
from kube.resources import METAL_PROCESSES, PODS, Resource
from kube.store import Store


class Admission:
    """The leader's loop: waits for changes, plans a round, carries it out.

    It outlives the terms in which this controller leads; all that one term must know is in `LeadershipTerm`.
    """

    def __init__(self, parts: AdmissionParts) -> None:
        """Make the loop of a controller, which does nothing before `run`.

        Args:
            parts: the collaborators, such as the registry of nodes and hosts and the callbacks for reports.
        """
        self._parts = parts
        self._trigger = RoundTrigger(parts.registry.list_cells)
        self._is_subscribed = False
        self._vanished = VanishedUnits()
        """Queue places of units that have vanished since the last round."""

    def wake(self) -> None:
        """Ask for another round soon, since something has changed."""
        self._trigger.make_due(RoundCause.UNIT)

    async def run(self, leading: Leading) -> None:
        """Plan rounds and carry them out until this is cancelled at the end of the leadership (`leading`)."""
        # Follow changes of the store and of the cells (nodes and hosts), from the first term on: subscriptions last as
        # long as the store.
        if not self._is_subscribed:
            leading.store.subscribe(functools.partial(self._wake_on_change, leading.store))
            self._parts.registry.subscribe(self._trigger.note_cells)
            self._is_subscribed = True

        async with asyncio.TaskGroup() as tasks:
            term = LeadershipTerm(self._parts, leading, tasks, self.wake, self._vanished)
            await term.begin()

            # Each term begins with a round, whatever has changed; the trigger paces all later ones.
            self._trigger.restart()
            while True:
                await self._trigger.wait()
                report = await term.play_round()
                made, spent_seconds = report.round, report.processor_seconds
                self._trigger.note_round(made.queue, spent_seconds=spent_seconds, has_decided=bool(made.actions))

    def _wake_on_change(self, store: Store, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Note a unit that vanishes, and request a round if the queue's decisions depend on the change.

        A unit (pod or process) that vanishes leaves its place in the queue to its successor, so the place is recorded.
        A deletion (RoundCause.END) is less urgent than any other change: it lets others in only by the room that it
        frees.
        """
        if resource in {PODS, METAL_PROCESSES}:
            self._vanished.note_change(resource, old, new)
        if is_decisive(store, resource, old, new):
            self._trigger.make_due(RoundCause.END if new is None else RoundCause.UNIT)
