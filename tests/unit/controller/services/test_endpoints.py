"""The endpoints of an InferenceService: the ready and the probed, the proof of an answer, and http or https."""

import msgspec

from controller.reconcile.plan import Plan, Snapshot
from controller.services.endpoints import Endpoint, list_ready_endpoints
from controller.services.service_view import build_view
from kube.client import Obj
from kube.resources import DEPLOYMENTS, ENDPOINT_SLICES, INFERENCE_SERVICES, METAL_HOSTS, MODELS, PODS, Resource
from runtimes.probe import ProbeResult
from tests.support.api_objects import (
    ADDRESS,
    NOW,
    as_service,
    host,
    model,
    planned_condition,
    service,
    slice_of,
    store,
)
from tests.support.service_decisions import (
    KEY,
    METAL,
    OK,
    SERVING,
    SETTINGS,
    bound_process,
    chat_deployment,
    chat_pod,
    chat_service,
    decide_chat,
    read_chat,
    ready_outcome,
)


def test_only_addresses_of_replicas_are_probed() -> None:
    base = (chat_service(), (MODELS, model()))
    there = (*base, (DEPLOYMENTS, chat_deployment(*base)), (PODS, chat_pod()))
    thief = (ENDPOINT_SLICES, slice_of("chat", "thief", "10.6.6.6"))
    plan = decide_chat(*there, thief)
    assert ready_outcome(plan) == ("Progressing", "False", "ForeignEndpoints")
    assert "10.6.6.6" in planned_condition(plan, "Ready")["message"]
    assert plan.events == ()
    assert asked(*there, thief, (ENDPOINT_SLICES, slice_of("chat", "x"))) == [ADDRESS]


def test_only_hosts_with_a_process_of_the_service_are_probed() -> None:
    metal = (chat_service(**METAL), (MODELS, model()), (METAL_HOSTS, host()))
    other = (METAL_HOSTS, host("studio-2", address="10.77.0.200"))
    slices = (
        (ENDPOINT_SLICES, slice_of("chat", "studio-1")),
        (ENDPOINT_SLICES, slice_of("chat", "studio-2", "10.77.0.200")),
    )
    assert asked(*metal, other, bound_process(), *slices) == [ADDRESS]
    assert asked(*metal, other, *slices) == []


def asked(*objects: tuple[Resource, Obj]) -> list[str]:
    """Return the addresses that are sent the token."""
    snapshot = Snapshot(store(*objects), NOW)
    question = build_view(snapshot, KEY, read_chat(snapshot), SETTINGS).question
    return [endpoint.address for endpoint in question.endpoints] if question else []


def test_service_keeps_the_proof_of_its_last_answer() -> None:
    base = (chat_service(), (MODELS, model()))
    there = ((DEPLOYMENTS, chat_deployment(*base)), (PODS, chat_pod()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    first = decide_chat(*base, *there, answer=OK)
    assert first.status is not None
    proven = (INFERENCE_SERVICES, service(status=first.status | {"conditions": with_time(first)}))
    view = build_view(Snapshot(store(proven, base[1], *there), NOW), KEY, as_service(proven[1]), SETTINGS)
    assert view.proof == OK
    again = decide_chat(proven, base[1], *there, answer=view.proof)
    assert again.status == first.status, "a new leader writes nothing"
    moved = (*there[:2], (ENDPOINT_SLICES, slice_of("chat", "y")))
    waits = decide_chat(proven, base[1], *moved)
    assert waits.status is not None
    assert waits.status["proof"] == first.status["proof"], "it is Ready by the earlier answer"
    failed = decide_chat(proven, base[1], *there, answer=ProbeResult(ok=False, reason="Unauthorized", message="401"))
    assert failed.status is not None
    assert "proof" not in failed.status


def test_proof_names_the_endpoint_that_answered_whatever_the_status_says_meanwhile() -> None:
    base = (chat_service(mode="embeddings"), (MODELS, model()))
    there = ((DEPLOYMENTS, chat_deployment(*base)), (PODS, chat_pod()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    embedded = ProbeResult(ok=True, reason="Embedded", message="http://10.77.0.100:18000 embedded a text")
    first = decide_chat(*base, *there, answer=embedded)
    proven = served(first, mode="embeddings")
    blocked = decide_chat(proven, *there)
    assert planned_condition(blocked, "Ready")["message"].startswith("still serving; "), "its Model is gone"
    chat = served(blocked, mode="embeddings")
    view = build_view(Snapshot(store(chat, base[1], *there), NOW), KEY, as_service(chat[1]), SETTINGS)
    assert view.proof == embedded
    assert decide_chat(chat, base[1], *there, answer=view.proof).status == first.status


def test_proof_of_several_endpoints_names_one_only_if_it_has_answered() -> None:
    base = (chat_service(), (MODELS, model()))
    pods = [(PODS, chat_pod("chat-1")), (PODS, chat_pod("chat-2", podIPs=[{"ip": "10.77.0.101"}]))]
    slices = [(ENDPOINT_SLICES, slice_of("chat", *endpoint)) for endpoint in (("x", ADDRESS), ("y", "10.77.0.101"))]
    there = ((DEPLOYMENTS, chat_deployment(*base)), *pods, *slices)
    noted = f"{OK.message}; http://10.77.0.101:18000 answered 500: out of memory; restart"
    beside = msgspec.structs.replace(OK, message=noted)
    proven = served(decide_chat(*base, *there, answer=beside))
    view = build_view(Snapshot(store(proven, base[1], *there), NOW), KEY, as_service(proven[1]), SETTINGS)
    assert view.proof == OK
    chat = served(decide_chat(proven, *there))
    again = build_view(Snapshot(store(chat, base[1], *there), NOW), KEY, as_service(chat[1]), SETTINGS)
    assert again.proof == msgspec.structs.replace(OK, message="an endpoint generated a token")


def served(plan: Plan, **spec: str) -> tuple[Resource, Obj]:
    """Return the service with the status of this plan."""
    assert plan.status is not None
    return chat_service(status=plan.status | {"conditions": with_time(plan)}, **spec)


def with_time(plan: Plan) -> list[Obj]:
    assert plan.status is not None
    return [condition | {"lastTransitionTime": "2026-11-21T11:00:00Z"} for condition in plan.status["conditions"]]


def test_service_stays_ready_while_another_endpoint_is_probed() -> None:
    base = (chat_service(status=SERVING), (MODELS, model()))
    there = ((DEPLOYMENTS, chat_deployment(*base)), (PODS, chat_pod()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    assert ready_outcome(decide_chat(*base, *there)) == ("Ready", "True", "Serving")


def with_certificate(name: str) -> Obj:
    secured = slice_of("chat", name)
    return secured | {"ports": [port | {"appProtocol": "https"} for port in secured["ports"]]}


def test_endpoint_is_https_if_all_hosts_serve_it_and_after_they_are_gone() -> None:
    base = (chat_service(), (MODELS, model()))
    there = (*base, (DEPLOYMENTS, chat_deployment(*base)), (PODS, chat_pod()))
    first, second = ((ENDPOINT_SLICES, with_certificate(name)) for name in ("x", "y"))
    plan = decide_chat(*there, first, second, answer=OK)
    assert plan.status is not None
    assert plan.status["endpoint"] == "https://chat.team.svc:8080/v1"
    alone = decide_chat(chat_service(status={"endpoint": plan.status["endpoint"]}), (MODELS, model()))
    assert alone.status is not None
    assert alone.status["endpoint"] == "https://chat.team.svc:8080/v1"


def test_mixture_of_http_and_https_endpoints_is_reported() -> None:
    base = (chat_service(), (MODELS, model()))
    mixed = ((ENDPOINT_SLICES, with_certificate("x")), (ENDPOINT_SLICES, slice_of("chat", "y")))
    plan = decide_chat(*base, (DEPLOYMENTS, chat_deployment(*base)), (PODS, chat_pod()), *mixed, answer=OK)
    assert ready_outcome(plan) == ("Degraded", "True", "Serving")
    assert "some http: start the agent of y with --tls-certificate too" in planned_condition(plan, "Ready")["message"]
    assert plan.status is not None
    assert plan.status["endpoint"].startswith("http://")


def test_endpoints_are_the_ready_addresses_of_the_named_port() -> None:
    pods = {
        "metadata": {"name": "chat-x"},
        "ports": [{"name": "http", "port": 8080}, {"name": "other", "port": 1}],
        "endpoints": [
            {"addresses": ["10.0.0.2"], "conditions": {}},
            {"addresses": ["10.0.0.1"], "conditions": {"ready": True}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": False, "serving": True}},
        ],
    }
    empty = {"metadata": {"name": "chat-y"}, "ports": None, "endpoints": None}
    endpoints = list_ready_endpoints(
        [pods, empty, slice_of("chat", "studio-1"), slice_of("chat", "studio-2", ready=False)]
    )
    assert endpoints == (
        Endpoint("10.0.0.1", 8080),
        Endpoint("10.0.0.2", 8080),
        Endpoint("10.77.0.100", 18000, host="studio-1"),
    )


def test_url_of_an_endpoint() -> None:
    assert Endpoint("10.0.0.1", 80).url == "http://10.0.0.1:80"
    assert Endpoint("fd00::1", 80).url == "http://[fd00::1]:80"
    assert Endpoint("fd00::1", 80, "https").url == "https://[fd00::1]:80"
