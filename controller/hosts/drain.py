"""The condition Drained of a host: what is left on a host that an administrator drains, and what holds the drain up.

A process is stopped only after its replacement on another host answers (`controller/services/rollout.py`), so a process
that fits nowhere else holds up the drain, as a PodDisruptionBudget does on a Node, and serves on.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from controller.reconcile.conditions import condition, find
from controller.reconcile.indexes import controller_of
from crds.meta import DRAINED
from crds.metalhost import MetalHost
from crds.size import size_text
from kube.client import Obj

WAITING_SECONDS: Final = 5.0
"""Time for a replacement to be created and bound; after it, a process without one holds up the drain."""
DRAINING: Final = "Draining"
"""Reason while processes are replaced, which is normal progress."""
_MOST_NAMED: Final = 3
_GONE: Final = frozenset({"Stopped", "Rejected"})


def drained_condition(
    host: MetalHost, bound: Iterable[Obj], siblings: Mapping[str, Sequence[Obj]], now: datetime
) -> Obj | None:
    """Return the condition Drained of a host, or None if it is not drained.

    Args:
        host: the host.
        bound: the processes that are bound to it.
        siblings: by uid of a service, its processes that are not bound to this host.
        now: the wall clock.
    """
    if not host.spec.drain:
        return None
    left = _list_left(bound)
    last = find(host.status.conditions, DRAINED)
    is_old = last is not None and _age_seconds(last.last_transition_time, now) >= WAITING_SECONDS
    blocked = [each for each in left if _is_blocked(each, siblings, now, is_old=is_old)]
    generation = host.metadata.generation
    if not left:
        message = "no process is left on this host; `pomona host uncordon` opens it again"
        return condition(DRAINED, true=True, reason=DRAINED, message=message, generation=generation)
    if not blocked:
        message = (
            f"{_count(left)} still on this host: {_list_names(left)}; each is stopped once its replacement on another "
            "host answers"
        )
        return condition(DRAINED, true=False, reason=DRAINING, message=message, generation=generation)
    message = (
        f"{_count(blocked)} held on this host, as no other host takes them: {_list_names(blocked)}; they serve on: "
        "free memory on another host, add a host, or suspend or delete their services"
    )
    return condition(DRAINED, true=False, reason="DrainBlocked", message=message, generation=generation)


def find_recheck_seconds(
    host: MetalHost, bound: Iterable[Obj], siblings: Mapping[str, Sequence[Obj]], now: datetime
) -> float | None:
    """Return the seconds until a replacement has waited too long; None if only a change of a process matters.

    The arguments are those of `drained_condition`.
    """
    if not host.spec.drain:
        return None
    left = _list_left(bound)
    last = find(host.status.conditions, DRAINED)
    waiting = [each for others in siblings.values() for each in others if not each["spec"].get("hostName")]
    since = [each["metadata"]["creationTimestamp"] for each in waiting]
    since += [last.last_transition_time] if last is not None else []
    ages = [age for each in since if (age := _age_seconds(each, now)) < WAITING_SECONDS]
    if not left or not (ages or last is None):
        return None
    return WAITING_SECONDS - max([*ages, 0.0])


def draining_facts(process: Obj) -> object:
    """Return what the condition Drained reads of a process."""
    metadata = process["metadata"]
    return metadata["uid"], process["spec"].get("hostName"), "deletionTimestamp" in metadata, _is_left(process)


def _list_left(bound: Iterable[Obj]) -> list[Obj]:
    """Return the processes of services that are still there; an inspection ends by itself."""
    return [each for each in bound if not each["spec"].get("inspect") and _is_left(each)]


def _is_left(process: Obj) -> bool:
    return process.get("status", {}).get("phase") not in _GONE


def _is_blocked(process: Obj, siblings: Mapping[str, Sequence[Obj]], now: datetime, *, is_old: bool) -> bool:
    """Return whether no host takes the replacement of a process; `is_old` if there was time to create one."""
    owner = controller_of(process)
    if owner is None or "deletionTimestamp" in process["metadata"]:
        return False
    others = siblings.get(owner["uid"], ())
    if not others:
        return is_old  # its service cannot be replaced, such as one whose Model is gone
    waiting = [each for each in others if not each["spec"].get("hostName")]
    return any(_age_seconds(each["metadata"]["creationTimestamp"], now) >= WAITING_SECONDS for each in waiting)


def _age_seconds(since: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(since)).total_seconds()


def _count(processes: Sequence[Obj]) -> str:
    return f"{len(processes)} {'process is' if len(processes) == 1 else 'processes are'}"


def _list_names(processes: Sequence[Obj]) -> str:
    """Name the services of processes and the memory that each needs, in the order of their names."""
    names = sorted(
        f"{each['metadata']['namespace']}/{each['spec']['serviceName']} ({size_text(each['spec']['memoryBytes'])})"
        for each in processes
    )
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
