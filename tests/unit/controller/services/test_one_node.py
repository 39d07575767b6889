"""Pods beside a ReadWriteOnce volume: which volumes are meant, and that pods of one run on one node."""

from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any

import pytest

from controller.reconcile.stamp import stamp
from controller.services.pods.one_node import has_one_node, label_claims
from controller.services.reconciler import service_reconciler
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS, PODS, ObjectKey, Resource
from tests.support.api_objects import NOW, as_model, model, planned_condition, store
from tests.support.service_decisions import (
    chat_deployment,
    chat_pod,
    chat_service,
    decide_chat,
    list_applied,
    plain_sources,
)

LABEL = "volume.inference.pomona.dev/tiny-cache"
TERM = {"labelSelector": {"matchLabels": {LABEL: "true"}}, "topologyKey": "kubernetes.io/hostname"}
KIND = service_reconciler(plain_sources())
TRIGGERS = [trigger for trigger in KIND.triggers if trigger.resource == PODS]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, True),
        ({"cache": {"accessMode": "ReadWriteMany"}}, False),
        ({"cache": {"scope": "node", "storageClassName": "local"}}, False),
        ({"cache": {"medium": "Image"}, "source": "oci://ghcr.io/acme/tiny:1"}, False),
        ({"source": "pvc://weights/tiny.gguf"}, False),
        ({"source": "ollama://tiny:1b"}, False),
    ],
    ids=str,
)
def test_volumes_that_can_be_attached_to_one_node_only(spec: dict[str, Any], expected: bool) -> None:
    assert has_one_node(as_model(model(**spec))) == expected


def template(**spec: Any) -> Obj:
    (made,) = list_applied(decide_chat(chat_service(**spec), (MODELS, model())), DEPLOYMENTS)
    pod_template: Obj = made["spec"]["template"]
    return pod_template


def test_pods_of_a_service_run_where_other_pods_with_its_volume_run() -> None:
    made = template()
    assert made["metadata"]["labels"][LABEL] == "true"
    assert made["spec"]["affinity"] == {"podAffinity": {REQUIRED: [TERM]}}


def test_affinity_of_the_user_stays() -> None:
    beside = {"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": "zone"}
    away = {"podAntiAffinity": {REQUIRED: [beside]}}
    made = template(pod={"affinity": {"podAffinity": {REQUIRED: [beside]}, **away}})
    assert made["spec"]["affinity"] == {"podAffinity": {REQUIRED: [beside, TERM]}, **away}


def test_pod_with_several_volumes_follows_that_of_its_main_model() -> None:
    """Pods that match one of two terms of an affinity are no pods for the scheduler."""
    draft = model()
    draft["metadata"] |= {"name": "draft", "uid": "uid-draft"}
    chat = chat_service(speculative={"draftModelRef": "draft"})
    (made,) = list_applied(decide_chat(chat, (MODELS, model()), (MODELS, draft)), DEPLOYMENTS)
    pod_template = made["spec"]["template"]
    assert pod_template["spec"]["affinity"]["podAffinity"][REQUIRED] == [TERM]
    assert (
        label_claims(dict.fromkeys(["tiny-cache", "draft-cache"], "true")).items()
        <= pod_template["metadata"]["labels"].items()
    )


def test_refusal_for_want_of_room_on_the_one_node_names_the_way_out() -> None:
    words = "0/2 nodes are available: 1 Insufficient memory, 1 node(s) didn't match pod affinity rules."
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    objects = [chat_service(), (MODELS, model())]
    there = chat_deployment(*objects, ready=0)
    plan = decide_chat(*objects, (DEPLOYMENTS, there), (PODS, chat_pod(conditions=[reason], phase="Pending")))
    message = planned_condition(plan, "Ready")["message"]
    assert words in message
    assert "the volume of Model tiny is ReadWriteOnce, so its pods share one node" in message


def deployed(*, mark: str = "true", ready: int = 1, context: int = 512) -> Obj:
    """Return the Deployment whose pods have this value of the label."""
    made = chat_deployment(chat_service(contextLength=context), (MODELS, model()), ready=ready)
    made["spec"]["template"] = _with_mark(made["spec"]["template"], mark)
    return stamp(made)


def _with_mark(template: Obj, mark: str) -> Obj:
    marked = deepcopy(template)
    marked["metadata"]["labels"][LABEL] = mark
    marked["spec"]["affinity"]["podAffinity"][REQUIRED][0]["labelSelector"]["matchLabels"] = {LABEL: mark}
    return marked


def mounting(
    name: str = "chat-1",
    *,
    mark: str = "true",
    node: str = "node-1",
    deleted: datetime | None = None,
    message: str = "",
    service: str = "chat",
) -> tuple[Resource, Obj]:
    """Return a pod of the claim: on a node, being deleted by then, or refused with these words."""
    pod = chat_pod(name)
    pod["metadata"]["labels"] = {"inference.pomona.dev/service": service, LABEL: mark}
    if deleted is not None:
        pod["metadata"]["deletionTimestamp"] = deleted.isoformat()
    claim = {"persistentVolumeClaim": {"claimName": "tiny-cache"}}
    affinity = {"podAffinity": {REQUIRED: [TERM]}}
    if message:
        reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        pod["status"] = {"phase": "Pending", "conditions": [reason]}
        return PODS, pod | {"spec": {"containers": [], "volumes": [claim], "affinity": affinity}}
    return PODS, pod | {"spec": {"containers": [], "volumes": [claim], "nodeName": node}}


def mark_of(*objects: tuple[Resource, Obj], there: Obj | None = None, **spec: Any) -> str:
    """Return the value of the label in the pods that are applied."""
    deployments = [(DEPLOYMENTS, there)] if there is not None else []
    plan = decide_chat(chat_service(contextLength=512, **spec), (MODELS, model()), *deployments, *objects)
    (made,) = list_applied(plan, DEPLOYMENTS)
    mark: str = made["spec"]["template"]["metadata"]["labels"][LABEL]
    term = made["spec"]["template"]["spec"]["affinity"]["podAffinity"][REQUIRED][-1]
    assert term["labelSelector"]["matchLabels"] == {LABEL: mark}
    return mark


HELD = "0/2 nodes are available: 1 node(s) didn't match pod affinity rules, 1 node(s) had untolerated taint(s)."
LOST = NOW - timedelta(seconds=21)
LATE = NOW - timedelta(seconds=3)
ENDING = NOW + timedelta(seconds=20)


def test_pods_of_a_lost_node_hold_no_new_one_there() -> None:
    lost, waits = mounting("chat-lost", deleted=LOST), mounting("chat-new", message=HELD)
    assert mark_of(mounting("chat-lost", deleted=ENDING), waits, there=deployed(ready=0)) == "true"
    assert mark_of(mounting("chat-lost", deleted=LATE), waits, there=deployed(ready=0)) == "true"
    another = mark_of(lost, waits, there=deployed(ready=0))
    assert another != "true"
    for pods in ([mounting("chat-2", mark=another)], [mounting("chat-2", mark=another), waits], []):
        assert mark_of(lost, *pods, there=deployed(mark=another)) == another, "it stays"
    assert mark_of(mounting("chat-2", mark=another), there=deployed(mark=another)) == another, "the node is gone"


def test_replica_that_waits_for_a_pod_that_is_gone_is_replaced_at_once() -> None:
    waits = mounting("chat-new", message=HELD)
    assert mark_of(mounting(deleted=ENDING), waits, there=deployed(ready=0)) == "true", "it ends in a moment"
    another = mark_of(waits, there=deployed(ready=0))
    assert another != "true"
    full = mounting("chat-2", mark=another, message="0/2 nodes are available: 2 Insufficient memory.")
    assert mark_of(waits, full, there=deployed(mark=another, ready=0)) == another


def test_service_looks_again_when_pods_that_end_late_count_as_lost() -> None:
    late, waits = mounting("chat-late", deleted=LATE), mounting("chat-new", message=HELD)
    there = (MODELS, model()), (DEPLOYMENTS, deployed(ready=0))
    assert decide_chat(chat_service(contextLength=512), *there, late, waits).again_seconds == pytest.approx(17)


def test_replica_that_lacks_room_too_is_not_replaced() -> None:
    """The scheduler tries it again by itself when another pod ends, and would place it beside its successor."""
    tight = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) didn't match pod affinity rules."
    assert mark_of(mounting("chat-new", message=tight), there=deployed(ready=0)) == "true"


def test_another_value_that_does_not_help_is_the_last_one() -> None:
    first = mounting("chat-1", message=HELD)
    another = mark_of(first, there=deployed(ready=0))
    second = mounting("chat-2", mark=another, message=HELD)
    assert mark_of(first, second, there=deployed(mark=another, ready=0)) == another


def test_value_of_pods_that_serve_outweighs_that_of_others() -> None:
    resource, hung = mounting("chat-2", mark="0123abcd", node="node-2")
    hung["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
    hung["metadata"]["creationTimestamp"] = "2026-11-23T10:00:00Z"
    assert mark_of(mounting(), (resource, hung), there=deployed(mark="0123abcd")) == "true"
    assert mark_of((resource, hung), there=deployed(mark="0123abcd", ready=0)) == "0123abcd"


def test_services_that_wait_look_when_a_pod_of_their_volume_comes_or_goes() -> None:
    resource, waits = mounting("other-1", service="other", message=HELD)
    _, goes = mounting(deleted=ENDING)
    cluster = store(mounting("chat-2"), (resource, waits), (resource, goes))
    _, stays = mounting()
    _, unplaced = mounting(message=HELD)

    def wakes(old: Obj | None, new: Obj | None) -> bool:
        changed = new or old or {}
        keys = {key for trigger in TRIGGERS if trigger.concerns(old, new) for key in trigger.keys(cluster, changed)}
        return ObjectKey("team", "other") in keys

    assert wakes(stays, goes)
    assert wakes(goes, None)
    assert wakes(None, stays)
    assert not wakes(unplaced, None)
    assert not wakes(stays, stays | {"status": {}})


def test_replica_that_an_affinity_of_the_user_holds_off_is_not_replaced() -> None:
    resource, waits = mounting("chat-new", message=HELD)
    beside = {"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": "zone"}
    waits["spec"]["affinity"] = {"podAffinity": {REQUIRED: [beside, TERM]}}
    assert mark_of((resource, waits), there=deployed(ready=0)) == "true"


def test_services_of_one_volume_follow_each_other() -> None:
    other = mounting("other-1", mark="0123abcd", service="other")
    lost = mounting("chat-lost", deleted=LOST)
    assert mark_of(other) == "0123abcd"
    assert mark_of(other, lost, there=deployed(ready=0)) == "0123abcd"
    assert mark_of(other, mounting(), there=deployed()) == "true", "its own pods serve"
    waits = [mounting(name, message=HELD, service=name[:-2]) for name in ("chat-2", "other-2")]
    both = {mark_of(lost, *refused, there=deployed(ready=0)) for refused in (waits, waits[:1], [])}
    assert len(both) == 1, "whatever they know of each other's pods"
