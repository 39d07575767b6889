"""A better estimate of the memory replaces no replica that runs; an edit does."""

from typing import Any

import pytest

from controller.reconcile.stamp import is_desired, stamp
from kube.client import Obj
from kube.resources import DEPLOYMENTS, METAL_HOSTS, METAL_PROCESSES, MODELS, Resource
from tests.support.api_objects import GIB, host, model, process
from tests.support.service_decisions import METAL, chat_deployment, chat_service, decide_chat, kept_part, list_applied


def running(spec: Obj, **changed: Any) -> tuple[Resource, Obj]:
    """Return a running process with this spec, and with another name."""
    obj = process("chat-00000000-0", host="studio-1", phase="Ready")
    return METAL_PROCESSES, obj | {"spec": spec | {"hostName": "studio-1"} | changed}


def test_better_estimate_replaces_no_running_process() -> None:
    there, mac = (MODELS, model()), (METAL_HOSTS, host())
    ((_, made),) = decide_chat(chat_service(**METAL), there, mac).create
    less = made["spec"]["memoryBytes"] // 2
    # The API server adds the defaults that are missing in an object.
    plan = decide_chat(
        chat_service(**METAL), there, mac, running(made["spec"], memoryBytes=less, mode="chat", cacheTypeK="f16")
    )
    assert (plan.create, plan.delete) == ((), ())
    assert plan.status is not None
    assert plan.status["readyReplicas"] == 1
    edited = decide_chat(chat_service(**METAL, contextLength=8192), there, mac, running(made["spec"]))
    assert len(edited.create) == 1


def test_change_of_stated_memory_is_an_edit() -> None:
    there, mac = (MODELS, model(memoryBytes=2 * GIB)), (METAL_HOSTS, host())
    ((_, made),) = decide_chat(chat_service(**METAL), there, mac).create
    assert decide_chat(chat_service(**METAL), there, mac, running(made["spec"], memoryBytes=GIB)).create


@pytest.mark.parametrize("phase", ["Pending", "Rejected"])
def test_unbound_process_is_recreated_with_the_better_estimate(phase: str) -> None:
    there, mac = (MODELS, model()), (METAL_HOSTS, host())
    ((_, made),) = decide_chat(chat_service(**METAL), there, mac).create
    placed = {"hostName": "studio-1"} if phase == "Rejected" else {}
    waits = process("chat-00000000-0", phase=phase) | {"spec": made["spec"] | {"memoryBytes": 1} | placed}
    assert len(decide_chat(chat_service(**METAL), there, mac, (METAL_PROCESSES, waits)).create) == 1


def container_of(deployment: Obj) -> Obj:
    container: Obj
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


def requested(deployment: Obj) -> Obj:
    requests: Obj = container_of(deployment)["resources"]["requests"]
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
def test_pods_keep_their_memory_request_until_something_else_changes(spec: Obj, weights: Obj, keeps: bool) -> None:
    there = chat_deployment(chat_service(), (MODELS, model()))
    requested(there)["memory"] = "1234567"
    there = kept_part(stamp(there))
    (wanted,) = list_applied(
        decide_chat(chat_service(**spec), (MODELS, model(**weights)), (DEPLOYMENTS, there)), DEPLOYMENTS
    )
    assert (requested(wanted)["memory"] == "1234567") is keeps
    if not (spec or weights):
        assert is_desired(wanted, there), "to apply it would replace all pods"
    assert wanted["spec"]["replicas"] == spec.get("replicas", 1)
