"""The row of a service has its phase and the facts of that phase; nothing that is left is ever negative."""

from datetime import UTC, datetime, timedelta

import pytest

from artifacts.transfer_rate import TransferProgress
from controller.services.preconditions import ServiceProblem
from crds.metalprocess import LastExit, MetalProcessStatus
from gateway.proxy.config import ServiceStats
from metal_agent.lifecycle import LOG_HINT
from standalone.absent_engines import Sleep
from standalone.desired import Decision
from standalone.service_rows import (
    ReplicaFacts,
    ServiceLoad,
    ServiceRow,
    build_row,
    count_load_seconds_left,
    render_json,
)
from tests.support.api_objects import GIB

READY = ReplicaFacts(MetalProcessStatus(phase="Ready"))
STARTING = ReplicaFacts(MetalProcessStatus(phase="Starting"))
EXIT = LastExit(time="", log="a\n")
NOW = datetime(2026, 11, 21, 13, 10, tzinfo=UTC)
IDLE_STATS = ServiceStats(requests=12, errors=1, tokens_out=100)


@pytest.mark.parametrize(
    ("replicas", "phase", "message", "ready"),
    [
        ([MetalProcessStatus(phase="Rejected", message="needs 9 GiB")], "Rejected", "needs 9 GiB", 0),
        (
            [MetalProcessStatus(phase="Ready"), MetalProcessStatus(phase="Failed", message="crashed")],
            "Degraded",
            "crashed",
            1,
        ),
        (
            [MetalProcessStatus(phase="Failed", message=f"ended: bad head{LOG_HINT}", last_exit=EXIT)],
            "Failed",
            "ended: bad head",
            0,
        ),
        ([MetalProcessStatus(phase="Ready")] * 2, "Ready", "", 2),
        (
            [MetalProcessStatus(phase="Starting"), MetalProcessStatus(phase="Pending", message="waits")],
            "Pending",
            "waits",
            0,
        ),
    ],
)
def test_row_is_that_of_the_worst_replica(
    replicas: list[MetalProcessStatus], phase: str, message: str, ready: int
) -> None:
    row = build_row("chat", Decision(), map(ReplicaFacts, replicas))
    assert (row.phase, row.message, row.replicas, row.ready_replicas) == (phase, message, len(replicas), ready)


def test_service_without_processes_shows_its_problem() -> None:
    problem = ServiceProblem("Because", "waiting for Model tiny to be inspected", "Pending")
    assert build_row("chat", Decision(problem=problem)) == ServiceRow(
        service="chat", phase="Pending", message="waiting for Model tiny to be inspected"
    )
    assert build_row("chat", Decision()) == ServiceRow(service="chat", phase="Pending")


@pytest.mark.parametrize("is_ahead", [False, True])
def test_download_has_its_rate(*, is_ahead: bool) -> None:
    progress = TransferProgress(GIB, 4 * GIB, 1e6, 3000.0)
    if is_ahead:
        row = build_row("chat", Decision(), sleep=Sleep("Downloading", progress))
    else:
        row = build_row("chat", Decision(), [ReplicaFacts(MetalProcessStatus(phase="Fetching"), progress)])
    assert row.phase == ("Downloading" if is_ahead else "Fetching")
    assert (row.bytes, row.total_bytes, row.bytes_per_second, row.seconds_left) == progress


def test_load_has_its_time_left_and_the_memory_so_far() -> None:
    replicas = [ReplicaFacts(MetalProcessStatus(phase="Starting", pid=1), None, 4 * GIB, GIB)]
    row = build_row("chat", Decision(), replicas, load=ServiceLoad(seconds_left=7.0))
    assert (row.seconds_left, row.memory_bytes, row.reserved_bytes) == (7.0, GIB, 4 * GIB)
    assert build_row("chat", Decision(), [READY], load=ServiceLoad(seconds_left=7.0)).seconds_left is None


@pytest.mark.parametrize(("after_seconds", "left"), [(0, 30.0), (12, 18.0), (31, 0.0), (-5, 30.0)])
def test_time_left_of_a_load_is_never_negative(after_seconds: int, left: float) -> None:
    started_at = (NOW - timedelta(seconds=after_seconds)).isoformat()
    assert count_load_seconds_left(30.0, started_at, NOW) == left
    assert count_load_seconds_left(30.0, None, NOW) is None


@pytest.mark.parametrize(
    ("stats", "idle_seconds", "left"),
    [
        (IDLE_STATS, 48.0, 252.0),
        (IDLE_STATS, 301.0, 0.0),
        (IDLE_STATS, None, None),
        (ServiceStats(in_flight=1), 48.0, None),
        (ServiceStats(queued=1), 48.0, None),
        (None, 48.0, None),
    ],
)
def test_loaded_model_on_demand_has_the_time_until_it_is_unloaded(
    stats: ServiceStats | None, idle_seconds: float | None, left: float | None
) -> None:
    row = build_row("chat", Decision(), [READY], stats=stats, load=ServiceLoad(None, 300, idle_seconds))
    assert (row.unload_seconds, row.idle_limit_seconds) == (left, 300)
    loading = build_row("chat", Decision(), [STARTING], stats=stats, load=ServiceLoad(None, 300, idle_seconds))
    assert loading.unload_seconds is None


def test_service_is_ready_once_endpoint_leads_to_it() -> None:
    row = build_row("chat", Decision(), [READY], answers=False)
    assert (row.phase, row.message) == ("Starting", "loaded; waiting for the endpoint")
    assert build_row("chat", Decision(), [READY], answers=True).phase == "Ready"


def test_remarks_are_beside_the_reason_of_the_phase() -> None:
    assert build_row("chat", Decision(note="old weights"), [READY]).note == "old weights"
    assert build_row("chat", Decision(note="old weights"), [STARTING]).note == ""
    edited = Decision(problem=ServiceProblem("Because", "no such Model", "Failed"))
    row = build_row("chat", edited, [ReplicaFacts(MetalProcessStatus(phase="Failed", message="crashed"))])
    assert (row.phase, row.message, row.note) == ("Failed", "crashed", "the last edit is not served: no such Model")


@pytest.mark.parametrize("sleep", [Sleep("Idle"), None])
def test_counts_of_proxy_are_shown(sleep: Sleep | None) -> None:
    stats = ServiceStats(requests=12, errors=1, tokens_out=100, in_flight=2, queued=3)
    row = build_row("chat", Decision(), [] if sleep else [READY], stats=stats, sleep=sleep)
    assert (row.requests, row.failed_requests, row.running, row.waiting) == (12, 1, 2, 3)


def test_json_has_what_is_known_only() -> None:
    row = ServiceRow(service="chat", phase="Ready", memory_bytes=GIB, unload_seconds=1.0 / 3, requests=0)
    members = {"service": "chat", "phase": "Ready", "memoryBytes": GIB, "unloadSeconds": 0.3, "requests": 0}
    assert render_json(row) == members
