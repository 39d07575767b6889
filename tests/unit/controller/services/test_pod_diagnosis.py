"""Why pods do not serve, what still serves meanwhile, and which of it is a Warning."""

from typing import Any

import pytest

from controller.services.diagnosis import diagnose_pod
from crds.meta import PROXY_CONTAINER
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS, PODS
from tests.support.api_objects import model, planned_condition
from tests.support.service_decisions import chat_deployment, chat_pod, chat_service, decide_chat, ready_outcome


def waiting(reason: str, **last: Any) -> Obj:
    state = {"waiting": {"reason": reason, "message": "back-off 10s"}}
    return {"containerStatuses": [{"name": "llama-server", "state": state, **last}]}


@pytest.mark.parametrize(
    ("status", "expected", "says"),
    [
        (waiting("ImagePullBackOff"), ("Failed", "ImagePullBackOff"), "back-off 10s"),
        (
            waiting(
                "CrashLoopBackOff",
                lastState={"terminated": {"exitCode": 1, "reason": "Error", "message": "invalid magic"}},
            ),
            ("Failed", "CrashLoopBackOff"),
            "llama-server ended with exit code 1: invalid magic",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "llama-server",
                        "state": {"running": {}},
                        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                    }
                ]
            },
            ("Progressing", "Restarting"),
            "llama-server was killed (OOMKilled): it took more than its memory of 1.1 GiB",
        ),
        (
            {"containerStatuses": [{"name": "llama-server", "started": True, "state": {"running": {}}}]},
            ("Progressing", "Loading"),
            "pod chat-1: llama-server is loading the model: see `kubectl logs -n team chat-1 -c llama-server`",
        ),
        (
            {"containerStatuses": [{"name": "llama-server", "started": False, "state": {"running": {}}}]},
            ("Progressing", "Loading"),
            "pod chat-1: llama-server is loading the model",
        ),
        (
            {"containerStatuses": [{"name": PROXY_CONTAINER, "started": True, "state": {"running": {}}}]},
            ("Progressing", "Loading"),
            "pod chat-1: the engine is loading the model: see `kubectl logs -n team chat-1 --all-containers`",
        ),
        ({}, ("Progressing", "Progressing"), "0 of 1 replicas are ready"),
    ],
)
def test_reason_why_a_pod_does_not_serve_is_reported(status: Obj, expected: tuple[str, str], says: str) -> None:
    base = (chat_service(), (MODELS, model()))
    there = chat_deployment(*base, ready=0)
    plan = decide_chat(*base, (DEPLOYMENTS, there), (PODS, chat_pod(ready=False, **status)))
    assert ready_outcome(plan) == (expected[0], "False", expected[1])
    assert says in planned_condition(plan, "Ready")["message"]


@pytest.mark.parametrize(
    ("unready_since", "reason"),
    [
        ("2026-11-29T10:00:00Z", "Loading"),
        ("2026-11-29T10:00:09Z", "Loading"),
        ("2026-11-29T10:00:10Z", "NotAnswering"),
    ],
    ids=["since its start", "with its container", "after it was ready"],
)
def test_pod_that_was_ready_does_not_load(unready_since: str, reason: str) -> None:
    running = {"name": "llama-server", "started": True, "state": {"running": {"startedAt": "2026-11-29T10:00:09Z"}}}
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": unready_since}
    base = (chat_service(), (MODELS, model()))
    there = chat_deployment(*base, ready=0)
    pod = chat_pod(ready=False, conditions=[unready], containerStatuses=[running])
    plan = decide_chat(*base, (DEPLOYMENTS, there), (PODS, pod))
    assert ready_outcome(plan) == ("Progressing", "False", reason)
    (event,) = plan.events
    assert (event.type, event.reason) == ("Normal" if reason == "Loading" else "Warning", reason)


@pytest.mark.parametrize("spec", [{"suspend": True}, {"replicas": 0}])
def test_service_that_shall_not_run_raises_no_warning(spec: Obj) -> None:
    plan = decide_chat(chat_service(**spec), (MODELS, model()))
    assert [event.type for event in plan.events] == ["Normal"]


def test_pods_of_an_earlier_spec_are_available_while_they_serve() -> None:
    base = (chat_service(replicas=2), (MODELS, model()))
    there = chat_deployment(*base, replicas=3, ready=2, updated=1)
    pods = [(PODS, chat_pod(f"chat-{number}", ready=number < 2)) for number in range(3)]
    plan = decide_chat(chat_service(replicas=2, contextLength=512), *base[1:], (DEPLOYMENTS, there), *pods)
    assert plan.status is not None
    assert (plan.status["readyReplicas"], plan.status["availableReplicas"]) == (0, 2)


def test_the_latest_end_of_a_container_is_quoted() -> None:
    ended = {
        "name": "engine",
        "state": {"terminated": {"exitCode": 1, "message": "no such file"}},
        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
    }
    problem = diagnose_pod(chat_pod(ready=False, containerStatuses=[ended]))
    assert problem is not None
    assert "no such file" in problem.message
