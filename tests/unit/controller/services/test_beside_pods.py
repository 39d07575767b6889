"""Objects beside the pods of a service: they come and go with the pods, and select no others."""

import re
from typing import Any

import msgspec
import pytest

from controller.pod_settings import DEFAULT_SETTINGS, PodSettings
from controller.reconcile.plan import FIELD_MANAGER
from controller.reconcile.stamp import needs_apply
from controller.services.pods.beside_pods import build_pod_monitor, parse_monitor_labels
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE
from gateway.proxy.exposition import MOST_LINES
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.metrics import render_metrics
from gateway.proxy.paths import INFERENCE
from gateway.proxy.service import Service
from kube.client import Obj
from kube.resources import (
    DEPLOYMENTS,
    METAL_HOSTS,
    MODELS,
    NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS,
    POD_MONITORS,
    Resource,
)
from tests.support.api_objects import host, library_model, model, store
from tests.support.service_decisions import METAL, chat_deployment, chat_service, decide_chat, list_applied
from tests.unit.gateway.proxy.running_proxy import make_service

OWN = {"matchLabels": {LABEL_SERVICE: "chat"}}
GUARDED = PodSettings("pomona:test", network_policies=True)
BESIDE = (POD_DISRUPTION_BUDGETS, NETWORK_POLICIES, POD_MONITORS)
ON_SEVERAL_NODES = {"accessMode": "ReadWriteMany"}


def made(
    kind: Resource,
    settings: PodSettings = GUARDED,
    *,
    is_monitored: bool = True,
    on_several_nodes: bool = False,
    **spec: Any,
) -> Obj | None:
    tiny = model(cache=ON_SEVERAL_NODES) if on_several_nodes else model()
    objects = (chat_service(**spec), (MODELS, tiny), (METAL_HOSTS, host()))
    applied = list_applied(decide_chat(*objects, settings=settings, is_monitored=is_monitored), kind)
    return applied[0] if applied else None


@pytest.mark.parametrize(("replicas", "has_one"), [(1, False), (2, True), (5, True)])
def test_drain_evicts_one_of_several_pods_at_a_time(replicas: int, has_one: bool) -> None:
    budget = made(POD_DISRUPTION_BUDGETS, on_several_nodes=True, replicas=replicas)
    assert (budget is not None) is has_one
    if budget is not None:
        assert (budget["spec"]["maxUnavailable"], budget["spec"]["selector"]) == (1, OWN)


def test_drain_evicts_all_pods_that_share_one_node() -> None:
    """With a budget it would wait for ever: no pod starts elsewhere while another one has the volume."""
    assert made(POD_DISRUPTION_BUDGETS, replicas=2) is None


def test_policy_is_an_option() -> None:
    policy = made(NETWORK_POLICIES)
    assert policy is not None
    assert policy["spec"]["podSelector"] == OWN
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert made(NETWORK_POLICIES, DEFAULT_SETTINGS) is None


def test_clients_by_label_controller_and_monitoring_may_send_requests() -> None:
    policy = made(NETWORK_POLICIES, PodSettings(network_policies=True, monitoring_namespace="metrics"))
    assert policy is not None
    namespaces = [{"matchLabels": {"kubernetes.io/metadata.name": name}} for name in ("pomona-system", "metrics")]
    assert policy["spec"]["ingress"] == [
        {
            "from": [
                {"namespaceSelector": {}, "podSelector": {"matchLabels": {"inference.pomona.dev/client": "true"}}},
                *({"namespaceSelector": namespace} for namespace in namespaces),
            ],
            "ports": [{"port": 8080, "protocol": "TCP"}],
        }
    ]


def made_egress(of_model: Obj) -> list[Obj]:
    """Return what the engine of `chat` may reach, with this Model."""
    plan = decide_chat(chat_service(), (MODELS, of_model), settings=GUARDED)
    (policy,) = list_applied(plan, NETWORK_POLICIES)
    rules: list[Obj] = policy["spec"]["egress"]
    return rules


NAME_SERVERS = {
    "to": [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}},
        {"ipBlock": {"cidr": "169.254.20.10/32"}},
    ],
    "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}],
}


def test_engine_reaches_no_address_but_dns() -> None:
    assert made_egress(model()) == [NAME_SERVERS]


def test_engine_that_pulls_reaches_registries_but_no_link_local_address() -> None:
    """A cloud serves the credentials of a node at such an address."""
    names, registries = made_egress(library_model())
    assert names == NAME_SERVERS
    assert registries == {
        "to": [
            {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}},
            {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10"]}},
        ],
        "ports": [{"port": 443, "protocol": "TCP"}],
    }


def test_monitor_carries_the_key_of_its_service() -> None:
    monitor = made(POD_MONITORS)
    assert monitor is not None
    assert monitor["spec"]["selector"] == OWN
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert endpoint["authorization"]["credentials"] == {"name": "chat-token", "key": "token"}
    assert endpoint["relabelings"][0]["targetLabel"] == "inference_service"
    assert made(POD_MONITORS, is_monitored=False) is None


MANAGED: Obj = {LABEL_MANAGED_BY: "pomona"}


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({}, {"release": "prometheus"}, True),
        ({"release": "prometheus"}, {"release": "prometheus"}, False),
        ({"release": "prometheus"}, {"release": "other"}, True),
        ({"release": "prometheus", "team": "a"}, {"release": "prometheus"}, True),
        ({"release": "prometheus"}, {}, True),
    ],
)
def test_monitor_that_exists_gets_the_labels_of_the_option(before: Obj, after: Obj, changes: bool) -> None:
    earlier = made(POD_MONITORS, PodSettings(monitor_labels=before))
    desired = made(POD_MONITORS, PodSettings(monitor_labels=after))
    assert earlier is not None
    assert desired is not None
    assert desired["metadata"]["labels"] == MANAGED | after
    owned: Obj = {
        "f:metadata": {"f:labels": {f"f:{name}": {} for name in MANAGED | before}, "f:ownerReferences": {}},
        "f:spec": {f"f:{name}": {} for name in earlier["spec"]},
    }
    entry = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": owned}
    metadata = earlier["metadata"] | {"uid": "uid-monitor", "resourceVersion": "1", "managedFields": [entry]}
    (kept,) = store((POD_MONITORS, earlier | {"metadata": metadata})).list(POD_MONITORS)
    assert needs_apply(POD_MONITORS, desired, kept) is changes


def test_labels_of_monitors_are_those_of_no_other_object() -> None:
    labelled = PodSettings("pomona:test", network_policies=True, monitor_labels={"release": "prometheus"})
    objects = (chat_service(replicas=2), (MODELS, model()))
    plan = decide_chat(*objects, settings=labelled, is_monitored=True)
    assert [resource for resource, obj in plan.apply if "release" in str(obj)] == [POD_MONITORS]


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        ([], {}),
        (["release=prometheus"], {"release": "prometheus"}),
        (["monitoring.example/Team_a.b=A-1.c_d", "empty="], {"monitoring.example/Team_a.b": "A-1.c_d", "empty": ""}),
        (["release=prometheus", "release=prometheus"], {"release": "prometheus"}),
        ([f"{'a' * 63}={'b' * 63}"], {"a" * 63: "b" * 63}),
    ],
    ids=str,
)
def test_valid_labels_of_monitors_are_read(texts: list[str], labels: dict[str, str]) -> None:
    assert parse_monitor_labels(texts) == labels


@pytest.mark.parametrize(
    "text",
    [
        *("release", "=prometheus", "a/=b", "/a=b", "a/b/c=d", "-a=b", "a-=b", "A.example/a=b", "a..b/c=d", "ä=b"),
        *("a=b=c", "a= b", "a=-b", "a=b-", "a=b/c", "a=ä", "a=b\n", "a\n=b", "", "a b=c"),
        *(f"{'a' * 64}=b", f"a={'b' * 64}", f"{'a' * 254}/b=c"),
    ],
)
def test_invalid_label_of_monitors_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"give one such as release=prometheus") as caught:
        parse_monitor_labels([text])
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("key", [LABEL_MANAGED_BY, LABEL_SERVICE, "inference.pomona.dev/other"])
def test_label_of_pomona_is_refused_for_monitors(key: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}=a' has a key that only Pomona sets: choose another key"):
        parse_monitor_labels([f"{key}=a"])


def test_two_values_of_one_label_are_refused() -> None:
    with pytest.raises(ValueError, match="'release=b' states release a second time, after 'a': keep one of them"):
        parse_monitor_labels(["release=a", "release=b"])


def test_proxy_is_scraped_in_front_of_an_engine_that_checks_no_key() -> None:
    stated: Obj = {"image": "registry.example/engine:1", "container": {}, "resources": {"memory": "1Gi"}}
    monitor = made(POD_MONITORS, runtime="generic", **stated)
    assert monitor is not None
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["path"], endpoint["authorization"]["credentials"]["name"]) == ("/metrics", "chat-token")


@pytest.mark.parametrize(
    ("runtime", "kept", "dropped"),
    [
        ("llama.cpp", "llamacpp:requests_processing", "vllm:num_requests_running"),
        ("vllm", "vllm:num_requests_running", "llamacpp:requests_processing"),
        ("generic", "pomona_proxy_queued", "vllm:num_requests_running"),
    ],
)
def test_pod_may_send_series_of_its_engine_only(runtime: str, kept: str, dropped: str) -> None:
    ((_, monitor),) = build_pod_monitor(msgspec.convert(chat_service()[1], InferenceService), runtime, {}, exists=True)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (rule,) = endpoint["metricRelabelings"]
    assert (rule["action"], rule["sourceLabels"]) == ("keep", ["__name__"])
    assert re.fullmatch(rule["regex"], kept)
    for name in (dropped, "pomona_queue_depth", "leader_election_master_status", "ALERTS", f"x{kept}"):
        assert not re.fullmatch(rule["regex"], name)
    assert endpoint.get("honorLabels", False) is False
    assert endpoint["honorTimestamps"] is False


def test_every_series_of_the_proxy_is_kept() -> None:
    service = Service(make_service(name="ns/chat"), InFlight(lambda _: None))
    monitor = made(POD_MONITORS, runtime="generic", image="a.example/b:1", resources={"memory": "1Gi"}, container={})
    assert monitor is not None
    regex = monitor["spec"]["podMetricsEndpoints"][0]["metricRelabelings"][0]["regex"]
    names = {
        re.split(r"[ {]", line)[0]
        for line in render_metrics({"ns/chat": service}).decode().splitlines()
        if not line.startswith("#")
    }
    assert names
    assert {name for name in names if not re.fullmatch(regex, name)} == set()


@pytest.mark.parametrize("runtime", ["llama.cpp", "generic"])
def test_pod_may_send_no_more_series_than_proxy_and_engine_have(runtime: str) -> None:
    stated: Obj = {"image": "registry.example/engine:1", "resources": {"memory": "1Gi"}}
    of_generic: Obj = {"container": {}} if runtime == "generic" else {}
    monitor = made(POD_MONITORS, runtime=runtime, **(stated | of_generic))
    assert monitor is not None
    service = Service(make_service(name="ns/chat"), InFlight(lambda _: None))
    for route in {*INFERENCE.values(), "models", "other"}:
        for status in range(200, 220):
            service.metrics.requests[route, status] += 1
    service.metrics.errors["engine_error"] += 1
    lines = [line for line in render_metrics({"ns/chat": service}).splitlines() if not line.startswith(b"#")]
    assert MOST_LINES + len(lines) < monitor["spec"]["sampleLimit"] <= MOST_LINES + 1000


@pytest.mark.parametrize("spec", [METAL, {"suspend": True}, {"replicas": 0}], ids=["on a host", "suspended", "none"])
def test_service_without_pods_has_none(spec: Obj) -> None:
    wanted: Obj = {"replicas": 2} | spec
    assert [kind for kind in BESIDE if made(kind, **wanted) is not None] == []


def test_policy_goes_with_its_option_even_if_no_pod_is_ready() -> None:
    """It may be the reason why none is."""
    policy = made(NETWORK_POLICIES)
    assert policy is not None
    there = policy | {"metadata": policy["metadata"] | {"uid": "uid-policy", "resourceVersion": "1"}}
    deployed = chat_deployment(chat_service(), (MODELS, model()), ready=0)
    objects = (chat_service(), (MODELS, model()), (DEPLOYMENTS, deployed), (NETWORK_POLICIES, there))
    assert [ref.resource for ref in decide_chat(*objects, settings=DEFAULT_SETTINGS).delete] == [NETWORK_POLICIES]
    assert decide_chat(*objects, settings=GUARDED).delete == ()


def test_all_go_with_the_last_pod_and_stay_while_a_model_is_fetched() -> None:
    tiny = model(cache=ON_SEVERAL_NODES)
    objects = [(MODELS, tiny), (DEPLOYMENTS, chat_deployment(chat_service(replicas=2), (MODELS, tiny)))]
    for kind in BESIDE:
        there = made(kind, on_several_nodes=True, replicas=2)
        assert there is not None
        metadata = there["metadata"] | {"uid": f"uid-{kind}", "resourceVersion": "1"}
        objects.append((kind, there | {"metadata": metadata}))
    suspended = decide_chat(chat_service(replicas=2, suspend=True), *objects, settings=GUARDED, is_monitored=True)
    assert {ref.resource for ref in suspended.delete} == {DEPLOYMENTS, *BESIDE}
    fetching = [(MODELS, model(cached=False, cache=ON_SEVERAL_NODES)), *objects[1:]]
    waits = decide_chat(chat_service(replicas=2), *fetching, settings=GUARDED, is_monitored=True)
    assert waits.delete == ()
