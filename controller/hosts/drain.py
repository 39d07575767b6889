"""The condition Drained of a host: what is left on a host that an administrator drains, and what holds the drain up.

A process is stopped only after its replacement on another host answers (`controller/services/rollout.py`), so a process
that fits nowhere else holds up the drain, as a PodDisruptionBudget does on a Node, and serves on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from controller.placement.queue_places import parse_time
from controller.reconcile.conditions import condition, find
from crds.meta import DRAINED
from crds.metalhost import MetalHost
from crds.metalprocess import HOLDS_NO_MEMORY, HostedProcess
from crds.size import size_text
from kube.client import Obj

WAITING_SECONDS: Final = 30.0
"""Time for a replacement to be created and bound, also where many hosts are drained at once; after it, a process
without one holds up the drain."""
DRAINING: Final = "Draining"
"""Reason while processes are replaced, which is normal progress."""
_MOST_NAMED: Final = 3


def build_drained_condition(
    host: MetalHost,
    bound: Iterable[HostedProcess],
    siblings: Mapping[str, Sequence[HostedProcess]],
    now: datetime,
) -> Obj | None:
    """Return the condition Drained of a host, or None if nobody drains it.

    It is True once no process is left. Else its reason is DrainBlocked if no other host takes some of them, and
    Draining as long as none counts as blocked.

    Args:
        host: the host.
        bound: the processes that are bound to it.
        siblings: by uid of a service, its processes that are not bound to this host.
        now: the wall clock.
    """
    if not host.spec.drain:
        return None

    # 1. The processes that still run here, and those of them whose replacement fits on no other host.
    remaining = [process for process in bound if process.holds_memory]
    # The drain is as old as the condition; after this time, each process that can have a replacement has one.
    last = find(host.status.conditions, DRAINED)
    is_drain_old = last is not None and _age_seconds(last.last_transition_time, now) >= WAITING_SECONDS
    blocked = [process for process in remaining if _is_blocked(process, siblings, now, is_drain_old=is_drain_old)]

    # 2. Reason and message.
    reason = DRAINING
    if not remaining:
        reason, message = DRAINED, "no process is left on this host; `pomona host uncordon` opens it again"
    elif blocked:
        reason = "DrainBlocked"
        message = (
            f"{_count(blocked)} held on this host, as no other host takes them: {_list_names(blocked)}; they serve on: "
            "free memory on another host, add a host, or suspend or delete their services"
        )
    else:
        message = (
            f"{_count(remaining)} still on this host: {_list_names(remaining)}; each is stopped once its replacement "
            "on another host answers"
        )
        # Those whose replacement has failed.
        if failing := [process for process in remaining if _is_failing(process, siblings)]:
            message += f"; the replacement of {_list_names(failing)} does not start: see `pomona status SERVICE`"
    return condition(DRAINED, true=not remaining, reason=reason, message=message, generation=host.metadata.generation)


def find_recheck_seconds(
    host: MetalHost,
    bound: Iterable[HostedProcess],
    siblings: Mapping[str, Sequence[HostedProcess]],
    now: datetime,
) -> float | None:
    """Return the seconds after which the condition Drained may change although no process changes; None: never.

    That is the time until a process counts as blocked: because the drain is old enough, or because a replacement has
    waited long enough for a host. The arguments are those of `build_drained_condition`.
    """
    if not host.spec.drain or not any(process.holds_memory for process in bound):
        return None

    # Until the drain is old enough; without the condition yet, it begins now.
    last = find(host.status.conditions, DRAINED)
    drain_age_seconds = _age_seconds(last.last_transition_time, now) if last is not None else 0.0
    seconds = [WAITING_SECONDS - drain_age_seconds]
    # Until each replacement has waited long enough: the processes of the same services that have no host yet.
    seconds += [
        _seconds_until_blocked(waiting, now) for others in siblings.values() for waiting in _list_unbound(others)
    ]
    # The soonest of these times that is still to come.
    return min((left for left in seconds if left > 0), default=None)


def draining_facts(process: Obj) -> object:
    """Return the fields of a process that the condition Drained depends on."""
    metadata, phase = process["metadata"], process.get("status", {}).get("phase")
    is_leaving = "deletionTimestamp" in metadata
    return metadata["uid"], process["spec"].get("hostName"), is_leaving, phase in HOLDS_NO_MEMORY, phase == "Failed"


def _is_failing(process: HostedProcess, siblings: Mapping[str, Sequence[HostedProcess]]) -> bool:
    """Return whether a process of the same service fails on another host."""
    return any(sibling.status.phase == "Failed" for sibling in siblings.get(process.owner_uid, ()))


def _is_blocked(
    process: HostedProcess,
    siblings: Mapping[str, Sequence[HostedProcess]],
    now: datetime,
    *,
    is_drain_old: bool,
) -> bool:
    """Return whether a process cannot leave its host because no other host takes its replacement.

    It is blocked if its service has a process that has waited for a host for `WAITING_SECONDS`; or, without any process
    elsewhere, if the drain is old: by then one would have been created. A process that no service owns, or that is
    being deleted, never counts as blocked.
    """
    if not process.owner_uid or process.is_deleted:
        return False
    others = siblings.get(process.owner_uid, ())  # those of the same service that are not on this host
    if not others:
        return is_drain_old  # no replacement was made by then, such as for a service whose Model is gone
    return any(_seconds_until_blocked(waiting, now) <= 0 for waiting in _list_unbound(others))


def _list_unbound(processes: Iterable[HostedProcess]) -> list[HostedProcess]:
    """Return the processes that are not bound to a host yet."""
    return [process for process in processes if not process.spec.host_name]


def _seconds_until_blocked(waiting: HostedProcess, now: datetime) -> float:
    """Return the seconds until a replacement without a host counts as blocked; 0 or less: it is."""
    return WAITING_SECONDS - _age_seconds(waiting.metadata.creation_timestamp, now)


def _age_seconds(since: str, now: datetime) -> float:
    """Return the seconds since a time; infinite if the text is no time, such as a stolen host may state."""
    moment = parse_time(since)
    return math.inf if moment is None else (now - moment).total_seconds()


def _count(processes: Sequence[HostedProcess]) -> str:
    """Return the number of processes in words, with the verb."""
    return f"{len(processes)} {'process is' if len(processes) == 1 else 'processes are'}"


def _list_names(processes: Sequence[HostedProcess]) -> str:
    """Name the services of processes and the memory that each needs, in the order of their names."""
    names = sorted(
        f"{process.metadata.namespace}/{process.spec.service_name} ({size_text(process.spec.memory_bytes)})"
        for process in processes
    )
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
