"""The estimated starts of `controller/placement/start_estimate.py`, over a simulated day of each of several mixes.

Services arrive, wait, run and end; the real planner decides every 20 seconds. Each range that is given is compared with
the real start: 80 % must be in their range, whose upper end is at most three times as far away as the lower one. How
often a range is given at all has no goal: one that cannot be narrow is not given. `SEED=1` is another day.
"""

import heapq
import os
import random
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from benchmarks.report import Figure, print_figures
from controller.placement.actions import Admit, EvictUnit, Nominate, WithdrawNomination
from controller.placement.planner import PlanRules, Round, plan
from controller.placement.start_estimate import WIDEST, StartRange, measure_need
from controller.placement.start_history import StartEstimator, UnitStart
from controller.placement.units import MEMORY, Cell, HostRequirement, NodeRequirement, Unit, UnitKey
from crds.meta import Priority
from crds.size import GIB
from kube.resources import ObjectKey

HOURS: Final = 24
HOUR_SECONDS: Final = 3600.0
SHARE_GOAL: Final = 80.0
STEP_SECONDS: Final = 20.0
"""Time between two rounds; all that happens in between is decided at once."""
DRAIN_SECONDS: Final = 40.0
DAY: Final = range(8, 18)
"""Hours in which more arrives."""
DAY_LOAD: Final = 1.6
NIGHT_LOAD: Final = 0.6
GPU: Final = "nvidia.com/gpu"


class Mix(NamedTuple):
    """A pool and what comes to it."""

    name: str
    cells: int
    size: int
    """Devices of a node, or GiB of a host."""
    needs: tuple[int, ...]
    """Needs of units, each as likely as the others."""
    run_seconds: Callable[[random.Random], float]
    mean_run_seconds: float
    load: float
    """Arriving work, as a multiple of what the pool can do."""
    priorities: tuple[Priority, ...] = ("normal",)
    is_daily: bool = False
    """More arrives by day than by night."""
    resource: str = GPU


def draw_exponential(mean: float) -> Callable[[random.Random], float]:
    """Return a source of times that forget how long they have lasted."""
    return lambda rng: rng.expovariate(1 / mean)


def draw_lognormal(mean: float, sigma: float) -> Callable[[random.Random], float]:
    """Return a source of times of which a few are much longer than most."""
    return lambda rng: mean * rng.lognormvariate(-sigma * sigma / 2, sigma)


MIXES: Final = (
    Mix("one device each", 8, 8, (1,), draw_exponential(1800), 1800, 1.05),
    Mix("1 to 8 devices", 16, 8, (1, 1, 1, 2, 2, 4, 8), draw_exponential(1800), 1800, 1.0),
    Mix("3 priorities", 16, 8, (1, 1, 2, 4), draw_lognormal(2400, 1.0), 2400, 1.0, ("high", *("normal",) * 6, "low")),
    Mix("days and nights", 16, 8, (1, 2), draw_lognormal(1800, 0.7), 1800, 0.9, is_daily=True),
    Mix("runs of equal length", 8, 8, (1,), lambda rng: rng.uniform(1700, 1900), 1800, 1.05),
    Mix("hosts", 24, 96, (12, 24, 48), draw_lognormal(2700, 0.8), 2700, 1.02, resource=MEMORY),
)


class GivenRange(NamedTuple):
    """A range that was given for a unit at some time."""

    uid: str
    at: float
    range: StartRange


class SimulatedDay:
    """One simulated day of a mix."""

    def __init__(self, mix: Mix, seed: int = 0) -> None:
        self.mix = mix
        self.starts: list[UnitStart] = []
        self.given: list[GivenRange] = []
        self.asked: set[str] = set()
        """Units that have waited."""
        self._rng = random.Random(seed)  # noqa: S311 - a day that can be repeated
        self._is_host = mix.resource == MEMORY
        self._unit_size = GIB if self._is_host else 1
        self._units: dict[str, Unit] = {}
        self._ends: list[tuple[float, str]] = []
        self._run_seconds: dict[str, float] = {}
        self._last_given: dict[str, StartRange] = {}
        self._count = 0
        self._arrives_at = 0.0
        self._estimator = StartEstimator(self.starts.append)

    def run(self) -> None:
        """Simulate the day."""
        now = 0.0
        while now < HOURS * HOUR_SECONDS:
            now += STEP_SECONDS
            self._end_units(now)
            while self._arrives_at <= now:
                self._add_arrival()
            cells = self._list_cells()
            decided = plan(cells, list(self._units.values()), PlanRules(), now)
            evicted = self._carry_out(decided, now)
            self._estimator.observe(self._units.values(), evicted, {cell.id: cell.pool for cell in cells}, now)
            self._ask(decided, now)

    def _arrivals_per_second(self) -> float:
        mix = self.mix
        mean_need = sum(mix.needs) / len(mix.needs)
        rate = mix.load * mix.cells * mix.size / mean_need / mix.mean_run_seconds
        if not mix.is_daily:
            return rate
        return rate * (DAY_LOAD if int(self._arrives_at / HOUR_SECONDS) % HOURS in DAY else NIGHT_LOAD)

    def _add_arrival(self) -> None:
        self._count += 1
        uid, rng = f"u{self._count:06}", self._rng
        self._units[uid] = Unit(
            key=UnitKey("process" if self._is_host else "pod", "team", uid),
            uid=uid,
            service=ObjectKey("team", uid),
            priority=rng.choice(self.mix.priorities),
            enqueued_at=self._arrives_at,
            parts=({self.mix.resource: rng.choice(self.mix.needs) * self._unit_size},),
            pools=("pool",),
            requirement=HostRequirement("llama.cpp", "team") if self._is_host else NodeRequirement("any", {}),
        )
        self._run_seconds[uid] = self.mix.run_seconds(rng)
        self._arrives_at += rng.expovariate(self._arrivals_per_second())

    def _end_units(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, uid = heapq.heappop(self._ends)
            unit = self._units.pop(uid, None)
            if unit is not None and unit.state == "ending":
                # It was evicted: its successor waits at the old place.
                self._count += 1
                successor = f"u{self._count:06}"
                self._run_seconds[successor] = self._run_seconds[uid]
                self._units[successor] = msgspec.structs.replace(
                    unit, uid=successor, state="waiting", cells=(), evictable_since=None, nomination=None
                )

    def _list_cells(self) -> list[Cell]:
        kind, total = "host" if self._is_host else "node", self.mix.size * self._unit_size
        free = {f"{kind}/n{number}": total for number in range(self.mix.cells)}
        for unit in self._units.values():
            for cell in unit.cells:
                free[cell] -= unit.parts[0][self.mix.resource]
        return [
            Cell(
                name=cell.partition("/")[2],
                kind="host" if self._is_host else "node",
                pool="pool",
                total={self.mix.resource: total},
                free={self.mix.resource: amount},
                node={"metadata": {"labels": {}}, "spec": {}},
                runtimes=frozenset({"llama.cpp"}),
            )
            for cell, amount in free.items()
        ]

    def _carry_out(self, decided: Round, now: float) -> set[str]:
        """Carry out a round; return the units that are evicted."""
        evicted = set()
        for action in decided.actions:
            if isinstance(action, Admit):
                uid = action.unit.uid
                self._change(uid, state="running", cells=action.cells, evictable_since=now, nomination=None)
                heapq.heappush(self._ends, (now + self._run_seconds[uid], uid))
            elif isinstance(action, Nominate):
                self._change(action.unit.uid, nomination=action.nomination)
            elif isinstance(action, WithdrawNomination):
                self._change(action.unit.uid, nomination=None)
            elif isinstance(action, EvictUnit):
                evicted.add(action.victim.uid)
                self._change(action.victim.uid, state="ending")
                heapq.heappush(self._ends, (now + DRAIN_SECONDS, action.victim.uid))
        return evicted

    def _change(self, uid: str, **fields: object) -> None:
        self._units[uid] = msgspec.structs.replace(self._units[uid], **fields)

    def _ask(self, decided: Round, now: float) -> None:
        """Ask when each unit starts that still waits, as the board does."""
        needed = 0
        for queued in decided.queue:
            unit = self._units[queued.uid]
            if unit.state != "waiting" or unit.nomination is not None:
                continue
            lane, amount = measure_need(unit)
            needed += amount
            self.asked.add(unit.uid)
            estimate = self._estimator.estimate(unit, lane, needed, now)
            if isinstance(estimate, StartRange) and estimate != self._last_given.get(unit.uid):
                self._last_given[unit.uid] = estimate
                self.given.append(GivenRange(unit.uid, now, estimate))


def measure_day(mix: Mix, seed: int) -> list[Figure]:
    """Simulate one day and return its figures."""
    day = SimulatedDay(mix, seed)
    day.run()
    started = {start.unit.uid: start.started_at for start in day.starts}
    judged = [given for given in day.given if given.uid in started]
    held = sum(given.range.earliest <= started[given.uid] <= given.range.latest for given in judged)
    widest = max(
        ((given.range.latest - given.at) / (given.range.earliest - given.at) for given in day.given),
        default=0.0,
    )
    outcomes = [start.outcome for start in day.starts if start.unit.uid in day.asked]
    first = len(outcomes) - outcomes.count("none")
    name = mix.name
    return [
        Figure(
            f"{name}: ranges with the start", 100 * held / max(1, len(judged)), None, SHARE_GOAL, "%", at_least=True
        ),
        Figure(
            f"{name}: first ranges with the start",
            100 * outcomes.count("in_range") / max(1, first),
            None,
            SHARE_GOAL,
            "%",
            at_least=True,
        ),
        Figure(f"{name}: upper by lower end, widest", widest, None, WIDEST, ""),
        Figure(f"{name}: waits with a range", 100 * first / max(1, len(outcomes)), None, None, "%"),
    ]


def main() -> None:
    """Print the figures of each mix as it is simulated."""
    for mix in MIXES:
        print_figures(f"Estimated starts of a day: {mix.name}", measure_day(mix, int(os.environ.get("SEED", "0"))))


if __name__ == "__main__":
    main()
