"""The AcceleratorPool reconciler: it reports the use of each pool, and what contradicts its limits.

What a status says is measured when something has changed, and kept on a board until then.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from controller.placement.admission_parts import RoundReport
from controller.placement.cell_registry import CellRegistry
from controller.placement.pool_limits import PoolProblem, amount_text, limit_text
from controller.placement.pool_standing import PoolStanding, measure_pools
from controller.placement.pool_table import PoolTable, labels_of, read_pools
from controller.placement.units import MEMORY, Cell, Unit
from controller.reconcile.conditions import condition, transitions
from controller.reconcile.plan import Plan, Reconciler, Snapshot
from crds.acceleratorpool import AcceleratorPool
from devices.vendors import Vendors
from kube.client import Client, Obj
from kube.resources import ACCELERATOR_POOLS, METAL_HOSTS, ObjectKey, Resource
from kube.store import Store

MEASURE_SECONDS: Final = 1.0
"""Least time between two measurements: a status is written at most this often."""

IDLE_SHARE: Final = 100.0
"""After a measurement the next one waits for this many times its duration: all take at most a hundredth of a core."""


class PoolBoard:
    """The standings of all AcceleratorPools. All methods run in the event loop.

    Args:
        store: the store.
        vendors: the table of accelerators.
        registry: all cells.
        on_change: gets each pool whose standing has changed.
    """

    def __init__(
        self, store: Store, vendors: Vendors, registry: CellRegistry, on_change: Callable[[ObjectKey], None]
    ) -> None:
        self._store, self._vendors, self._registry, self._on_change = store, vendors, registry, on_change
        self._units: Sequence[Unit] = ()
        """The replicas (units of the queue) that hold or want devices, as the last round of the queue has seen them."""
        self._standings: Mapping[str, PoolStanding] = {}
        """By pool, what its status says: total, used, borrowed, lent."""
        self._measured_table: PoolTable | None = None
        """The pools as they were defined when the standings were measured."""
        self._changed = asyncio.Event()
        self._has_units = False
        """A round has run since this replica leads: before, nothing is known of the use of pools."""
        registry.subscribe(self._changed.set)
        store.subscribe(self._take_change)

    def update(self, report: RoundReport) -> None:
        """Take the units of a round of the queue; each change of a unit is followed by a round."""
        self._units, self._has_units = report.units, True
        self._changed.set()

    def standing(self, pool: str) -> PoolStanding | None:
        """Return the standing of a pool, computed anew if pools have changed since; None: it is not known yet."""
        if self._measured_table is not None and read_pools(self._store, self._vendors) is not self._measured_table:
            self._measure()
        return self._standings.get(pool)

    async def run(self, _leading: object) -> None:
        """Measure all pools after each change, for ever, and report each pool whose standing is another."""
        loop = asyncio.get_running_loop()
        self._units, self._has_units, self._measured_table, self._standings = (), False, None, {}
        while True:
            await self._changed.wait()
            self._changed.clear()
            started = loop.time()
            if self._has_units:
                before = self._standings
                self._measure()
                for name, standing in self._standings.items():
                    if standing != before.get(name):
                        self._on_change(ObjectKey("", name))
            # The longer it took, the longer the pause.
            await asyncio.sleep(max(MEASURE_SECONDS, (loop.time() - started) * IDLE_SHARE))

    def _measure(self) -> None:
        """Compute the standings of all pools, and keep them and the table of pools that they follow from."""
        self._measured_table = table = read_pools(self._store, self._vendors)
        # `defined` pools are usable, `refused` ones are not. Without any there is nothing to measure.
        is_needed = table.defined or table.refused
        cells = self._registry.list_cells() if is_needed else ()
        self._standings = measure_pools(table, cells, self._units, self._find_labels) if is_needed else {}

    def _find_labels(self, cell: Cell) -> Mapping[str, str]:
        machine: Obj | None = cell.node if cell.kind == "node" else self._store.get(METAL_HOSTS, cell.name)
        return labels_of(machine) if machine is not None else {}

    def _take_change(self, resource: Resource, _old: Obj | None, _new: Obj | None) -> None:
        """Start a new measurement if a change of the store changes the table of pools."""
        if resource == ACCELERATOR_POOLS and read_pools(self._store, self._vendors) is not self._measured_table:
            self._changed.set()


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
