"""New pods with devices wait for the queue by a scheduling gate, and no pod that has a node is replaced for it."""

from copy import deepcopy
from typing import Any

import pytest

from controller.pod_settings import PodSettings, TenantLimits
from controller.reconcile.plan import Plan
from controller.reconcile.stamp import ANNOTATION_STAMP, needs_apply, stamp
from controller.services.pods.queue_gate import has_gate, set_gate
from crds.meta import QUEUE_GATE
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS, PODS
from tests.support.api_objects import model, planned_condition
from tests.support.service_decisions import (
    SETTINGS,
    chat_deployment,
    chat_pod,
    chat_service,
    decide_chat,
    kept_part,
    list_applied,
)

NVIDIA: Obj = {"hardware": {"accelerator": "nvidia"}}
NATIVE = PodSettings("pomona:test", scheduling_mode="Native")
NEVER = 2147483647
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def make(settings: PodSettings = SETTINGS, **spec: Any) -> Obj:
    """Return the Deployment of a new service."""
    (made,) = list_applied(decide_chat(chat_service(**spec), (MODELS, model()), settings=settings), DEPLOYMENTS)
    return made


def running(*, is_gated: bool, **spec: Any) -> Obj:
    """Return the Deployment of a running service, as the store keeps it."""
    there = deepcopy(chat_deployment(chat_service(**{**NVIDIA, **spec}), (MODELS, model())))
    return kept_part(stamp(set_gate(there, is_gated=is_gated)))


def decide(there: Obj, settings: PodSettings = SETTINGS, *, has_node: bool = True, **spec: Any) -> Plan:
    pod = chat_pod() | {"spec": {"nodeName": "gpu-1"} if has_node else {}}
    objects = (chat_service(**{**NVIDIA, **spec}), (MODELS, model()), (DEPLOYMENTS, there), (PODS, pod))
    return decide_chat(*objects, settings=settings, may_roll_out=False)


def has_same_template(made: Obj, there: Obj) -> bool:
    """Return whether a Deployment replaces no pod of the present one."""
    return bool(made["metadata"]["annotations"][ANNOTATION_STAMP] == there["metadata"]["annotations"][ANNOTATION_STAMP])


def test_pods_with_devices_wait_for_the_queue() -> None:
    made = make(**NVIDIA)
    assert made["spec"]["template"]["spec"]["schedulingGates"] == [{"name": QUEUE_GATE}]
    assert made["spec"]["progressDeadlineSeconds"] == NEVER


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ({"hardware": {"accelerator": "cpu"}}, SETTINGS),
        ({**NVIDIA, "scheduling": {"mode": "Native"}}, SETTINGS),
        (NVIDIA, NATIVE),
    ],
    ids=["no device", "mode of the service", "mode of the controller"],
)
def test_other_pods_have_no_gate(spec: Obj, settings: PodSettings) -> None:
    made = make(settings, **spec)
    assert not has_gate(made)
    assert "schedulingGates" not in made["spec"]["template"]["spec"]
    assert "progressDeadlineSeconds" not in made["spec"]


def test_mode_of_the_service_overrules_that_of_the_controller() -> None:
    assert has_gate(make(NATIVE, **NVIDIA, scheduling={"mode": "Queue"}))


@pytest.mark.parametrize(
    ("spec", "settings", "says"),
    [
        ({"hardware": {"accelerator": "cpu"}}, SETTINGS, "accelerator cpu has no devices to wait for: remove it"),
        (
            NVIDIA,
            PodSettings("pomona:test", limits=TenantLimits(hosts=False)),
            "the queue belongs to the whole cluster",
        ),
    ],
    ids=["no device", "some namespaces"],
)
def test_queue_that_nobody_works_on_is_refused(spec: Obj, settings: PodSettings, says: str) -> None:
    plan = decide_chat(chat_service(**spec, scheduling={"mode": "Queue"}), (MODELS, model()), settings=settings)
    assert list_applied(plan, DEPLOYMENTS) == []
    assert says in planned_condition(plan, "Ready")["message"]


def test_host_beside_the_queue_is_refused_also_by_the_model() -> None:
    of_model = (MODELS, model(hardware={"accelerator": "metal"}))
    plan = decide_chat(chat_service(scheduling={"mode": "Native"}), of_model)
    assert "always go by the queue: remove it" in planned_condition(plan, "Ready")["message"]


def test_update_that_brings_the_queue_replaces_no_pod() -> None:
    there = running(is_gated=False)
    (same,) = list_applied(decide(there), DEPLOYMENTS)
    assert not needs_apply(DEPLOYMENTS, same, there)


@pytest.mark.parametrize("settings", [SETTINGS, NATIVE], ids=["Queue", "Native"])
@pytest.mark.parametrize("is_gated", [True, False])
def test_another_default_mode_replaces_no_pod(is_gated: bool, settings: PodSettings) -> None:
    there = running(is_gated=is_gated)
    (same,) = list_applied(decide(there, settings), DEPLOYMENTS)
    assert not needs_apply(DEPLOYMENTS, same, there)


@pytest.mark.parametrize(
    "edit",
    [
        {"evictionProtection": True},
        {"priority": "critical"},
        {"scheduling": {"mode": "Queue"}},
        {"scheduling": {"mode": "Native"}},
        {"replicas": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_gated", [True, False])
def test_edit_of_the_place_in_the_queue_replaces_no_pod(is_gated: bool, edit: Obj) -> None:
    there = running(is_gated=is_gated)
    (applied,) = list_applied(decide(there, **edit), DEPLOYMENTS)
    assert has_same_template(applied, there)
    assert applied["spec"]["replicas"] == edit.get("replicas", 1)


def test_priority_beside_the_queue_is_that_of_the_pods() -> None:
    there = running(is_gated=False, scheduling={"mode": "Native"})
    (applied,) = list_applied(decide(there, scheduling={"mode": "Native"}, priority="critical"), DEPLOYMENTS)
    assert applied["spec"]["template"]["spec"]["priorityClassName"] == "pomona-critical"


def test_edit_of_the_template_brings_the_gate() -> None:
    (applied,) = list_applied(decide(running(is_gated=False), contextLength=1024), DEPLOYMENTS)
    assert has_gate(applied)
    (applied,) = list_applied(decide(running(is_gated=True), NATIVE, contextLength=1024), DEPLOYMENTS)
    assert not has_gate(applied)


def test_pods_that_wait_follow_the_mode_at_once() -> None:
    there = running(is_gated=False)
    there["status"] |= {"readyReplicas": 0}
    (applied,) = list_applied(decide(there, has_node=False), DEPLOYMENTS)
    assert has_gate(applied)
    there = running(is_gated=True)
    there["status"] |= {"readyReplicas": 0}
    (applied,) = list_applied(decide(there, scheduling={"mode": "Native"}, has_node=False), DEPLOYMENTS)
    assert not has_gate(applied)


def test_every_term_of_a_gated_pod_can_be_pinned_to_a_node() -> None:
    """The API server lets a gated pod have more requirements in each term, but not in an empty one."""
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    disk = {"key": "metadata.name", "operator": "In", "values": ["disk-1"]}
    stated = {
        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [zone]}, {"matchFields": [disk]}]}}
    }
    hardware = {"accelerator": "nvidia", "products": ["NVIDIA-L4"]}
    for spec in ({"hardware": hardware}, {**NVIDIA, "pod": {"affinity": stated}}, NVIDIA):
        affinity = make(**spec)["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
        terms = affinity.get(REQUIRED, {}).get("nodeSelectorTerms")
        assert terms is None or (terms and all(any(term.values()) for term in terms))
