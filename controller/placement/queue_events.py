"""The Events about admissions and preemptions, which the loop that decides them sends."""

from controller.placement.units import Unit
from controller.reconcile.plan import Event

_ACTION = "Queue"


def describe_admission(unit: Unit, cells: tuple[str, ...], wait_seconds: float) -> Event:
    """Return the Event about the service of a unit that gets its cells; without cells, an autoscaler adds a node."""
    place = ", ".join(cells) if cells else "a node that an autoscaler adds"
    note = f"{unit.key} gets {place} after {format_wait(wait_seconds)} in the queue"
    return Event("Normal", "Admitted", note, _ACTION)


def describe_preemption(victim: Unit, preemptor: Unit) -> Event:
    """Return the Event about the service of a unit that ends for another one."""
    note = (
        f"Preempted by {preemptor.service} ({preemptor.priority}): {victim.key} ({victim.priority}) ends, and waits "
        "again at its old place in the queue"
    )
    return Event("Warning", "Preempted", note, _ACTION)


def format_wait(seconds: float) -> str:
    """Return a time in words for people, such as `2 h 5 min`."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{rest} s"
