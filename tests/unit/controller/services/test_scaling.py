"""The field `scaling` in a cluster, which does not follow it yet."""

from kube.resources import INFERENCE_SERVICES, MODELS
from tests.support.api_objects import model, planned_condition, service
from tests.support.service_decisions import decide_chat


def test_scaling_is_refused_in_a_condition() -> None:
    chat = service(scaling={"minReplicas": 0})
    condition = planned_condition(decide_chat((INFERENCE_SERVICES, chat), (MODELS, model())), "Ready")
    assert (condition["status"], condition["reason"]) == ("False", "ScalingNotSupported")
    assert condition["message"] == (
        "spec.scaling is not followed by a cluster yet, only by `pomona up`: remove it, and set spec.replicas"
    )
