"""The reasons why a unit is on no cell after a round: for one unit by cell, or counted over all cells."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from controller.placement.node_rules import find_untolerated
from controller.placement.place_search import RESERVED, need_key, order_parts
from controller.placement.planner import PlanRules, Round
from controller.placement.pool_limits import (
    DEVICES,
    LimitReason,
    LimitRefusal,
    PoolRules,
    amount_text,
    limit_text,
)
from controller.placement.units import (
    CLAIM_SLOT,
    MEMORY,
    NOT_FASTER,
    SPEED_UNKNOWN,
    TOO_SLOW,
    TOO_TIGHT,
    Amounts,
    Cell,
    HostRequirement,
    NodeRequirement,
    SliceDemand,
    Unit,
    find_shortage,
)
from crds.rate import format_rate
from crds.size import size_text

FITS: Final = "Fits"
NOMINATED: Final = "Nominated"
AWAITS_BENCHMARK: Final = "AwaitsBenchmark"
_MOST_KINDS: Final = 32
"""Kinds of units of which the verdicts of all cells are kept from one round to the next."""


class CellRefusal(NamedTuple):
    """The reason why a cell does not run a unit."""

    reason: str
    """One CamelCase word: that of `Cell.closed`, of a requirement, or of this module."""
    resource: str = ""
    """The resource of which the cell has too little."""

    def __str__(self) -> str:
        return f"{self.reason} {self.resource}" if self.resource else self.reason


class CellExplanation(NamedTuple):
    """One row of the answer to the question why a unit waits."""

    cell: str
    """`Cell.id`."""
    refusal: CellRefusal
    message: str
    """The state, in words."""
    remedy: str
    """The remedy, in words; empty if none is needed."""


def explain(unit: Unit, cells: Iterable[Cell], made: Round, rules: PlanRules) -> list[CellExplanation]:
    """Explain for each cell why a waiting unit is not there, and what would help.

    Args:
        unit: the unit; of a gang, its largest part is compared.
        cells: the cells of the round.
        made: the round.
        rules: the rules of the round.
    """
    found = []
    for cell in cells:
        limit = made.limits.find_refusal(unit, cell.pool)
        refusal = find_static_refusal(unit, cell) or find_refusal_now(unit, cell.id, made, limit)
        message, remedy = _describe(unit, cell, refusal, made, rules)
        found.append(CellExplanation(cell.id, refusal, message, remedy))
    return found


class _Feasible(NamedTuple):
    """The cells of a pool that could run units of one kind."""

    cells: frozenset[str]
    insufficient: Mapping[str, int]
    """Number of those with too little left, by reason."""
    roomy: Sequence[str]
    """Those with enough left."""


class _Verdict(NamedTuple):
    """The verdict of one cell on all units of one kind."""

    refusal: str
    """Why it refuses them in any case; empty if it does not."""
    lacking: str
    """The resource of which it has too little left; empty if it has enough."""


class RefusalCounter:
    """Counts the refusals of units by reason. What units have in common is counted once."""

    def __init__(self, cells: Iterable[Cell], made: Round) -> None:
        self._cells, self._made = {cell.id: cell for cell in cells}, made
        self._verdicts: dict[tuple[object, ...], dict[str, _Verdict]] = {}
        """By kind of units, the verdicts of cells by `Cell.id`; the kind that was counted last comes last."""
        self._split: dict[tuple[object, ...], tuple[Mapping[str, int], Mapping[str, _Feasible]]] = {}
        self._counts: dict[tuple[object, ...], Mapping[str, int]] = {}

    def update(self, cells: Iterable[Cell], made: Round) -> None:
        """Count after another round from now on; cells that are as they were are not judged again."""
        known, left = self._cells, self._made.left
        self._cells, self._made = {cell.id: cell for cell in cells}, made
        stale = [
            name for name, cell in known.items() if cell is not self._cells.get(name) or made.left[name] != left[name]
        ]
        for verdicts in self._verdicts.values():
            for name in stale:
                verdicts.pop(name, None)
        self._split.clear()
        self._counts.clear()

    def count(self, unit: Unit) -> Mapping[str, int]:
        """Return the number of cells by the reason for which they refuse a unit."""
        kind = (unit.identity, need_key(largest_part(unit)), unit.pools, unit.avoid)
        # What a limit keeps for others depends on the place of the unit.
        limits = tuple(self._made.limits.find_refusal(unit, pool) for pool in unit.pools)
        key = (*kind, unit.nomination, unit.rank, unit.is_protected, limits, len(unit.parts))
        found = self._counts.get(key)
        if found is None:
            found = self._counts[key] = self._count(unit, kind)
        return found

    def _count(self, unit: Unit, kind: tuple[object, ...]) -> Mapping[str, int]:
        if kind not in self._split:
            self._split[kind] = self._split_cells(unit, kind)
        refused, pools = self._split[kind]
        counts = Counter(refused)
        for pool, feasible in pools.items():
            limit = self._made.limits.find_refusal(unit, pool)
            if limit is not None or (unit.nomination and feasible.cells.intersection(unit.nomination.cells)):
                counts.update(str(find_refusal_now(unit, name, self._made, limit)) for name in feasible.cells)
                continue
            counts.update(feasible.insufficient)
            counts.update(str(find_refusal_now(unit, name, self._made, None)) for name in feasible.roomy)
        return dict(counts)

    def _split_cells(self, unit: Unit, kind: tuple[object, ...]) -> tuple[Mapping[str, int], Mapping[str, _Feasible]]:
        """Return the counts of the cells that refuse a unit in any case, and all other cells by pool."""
        refused: Counter[str] = Counter()
        by_pool: dict[str, dict[str, str]] = {}
        verdicts = self._judge_cells(unit, kind)
        for name, cell in self._cells.items():
            refusal, lacking = verdicts[name]
            if refusal:
                refused[refusal] += 1
            else:
                by_pool.setdefault(cell.pool, {})[name] = lacking
        return refused, {
            pool: _Feasible(
                frozenset(shortages),
                {
                    str(CellRefusal("Insufficient", lacking)): count
                    for lacking, count in Counter(shortages.values()).items()
                    if lacking
                },
                [name for name, lacking in shortages.items() if not lacking],
            )
            for pool, shortages in by_pool.items()
        }

    def _judge_cells(self, unit: Unit, kind: tuple[object, ...]) -> Mapping[str, _Verdict]:
        verdicts = self._verdicts[kind] = self._verdicts.pop(kind, {})
        if len(self._verdicts) > _MOST_KINDS:
            del self._verdicts[next(iter(self._verdicts))]
        need, left = largest_part(unit), self._made.left
        for name, cell in self._cells.items():
            if name not in verdicts:
                refusal = find_static_refusal(unit, cell)
                verdicts[name] = _Verdict(str(refusal or ""), "" if refusal else find_shortage(need, left[name]))
        return verdicts


def largest_part(unit: Unit) -> Amounts:
    """Return what the largest part of a unit needs."""
    return unit.parts[order_parts(unit)[0]]


def find_static_refusal(unit: Unit, cell: Cell) -> CellRefusal | None:
    """Return why a cell refuses a unit whatever else runs there, or None."""
    if cell.pool not in unit.pools:
        return CellRefusal("OtherPool")
    if reason := unit.refuse(cell):
        return CellRefusal(reason)
    if resource := find_shortage(largest_part(unit), cell.total):
        return CellRefusal("TooSmall", resource)
    if cell.closed:
        return CellRefusal(cell.closed)
    return CellRefusal("Avoided") if cell.id in unit.avoid else None


def find_refusal_now(unit: Unit, cell: str, made: Round, limit: LimitRefusal | None) -> CellRefusal:
    """Return why a cell that could run a unit does not after a round.

    Args:
        unit: the unit.
        cell: `Cell.id`.
        made: the round.
        limit: the limit that keeps the unit out of the pool of the cell.
    """
    blockage = made.blocked.get(unit.uid)
    if blockage is None and unit.nomination is not None and cell in unit.nomination.cells:
        return CellRefusal(NOMINATED)
    if blockage is not None and blockage.after_benchmark == cell:
        return CellRefusal(AWAITS_BENCHMARK)
    if limit is not None:
        return CellRefusal(limit.reason)
    if resource := find_shortage(largest_part(unit), made.left[cell]):
        return CellRefusal("Insufficient", resource)
    closure = made.closed.get(cell)
    if closure is not None and closure.head.uid != unit.uid and closure.holds_back(unit):
        return CellRefusal("HeadOfLine")
    return CellRefusal(FITS)


def _describe(unit: Unit, cell: Cell, refusal: CellRefusal, made: Round, rules: PlanRules) -> tuple[str, str]:
    """Return what is the matter, and what would help."""
    if refusal.reason in {"TooSmall", "Insufficient"}:
        return _describe_shortage(unit, cell, refusal, made, rules)
    if refusal.reason == "HeadOfLine":
        closure = made.closed[cell.id]
        head = closure.head
        waiting = f"{head.key} of priority {head.priority} is ahead and waits for this {cell.kind}"
        if closure.rank == RESERVED:
            return f"{waiting}, where it may soon evict others", "wait"
        return waiting, f"wait{or_raise_priority(unit)}"
    if (limit := made.limits.find_refusal(unit, cell.pool)) is not None and refusal.reason == limit.reason:
        return describe_limit(limit, unit)
    if refusal.reason == NOMINATED and unit.nomination is not None:
        number = len(unit.nomination.victims)
        return f"held for it until {number} replica{' has' if number == 1 else 's have'} ended", ""
    if refusal.reason == AWAITS_BENCHMARK:
        return "held for it until a benchmark there has ended", ""
    if refusal.reason == FITS and (blockage := made.blocked.get(unit.uid)) and blockage.after_benchmark:
        return f"the {cell.kind} has room, but a better one is held for it", ""
    if refusal.reason in {TOO_SLOW, SPEED_UNKNOWN, TOO_TIGHT, NOT_FASTER}:
        return _describe_class(unit, cell, refusal.reason)
    if refusal.reason in {"SharedDevices", "SliceTooSmall"} and isinstance(unit.requirement, NodeRequirement):
        return _describe_slices(unit.requirement.slices or SliceDemand(0), cell, refusal.reason)
    return _describe_rules(unit, cell, refusal.reason)


def _describe_rules(unit: Unit, cell: Cell, reason: str) -> tuple[str, str]:
    """Return the words for a reason that the rules of a unit or a cell give."""
    requirement = unit.requirement
    match reason:
        case "Fits":
            return f"the {cell.kind} has room", "wait for the next round"
        case "OtherPool":
            return f"pool {cell.pool} is not among {', '.join(unit.pools)}", f"let the service use pool {cell.pool}"
        case "OtherKind":
            needed = "nodes" if isinstance(requirement, NodeRequirement) else "hosts"
            return f"a {unit.key.kind} runs on {needed}", f"let the service use a pool of {cell.kind}s"
        case "RuntimeMissing" if isinstance(requirement, HostRequirement):
            return f"{requirement.runtime} is not installed there", f"install {requirement.runtime} on {cell.name}"
        case "OtherNamespace":
            names = ", ".join(sorted(cell.namespaces))
            remedy = f"add {unit.key.namespace} to spec.namespaces of MetalHost {cell.name}"
            return f"the host is given to {names}", remedy
        case "LabelMissing" if isinstance(requirement, HostRequirement):
            missing = [f"{key}={value}" for key, value in sorted(requirement.selector - cell.labels)]
            remedy = f"kubectl label metalhost {cell.name} {shlex.join(missing)}"
            return f"the host lacks {', '.join(missing)} of nodeSelector", remedy
        case "Taint" if (
            isinstance(requirement, HostRequirement)
            and (taint := find_untolerated(cell.taints, requirement.tolerations)) is not None
        ):
            remedy = f"add it to spec.tolerations, or pomona host taint {cell.name} {taint.key}-"
            return f"the service does not tolerate the taint {taint.text}", remedy
        case "AgentTooOld" if isinstance(requirement, HostRequirement):
            unknown = ", ".join(sorted(requirement.features - cell.features))
            return f"the agent does not know {unknown}", f"upgrade the agent of {cell.name}"
        case "NodeRules":
            rules = "nodeSelector, affinity or tolerations of the service"
            return f"{rules} do not admit the node", f"change them, or labels and taints of {cell.name}"
        case "VolumeElsewhere" if isinstance(requirement, NodeRequirement):
            names = ", ".join(sorted(requirement.volume_nodes or ())) or "no node"
            return f"a volume of the pod is bound to {names}", "use a volume that is reachable from more nodes"
        case "Avoided":
            return f"the {cell.kind} has rejected or displaced the replica before", "wait, or solve the cause there"
        case _:
            return cell.closed_message or f"the {cell.kind} takes no new replica", f"open the {cell.kind}"


def _describe_class(unit: Unit, cell: Cell, reason: str) -> tuple[str, str]:
    """Return the words for a device class that a service does not accept."""
    there = f"{cell.device_class or 'unknown'} of the {cell.kind}"
    if reason == NOT_FASTER:
        least = f"{format_rate(unit.speeds.least)} tokens/s"
        return f"it replaces a slow replica, and device class {there} is not known to reach {least}", ""
    if reason == TOO_TIGHT:
        return f"the replica fits on device class {there} less well than minFit", "lower spec.placement.minFit"
    if reason == SPEED_UNKNOWN:
        remedy = "remove spec.placement.minTokensPerSecond, or measure the speed: pomona bench"
        return f"the speed of the replica on device class {there} is unknown", remedy
    speed = unit.speeds.tokens_per_second.get(cell.device_class, 0.0)
    remedy = "lower spec.placement.minTokensPerSecond, or use a smaller quantization"
    return f"the replica has {format_rate(speed)} tokens/s on device class {there}", remedy


def _describe_slices(demand: SliceDemand, cell: Cell, reason: str) -> tuple[str, str]:
    whole = "use a node whose devices are not shared"
    if reason == "SharedDevices":
        return f"{demand.number} slices of its shared devices may be of the same device", f"{whole}, or ask for one"
    if demand.bytes_each is None:
        return "a slice of a shared device is no whole one, and how much the replica takes of it is unknown", whole
    sizes = f"{size_text(cell.slice_bytes or 0)}, and the replica takes {size_text(demand.bytes_each)}"
    remedy = f"lower contextLength or parallel, {whole}, or raise memoryOvercommitPercent of pool {cell.pool}"
    return f"a slice of its shared devices has {sizes}", remedy


def _describe_shortage(unit: Unit, cell: Cell, refusal: CellRefusal, made: Round, rules: PlanRules) -> tuple[str, str]:
    name = refusal.resource
    if name == CLAIM_SLOT:
        return "the scheduler is about to choose the devices of an earlier claim there", "wait"
    needed = largest_part(unit).get(name, 0)
    if refusal.reason == "TooSmall":
        has, place = cell.total.get(name, 0), "in all"
        remedy = f"lower the need of {name}, or add a larger {cell.kind}"
    else:
        has, place = max(0, made.left[cell.id].get(name, 0)), "left"
        lacking = _amount_text(name, needed - has)
        raising = ", or raise spec.priority" if made.candidates.could_yield(unit, {cell.id: cell}, made.left) else ""
        remedy = f"end replicas that hold {lacking} of {name} there{raising}"
    elastic = rules.pools.get(cell.pool, PoolRules()).elastic
    if elastic > 0:
        remedy += f"; an autoscaler adds nodes for up to {elastic} replica{'' if elastic == 1 else 's'} at once"
    return f"{_amount_text(name, needed)} of {name} needed, {_amount_text(name, has)} {place}", remedy


_LIMIT_TEXTS: Final[Mapping[LimitReason, tuple[str, str]]] = {
    "Quota": ("the quota", "end services of the namespace"),
    "Nominal": ("nominal", "end services at home in the pool"),
    "Lending": ("lendingLimit", "end services that borrow from the pool"),
    "Borrowing": ("borrowingLimit", "end services of the pool that borrow from others"),
}


def describe_limit(refusal: LimitRefusal, unit: Unit) -> tuple[str, str]:
    """Return what a limit allows, and what would help a unit that it refuses."""
    field, ending = _LIMIT_TEXTS[refusal.reason]
    namespace, _, pool = refusal.key.owner.rpartition("/")
    limit = f"{field}{f' of namespace {namespace} in' if namespace else ' of'} pool {pool}"
    measure = refusal.key.measure
    message = f"{limit} allows {limit_text(measure, refusal.allowed)}"
    if not refusal.could_ever_fit:
        return message, f"{'ask for less, or ' if refusal.allowed else ''}raise {field}"
    if refusal.used + refusal.needed <= refusal.allowed:
        return f"{limit} has room, but a replica ahead waits for it", f"wait{or_raise_priority(unit)}"
    is_one = measure == DEVICES and refusal.used == 1
    used = f"{amount_text(measure, refusal.used)} {'is' if is_one else 'are'} used"
    if unit.rank:
        return f"{message}, of which {used}", f"raise {field}, {ending}, or raise spec.priority"
    return f"{message}, of which {used}", f"raise {field}, or {ending}"


def or_raise_priority(unit: Unit) -> str:
    """Return the further remedy of a higher priority; empty if there is none above that of the unit."""
    return ", or raise spec.priority" if unit.rank else ""


def _amount_text(name: str, amount: int) -> str:
    """Return an amount in words: bytes of memory as a size."""
    return size_text(amount) if name == MEMORY or "memory" in name else f"{amount}"
