"""Copies in the way of which something stands: a node that takes no pod, a claim that leaves, room that pods take."""

from kube.resources import JOBS, MODELS, PODS, PVCS
from tests.support.simulated_copies import SimulatedCopies


def serve_one(nodes: dict[str, int]) -> SimulatedCopies:
    """Return a Model of which node a has a copy that the pod of the one replica mounts."""
    simulated = SimulatedCopies(nodes)
    simulated.make_model()
    simulated.make_service(replicas=1)
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
