"""The PodDisruptionBudget of a service with several pods: a drain of nodes evicts one pod after the other.

A service with one pod gets none: it could only allow every eviction, which needs no budget, or refuse every one, which
would hold up the drain of its node for ever. So would a budget of pods that share one node because of their volume:
none can start elsewhere before all have left.
"""

from controller.reconcile.plan import child
from crds.inferenceservice import InferenceService, wanted_replicas
from crds.meta import LABEL_SERVICE
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, POD_DISRUPTION_BUDGETS, Resource


def build_disruption_budget(service: InferenceService, *, share_one_node: bool) -> tuple[tuple[Resource, Obj], ...]:
    """Return the PodDisruptionBudget of a service in pods, by which one pod at a time may be evicted.

    Empty for fewer than two pods, and for pods that share one node: a budget would block the drain of that node.
    """
    if share_one_node or wanted_replicas(service) < 2:  # noqa: PLR2004 - one is too few to go on without one
        return ()
    spec = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": {LABEL_SERVICE: service.metadata.name}},
        # A pod that does not serve is no reason to keep it on a node that is drained.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    name = service.metadata.name
    return (child(POD_DISRUPTION_BUDGETS, name, INFERENCE_SERVICES, service.metadata, {}, spec=spec),)
