"""The parts that the loop of admission works with, and what it tells the rest of the controller about each round."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Literal, NamedTuple

from controller.placement.actions import Admit, EvictUnit
from controller.placement.cell_registry import CellRegistry
from controller.placement.observed_units import FindVolumeNodes
from controller.placement.planner import PlanRules, Round
from controller.placement.units import Cell, Unit
from devices.vendors import Vendors

AdmissionOutcome = Literal["admitted", "stale", "failed"]
"""Outcome of a decision. stale: before the write, the unit changed, or its cell was lost or had no room left."""


class RoundReport(NamedTuple):
    """One round, for the parts that report it to users."""

    round: Round
    cells: Sequence[Cell]
    units: Sequence[Unit]
    """All units, also those whose admission is under way."""
    now: float
    """The wall clock, in seconds since 1970."""
    plan_seconds: float
    """Duration of the round until it was planned."""
    processor_seconds: float
    """Processor time of its planning."""
    failures: Mapping[str, str] = MappingProxyType({})
    """The error by uid of each unit whose last write failed: it waits, though the round may leave it out."""
    claimed: frozenset[str] = frozenset()
    """Cells that units are being given since earlier rounds, by `Cell.id`."""


class AdmissionParts(NamedTuple):
    """The collaborators of the loop, apart from the API server."""

    registry: CellRegistry
    vendors: Vendors
    identity: str
    """Name of this replica, by which the ledger tells leaders apart."""
    is_queued_by_default: bool = True
    """Services that state no mode are in mode Queue."""
    find_volume_nodes: FindVolumeNodes = lambda _pod: None
    """Finds the nodes of the volumes of a waiting pod."""
    rules: Callable[[], PlanRules] = PlanRules
    """Returns the administrator's rules."""
    on_round: Callable[[RoundReport], None] = lambda _report: None
    """Called after each round has been planned."""
    on_outcome: Callable[[AdmissionOutcome], None] = lambda _outcome: None
    """Called with the outcome of each admission."""
    on_admitted: Callable[[Admit], None] = lambda _action: None
    """Called with each unit that was admitted."""
    on_preemption: Callable[[EvictUnit], None] = lambda _eviction: None
    """Called with each unit that was evicted for another one."""
    admitting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Returns the context in which units are admitted."""
