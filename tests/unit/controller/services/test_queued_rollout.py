"""Earlier pods make way for new ones that the queue has nominated for their place, and else serve on."""

import json
from typing import Any

import pytest

from controller.reconcile.stamp import stamp
from controller.services.pods.deployment_strategy import SURGE
from crds.meta import NOMINATED, QUEUE_GATE
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS, PODS
from tests.support.api_objects import model
from tests.support.service_decisions import chat_deployment, chat_pod, chat_service, decide_chat, list_applied

NVIDIA: Obj = {"accelerator": "nvidia"}
GATED: Obj = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
QUOTA = (
    'pods "chat-7f-x" is forbidden: exceeded quota: devices, requested: requests.nvidia.com/gpu=1, '
    "used: requests.nvidia.com/gpu=1, limited: requests.nvidia.com/gpu=1"
)


def placed(name: str = "chat-old", *, template: str = "old") -> Obj:
    """Return a ready pod."""
    pod = chat_pod(name)
    pod["metadata"]["labels"] |= {"pod-template-hash": template}
    asked = {"memory": "1Gi", "nvidia.com/gpu": "1"}
    return pod | {"spec": {"nodeName": "gpu-1", "containers": [{"resources": {"requests": asked}}]}}


def waiting(*victims: str, name: str = "chat-new", template: str = "new", nomination: str | None = None) -> Obj:
    """Return a pod that waits for the queue, and may be nominated for the place of others."""
    pod = placed(name, template=template)
    del pod["spec"]["nodeName"]
    pod["spec"]["schedulingGates"] = [{"name": QUEUE_GATE}]
    if victims or nomination is not None:
        text = json.dumps({"cells": ["node/gpu-1"], "victims": list(victims)}) if nomination is None else nomination
        pod["metadata"]["annotations"] = {NOMINATED: text}
    return pod | {"status": {"phase": "Pending", "conditions": [GATED]}}


def leaving(name: str = "chat-left") -> Obj:
    """Return a pod that is ending, and must have ended in a while."""
    pod = placed(name)
    pod["metadata"]["deletionTimestamp"] = "2099-01-01T00:00:00Z"
    return pod


def roll(unavailable: Any, surge: Any = 1) -> Obj:
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}


def rolling(*pods: Obj, replicas: int = 1, strategy: Obj = SURGE, **status: Any) -> Obj:
    """Return the strategy with which pods are replaced."""
    objects = [chat_service(hardware=NVIDIA, replicas=replicas), (MODELS, model())]
    there = chat_deployment(*objects, replicas=replicas + 1, ready=replicas, updated=1)
    there["spec"]["strategy"] = strategy
    there = stamp(there)
    there["status"] |= status
    plan = decide_chat(*objects, (DEPLOYMENTS, there), *((PODS, pod) for pod in pods))
    (applied,) = list_applied(plan, DEPLOYMENTS)
    applied_strategy: Obj = applied["spec"]["strategy"]
    return applied_strategy


def test_earlier_pod_makes_way_for_one_that_is_promised_its_place() -> None:
    assert rolling(placed(), waiting("uid-chat-old")) == roll(1)


@pytest.mark.parametrize(
    "new",
    [
        waiting(),
        waiting("uid-of-another-service"),
        waiting("uid-chat-old", template="old"),
        waiting(nomination="{"),
        waiting(nomination='{"victims": "uid-chat-old"}'),
    ],
    ids=["not nominated", "place of others", "same template", "cut off", "no list"],
)
def test_earlier_pod_serves_on_while_its_place_is_promised_to_none(new: Obj) -> None:
    assert rolling(placed(), new) == SURGE


def test_nomination_from_before_the_change_was_seen_ends_nothing() -> None:
    assert rolling(placed(), waiting("uid-chat-old"), observedGeneration=0) == SURGE


def test_pods_make_way_one_at_a_time() -> None:
    three = [placed(f"chat-old-{number}") for number in range(3)]
    assert rolling(*three, waiting("uid-chat-old-0"), replicas=3) == roll(1)
    # The pod has ended, and its successor does not have the place yet.
    first = waiting("uid-chat-old-0")
    second = waiting("uid-chat-old-1", name="chat-second")
    assert rolling(*three[1:], first, replicas=3, strategy=roll(1)) == SURGE
    assert rolling(*three[1:], leaving(), waiting(name="chat-second"), replicas=3, strategy=roll(1)) == SURGE
    assert rolling(*three[1:], first, second, replicas=3, strategy=roll(1)) == roll(1)
    assert rolling(*three[1:], placed("chat-new", template="new"), second, replicas=3, strategy=SURGE) == roll(1)


def test_earlier_pods_that_wait_make_way_at_once() -> None:
    stale = waiting(name="chat-stale", template="old")
    assert rolling(stale, waiting(), readyReplicas=0) == roll(1)
    assert rolling(placed(), stale, waiting(), replicas=2) == roll(1)
    assert rolling(placed(), stale, waiting("uid-chat-old"), replicas=2) == roll(2)


@pytest.mark.parametrize("strategy", [SURGE, roll(1), roll(2)], ids=str)
def test_strategy_stays_when_nothing_is_replaced(strategy: Obj) -> None:
    assert rolling(placed(), waiting(template="old", name="chat-2"), replicas=2, strategy=strategy) == strategy


@pytest.mark.parametrize("strategy", [roll("100%"), roll(1, surge="50%"), roll(1, surge=0)], ids=str)
def test_strategy_of_anybody_else_is_overruled(strategy: Obj) -> None:
    assert rolling(placed(), strategy=strategy) == SURGE


def test_earlier_pod_makes_way_if_a_quota_allows_no_second_one() -> None:
    refused = [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": QUOTA}]
    assert rolling(placed(), conditions=refused, updatedReplicas=0) == roll(1)
    stale = waiting(name="chat-stale", template="old")
    assert rolling(stale, conditions=refused, readyReplicas=0, updatedReplicas=0) == roll(1), "a quota counts it"
    two = [placed("chat-1"), placed("chat-2")]
    assert rolling(*two, conditions=refused, replicas=3, updatedReplicas=0) == roll(2)
    assert rolling(*two, waiting(), conditions=refused, replicas=3, updatedReplicas=1) == roll(1)
