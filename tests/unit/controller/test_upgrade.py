"""What another version of the controller left: nothing that runs is replaced for it, and what it lacks is looked up."""

from typing import Any

import pytest

from controller.weights import INSPECTION
from kube.client import Obj
from kube.resources import DEPLOYMENTS, METAL_HOSTS, METAL_PROCESSES, MODELS, Resource
from tests.serving import GIB, host, model, process, told
from tests.unit.controller.test_models import INSPECTED, World, inspected
from tests.unit.controller.test_services import METAL, applied, chat, decide, deployed

LAYOUT = {
    "tensorBytes": 100,
    "vocabularySize": 8,
    "embeddingSize": 8,
    "attentionSize": 8,
    "headCount": 1,
    "feedForwardSize": 8,
    "layers": [{"count": 1}],
}


def inspected_by_an_earlier_version(**spec: Any) -> World:
    """A Model with the status of a version that did not look for its layout, and whose Job is gone."""
    world = inspected(**spec)
    world.forget_inspection()
    world.jobs, world.pods = {}, {}
    return world


def test_what_an_earlier_version_did_not_look_for_is_looked_for_while_all_else_stands() -> None:
    world = inspected_by_an_earlier_version(source="hf://org/repo/tiny.gguf")
    before = world.model.status
    world.settle()
    assert world.model.status == before, "nothing that serves has to wait for it"
    (container,) = world.job("inspect")["spec"]["template"]["spec"]["containers"]
    assert container["args"][1] == 'hf://org/repo@"etag-1"/tiny.gguf', "of the weights that are served"
    world.end("inspect", 0, INSPECTED | {"layout": LAYOUT})
    world.settle()
    assert world.model.status.layout is not None
    assert world.condition("Ready").reason == "Inspected"


@pytest.mark.parametrize(
    "answer", [INSPECTED, INSPECTED | {"layout": LAYOUT, "revision": '"etag-2"'}], ids=["not told", "of other weights"]
)
def test_it_is_looked_for_once(answer: Obj) -> None:
    world = inspected_by_an_earlier_version()
    world.settle()
    world.end("inspect", 0, answer)
    world.settle()
    world.jobs, world.pods = {}, {}
    made = len(world.made)
    world.settle()
    assert (len(world.made), world.model.status.layout, world.model.status.revision) == (made, None, '"etag-1"')


def test_it_is_not_said_to_be_looked_for_once_that_has_failed_for_good() -> None:
    world = inspected_by_an_earlier_version()
    world.settle()
    world.end("inspect", 2, {"reason": "SourceNotFound", "message": "there is no such file"})
    world.settle()
    assert world.model.status.inspection == INSPECTION
    assert world.condition("Ready").status == "True", "volumes may have it still"


def test_whose_memory_is_stated_is_not_looked_at_again() -> None:
    world = inspected_by_an_earlier_version(memory_bytes=5)
    world.settle()
    assert not world.jobs


def running(spec: Obj, **changed: Any) -> tuple[Resource, Obj]:
    """A process with this spec as an earlier version of the controller named it."""
    obj = process("chat-00000000-0", host="studio-1", phase="Ready")
    return METAL_PROCESSES, obj | {"spec": spec | {"hostName": "studio-1"} | changed}


def test_a_size_that_is_looked_for_again_is_no_alarm() -> None:
    earlier = (MODELS, model(status={"layout": None, "inspection": None}))
    ((_, made),) = decide(chat(**METAL), (MODELS, model()), (METAL_HOSTS, host())).create
    plan = decide(chat(**METAL), earlier, (METAL_HOSTS, host()), running(made["spec"]))
    assert told(plan, "Ready")["reason"] == "ModelNotReady"
    assert "Model tiny is being looked at again" in told(plan, "Ready")["message"]
    assert (plan.create, plan.delete, plan.events) == ((), (), ())


def test_a_better_estimate_replaces_nothing_that_runs() -> None:
    there, mac = (MODELS, model()), (METAL_HOSTS, host())
    ((_, made),) = decide(chat(**METAL), there, mac).create
    less = made["spec"]["memoryBytes"] // 2
    # The API server fills in what a stored object of an earlier version lacks.
    plan = decide(chat(**METAL), there, mac, running(made["spec"], memoryBytes=less, mode="chat", cacheTypeK="f16"))
    assert (plan.create, plan.delete) == ((), ())
    assert plan.status is not None
    assert plan.status["readyReplicas"] == 1
    edited = decide(chat(**METAL, contextLength=8192), there, mac, running(made["spec"]))
    assert len(edited.create) == 1


def test_another_stated_memory_is_an_edit() -> None:
    there, mac = (MODELS, model(memoryBytes=2 * GIB)), (METAL_HOSTS, host())
    ((_, made),) = decide(chat(**METAL), there, mac).create
    assert decide(chat(**METAL), there, mac, running(made["spec"], memoryBytes=GIB)).create


@pytest.mark.parametrize("phase", ["Pending", "Rejected"])
def test_what_has_no_place_is_made_anew_with_the_better_estimate(phase: str) -> None:
    there, mac = (MODELS, model()), (METAL_HOSTS, host())
    ((_, made),) = decide(chat(**METAL), there, mac).create
    placed = {"hostName": "studio-1"} if phase == "Rejected" else {}
    waits = process("chat-00000000-0", phase=phase) | {"spec": made["spec"] | {"memoryBytes": 1} | placed}
    assert len(decide(chat(**METAL), there, mac, (METAL_PROCESSES, waits)).create) == 1


def requested(deployment: Obj) -> Obj:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    requests: Obj = container["resources"]["requests"]
    return requests


@pytest.mark.parametrize(
    ("spec", "weights", "keeps"),
    [
        ({}, {}, True),
        ({"replicas": 3}, {}, True),
        ({"contextLength": 8192}, {}, False),
        ({}, {"memoryBytes": 2 * GIB}, False),
        ({"resources": {"memory": "2Gi"}}, {}, False),
    ],
    ids=["upgrade", "scaled", "edited", "stated by the Model", "stated by the service"],
)
def test_pods_keep_what_they_request_until_anything_else_of_them_changes(spec: Obj, weights: Obj, keeps: bool) -> None:
    there = deployed(chat(), (MODELS, model()))
    requested(there)["memory"] = "1234567"
    (wanted,) = applied(decide(chat(**spec), (MODELS, model(**weights)), (DEPLOYMENTS, there)), DEPLOYMENTS)
    assert (requested(wanted)["memory"] == "1234567") is keeps
    assert wanted["spec"]["replicas"] == spec.get("replicas", 1)
