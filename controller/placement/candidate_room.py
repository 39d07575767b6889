"""The free room for a service on an accelerator: for how many replicas, or why for none.

A service with several accelerators is no unit of the queue before one is chosen. So a unit is made as its replica would
be one there, and compared with the cells as the last round left them.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from controller.placement.admission_parts import RoundReport
from controller.placement.explanation import RefusalCounter, find_static_refusal
from controller.placement.observed_units import FindVolumeNodes
from controller.placement.place_search import need_key
from controller.placement.planner import Round
from controller.placement.refusals import largest_part
from controller.placement.score import score_cell
from controller.placement.standing import WaitFacts, describe_wait, find_largest, sort_refusals
from controller.placement.units import (
    Amounts,
    Cell,
    HostRequirement,
    NodeRequirement,
    Unit,
    fits,
    subtract_amounts,
)
from controller.reconcile.plan import Leading
from kube.client import Obj
from kube.resources import ObjectKey

MOST_REPLICAS: Final = 100
"""The most that a service may ask for."""
LOOK_SECONDS: Final = 1.0
"""Least time between two looks at the room of all services that wait for some."""
IDLE_SHARE: Final = 20.0
"""After a look, the next one waits for this many times its duration: looks take at most a twentieth of a core. What
was counted for a decision serves for as long, though a cell has changed: in a large cluster one does all the time."""
STEP_SECONDS: Final = 0.02

_Answer = TypeVar("_Answer")


class CandidateRoom(NamedTuple):
    """The room of one accelerator for the replicas of one service."""

    replicas: int
    """Replicas that have room now."""
    could_run: bool
    """A cell could run one if nothing else ran, or an autoscaler adds such a node."""
    lack: str = ""
    """Why there is no room, in words."""
    tokens_per_second: float = 0.0
    """Speed of a replica on the fastest device class with room; 0: unknown, or there is no room."""
    device_classes: frozenset[str] = frozenset()
    """Classes of the cells that could run a replica if nothing else ran; one that is unknown has an empty name."""


class BestPlace(NamedTuple):
    """The answer about the best free place."""

    cell: Cell | None
    """None: no place is free."""


class RoomCounter:
    """Counts the free room after a round; units with equal needs share one count."""

    def __init__(self, cells: Sequence[Cell], made: Round, planned: Iterable[Cell]) -> None:
        """Compare the cells of a round with those of now.

        Args:
            cells: the cells as they are now.
            made: the last round.
            planned: the cells as the round had them. If none waits, it is not repeated when room becomes free.
        """
        self._cells, self._made = cells, made
        before = {cell.id: cell for cell in planned}
        self._by_pool: dict[str, list[Cell]] = {}
        for cell in cells:
            self._by_pool.setdefault(cell.pool, []).append(cell)
        self._left = {cell.id: _find_left(cell, before.get(cell.id), made) for cell in cells}
        self._refusals: RefusalCounter | None = None
        self._counted: dict[tuple[object, ...], CandidateRoom] = {}

    def count(self, unit: Unit) -> CandidateRoom:
        """Return the room for units like this one, which need not exist."""
        need = largest_part(unit)
        namespace = unit.key.namespace if self._made.limits.by_namespace else ""
        key = (unit.identity, need_key(need), unit.pools, unit.rank, unit.is_protected, namespace, unit.speeds)
        if key not in self._counted:
            self._counted[key] = self._count(unit, need)
        return self._counted[key]

    def _count(self, unit: Unit, need: Amounts) -> CandidateRoom:
        """Add up the replicas that fit into the cells of a unit's pools, within limits; explain why if none does."""
        room, feasible, fastest, classes = 0, 0, 0.0, set[str]()
        speeds = unit.speeds.tokens_per_second
        for pool in unit.pools:
            in_pool = 0
            for cell in self._by_pool.get(pool, ()):
                refusal = find_static_refusal(unit, cell)
                if refusal is None or refusal.reason == cell.closed:
                    feasible += 1
                    classes.add(cell.device_class)
                if refusal is None and not self._is_closed_to(unit, cell.id):
                    fitting = _count_fitting(need, self._left[cell.id])
                    in_pool += fitting
                    fastest = max(fastest, speeds.get(cell.device_class, 0.0) if fitting else 0.0)
            room += self._made.limits.count_room(unit, pool, min(in_pool, MOST_REPLICAS))
        room = min(room, MOST_REPLICAS)
        could_run = feasible > 0 or any(map(self._made.limits.is_elastic, unit.pools))
        if room:
            return CandidateRoom(room, could_run, tokens_per_second=fastest, device_classes=frozenset(classes))
        lack = self._explain(unit, feasible, could_run=could_run)
        return CandidateRoom(0, could_run, lack, device_classes=frozenset(classes))

    def find_best(self, unit: Unit) -> Cell | None:
        """Return the free cell that would be the best for a unit of one part; None if none has room."""
        need = largest_part(unit)
        scored = [
            (score_cell(unit, need, cell, self._left[cell.id], 0), cell)
            for pool in unit.pools
            if self._made.limits.count_room(unit, pool, 1)
            for cell in self._by_pool.get(pool, ())
            if find_static_refusal(unit, cell) is None
            and not self._is_closed_to(unit, cell.id)
            and fits(need, self._left[cell.id])
        ]
        best = min(scored, key=lambda entry: (-entry[0].points, entry[0].leftover, entry[1].name), default=None)
        return best[1] if best is not None else None

    def _is_closed_to(self, unit: Unit, cell: str) -> bool:
        closure = self._made.closed.get(cell)
        return closure is not None and closure.holds_back(unit)

    def _explain(self, unit: Unit, feasible: int, *, could_run: bool) -> str:
        """Return in words why no cell has room; `feasible` is the number of cells that could run the unit."""
        noun = "host" if isinstance(unit.requirement, HostRequirement) else "node"
        pools = ", ".join(unit.pools)
        if not any(self._by_pool.get(pool) for pool in unit.pools):
            device = next((name for name in largest_part(unit) if "/" in name), "")
            has = f"has {device}" if device and len(unit.pools) == 1 else f"is in pool {pools}"
            return f"no {noun} {has}"
        if could_run:
            return (
                f"too little is free on the {noun}s of pool {pools}" if feasible else f"pool {pools} has no {noun} yet"
            )
        if self._refusals is None:
            self._refusals = RefusalCounter(self._cells, self._made)
        counts = sort_refusals(self._refusals.count(unit))
        return describe_wait(unit, "NoSuchHardware", WaitFacts(counts, find_largest(unit, self._cells)))


def _find_left(cell: Cell, planned: Cell | None, made: Round) -> Amounts:
    """Return what is free on a cell now, minus what the last round gave away of the cell as `planned`."""
    if planned is None or planned.id not in made.left:
        return cell.free
    left = made.left[cell.id]
    if cell is planned:
        return left
    return subtract_amounts(cell.free, subtract_amounts(planned.free, left))


def _count_fitting(need: Amounts, left: Amounts) -> int:
    """Return how many times a need fits into what is left of a cell, at most MOST_REPLICAS."""
    # A resource that the cell does not count limits nothing, unless it is a device.
    counts = [
        max(0, left.get(name, 0 if "/" in name else amount * MOST_REPLICAS)) // amount
        for name, amount in need.items()
        if amount > 0
    ]
    return min(counts, default=MOST_REPLICAS)


class CellSource(Protocol):
    """The cells as they are now."""

    def list_cells(self) -> Sequence[Cell]:
        """Return all cells."""

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener()` when a cell may have changed."""


class ProspectiveReplica(NamedTuple):
    """The unit that a replica would be on one accelerator."""

    unit: Unit
    pod: Obj | None = None
    """The pod, if its volumes may hold it on some nodes."""


class _Followed(NamedTuple):
    """A service whose choice depends on the room of some accelerators."""

    prospects: Mapping[str, ProspectiveReplica]
    """By accelerator."""
    reported_rooms: tuple[tuple[str, bool, bool] | None, ...]
    """The room as its last choice knew it: whether there is any, and whether there could be; None: unknown."""


def restrict_to_volume_nodes(prospect: ProspectiveReplica, find_volume_nodes: FindVolumeNodes) -> Unit:
    """Return the unit of a prospect, restricted to the nodes on which the volumes of its pod can be."""
    unit, pod = prospect
    if pod is None or not isinstance(unit.requirement, NodeRequirement):
        return unit
    requirement = msgspec.structs.replace(unit.requirement, volume_nodes=find_volume_nodes(pod))
    return msgspec.structs.replace(unit, requirement=requirement)


class CandidateRooms:
    """The room for the services that may use several accelerators. All methods run in the event loop."""

    def __init__(
        self,
        registry: CellSource,
        on_change: Callable[[ObjectKey], None],
        find_volume_nodes: FindVolumeNodes = lambda _pod: None,
        has_read_volumes: Callable[[Obj], bool] = lambda _pod: True,
    ) -> None:
        """Follow the cells.

        Args:
            registry: the cells.
            on_change: gets each service for which room came or went.
            find_volume_nodes: finds the nodes of the volumes of a pod.
            has_read_volumes: returns whether these nodes are known yet.
        """
        self._has_read_volumes = has_read_volumes
        self._find_volume_nodes = find_volume_nodes
        self._registry, self._on_change = registry, on_change
        self._report: RoundReport | None = None
        self._counter: RoomCounter | None = None
        self._is_outdated = False
        """A cell has changed, or a round was planned, since the counter was made."""
        self._serves_until = 0.0
        """Time of the loop until which it serves even so."""
        self._followed: dict[ObjectKey, _Followed] = {}
        self._free_since: dict[ObjectKey, dict[str, float]] = {}
        """Time of the loop since which a followed accelerator has had room, by service and accelerator."""
        self._changed = asyncio.Event()
        registry.subscribe(self._expire)

    def update(self, report: RoundReport) -> None:
        """Use the results of a new round from now on."""
        self._report = report
        self._expire()

    def _expire(self) -> None:
        self._is_outdated = True
        self._changed.set()

    def count(self, prospect: ProspectiveReplica) -> CandidateRoom | None:
        """Return the room for replicas like this one; None: it is not known yet.

        This leader has planned no round, or has not read where the volumes of the pod are: a choice by what is known
        until then would stay.
        """
        return self._query_counter(prospect, RoomCounter.count)

    def find_best(self, prospect: ProspectiveReplica) -> BestPlace | None:
        """Return the best free place for a replica like this one; None: it is not known yet, as of `count`."""
        return self._query_counter(prospect, lambda counter, unit: BestPlace(counter.find_best(unit)))

    def _query_counter(
        self, prospect: ProspectiveReplica, ask: Callable[[RoomCounter, Unit], _Answer]
    ) -> _Answer | None:
        """Return `ask(counter, unit)`, or None as in `count`; an outdated counter serves for a while."""
        if self._report is None or (prospect.pod is not None and not self._has_read_volumes(prospect.pod)):
            return None
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._counter is None or (self._is_outdated and began >= self._serves_until):
            self._counter = RoomCounter(self._registry.list_cells(), self._report.round, self._report.cells)
            self._is_outdated, self._serves_until = False, began
        answer = ask(self._counter, restrict_to_volume_nodes(prospect, self._find_volume_nodes))
        self._serves_until += (loop.time() - began) * IDLE_SHARE
        return answer

    def follow(self, service: ObjectKey, prospects: Mapping[str, ProspectiveReplica]) -> None:
        """Report a service from now on when the room for one of these replicas comes or goes; none: forget it."""
        if not prospects:
            self.forget(service)
            return
        since = self._free_since.get(service, {})
        self._free_since[service] = {name: since[name] for name in prospects if name in since}
        self._followed[service] = _Followed(prospects, self._note_room(service, prospects))
        self._changed.set()

    def forget(self, service: ObjectKey) -> None:
        """Stop following a service."""
        self._followed.pop(service, None)
        self._free_since.pop(service, None)

    def free_seconds(self, service: ObjectKey, accelerator: str) -> float:
        """Return for how long a followed accelerator has had room without a break; 0: it has none."""
        since = self._free_since.get(service, {}).get(accelerator)
        return asyncio.get_running_loop().time() - since if since is not None else 0.0

    def _note_room(
        self, service: ObjectKey, prospects: Mapping[str, ProspectiveReplica]
    ) -> tuple[tuple[str, bool, bool] | None, ...]:
        """Note since when each accelerator has had room; return its name, whether it has room, and whether it could."""
        rooms, since = list[tuple[str, bool, bool] | None](), self._free_since.setdefault(service, {})
        for accelerator, prospect in prospects.items():
            room = self.count(prospect)
            has_room = room is not None and room.replicas > 0
            if has_room:
                since.setdefault(accelerator, asyncio.get_running_loop().time())
            else:
                since.pop(accelerator, None)
            rooms.append((accelerator, has_room, room.could_run) if room is not None else None)
        return tuple(rooms)

    def restart(self) -> None:
        """Forget everything: another replica may have led since."""
        self._report = self._counter = None
        self._followed.clear()
        self._free_since.clear()

    async def run(self, _leading: Leading) -> None:
        """Report each followed service whose room has changed, with at most one look a second, for ever."""
        loop = asyncio.get_running_loop()
        self.restart()
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._is_outdated:
                self._counter = None
            began = until = loop.time()
            for service, followed in list(self._followed.items()):
                rooms = self._note_room(service, followed.prospects)
                if rooms != followed.reported_rooms and self._followed.get(service) is followed:
                    self._followed[service] = followed._replace(reported_rooms=rooms)
                    self._on_change(service)
                if loop.time() - until >= STEP_SECONDS:
                    await asyncio.sleep(0)
                    until = loop.time()
            await asyncio.sleep(max(LOOK_SECONDS, (loop.time() - began) * IDLE_SHARE))
