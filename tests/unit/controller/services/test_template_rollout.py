"""Rollouts of a template: an edit replaces pods at once, an update of Pomona one service at a time, scaling none."""

from typing import Any

import pytest
from msgspec.structs import replace

from controller.placement.queued_service import read_template_mark
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Plan
from controller.reconcile.stamp import (
    ANNOTATION_INPUTS,
    ANNOTATION_STAMP,
    ANNOTATION_UPDATE,
    needs_apply,
    stamp,
)
from controller.services.pods.update_pacer import LIMIT_SECONDS, START_SECONDS, UpdatePacer
from controller.services.service_view import AWAITS_UPDATE
from crds.meta import API_VERSION
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS, NODES, PODS, ObjectKey, Resource
from kube.store import Store
from tests.support.api_objects import NAMESPACE, model, planned_condition, service, store
from tests.support.service_decisions import (
    SETTINGS,
    chat_deployment,
    chat_pod,
    chat_service,
    decide_chat,
    list_applied,
)

CPU = replace(VENDORS["cpu"], images={"llama.cpp": "engine:2"})
UPDATED = PodSettings("pomona:test", vendors={**VENDORS, "cpu": CPU})
"""The controller after an update: pods have another template without any edit."""


def running(**spec: Any) -> Obj:
    """Return the Deployment of a running service as the store keeps it."""
    (kept,) = store((DEPLOYMENTS, chat_deployment(chat_service(**spec), (MODELS, model())))).list(DEPLOYMENTS)
    return kept


def decide(there: Obj, settings: PodSettings = UPDATED, *, may_roll_out: bool = False, **spec: Any) -> Plan:
    objects = ((MODELS, model()), (DEPLOYMENTS, there), (PODS, chat_pod()))
    return decide_chat(chat_service(**spec), *objects, settings=settings, may_roll_out=may_roll_out)


def image(plan: Plan) -> str | None:
    """Return the image with which the plan replaces the pods, or None if it does not."""
    deployments = list_applied(plan, DEPLOYMENTS)
    return deployments[0]["spec"]["template"]["spec"]["initContainers"][0]["image"] if deployments else None


def test_update_waits_for_its_turn_and_the_service_serves_on() -> None:
    plan = decide(running())
    assert (image(plan), plan.delete, plan.patch) == (None, (), ())
    assert plan.status is not None
    assert plan.status["readyReplicas"] == 1
    assert plan.status["phase"] == "Progressing", "about to be probed, and no problem"


def test_update_is_rolled_out_in_its_turn() -> None:
    plan = decide(running(), may_roll_out=True)
    assert image(plan) == "engine:2"
    assert list_applied(plan, DEPLOYMENTS)[0]["metadata"]["annotations"][ANNOTATION_UPDATE] == "true"


def test_pull_secret_of_the_controller_is_rolled_out_in_turn() -> None:
    stated: Obj = {"runtime": "generic", "image": "registry.example/engine:1", "container": {}}
    stated["resources"] = {"memory": "1Gi"}
    given = PodSettings("pomona:test", image_pull_secrets=("registry",))
    assert list_applied(decide(running(**stated), given, **stated), DEPLOYMENTS) == []
    (applied,) = list_applied(decide(running(**stated), given, may_roll_out=True, **stated), DEPLOYMENTS)
    assert applied["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert applied["metadata"]["annotations"][ANNOTATION_UPDATE] == "true"


def test_edit_is_rolled_out_at_once() -> None:
    plan = decide(running(), contextLength=8192)
    assert image(plan) == "engine:2"
    assert ANNOTATION_UPDATE not in list_applied(plan, DEPLOYMENTS)[0]["metadata"]["annotations"]


def held_by(claim: str) -> Obj:
    """Return the Model while pods are to mount this claim, with a digest by which they find its weights."""
    return model(status={"cached": {"name": claim, "claim": f"uid-{claim}", "path": f"{claim}/tiny.gguf"}})


def decide_edited(there: Obj, edited: Obj, settings: PodSettings = UPDATED) -> Plan:
    """Return the plan after an edit of the Model."""
    edited["metadata"]["generation"], edited["status"]["observedGeneration"] = 2, 2
    objects = ((MODELS, edited), (DEPLOYMENTS, there), (PODS, chat_pod()))
    return decide_chat(chat_service(), *objects, settings=settings, may_roll_out=False)


@pytest.mark.parametrize("edited", [model(memoryBytes=3 << 30), held_by("tiny-cache-2")], ids=["memory", "weights"])
def test_edit_of_the_model_is_rolled_out_at_once(edited: Obj) -> None:
    plan = decide_edited(running(), edited)
    assert image(plan) == "engine:2"
    assert ANNOTATION_UPDATE not in list_applied(plan, DEPLOYMENTS)[0]["metadata"]["annotations"]


def test_edit_of_the_model_that_no_pod_sees_rolls_no_update_out() -> None:
    assert image(decide_edited(running(), model(domains=["coding"]))) is None


def test_weights_that_were_verified_later_are_rolled_out_at_once() -> None:
    """The revision is found first, and its weights follow: neither is an update of Pomona."""
    unverified = held_by("tiny-cache")
    (there,) = store((DEPLOYMENTS, chat_deployment(chat_service(), (MODELS, unverified)))).list(DEPLOYMENTS)
    unverified["status"]["revision"] = "r2"
    (same,) = list_applied(decide_edited(there, unverified, SETTINGS), DEPLOYMENTS)
    assert not needs_apply(DEPLOYMENTS, same, there)
    verified = held_by("tiny-cache-2")
    verified["status"]["revision"] = "r2"
    (moved,) = list_applied(decide_edited(there, verified, SETTINGS), DEPLOYMENTS)
    assert ANNOTATION_UPDATE not in moved["metadata"]["annotations"]


STATED = (MODELS, model(memoryBytes=20 << 30))
ON_DEVICE: Obj = {"hardware": {"accelerator": "nvidia"}}


def of_stated_memory() -> Obj:
    """Return a Deployment whose pods request what the Model states for the devices."""
    there = chat_deployment(chat_service(**ON_DEVICE), STATED)
    (container,) = there["spec"]["template"]["spec"]["initContainers"]
    container["resources"]["requests"]["memory"] = str(20 << 30)
    (kept,) = store((DEPLOYMENTS, stamp(there))).list(DEPLOYMENTS)
    return kept


def requested(plan: Plan) -> list[int]:
    """Return the memory that the plan has the pods request, if it applies a Deployment."""
    pods = [obj["spec"]["template"]["spec"] for obj in list_applied(plan, DEPLOYMENTS)]
    return [int(pod["initContainers"][0]["resources"]["requests"]["memory"]) for pod in pods]


def test_pods_keep_the_request_of_stated_memory_after_an_update() -> None:
    there = of_stated_memory()
    plan = decide_chat(chat_service(**ON_DEVICE), STATED, (DEPLOYMENTS, there), (PODS, chat_pod()), may_roll_out=False)
    (applied,) = list_applied(plan, DEPLOYMENTS)
    assert not needs_apply(DEPLOYMENTS, applied, there)


def test_edit_of_stated_memory_replaces_the_request_for_the_devices() -> None:
    """Whoever lowers it because no node has so much expects another request."""
    edited = (MODELS, model(memoryBytes=10 << 30))
    plan = decide_chat(
        chat_service(**ON_DEVICE), edited, (DEPLOYMENTS, of_stated_memory()), (PODS, chat_pod()), may_roll_out=False
    )
    (applied,) = requested(plan)
    assert applied < 2 << 30


@pytest.mark.parametrize("replicas", [1, 3])
def test_scaling_does_not_roll_an_update_out(replicas: int) -> None:
    plan = decide(running(replicas=2), replicas=replicas)
    assert (image(plan), plan.delete) == (None, ())
    ((_, operations),) = plan.patch
    assert operations[-1] == {"op": "replace", "path": "/spec/replicas", "value": replicas}


def test_service_without_a_ready_pod_gets_the_update_at_once() -> None:
    there = running()
    del there["status"]["readyReplicas"]
    assert image(decide(there)) == "engine:2"


def test_service_that_is_suspended_is_not_kept_for_its_turn() -> None:
    assert [ref.resource for ref in decide(running(), suspend=True).delete] == [DEPLOYMENTS]


def test_template_stays_after_its_turn() -> None:
    there = running()
    (applied,) = list_applied(decide(there, may_roll_out=True), DEPLOYMENTS)
    spec = {
        **there["spec"],
        "template": {**there["spec"]["template"], "metadata": applied["spec"]["template"]["metadata"]},
    }
    after = {"metadata": {**there["metadata"], "annotations": applied["metadata"]["annotations"]}, "spec": spec}
    (again,) = list_applied(decide({**there, **after}), DEPLOYMENTS)
    assert not needs_apply(DEPLOYMENTS, again, after)


def test_mark_of_a_template_is_another_after_an_edit_and_the_first_one_after_a_rollback() -> None:
    def mark(there: Obj, **spec: Any) -> str:
        (applied,) = list_applied(decide(there, SETTINGS, **spec), DEPLOYMENTS)
        return read_template_mark(applied["spec"]["template"])

    first = running()
    assert mark(first, replicas=2) == mark(first)
    edited = running(contextLength=8192)
    assert mark(first, contextLength=8192) == mark(edited, contextLength=8192) != mark(first)
    assert mark(edited) == mark(first)


def test_service_that_waits_says_so() -> None:
    assert AWAITS_UPDATE in planned_condition(decide(running()), "ModelReady")["message"]
    assert AWAITS_UPDATE not in planned_condition(decide(running(), may_roll_out=True), "ModelReady")["message"]


# The order of services.

ONE, TWO = ObjectKey(NAMESPACE, "one"), ObjectKey(NAMESPACE, "two")


def world(
    stamp: str = "old", *, updated: int = 1, phase: str = "Ready", names: tuple[str, ...] = ("one", "two")
) -> Store:
    """Return services; the Deployment of `one` has this stamp and this many replaced pods of one."""
    objects = []
    for name in names:
        objects.append((INFERENCE_SERVICES, service(name, status={"phase": phase})))
        objects.append((DEPLOYMENTS, deployment_of(name, name, stamp if name == "one" else "old", updated=updated)))
    return store(*objects)


def deployment_of(owner: str, name: str, stamp: str, *, updated: int = 1) -> Obj:
    """Return a Deployment of this service."""
    reference = {"apiVersion": API_VERSION, "kind": "InferenceService", "name": owner, "uid": f"uid-{owner}"}
    counts = {"replicas": 1, "readyReplicas": 1, "updatedReplicas": updated, "observedGeneration": 1}
    return {
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": f"d-{name}",
            "resourceVersion": "1",
            "generation": 1,
            "ownerReferences": [reference | {"controller": True}],
            "annotations": {ANNOTATION_STAMP: stamp, ANNOTATION_INPUTS: "i"},
        },
        "spec": {"replicas": 1, "template": {"spec": {"containers": []}}},
        "status": counts,
    }


@pytest.fixture
def pacer() -> UpdatePacer:
    """Two services wait, and the rollout of the first has begun at time 0."""
    pacer = UpdatePacer()
    pacer.set_waiting(ONE, ["one"])
    pacer.set_waiting(TWO, ["two"])
    assert pacer.start_next(world(), 0) == ONE
    assert (pacer.may_roll_out(ONE), pacer.may_roll_out(TWO)) == (True, False)
    return pacer


@pytest.mark.parametrize(
    ("known", "now", "follows"),
    [
        (world(), START_SECONDS - 1, False),
        (world(), START_SECONDS, True),
        (world("new", updated=0), START_SECONDS, False),
        (world("new", phase="Degraded"), START_SECONDS, False),
        (world("new"), 1, True),
        (world("new", updated=0), LIMIT_SECONDS, True),
        (world(names=("two",)), 1, True),
    ],
    ids=["not applied", "refused", "pods are replaced", "not probed", "Ready again", "limit", "deleted"],
)
def test_next_service_follows_when_the_one_before_is_ready_again(
    pacer: UpdatePacer, known: Store, now: float, follows: bool
) -> None:
    assert pacer.start_next(known, now) == (TWO if follows else None)
    assert (pacer.may_roll_out(ONE), pacer.may_roll_out(TWO)) == (not follows, follows)


def test_service_that_was_edited_meanwhile_is_not_rolled_out(pacer: UpdatePacer) -> None:
    pacer.forget(TWO)
    assert pacer.start_next(world("new"), 1) is None
    assert not pacer.may_roll_out(ONE)


def test_new_leader_continues_no_rollout_from_its_former_term(pacer: UpdatePacer) -> None:
    pacer.restart()
    assert not pacer.may_roll_out(ONE)
    assert pacer.start_next(world(), 1) is None


def test_next_service_follows_when_all_deployments_of_the_one_before_are_changed() -> None:
    pacer = UpdatePacer()

    def known(first: str, second: str) -> Store:
        there = world()
        for name, applied in (("one-a", first), ("one-b", second), ("one-c", "new")):
            there.put(DEPLOYMENTS, deployment_of("one", name, applied))
        return there

    pacer.set_waiting(ONE, ["one-a", "one-b"])
    assert pacer.start_next(known("old", "old"), 0) == ONE
    pacer.set_waiting(ONE, ["one-b"])
    pacer.set_waiting(TWO, ["two"])
    assert pacer.start_next(known("new", "old"), START_SECONDS) is None, "the second waits for the first"
    pacer.forget(ONE)
    assert pacer.start_next(known("new", "old"), START_SECONDS + 1) is None, "it is being applied"
    assert pacer.start_next(known("new", "new"), START_SECONDS + 2) == TWO


def test_service_that_takes_too_long_goes_on_after_the_others() -> None:
    pacer = UpdatePacer()
    pacer.set_waiting(ONE, ["one"])
    pacer.set_waiting(TWO, ["two"])
    assert pacer.start_next(world(), 0) == ONE
    pacer.set_waiting(ONE, ["one"])
    assert pacer.start_next(world("new", updated=0), LIMIT_SECONDS) == TWO
    assert pacer.start_next(world("new", names=("one",)), LIMIT_SECONDS + 1) == ONE


def list_cpu(plan: Plan) -> list[str]:
    """Return the CPU that the engine of each applied Deployment requests."""
    engines = [made["spec"]["template"]["spec"]["initContainers"][0] for made in list_applied(plan, DEPLOYMENTS)]
    return [engine["resources"]["requests"]["cpu"] for engine in engines]


def node_with(cpu: str) -> tuple[Resource, Obj]:
    return NODES, {"metadata": {"name": "n", "labels": {}}, "spec": {}, "status": {"allocatable": {"cpu": cpu}}}


def test_nodes_that_come_and_go_replace_no_pod_by_another_default_of_cpu() -> None:
    there = chat_deployment(chat_service(), (MODELS, model()), node_with("16"))
    first = decide_chat(chat_service(), (MODELS, model()), node_with("16"))
    assert list_cpu(first) == ["3937m"]
    assert first.status is not None
    service, placed = chat_service(status={"serving": first.status["serving"]}), chat_pod()
    placed["spec"] = {"nodeName": "n"}
    for now in ((node_with("64"),), (node_with("4"),), ()):
        plan = decide_chat(service, (MODELS, model()), (DEPLOYMENTS, there), (PODS, placed), *now)
        (applied,) = list_applied(plan, DEPLOYMENTS)
        assert not needs_apply(DEPLOYMENTS, applied, there)


def test_edit_chooses_the_default_of_cpu_anew() -> None:
    there = chat_deployment(chat_service(), (MODELS, model()), node_with("16"))
    objects = ((MODELS, model()), (DEPLOYMENTS, there), node_with("8"), (PODS, chat_pod()))
    assert list_cpu(decide_chat(chat_service(contextLength=512), *objects)) == ["1937m"]
    assert list_cpu(decide_chat(chat_service(resources={"cpu": "6"}), *objects)) == ["6"]


def test_service_that_states_no_cpu_any_more_gets_the_default() -> None:
    there = chat_deployment(chat_service(resources={"cpu": "1"}), (MODELS, model()), node_with("16"))
    objects = ((MODELS, model()), (DEPLOYMENTS, there), node_with("16"), (PODS, chat_pod()))
    assert list_cpu(decide_chat(chat_service(), *objects)) == ["3937m"]


@pytest.mark.parametrize("resources", [{}, {"cpu": "4"}])
def test_pod_without_room_for_its_cpu_says_the_way_out(resources: Obj) -> None:
    words = "0/1 nodes are available: 1 Insufficient cpu."
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    objects = (chat_service(resources=resources), (MODELS, model()))
    there = chat_deployment(*objects, ready=0)
    plan = decide_chat(*objects, (DEPLOYMENTS, there), (PODS, chat_pod(ready=False, conditions=[refused])))
    assert planned_condition(plan, "Ready")["message"].endswith(f"{words}; state less in resources.cpu")
