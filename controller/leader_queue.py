"""The queue of a controller that reads the whole cluster: admission, board, pools, rooms and notes, put together."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from controller.benchmarks.benchmark_runner import BenchmarkRunner
from controller.benchmarks.host_results import HostResults
from controller.controller_options import ControllerOptions
from controller.metrics import PREEMPTED_FOR_PRIORITY, ControllerMetrics
from controller.placement.actions import Admit
from controller.placement.admission_loop import Admission
from controller.placement.admission_parts import AdmissionParts, RoundReport
from controller.placement.board import Board
from controller.placement.bound_volumes import BoundVolumes
from controller.placement.candidate_room import CandidateRooms
from controller.placement.cell_registry import CellRegistry
from controller.placement.placement_notes import PlacementNotes
from controller.placement.planner import PlanRules
from controller.placement.pool_table import read_pools
from controller.pools.reconciler import PoolBoard
from controller.reconcile.precedence import AdmissionPrecedence
from controller.services.performance_source import PerformanceSource
from devices.vendors import Vendors
from kube.resources import ACCELERATOR_POOLS, INFERENCE_SERVICES, ObjectKey, Resource
from kube.store import Store


class LeaderQueue(NamedTuple):
    """The queue of a controller that reads the whole cluster."""

    admission: Admission
    """The loop that gives waiting replicas their places, in rounds."""
    board: Board
    """The place in the queue of each service that waits, for its status."""
    pools: PoolBoard
    """The use of each AcceleratorPool, for its status."""
    volumes: BoundVolumes
    """The nodes that volumes bind their pods to."""
    rooms: CandidateRooms
    """The room on each accelerator, for services that may use several."""
    notes: PlacementNotes
    """Why the last replica of each service is where it is, for its status."""
    benchmarks: BenchmarkRunner | None
    """None: nothing is measured."""
    host_results: HostResults


def build_queue(
    store: Store,
    registry: CellRegistry,
    measured: PerformanceSource,
    options: ControllerOptions,
    *,
    identity: str,
    metrics: ControllerMetrics,
    precedence: AdmissionPrecedence,
    enqueue: Callable[[Resource, ObjectKey], None],
) -> LeaderQueue:
    """Return the queue and all that follows its rounds, put together and not yet running.

    `store` is the watch cache, `registry` has all cells (nodes and hosts), and `measured` the stored measurements.
    `identity` is the name of this replica, and `precedence` lets admissions go before reconciles. `enqueue` has an
    object decided again.
    """
    volumes, vendors = BoundVolumes(store, registry), options.pods.vendors
    enqueue_service = functools.partial(enqueue, INFERENCE_SERVICES)

    # The parts that follow the rounds: the place in the queue of each service that waits, the use of each pool, the
    # room on each accelerator (for services that may use several), why replicas are where they are, and benchmarks.
    board = Board(enqueue_service, metrics.queue.count_start, on_depths=metrics.queue.set_depths)
    pools = PoolBoard(store, vendors, registry, functools.partial(enqueue, ACCELERATOR_POOLS))
    rooms = CandidateRooms(registry, enqueue_service, volumes.find_nodes, volumes.has_read)
    notes = PlacementNotes(registry.find_cell, enqueue_service)
    benchmarks = _build_benchmarks(store, registry, measured, options) if options.benchmarks else None

    def show_round(report: RoundReport) -> None:
        """Pass a round of the queue to the parts that follow it: board, metrics, pools, rooms and benchmarks."""
        board.update(report.round, report.cells, report.now, units=report.units, failures=report.failures)
        metrics.queue.observe_plan(report.plan_seconds)
        pools.update(report)
        rooms.update(report)
        if benchmarks is not None:
            benchmarks.mark_jobs_in_the_way(list_waiting_pools(report), list_given_cells(report))

    # The loop that admits. When the nodes of volumes were read, it has another round for the pods of these volumes.
    parts = AdmissionParts(
        registry,
        vendors,
        identity,
        is_queued_by_default=options.pods.scheduling_mode == "Queue",
        find_volume_nodes=volumes.find_nodes,
        rules=functools.partial(_read_rules, store, vendors, options.min_run_seconds),
        on_round=show_round,
        on_outcome=metrics.count_admission,
        on_admitted=notes.note,
        on_preemption=lambda _eviction: metrics.queue.count_preemption(PREEMPTED_FOR_PRIORITY),
        admitting=precedence.admitting,
    )
    admission = Admission(parts)
    volumes.subscribe(admission.wake)
    return LeaderQueue(admission, board, pools, volumes, rooms, notes, benchmarks, HostResults(store, measured))


def list_waiting_pools(report: RoundReport) -> frozenset[str]:
    """Return the pools of the units (pods or processes that are placed as a whole) that still wait after a round.

    A unit waits, too, if it was admitted and the API server refused to write that.
    """
    admitted = {action.unit.uid for action in report.round.actions if isinstance(action, Admit)}
    waiting = [unit for unit in report.round.queue if unit.uid not in admitted]
    failed = [unit for unit in report.units if unit.uid in report.failures]  # the API server refused to admit these
    return frozenset(pool for unit in (*waiting, *failed) for pool in unit.pools)


def list_given_cells(report: RoundReport) -> frozenset[str]:
    """Return the cells that a round has given to units, whose pods may not be there yet."""
    admissions = (action for action in report.round.actions if isinstance(action, Admit))
    return report.claimed.union(*(action.cells for action in admissions))


def _read_rules(store: Store, vendors: Vendors, min_run_seconds: float) -> PlanRules:
    table = read_pools(store, vendors)
    return PlanRules(min_run_seconds, table.rules, table.quotas)


def _build_benchmarks(
    store: Store, registry: CellRegistry, measured: PerformanceSource, options: ControllerOptions
) -> BenchmarkRunner:
    """Return the runner of benchmarks, which tells the registry of cells the room that its Jobs give up."""
    return BenchmarkRunner(
        store,
        options.pods,
        measured,
        list_cells=registry.list_cells,
        list_classes=registry.list_classes,
        report_job_nodes=registry.set_benchmarks,
    )
