"""The notes about places: for each service, why its last replica that was admitted is where it is."""

from collections.abc import Callable
from typing import NamedTuple

from controller.placement.actions import Admit
from controller.placement.alternatives import Alternative
from controller.placement.score import CellScore
from controller.placement.units import Cell
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
        find_cell: finds a cell by its `Cell.id`.
        on_change: called with each service of which a replica was admitted.
    """

    def __init__(self, find_cell: Callable[[str], Cell | None], on_change: Callable[[ObjectKey], None]) -> None:
        """Start without notes; `on_change` gets each service whose note has changed."""
        self._find_cell = find_cell
        self._notes: dict[ObjectKey, PlacementNote] = {}
        self._on_change = on_change

    def note(self, action: Admit) -> None:
        """Remember where a unit was admitted, why, and where else it could be, and report that to its service.

        A unit without a cell waits for a node that an autoscaler adds: nothing is known of its place yet. Of a gang,
        the cell of the first pod is noted (`cells` and `scores` have an entry for each pod).
        """
        if action.cells:
            cell = self._find_cell(action.cells[0])
            device_class = cell.device_class if cell is not None else ""
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
