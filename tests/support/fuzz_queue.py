"""Simulated clusters, each round of whose queue is checked: for hours by `make fuzz`, some seeds in each test run."""

import argparse
import random
import sys
import time

from controller.placement.actions import Admit, EvictUnit, WithdrawNomination
from controller.placement.planner import Round, plan
from controller.placement.units import Unit, fits
from tests.support.plain_planner import plan_plainly
from tests.support.queue_invariants import check_round
from tests.support.simulated_queue import SimulatedQueue

ROUNDS = 10
CALM_ROUNDS = 100


def plan_and_check(queue: SimulatedQueue) -> Round:
    """Plan a round, check it, and compare it with the plain form's."""
    cells, units = queue.observe(), list(queue.units.values())
    made = plan(cells, units, queue.rules, queue.now)
    check_round(cells, units, queue.rules, queue.now, made)
    shuffled_cells, shuffled_units = list(cells), list(units)
    random.Random(queue.now).shuffle(shuffled_cells)  # noqa: S311 - to be repeated, not to be secret
    random.Random(queue.now).shuffle(shuffled_units)  # noqa: S311 - to be repeated, not to be secret
    plain = plan_plainly(shuffled_cells, shuffled_units, queue.rules, queue.now)
    assert made[:5] == plain[:5], "the plain form decides otherwise, or the order of the inputs matters"
    check_excess(queue, made)
    return made


def check_excess(queue: SimulatedQueue, made: Round) -> None:
    """Check that units which need more than their limits ever allow change nothing for others."""
    large = {uid for uid, blockage in made.blocked.items() if blockage.exceeds_limits}
    if large:
        others = plan(
            queue.observe(), [unit for uid, unit in queue.units.items() if uid not in large], queue.rules, queue.now
        )
        actions = [
            action
            for action in made.actions
            if not isinstance(action, WithdrawNomination) or action.unit.uid not in large
        ]
        assert actions == list(others.actions), "a unit that can never start changes what others get"


def run_simulation(seed: int) -> SimulatedQueue:
    """Disturb a simulated cluster, then wait until each unit that can run has run."""
    queue = SimulatedQueue(seed)
    for _ in range(ROUNDS):
        queue.disturb()
        units = list(queue.units.values())
        made = plan_and_check(queue)
        is_whole = queue.apply_some(made, may_crash=True)
        again = plan_and_check(queue)
        evicted = {action.victim.uid for action in made.actions if isinstance(action, EvictUnit)}
        evicted_again = {action.victim.uid for action in again.actions if isinstance(action, EvictUnit)}
        is_rolled = any(each.state == "running" and each.uid in queue.rolled for each in units)
        if is_whole and not is_rolled and not has_left_promise(made):
            # I8: only an eviction that was refused is asked for again.
            assert evicted_again <= evicted & queue.refused
    queue.calm_down()
    for _ in range(CALM_ROUNDS):
        made = plan(queue.observe(), queue.units.values(), queue.rules, queue.now)
        waiting = [unit for unit in queue.units.values() if unit.state == "waiting"]
        if all(unit.uid in made.blocked and made.blocked[unit.uid].feasible == 0 for unit in waiting):
            return queue
        queue.apply_some(made, may_crash=False)
        queue.pass_calmly()
    stuck = [unit for unit in waiting if made.blocked.get(unit.uid) is None or made.blocked[unit.uid].feasible]
    held = [unit for unit in stuck if not is_held_for_ever(queue, made, unit)]
    assert held == [], "I5: a unit starves"
    return queue


def has_left_promise(made: Round) -> bool:
    """Return whether a unit left what it was promised: what was kept for it, others get only a round later."""
    for action in made.actions:
        if isinstance(action, EvictUnit) or action.unit.nomination is None:
            continue
        if isinstance(action, WithdrawNomination):
            return True
        cells = action.cells if isinstance(action, Admit) else action.nomination.cells
        if cells != action.unit.nomination.cells:
            return True
    return False


def is_held_for_ever(queue: SimulatedQueue, made: Round, unit: Unit) -> bool:
    """Return whether a unit avoids all cells that could run it, or is larger than a limit allows."""
    blockage = made.blocked.get(unit.uid)
    if blockage is None:
        return False
    if any(not limit.could_ever_fit for limit in blockage.limits):
        return True
    usable = [
        cell
        for cell in queue.observe()
        if cell.pool in unit.pools
        and cell.id not in unit.avoid
        and not unit.refuse(cell)
        and fits(unit.parts[0], cell.total)
    ]
    return not usable or len(unit.parts) > 1


def main() -> None:
    """Try seeds until the time is over, or one."""
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--seed", type=int, help="repeat this seed alone")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    if options.seed is not None:
        run_simulation(options.seed)
        return
    end = time.monotonic() + options.seconds
    first = seed = random.SystemRandom().randrange(10**9)
    admitted = evicted = 0
    while time.monotonic() < end:
        try:
            queue = run_simulation(seed)
        except Exception:
            sys.stdout.write(f"repeat it with: make fuzz SEED={seed}\n")
            raise
        admitted, evicted, seed = admitted + queue.admitted, evicted + queue.evicted, seed + 1
    sys.stdout.write(f"{seed - first} clusters, {admitted} admissions, {evicted} evictions: all invariants held\n")


if __name__ == "__main__":
    main()
