"""Claims whose outcome is unknown, or whose unit changes while they are carried out."""

from kube.client import Obj
from kube.resources import PODS, Resource
from tests.support.queue_objects import queue_pod
from tests.unit.controller.placement.test_admission_pods import bench, is_gated, node, play


def test_pod_that_loses_its_gate_while_its_place_is_written_stops_nothing() -> None:
    """Another leader's write, or a person, is faster."""
    found = bench(queue_pod("a"), queue_pod("b", service="mail"), nodes=(node("n1", 2),))
    put = found.api.put

    def put_ungated(resource: Resource, obj: Obj) -> Obj:
        if (resource, obj["metadata"]["name"]) == (PODS, "a"):
            obj = {**obj, "spec": {key: value for key, value in obj["spec"].items() if key != "schedulingGates"}}
        return put(resource, obj)

    found.api.put = put_ungated  # type: ignore[method-assign]
    play(found)
    assert not is_gated(found, "b")
