"""The AcceleratorPool reconciler: it reports the use of each pool, and what contradicts its limits."""

from collections.abc import Callable
from typing import Final

from controller.placement.pool_limits import PoolProblem, amount_text, limit_text
from controller.placement.pool_standing import PoolStanding
from controller.placement.units import MEMORY
from controller.reconcile.conditions import condition, transitions
from controller.reconcile.plan import Plan, Reconciler, Snapshot
from crds.acceleratorpool import AcceleratorPool
from kube.client import Client, Obj
from kube.resources import ACCELERATOR_POOLS, ObjectKey

READY: Final = "Ready"


def pool_reconciler(find_standing: Callable[[str], PoolStanding | None]) -> Reconciler:
    """Return the reconciler; `find_standing` returns the standing of a pool, or None while it is not known."""

    async def observe(_client: Client, _snapshot: Snapshot, key: ObjectKey) -> PoolStanding | None:
        return find_standing(key.name)

    return Reconciler(resource=ACCELERATOR_POOLS, decide=decide_pool, observe=observe)


def decide_pool(snapshot: Snapshot, key: ObjectKey) -> Plan:
    """Decide about one pool: its status."""
    pool = snapshot.read(ACCELERATOR_POOLS, key, AcceleratorPool)
    standing: PoolStanding | None = snapshot.inputs
    if pool is None or standing is None or pool.metadata.deletion_timestamp is not None:
        return Plan()
    ready = _build_ready(standing, pool.metadata.generation)
    return Plan(
        status=_build_amounts(standing) | {"conditions": [ready]},
        events=transitions(pool.status.conditions, [ready], action="Measure", silent={READY}),
    )


def _build_amounts(standing: PoolStanding) -> Obj:
    """Return the fields of a pool's status that say how much of it is used, as text and in numbers."""
    total, used = (amount_text(standing.measure, amount) for amount in (standing.total, standing.used))
    return {
        "cells": standing.cells,
        "waiting": standing.waiting,
        "used": f"{used}/{total}",
        "borrowed": amount_text(standing.measure, standing.borrowed),
        "lent": amount_text(standing.measure, standing.lent),
        "amounts": {
            "total": standing.total,
            "used": standing.used,
            "borrowed": standing.borrowed,
            "lent": standing.lent,
        },
    }


def _build_ready(standing: PoolStanding, generation: int) -> Obj:
    """Return the condition Ready of a pool: False with all its problems, else True with its size."""
    if standing.problems:
        first: PoolProblem = standing.problems[0]
        message = "; ".join(problem.message for problem in standing.problems)
        return condition(READY, true=False, reason=first.reason, message=message, generation=generation)
    noun = "host" if standing.measure == MEMORY else "node"
    number = f"{standing.cells} {noun}{'' if standing.cells == 1 else 's'}"
    message = f"{number} with {limit_text(standing.measure, standing.total)}"
    return condition(READY, true=True, reason=READY, message=message, generation=generation)
