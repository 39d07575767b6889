"""The standing of a service in the queue: its position, and why it waits, in words with the way out."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final, NamedTuple, get_args

import msgspec

from controller.placement.pool_limits import LimitRefusal
from controller.placement.refusals import RefusalMeaning, describe_limit, find_refusal_of, or_raise_priority
from controller.placement.start_estimate import StartRange, measure_need
from controller.placement.units import CLAIM_SLOT, CPU, MEMORY, Cell, NodeRequirement, Unit, find_shortage
from crds.meta import Priority
from crds.queue_status import NoEstimate, QueueReason
from crds.size import size_text
from kube.time import rfc3339

_MOST_NAMED: Final = 3


class ServiceStanding(msgspec.Struct, frozen=True, kw_only=True):
    """The standing of the first unit of a service that waits."""

    pool: str
    position: int | None
    """The first is 1; None: it can never run."""
    length: int
    ahead: Mapping[Priority, int]
    """Units ahead of it by priority; a priority without any is absent."""
    waiting_for: str
    enqueued_at: float
    cells: tuple[str, ...] = ()
    """The cells that it is nominated for."""
    victims: tuple[str, ...] = ()
    """The services whose units end for it, by name if they are in its namespace."""
    reason: QueueReason
    message: str
    start: StartRange | NoEstimate

    @property
    def place(self) -> str:
        """Position and length in one."""
        return f"{self.position}/{self.length}" if self.position is not None else ""


class CellCounts(NamedTuple):
    """The cells of a unit's pools by what they mean to it."""

    never: Mapping[str, int]
    """Number of the cells that can never run it, by reason."""
    closed: Mapping[str, int]
    """Number of the cells that could run it and take nothing new, by reason."""
    short: Mapping[str, int]
    """Number of the cells that have too little free, by the first resource that lacks."""
    others: int
    """Cells that have enough free or are to be avoided."""
    limited: Mapping[str, int] = MappingProxyType({})
    """Number of the cells that could run it, and out of which a limit keeps it, by reason."""

    @property
    def feasible(self) -> int:
        """Number of the cells that could run it."""
        return sum(self.closed.values()) + sum(self.limited.values()) + self.open

    @property
    def open(self) -> int:
        """Number of the cells that could run it and take units, apart from those out of which a limit keeps it."""
        return sum(self.short.values()) + self.others


def sort_refusals(refusals: Mapping[str, int]) -> CellCounts:
    """Return the counts of a `RefusalCounter` by what its texts, `REASON` or `REASON RESOURCE`, mean to the unit."""
    counts: dict[RefusalMeaning, dict[str, int]] = {meaning: {} for meaning in get_args(RefusalMeaning)}
    for text, number in refusals.items():
        reason, _, resource = text.partition(" ")
        meaning = find_refusal_of(reason).meaning
        # Where too little is free, cells are counted by the resource that lacks, else by reason.
        counts[meaning][resource if meaning == "short" else reason] = number
    # Cells that could run the unit (open), or run it next (ready), need no reason.
    others = sum((*counts["open"].values(), *counts["ready"].values()))
    return CellCounts(
        never=counts["never"], closed=counts["closed"], short=counts["short"], others=others, limited=counts["limited"]
    )


def find_largest(unit: Unit, cells: Iterable[Cell]) -> Cell | None:
    """Return the cell with the most of the unit's scarce resource in all, of those whose rules the unit meets."""
    lane, _ = measure_need(unit)
    eligible = [cell for cell in cells if cell.pool in unit.pools and not unit.refuse(cell)]
    return max(eligible, key=lambda cell: (cell.total.get(lane.resource, 0), cell.name), default=None)


def find_lacking(unit: Unit, counts: CellCounts) -> str:
    """Return the resource of which most cells have too little free; if none lacks, that which is scarce in general."""
    if not counts.short:
        return measure_need(unit)[0].resource
    return max(counts.short, key=lambda resource: (counts.short[resource], resource))


def find_lack(unit: Unit, counts: CellCounts) -> QueueReason:
    """Return the reason of a unit that waits for a mere lack of room: what lacks, or that cells are closed."""
    if not counts.open and counts.closed:
        return "CellsClosed"
    lacking = find_lacking(unit, counts)
    # Devices have a name with a domain, such as nvidia.com/gpu. CLAIM_SLOT stands for the choice of claimed devices.
    return "InsufficientDevices" if "/" in lacking or lacking == CLAIM_SLOT else "InsufficientMemory"


def describe_need(unit: Unit) -> str:
    """Return what one replica needs of what is scarce, such as `nvidia.com/gpu: 2`."""
    lane, total = measure_need(unit)
    # A lane is a pool with the resource that is scarce there; `total` is the need of all pods.
    per_pod = unit.parts[0].get(lane.resource, 0)
    are_pods_alike = per_pod * len(unit.parts) == total
    if len(unit.parts) > 1 and are_pods_alike:
        return f"{len(unit.parts)} pods with {_describe_amount(lane.resource, per_pod)} each"
    return _describe_amount(lane.resource, total)


class WaitFacts(NamedTuple):
    """The inputs of `describe_wait`."""

    counts: CellCounts
    largest: Cell | None = None
    """The largest cell, if no cell can ever run the unit."""
    cells: tuple[str, ...] = ()
    """The cells whose room is kept for it."""
    victims: tuple[str, ...] = ()
    """The services whose units end for it."""
    victims_end_by: float | None = None
    """When these have ended at the latest, in seconds since 1970; None: that is not known."""
    ahead: int = 0
    """Number of units ahead."""
    limit: LimitRefusal | None = None
    """The limit for which the unit waits."""
    priority_helps: bool = True
    """A higher priority might make room."""
    error: str = ""
    """The reason why its admission failed."""


def describe_wait(unit: Unit, reason: QueueReason, facts: WaitFacts) -> str:
    """Return why a unit waits, and what would help."""
    counts, ahead = facts.counts, facts.ahead
    need, noun = describe_need(unit), _noun(unit)  # such as `nvidia.com/gpu: 2`; node or host

    # 1. The unit has a place already, or none was looked for.
    if reason == "Draining":
        cells, ending = (", ".join(names[:_MOST_NAMED]) for names in (facts.cells, facts.victims))
        way_out = f"room on {cells} is kept for it: it starts as soon as replicas of {ending or 'others'} have ended"
        if facts.victims_end_by is None:
            return way_out
        until = rfc3339(datetime.fromtimestamp(facts.victims_end_by, UTC))
        return f"{way_out}, which finish their answers, at the latest by {until}"
    if reason == "NotConsidered":
        return f"{ahead} replicas are ahead, so many that its turn is not near: add {noun}s{or_raise_priority(unit)}"
    if reason == "AdmissionFailed":
        return f"its admission could not be written and is tried again: {facts.error}"

    # 2. No cell can take it, however much is free.
    if reason == "NoSuchHardware":
        return _describe_missing(unit, facts, need, noun)
    if reason == "CellsClosed":
        return (
            f"needs {need}, and {_describe_closed(counts, noun)}: wait until one opens, or add {_name_addition(unit)}"
        )

    # 3. Room is kept for others, a limit holds it back, or too little is free.
    if reason == "HeadOfLine":
        return (
            f"needs {need}; the {noun}s with that much free are kept for a replica ahead, which waits for more: wait"
            f"{or_raise_priority(unit)}"
        )
    if reason == "Quota" and facts.limit is not None:
        return f"needs {need}, but {': '.join(describe_limit(facts.limit, unit))}"
    return _describe_lack(unit, facts)


def _describe_lack(unit: Unit, facts: WaitFacts) -> str:
    """Return the words for a unit for which too little is free."""
    # 1. What lacks.
    need, noun, counts = describe_need(unit), _noun(unit), facts.counts
    parts = [f"needs {need}; {_describe_open(unit, counts, noun)}"]
    lacking = find_lacking(unit, counts)
    # What is needed names the scarce resource already; another one that lacks is added.
    if lacking != measure_need(unit)[0].resource:
        parts.append(f"most of them lack {lacking}")
    if counts.closed:
        parts.append(_describe_closed(counts, noun))
    if counts.limited:
        refused = ", ".join(f"{number} {word}" for word, number in sorted(counts.limited.items()))
        parts.append(f"limits keep it out of {_count(sum(counts.limited.values()), noun)} ({refused})")

    # 2. The way out. A unit of rank 0 has the highest priority already.
    way_out = "it starts after those ahead, once others end" if facts.ahead else "it starts once others end"
    if unit.rank and facts.priority_helps:
        way_out += f"; add {_name_addition(unit)}, or raise spec.priority so that others make room"
        return f"{'; '.join(parts)}: {way_out}"
    if unit.rank:  # a higher priority would not help
        parts.append("none that runs there may be evicted for it, even at priority critical")
    return f"{'; '.join(parts)}: {way_out}, or add {_name_addition(unit)}"


def _describe_open(unit: Unit, counts: CellCounts, noun: str) -> str:
    """Return the words for open cells with too little free; a gang waits although some fit one of its pods."""
    if len(unit.parts) > 1:
        subject = f"the only open {noun}" if counts.open == 1 else f"the {counts.open} {noun}s"
        return f"not all of them fit into what is free on {subject} that could run one"
    subject = f"the only open {noun}" if counts.open == 1 else f"each of the {counts.open} {noun}s"
    return f"{subject} that could run it has less free"


def _describe_missing(unit: Unit, facts: WaitFacts, need: str, noun: str) -> str:
    """Return why no cell can ever run a unit, with the largest that exists."""
    lane, _ = measure_need(unit)  # its `resource` is the scarce one
    counts, largest, pools = facts.counts, facts.largest, ", ".join(unit.pools)

    # 1. Each pod of a gang fits somewhere, but not all at once.
    if counts.feasible and len(unit.parts) > 1:
        room = _count(counts.feasible, noun)
        return f"its {len(unit.parts)} pods do not fit on {room} together: ask for less, or add {noun}s"

    # 2. The pools are empty, or rules refuse every cell (`never`: cells by reason).
    if largest is None and not counts.never:
        return f"no {noun} is in pool {pools}: add one that has {need}"
    refused = "; ".join(
        find_refusal_of(reason).count_cells(number, noun) for reason, number in sorted(counts.never.items())
    )
    if largest is None:
        return f"no {noun} of pool {pools} can ever run it: {refused}: change the service, or add a {noun}"
    others = f"; {refused}" if refused else ""

    # 3. Its kind of device is nowhere, or the largest cell is too small.
    if "/" in lane.resource and not largest.total.get(lane.resource):
        return (
            f"no {noun} can ever run it: it needs {need}, of which no {noun} of pool {pools} has any{others}: ask for "
            f"devices that are there, or add such a {noun}"
        )
    there = _describe_amount(lane.resource, largest.total.get(lane.resource, 0))
    lacking = find_shortage(unit.parts[0], largest.total)
    more = f" and too little {lacking}" if lacking and lacking != lane.resource else ""
    return (
        f"no {noun} can ever run it: it needs {need}, and the largest, {largest.name}, has {there}{more}{others}: ask "
        f"for less, or add such a {noun}"
    )


def _describe_closed(counts: CellCounts, noun: str) -> str:
    """Return the words for cells that could run the unit and are closed, with the reasons."""
    closed = ", ".join(f"{number} {word}" for word, number in sorted(counts.closed.items()))
    number = sum(counts.closed.values())
    return f"{_count(number, noun)} that could run it {'are' if number != 1 else 'is'} closed ({closed})"


def _describe_amount(resource: str, amount: int) -> str:
    """Return an amount with its resource, such as `nvidia.com/gpu: 2` or `memory: 8.0 GiB`."""
    if resource == MEMORY:
        return f"{resource}: {size_text(amount)}"
    return f"{resource}: {amount}{'m' if resource == CPU else ''}"


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `2 nodes`."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _name_addition(unit: Unit) -> str:
    """Return in words the node or host that would help if it were added."""
    is_bound = isinstance(unit.requirement, NodeRequirement) and unit.requirement.volume_nodes is not None
    return f"a {_noun(unit)}{' that can mount its volume' if is_bound else ''}"


def _noun(unit: Unit) -> str:
    """Return `node` for the unit of a pod, `host` for that of a process."""
    return "node" if isinstance(unit.requirement, NodeRequirement) else "host"
