"""The status of each pool: its capacity, its users, and contradictions of its limits."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from controller.placement.pool_limits import (
    DEVICES,
    Measure,
    PoolProblem,
    PoolQuota,
    amount_text,
    find_pool_problems,
    limit_text,
    measure_of,
    sum_amounts,
    sum_of_cell,
)
from controller.placement.pool_table import METAL, PoolTable
from controller.placement.units import MEMORY, Amounts, Cell, Unit
from crds.acceleratorpool import EACH_NAMESPACE

_MOST_NAMED: Final = 3
FindLabels = Callable[[Cell], Mapping[str, str]]


class PoolStanding(NamedTuple):
    """The status of one pool; amounts are devices, or bytes if it has hosts."""

    measure: Measure
    cells: int = 0
    total: int = 0
    used: int = 0
    """All that is not free, whoever uses it."""
    borrowed: int = 0
    lent: int = 0
    waiting: int = 0
    problems: tuple[PoolProblem, ...] = ()


class _PoolUse(NamedTuple):
    """The use of all pools by units."""

    home: Counter[str]
    """Amount that units at home in a pool use of it."""
    borrowed: Counter[str]
    lent: Counter[str]
    waiting: Counter[str]
    by_namespace: Counter[tuple[str, str, Measure]]
    """Amount by namespace and pool."""


def measure_pools(
    table: PoolTable, cells: Sequence[Cell], units: Iterable[Unit], find_labels: FindLabels
) -> Mapping[str, PoolStanding]:
    """Return the status of each AcceleratorPool: its capacity, its use, and contradictions of its spec.

    The first pool of a unit is its home. What the unit uses elsewhere is borrowed by its home and lent by the other
    pool.

    Args:
        table: the pools.
        cells: all cells (nodes and hosts).
        units: all units.
        find_labels: returns the labels of the node or host of a cell.
    """
    # 1. Count the capacity of each pool, and what units use of it.
    use = _count_use(cells, units)
    numbers, totals, free = Counter[str](), Counter[str](), Counter[str]()
    for cell in cells:
        numbers[cell.pool] += 1
        totals[cell.pool] += sum_of_cell(cell, cell.total)
        free[cell.pool] += sum_of_cell(cell, cell.free)

    # 2. Find the contradictions of all pools.
    problems = [
        *find_pool_problems(table.rules, cells),
        *_find_overlaps(table, cells, find_labels),
        *_find_overuse(table, use),
    ]

    # 3. Put these together by pool; of one with an invalid spec, only that is stated.
    standings = {
        refused.name: PoolStanding(DEVICES, problems=(PoolProblem(refused.name, "InvalidSpec", refused.message),))
        for refused in table.refused
    }
    for pool in table.defined:
        name = pool.name
        standings[name] = PoolStanding(
            measure=MEMORY if pool.accelerator == METAL else DEVICES,
            cells=numbers[name],
            total=totals[name],
            used=totals[name] - free[name],
            borrowed=use.borrowed[name],
            lent=use.lent[name],
            waiting=use.waiting[name],
            problems=tuple(problem for problem in problems if problem.pool == name),
        )
    return standings


def _count_use(cells: Iterable[Cell], units: Iterable[Unit]) -> _PoolUse:
    """Return what the placed units use of each pool, and how many units wait there."""
    by_id = {cell.id: cell for cell in cells}
    use = _PoolUse(home=Counter(), borrowed=Counter(), lent=Counter(), waiting=Counter(), by_namespace=Counter())
    for unit in units:
        home = unit.pools[0] if unit.pools else ""
        if unit.state == "waiting":
            if not unit.is_superseded:
                use.waiting[home] += 1
            continue
        for part, cell_id in zip(unit.parts, unit.cells, strict=False):
            if (cell := by_id.get(cell_id)) is not None:
                _add_part(use, part, cell, home, unit.key.namespace)
    return use


def _add_part(use: _PoolUse, part: Amounts, cell: Cell, home: str, namespace: str) -> None:
    """Add to the use what one part of a unit takes of its cell.

    In another pool than its `home`, the unit's home borrows it and the cell's pool lends it.
    """
    amount = sum_amounts([part], measure_of(cell))
    if cell.pool == home:
        use.home[home] += amount
    else:
        use.borrowed[home] += amount
        use.lent[cell.pool] += amount
    use.by_namespace[namespace, cell.pool, MEMORY] += sum_amounts([part], MEMORY)
    use.by_namespace[namespace, cell.pool, DEVICES] += sum_amounts([part], DEVICES)


def _find_overlaps(table: PoolTable, cells: Iterable[Cell], find_labels: FindLabels) -> Iterable[PoolProblem]:
    """Yield a problem for each pool that selects what a pool before it has."""
    contested: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        selecting = table.list_selecting(table.find_accelerator(cell.pool), find_labels(cell))
        # The first one has the cell; the others select it in vain.
        for name in selecting[1:]:
            contested.setdefault((name, selecting[0]), []).append(cell.name)
    for (name, first), names in sorted(contested.items()):
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        named = ", ".join(sorted(names)[:_MOST_NAMED]) + more
        message = f"pool {first} selects {named}, too, and comes first by name: change one nodeSelector"
        yield PoolProblem(name, "Overlap", message)


def _find_overuse(table: PoolTable, use: _PoolUse) -> Iterable[PoolProblem]:
    """Yield a problem for each limit and quota of which more is used than it allows."""
    # 1. Limits of pools.
    for pool in table.defined:
        rules = pool.rules
        measure: Measure = MEMORY if pool.accelerator == METAL else DEVICES
        for field, allowed, used in (
            ("nominal", rules.nominal, use.home[pool.name]),
            ("borrowingLimit", rules.borrowing_limit, use.borrowed[pool.name]),
            ("lendingLimit", rules.lending_limit, use.lent[pool.name]),
        ):
            if allowed is not None and used > allowed:
                yield _describe_overuse(pool.name, f"{field} is", measure, allowed, used)

    # 2. Quotas: that of the namespace itself, else that of each namespace without one of its own.
    quotas = table.quotas
    for (namespace, name, counted), used in sorted(use.by_namespace.items()) if quotas else ():
        quota = quotas.get((namespace, name)) or quotas.get((EACH_NAMESPACE, name)) or PoolQuota()
        allowed = quota.devices if counted == DEVICES else quota.memory_bytes
        if allowed is not None and used > allowed:
            yield _describe_overuse(name, f"the quota of namespace {namespace} is", counted, allowed, used)


def _describe_overuse(pool: str, limit: str, measure: Measure, allowed: int, used: int) -> PoolProblem:
    """Return the problem of a limit, whose words are such as `nominal is`."""
    message = (
        f"{limit} {limit_text(measure, allowed)}, but {amount_text(measure, used)} {'is' if used == 1 else 'are'} in "
        "use: nothing more is admitted until less is; end services, or raise it"
    )
    return PoolProblem(pool, "LimitExceeded", message)
