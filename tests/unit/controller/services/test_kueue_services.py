"""Services in mode Kueue: their labels, what Kueue lacks for them, their place in the status, edits of the queue."""

import json
from collections.abc import Iterable
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from controller.placement.kueue import KueuePlace, KueueQueues, KueueStanding
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.stamp import stamp
from controller.services.pods.deployment_strategy import KUEUE_SECONDS, SURGE, make_way_for_kueue
from controller.services.pods.observed_deployments import ObservedDeployment
from controller.services.preconditions import ServiceProblem
from controller.services.queue_report import build_kueue_status, explain_kueue_wait, read_kueue, reads_of_queue
from crds.meta import KUEUE_GATE, KUEUE_QUEUE_NAME, LABEL_SERVICE, QUEUE_GATE
from kube.client import Obj
from kube.resources import DEPLOYMENTS, LOCAL_QUEUES, MODELS, PODS
from kube.store import Store
from tests.support.api_objects import as_service, model, service
from tests.support.service_decisions import (
    chat_deployment,
    chat_pod,
    chat_service,
    decide_chat,
    kept_part,
    list_applied,
)

GIVEN: Obj = {"hardware": {"accelerator": "nvidia"}, "scheduling": {"mode": "Kueue", "queueName": "models"}}
NATIVE: Obj = {"hardware": {"accelerator": "nvidia"}, "scheduling": {"mode": "Native"}}
ANSWERS = Path(__file__).parents[1] / "placement" / "kueue_answers"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLACE = KueuePlace(2, 3, "2026-01-01T00:00:00Z", "pod-chat")


def running(**spec: Any) -> Obj:
    """Return the Deployment of a running service, as the store keeps it."""
    return kept_part(stamp(deepcopy(chat_deployment(chat_service(**spec), (MODELS, model())))))


def local_queue(name: str = "local_queue.json") -> Obj:
    """Return a LocalQueue of the real Kueue."""
    queue: Obj = json.loads((ANSWERS / name).read_text())
    return queue


def known(*objects: Obj) -> Store:
    store = Store()
    declare_indexes(store)
    for obj in objects:
        store.put(LOCAL_QUEUES, obj)
    return store


def test_deployment_and_pods_have_the_label_and_no_gate_of_ours() -> None:
    (made,) = list_applied(decide_chat(chat_service(**GIVEN), (MODELS, model())), DEPLOYMENTS)
    template = made["spec"]["template"]
    assert made["metadata"]["labels"][KUEUE_QUEUE_NAME] == "models"
    assert template["metadata"]["labels"][KUEUE_QUEUE_NAME] == "models"
    assert KUEUE_QUEUE_NAME not in made["spec"]["selector"]["matchLabels"]
    assert QUEUE_GATE not in str(template)
    assert template["spec"]["priorityClassName"] == "pomona-normal"
    assert made["spec"]["progressDeadlineSeconds"] > 10**9


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (NATIVE, GIVEN),
        (GIVEN, NATIVE),
        (GIVEN, {**GIVEN, "scheduling": {"mode": "Kueue", "queueName": "other"}}),
    ],
    ids=["to Kueue", "from Kueue", "to another queue"],
)
def test_deployment_whose_queue_changes_is_made_anew(before: Obj, after: Obj) -> None:
    there = running(**before)
    plan = decide_chat(chat_service(**after), (MODELS, model()), (DEPLOYMENTS, there), (PODS, chat_pod()))
    assert [deletion.name for deletion in plan.delete if deletion.resource == DEPLOYMENTS] == ["chat"]
    assert list_applied(plan, DEPLOYMENTS) == []
    plan = decide_chat(chat_service(**after), (MODELS, model()))
    assert len(list_applied(plan, DEPLOYMENTS)) == 1


def test_deployment_of_the_same_queue_stays() -> None:
    plan = decide_chat(chat_service(**GIVEN), (MODELS, model()), (DEPLOYMENTS, running(**GIVEN)), (PODS, chat_pod()))
    assert plan.delete == ()


def test_absent_kueue_is_a_problem_with_the_way_out() -> None:
    report = read_kueue(as_service(service(**GIVEN)), known(), KueueQueues())
    assert report.problem is not None
    assert (report.problem.reason, report.problem.phase) == ("KueueMissing", "Failed")
    assert "install Kueue" in report.problem.message


def test_absent_queue_is_named() -> None:
    queues = KueueQueues()
    queues.local_queues.exists = True
    report = read_kueue(as_service(service(**GIVEN)), known(), queues)
    assert report.problem is not None
    assert report.problem.reason == "LocalQueueNotFound"
    assert "LocalQueue models does not exist in namespace team" in report.problem.message


def test_queue_that_exists_is_no_problem_also_before_its_kind_was_all_read() -> None:
    assert read_kueue(as_service(service(**GIVEN)), known(local_queue()), KueueQueues()).problem is None


def test_service_of_another_mode_needs_no_kueue() -> None:
    assert read_kueue(as_service(service(**NATIVE)), known(), KueueQueues()) == (None, None)


def test_stopped_queue_is_explained_in_its_own_words() -> None:
    store = known(local_queue("local_queue_held.json"))
    pod = {
        "metadata": {
            **chat_pod()["metadata"],
            "labels": {LABEL_SERVICE: "chat", KUEUE_QUEUE_NAME: "models"},
        },
        "spec": {"schedulingGates": [{"name": KUEUE_GATE}]},
    }
    store.put(PODS, pod)
    standing = read_kueue(as_service(service(**GIVEN)), store, KueueQueues()).standing
    assert standing is not None
    assert standing.message.endswith("admits nothing now: Can't submit new workloads to clusterQueue")


def test_counts_of_a_queue_enqueue_no_service_and_its_stop_does() -> None:
    queue = local_queue()
    busier = deepcopy(queue)
    busier["status"]["pendingWorkloads"] = 99
    assert reads_of_queue(queue) == reads_of_queue(busier)
    assert reads_of_queue(queue) != reads_of_queue(local_queue("local_queue_held.json"))


def test_place_is_in_the_status_as_that_of_the_own_queue_is() -> None:
    status = build_kueue_status(KueueStanding("team", "models", PLACE, 5, ""))
    assert (status["pool"], status["position"], status["length"], status["place"]) == ("kueue/models", 2, 5, "2/5")
    assert status["enqueuedAt"] == "2026-01-01T00:00:00Z"
    assert status["waitingFor"] == "quota of LocalQueue models"


def test_unknown_place_has_no_position() -> None:
    status = build_kueue_status(KueueStanding("team", "models", None, 5, "it does not answer"))
    assert "position" not in status
    assert "place" not in status
    assert "it does not answer" in status["message"]


def test_kueue_explains_a_pod_with_a_gate_and_no_other_problem() -> None:
    standing = KueueStanding("team", "models", PLACE, 5, "")
    gated = explain_kueue_wait(ServiceProblem("SchedulingGated", "pod chat: gates", "Pending"), standing)
    assert gated is not None
    assert (gated.reason, gated.phase) == ("WaitingForKueue", "WaitingForGPU")
    broken = ServiceProblem("CrashLoopBackOff", "pod chat-2: broken", "Failed")
    assert explain_kueue_wait(broken, standing) == broken


def pod(name: str, template: str, *, waits: bool, age: float = 0.0) -> Obj:
    created = (NOW - timedelta(seconds=age)).isoformat()
    spec = {"schedulingGates": [{"name": KUEUE_GATE}]} if waits else {"nodeName": "gpu-1"}
    labels = {"pod-template-hash": template}
    metadata = {"name": name, "uid": name, "labels": labels, "creationTimestamp": created}
    return {"metadata": metadata, "spec": spec, "status": {}}


def replace(*pods: Obj) -> Any:
    return make_way_for_kueue(ObservedDeployment({}, pods), 1, NOW)


def test_earlier_pod_makes_way_for_one_that_kueue_does_not_admit() -> None:
    earlier = pod("old", "a", waits=False)
    waits = replace(earlier, pod("new", "b", waits=True, age=KUEUE_SECONDS - 5))
    assert (waits.strategy, waits.again_seconds) == (SURGE, 5)
    made = replace(earlier, pod("new", "b", waits=True, age=KUEUE_SECONDS))
    assert made.strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


@pytest.mark.parametrize(
    "pods",
    [
        [pod("old", "a", waits=False), pod("new", "b", waits=False)],
        [pod("old", "a", waits=False), pod("more", "a", waits=True, age=99)],
        [pod("new", "b", waits=True, age=99)],
    ],
    ids=["admitted", "scaled", "nothing serves"],
)
def test_no_pod_makes_way_without_need(pods: Iterable[Obj]) -> None:
    assert replace(*pods) is None
