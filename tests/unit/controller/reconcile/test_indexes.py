"""The indexes find exactly what a search of all objects finds, after any sequence of changes."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from controller.reconcile.indexes import (
    ALL_BENCHMARKS,
    BENCHMARK_INDEX,
    CLAIM_INDEX,
    DIGEST_INDEX,
    GATE_INDEX,
    HOST_INDEX,
    INDEXES,
    KUEUE_INDEX,
    MODEL_INDEX,
    NAMESPACE_INDEX,
    NODE_INDEX,
    OWNER_INDEX,
    POOL_INDEX,
    REASON_INDEX,
    SERVICE_INDEX,
    SHARD_INDEX,
    SHORTAGE_INDEX,
    WAITING_INDEX,
    controller_of,
    declare_indexes,
)
from crds.meta import (
    GATEWAY_SHARDS,
    KUEUE_GATE,
    KUEUE_QUEUE_NAME,
    LABEL_SERVICE,
    LABEL_SERVICE_NAME,
    QUEUE_GATE,
    gateway_shard,
)
from fitness.performance_store import LABEL_BENCHMARK
from kube.client import Obj
from kube.resources import (
    ENDPOINT_SLICES,
    GATEWAY_KEYS,
    INFERENCE_SERVICES,
    JOBS,
    METAL_PROCESSES,
    MODEL_ROUTES,
    MODELS,
    PODS,
    Resource,
)
from kube.store import Store
from tests.support.api_objects import condition, model, process, service, slice_of

PHASES = {"one": "Pending", "two": "Running", "three": "Succeeded"}
NAMES = st.sampled_from(["one", "two", "three"])


def pod(name: str, owner: str, served: str) -> Obj:
    references = [{"uid": f"uid-{owner}", "controller": True}]
    labels = {LABEL_SERVICE: served, KUEUE_QUEUE_NAME: owner} if served != "three" else {}
    metadata = {"name": name, "namespace": "team", "ownerReferences": references, "labels": labels}
    volumes = [{"persistentVolumeClaim": {"claimName": owner}}, {"emptyDir": {}}]
    gated = [gate for gate, waits in ((QUEUE_GATE, owner == "two"), (KUEUE_GATE, name != "one")) if waits]
    gates = {"schedulingGates": [{"name": gate_name} for gate_name in ("other", *gated)]} if gated else {}
    return {"metadata": metadata, "spec": {"volumes": volumes, **gates}, "status": {"phase": PHASES[served]}}


def chat(name: str, model: str, adapter: str) -> Obj:
    reasons = {"conditions": [condition("ModelReady", "True", adapter), condition("Ready", "False", model)]}
    mode: dict[str, Any] = {"mode": "Kueue", "queueName": model} if adapter != "two" else {}
    scheduling = {**mode, "pools": [adapter]}
    spec: dict[str, Any] = {"modelRef": model, "adapters": [{"modelRef": adapter}], "scheduling": scheduling}
    spec |= {"access": {"namespaces": [adapter, "*"]}} if model != "two" else {}
    return service(name, **spec) | {"status": reasons}


def inspected(name: str, reason: str, node: str) -> Obj:
    copies = {"copies": [{"node": node}, {"node": "else"}]} if node != "three" else {"shortages": [{"node": reason}]}
    obj = model(status={"conditions": [condition("Ready", "False", reason)], **copies})
    obj["metadata"]["name"] = name
    return obj


def bound(name: str, host: str, _kind: str) -> Obj:
    return process(name, host=None if host == "three" else host)


def attempt(name: str, owner: str, label: str) -> Obj:
    labels = {LABEL_BENCHMARK: label} if label != "three" else {}
    gone = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if owner == "two" else {}
    references = [{"uid": f"uid-{owner}", "controller": True}]
    return {"metadata": {"name": name, "namespace": "team", "ownerReferences": references, "labels": labels, **gone}}


def key(name: str, digest: str, previous: str) -> Obj:
    status = {"digest": digest, "previous": [{"digest": previous}]} if digest != "three" else {}
    return {"metadata": {"name": name, "namespace": "team"}, "spec": {}, "status": status}


def route(name: str, first: str, second: str) -> Obj:
    spec = {"services": [{"name": f"team/{first}"}], "fallbacks": [{"name": second}]}
    return {"metadata": {"name": name, "namespace": "team"}, "spec": spec}


def offered(_: str, served: str, host: str) -> Obj:
    return slice_of(served, host)


KINDS: dict[Resource, Callable[[str, str, str], Obj]] = {
    PODS: pod,
    JOBS: attempt,
    INFERENCE_SERVICES: chat,
    MODELS: inspected,
    METAL_PROCESSES: bound,
    ENDPOINT_SLICES: offered,
    GATEWAY_KEYS: key,
    MODEL_ROUTES: route,
}
CHANGES = st.lists(st.tuples(st.sampled_from(list(KINDS)), NAMES, NAMES, NAMES, st.booleans()), max_size=40)


def is_benchmark(job: Obj) -> bool:
    return LABEL_BENCHMARK in job["metadata"]["labels"] and "deletionTimestamp" not in job["metadata"]


def is_of_gateway(obj: Obj, index: str, value: str) -> bool:
    """Return whether an index of what the gateway reads is to find an object."""
    if index == SHARD_INDEX:
        return value == gateway_shard(obj["metadata"]["namespace"], obj["metadata"]["name"])
    if index == NAMESPACE_INDEX:
        return value in {obj["metadata"]["namespace"], *obj["spec"].get("access", {}).get("namespaces", ())}
    if index == SERVICE_INDEX:
        spec = obj["spec"]
        services = (obj["metadata"]["name"], spec["fallbacks"][0]["name"])
        return value in {spec["services"][0]["name"], *(f"team/{name}" for name in services)}
    previous = [entry["digest"] for entry in obj["status"].get("previous", ())]
    return value in {obj["status"].get("digest"), *previous}


def search(store: Store, resource: Resource, index: str, value: str) -> list[Obj]:
    """Return what the index is for, by a look at each object."""

    def is_found(obj: Obj) -> bool:
        metadata: dict[str, Any] = obj["metadata"]
        labels, spec, namespace = metadata.get("labels", {}), obj.get("spec", {}), metadata["namespace"]
        if resource == MODEL_ROUTES or index in {NAMESPACE_INDEX, DIGEST_INDEX, SHARD_INDEX}:
            return is_of_gateway(obj, index, value)
        if index == OWNER_INDEX:
            owner = controller_of(obj)
            return owner is not None and f"{namespace}/{owner['uid']}" == value
        if index == GATE_INDEX:
            is_queued = {"name": QUEUE_GATE} in spec.get("schedulingGates", ())
            return is_queued and f"{namespace}/{labels.get(LABEL_SERVICE)}" == value
        if index == SERVICE_INDEX:
            label = LABEL_SERVICE if resource == PODS else LABEL_SERVICE_NAME
            return label in labels and f"{namespace}/{labels[label]}" == value
        if index == KUEUE_INDEX and resource == PODS:
            queue = labels.get(KUEUE_QUEUE_NAME)
            is_given = {"name": KUEUE_GATE} in spec.get("schedulingGates", ())
            return is_given and queue is not None and f"{namespace}/{queue}" == value
        if index in {KUEUE_INDEX, POOL_INDEX}:
            scheduling = spec["scheduling"]
            queues = [f"{namespace}/{scheduling['queueName']}"] if "mode" in scheduling else []
            return value in (queues if index == KUEUE_INDEX else scheduling["pools"])
        if index == MODEL_INDEX:
            named = [spec["modelRef"], *(adapter["modelRef"] for adapter in spec["adapters"])]
            return any(f"{namespace}/{name}" == value for name in named)
        if index == REASON_INDEX:
            return any(
                condition["type"] == "Ready" and condition["reason"] == value
                for condition in obj["status"]["conditions"]
            )
        if index == CLAIM_INDEX:
            (claim, _) = spec["volumes"]
            is_over = obj["status"]["phase"] == "Succeeded"
            return not is_over and f"{namespace}/{claim['persistentVolumeClaim']['claimName']}" == value
        if index in {NODE_INDEX, SHORTAGE_INDEX}:
            field = "copies" if index == NODE_INDEX else "shortages"
            return any(entry["node"] == value for entry in obj["status"].get(field, ()))
        assert index in {HOST_INDEX, WAITING_INDEX}
        host = spec.get("hostName") if resource == METAL_PROCESSES else metadata["name"].partition(".")[2]
        waits_for = f"{namespace}/{spec.get('serviceName')}" if host is None else None
        return bool((waits_for if index == WAITING_INDEX else host) == value)

    return [obj for obj in store.list(resource) if is_found(obj)]


@given(CHANGES)
def test_index_finds_what_a_full_search_finds(changes: list[tuple[Resource, str, str, str, bool]]) -> None:
    store = Store()
    declare_indexes(store)
    for version, (resource, name, first, second, goes) in enumerate(changes):
        obj = KINDS[resource](name, first, second)
        obj["metadata"] |= {"uid": f"uid-{obj['metadata']['name']}", "resourceVersion": str(version + 1)}
        if goes:
            store.remove(resource, "team", obj["metadata"]["name"])
        else:
            store.put(resource, obj)
    names = ["one", "two", "three"]
    owners = [f"team/uid-{name}" for name in (*names, "chat")]
    values = [
        "",
        "*",
        "team",
        ALL_BENCHMARKS,
        *GATEWAY_SHARDS,
        *names,
        *(f"team/{name}" for name in (*names, "chat")),
        *owners,
    ]
    for resource in KINDS:
        for index in INDEXES[resource]:
            for value in values:
                indexed = store.by_index(resource, index, value)
                if index == BENCHMARK_INDEX:
                    there = list(filter(is_benchmark, store.list(resource))) if value == ALL_BENCHMARKS else []
                else:
                    there = search(store, resource, index, value)
                assert sorted(map(str, indexed)) == sorted(map(str, there))
                assert (value in store.index_values(resource, index)) == bool(indexed)
