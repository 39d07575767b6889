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
from controller.placement.found_place import need_key
from controller.placement.observed_units import FindVolumeNodes
from controller.placement.planner import Round
from controller.placement.refusals import largest_part
from controller.placement.score import score_cell
from controller.placement.standing import WaitFacts, describe_wait, find_largest, sort_refusals
from controller.placement.units import Amounts, Cell, HostRequirement, NodeRequirement, Unit, fits, subtract_amounts
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
        """Find out what is free on each cell (node or host): now, minus what the last round has given away.

        Args:
            cells: the cells as they are now.
            made: the last round.
            planned: the cells as the round had them; they may be old, as freed room starts no round while none waits.
        """
        self._cells, self._round = cells, made
        self._by_pool: dict[str, list[Cell]] = {}
        for cell in cells:
            self._by_pool.setdefault(cell.pool, []).append(cell)

        # What is free, by `Cell.id`: the counts go by this, not by `Cell.free`.
        before = {cell.id: cell for cell in planned}
        self._left_of_cell = {cell.id: _find_left(cell, before.get(cell.id), made) for cell in cells}

        self._refusals: RefusalCounter | None = None
        """Counts why cells refuse a unit; made when no cell could ever run one."""
        self._counted: dict[tuple[object, ...], CandidateRoom] = {}
        """The room for units that are alike, by all that it depends on."""

    def count(self, unit: Unit) -> CandidateRoom:
        """Return the room for units like this one, which need not exist."""
        need = largest_part(unit)
        # The answer depends on the namespace only where there are quotas of namespaces.
        namespace = unit.key.namespace if self._round.limits.by_namespace else ""
        # `identity` is equal for units that the same cells admit.
        key = (unit.identity, need_key(need), unit.pools, unit.rank, unit.is_protected, namespace, unit.speeds)
        if key not in self._counted:
            self._counted[key] = self._count(unit, need)
        return self._counted[key]

    def _count(self, unit: Unit, need: Amounts) -> CandidateRoom:
        """Add up the replicas that fit into the cells (nodes or hosts) of a unit's pools; explain why if none does."""
        replicas, feasible_cells, fastest, classes = 0, 0, 0.0, set[str]()
        speeds = unit.speeds.tokens_per_second  # by device class
        for pool in unit.pools:
            replicas_in_pool = 0
            for cell in self._by_pool.get(pool, ()):
                # 1. A cell is feasible if it could run a replica. One that is only closed could, once it opens: it
                #    refuses with `cell.closed` as the reason.
                refusal = find_static_refusal(unit, cell)
                if refusal is None or refusal.reason == cell.closed:
                    feasible_cells += 1
                    classes.add(cell.device_class)

                # 2. Only an open cell has room, and not while it is kept for a unit ahead.
                if refusal is None and not self._is_closed_to(unit, cell.id):
                    fitting = _count_fitting(need, self._left_of_cell[cell.id])
                    replicas_in_pool += fitting
                    if fitting:
                        fastest = max(fastest, speeds.get(cell.device_class, 0.0))

            # 3. Quotas and other limits of the pool may admit fewer than fit on its cells.
            replicas += self._round.limits.count_room(unit, pool, min(replicas_in_pool, MOST_REPLICAS))

        replicas = min(replicas, MOST_REPLICAS)
        # Elastic is a pool to which an autoscaler may add a node.
        could_run = feasible_cells > 0 or any(map(self._round.limits.is_elastic, unit.pools))
        return CandidateRoom(
            replicas=replicas,
            could_run=could_run,
            lack="" if replicas else self._explain(unit, feasible_cells, could_run=could_run),
            tokens_per_second=fastest if replicas else 0.0,
            device_classes=frozenset(classes),
        )

    def find_best(self, unit: Unit) -> Cell | None:
        """Return the free cell that would be the best for a unit of one part; None if none has room."""
        need = largest_part(unit)
        # Cells that could run it, are not kept for a unit ahead, and have room, in pools whose limits admit one more.
        free_cells = [
            cell
            for pool in unit.pools
            if self._round.limits.count_room(unit, pool, 1)
            for cell in self._by_pool.get(pool, ())
            if find_static_refusal(unit, cell) is None
            and not self._is_closed_to(unit, cell.id)
            and fits(need, self._left_of_cell[cell.id])
        ]

        def rank(cell: Cell) -> tuple[int, int, str]:
            """Return a sort key: the cell with most points is first, then the one with least left over."""
            score = score_cell(unit, need, cell, self._left_of_cell[cell.id], siblings=0)
            return -score.points, score.leftover, cell.name

        return min(free_cells, key=rank, default=None)

    def _is_closed_to(self, unit: Unit, cell: str) -> bool:
        """Return whether a cell was closed to a unit in the last round, since a unit ahead waits for it."""
        closure = self._round.closed.get(cell)
        return closure is not None and closure.holds_back(unit)

    def _explain(self, unit: Unit, feasible: int, *, could_run: bool) -> str:
        """Return in words why no cell has room.

        Args:
            unit: the unit of a prospective replica.
            feasible: cells that could run it if nothing else ran.
            could_run: there are such cells, or an autoscaler may add one.
        """
        noun = "host" if isinstance(unit.requirement, HostRequirement) else "node"
        pools = ", ".join(unit.pools)

        # 1. Its pools have no cell at all.
        if not any(self._by_pool.get(pool) for pool in unit.pools):
            # The name of a device resource has a domain, such as nvidia.com/gpu; "": the unit needs no device.
            device = next((name for name in largest_part(unit) if "/" in name), "")
            has = f"has {device}" if device and len(unit.pools) == 1 else f"is in pool {pools}"
            return f"no {noun} {has}"

        # 2. There are cells that could run it, or an autoscaler may add one.
        if feasible:
            return f"too little is free on the {noun}s of pool {pools}"
        if could_run:
            return f"pool {pools} has no {noun} yet"

        # 3. No cell could ever run it: count why.
        if self._refusals is None:
            self._refusals = RefusalCounter(self._cells, self._round)
        counts = sort_refusals(self._refusals.count(unit))
        return describe_wait(unit, "NoSuchHardware", WaitFacts(counts, find_largest(unit, self._cells)))


def _find_left(cell: Cell, planned: Cell | None, made: Round) -> Amounts:
    """Return what is free on a cell now, minus what the last round has promised of it.

    Args:
        cell: the cell as it is now.
        planned: the cell as the round had it; None: the cell is new.
        made: the round. What it promised is the difference between `planned.free` and what it left.
    """
    if planned is None or planned.id not in made.left:
        return cell.free

    left = made.left[cell.id]
    if cell is planned:  # nothing has changed since the round
        return left
    return subtract_amounts(cell.free, subtract_amounts(planned.free, left))


def _count_fitting(need: Amounts, left: Amounts) -> int:
    """Return how many times a need fits into what is left of a cell, at most MOST_REPLICAS."""
    most = MOST_REPLICAS
    for name, amount in need.items():
        # A resource that the cell does not count limits nothing, unless it is a device.
        is_limited = name in left or "/" in name
        if amount > 0 and is_limited:
            most = min(most, max(0, left.get(name, 0)) // amount)
    return most


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


class _ReportedRoom(NamedTuple):
    accelerator: str
    has_room: bool
    could_run: bool


class _Followed(NamedTuple):
    """A service whose choice depends on the room of some accelerators."""

    prospects: Mapping[str, ProspectiveReplica]
    """By accelerator."""
    reported_rooms: tuple[_ReportedRoom | None, ...]
    """The room of each accelerator as its last choice knew it; None: unknown."""


def restrict_to_volume_nodes(prospect: ProspectiveReplica, find_volume_nodes: FindVolumeNodes) -> Unit:
    """Return the unit of a prospect, restricted to the nodes on which the volumes of its pod can be."""
    unit, pod = prospect
    # None: no volume restricts it. A process on a host mounts none.
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

        # The counter, which is kept for a while because counting is costly.
        self._report: RoundReport | None = None
        """The last round of this leader; None: it has planned none yet."""
        self._counter: RoomCounter | None = None
        self._is_outdated = False
        """A cell has changed, or a round was planned, since the counter was made."""
        self._reused_until = 0.0
        """Time of the loop until which the counter is used although it is outdated."""

        # The services whose choice of accelerators depends on the room.
        self._followed: dict[ObjectKey, _Followed] = {}
        """Services to report, with the room that was last reported."""
        self._free_since: dict[ObjectKey, dict[str, float]] = {}
        """Time of the loop since which a followed accelerator has had room, by service and accelerator."""
        self._changed = asyncio.Event()
        """Set when the room may have changed: `run` then looks at it."""
        registry.subscribe(self._expire)

    def update(self, report: RoundReport) -> None:
        """Use the results of a new round from now on."""
        self._report = report
        self._expire()

    def _expire(self) -> None:
        """Note that a cell has changed: the room is counted anew at the next look."""
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
        """Return `ask(counter, unit)` for a prospective replica, or None if that is unknown so far.

        Unknown are all answers before the first round, and those about a pod whose volumes were not read yet. Counting
        is costly, so a counter is kept for a while although cells have changed: the longer, the more time was spent on
        it.
        """
        if self._report is None or (prospect.pod is not None and not self._has_read_volumes(prospect.pod)):
            return None

        # Make a counter if there is none, or if cells have changed and the old one was used for long enough.
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._counter is None or (self._is_outdated and began >= self._reused_until):
            self._counter = RoomCounter(self._registry.list_cells(), self._report.round, self._report.cells)
            self._is_outdated, self._reused_until = False, began

        answer = ask(self._counter, restrict_to_volume_nodes(prospect, self._find_volume_nodes))
        # Each second of counting lengthens the reuse of the counter by IDLE_SHARE seconds.
        self._reused_until += (loop.time() - began) * IDLE_SHARE
        return answer

    def follow(self, service: ObjectKey, prospects: Mapping[str, ProspectiveReplica]) -> None:
        """Report a service from now on when the room for one of these replicas comes or goes.

        `prospects` are by accelerator. Without any replica, the service is forgotten.
        """
        if not prospects:
            self.forget(service)
            return

        # Accelerators that are followed further keep the time since which they have had room.
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
    ) -> tuple[_ReportedRoom | None, ...]:
        """Note since when each accelerator has had room for a replica of a service.

        Returns the room on each accelerator in order, None where it is unknown. An accelerator without room, or with
        unknown room, loses its time.
        """
        rooms, since = list[_ReportedRoom | None](), self._free_since.setdefault(service, {})
        for accelerator, prospect in prospects.items():
            room = self.count(prospect)  # None: unknown
            has_room = room is not None and room.replicas > 0
            if has_room:  # an earlier time stays
                since.setdefault(accelerator, asyncio.get_running_loop().time())
            else:
                since.pop(accelerator, None)
            rooms.append(_ReportedRoom(accelerator, has_room, room.could_run) if room is not None else None)
        return tuple(rooms)

    def restart(self) -> None:
        """Forget everything: another replica may have led since."""
        self._report = self._counter = None
        self._followed.clear()
        self._free_since.clear()

    async def run(self, _leading: Leading) -> None:
        """Report each followed service whose room has changed, with at most one look a second, for ever.

        A look at many services lets other tasks run in between; a service that was followed anew meanwhile is left
        alone.
        """
        loop = asyncio.get_running_loop()
        self.restart()
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._is_outdated:
                self._counter = None  # the first count of this look makes a new one

            # Look at each service; `_followed` may change meanwhile.
            began = step_began = loop.time()
            for service, followed in list(self._followed.items()):
                rooms = self._note_room(service, followed.prospects)
                if rooms != followed.reported_rooms and self._followed.get(service) is followed:
                    self._followed[service] = followed._replace(reported_rooms=rooms)
                    self._on_change(service)
                if loop.time() - step_began >= STEP_SECONDS:
                    await asyncio.sleep(0)  # other tasks run
                    step_began = loop.time()

            # Pause for IDLE_SHARE times as long as the look took.
            await asyncio.sleep(max(LOOK_SECONDS, (loop.time() - began) * IDLE_SHARE))
