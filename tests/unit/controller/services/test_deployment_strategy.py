"""The strategy of a Deployment: its change begins with one pod more, and earlier pods make way if that is refused."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from controller.reconcile.stamp import stamp
from controller.services.pods.deployment_strategy import SURGE, choose_first_strategy
from crds.size import GIB
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS, NODES, PODS, Resource
from tests.support.api_objects import model, planned_condition
from tests.support.service_decisions import chat_deployment, chat_pod, chat_service, decide_chat, list_applied

IN_PLACE: Obj = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
NVIDIA: Obj = {"accelerator": "nvidia"}
NATIVE: Obj = {"mode": "Native"}
VOLUME = "volume.inference.pomona.dev/tiny-cache"
NO_DEVICE = "0/2 nodes are available: 1 Insufficient memory, 2 Insufficient nvidia.com/gpu. preemption: not allowed."
NO_MEMORY = "0/2 nodes are available: 2 Insufficient memory."
NO_SUCH_NODE = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
QUOTA = (
    'pods "chat-7f-x" is forbidden: exceeded quota: devices, requested: requests.nvidia.com/gpu=1, '
    "used: requests.nvidia.com/gpu=1, limited: requests.nvidia.com/gpu=1"
)


def placed(name: str = "chat-old", *, template: str = "old", node: str = "gpu-1", **requests: str) -> Obj:
    """Return a ready pod."""
    pod = chat_pod(name)
    pod["metadata"]["labels"] |= {"pod-template-hash": template, VOLUME: "true"}
    asked = {"memory": "1Gi", "nvidia.com/gpu": "1"} | requests
    return pod | {"spec": {"nodeName": node, "containers": [{"resources": {"requests": asked}}]}}


def refused(message: str, *, template: str = "new", spec: Any = None, **requests: str) -> Obj:
    """Return a pod for which the scheduler has no node; `spec` has further fields of its spec."""
    pod = placed("chat-new", template=template, node="", **requests)
    pod["spec"] |= spec or {}
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod | {"status": {"phase": "Pending", "conditions": [reason]}}


def leaving(name: str = "chat-left") -> Obj:
    """Return a pod that is ending, and must have ended in a while."""
    pod = placed(name)
    pod["metadata"]["deletionTimestamp"] = "2099-01-01T00:00:00Z"
    return pod


def node(name: str = "gpu-1", *, spec: Any = None, **allocatable: str) -> tuple[Resource, Obj]:
    metadata = {"name": name, "uid": name, "resourceVersion": "1", "labels": {"product": "L4"}}
    status = {"allocatable": {"nvidia.com/gpu": "2"} | allocatable}
    return NODES, {"metadata": metadata, "spec": spec or {}, "status": status}


def rolling(
    *pods: Obj,
    replicas: int = 1,
    hardware: Obj = NVIDIA,
    strategy: Obj = SURGE,
    nodes: Sequence[tuple[Resource, Obj]] = (node(),),
    **status: Any,
) -> Obj | None:
    """Return the strategy that is applied while pods are replaced; None: the present one stays."""
    objects = [chat_service(hardware=hardware, replicas=replicas, scheduling=NATIVE), (MODELS, model())]
    there = chat_deployment(*objects, *nodes, replicas=replicas + 1, ready=replicas, updated=1)
    there["spec"]["strategy"] = strategy
    there = stamp(there)
    there["status"] |= status
    plan = decide_chat(*objects, (DEPLOYMENTS, there), *nodes, *((PODS, pod) for pod in pods))
    (applied,) = list_applied(plan, DEPLOYMENTS)
    assert applied["spec"]["template"] == there["spec"]["template"]
    rollout: Obj = applied["spec"]["strategy"]
    return None if rollout == strategy else rollout


@pytest.mark.parametrize("hardware", [NVIDIA, {"accelerator": "cpu"}], ids=str)
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_change_begins_with_one_pod_more(hardware: Obj, replicas: int) -> None:
    plan = decide_chat(chat_service(hardware=hardware, replicas=replicas, scheduling=NATIVE), (MODELS, model()))
    (made,) = list_applied(plan, DEPLOYMENTS)
    assert made["spec"]["strategy"] == SURGE


def test_pods_beside_a_copy_make_way_from_the_start() -> None:
    assert choose_first_strategy("disk-1", 1) == {"type": "Recreate"}
    assert choose_first_strategy("disk-1", 2) == IN_PLACE


def test_earlier_pod_makes_way_if_there_is_no_room_for_both() -> None:
    assert rolling(placed(), refused(NO_DEVICE)) == IN_PLACE
    assert rolling(placed(), refused(NO_MEMORY), hardware={"accelerator": "cpu"}) == IN_PLACE


@pytest.mark.parametrize(
    "words",
    [
        "2 node(s) didn't match pod anti-affinity rules",
        "1 node(s) didn't satisfy existing pods anti-affinity rules, 1 Insufficient memory",
        "2 node(s) didn't match pod topology spread constraints",
    ],
)
def test_earlier_pod_makes_way_if_it_is_in_the_way(words: str) -> None:
    assert rolling(placed(), refused(f"0/2 nodes are available: {words}."), hardware={"accelerator": "cpu"}) == IN_PLACE


def test_replicas_that_never_had_room_do_not_hold_a_change_up() -> None:
    never = refused(NO_DEVICE, template="old")
    never["metadata"]["name"] = "chat-never"
    never["metadata"]["uid"] = "uid-chat-never"
    strategy = rolling(placed(), never, refused(NO_DEVICE), replicas=2)
    assert strategy is not None
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 2}


def test_a_refusal_is_not_final_while_a_pod_is_ending() -> None:
    assert rolling(placed(), leaving(), refused(NO_DEVICE)) is None


def test_a_pod_of_the_same_template_makes_no_way() -> None:
    assert rolling(placed(), refused(NO_DEVICE, template="old"), replicas=2) is None


@pytest.mark.parametrize(
    "new",
    [
        refused(NO_SUCH_NODE),
        refused(NO_MEMORY, memory="2Gi"),
        refused(NO_DEVICE, **{"nvidia.com/gpu": "3"}),
        refused("0/2 nodes are available: 2 Insufficient amd.com/gpu.", **{"amd.com/gpu": "1"}),
    ],
    ids=["no such node", "more memory", "more devices than the node has", "devices of another vendor"],
)
def test_earlier_pod_serves_on_if_the_new_one_would_not_fit_in_its_place(new: Obj) -> None:
    assert rolling(placed(), new) is None
    objects = [chat_service(hardware=NVIDIA, scheduling=NATIVE), (MODELS, model())]
    there = chat_deployment(*objects, replicas=2, updated=1)
    plan = decide_chat(*objects, (DEPLOYMENTS, there), node(), (PODS, placed()), (PODS, new))
    message = planned_condition(plan, "Ready")["message"]
    assert new["status"]["conditions"][0]["message"] in message
    assert "the earlier pods serve on" in message
    assert "spec.suspend" in message


def test_more_devices_fit_if_the_node_of_the_earlier_pod_has_them() -> None:
    assert rolling(placed(), refused(NO_DEVICE, **{"nvidia.com/gpu": "2", "memory": "9Gi"})) == IN_PLACE


def test_no_pod_makes_way_for_more_devices_that_another_service_holds() -> None:
    other = placed("other-1")
    other["metadata"]["labels"] = {"inference.pomona.dev/service": "other"}
    two = refused(NO_DEVICE, **{"nvidia.com/gpu": "2"})
    assert rolling(placed(), other, two) is None
    assert rolling(placed(), other | {"status": {"phase": "Succeeded"}}, two) == IN_PLACE


@pytest.mark.parametrize(
    ("new", "spec"),
    [
        ({"nodeSelector": {"product": "H100"}}, {}),
        ({}, {"unschedulable": True}),
        ({}, {"taints": [{"key": "maintenance", "effect": "NoSchedule"}]}),
    ],
    ids=["other nodes are selected", "cordoned", "tainted"],
)
def test_no_pod_makes_way_on_a_node_that_would_not_take_the_new_one(new: Obj, spec: Obj) -> None:
    mixed = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) had another reason."
    assert rolling(placed(), refused(mixed, spec=new), nodes=[node(spec=spec)]) is None
    assert rolling(placed(), refused(mixed), nodes=[node()]) == IN_PLACE
    assert rolling(placed(), refused(mixed), nodes=[]) is None, "an unknown node"


def test_no_pod_makes_way_on_a_node_from_which_the_volume_holds_the_new_one_off() -> None:
    term = {"labelSelector": {"matchLabels": {VOLUME: "true"}}, "topologyKey": "kubernetes.io/hostname"}
    held = {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}
    mixed = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match pod affinity rules."
    turned = placed("chat-turned", template="new", node="gpu-2")
    full = [node("gpu-1", **{"nvidia.com/gpu": "1"}), node("gpu-2", **{"nvidia.com/gpu": "1"})]
    assert rolling(placed(), turned, refused(mixed, spec=held), replicas=2, nodes=full) is None
    assert rolling(placed(), refused(mixed, spec=held), nodes=full) == IN_PLACE
    assert rolling(placed(), turned, refused(mixed), replicas=2, nodes=full) == IN_PLACE


def test_resource_with_an_underscore_is_read_in_full() -> None:
    partition = {"amd.com/cpx_nps4": "16"}
    words = "0/1 nodes are available: 1 Insufficient amd.com/cpx_nps4."
    assert rolling(placed(), refused(words, **partition), nodes=[node(**{"amd.com/cpx_nps4": "8"})]) is None


def test_second_pod_of_a_claim_that_one_pod_may_mount_waits_for_the_first() -> None:
    words = "0/1 nodes are available: 1 node has pod using PersistentVolumeClaim with the same name and "
    assert rolling(placed(), refused(f"{words}ReadWriteOncePod access mode.")) == IN_PLACE


def test_refused_pod_of_the_change_before_ends_nothing() -> None:
    assert rolling(placed(), refused(NO_DEVICE, template="typo"), updatedReplicas=0) is None


def quota(message: str = QUOTA) -> list[Obj]:
    return [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}]


def test_earlier_pod_makes_way_if_a_quota_allows_no_second_one() -> None:
    assert rolling(placed(), conditions=quota(), updatedReplicas=2) is None, "no template is changing"
    assert rolling(placed(), conditions=quota(), updatedReplicas=0) == IN_PLACE
    assert rolling(placed(), conditions=quota("pods is forbidden: violates PodSecurity"), updatedReplicas=0) is None
    more = QUOTA.replace("requested: requests.nvidia.com/gpu=1", "requested: requests.memory=1Gi,pods=1")
    small = placed(memory=str(GIB // 2))
    assert rolling(small, conditions=quota(more), updatedReplicas=0) is None


def test_the_strategy_stays_until_the_next_change_which_begins_anew() -> None:
    objects = [chat_service(hardware=NVIDIA, scheduling=NATIVE), (MODELS, model())]
    there = chat_deployment(*objects, replicas=2, updated=1)
    blocked = [(PODS, placed()), (PODS, refused(NO_DEVICE)), node()]
    (applied,) = list_applied(decide_chat(*objects, (DEPLOYMENTS, there), *blocked), DEPLOYMENTS)
    there = deepcopy(there)
    there["spec"] = applied["spec"]
    there["metadata"]["annotations"] = applied["metadata"]["annotations"]
    for pods in ([*blocked], [(PODS, refused(NO_DEVICE))], [(PODS, placed("chat-new", template="new"))]):
        (again,) = list_applied(decide_chat(*objects, (DEPLOYMENTS, there), *pods), DEPLOYMENTS)
        assert again == applied
    edited = [chat_service(hardware=NVIDIA, scheduling=NATIVE, contextLength=1024), (MODELS, model())]
    (changed,) = list_applied(decide_chat(*edited, (DEPLOYMENTS, there), (PODS, placed())), DEPLOYMENTS)
    assert changed["spec"]["strategy"] == SURGE
    assert changed["spec"]["template"] != applied["spec"]["template"]


def test_refusals_from_before_the_change_was_seen_do_not_count() -> None:
    assert rolling(placed(), refused(NO_DEVICE), observedGeneration=0) is None
    assert rolling(placed(), conditions=quota(), updatedReplicas=0, observedGeneration=0) is None


def test_refusal_of_a_pod_that_was_created_since_ends_nothing() -> None:
    created = placed("chat-new", template="new")
    assert rolling(placed(), created, conditions=quota(), updatedReplicas=0) is None
    assert rolling(placed(), created, replicas=2, conditions=quota(), updatedReplicas=1) == IN_PLACE


def test_refused_pod_that_a_quota_counts_makes_way() -> None:
    waiting = refused(NO_MEMORY, template="old")
    strategy = rolling(waiting, conditions=quota(), readyReplicas=0, updatedReplicas=0)
    assert strategy is not None
    assert strategy["rollingUpdate"]["maxSurge"] == 0


def test_earlier_pod_makes_way_on_a_node_with_too_many_pods() -> None:
    assert rolling(placed(), refused("0/2 nodes are available: 2 Too many pods.")) == IN_PLACE


@pytest.mark.parametrize("message", [NO_DEVICE.replace("1 Insufficient", "2 Insufficient"), NO_DEVICE], ids=str)
def test_earlier_pod_serves_on_if_no_node_has_the_memory(message: str) -> None:
    asked = "9Gi" if message != NO_DEVICE else "900Gi"
    objects = [chat_service(hardware=NVIDIA, scheduling=NATIVE), (MODELS, model())]
    there = chat_deployment(*objects, replicas=2, updated=1)
    pods = [(PODS, placed()), (PODS, refused(message, memory=asked))]
    (applied,) = list_applied(decide_chat(*objects, (DEPLOYMENTS, there), node(memory="64Gi"), *pods), DEPLOYMENTS)
    assert applied["spec"]["strategy"] == SURGE


def test_strategy_of_anybody_else_is_overruled() -> None:
    reckless: Obj = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "50%", "maxUnavailable": "100%"}}
    assert rolling(placed(), strategy=reckless) == SURGE
    in_place: Obj = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "100%"}}
    assert rolling(placed(), strategy=in_place) == IN_PLACE
