"""The replicas of a service on several accelerators: those on each, and those that serve until others do."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from controller.models.served import METAL, Companion
from controller.placement.nodes import DeviceSizes
from controller.placement.pool_table import read_pools
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Snapshot
from controller.services.accelerator_choice import ChosenAccelerators
from controller.services.candidates import state_accelerator
from controller.services.checked_replica import CheckedReplica, check_replica
from controller.services.metal_processes import observe_hosts
from controller.services.pods.observed_deployments import accelerator_label
from controller.services.pods.pod_replicas import hold_pods, observe_pods
from controller.services.preconditions import CheckedService, ServiceProblem
from controller.services.replica_counts import NO_REPLICAS, ReplicaCounts, choose_label, count_replicas, find_pod_labels
from controller.services.replicas import Replicas, combine_replicas
from crds.inferenceservice import InferenceService
from crds.model import Model
from kube.resources import DEPLOYMENTS
from kube.store import Store


class AcceleratorPart(NamedTuple):
    """The replicas of a service that are to be on one accelerator."""

    accelerator: str
    service: InferenceService
    """The service as if it stated this accelerator and its replicas there alone."""
    replica: CheckedReplica


def list_parts(
    store: Store,
    service: InferenceService,
    chosen: ChosenAccelerators,
    model: Model | None,
    companions: Sequence[Companion],
    *,
    settings: PodSettings,
) -> list[AcceleratorPart]:
    """Return a part for each accelerator that was chosen: the service as if it stated this one, and its check."""
    table, parts = read_pools(store, settings.vendors), []

    for share in chosen.shares:
        if share.replicas:
            stated = state_accelerator(service, share.accelerator, table, share.replicas)
            replica = check_replica(store, stated, model, companions, settings, other_problem=chosen.problem)
            parts.append(AcceleratorPart(share.accelerator, stated, replica))
    return parts


def summarize_parts(
    service: InferenceService, chosen: ChosenAccelerators, parts: Sequence[AcceleratorPart]
) -> tuple[CheckedReplica, InferenceService, ServiceProblem | None]:
    """Return the replica and the service that the status describes, and why no part is served, or None.

    The status has room for one accelerator's engine and memory: those of the first part that can be served, else of the
    first one. Without parts (nothing could be chosen, or none is wanted), they are the service as it is and no replica.
    """
    # The first part that can be served, else the first one with its problem, else no replica.
    for part in parts:
        if part.replica.checked.served is not None:
            return part.replica, part.service, None

    if parts:
        first = parts[0]
        return first.replica, first.service, first.replica.checked.problem

    checked = CheckedService(served=None, problem=chosen.problem, model_problem=chosen.model_problem)
    replica = CheckedReplica(accelerator=None, checked=checked, devices=DeviceSizes(), choice=None)
    return replica, service, chosen.problem


def find_pod_runtime(parts: Sequence[AcceleratorPart]) -> str:
    """Return the engine of the replicas in pods; empty if there are none."""
    return next((part.replica.choice.runtime for part in parts if part.replica.choice is not None), "")


def observe_several(
    snapshot: Snapshot,
    service: InferenceService,
    parts: Sequence[AcceleratorPart],
    wanted: int,
    *,
    settings: PodSettings,
    may_roll_out: bool,
) -> Replicas:
    """Return the replicas of a service on all accelerators, and the next steps.

    On a chosen accelerator these are the replicas chosen there. Replicas beyond them, and those on accelerators that
    are not chosen any more, are held: they serve until as many chosen ones are ready.

    Args:
        snapshot: the store.
        service: the service.
        parts: its accelerators with replicas.
        wanted: the number of its replicas.
        settings: options of the controller.
        may_roll_out: True if it is the turn of the service to be replaced by an update.
    """
    # By accelerator: the replicas that exist, those that are wanted, and those that are held beyond them.
    counts = count_replicas(snapshot, service, settings.vendors)
    chosen = {part.accelerator: part.service.spec.replicas for part in parts}
    held = hold_replicas(wanted, chosen, counts)
    labels = find_pod_labels(snapshot, service, settings.vendors)

    # On each chosen accelerator, the chosen replicas and those that are held there.
    observed = [
        _observe_part(snapshot, part, held.get(part.accelerator, 0), labels, settings, may_roll_out=may_roll_out)
        for part in parts
    ]

    # On hosts, if they are not chosen any more.
    if METAL not in chosen:
        # Without Models to serve (None), no process is created. Those that are held do not count as ready.
        held_on_hosts = observe_hosts(snapshot, service, None, held.get(METAL, 0))
        observed.append(replace(held_on_hosts, ready=(), problem=None))

    # In pods of accelerators that are not chosen any more.
    observed += [
        hold_pods(snapshot, service, label, held.get(accelerator, 0))
        for accelerator, label in labels
        if accelerator not in chosen
    ]
    return combine_replicas(observed)


def hold_replicas(wanted: int, chosen: Mapping[str, int], counts: Mapping[str, ReplicaCounts]) -> dict[str, int]:
    """Return, by accelerator, how many replicas beyond those chosen there keep serving until enough chosen are ready.

    For each chosen replica that is not ready yet one is held, first where most are ready.

    Args:
        wanted: the number of replicas of the service.
        chosen: the number of replicas that are to be on each accelerator.
        counts: the replicas that are on each accelerator.
    """
    # The chosen replicas that are not ready yet, anywhere.
    missing = wanted - sum(min(counts.get(name, NO_REPLICAS).ready, number) for name, number in chosen.items())

    held: dict[str, int] = {}
    # Those with the most ready replicas first, equal ones by name.
    for name in sorted(sorted(counts), key=lambda name: counts[name].ready, reverse=True):
        not_chosen = counts[name].running - chosen.get(name, 0)
        held[name] = max(0, min(not_chosen, missing))
        missing -= held[name]
    return held


def _observe_part(
    snapshot: Snapshot,
    part: AcceleratorPart,
    held: int,
    labels: Sequence[tuple[str, str]],
    settings: PodSettings,
    *,
    may_roll_out: bool,
) -> Replicas:
    """Return the replicas on one chosen accelerator: those chosen there, and `held` ones that serve until others do.

    Only as many ready ones count as these are together. `labels`: each accelerator with pods, and their label.
    """
    service, checked, choice = part.service, part.replica.checked, part.replica.choice
    kept_and_new = service.spec.replicas + held

    if part.accelerator == METAL:
        replicas = observe_hosts(snapshot, service, checked.served, kept_and_new, checked.memory.total_bytes)
    else:
        label = choose_label(labels, part.accelerator)
        replicas = observe_pods(
            snapshot,
            service,
            checked.served,
            choice,
            kept_and_new,
            settings=settings,
            may_roll_out=may_roll_out,
            label=label,
            is_one_of_several=True,
        )

        if checked.served is None:  # nothing is built for this accelerator, and its Deployments must not be pruned
            owned = snapshot.children(DEPLOYMENTS, service.metadata.namespace, service.metadata.uid)
            kept = tuple((DEPLOYMENTS, deployment) for deployment in owned if accelerator_label(deployment) == label)
            replicas = replace(replicas, keep=kept)

    return replace(replicas, ready=replicas.ready[:kept_and_new], problem=checked.problem or replicas.problem)
