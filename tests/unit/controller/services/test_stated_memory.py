"""Memory that a Model states: what its header says counts, before any replica is made."""

import msgspec
import pytest

from crds.model import Layout
from crds.serving import ServingOptions
from fitness.memory import Workload, estimate
from kube.resources import DEPLOYMENTS, ENDPOINT_SLICES, METAL_HOSTS, METAL_PROCESSES, MODELS, PODS
from tests.support.api_objects import GIB, host, model, planned_condition, slice_of
from tests.support.service_decisions import (
    OK,
    SERVING,
    chat_deployment,
    chat_pod,
    chat_service,
    decide_chat,
    list_applied,
    ready_outcome,
)


@pytest.mark.parametrize("accelerator", ["cpu", "nvidia", "metal"])
@pytest.mark.parametrize(
    ("stated", "layout", "says"),
    [
        (1, True, "by its header, serving it takes at least 1.3 GiB"),
        (GIB, True, "or remove it, or lower contextLength or parallel"),
        (
            GIB // 2,
            False,
            f"the file alone has 1.0 GiB: raise spec.memoryBytes of Model tiny, which is 512.0 MiB, above {GIB}",
        ),
    ],
)
def test_memory_that_is_understated_for_an_inspected_model_is_refused(
    accelerator: str, stated: int, says: str, *, layout: bool
) -> None:
    understated = model(memoryBytes=stated, status=None if layout else {"layout": None})
    made = chat_service(hardware={"accelerator": accelerator}, contextLength=131072)
    plan = decide_chat(made, (MODELS, understated), (METAL_HOSTS, host()))
    assert ready_outcome(plan) == ("Failed", "False", "MemoryUnderstated")
    message = planned_condition(plan, "Ready")["message"]
    assert says in message
    assert "raise spec.memoryBytes of Model tiny" in message
    assert list_applied(plan, DEPLOYMENTS) == []
    assert METAL_PROCESSES not in [resource for resource, _ in plan.create]


def test_memory_that_is_stated_close_to_the_estimate_or_for_the_pod_itself_is_taken() -> None:
    """Versions differ a little in their estimates, and what a pod requests is between its owner and Kubernetes."""
    needed = estimate(Workload(msgspec.convert(model()["status"]["layout"], Layout)), ServingOptions())
    assert needed
    close = needed.total_bytes * 95 // 100
    (obj,) = list_applied(decide_chat(chat_service(), (MODELS, model(memoryBytes=close))), DEPLOYMENTS)
    assert obj["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"] == {"memory": str(close)}
    requested = chat_service(resources={"memory": "1Gi"})
    assert list_applied(decide_chat(requested, (MODELS, model(memoryBytes=1))), DEPLOYMENTS)


def test_pods_that_serve_a_model_whose_memory_is_understated_go_on() -> None:
    understated = (MODELS, model(memoryBytes=GIB // 2))
    there = (DEPLOYMENTS, chat_deployment(chat_service(), (MODELS, model(memoryBytes=2 * GIB))))
    reached = ((PODS, chat_pod()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    plan = decide_chat(chat_service(status=SERVING), understated, there, *reached, answer=OK)
    assert (plan.delete, plan.patch) == ((), ())
    assert ready_outcome(plan) == ("Degraded", "True", "MemoryUnderstated")
    assert "raise spec.memoryBytes" in planned_condition(plan, "Ready")["message"]
