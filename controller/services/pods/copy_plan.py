"""The copies of a Model's weights that a service can use, and the replicas beside each of them."""

from collections.abc import Sequence
from typing import NamedTuple

from controller.models import jobs
from controller.models.served import weights_path
from controller.models.volume import WEIGHTS
from controller.reconcile.indexes import mounted_claims
from controller.reconcile.plan import Snapshot
from controller.reconcile.triggers import is_refused
from controller.services.pods.copy_choice import CopyPods, choose_copies
from controller.services.pods.deployment import mounted_weights, name_deployment
from controller.services.pods.observed_deployments import ObservedDeployment, ServicePods
from controller.services.preconditions import ServiceProblem
from crds.cache import NodeCopy
from crds.inferenceservice import InferenceService
from crds.model import Model
from kube.resources import JOBS, PODS, PVCS


class CopyPlan(NamedTuple):
    """The replicas of a service beside each copy."""

    replicas: Sequence[tuple[NodeCopy | None, int]]
    """Copies with a replica; None: the one volume of a Model without copies."""
    surplus: int = 0
    """Refused pods that are the same replica as another one."""
    problem: ServiceProblem | None = None
    """Reason why replicas are beside no copy yet."""


def plan_copies(
    snapshot: Snapshot,
    service: InferenceService,
    model: Model,
    observed: tuple[Sequence[ObservedDeployment], ServicePods],
    wanted: int,
    *,
    label: str = "",
) -> CopyPlan:
    """Return how many replicas of a service run beside each copy of the weights, and what they wait for.

    Each copy is on one node and has a Deployment of its own. If an edit of the Model asks for other weights, copies of
    the earlier ones are used until the first new copy is there.

    Args:
        snapshot: the store.
        service: the service.
        model: its Model.
        observed: its Deployments and pods.
        wanted: the number of its replicas.
        label: that of `build_deployment`.
    """
    deployments, pods = observed
    deployment_of = {deployment.name: deployment for deployment in deployments}

    def count_pods(copy: NodeCopy) -> CopyPods:
        deployment = deployment_of.get(name_deployment(service.metadata.name, mounted_weights(model, copy), label))
        return deployment.count_pods(copy.node, pods.leaving) if deployment is not None else CopyPods()

    # 1. The copies of the wanted weights. Until there is one, earlier weights serve: those that serve now, of one path.
    path = _wanted_path(model)
    usable = {copy.name: copy for copy in model.status.copies if copy.path == path}
    if not usable and model.status.copies:
        replicas_of: dict[str, int] = {}
        for copy in model.status.copies:
            replicas_of[copy.path] = replicas_of.get(copy.path, 0) + count_pods(copy).replicas
        # The path with the most replicas; of equal ones the last by name.
        serving_path = max(sorted(replicas_of, reverse=True), key=replicas_of.__getitem__)
        usable = {copy.name: copy for copy in model.status.copies if copy.path == serving_path}

    # 2. The replicas beside each of them, and the copies that are being made, for which some replicas wait.
    expected = _count_expected(snapshot, model, path)
    chosen = choose_copies(wanted, {name: count_pods(copy) for name, copy in usable.items()}, expected)

    problem = None
    if expected and sum(chosen.values()) < wanted:
        message = f"waiting for a copy of Model {model.metadata.name} on another node"
        problem = ServiceProblem("Downloading", message, "Downloading")

    # A replica that was refused beside one copy is tried beside another, and its refused pod stays: it counts twice.
    surplus = min(pods.refused, max(0, pods.total - wanted))
    replicas = [(usable[name], number) for name, number in chosen.items()]
    return CopyPlan(replicas=replicas, surplus=surplus, problem=problem)


def _wanted_path(model: Model) -> str:
    status = model.status
    return weights_path(model.spec.source, status.revision, status.file, tuple(model.spec.files))


def _count_expected(snapshot: Snapshot, model: Model, path: str) -> int:
    """Return the number of copies of the weights at `path` that are being made, and for which replicas wait.

    A copy is a PersistentVolumeClaim that a Job fills. One counts until it is verified, unless it is being deleted, or
    all Jobs for it have failed or found no node with room.
    """
    # 1. The claims that are to hold these weights, and do not hold them yet.
    namespace, verified = model.metadata.namespace, {copy.name for copy in model.status.copies}
    expected = {
        claim["metadata"]["name"]
        for claim in snapshot.children(PVCS, namespace, model.metadata.uid)
        if claim["metadata"]["name"] not in verified
        and "deletionTimestamp" not in claim["metadata"]
        and (claim["metadata"].get("annotations") or {}).get(WEIGHTS) == path
    }
    if not expected:
        return 0

    # 2. Those of them that a Job may still fill.
    running_claims: set[str] = set()
    failed_claims: set[str] = set()
    for job in snapshot.children(JOBS, namespace, model.metadata.uid):
        pods = snapshot.children(PODS, namespace, job["metadata"]["uid"])
        outcome = jobs.read_outcome(job, pods, snapshot.now)
        has_failed = outcome.state in {"Failed", "Broken"} or any(map(is_refused, pods))
        claims_of_outcome = failed_claims if has_failed else running_claims
        claims_of_outcome.update(mounted_claims(job["spec"]["template"]["spec"]))

    # A copy whose Jobs have all failed (none of them is running) may succeed later, but replicas do not wait for it.
    return len(expected - (failed_claims - running_claims))
