"""A simulated cluster for the planner: everything that may happen to it follows from a seed.

Nodes and hosts appear, vanish, shrink, close and change their labels; foreign pods take what a victim has freed; units
arrive, end, are gangs, are protected or replace one of an earlier spec; evictions are
refused for a while, nominations get lost, the clock jumps, and the controller ends after any of the writes of a round.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from controller.placement.actions import Action, Admit, EvictUnit, Nominate, WithdrawNomination
from controller.placement.planner import PlanRules, Round
from controller.placement.pool_limits import PoolQuota, PoolRules
from controller.placement.units import (
    CPU,
    MEMORY,
    NO_SPEEDS,
    PODS,
    SPEED_UNKNOWN,
    TOO_SLOW,
    Amounts,
    Cell,
    SpeedProfile,
    Unit,
    add_amounts,
    add_by_cell,
    fits,
    subtract_amounts,
)
from crds.meta import PRIORITY_RANK, Priority
from tests.support.queue_units import GPU, host, node, pod, process

PRIORITIES: tuple[Priority, ...] = tuple(PRIORITY_RANK)
MIN_RUN_SECONDS = 20.0
SPEEDS = SpeedProfile((("fast", 90.0), ("slow", 30.0)))
SLOW = frozenset({("slow", TOO_SLOW)})
FLOOR = SpeedProfile((("fast", 90.0),), accepted=frozenset({"fast"}), unlisted=SPEED_UNKNOWN)


@dataclass
class SimulatedQueue:
    """The state of the cluster, and the chances by which it changes."""

    seed: int
    cells: dict[str, Cell] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    foreign: dict[str, Amounts] = field(default_factory=dict)
    """Amounts that other pods hold, by `Cell.id`."""
    now: float = 1_000.0
    rules: PlanRules = field(default_factory=PlanRules)
    refused: set[str] = field(default_factory=set)
    """`uid` of units whose eviction is refused at present."""
    rolled: set[str] = field(default_factory=set)
    """`uid` of units that their service has ended."""
    evicted: int = 0
    admitted: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)  # noqa: S311 - to be repeated, not to be secret
        self._numbers = 0
        for _ in range(self.chance.randint(1, 5)):
            self.add_cell()
        pools: dict[str, PoolRules] = {}
        quotas: dict[tuple[str, str], PoolQuota] = {}
        if self.chance.random() < 0.6:
            pools["nvidia"] = PoolRules(
                nominal=self.chance.choice([None, 6, 12]),
                borrowing_limit=self.chance.choice([None, 4]),
                lending_limit=self.chance.choice([None, 4]),
                elastic=self.chance.choice([0, 0, 1]),
            )
            pools["metal"] = PoolRules(nominal=self.chance.choice([None, 96]))
            quotas["a", "nvidia"] = PoolQuota(devices=self.chance.choice([None, 4, 8]), memory_bytes=200)
        self.rules = PlanRules(self.chance.choice([0.0, MIN_RUN_SECONDS]), pools, quotas)

    def name(self, kind: str) -> str:
        """Return a new name."""
        self._numbers += 1
        return f"{kind}-{self._numbers}"

    def add_cell(self) -> None:
        """Add a node or a host."""
        chance = self.chance
        if chance.random() < 0.25:
            added = host(self.name("host"), chance.choice([32, 64]), weights=frozenset(chance.sample(["w1", "w2"], 1)))
        else:
            labels = {"zone": chance.choice("xy")}
            total = {GPU: chance.choice([1, 2, 4, 8]), MEMORY: chance.choice([16, 64]), CPU: 32, PODS: 8}
            pool = chance.choice(["nvidia", "nvidia", "amd"])
            added = node(self.name("node"), labels=labels, total=total, pool=pool)
        self.cells[added.id] = msgspec.structs.replace(
            added,
            device_class=chance.choice(["", "fast", "slow"]),
            utilization_percent=chance.choice([None, 0, 90]),
            cost_permille=chance.choice([None, 200, 1000]),
        )

    def add_unit(self) -> None:
        """Add a unit that waits."""
        chance, uid = self.chance, self.name("unit")
        common: dict[str, Any] = {
            "at": max(0.0, self.now - chance.choice([0, 0, 5, 50])),
            "priority": chance.choice(PRIORITIES),
            "is_protected": chance.random() < 0.1,
            "namespace": chance.choice("ab"),
            "service": chance.choice(["s1", "s2", "s3", uid]),
            "avoid": self._pick_cells(),
            "refused_by": self._pick_cells(),
            "speeds": chance.choice([NO_SPEEDS, SPEEDS, msgspec.structs.replace(SPEEDS, refused=SLOW), FLOOR]),
        }
        if chance.random() < 0.25:
            added = process(uid, chance.choice([4, 8, 16, 32]), weights=chance.choice(["", "w1"]), **common)
        else:
            need = {
                GPU: chance.choice([1, 1, 2, 4, 8]),
                MEMORY: chance.choice([1, 4, 16]),
                CPU: chance.choice([1, 8]),
                PODS: 1,
            }
            selector = {"zone": chance.choice("xy")} if chance.random() < 0.2 else {}
            pools = chance.choice([("nvidia",), ("nvidia", "amd"), ("amd", "nvidia"), ("amd",)])
            added = pod(uid, need, selector=selector, pools=pools, **common)
            if chance.random() < 0.15:
                parts = (need,) * chance.randint(2, 3)
                if chance.random() < 0.3:
                    parts = (*parts, {**need, GPU: 1})
                # A gang is of pods, and only processes avoid cells, for some time.
                added = msgspec.structs.replace(added, parts=parts, avoid=frozenset())
        running = [unit.uid for unit in self.units.values() if unit.state == "running"]
        if running and chance.random() < 0.15:
            earlier = self.units[chance.choice(running)]
            added = msgspec.structs.replace(added, service=earlier.service, replaces=frozenset({earlier.uid}))
        self.units[uid] = added

    def _pick_cells(self) -> frozenset[str]:
        some = self.cells and self.chance.random() < 0.1
        return frozenset([self.chance.choice(sorted(self.cells))]) if some else frozenset()

    def observe(self) -> list[Cell]:
        """Return the cells with what is free."""
        free = {
            name: subtract_amounts(cell.total, self.foreign[name]) if name in self.foreign else cell.total
            for name, cell in self.cells.items()
        }
        for unit in self.units.values():
            for name, need in add_by_cell(unit.parts, unit.cells).items():
                if name in free:
                    free[name] = subtract_amounts(free[name], need)
        return [msgspec.structs.replace(cell, free=free[name]) for name, cell in self.cells.items()]

    def disturb(self) -> None:
        """Pass time, and disturb the cluster at random."""
        chance = self.chance
        self.now += chance.choice([1, 10, 10, 30, 30, -3, -100]) if chance.random() < 0.5 else 1
        for _ in range(chance.choice([1, 2, 3])):
            if len(self.units) < 40:
                self.add_unit()
        if self.cells and chance.random() < 0.2:
            self._disturb_cell(chance.choice(sorted(self.cells)))
        if chance.random() < 0.05:
            self.add_cell()
        for uid, unit in list(self.units.items()):
            if unit.state == "running" and chance.random() < 0.02:
                self._end(unit)
            elif unit.state == "ending" and chance.random() < 0.4:
                self.finish(uid)
            elif unit.nomination is not None and chance.random() < 0.05:
                self.units[uid] = msgspec.structs.replace(unit, nomination=None)
            elif not unit.cells and unit.state == "running" and chance.random() < 0.3:
                del self.units[uid]
        self.refused = {uid for uid in self.units if chance.random() < 0.1}

    def _disturb_cell(self, name: str) -> None:
        chance, cell = self.chance, self.cells[name]
        match chance.choice(["vanish", "shrink", "close", "open", "label", "steal", "steal", "give"]):
            case "vanish":
                del self.cells[name]
                self.units = {uid: unit for uid, unit in self.units.items() if name not in unit.cells}
            case "shrink":
                total = {key: amount // 2 for key, amount in cell.total.items()}
                self.cells[name] = msgspec.structs.replace(cell, total=total)
            case "close":
                self.cells[name] = msgspec.structs.replace(cell, closed="Cordoned")
            case "open":
                self.cells[name] = msgspec.structs.replace(cell, closed="")
            case "label" if cell.node is not None:
                labels = {"zone": chance.choice("xy")}
                changed = {"metadata": {"name": cell.name, "labels": labels}, "spec": {}}
                self.cells[name] = msgspec.structs.replace(cell, node=changed)
            case "steal":
                free = next(observed.free for observed in self.observe() if observed.id == name)
                stolen = {key: chance.randint(0, max(0, amount)) for key, amount in free.items()}
                self.foreign[name] = add_amounts(self.foreign.get(name, {}), stolen)
            case _:
                self.foreign.pop(name, None)

    def _end(self, unit: Unit) -> None:
        """Scale a unit down."""
        self.rolled.add(unit.uid)
        self.units[unit.uid] = msgspec.structs.replace(unit, state="ending", enqueued_at=-1.0)

    def finish(self, uid: str) -> None:
        """Remove a unit that has ended; a victim comes back at its old place."""
        unit = self.units.pop(uid)
        if unit.enqueued_at >= 0:
            back = self.name("unit")
            self.units[back] = msgspec.structs.replace(
                unit, uid=back, state="waiting", cells=(), nomination=None, evictable_since=None, replaces=frozenset()
            )

    def apply(self, action: Action) -> None:
        """Carry out one action, as the API would."""
        match action:
            case Admit(unit, cells):
                if cells:
                    self._check_room(unit, cells)
                self.admitted += 1
                self.units[unit.uid] = msgspec.structs.replace(
                    self.units[unit.uid], state="running", cells=cells, nomination=None, evictable_since=self.now
                )
                # The rollout ends one that was replaced, wherever its successor went.
                for uid in unit.replaces & self.units.keys():
                    self._end(self.units[uid])
            case Nominate(unit, nomination):
                self.units[unit.uid] = msgspec.structs.replace(self.units[unit.uid], nomination=nomination)
                for uid in unit.replaces & nomination.victims:
                    self._end(self.units[uid])
            case WithdrawNomination(unit):
                self.units[unit.uid] = msgspec.structs.replace(self.units[unit.uid], nomination=None)
            case EvictUnit(victim, _):
                if victim.uid not in self.refused:
                    self.evicted += 1
                    self.units[victim.uid] = msgspec.structs.replace(self.units[victim.uid], state="ending")

    def _check_room(self, unit: Unit, cells: tuple[str, ...]) -> None:
        """Hold I1: nothing is booked twice."""
        free = {cell.id: cell.free for cell in self.observe()}
        for name, need in add_by_cell(unit.parts, cells).items():
            assert fits(need, free[name]), f"{unit.key} was admitted to {name}, which has {free[name]} for {need}"

    def apply_some(self, planned: Round, *, may_crash: bool) -> bool:
        """Carry out the actions of a round, or those before a crash; return whether all were."""
        actions = planned.actions
        count = self.chance.randint(0, len(actions)) if may_crash and self.chance.random() < 0.25 else len(actions)
        for action in actions[:count]:
            self.apply(action)
        return count == len(actions)

    def calm_down(self) -> None:
        """End all disturbances: from now on units only run for their time and end."""
        self.refused, self.foreign = set(), {}
        self.cells = {name: msgspec.structs.replace(cell, closed="") for name, cell in self.cells.items()}
        self.rules = self.rules._replace(
            pools={name: rules._replace(elastic=0) for name, rules in self.rules.pools.items()}
        )

    def pass_calmly(self) -> None:
        """Pass time, and end each unit that has run for its time."""
        self.now += MIN_RUN_SECONDS
        for uid, unit in list(self.units.items()):
            if unit.state == "ending":
                self.finish(uid)
            elif unit.state == "running" and self.now - (unit.evictable_since or 0) >= MIN_RUN_SECONDS:
                del self.units[uid]
