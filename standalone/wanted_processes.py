"""Decide which processes run on this machine: those of the decisions, and old ones that serve until these do.

A service that was edited has other processes than before. Where the memory holds both, the old ones serve until the
new ones do; else they end first, and requests wait. While the new ones cannot be decided, as when a source does not
answer or is wrong, the old ones serve on.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from kube.resources import ObjectKey
from metal_agent.assignments import Assignment
from metal_agent.holds.hold_gate import HoldableProcess
from metal_agent.memory.ledger import Ledger
from standalone.desired import Decision


class WantedProcesses(NamedTuple):
    """The processes that should run."""

    assignments: tuple[Assignment, ...]
    is_complete: bool
    """Every service is decided, so that no other process will be wanted without a change of the files."""


def find_wanted(
    decisions: Mapping[ObjectKey, Decision],
    processes: Collection[HoldableProcess],
    ledger: Ledger,
    is_unwanted: Callable[[ObjectKey], bool],
) -> WantedProcesses:
    """Return the processes that should run now.

    Args:
        decisions: the decision for each service.
        processes: those that there are.
        ledger: the memory that they have.
        is_unwanted: returns True for a service on demand whose model should not be loaded.
    """
    by_service: dict[ObjectKey, list[HoldableProcess]] = {}
    for process in processes:
        by_service.setdefault(process.assignment.service, []).append(process)

    wanted, is_complete, free_bytes = list[Assignment](), True, ledger.available_bytes
    for key, decision in decisions.items():
        if decision.problem is not None and decision.problem.phase == "Suspended":
            continue
        is_complete &= bool(decision.assignments)
        if is_unwanted(key):
            continue
        uids = {assignment.uid for assignment in decision.assignments}
        present = by_service.get(key, [])
        old = [process for process in present if process.assignment.uid not in uids and process.state.exists]
        wanted += decision.assignments
        free_bytes -= sum(
            assignment.spec.memory_bytes for assignment in decision.assignments if assignment.uid not in ledger.reserved
        )
        if not uids or (free_bytes >= 0 and _serve_until_replaced(old, decision.assignments, present)):
            wanted += [process.assignment for process in old if not process.state.leaving]
    return WantedProcesses(tuple(wanted), is_complete)


def _serve_until_replaced(
    old: Iterable[HoldableProcess], new: Iterable[Assignment], present: Iterable[HoldableProcess]
) -> bool:
    """Return whether old processes serve, the new ones do not yet, and none of these was refused for lack of memory."""
    states = {process.assignment.uid: process.state for process in present}
    found = [states.get(assignment.uid) for assignment in new]
    is_replaced = all(state is not None and state.phase == "Ready" for state in found)
    is_refused = any(state is not None and state.needed_bytes is not None for state in found)
    return not (is_replaced or is_refused) and any(process.state.phase == "Ready" for process in old)
