"""The forecast: the planner's rounds one after the other over changed cells and units, until nothing changes.

What a round decides is assumed to happen: an admitted unit runs, and an evicted one ends and waits at its old place.
When only minimum run times keep units from being evicted, time passes until they are over. So the forecast says what
follows if nobody ends, adds or changes anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from controller.placement.actions import Admit, EvictUnit, Nominate, WithdrawNomination
from controller.placement.board import find_limit, find_reason, may_be_raised
from controller.placement.explanation import RefusalCounter
from controller.placement.planner import PlanRules, Round, plan
from controller.placement.score import CellScore
from controller.placement.standing import WaitFacts, describe_wait, find_lack, find_largest, sort_refusals
from controller.placement.units import CLAIM_SLOT, NOTHING, Amounts, Cell, Nomination, Unit, add_room, subtract_amounts
from crds.queue_status import QueueReason
from devices.vendors import CLAIMED

MOST_ROUNDS: Final = 200
"""Rounds after which a forecast ends. Units are evicted for more important ones only, so it needs far fewer."""
_AGAIN: Final = "/again"

FateState = Literal["runs", "starts", "waits", "ends"]
"""runs: it stays as it is; starts: it is admitted; waits: it has no place; ends: it is not replaced."""


class UnitFate(NamedTuple):
    """The fate of one unit."""

    unit: Unit
    """The unit as it was at first."""
    state: FateState
    cells: tuple[str, ...] = ()
    """`Cell.id` of each part; empty: it waits, or for a node that an autoscaler adds."""
    scores: tuple[CellScore, ...] = ()
    """The scores by which the cells were chosen; none of a place that others made free for it."""
    after_seconds: float = 0.0
    """Time until it starts, as far as minimum run times of others decide it."""
    preemptor: Unit | None = None
    """The unit for which it was evicted first."""
    evicts: tuple[Unit, ...] = ()
    """Units that are evicted for it."""

    @property
    def outcome(self) -> tuple[object, ...]:
        """Facts that must be equal for two fates to be the same."""
        return self.state, self.cells, self.preemptor is not None


class QueueForecast(NamedTuple):
    """The end of a forecast."""

    fates: Mapping[str, UnitFate]
    """By the uid that each unit had at first."""
    round: Round
    """The last round, which decided nothing: why the others wait."""
    cells: tuple[Cell, ...]
    """The cells as they are then."""
    is_complete: bool = True
    """False: the forecast was ended although more would happen."""


def forecast(cells: Iterable[Cell], units: Iterable[Unit], rules: PlanRules, now: float) -> QueueForecast:
    """Plan round after round, and carry each out in memory, until one decides nothing; return the fate of each unit.

    If only minimum run times hold up a decision, time is advanced until they are over. After MOST_ROUNDS rounds, the
    forecast is given up as incomplete.

    Args:
        cells: the cells.
        units: all units.
        rules: the administrator's rules.
        now: the wall clock, in seconds since 1970.
    """
    future = _Future(cells, units, now)
    for _ in range(MOST_ROUNDS):
        made = plan(future.cells.values(), future.units.values(), rules, future.now)
        if future.apply(made):
            continue
        if made.again_seconds is None:  # time alone changes nothing either
            return QueueForecast(future.fates, made, tuple(future.cells.values()))

        # A bit more than that, since the planner compares with a time that floats cannot express to the last digit.
        future.now += made.again_seconds + 0.001
    return QueueForecast(future.fates, made, tuple(future.cells.values()), is_complete=False)


def build_successor(unit: Unit) -> Unit:
    """Return the unit that takes the place of an evicted one: it waits at the old place in the queue, without a cell.

    Its uid is that of the evicted unit with a mark. If it claims devices, it also needs the node's claim slot
    (CLAIM_SLOT), as each pod that waits does.
    """
    parts = unit.parts
    # A pod that waits needs a slot for its claim, too.
    if any(map(_count_claimed, parts)):
        parts = tuple({**part, CLAIM_SLOT: 1} for part in parts)

    # It waits anew, without cells, promise, run time and allocated devices, and it replaces nobody.
    return msgspec.structs.replace(
        unit,
        uid=unit.uid + _AGAIN,
        state="waiting",
        parts=parts,
        freed_beside=NOTHING,
        cells=(),
        nomination=None,
        evictable_since=None,
        replaces=frozenset(),
    )


def _count_claimed(part: Amounts) -> int:
    """Return the number of devices that a part claims."""
    return sum(amount for name, amount in part.items() if name.endswith(CLAIMED))


def _choose_devices(unit: Unit, free: Sequence[Amounts]) -> Unit:
    """Return a unit as it is once the scheduler has chosen the devices that it claims.

    It needs no claim slot any more. A need is a selector of devices, such as by a least memory. Which devices the unit
    has is not known: they may also meet any other need that the cells count. So for each of these needs, its end is
    assumed to free as many devices.

    Args:
        unit: the unit, which gets its cells.
        free: what is free on each of its cells.
    """
    number = sum(map(_count_claimed, unit.parts))
    if not number:
        return unit

    # A cell counts the devices for each need by a name that ends with CLAIMED.
    parts = tuple({name: amount for name, amount in part.items() if name != CLAIM_SLOT} for part in unit.parts)
    other_needs = [name for amounts in free for name in amounts if name.endswith(CLAIMED) and name not in unit.parts[0]]
    return msgspec.structs.replace(unit, parts=parts, freed_beside=dict.fromkeys(other_needs, number))


class _Future:
    """Cells and units at one moment of a forecast."""

    def __init__(self, cells: Iterable[Cell], units: Iterable[Unit], now: float) -> None:
        """Start with the cells and units as they are now; each unit that does not end has a fate, as of now."""
        self._began, self.now = now, now
        self.cells = {cell.id: cell for cell in cells}
        self.units = {unit.uid: unit for unit in units}
        # `first_uid` is the uid without the marks of evictions; no unit has been evicted yet.
        self.fates = {
            first_uid(unit.uid): UnitFate(unit, "waits" if unit.state == "waiting" else "runs", unit.cells)
            for unit in self.units.values()
            if unit.state != "ending"
        }

    def apply(self, made: Round) -> bool:
        """Carry a round out in memory, and end all units that are ending; return whether anything has changed."""
        before = dict(self.units)
        for action in made.actions:
            match action:
                case Admit():
                    self._admit(action)
                case Nominate():
                    self._nominate(action.unit, action.nomination)
                case WithdrawNomination():
                    self._nominate(action.unit, None)
                case EvictUnit():
                    self._evict(action)
        for unit in [candidate for candidate in self.units.values() if candidate.state == "ending"]:
            self._end(unit)
        return self.units != before

    def _admit(self, action: Admit) -> None:
        """Note that a unit runs on its cells, and end one of the earlier units that it replaces in a rollout.

        What the unit takes is subtracted from its cells: the amounts that its later end would free.
        """
        # 1. Let it run.
        free = [self.cells[name].free for name in action.cells]
        unit = msgspec.structs.replace(
            _choose_devices(action.unit, free),
            state="running",
            cells=action.cells,
            nomination=None,
            evictable_since=self.now,
        )
        # `freed`: by cell, what the end of the unit would free there.
        for name, taken in unit.freed.items():
            self._set_free(name, subtract_amounts(self.cells[name].free, taken))
        self.units[unit.uid] = unit
        self._note(unit, state="starts", cells=action.cells, scores=action.scores, after_seconds=self.now - self._began)

        # 2. The rollout ends one earlier unit for each that is admitted.
        earlier = (self.units[uid] for uid in sorted(unit.replaces) if uid in self.units)
        if (replaced := next(earlier, None)) is not None:
            self._replace(replaced)

    def _nominate(self, unit: Unit, nomination: Nomination | None) -> None:
        """Set or remove a unit's nomination, the promise of cells once its victims have ended.

        Those of the victims that the unit replaces end now, as their rollout would end them; the others are evicted by
        actions of their own.
        """
        self.units[unit.uid] = msgspec.structs.replace(unit, nomination=nomination)
        if nomination is None:
            return
        for uid in nomination.victims & unit.replaces:
            if uid in self.units:
                self._replace(self.units[uid])

    def _replace(self, unit: Unit) -> None:
        """End a unit that another one replaces, so that it needs no successor."""
        self._end(unit)
        self._note(unit, state="ends", cells=())

    def _evict(self, action: EvictUnit) -> None:
        """End a unit, let its successor wait, and note both in the fates of victim and preemptor.

        A fate belongs to the uid that a unit had at first, since it gets another one with each eviction.
        """
        victim, preemptor = action.victim, action.preemptor
        if victim.uid not in self.units:
            return

        self._end(victim)
        successor = build_successor(victim)
        self.units[successor.uid] = successor

        # The first unit for which it was evicted stays noted.
        fate = self.fates[first_uid(victim.uid)]
        self._note(victim, state="waits", cells=(), scores=(), preemptor=fate.preemptor or preemptor)
        evicting = self.fates[first_uid(preemptor.uid)]
        self._note(preemptor, evicts=(*evicting.evicts, victim))

    def _end(self, unit: Unit) -> None:
        """Remove a unit, and add what it frees to its cells."""
        for name, room in unit.freed.items():
            if name in self.cells:
                self._set_free(name, add_room(self.cells[name].free, room))
        del self.units[unit.uid]

    def _set_free(self, name: str, free: Mapping[str, int]) -> None:
        """Replace what is free on a cell."""
        self.cells[name] = msgspec.structs.replace(self.cells[name], free=free)

    def _note(self, unit: Unit, **changes: Any) -> None:
        """Change fields of a unit's fate, which belongs to the uid that the unit had at first."""
        uid = first_uid(unit.uid)
        self.fates[uid] = self.fates[uid]._replace(**changes)


def first_uid(uid: str) -> str:
    """Return the uid that a unit had before it was first evicted in the forecast."""
    return uid.partition(_AGAIN)[0]


def simulate_drain(
    cells: Iterable[Cell], units: Iterable[Unit], drained: str
) -> tuple[tuple[Cell, ...], tuple[Unit, ...]]:
    """Return cells (nodes and hosts) and units as if one cell took nothing new, and its units had to go elsewhere.

    Args:
        cells: the cells.
        units: all units.
        drained: `Cell.id` of the cell.
    """
    # 1. Close the cell; the others stay as they are.
    closed = tuple(
        msgspec.structs.replace(cell, closed="Cordoned", closed_message=f"{cell.kind} {cell.name} would be drained")
        if cell.id == drained
        else cell
        for cell in cells
    )

    # 2. End the units that run there, also on other cells if they are gangs; their successors wait.
    free_by_cell = {cell.id: cell.free for cell in closed}
    units_after: list[Unit] = []
    for unit in units:
        if drained not in unit.cells or unit.state != "running":
            units_after.append(unit)
            continue

        units_after.append(build_successor(unit))
        for name, room in unit.freed.items():
            if name in free_by_cell:
                free_by_cell[name] = add_room(free_by_cell[name], room)

    cells_after = tuple(msgspec.structs.replace(cell, free=free_by_cell[cell.id]) for cell in closed)
    return cells_after, tuple(units_after)


def list_differences(before: QueueForecast, after: QueueForecast, concerned: Iterable[str]) -> list[UnitFate]:
    """Return the fates that a change would alter, and those of some units in any case; these first, in queue order.

    Args:
        before: the forecast without the change.
        after: the forecast with it.
        concerned: uids of the units that are shown in any case.
    """
    shown = set(concerned)
    fates = [
        fate
        for uid, fate in after.fates.items()
        if uid in shown or uid not in before.fates or before.fates[uid].outcome != fate.outcome
    ]
    return sorted(fates, key=lambda fate: (first_uid(fate.unit.uid) not in shown, fate.unit.order))


class Wait(NamedTuple):
    """The place of a unit that waits at the end of a forecast, and why it waits."""

    position: int
    """The first is 1; 0: no cell could ever run the unit."""
    length: int
    reason: QueueReason
    message: str


def explain_wait(end: QueueForecast, fate: UnitFate) -> Wait:
    """Return why a unit waits at the end of a forecast, in the words of `status.queue`.

    Its position is that in the queue of its first pool, its home. Units that could never start are not in the queue;
    such a one has position 0.
    """
    made = end.round
    # The unit as the last round had it: with another uid if it was evicted in the forecast.
    uid = first_uid(fate.unit.uid)
    unit = next(candidate for candidate in made.queue if first_uid(candidate.uid) == uid)

    # 1. Its position. `_is_hopeless`: no cell could ever run it, or limits forbid it for good.
    home = fate.unit.pools[:1]
    queue = [candidate for candidate in made.queue if candidate.pools[:1] == home and not _is_hopeless(made, candidate)]
    position = queue.index(unit) + 1 if unit in queue else 0

    # 2. The reason, in words. If `find_reason` knows none, it follows from how many cells refuse the unit, and why.
    counts = sort_refusals(RefusalCounter(end.cells, made).count(unit))
    reason = find_reason(made, unit.uid, unit.nomination) or find_lack(unit, counts)
    largest = find_largest(unit, end.cells) if reason == "NoSuchHardware" else None
    facts = WaitFacts(
        counts=counts,
        largest=largest,
        ahead=max(0, position - 1),
        limit=find_limit(made, unit.uid),
        priority_helps=may_be_raised(made, unit.uid),
    )
    return Wait(position, len(queue), reason, describe_wait(unit, reason, facts))


def _is_hopeless(made: Round, unit: Unit) -> bool:
    """Return whether a unit can never start: no cell could run it, or limits forbid it for good."""
    blockage = made.blocked.get(unit.uid)
    return blockage is not None and not blockage.can_start
