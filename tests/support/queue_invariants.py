"""The invariants I1 to I9 of the queue, checked on one round; `SimulatedQueue.apply` holds I1 at each admission."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from controller.placement.actions import Admit, EvictUnit, Nominate, WithdrawNomination
from controller.placement.planner import PlanRules, Round
from controller.placement.pool_limits import LimitKey, Measure, PoolLimits, PoolRules, sum_amounts
from controller.placement.units import Amounts, Cell, Unit, add_amounts, add_by_cell, add_room, fits, subtract_amounts


def check_round(cells: Sequence[Cell], units: Sequence[Unit], rules: PlanRules, now: float, made: Round) -> None:
    """Check all that one round promises."""
    check_actions(made)
    check_order(cells, units, rules, made)
    check_promises(cells, units, rules, made)
    check_victims(cells, units, rules, now, made)
    check_promised_room(cells, units, made)
    check_limits(cells, units, rules, made)
    check_first_blocked(cells, units, rules, now, made)


def check_actions(made: Round) -> None:
    """Check that a unit is admitted once and whole, and that the actions are about those that wait."""
    admitted = [action.unit.uid for action in made.actions if isinstance(action, Admit)]
    assert len(admitted) == len(set(admitted))
    evicted = [action.victim.uid for action in made.actions if isinstance(action, EvictUnit)]
    assert len(evicted) == len(set(evicted))
    for action in made.actions:
        if isinstance(action, Admit):
            assert len(action.cells) in {0, len(action.unit.parts)}, "a gang is admitted whole"
        if not isinstance(action, EvictUnit):
            assert action.unit.state == "waiting"
        if isinstance(action, WithdrawNomination):
            assert action.unit.uid in made.blocked


def _settled(made: Round) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return the cells of units that were admitted, and those of units that hold a nomination after the round."""
    admitted = {action.unit.uid: action.cells for action in made.actions if isinstance(action, Admit)}
    nominated = {
        unit.uid: unit.nomination.cells
        for unit in made.queue
        if unit.nomination is not None and unit.uid not in admitted and unit.uid not in made.blocked
    }
    nominated |= {action.unit.uid: action.nomination.cells for action in made.actions if isinstance(action, Nominate)}
    return admitted, nominated


def check_order(cells: Sequence[Cell], units: Iterable[Unit], rules: PlanRules, made: Round) -> None:
    """Hold I2 and I3: no unit passes one that is ahead of it, waits, and could use its cell."""
    by_id = {cell.id: cell for cell in cells}
    before = _count_limits(by_id, units, rules)
    admitted, nominated = _settled(made)
    settled = admitted.keys() | nominated.keys()
    places = {unit.uid: unit.cells for unit in units}
    for number, ahead in enumerate(made.queue):
        if ahead.uid in settled or len(ahead.parts) > 1:
            continue
        for later in made.queue[number + 1 :]:
            if later.nomination is not None or (later.rank > ahead.rank and not later.is_protected):
                continue
            own = {name for uid in later.replaces for name in places.get(uid, ())}
            for name in (*admitted.get(later.uid, ()), *nominated.get(later.uid, ())):
                could_use = name not in own and _could_use(ahead, by_id[name])
                if could_use and before.find_refusal(ahead, by_id[name].pool) is None:
                    refusal = made.limits.find_refusal(ahead, by_id[name].pool)
                    assert refusal is not None, f"{later.key} passed {ahead.key} on {name}"


def _could_use(unit: Unit, cell: Cell) -> bool:
    return (
        cell.pool in unit.pools
        and cell.id not in unit.avoid
        and not cell.closed
        and not unit.refuse(cell)
        and fits(unit.parts[0], cell.total)
    )


def check_promises(cells: Sequence[Cell], units: Iterable[Unit], rules: PlanRules, made: Round) -> None:
    """Hold that no unit loses what it was promised to one of its priority, however long that has waited."""
    if rules.pools or rules.quotas:
        return  # a limit may be what it lost
    by_id, by_uid = {cell.id: cell for cell in cells}, {unit.uid: unit for unit in units}
    admitted, nominated = _settled(made)
    settled = [(by_uid[uid], add_by_cell(by_uid[uid].parts, names)) for uid, names in (admitted | nominated).items()]
    for unit in made.queue:
        is_kept = unit.uid in admitted or nominated.get(unit.uid) == (unit.nomination and unit.nomination.cells)
        if unit.nomination is None or is_kept or len(unit.parts) > 1:
            continue
        name, need = unit.nomination.cells[0], unit.parts[0]
        victims = [by_uid[uid] for uid in unit.nomination.victims if uid in by_uid]
        if name not in by_id or not _could_use(unit, by_id[name]) or any(each.state != "ending" for each in victims):
            continue
        if any(each.uid in other.replaces for other in made.queue if other.rank < unit.rank for each in victims):
            continue  # the whole place of a victim is for its successor
        free = by_id[name].free
        for victim in victims:
            free = add_room(free, add_by_cell(victim.parts, victim.cells).get(name, {}))
        for other, needs in settled:
            is_entitled = other.rank < unit.rank or (other.rank == unit.rank and other.nomination is not None)
            free = subtract_amounts(free, needs.get(name, {}) if is_entitled else {})
        assert not fits(need, free), f"{unit.key} lost {name}, which it was promised"


def _may_evict(preemptor: Unit, victim: Unit, pool: str, rules: PlanRules, now: float) -> bool:
    age_seconds = abs(now - victim.evictable_since) if victim.evictable_since is not None else rules.min_run_seconds
    return (
        victim.state == "running"
        and victim.rank > preemptor.rank
        and not victim.is_protected
        and age_seconds >= rules.min_run_seconds
        and (victim.pools[0] != pool or preemptor.pools[0] == pool)
    )


def check_victims(cells: Sequence[Cell], units: Sequence[Unit], rules: PlanRules, now: float, made: Round) -> None:
    """Hold I4: victims are less important, unprotected and old enough, and none of them is needless."""
    by_id = {cell.id: cell for cell in cells}
    for action in made.actions:
        if isinstance(action, EvictUnit):
            assert _may_evict(action.preemptor, action.victim, _find_pool(action.victim, by_id, rules), rules, now)
    before = _count_limits(by_id, units, rules)
    by_uid = {unit.uid: unit for unit in units}
    evicted = {action.victim.uid: action.preemptor.uid for action in made.actions if isinstance(action, EvictUnit)}
    for action in made.actions:
        if not isinstance(action, Nominate):
            continue
        # What others of this round took is not counted as free: a victim that is needless even then was so before.
        victims = [by_uid[uid] for uid in sorted(action.nomination.victims)]
        needs = add_by_cell(action.unit.parts, action.nomination.cells)
        for spared in victims:
            if evicted.get(spared.uid) != action.unit.uid:
                continue
            free = dict(made.left)
            for name, need in needs.items():
                held = _held_of(need, name, victims)
                free[name] = add_room(free[name], held)
                for other in victims:
                    if other is not spared and other.state == "running" and evicted.get(other.uid) == action.unit.uid:
                        free[name] = add_room(free[name], add_by_cell(other.parts, other.cells).get(name, {}))
            others = [other for other in victims if other is not spared and evicted.get(other.uid) == action.unit.uid]
            lacking = made.limits.list_lacking(action.unit, by_id[action.nomination.cells[0]].pool)
            is_within = _keeps_to_limits(action.unit, lacking, before, victims, others)
            has_room = all(fits(need, free[name]) for name, need in needs.items())
            assert not (has_room and is_within), f"{spared.key} was evicted in vain"


def _keeps_to_limits(
    unit: Unit,
    lacking: Mapping[LimitKey, int] | None,
    before: PoolLimits,
    victims: Sequence[Unit],
    others: Sequence[Unit],
) -> bool:
    """Return whether a nominated unit, which the limits count, keeps to them if only some of its victims end."""
    for key, lack in (lacking or {}).items():
        given = sum(before.freed_by(victim.uid, key) for victim in victims)
        held = max(0, sum_amounts(unit.parts, key.measure) - given)
        if lack > held + sum(before.freed_by(other.uid, key) for other in others):
            return False
    return lacking is not None


def _held_of(need: Amounts, name: str, victims: Iterable[Unit]) -> Amounts:
    """Return what a nomination took from what was free on a cell: the need without the room of its victims."""
    room: Amounts = {}
    for victim in victims:
        room = add_amounts(room, add_by_cell(victim.parts, victim.cells).get(name, {}))
    return {resource: max(0, amount - room.get(resource, 0)) for resource, amount in need.items()}


def check_promised_room(cells: Sequence[Cell], units: Iterable[Unit], made: Round) -> None:
    """Hold I7: what is admitted and promised on a cell is there, or held by units that end for it."""
    by_uid = {unit.uid: unit for unit in units}
    admitted, nominated = _settled(made)
    parts = {unit.uid: unit.parts for unit in made.queue}
    taken: dict[str, Amounts] = {}
    for uid, places in (*admitted.items(), *nominated.items()):
        for name, need in add_by_cell(parts[uid], places).items():
            taken[name] = add_amounts(taken.get(name, {}), need)
    waited_for: set[str] = set()
    nominations = {unit.uid: unit.nomination for unit in made.queue if unit.nomination is not None}
    nominations |= {action.unit.uid: action.nomination for action in made.actions if isinstance(action, Nominate)}
    for uid in nominated:
        waited_for |= nominations[uid].victims
    free = {cell.id: cell.free for cell in cells}
    for victim in (by_uid[uid] for uid in sorted(waited_for) if uid in by_uid):
        for name, room in add_by_cell(victim.parts, victim.cells).items():
            if name in free:
                free[name] = add_room(free[name], room)
    for name, need in taken.items():
        assert fits(need, free[name]), f"{name} is promised {need} of {free[name]}"


def _count_limits(by_id: Mapping[str, Cell], units: Iterable[Unit], rules: PlanRules) -> PoolLimits:
    limits = PoolLimits(rules.pools, rules.quotas)
    for unit in units:
        if unit.state != "waiting":
            limits.add_holder(unit, _find_pool(unit, by_id, rules))
    return limits


def _find_pool(unit: Unit, by_id: Mapping[str, Cell], rules: PlanRules) -> str:
    current = (by_id[name].pool for name in unit.cells if name in by_id)
    elastic = (pool for pool in unit.pools if rules.pools.get(pool, PoolRules()).elastic)
    return next(chain(current, elastic, unit.pools))


_Placed = Sequence[tuple[Unit, str]]
"""Units with the pools in which they are."""


def check_limits(cells: Sequence[Cell], units: Sequence[Unit], rules: PlanRules, made: Round) -> None:
    """Hold I9: what is admitted keeps to all limits, and what is promised once its victims have ended.

    What ran before may be above.
    """
    by_id = {cell.id: cell for cell in cells}
    admitted, nominated = _settled(made)
    replaced = {uid for unit in made.queue for uid in unit.replaces}
    leaving = _list_promised_victims(made, nominated)

    def find_placed(places: Iterable[tuple[Unit, Sequence[str]]]) -> _Placed:
        return [(unit, by_id[names[0]].pool) for unit, names in places if names and names[0] in by_id]

    holding = find_placed((each, each.cells) for each in units if each.state != "waiting" and each.uid not in replaced)
    staying = [(unit, pool) for unit, pool in holding if unit.uid not in leaving]
    new = find_placed((unit, admitted.get(unit.uid, ())) for unit in made.queue)
    promised = find_placed((unit, nominated.get(unit.uid, ())) for unit in made.queue)
    for name, allowed, count in _list_limits(rules):
        assert count([*holding, *new]) <= max(count(holding), allowed), f"{name} is exceeded"
        assert count([*staying, *new, *promised]) <= max(count(staying), allowed), f"{name} will be exceeded"


def _list_promised_victims(made: Round, nominated: Iterable[str]) -> set[str]:
    nominations = {unit.uid: unit.nomination for unit in made.queue if unit.nomination is not None}
    nominations |= {action.unit.uid: action.nomination for action in made.actions if isinstance(action, Nominate)}
    return {victim for uid in nominated for victim in nominations[uid].victims}


def _list_limits(rules: PlanRules) -> Iterator[tuple[str, int, Callable[[_Placed], int]]]:
    """Yield each limit by name, with what it allows and a count of what units use of it."""
    for (namespace, pool), quota in rules.quotas.items():
        measures: tuple[tuple[Measure, int | None], ...] = (("devices", quota.devices), ("memory", quota.memory_bytes))
        for measure, allowed in measures:
            if allowed is not None:
                count = partial(_count_those, measure, partial(_is_in_quota, namespace, pool))
                yield f"the quota of {measure} of {namespace} in {pool}", allowed, count
    for pool, limit in rules.pools.items():
        measure = "memory" if pool == "metal" else "devices"
        for field, allowed, is_counted in (
            ("nominal", limit.nominal, _is_at_home),
            ("lendingLimit", limit.lending_limit, _is_lent),
            ("borrowingLimit", limit.borrowing_limit, _is_borrowed),
        ):
            if allowed is not None:
                yield f"{field} of {pool}", allowed, partial(_count_those, measure, partial(is_counted, pool))


def _is_in_quota(namespace: str, limited: str, unit: Unit, pool: str) -> bool:
    return (unit.key.namespace, pool) == (namespace, limited)


def _is_at_home(limited: str, unit: Unit, pool: str) -> bool:
    return unit.pools[0] == pool == limited


def _is_lent(limited: str, unit: Unit, pool: str) -> bool:
    return pool == limited != unit.pools[0]


def _is_borrowed(limited: str, unit: Unit, pool: str) -> bool:
    return unit.pools[0] == limited != pool


def _count_those(measure: Measure, is_counted: Callable[[Unit, str], bool], placed: _Placed) -> int:
    return sum(sum_amounts(unit.parts, measure) for unit, pool in placed if is_counted(unit, pool))


def check_first_blocked(
    cells: Sequence[Cell], units: Sequence[Unit], rules: PlanRules, now: float, made: Round
) -> None:
    """Check that the first unit which waits could not start if all ended that may end for it."""
    admitted, nominated = _settled(made)
    settled = admitted.keys() | nominated.keys()
    waiting = (unit for unit in made.queue if unit.uid not in settled)
    unit = next(
        (
            candidate
            for candidate in waiting
            if candidate.uid not in made.blocked or made.blocked[candidate.uid].feasible
        ),
        None,
    )
    if unit is None or unit.uid not in made.blocked or len(unit.parts) > 1:
        return
    by_id = {cell.id: cell for cell in cells}
    gone = _list_promised_victims(made, nominated)
    gone |= {action.victim.uid for action in made.actions if isinstance(action, EvictUnit)}
    usable = [
        other
        for other in units
        if other.uid not in gone
        and (other.state == "ending" or _may_evict(unit, other, _find_pool(other, by_id, rules), rules, now))
    ]
    before = _count_limits(by_id, units, rules)
    promised = {
        (name, other.pools[0])
        for other in made.queue
        if other.nomination is not None
        for name in other.nomination.cells
    }
    for cell in cells:
        lacking = made.limits.list_lacking(unit, cell.pool)
        is_for_owner = (cell.id, cell.pool) in promised and unit.pools[0] != cell.pool
        if not _could_use(unit, cell) or lacking is None or is_for_owner:
            continue
        room = made.left[cell.id]
        for other in usable:
            room = add_room(room, add_by_cell(other.parts, other.cells).get(cell.id, {}))
        is_within = all(
            lack <= sum(before.freed_by(other.uid, key) for other in usable) for key, lack in lacking.items()
        )
        assert not (is_within and fits(unit.parts[0], room)), f"{unit.key} could have {cell.id}"
