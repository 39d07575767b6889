"""The output of `pomona plan`: what would become of each replica, as a table or as facts for programs."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from cli.api_objects import Obj
from cli.output import DATA_FORMATS, duration_text, print_facts, progress_width, render_table, terminal_width, wrap_text
from controller.placement.forecast import QueueForecast, UnitFate, Wait, explain_wait, first_uid, list_differences
from controller.placement.units import Cell
from controller.services.planned_services import PlannedService
from crds.placement import ClassSpeed
from devices.device_class import find_single_class
from kube.resources import ObjectKey

_TITLES: Final = ("SERVICE", "REPLICA", "PRIORITY", "POOL", "OUTCOME", "WHERE", "WHY")
_NARROW: Final = (0, 4, 5, 6)
"""Columns of a table that fits the terminal."""

ListSpeeds = Callable[[ObjectKey], Sequence[ClassSpeed]]
"""Returns the speeds of a service by device class."""


class PlannedChange(NamedTuple):
    """The fate of one unit in comparison with that before a change."""

    fate: UnitFate
    origin: tuple[str, ...]
    """`Cell.id` of the cells where it runs before; empty: it waits, or is new."""
    wait: Wait | None
    """Its place in the queue; None if the unit does not wait."""
    speed: ClassSpeed | None = None
    """Its speed where it starts; None if that is unknown, or the unit does not start."""

    @property
    def outcome(self) -> str:
        """The outcome in one word: starts, moves, waits, evicted, stays or ends.

        A unit, which is a replica to the queue, moves if it starts on one cell and ran on another before. It is evicted
        if it must end for another unit, its preemptor, and then waits.

        `fate` is what becomes of the unit in the forecast, `origin` the cells, nodes or hosts, where it ran before.
        """
        match self.fate.state:
            case "starts":
                return "moves" if self.origin else "starts"
            case "waits":
                if self.fate.preemptor is not None:
                    return "evicted"
                # A host that is drained lets a process serve on until it has a place elsewhere.
                return "stays" if self.origin and self.fate.unit.key.kind == "process" else "waits"
            case "runs":
                return "stays"
            case "ends":
                return "ends"


class QueuePlan(NamedTuple):
    """The effect of a change on the queue."""

    changes: Sequence[PlannedChange]
    after: QueueForecast
    notes: Sequence[str] = ()
    """Further lines for people."""
    services: Sequence[PlannedService] = ()
    """The services of manifests."""


def list_changes(
    before: QueueForecast,
    after: QueueForecast,
    always_shown: Sequence[str],
    list_speeds: ListSpeeds = lambda _service: (),
) -> list[PlannedChange]:
    """Return how a change of the cluster alters the fates of units: where each starts, waits or is evicted.

    Args:
        before: the forecast without the change.
        after: the forecast with it.
        always_shown: uids of units that are listed even if their fate is the same in both forecasts.
        list_speeds: returns the speeds of services.
    """
    changes, cells = list[PlannedChange](), {cell.id: cell for cell in after.cells}
    for fate in list_differences(before, after, always_shown):
        # An evicted unit has a successor with another uid, which begins with the first one.
        earlier = before.fates.get(first_uid(fate.unit.uid))

        # target: the cell, a node or host, where the unit starts; None: it does not start, or its node is not there yet
        # origin: the cells where it ran before; wait: why it waits, and where in the queue
        target = cells.get(fate.cells[0]) if fate.state == "starts" and fate.cells else None
        origin = earlier.unit.cells if earlier is not None else ()
        wait = explain_wait(after, fate) if fate.state == "waits" else None

        speed = _find_speed(list_speeds(fate.unit.service), target)
        changes.append(PlannedChange(fate, origin, wait, speed))
    return changes


def _find_speed(speeds: Sequence[ClassSpeed], cell: Cell | None) -> ClassSpeed | None:
    """Return the first known speed of a service on devices of a cell's class; None: there is none, or no cell.

    The class of a cell is that of one device (`nvidia-l4x1`), that of a speed counts those of a replica
    (`nvidia-l4x2`): they are compared without the number.
    """
    if cell is None or not cell.device_class:
        return None
    for speed in speeds:
        if find_single_class(speed.device_class) == cell.device_class and speed.tokens_per_second:
            return speed
    return None


def print_plan(plan: QueuePlan, output_format: str, extra: Obj, *, empty: str) -> None:
    """Print a plan.

    Args:
        plan: the plan.
        output_format: table, wide, json or yaml.
        extra: further facts, for programs.
        empty: the line of a table without rows.
    """
    if output_format in DATA_FORMATS:
        facts = {**extra, "replicas": build_changes(plan.changes), "isComplete": plan.after.is_complete}
        print_facts(facts, output_format)
        return
    print_changes(plan, None if output_format == "wide" else progress_width(), empty)


def print_changes(plan: QueuePlan, width: int | None, empty: str, further: Sequence[str] = ()) -> None:
    """Print a plan as a table of `width` columns, with its notes and further lines below."""
    print(render_changes(plan.changes, width) if plan.changes else empty)
    incomplete = [] if plan.after.is_complete else ["the plan was ended early: more would change after this"]
    for line in (*plan.notes, *further, *incomplete):
        print("\n".join(wrap_text(line, terminal_width())))


def render_changes(changes: Sequence[PlannedChange], width: int | None) -> str:
    """Return the table of changes; without a width it has all columns and cuts nothing."""
    # A row has all columns, in the order of _TITLES.
    rows = [
        (
            str(change.fate.unit.service),
            change.fate.unit.key.name,
            change.fate.unit.priority,
            ",".join(change.fate.unit.pools),
            _describe_outcome(change),
            _describe_place(change),
            describe_cause(change),
        )
        for change in changes
    ]

    # _NARROW: numbers of the columns that fit a terminal. The first two of them are cut last.
    shown = range(len(_TITLES)) if width is None else _NARROW
    return render_table(
        [_TITLES[column] for column in shown], [[row[column] for column in shown] for row in rows], width, {0, 1}
    )


def _describe_outcome(change: PlannedChange) -> str:
    """Return the outcome with the place in the queue, such as `waits 2/5`, or with the time after which it comes."""
    text = change.outcome
    if change.wait is not None and text != "stays":
        # Position 0: no node or host could ever run it.
        place = f"{change.wait.position}/{change.wait.length}" if change.wait.position else "without a place"
        return f"{text}, waits {place}" if text == "evicted" else f"{text} {place}"
    if change.fate.after_seconds:
        return f"{text} in {duration_text(change.fate.after_seconds)}"
    return text


def _describe_place(change: PlannedChange) -> str:
    """Return the cells where a unit starts or stays; of one that moves, also those that it leaves."""
    origin, target = ",".join(change.origin), ",".join(change.fate.cells)
    if change.outcome == "moves":
        return f"{origin} to {target or 'a new node'}"
    if change.outcome == "starts":
        return target or "a new node"
    return origin


def describe_cause(change: PlannedChange) -> str:
    """Return the reasons for the fate of a unit, in words; "" if there is none to tell."""
    fate, parts = change.fate, list[str]()
    # preemptor: the unit for which this one is evicted; evicts: the units that end for this one
    if fate.preemptor is not None:
        parts.append(f"evicted for {fate.preemptor.service} of priority {fate.preemptor.priority}")
    if change.wait is not None:
        parts.append(f"{change.wait.reason}: {change.wait.message}")
    if fate.evicts:
        victims = sorted({f"{victim.service} of priority {victim.priority}" for victim in fate.evicts})
        parts.append(f"evicts {', '.join(victims)}")
    if change.speed is not None:
        parts.append(_describe_speed(change.speed))
    if fate.state == "starts" and fate.scores:
        parts.append(fate.scores[0].explain())
    if fate.state == "ends":
        parts.append("replaced by a replica of the new spec")
    return "; ".join(parts)


def _describe_speed(speed: ClassSpeed) -> str:
    between = f", {speed.low} to {speed.high}" if speed.low and speed.high else ""
    return f"{speed.tokens_per_second} tokens/s ({speed.source}{between})"


def build_changes(changes: Sequence[PlannedChange]) -> list[Obj]:
    """Return the facts for programs."""
    return [_build_change(change) for change in changes]


def explain_services(services: Sequence[PlannedService]) -> list[str]:
    """Return a line for each problem and each note of services."""
    lines = list[str]()
    for service in services:
        if service.problem is not None:
            lines.append(f"{service.key} gets no replica ({service.problem.reason}): {service.problem.message}")
        lines += [f"{service.key}: {note}" for note in service.notes]
    return lines


def describe_services(services: Sequence[PlannedService]) -> list[Obj]:
    """Return the problems and notes of services for programs."""
    return [
        {
            "namespace": service.key.namespace,
            "name": service.key.name,
            "problem": {"reason": problem.reason, "message": problem.message} if (problem := service.problem) else None,
            "notes": list(service.notes),
        }
        for service in services
    ]


def _build_change(change: PlannedChange) -> Obj:
    """Return the facts of one change for programs."""
    # Programs get every key; empty or null is what does not apply, such as the speed of a unit that waits.
    fate, wait = change.fate, change.wait
    unit, speed = fate.unit, change.speed  # a unit is a replica in the queue
    return {
        "namespace": unit.service.namespace,
        "service": unit.service.name,
        "kind": unit.key.kind,
        "replica": unit.key.name,
        "priority": unit.priority,
        "pools": list(unit.pools),
        "outcome": change.outcome,
        "from": list(change.origin),
        "to": list(fate.cells) if fate.state == "starts" else [],
        "afterSeconds": round(fate.after_seconds),
        "score": fate.scores[0].explain() if fate.scores else "",
        "deviceClass": speed.device_class if speed is not None else "",
        "tokensPerSecond": _read_rate(speed.tokens_per_second) if speed is not None else None,
        "tokensPerSecondLow": _read_rate(speed.low) if speed is not None else None,
        "tokensPerSecondHigh": _read_rate(speed.high) if speed is not None else None,
        "speedSource": speed.source if speed is not None else None,
        "evictedFor": str(fate.preemptor.service) if fate.preemptor is not None else "",
        "evicts": sorted({str(victim.service) for victim in fate.evicts}),
        "place": {"position": wait.position, "length": wait.length} if wait is not None and wait.position else None,
        "reason": wait.reason if wait is not None else "",
        "message": wait.message if wait is not None else "",
    }


def _read_rate(text: str | None) -> float | None:
    return float(text) if text else None
