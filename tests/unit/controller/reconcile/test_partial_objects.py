"""A decision about the parts that the store keeps is the decision about whole objects."""

from copy import deepcopy
from typing import Any

import pytest

from controller.reconcile.indexes import declare_indexes
from controller.reconcile.partial_objects import declare_partial_objects
from controller.reconcile.plan import FIELD_MANAGER, Plan, Snapshot
from controller.reconcile.stamp import ANNOTATION_STAMP
from controller.services.reconciler import ServiceInputs, decide_service
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS, PODS
from kube.store import Store
from tests.support.api_objects import NOW, condition, model, service
from tests.support.service_decisions import KEY, chat_deployment, chat_service

BASE = (chat_service(), (MODELS, model()))


def pod() -> Obj:
    labels = {"inference.pomona.dev/service": "chat"}
    metadata = {"name": "chat-1", "namespace": "team", "uid": "p", "resourceVersion": "1", "labels": labels}
    entries = [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]
    status = {"conditions": [condition("Ready", "True")], "podIPs": [{"ip": "10.0.0.1"}]}
    return {"metadata": metadata | {"managedFields": entries}, "spec": {"containers": []}, "status": status}


def decide(deployment: Obj, *, partial: bool) -> tuple[Plan, Store]:
    known = Store()
    declare_indexes(known)
    if partial:
        declare_partial_objects(known)
    for resource, obj in (*BASE, (DEPLOYMENTS, deployment), (PODS, pod())):
        known.put(resource, deepcopy(obj))
    inputs = ServiceInputs(question=None, answer=None, new_token=None)
    return decide_service(Snapshot(known, NOW, inputs), KEY), known


def changed(deployment: Obj, *, stamped: bool, **spec: Any) -> Obj:
    found = deepcopy(deployment)
    found["spec"] |= spec
    if not stamped:
        del found["metadata"]["annotations"][ANNOTATION_STAMP]
    return found


@pytest.mark.parametrize("stamped", [True, False])
@pytest.mark.parametrize("spec", [{}, {"replicas": 3}, {"template": {"spec": {"containers": []}}}], ids=str)
def test_decision_about_parts_is_that_about_whole_objects(spec: Obj, stamped: bool) -> None:
    deployment = changed(chat_deployment(*BASE), stamped=stamped, **spec)
    whole, _ = decide(deployment, partial=False)
    part, known = decide(deployment, partial=True)
    assert part == whole
    assert "spec" not in known.list(PODS)[0]
    assert ("args" in str(known.list(DEPLOYMENTS)[0])) is (not stamped and "template" not in spec)


def test_equal_field_sets_are_kept_once() -> None:
    known = Store()
    declare_partial_objects(known)
    for name in ("one", "two"):
        obj = service(name)
        obj["metadata"]["managedFields"] = [{"manager": FIELD_MANAGER, "fieldsV1": {"f:status": {"f:phase": {}}}}]
        known.put(INFERENCE_SERVICES, obj)
    one, two = (each["metadata"]["managedFields"][0]["fieldsV1"] for each in known.list(INFERENCE_SERVICES))
    assert one == {"f:status": {"f:phase": {}}}
    assert one["f:status"] is two["f:status"]
