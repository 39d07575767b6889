"""The time of one round of the queue, on full clusters of pods and of hosts.

Every second node is full with units that may be evicted, of several sizes and priorities; the units that wait are of
many services and shapes, some of them gangs. The figure is the processor's time of the best of three rounds.
"""

import gc
import random
import time
from collections.abc import Callable
from typing import Final

import msgspec

from benchmarks.report import Figure, print_figures
from controller.placement.actions import Admit, EvictUnit
from controller.placement.explanation import RefusalCounter
from controller.placement.planner import PlanRules, Round, plan
from controller.placement.units import TOO_SLOW, Cell, SpeedProfile, Unit, add_by_cell, subtract_amounts
from crds.meta import PRIORITY_RANK
from tests.support.queue_units import gpus, host, node, pod, process

NOW: Final = 1_000_000.0
REPEATS: Final = 3
_PRIORITIES: Final = tuple(PRIORITY_RANK)
_CPUS: Final = (1, 2, 4)
_SLOW: Final = 50.0
"""Tokens/s that some services refuse."""


def build_nodes(count: int, chance: random.Random) -> tuple[list[Cell], list[Unit]]:
    """Return nodes of eight devices, and the pods that run on them; half of the nodes are full."""
    cells: list[Cell] = []
    units: list[Unit] = []
    for number in range(count):
        cell = node(f"node-{number}", total={"nvidia.com/gpu": 8, "memory": 1024, "cpu": 128, "pods": 110})
        left = 8 if number % 2 else chance.randint(1, 8)
        while left:
            size = chance.choice([devices for devices in (1, 2, 4) if devices <= left])
            left -= size
            running = pod(
                f"running-{len(units)}",
                size,
                at=float(len(units)),
                cells=(cell.id,),
                priority=chance.choice(_PRIORITIES),
                evictable_since=NOW - chance.choice([10.0, 10_000.0, 20_000.0]),
                is_protected=not chance.randrange(20),
            )
            units.append(running)
            cell = _take(cell, running)
        cells.append(cell)
    return cells, units


def build_waiting_pods(count: int, chance: random.Random, services: int) -> list[Unit]:
    """Return pods of many shapes that wait, one of twenty of them a gang of two."""
    return [
        pod(
            f"waiting-{number}",
            at=float(number),
            parts=(gpus(chance.choice([1, 2, 4, 8]), chance.choice([8, 64]), chance.choice(_CPUS)),)
            * (2 if number % 20 == 0 else 1),
            service=f"service-{number % services}",
            priority=chance.choice(_PRIORITIES),
        )
        for number in range(count)
    ]


def build_hosts(count: int, waiting: int, chance: random.Random) -> tuple[list[Cell], list[Unit]]:
    """Return hosts with processes, and processes that wait."""
    cells: list[Cell] = []
    units: list[Unit] = []
    for number in range(count):
        cell = host(f"host-{number}", 128, weights=frozenset({f"w{number % 40}"}))
        for _ in range(3):
            running = process(
                f"running-{len(units)}",
                chance.choice([8, 16, 32]),
                cells=(cell.id,),
                priority=chance.choice(_PRIORITIES),
                evictable_since=NOW - 10_000.0,
            )
            units.append(running)
            cell = _take(cell, running)
        cells.append(cell)
    units += [
        process(
            f"waiting-{number}",
            chance.choice(range(4, 100)),
            at=float(number),
            priority=chance.choice(_PRIORITIES),
            weights=f"w{number % 40}",
        )
        for number in range(waiting)
    ]
    return cells, units


def place_all(cells: list[Cell], waiting: list[Unit]) -> int:
    """Play rounds until each unit has a place, and return how many have."""
    placed = 0
    while waiting:
        by_id = {cell.id: cell for cell in cells}
        admitted = {}
        for action in plan(cells, waiting, PlanRules(), NOW).actions:
            if isinstance(action, Admit):
                admitted[action.unit.uid] = action
                cell = by_id[action.cells[0]]
                by_id[cell.id] = _take(cell, msgspec.structs.replace(action.unit, cells=action.cells))
        if not admitted:
            break
        placed += len(admitted)
        cells, waiting = list(by_id.values()), [unit for unit in waiting if unit.uid not in admitted]
    return placed


def build_classes(count: int, classes: int) -> list[Cell]:
    """Return empty nodes of eight devices, of several device classes."""
    total = {"nvidia.com/gpu": 8, "memory": 1024, "cpu": 128, "pods": 110}
    return [node(f"node-{number}", total=total, device_class=f"class-{number % classes}") for number in range(count)]


def build_unlike_pods(count: int, classes: int, chance: random.Random) -> list[Unit]:
    """Return pods of as many services, each with speeds of its own; a tenth of them refuse the slower classes."""
    units = []
    for number in range(count):
        speeds = tuple((f"class-{index}", chance.uniform(5.0, 200.0)) for index in range(classes))
        refused = frozenset((name, TOO_SLOW) for name, speed in speeds if speed < _SLOW) if number % 10 == 0 else ()
        profile = SpeedProfile(speeds, frozenset(refused))
        units.append(pod(f"waiting-{number}", chance.choice([1, 2]), at=float(number), speeds=profile))
    return units


def _take(cell: Cell, unit: Unit) -> Cell:
    free = subtract_amounts(cell.free, add_by_cell(unit.parts, unit.cells)[cell.id])
    return type(cell)(**{**{name: getattr(cell, name) for name in cell.__struct_fields__}, "free": free})


def measure(act: Callable[[], object]) -> float:
    """Return the least seconds of the processor that a call takes."""
    best = float("inf")
    for _ in range(REPEATS):
        gc.collect()
        start = time.process_time()
        act()
        best = min(best, time.process_time() - start)
    return best


def main() -> None:
    """Print the figures."""
    chance = random.Random(1)  # noqa: S311 - to be repeated, not to be secret
    cells, running = build_nodes(1000, chance)
    few = [*running, *build_waiting_pods(500, chance, 100)]
    many = [*running, *build_waiting_pods(10_000, chance, 1000)]
    hosts, processes = build_hosts(200, 1000, chance)
    figures: list[Figure] = []
    made: Round | None = None
    for name, where, units, goal in (
        ("1,000 nodes, 500 waiting", cells, few, 0.5),
        ("1,000 nodes, 10,000 waiting", cells, many, 2.0),
        ("200 hosts, 1,000 waiting", hosts, processes, 1.0),
    ):
        figures.append(Figure(name, measure(lambda: plan(where, units, PlanRules(), NOW)), None, goal, "s"))  # noqa: B023
        made = plan(where, units, PlanRules(), NOW)
        placed = {action.unit.uid for action in made.actions if not isinstance(action, EvictUnit)}
        blocked = [unit for unit in made.queue if unit.uid not in placed]

        def count() -> None:
            counter = RefusalCounter(where, made)  # noqa: B023
            for unit in blocked:  # noqa: B023
                counter.count(unit)

        figures.append(Figure(f"{name}: refusals of {len(blocked)}", measure(count), None, None, "s"))
    empty, unlike = build_classes(1000, 8), build_unlike_pods(1000, 8, chance)
    count_placed = place_all(empty, unlike)
    name = f"{count_placed} of 1,000 services placed by speed on 1,000 nodes of 8 classes"
    figures.append(Figure(name, measure(lambda: place_all(empty, unlike)), None, 2.0, "s"))
    print_figures("one round of the queue", figures)


if __name__ == "__main__":
    main()
