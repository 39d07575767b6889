"""A decision about the parts that the store keeps is the decision about whole objects."""

import json
from copy import deepcopy

import msgspec
import pytest

from controller.models import jobs
from controller.models.job_pods import NO_PODS
from controller.placement.nodes import declare_nodes
from controller.reconcile.indexes import declare_indexes, mounted_claims
from controller.reconcile.partial_objects import declare_partial_objects
from controller.reconcile.plan import FIELD_MANAGER, Plan, Snapshot
from controller.reconcile.stamp import needs_apply
from controller.services.pods.deployment import build_network_service
from controller.services.reconciler import decide_service
from controller.services.service_view import ServiceInputs
from crds.meta import ENQUEUED_AT, NOMINATED, QUEUE_GATE, RESTORE_CONTAINER, ObjectMeta
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, JOBS, MODELS, PODS
from kube.store import Store
from tests.support.api_objects import NOW, as_service, model, service
from tests.support.service_decisions import KEY, SETTINGS, chat_deployment, chat_pod, chat_service

PORT_KEY = 'k:{"port":8080,"protocol":"TCP"}'
BASE = (chat_service(), (MODELS, model()))


def pod() -> Obj:
    chat = chat_pod()
    chat["metadata"]["managedFields"] = [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]
    resources = {"limits": {"memory": "2Gi"}, "requests": {"memory": "1Gi"}}
    return chat | {"spec": {"containers": [{"name": "engine", "args": ["-m"], "resources": resources}]}}


def decide(deployment: Obj, *, partial: bool) -> tuple[Plan, Store]:
    store = Store()
    declare_indexes(store)
    declare_nodes(store, VENDORS)
    if partial:
        declare_partial_objects(store)
    for resource, obj in (*BASE, (DEPLOYMENTS, deployment), (PODS, pod())):
        store.put(resource, deepcopy(obj))
    inputs = ServiceInputs()
    return decide_service(Snapshot(store, NOW, inputs), KEY, SETTINGS), store


@pytest.mark.parametrize("ready", [0, 1])
@pytest.mark.parametrize("spec", [{}, {"replicas": 3}, {"template": {"spec": {"containers": []}}}], ids=str)
def test_decision_about_parts_is_that_about_whole_objects(spec: Obj, ready: int) -> None:
    deployment = deepcopy(chat_deployment(*BASE, ready=ready))
    deployment["spec"] |= spec
    whole, _ = decide(deployment, partial=False)
    part, store = decide(deployment, partial=True)
    assert part == whole
    assert store.list(PODS)[0]["spec"] == {"containers": [{"resources": {"requests": {"memory": "1Gi"}}}]}
    assert "--engine-port" not in str(store.list(DEPLOYMENTS)[0])


def test_part_of_a_pod_has_what_the_queue_reads() -> None:
    whole = pod()
    gpu = {"requests": {"nvidia.com/gpu": "1"}}
    read = {
        "schedulingGates": [{"name": QUEUE_GATE}],
        "overhead": {"memory": "64Mi"},
        "priorityClassName": "pomona-high-queue",
        "resources": {"requests": {"memory": "8Gi"}},
        "initContainers": [{"restartPolicy": "Always", "resources": gpu}],
    }
    time = "2026-11-21T11:00:00Z"
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": time}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": time}
    annotations = {ENQUEUED_AT: time, NOMINATED: "{}"}
    whole["metadata"]["annotations"] = {**annotations, "cni.example/addresses": "{}"}
    whole["spec"] |= deepcopy(read)
    whole["spec"]["resources"]["limits"] = {"memory": "8Gi"}
    whole["spec"]["initContainers"][0] |= {"name": "proxy", "image": "proxy:1"}
    whole["status"]["conditions"] = [scheduled, {**ready, "lastProbeTime": None}]
    store = Store()
    declare_partial_objects(store)
    store.put(PODS, whole)
    (kept,) = store.list(PODS)
    assert kept["metadata"]["annotations"] == annotations
    assert {name: value for name, value in kept["spec"].items() if name in read} == read
    assert kept["status"]["conditions"] == [scheduled, ready]


@pytest.mark.parametrize(
    ("state", "is_kept"),
    [({"running": {}}, False), ({"terminated": {"exitCode": 0}}, False), ({"waiting": {"reason": "x"}}, True)],
)
def test_container_before_the_engine_is_no_part_of_a_pod_unless_it_cannot_start(state: Obj, is_kept: bool) -> None:
    whole = pod()
    engine = {"name": "engine", "state": {"terminated": {"exitCode": 0}}}
    whole["status"]["initContainerStatuses"] = [{"name": RESTORE_CONTAINER, "state": state}, engine]
    whole["status"]["containerStatuses"] = [{"name": "proxy", "state": {"terminated": {"exitCode": 0}}}]
    store = Store()
    declare_partial_objects(store)
    store.put(PODS, whole)
    names = [container["name"] for container in store.list(PODS)[0]["status"]["containerStatuses"]]
    assert names == [*([RESTORE_CONTAINER] if is_kept else []), "engine", "proxy"]


def test_part_of_an_applied_service_needs_no_apply() -> None:
    resource, wanted = build_network_service(as_service(service("chat")))
    fields: Obj = {"f:spec": {"f:selector": {}, "f:ports": {PORT_KEY: {".": {}, "f:name": {}, "f:port": {}}}}}
    entry = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": fields}
    store = Store()
    declare_partial_objects(store)
    there = deepcopy(wanted)
    there["metadata"] |= {"uid": "s", "resourceVersion": "1", "managedFields": [entry]}
    there["spec"] |= {"clusterIP": "10.96.0.7", "sessionAffinity": "None"}
    store.put(resource, there | {"status": {"loadBalancer": {}}})
    (kept,) = store.list(resource)
    assert not needs_apply(resource, wanted, kept)
    assert "clusterIP" not in kept["spec"]
    assert needs_apply(resource, {**wanted, "spec": {**wanted["spec"], "selector": {"another": "one"}}}, kept)


def test_equal_entries_of_managed_fields_are_kept_once() -> None:
    store = Store()
    declare_partial_objects(store)
    fields: Obj = {"operation": "Apply", "fieldsV1": {"f:status": {"f:phase": {}}}}
    for name, time in (("one", "2026-11-21T11:00:00Z"), ("two", "2026-11-21T12:00:00Z")):
        obj = service(name)
        obj["metadata"]["managedFields"] = [
            {"manager": FIELD_MANAGER, **deepcopy(fields), "time": time},
            {"manager": "kubectl", **deepcopy(fields), "time": time},
        ]
        store.put(INFERENCE_SERVICES, obj)
    one, two = (inference_service["metadata"]["managedFields"] for inference_service in store.list(INFERENCE_SERVICES))
    assert one == [{"manager": FIELD_MANAGER, **fields}]
    assert one[0] is two[0]


def test_equal_strings_and_keys_are_kept_once() -> None:
    store = Store()
    declare_partial_objects(store)
    for name in ("one", "two"):
        text = json.dumps(service(name))  # kopf decodes like this: each object has keys of its own
        store.put(INFERENCE_SERVICES, json.loads(text))
    one, two = store.list(INFERENCE_SERVICES)
    assert all(key is other for key, other in zip(one["metadata"], two["metadata"], strict=True))
    assert one["metadata"]["namespace"] is two["metadata"]["namespace"]


def test_a_copy_of_a_service_that_kubectl_put_into_it_is_not_kept() -> None:
    store = Store()
    declare_partial_objects(store)
    obj = service("one")
    copies = {"kubectl.kubernetes.io/last-applied-configuration": "{}"}
    obj["metadata"]["annotations"] = {**copies, "inference.pomona.dev/rotate-token": "1"}
    store.put(INFERENCE_SERVICES, obj)
    assert store.list(INFERENCE_SERVICES)[0]["metadata"]["annotations"] == {"inference.pomona.dev/rotate-token": "1"}


@pytest.mark.parametrize("stated", [(), ("registry",)])
def test_part_of_a_job_tells_whether_it_lacks_a_pull_secret(stated: tuple[str, ...]) -> None:
    metadata = ObjectMeta(name="tiny", namespace="team", uid="uid-tiny")
    work = jobs.Work(owner=metadata, verb="inspect", identity=("x",), arguments=(), image="pomona:test")
    created = jobs.build_job(msgspec.structs.replace(work, image_pull_secrets=stated), 0)
    created["metadata"] |= {"uid": "j", "resourceVersion": "1", "creationTimestamp": NOW.isoformat()}
    store = Store()
    declare_partial_objects(store)
    store.put(JOBS, created)
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "401 Unauthorized"}}
    refused = {"metadata": {"creationTimestamp": ""}, "status": {"containerStatuses": [{"state": waiting}]}}
    wanted = msgspec.structs.replace(work, image_pull_secrets=("registry",))
    outcome = wanted.read_attempt(store.list(JOBS)[0], [refused], NOW)
    assert outcome.state == ("Going" if stated else "Broken")


def test_outcome_of_a_part_of_a_job_is_that_of_the_whole_job() -> None:
    metadata = ObjectMeta(name="tiny", namespace="team", uid="uid-tiny")
    elsewhere: Obj = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}] * 64}}
    }
    work = jobs.Work(
        owner=metadata,
        verb="fetch",
        identity=("x",),
        arguments=("fetch", "http://models.example/tiny.gguf"),
        image="pomona:test",
        claim="tiny-cache-1",
        reservation=jobs.Reservation(affinity=elsewhere),
    )
    created = jobs.build_job(work, 0)
    ended = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "took too long"}
    ended["lastTransitionTime"] = NOW.isoformat()
    created["metadata"] |= {"uid": "j", "resourceVersion": "1"}
    whole = created | {"status": {"conditions": [ended], "failed": 1}}
    store = Store()
    declare_partial_objects(store)
    store.put(JOBS, deepcopy(whole))
    (part,) = store.list(JOBS)
    assert jobs.proceed(work, [part], NO_PODS, NOW) == jobs.proceed(work, [whole], NO_PODS, NOW)
    assert (jobs.read_verb(part), jobs.name_last_job(work, [part])) == ("fetch", created["metadata"]["name"])
    assert mounted_claims(part["spec"]["template"]["spec"]) == ["tiny-cache-1"]
    assert len(str(part)) < len(str(whole)) / 2
