"""Copies in the way of which something stands: a node that takes no pod, a claim that leaves, room that pods take."""

import pytest

from kube.resources import JOBS, MODELS, NODES, PODS, PVCS
from tests.support.simulated_copies import NAMESPACE, SimulatedCopies, simulate_service
from tests.unit.controller.models.test_node_copies import change_weights

FULL = -9
"""Slots of a node that takes no pod, such as one that is cordoned or not ready."""


def serve_one(nodes: dict[str, int]) -> SimulatedCopies:
    """Return a Model of which node a has a copy that the pod of the one replica mounts."""
    simulated = simulate_service(nodes)
    simulated.fetch_all()
    (copy,) = simulated.copies()
    assert copy.node == "a"
    simulated.serve(copy.name, pod="old", node="a")
    return simulated


def delete_claims(simulated: SimulatedCopies) -> None:
    """Delete all claims, which stay as long as pods mount them."""
    for claim in simulated.store.list(PVCS):
        metadata = {**claim["metadata"], "deletionTimestamp": simulated.now.isoformat()}
        simulated.put(PVCS, metadata["name"], **{**claim, "metadata": metadata})


def test_model_that_is_made_again_waits_for_no_claim_of_its_predecessor() -> None:
    simulated = serve_one({"a": 2})
    (earlier,) = simulated.claims()
    simulated.remove(MODELS, "tiny")
    for job in list(simulated.store.list(JOBS)):
        simulated.remove(JOBS, job["metadata"]["name"])
        simulated.remove(PODS, f"{job['metadata']['name']}-pod")
    delete_claims(simulated)
    simulated.make_model()
    simulated.fetch_all()
    assert simulated.nodes_of() == ["a"]
    assert simulated.copies()[0].name != earlier


def test_successor_is_made_elsewhere_if_its_node_takes_no_pod() -> None:
    simulated = serve_one({"a": 1, "b": 1})
    change_weights(simulated)
    simulated.slots["a"] = FULL
    simulated.fetch_all()
    (copy,) = (copy for copy in simulated.copies() if copy.node == "b")
    assert len(simulated.claims()) == 2, "the pod mounts the earlier one; nothing waits for node a any more"
    simulated.remove(PODS, "old")
    simulated.settle()
    assert [*simulated.claims()] == [copy.name]


def test_fetch_that_its_node_does_not_take_again_is_made_elsewhere() -> None:
    simulated = simulate_service({"a": 1, "b": 1})
    simulated.schedule()
    (job,) = simulated.pending()
    simulated.end(job, 1, {"reason": "SourceUnreachable", "message": "no route"})
    simulated.settle()
    simulated.slots["a"] = FULL
    simulated.pass_time(minutes=1)
    simulated.fetch_all()
    assert simulated.nodes_of() == ["b"]
    assert len(simulated.claims()) == 1


@pytest.mark.parametrize("room", [1, 2], ids=["full node", "free node"])
def test_copy_whose_claim_was_deleted_is_replaced_though_its_pod_has_the_devices(room: int) -> None:
    simulated = serve_one({"a": room})
    delete_claims(simulated)
    simulated.settle()
    simulated.fetch_all()
    assert simulated.nodes_of() == ["a"]


def test_service_of_another_model_gets_a_copy_though_its_pods_have_the_devices() -> None:
    simulated = serve_one({"a": 1})
    simulated.make_model("other", "http://models.example/other.gguf")
    simulated.make_service(model="other", replicas=1)
    simulated.fetch_all()
    assert simulated.nodes_of("other") == ["a"]
    assert simulated.store.get(PODS, "old", NAMESPACE) is not None


def test_nothing_is_made_on_a_node_that_is_gone_though_its_pod_is_not() -> None:
    simulated = serve_one({"a": 1, "b": 1})
    change_weights(simulated)
    simulated.remove(NODES, "a")
    simulated.settle()
    simulated.fetch_all()
    assert simulated.nodes_of() == ["b"]
