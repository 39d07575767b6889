"""status.queue, the phase and reason of a service that waits in the queue, and the Events on moves that matter."""

from typing import Any, get_args

import msgspec
import pytest

from controller.placement.queue_events import describe_admission, describe_preemption
from controller.placement.standing import ServiceStanding
from controller.placement.start_estimate import StartRange
from controller.reconcile.plan import Event
from controller.services.diagnosis import QUEUED, diagnose_pod
from controller.services.preconditions import ServiceProblem
from controller.services.queue_report import build_queue_events, build_queue_status, explain_wait, recall_standing
from controller.services.status import REASONS_WITHOUT_EVENT
from crds.meta import QUEUE_GATE
from crds.queue_status import QueueReason, QueueStatus
from kube.client import Obj
from kube.resources import DEPLOYMENTS, METAL_HOSTS, METAL_PROCESSES, MODELS, PODS, ObjectKey
from tests.support.api_objects import host, model, planned_condition, process
from tests.support.service_decisions import (
    METAL,
    SERVING,
    chat_deployment,
    chat_pod,
    chat_service,
    decide_chat,
    ready_outcome,
)
from tests.support.waiting_units import running_unit, waiting_process, waiting_unit

STANDING = ServiceStanding(
    pool="nvidia",
    position=3,
    length=12,
    ahead={"high": 2},
    waiting_for="nvidia.com/gpu: 2",
    enqueued_at=0.0,
    reason="InsufficientDevices",
    message="needs nvidia.com/gpu: 2",
    start=StartRange(600.0, 1_500.0),
)
NVIDIA = {"hardware": {"accelerator": "nvidia"}}
OBJECTS = (chat_service(**NVIDIA), (MODELS, model()))


def standing(**fields: Any) -> ServiceStanding:
    return msgspec.structs.replace(STANDING, **fields)


def gated_pod(name: str = "chat-1") -> Obj:
    """Return a pod in the queue, with the condition that the API server gives it."""
    reason = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}
    pod = chat_pod(name, ready=False, conditions=[reason])
    return pod | {"spec": {"schedulingGates": [{"name": QUEUE_GATE}]}}


@pytest.mark.parametrize(
    "reported",
    [
        {},
        {"position": None, "ahead": {}, "reason": "NoSuchHardware", "start": "NoPosition"},
        {"cells": ("node/n1",), "victims": ("team/batch",), "reason": "Draining", "start": "Draining"},
    ],
)
def test_standing_that_was_reported_is_recalled(reported: dict[str, Any]) -> None:
    status = build_queue_status(standing(**reported))
    recalled = recall_standing(msgspec.convert(status, QueueStatus))
    assert recalled == standing(**reported)
    assert recalled is not None
    assert build_queue_status(recalled) == status


@pytest.mark.parametrize("damaged", [None, QueueStatus(), QueueStatus(reason="Quota", enqueued_at="yesterday")])
def test_nothing_is_recalled_of_a_status_without_a_place(damaged: QueueStatus | None) -> None:
    assert recall_standing(damaged) is None


def test_status_has_the_standing() -> None:
    assert build_queue_status(STANDING) == {
        "pool": "nvidia",
        "position": 3,
        "length": 12,
        "place": "3/12",
        "aheadByPriority": {"high": 2},
        "waitingFor": "nvidia.com/gpu: 2",
        "enqueuedAt": "1970-01-01T00:00:00Z",
        "reason": "InsufficientDevices",
        "message": "needs nvidia.com/gpu: 2",
        "estimatedStart": {"earliest": "1970-01-01T00:10:00Z", "latest": "1970-01-01T00:25:00Z"},
    }


def test_status_says_why_there_is_no_estimate() -> None:
    status = build_queue_status(standing(ahead={}, start="TooFewAhead", cells=("node/n1",), victims=("team/old",)))
    assert "aheadByPriority" not in status
    assert "estimatedStart" not in status
    assert status["noEstimate"] == "TooFewAhead"
    assert status["nominated"] == {"cells": ["node/n1"], "victims": ["team/old"]}


def test_gang_on_many_nodes_has_a_status_that_the_api_server_takes() -> None:
    cells, victims = (tuple(f"{prefix}{number:03}" for number in range(256)) for prefix in ("node/n", "team/s"))
    status = build_queue_status(standing(cells=cells, victims=victims, reason="Draining", start="Draining"))
    nominated = msgspec.convert(status, QueueStatus).nominated
    assert nominated is not None
    assert (nominated.cells, nominated.victims) == ([*cells[:32]], [*victims[:32]])


def test_hardware_that_does_not_exist_has_no_place() -> None:
    status = build_queue_status(standing(position=None, reason="NoSuchHardware", start="NoPosition", length=0))
    assert not {"position", "place", "aheadByPriority", "estimatedStart"} & status.keys()


def test_pod_that_was_let_go_is_not_said_to_be_gated() -> None:
    # The scheduler has not looked at it yet, so that its condition is still that of a pod with a gate.
    assert diagnose_pod(gated_pod()) is not None
    assert diagnose_pod(gated_pod() | {"spec": {}}) is None
    kept = gated_pod() | {"spec": {"schedulingGates": [{"name": "example.com/gate"}]}}
    assert diagnose_pod(kept) == ServiceProblem("SchedulingGated", "pod chat-1: gated", "Pending")


def test_gated_pod_waits_for_a_gpu_with_the_reason_of_the_queue() -> None:
    plan = decide_chat(
        *OBJECTS, (DEPLOYMENTS, chat_deployment(*OBJECTS, ready=0)), (PODS, gated_pod()), standing=STANDING
    )
    assert ready_outcome(plan) == ("WaitingForGPU", "False", "InsufficientDevices")
    assert planned_condition(plan, "Ready")["message"] == "0 of 1 replicas are ready: needs nvidia.com/gpu: 2"
    assert plan.status is not None
    assert plan.status["queue"]["place"] == "3/12"
    assert [event.reason for event in plan.events] == [QUEUED]


def test_gated_pod_of_which_the_queue_knows_nothing_yet_waits_for_a_gpu() -> None:
    plan = decide_chat(*OBJECTS, (DEPLOYMENTS, chat_deployment(*OBJECTS, ready=0)), (PODS, gated_pod()))
    assert ready_outcome(plan) == ("WaitingForGPU", "False", QUEUED)
    assert plan.status is not None
    assert "queue" not in plan.status
    assert plan.events == ()


def test_missing_hardware_is_a_warning() -> None:
    missing = standing(position=None, reason="NoSuchHardware", message="no node can ever run it", start="NoPosition")
    plan = decide_chat(
        *OBJECTS, (DEPLOYMENTS, chat_deployment(*OBJECTS, ready=0)), (PODS, gated_pod()), standing=missing
    )
    assert ready_outcome(plan) == ("WaitingForGPU", "False", "NoSuchHardware")
    assert [(event.type, event.reason) for event in plan.events] == [("Warning", "NoSuchHardware")]


def test_suspended_service_has_no_place() -> None:
    plan = decide_chat(chat_service(suspend=True, **NVIDIA), (MODELS, model()), standing=STANDING)
    assert plan.status is not None
    assert plan.status["phase"] == "Suspended"
    assert "queue" not in plan.status


WAITS = ServiceProblem("NoHostFits", "the largest host has too little free", "Pending")
DECISIONS = {
    "nothing is wrong": (None, STANDING, None),
    "it waits for nothing": (WAITS, None, WAITS),
    "it waits for a host": (WAITS, STANDING, WAITS._replace(phase="WaitingForGPU")),
    "it fits behind another": (
        ServiceProblem("Binding", "waiting to be bound", "Pending"),
        standing(reason="HeadOfLine", message="kept"),
        ServiceProblem("HeadOfLine", "kept", "WaitingForGPU"),
    ),
    "others end for it": (
        WAITS,
        standing(reason="Draining", message="room is kept"),
        ServiceProblem("Draining", "room is kept", "WaitingForGPU"),
    ),
    "no scheduler finds a node": (
        unschedulable := ServiceProblem("Unschedulable", "0/3 nodes", "Pending"),
        STANDING,
        unschedulable,
    ),
    "another replica fails": (failed := ServiceProblem("Rejected", "too large", "Failed"), STANDING, failed),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_cause_is_that_of_the_queue_if_the_replica_waits_there(case: str) -> None:
    problem, queued, cause = DECISIONS[case]
    assert explain_wait(problem, queued) == cause


def test_process_that_waits_for_a_host_keeps_its_diagnosis() -> None:
    objects = (chat_service(**METAL), (MODELS, model()), (METAL_HOSTS, host(free_bytes=1 << 20)))
    ((_, made),) = decide_chat(*objects).create
    waiting = (METAL_PROCESSES, process(made["metadata"]["name"], host=None, phase="Pending"))
    before, after = decide_chat(*objects, waiting), decide_chat(*objects, waiting, standing=standing(pool="metal"))
    assert ready_outcome(before) == ("Pending", "False", "NoHostFits")
    assert ready_outcome(after) == ("WaitingForGPU", "False", "NoHostFits")
    assert planned_condition(before, "Ready")["message"] == planned_condition(after, "Ready")["message"]


def as_before(found: ServiceStanding | None) -> QueueStatus | None:
    return None if found is None else msgspec.convert(build_queue_status(found), QueueStatus)


PROMISED = standing(reason="Draining", cells=("node/n1",), victims=("team/old", "team/older"), start="Draining")
EVENTS: dict[str, tuple[ServiceStanding | None, ServiceStanding | None, list[str]]] = {
    "came": (None, STANDING, ["waits at place 3/12 of pool nvidia for nvidia.com/gpu: 2"]),
    "moved": (STANDING, standing(position=2), []),
    "promised": (STANDING, PROMISED, ["gets node/n1 as soon as replicas of team/old, team/older have ended"]),
    "promised still": (PROMISED, msgspec.structs.replace(PROMISED, victims=("team/older",)), []),
    "promised another": (
        PROMISED,
        msgspec.structs.replace(PROMISED, cells=("node/n2",), victims=()),
        ["gets node/n2 as soon as replicas of others have ended"],
    ),
    "admitted": (PROMISED, None, []),
    "can never run": (None, standing(position=None, reason="NoSuchHardware", start="NoPosition"), []),
}


@pytest.mark.parametrize("case", EVENTS)
def test_events_report_moves_that_matter(case: str) -> None:
    before, after, notes = EVENTS[case]
    events = build_queue_events(as_before(before), build_queue_status(after) if after is not None else None)
    assert [event.note for event in events] == notes


@pytest.mark.parametrize("reason", get_args(QueueReason))
def test_reason_that_others_change_sends_no_event(reason: QueueReason) -> None:
    """With each admission these change for many services; only what users must mend is an Event."""
    assert (reason in REASONS_WITHOUT_EVENT) == (reason not in {"Quota", "NoSuchHardware"})


def test_preemption_names_who_needed_the_room() -> None:
    victim = running_unit(waiting_unit("old-1", service="old", priority="low"), "node/n1")
    event = describe_preemption(victim, waiting_unit("chat-1", service="chat", priority="critical"))
    note = "Preempted by team/chat (critical): pod team/old-1 (low) ends, and waits again at its old place in the queue"
    assert event == Event("Warning", "Preempted", note, "Queue")
    stranger = waiting_unit("chat-1", service="secret", priority="critical")
    stranger = msgspec.structs.replace(stranger, service=ObjectKey("bank", "secret"))
    assert describe_preemption(victim, stranger).note == note.replace("team/chat", "a service of another namespace")


def test_admission_names_the_place() -> None:
    event = describe_admission(waiting_process("chat-0", 8), ("host/studio",))
    assert event == Event("Normal", "Admitted", "process team/chat-0 gets host/studio", "Queue")
    assert "a node that an autoscaler adds" in describe_admission(waiting_unit("a"), ()).note


def test_service_that_serves_with_some_replicas_is_degraded_and_has_its_place() -> None:
    service = chat_service(replicas=2, status=SERVING, **NVIDIA)
    plan = decide_chat(
        service,
        (MODELS, model()),
        (DEPLOYMENTS, chat_deployment(*OBJECTS, ready=1, replicas=2)),
        (PODS, gated_pod("chat-2")),
        standing=STANDING,
    )
    assert plan.status is not None
    assert plan.status["queue"]["place"] == "3/12"
