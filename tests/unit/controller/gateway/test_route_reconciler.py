"""The status of a ModelRoute: it leads where it says, or some of it has no effect; it tells nothing of others."""

from typing import Any

import pytest

from controller.gateway.route_reconciler import (
    decide_route,
    list_routes_of_key,
    list_routes_of_service,
    route_reconciler,
)
from controller.reconcile.plan import Plan, Snapshot
from crds.meta import API_VERSION
from kube.client import Obj
from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, MODEL_ROUTES, ObjectKey
from kube.store import Store
from tests.support.api_objects import NAMESPACE, NOW, service, store
from tests.unit.controller.gateway.key_objects import gateway_key

R = ObjectKey(NAMESPACE, "r")


def route(*services: str, name: str = "r", namespace: str = NAMESPACE, fallbacks: tuple[str, ...] = ()) -> Obj:
    return {
        "apiVersion": API_VERSION,
        "kind": "ModelRoute",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "generation": 3,
            "resourceVersion": "1",
        },
        "spec": {
            "services": [{"name": service} for service in services],
            "fallbacks": [{"name": fallback} for fallback in fallbacks],
        },
    }


def foreign(name: str, *admitted: str) -> Obj:
    obj = service(name, access={"namespaces": list(admitted)})
    obj["metadata"]["namespace"] = "elsewhere"
    return obj


def world(the_route: Obj, *services: Obj, key: Obj | None = None) -> Store:
    keys = (key or gateway_key(),)
    objects: list[Any] = [(MODEL_ROUTES, the_route), *((INFERENCE_SERVICES, obj) for obj in services)]
    return store(*objects, *((GATEWAY_KEYS, obj) for obj in keys))


def decide(cluster: Store, *, has_gateway: bool = True) -> Plan:
    return decide_route(Snapshot(cluster, NOW), R, has_gateway=has_gateway)


def ready_of(plan: Plan) -> Obj:
    assert plan.status is not None
    (condition,) = plan.status["conditions"]
    assert plan.status["observedGeneration"] == condition["observedGeneration"] == 3
    assert (condition["type"], condition["status"] == "True") == (
        "Ready",
        condition["reason"] in {"Valid", "HidesService"},
    )
    return dict(condition)


def judge(the_route: Obj, *services: Obj, key: Obj | None = None) -> tuple[str, str]:
    ready = ready_of(decide(world(the_route, *services, key=key)))
    return ready["reason"], ready["message"]


def test_route_is_valid_while_it_leads_where_it_says() -> None:
    reason, message = judge(
        route("chat", "elsewhere/open", fallbacks=("elsewhere/public",)),
        service("chat"),
        foreign("open", NAMESPACE),
        foreign("public", "*"),
    )
    assert (reason, message) == ("Valid", f"clients with GatewayKeys of namespace {NAMESPACE} ask for model r")


def test_services_without_effect_are_named() -> None:
    reason, message = judge(
        route("chat", "gone", fallbacks=("elsewhere/closed", "chat")), service("chat"), foreign("closed")
    )
    assert reason == "NoService"
    assert message == (
        "InferenceService gone does not exist; elsewhere/closed does not exist, or its spec.access does not admit "
        f"namespace {NAMESPACE}: requests go to the other services alone"
    )
    assert judge(route("gone"))[1].endswith("the route leads nowhere")


def test_message_tells_nothing_of_other_namespaces() -> None:
    there = judge(route("elsewhere/secret"), foreign("secret", "team-x"))
    assert there == judge(route("elsewhere/secret"))


def test_route_says_that_it_hides_a_service() -> None:
    reason, message = judge(route("chat", name="r"), service("chat"), service("r"))
    assert reason == "HidesService"
    assert f"InferenceService r only as {NAMESPACE}/r" in message


def test_route_that_hides_a_service_says_that_no_request_leaves_the_namespace() -> None:
    reason, message = judge(route("chat", "elsewhere/open"), service("chat"), service("r"), foreign("open", "*"))
    assert reason == "NoService"
    assert message.startswith("elsewhere/open gets no request, because the route has the name of InferenceService r")


@pytest.mark.parametrize("key", [gateway_key(services=["other"]), gateway_key(namespace="elsewhere")])
def test_route_that_no_key_opens_says_so(key: Obj) -> None:
    reason, message = judge(route("chat"), service("chat"), key=key)
    assert (reason, f"no GatewayKey of namespace {NAMESPACE} opens a service of the route" in message) == (
        "NoKey",
        True,
    )
    assert (
        judge(route("chat", "other"), service("chat"), service("other"), key=gateway_key(services=["oth*"]))[0]
        == "Valid"
    )


def test_route_without_a_gateway_says_so() -> None:
    cluster = world(route("chat"), service("chat"))
    assert ready_of(decide(cluster, has_gateway=False))["reason"] == "NoGateway"


def test_route_that_is_gone_or_being_deleted_is_left_alone() -> None:
    deleted = route("chat")
    deleted["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:00Z"
    assert decide(world(deleted)) == Plan()
    assert decide(store()) == Plan()


def test_changes_of_what_it_reads_enqueue_a_route() -> None:
    cluster = world(route("chat", "elsewhere/open", fallbacks=("last",)))
    cluster.put(MODEL_ROUTES, route("chat", name="second"))
    cluster.put(MODEL_ROUTES, route("chat", namespace="elsewhere"))
    second = ObjectKey(NAMESPACE, "second")
    for named, routes in (
        (service("chat"), [R, second]),
        (service("last"), [R]),
        (service("r"), [R]),
        (service("other"), []),
        (foreign("open"), [R]),
        (foreign("chat"), [ObjectKey("elsewhere", "r")]),
    ):
        assert sorted(list_routes_of_service(cluster, named)) == sorted(routes)
    assert sorted(list_routes_of_key(cluster, gateway_key())) == [R, second]

    of_service, of_key = route_reconciler(has_gateway=True).triggers
    chat = service("chat")
    assert of_service.concerns(None, chat)
    assert of_service.concerns(chat, None)
    assert of_service.concerns(chat, service("chat", access={"namespaces": ["elsewhere"]}))
    assert not of_service.concerns(chat, chat | {"status": {"phase": "Ready"}})
    assert of_key.concerns(None, gateway_key())
    assert of_key.concerns(gateway_key(), gateway_key(services=["chat"]))
    assert not of_key.concerns(gateway_key(), gateway_key(status={"digest": "d"}))


def test_events_report_problems_and_no_ordinary_progress() -> None:
    assert [event.reason for event in decide(world(route("gone"))).events] == ["NoService"]
    assert not decide(world(route("chat"), service("chat"))).events
    (event,) = decide(world(route("chat"), service("chat"), service("r"))).events
    assert (event.type, event.reason) == ("Normal", "HidesService")
