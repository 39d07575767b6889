"""Pods beside a ReadWriteOnce volume: which volumes are meant, and that pods of one run on one node."""

from typing import Any

import pytest

from controller.reconcile.stamp import stamp
from controller.services.pods.one_node import forget_claims, has_one_node, label_claims
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS, PODS
from tests.support.api_objects import as_model, model, planned_condition
from tests.support.service_decisions import chat_deployment, chat_pod, chat_service, decide_chat, list_applied

LABEL = "volume.inference.pomona.dev/tiny-cache"
TERM = {"labelSelector": {"matchLabels": {LABEL: "true"}}, "topologyKey": "kubernetes.io/hostname"}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, True),
        ({"cache": {"accessMode": "ReadWriteMany"}}, False),
        ({"cache": {"scope": "node", "storageClassName": "local"}}, False),
        ({"cache": {"medium": "Image"}, "source": "oci://ghcr.io/acme/tiny:1"}, False),
        ({"source": "pvc://weights/tiny.gguf"}, False),
    ],
    ids=str,
)
def test_volumes_that_can_be_attached_to_one_node_only(spec: dict[str, Any], expected: bool) -> None:
    assert has_one_node(as_model(model(**spec))) == expected


def template(**spec: Any) -> Obj:
    (made,) = list_applied(decide_chat(chat_service(**spec), (MODELS, model())), DEPLOYMENTS)
    found: Obj = made["spec"]["template"]
    return found


def test_pods_of_a_service_run_where_other_pods_with_its_volume_run() -> None:
    made = template()
    assert made["metadata"]["labels"][LABEL] == "true"
    assert made["spec"]["affinity"] == {"podAffinity": {REQUIRED: [TERM]}}


def test_affinity_of_the_user_stays() -> None:
    beside = {"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": "zone"}
    away = {"podAntiAffinity": {REQUIRED: [beside]}}
    made = template(pod={"affinity": {"podAffinity": {REQUIRED: [beside]}, **away}})
    assert made["spec"]["affinity"] == {"podAffinity": {REQUIRED: [beside, TERM]}, **away}
    without = forget_claims(made)
    assert without["spec"]["affinity"] == {"podAffinity": {REQUIRED: [beside]}, **away}
    assert LABEL not in without["metadata"]["labels"]


def test_pod_with_several_volumes_follows_that_of_its_main_model() -> None:
    """Pods that match one of two terms of an affinity are no pods for the scheduler."""
    draft = model()
    draft["metadata"] |= {"name": "draft", "uid": "uid-draft"}
    chat = chat_service(speculative={"draftModelRef": "draft"})
    (made,) = list_applied(decide_chat(chat, (MODELS, model()), (MODELS, draft)), DEPLOYMENTS)
    found = made["spec"]["template"]
    assert found["spec"]["affinity"]["podAffinity"][REQUIRED] == [TERM]
    assert label_claims(["tiny-cache", "draft-cache"]).items() <= found["metadata"]["labels"].items()


def test_update_restarts_no_pod_for_this_and_the_next_edit_brings_it() -> None:
    objects = [chat_service(), (MODELS, model())]
    there = chat_deployment(*objects)
    there["spec"]["template"] = forget_claims(there["spec"]["template"])
    earlier = stamp(there)
    (kept,) = list_applied(decide_chat(*objects, (DEPLOYMENTS, earlier)), DEPLOYMENTS)
    assert kept["spec"] == earlier["spec"]
    edited = [chat_service(contextLength=1024), (MODELS, model())]
    (changed,) = list_applied(decide_chat(*edited, (DEPLOYMENTS, earlier)), DEPLOYMENTS)
    assert LABEL in changed["spec"]["template"]["metadata"]["labels"]


def test_refusal_for_want_of_room_on_the_one_node_names_the_way_out() -> None:
    words = "0/2 nodes are available: 1 Insufficient memory, 1 node(s) didn't match pod affinity rules."
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    objects = [chat_service(), (MODELS, model())]
    there = chat_deployment(*objects, ready=0)
    plan = decide_chat(*objects, (DEPLOYMENTS, there), (PODS, chat_pod(conditions=[reason], phase="Pending")))
    message = planned_condition(plan, "Ready")["message"]
    assert words in message
    assert "the volume of Model tiny is ReadWriteOnce, so its pods share one node" in message
