"""The estimated starts of `controller/placement/start_estimate.py`, over a simulated day of each of several mixes.

Services arrive, wait, run and end; the real planner decides after each change. Each range that is given is compared with
the real start: 80 % must be in their range, whose upper end is at most three times as far away as the lower one. How
often a range is given at all has no goal: one that cannot be narrow is not given.
"""

import heapq
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec

from benchmarks.report import Figure, print_figures
from controller.placement.planner import Admit, Evict, Nominate, PlanRules, Withdraw, plan
from controller.placement.start_estimate import WIDEST, StartRange, measure_need
from controller.placement.start_history import StartEstimator, UnitStart
from controller.placement.units import MEMORY, Amounts, Cell, HostRequirement, NodeRequirement, Unit, UnitKey
from crds.meta import Priority
from crds.size import GIB
from kube.resources import ObjectKey

HOURS: Final = 24
GOAL: Final = 0.8
STEP_SECONDS: Final = 20.0
"""Time between two rounds; all that happens in between is decided at once."""
DRAIN_SECONDS: Final = 40.0
GPU: Final = "nvidia.com/gpu"

Draw = Callable[[random.Random], float]


class Mix(NamedTuple):
    """A pool and what comes to it."""

    name: str
    cells: int
    size: int
    """What each cell has: devices, or GiB of memory of a host."""
    needs: tuple[int, ...]
    """Needs of units, each as likely as the others."""
    run_seconds: Draw
    load: float
    """Arriving work, as a multiple of what the pool can do."""
    mean_run_seconds: float
    priorities: tuple[Priority, ...] = ("normal",)
    is_daily: bool = False
    """More arrives by day than by night."""
    resource: str = GPU


def _lognormal(mean: float, sigma: float) -> Draw:
    return lambda rng: mean * rng.lognormvariate(-sigma * sigma / 2, sigma)


MIXES: Final = (
    Mix("one device each", 16, 8, (1,), lambda rng: rng.expovariate(1 / 1800), 1.05, 1800),
    Mix("1 to 8 devices", 16, 8, (1, 1, 1, 2, 2, 4, 8), lambda rng: rng.expovariate(1 / 1800), 1.0, 1800),
    Mix(
        "priorities",
        16,
        8,
        (1, 1, 2, 4),
        _lognormal(2400, 1.0),
        1.0,
        2400,
        priorities=("high", *("normal",) * 6, "low"),
    ),
    Mix("days and nights", 24, 8, (1, 2), _lognormal(1800, 0.7), 0.95, 1800, is_daily=True),
    Mix("equal runs", 8, 8, (1,), lambda rng: rng.uniform(1700, 1900), 1.05, 1800),
    Mix("hosts", 40, 96, (12, 24, 48), _lognormal(2700, 0.8), 1.05, 2700, resource=MEMORY),
)


class _Given(NamedTuple):
    uid: str
    at: float
    range: StartRange


class Day:
    """One simulated day of a mix."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self.mix = mix
        self._rng = random.Random(seed)
        self._units: dict[str, Unit] = {}
        self._free = {f"node/n{number}": mix.size for number in range(mix.cells)}
        self._ends: list[tuple[float, str]] = []
        self._run_seconds: dict[str, float] = {}
        self._count = 0
        self._arrives_at = 0.0
        self.starts: list[UnitStart] = []
        self.given: list[_Given] = []
        self.started_at: dict[str, float] = {}
        self.asked: set[str] = set()
        """Units for which an estimate was wanted, as they waited for more than one round."""
        self._estimator = StartEstimator(self._note_start)

    def run(self, hours: float = HOURS) -> None:
        """Simulate the day."""
        now = 0.0
        while now < hours * 3600:
            now += STEP_SECONDS
            self._end_runs(now)
            while self._arrives_at <= now:
                self._arrive()
            self._decide(now)

    def _note_start(self, start: UnitStart) -> None:
        self.starts.append(start)
        self.started_at[start.unit.uid] = start.started_at

    def _rate(self) -> float:
        mix = self.mix
        mean_need = sum(mix.needs) / len(mix.needs)
        rate = mix.load * mix.cells * mix.size / mean_need / mix.mean_run_seconds
        hour = self._arrives_at / 3600 % 24
        return rate * (1.6 if 8 <= hour < 18 else 0.6) if mix.is_daily else rate

    def _arrive(self) -> None:
        self._count += 1
        uid, rng = f"u{self._count:06}", self._rng
        is_host = self.mix.resource == MEMORY
        need: Amounts = {self.mix.resource: rng.choice(self.mix.needs) * (GIB if is_host else 1)}
        self._units[uid] = Unit(
            key=UnitKey("process" if is_host else "pod", "team", uid),
            uid=uid,
            service=ObjectKey("team", uid),
            priority=rng.choice(self.mix.priorities),
            enqueued_at=self._arrives_at,
            parts=(need,),
            pools=("pool",),
            requirement=HostRequirement("llama.cpp", "team") if is_host else NodeRequirement("any", {}),
        )
        self._run_seconds[uid] = self.mix.run_seconds(rng)
        self._arrives_at += rng.expovariate(self._rate())

    def _end_runs(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, uid = heapq.heappop(self._ends)
            unit = self._units.pop(uid, None)
            if unit is None:
                continue
            if unit.state == "ending":
                # It is gone, and its successor waits at the old place for the rest of its run.
                self._count += 1
                again = f"{uid.partition('-')[0]}-{self._count}"
                self._run_seconds[again] = self._run_seconds[uid]
                self._units[again] = msgspec.structs.replace(
                    unit, uid=again, state="waiting", cells=(), evictable_since=None, nomination=None
                )

    def _decide(self, now: float) -> None:
        mix = self.mix
        is_host = mix.resource == MEMORY
        unit_size = GIB if is_host else 1
        free = {name: mix.size * unit_size for name in self._free}
        for unit in self._units.values():
            for cell in unit.cells:
                free[cell] -= unit.parts[0][mix.resource]
        cells = [
            Cell(
                name=name.partition("/")[2],
                kind="host" if is_host else "node",
                pool="pool",
                total={mix.resource: mix.size * unit_size},
                free={mix.resource: amount},
                node=None if is_host else {"metadata": {"labels": {}}, "spec": {}},
                runtimes=frozenset({"llama.cpp"}),
            )
            for name, amount in ((name.replace("node/", "host/") if is_host else name, free[name]) for name in free)
        ]
        if is_host and not any(name.startswith("host/") for name in self._free):
            self._free = {cell.id: mix.size for cell in cells}
        units = list(self._units.values())
        decided = plan(cells, units, PlanRules(), now)
        admitted, nominated = set(), set()
        evicted = set()
        for action in decided.actions:
            match action:
                case Admit(unit, places, _):
                    admitted.add(unit.uid)
                    self._units[unit.uid] = msgspec.structs.replace(
                        unit, state="running", cells=places, evictable_since=now, nomination=None
                    )
                    heapq.heappush(self._ends, (now + self._run_seconds[unit.uid], unit.uid))
                case Nominate(unit, nomination):
                    nominated.add(unit.uid)
                    self._units[unit.uid] = msgspec.structs.replace(unit, nomination=nomination)
                case Withdraw(unit):
                    self._units[unit.uid] = msgspec.structs.replace(unit, nomination=None)
                case Evict(victim, _):
                    evicted.add(victim.uid)
                    self._units[victim.uid] = msgspec.structs.replace(victim, state="ending")
                    heapq.heappush(self._ends, (now + DRAIN_SECONDS, victim.uid))
        self._estimator.observe(self._units.values(), evicted, {cell.id: cell.pool for cell in cells}, now)
        ahead = 0.0
        for waiting in decided.queue:
            if waiting.uid in admitted:
                continue
            if self._units[waiting.uid].nomination is not None:
                continue
            lane, amount = measure_need(waiting)
            ahead += amount
            self.asked.add(waiting.uid)
            found = self._estimator.estimate(waiting, lane, ahead, now)
            if isinstance(found, StartRange):
                self._give(waiting.uid, found, now)

    def _give(self, uid: str, found: StartRange, now: float) -> None:
        last = self._last_given.get(uid)
        if last != found:
            if found.latest - now > WIDEST * (found.earliest - now) * (1 + 1e-9):
                raise AssertionError(f"range of {uid} is too wide: {found} at {now}")
            self._last_given[uid] = found
            self.given.append(_Given(uid, now, found))

    @property
    def _last_given(self) -> dict[str, StartRange]:
        return self.__dict__.setdefault("_given_by_uid", {})
