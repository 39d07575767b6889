"""The claims of the ledger that are open: it is not known yet whether their units have got their cells.

A claim is open from the write of the ledger until the answer about its unit. Until then the cells do not show who has
them, so that these claims are what keeps a cell from being promised twice.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from controller.placement.ledger import Claim
from controller.placement.units import NOTHING, Amounts, Cell, Unit, add_amounts, fits, subtract_amounts
from kube.resources import ObjectKey


class ReservedCells(NamedTuple):
    """Cells without the room of units that are being admitted and are not seen to have it yet."""

    cells: list[Cell]
    is_all_known: bool
    """False: on some of them nothing counts as free, until the outcome of a claim is known."""


class OpenClaims:
    """The open claims by uid of their units."""

    def __init__(self) -> None:
        """Start without claims; those of the ledger are added."""
        self._claims: dict[str, Claim] = {}
        """By uid of the unit: its pods or process, and the cells that the ledger says it is being given."""
        self._being_written: dict[str, Unit] = {}
        """Units whose write may have begun: their cells may not show yet that they have them."""
        self._late_writes: dict[str, float] = {}
        """By uid of the unit: until when, on the clock of the loop, a write without an answer may still arrive."""
        self._gang_pods: set[ObjectKey] = set()
        """Pods of the gangs."""
        self.must_rewrite_ledger = False
        """The ledger may still have a claim that was given up: the next leader would carry it out."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._claims

    def covers(self, unit: Unit) -> bool:
        """Return whether a unit has an open claim, also as the rest of a gang that is admitted in part."""
        return unit.uid in self._claims or (unit.key.kind == "gang" and not self._gang_pods.isdisjoint(unit.objects))

    def __getitem__(self, uid: str) -> Claim:
        return self._claims[uid]

    def list_all(self, new: Mapping[str, Claim]) -> dict[str, Claim]:
        """Return the open claims together with new ones of other units."""
        return {**new, **self._claims}

    def list_cells(self) -> frozenset[str]:
        """Return the `Cell.id` of each cell that an open claim names."""
        return frozenset(cell for claim in self._claims.values() for cell in claim.cells)

    def count_objects(self) -> int:
        """Return the number of pods and processes with an open claim."""
        return sum(len(claim.names) for claim in self._claims.values())

    def add(self, claims: Mapping[str, Claim]) -> dict[str, Claim]:
        """Add claims of units without an open one; return those that were added."""
        new = {uid: claim for uid, claim in claims.items() if uid not in self._claims}
        self._claims |= new
        self._gang_pods.update(*(claim.objects for claim in new.values() if claim.kind == "gang"))
        return new

    def begin_write(self, unit: Unit) -> None:
        """Note that the write of a unit's claim begins: its room is reserved even if the unit vanishes."""
        self._being_written[unit.uid] = unit

    def expect_late_write(self, uid: str, until: float) -> None:
        """Note that a write for a unit was not answered, and may arrive until a time of the loop."""
        self._late_writes[uid] = until

    def find_late_write(self, uid: str) -> float:
        """Return the time of the loop until which a write for a unit may arrive; minus infinity: none may."""
        return self._late_writes.get(uid, -math.inf)

    def release(self, uid: str, *, is_done: bool) -> None:
        """Forget the claim of a unit, so that its room is free for others.

        is_done: the outcome is known. Otherwise the claim was given up, and must leave the ledger soon: the next leader
        would carry it out.
        """
        self.must_rewrite_ledger |= not is_done
        claim = self._claims.pop(uid, None)
        self._being_written.pop(uid, None)
        self._late_writes.pop(uid, None)
        if claim is not None and claim.kind == "gang":
            self._gang_pods.difference_update(claim.objects)

    def reserve(self, cells: Iterable[Cell], units: Iterable[Unit]) -> ReservedCells:
        """Return the cells without the room that open claims reserve; note units that another leader may be writing.

        1. A claim whose unit waits reserves what the unit needs on its cells, also if the unit has vanished while our
           own write of it hangs. A unit that is seen to have its cell is subtracted from the cell already.
        2. What another leader has claimed may not be seen here yet, or belong to a suspended service. Its needs are
           unknown, so nothing is free on its cells until the outcome is known, and `is_all_known` is False.
        """
        # By `Cell.id`: the needs of waiting units that have a claim on it.
        taken: dict[str, list[Amounts]] = {}

        # By (uid, pod or process): the claimed cells for which no unit was found yet. The rest of a gang that is
        # admitted in part is a unit with another uid: gangs are found by their pods alone, with an empty uid.
        unaccounted = {
            ("" if claim.kind == "gang" else uid, name): cell
            for uid, claim in self._claims.items()
            for name, cell in zip(claim.objects, claim.cells, strict=False)
        }

        def reserve_parts(unit: Unit) -> None:
            """Take the cells of a unit off `unaccounted`; if the unit waits, add its needs to `taken` there.

            Claimed cells that are in `unaccounted` at the end are of units that are unknown here.
            """
            uid = "" if unit.key.kind == "gang" else unit.uid
            for need, name in zip(unit.parts, unit.objects, strict=False):
                cell_id = unaccounted.pop((uid, name), "")
                if cell_id and unit.state == "waiting":
                    taken.setdefault(cell_id, []).append(need)

        # 1. Reserve what the units need whose claims are open.
        for unit in units if unaccounted else ():
            if unit.key.kind == "gang":
                reserve_parts(unit)
            elif unit.uid in self._claims:
                reserve_parts(unit)
                if unit.state == "waiting":
                    # Another leader may be writing it.
                    self._being_written.setdefault(unit.uid, unit)
        # Units whose write may be under way can be missing in `units`; those found above are not counted again.
        for unit in self._being_written.values():
            reserve_parts(unit)

        # 2. Reserve all of the other claimed cells, since it is not known what is needed there.
        unknown = {*unaccounted.values()}
        reserved = [
            _subtract_reserved(cell, taken.get(cell.id, ()), is_all_claimed=cell.id in unknown)
            if cell.id in taken or cell.id in unknown
            else cell
            for cell in cells
        ]
        return ReservedCells(reserved, is_all_known=not unknown)

    def has_room(self, unit: Unit, names: Sequence[str], find_cell: Callable[[str], Cell | None]) -> bool:
        """Return whether each part of a unit still fits on its cell.

        Planning and earlier writes took time: meanwhile a cell may have gone, closed, or been given to other units,
        whose writes may be under way.

        Args:
            unit: the unit.
            names: `Cell.id` of the cell of each part.
            find_cell: returns a cell as it is now, or None if it is gone.
        """
        taken = self._sum_being_written(unit.uid, names)  # by cell: what other units are being given
        for need, name in zip(unit.parts, names, strict=False):
            cell = find_cell(name)
            if cell is None or cell.closed:
                return False

            free = subtract_amounts(cell.free, taken.get(name, NOTHING))
            if not fits(need, free):
                return False
            # A further part of the unit may go to the same cell.
            taken[name] = add_amounts(taken.get(name, NOTHING), need)
        return True

    def _sum_being_written(self, excluded_uid: str, names: Sequence[str]) -> dict[str, Amounts]:
        """Return what other units are being given on these cells at this moment."""
        sums: dict[str, Amounts] = {}
        for uid, unit in self._being_written.items():
            if uid == excluded_uid:
                continue
            for need, name in zip(unit.parts, self._claims[uid].cells, strict=False):
                if name in names:
                    sums[name] = add_amounts(sums.get(name, NOTHING), need)
        return sums


def _subtract_reserved(cell: Cell, taken: Iterable[Amounts], *, is_all_claimed: bool) -> Cell:
    """Return a cell without the amounts taken; with nothing free at all if an unknown unit may get it."""
    free = functools.reduce(subtract_amounts, taken, cell.free)
    if not is_all_claimed:
        return msgspec.structs.replace(cell, free=free)
    # What is negative stays so: the cell has shrunk.
    nothing = {name: min(0, amount) for name, amount in free.items()}
    return msgspec.structs.replace(cell, free=nothing)
