"""The invariants I1 to I9 of the queue, checked on one round; `SimulatedQueue.apply` holds I1 at each admission."""

from collections.abc import Iterable, Mapping, Sequence

from controller.placement.planner import Admit, EvictUnit, Nominate, PlanRules, Round, WithdrawNomination
from controller.placement.pool_limits import PoolLimits, sum_amounts
from controller.placement.units import Amounts, Cell, Unit, add_amounts, add_by_cell, add_room, fits, subtract_amounts


def check_round(cells: Sequence[Cell], units: Sequence[Unit], rules: PlanRules, now: float, made: Round) -> None:
    """Check all that one round promises."""
    check_actions(made)
    check_order(cells, units, rules, made)
    check_promises(cells, units, rules, made)
    check_victims(units, rules, now, made)
    check_promised_room(cells, units, made)
    check_limits(cells, units, rules, made)


def check_actions(made: Round) -> None:
    """Check that a unit is admitted once and whole, and that the actions are about those that wait."""
    admitted = [each.unit.uid for each in made.actions if isinstance(each, Admit)]
    assert len(admitted) == len(set(admitted))
    evicted = [each.victim.uid for each in made.actions if isinstance(each, EvictUnit)]
    assert len(evicted) == len(set(evicted))
    for each in made.actions:
        if isinstance(each, Admit):
            assert len(each.cells) in {0, len(each.unit.parts)}, "a gang is admitted whole"
        if not isinstance(each, EvictUnit):
            assert each.unit.state == "waiting"
        if isinstance(each, WithdrawNomination):
            assert each.unit.uid in made.blocked


def _settled(made: Round) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return the cells of units that were admitted, and those of units that hold a nomination after the round."""
    admitted = {each.unit.uid: each.cells for each in made.actions if isinstance(each, Admit)}
    nominated = {
        unit.uid: unit.nomination.cells
        for unit in made.queue
        if unit.nomination is not None and unit.uid not in admitted and unit.uid not in made.blocked
    }
    nominated |= {each.unit.uid: each.nomination.cells for each in made.actions if isinstance(each, Nominate)}
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
        and not unit.requirement.refuse(cell)
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
        free = by_id[name].free
        for victim in victims:
            free = add_room(free, add_by_cell(victim.parts, victim.cells).get(name, {}))
        for other, needs in settled:
            is_entitled = other.rank < unit.rank or (other.rank == unit.rank and other.nomination is not None)
            free = subtract_amounts(free, needs.get(name, {}) if is_entitled else {})
        assert not fits(need, free), f"{unit.key} lost {name}, which it was promised"


def check_victims(units: Sequence[Unit], rules: PlanRules, now: float, made: Round) -> None:
    """Hold I4: victims are less important, unprotected and old enough, and none of them is needless."""
    for each in made.actions:
        if isinstance(each, EvictUnit):
            victim = each.victim
            age_seconds = abs(now - victim.evictable_since) if victim.evictable_since is not None else 0.0
            assert victim.state == "running"
            assert victim.rank > each.preemptor.rank
            assert not victim.is_protected
            assert age_seconds >= rules.min_run_seconds
    by_uid = {unit.uid: unit for unit in units}
    evicted = {each.victim.uid: each.preemptor.uid for each in made.actions if isinstance(each, EvictUnit)}
    for each in made.actions:
        if not isinstance(each, Nominate):
            continue
        # What others of this round took is not counted as free: a victim that is needless even then was so before.
        victims = [by_uid[uid] for uid in sorted(each.nomination.victims)]
        needs = add_by_cell(each.unit.parts, each.nomination.cells)
        for spared in victims:
            if evicted.get(spared.uid) != each.unit.uid:
                continue
            free = dict(made.left)
            for name, need in needs.items():
                held = _held_of(need, name, victims)
                free[name] = add_room(free[name], held)
                for other in victims:
                    if other is not spared and other.state == "running" and evicted.get(other.uid) == each.unit.uid:
                        free[name] = add_room(free[name], add_by_cell(other.parts, other.cells).get(name, {}))
            assert not all(fits(need, free[name]) for name, need in needs.items()), f"{spared.key} was evicted in vain"


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
    nominations |= {each.unit.uid: each.nomination for each in made.actions if isinstance(each, Nominate)}
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
        if unit.state != "waiting" and unit.cells and unit.cells[0] in by_id:
            limits.add(unit, by_id[unit.cells[0]].pool)
    return limits


def check_limits(cells: Sequence[Cell], units: Sequence[Unit], rules: PlanRules, made: Round) -> None:
    """Hold I9: what is admitted or promised keeps to quotas, lending and borrowing; what ran before may be above."""
    by_id = {cell.id: cell for cell in cells}
    admitted, nominated = _settled(made)
    replaced = {uid for unit in made.queue for uid in unit.replaces}
    replaced |= {
        each.uid
        for each in units
        for unit in made.queue
        if unit.uid in nominated and unit.nomination is not None and each.uid in unit.nomination.victims
        if each.state == "ending" and each.service == unit.service
    }
    settled = {**admitted, **nominated}
    holding = [unit for unit in units if unit.state != "waiting" and unit.cells and unit.uid not in replaced]

    def use(namespace: str, pool: str, uids: bool) -> int:
        found = [(unit, unit.cells) for unit in holding]
        found += [(unit, settled[unit.uid]) for unit in made.queue if uids and settled.get(unit.uid)]
        return sum(
            sum_amounts(unit.parts, "devices")
            for unit, places in found
            if unit.key.namespace == namespace and places[0] in by_id and by_id[places[0]].pool == pool
        )

    for (namespace, pool), quota in rules.quotas.items():
        if quota.devices is not None:
            before, after = use(namespace, pool, False), use(namespace, pool, True)
            assert after <= max(before, quota.devices), f"{namespace} uses {after} devices of {pool}"
    for pool, limit in rules.pools.items():
        if limit.lending_limit is None:
            continue
        borrowed = [unit for unit in made.queue if settled.get(unit.uid) and unit.pools[0] != pool]
        lent = [unit for unit in borrowed if by_id[settled[unit.uid][0]].pool == pool]
        lent_before = [
            unit
            for unit in holding
            if unit.pools[0] != pool and unit.cells[0] in by_id and by_id[unit.cells[0]].pool == pool
        ]
        before = sum(sum_amounts(unit.parts, "devices") for unit in lent_before)
        added = sum(sum_amounts(unit.parts, "devices") for unit in lent)
        assert before + added <= max(before, limit.lending_limit), f"{pool} lends {before + added}"
