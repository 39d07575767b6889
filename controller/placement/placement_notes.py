"""The notes about places: for each service, why its last replica that was admitted is where it is."""

from collections.abc import Callable
from typing import NamedTuple

from controller.placement.actions import Admit
from controller.placement.alternatives import Alternative
from controller.placement.score import CellScore
from kube.resources import ObjectKey


class PlacementNote(NamedTuple):
    """The place of a replica, and the best others when it was chosen."""

    cell: str
    """`Cell.id`; of a gang that of its first pod."""
    device_class: str
    score: CellScore | None
    """None: others ended for the replica, so that it had no choice any more."""
    others: tuple[Alternative, ...]


class PlacementNotes:
    """The notes of this leader; what an earlier one knew is in the statuses of services.

    Args:
        on_change: called with each service of which a replica was admitted.
    """

    def __init__(self, on_change: Callable[[ObjectKey], None] = lambda _service: None) -> None:
        self._notes: dict[ObjectKey, PlacementNote] = {}
        self._on_change = on_change

    def note(self, action: Admit, device_class: str) -> None:
        """Note the admission of a unit to a cell of this class."""
        if action.cells:
            score = action.scores[0] if action.scores else None
            self._notes[action.unit.service] = PlacementNote(action.cells[0], device_class, score, action.others)
            self._on_change(action.unit.service)

    def find(self, service: ObjectKey) -> PlacementNote | None:
        """Return the note about a service; None: this leader has admitted none of its replicas."""
        return self._notes.get(service)

    def restart(self) -> None:
        """Forget everything: another replica may have led since."""
        self._notes.clear()

    def forget(self, service: ObjectKey) -> None:
        """Forget a service that is gone."""
        self._notes.pop(service, None)
