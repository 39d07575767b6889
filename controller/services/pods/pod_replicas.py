"""The replicas of a service in pods, and the next steps for its Deployments.

A service of a Model with one volume has one Deployment. With copies on nodes it has one for each copy beside which its
replicas run. A Deployment that is not wanted any more, such as that of earlier weights, serves until others do.
"""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Final, NamedTuple

from controller.models.served import Served
from controller.placement.nodes import find_device_sizes, find_largest_memory
from controller.placement.replacement import count_surge
from controller.pod_settings import PodSettings
from controller.reconcile.indexes import CLAIM_INDEX, namespaced
from controller.reconcile.plan import Patch, Snapshot, ref
from controller.services import replica_memory
from controller.services.diagnosis import pick_most_severe
from controller.services.pods.copy_choice import choose_copies
from controller.services.pods.copy_plan import CopyPlan, plan_copies
from controller.services.pods.deployment import build_deployment, companion_weights, mounted_weights, name_deployment
from controller.services.pods.deployment_strategy import (
    Replacement,
    choose_first_strategy,
    continue_rollout,
    make_way_for_kueue,
)
from controller.services.pods.device_claims import ACCEPTED_SHARE
from controller.services.pods.devices import request_devices
from controller.services.pods.observed_deployments import (
    ObservedDeployment,
    ServicePods,
    accelerator_label,
    list_deployments,
    list_service_pods,
)
from controller.services.pods.one_node import has_one_node
from controller.services.pods.pod_template import EngineChoice, MountedWeights
from controller.services.pods.queue_gate import name_local_queue, read_local_queue
from controller.services.pods.surge import list_present_replicas, mark_leaving
from controller.services.pods.template_rollout import (
    TemplateChange,
    annotate,
    compare_template,
    digest_inputs,
    is_changing,
    mark_template,
    select_changes,
)
from controller.services.pods.volume_mark import VolumeMark, choose_volume_mark
from controller.services.preconditions import ServiceProblem
from controller.services.replicas import Replicas
from controller.services.serving_choice import without_choice
from crds.cache import NodeCopy
from crds.inferenceservice import InferenceService
from crds.quantity import quantity_bytes
from crds.size import GIB, size_text
from kube.client import Obj
from kube.resources import DEPLOYMENTS, PODS

_EARLIER_PODS_SERVE_ON: Final = (
    "the earlier pods serve on, as the new one would not fit in the place of one: ask for less, or set spec.suspend to "
    "true until they have ended"
)
_ROOM_SECONDS: Final = 60.0
"""Time after which it is asked anew whether a refused pod would fit: the scheduler's words may stay the same."""


class _KeptDeployment(NamedTuple):
    """A Deployment whose template stays for now."""

    observed: ObservedDeployment
    patch: tuple[Patch, ...]
    """Scales it."""


class _WantedDeployment(NamedTuple):
    """A Deployment that a service should have."""

    change: TemplateChange
    replicas: int
    observed: ObservedDeployment | None
    node: str
    """The node of its copy; empty if the Model has one volume for all pods."""
    lacks_room: bool = False
    """True if its earlier pods serve on, because a new one would not fit in the place of one."""
    again_seconds: float | None = None
    """Time after which another label for its pods may be needed; None: no time passes for that."""

    def list_ready(self, *, is_applied: bool) -> list[str]:
        """Return the uids of its ready pods that are as the user wants them; `is_applied`: its change is applied now.

        While an edit waits, none is. While an update of Pomona waits, which no user asked for, those of the present
        template are. Else those of the desired template are.
        """
        if self.observed is None or (not is_applied and self.change.cause == "edit"):
            return []
        # For `list_current`, None stands for the template that the Deployment has.
        counts_present_template = not is_applied or self.change.is_present
        return self.observed.list_current(None if counts_present_template else self.change.desired)

    @property
    def name(self) -> str:
        """Its name."""
        name: str = self.change.desired["metadata"]["name"]
        return name

    def is_refused(self, pods: ServicePods) -> bool:
        """Return whether the node of its copy is full: it has no room for some of its pods, and all others are ready.

        Then nothing is to be waited for, and another Deployment of the service may change next.
        """
        if self.observed is None or not self.node:  # it is for no copy, or does not exist
            return False
        copy_pods = self.observed.count_pods(self.node, pods.leaving)
        return copy_pods.refused > 0 and copy_pods.replicas == copy_pods.ready + copy_pods.refused

    def limit_change(self) -> int | None:
        """Return the most pods that it may ask for while its template changes; None: there is no limit.

        Only a Deployment beside a copy of the weights, which is on one node, has a limit, if it has a pod there: as
        many pods as have their place when the change begins, until it is rolled out. With more, a new pod without room
        might wait while Kubernetes ends no earlier one.
        """
        if self.observed is None or not self.node:  # it does not exist, or is beside no copy
            return None

        placed = self.observed.count_pods().placed
        if placed and self.change.cause:  # the change begins: its template is to be another one
            return placed

        # While the change is rolled out, as many as it asks for already.
        return self.observed.replicas if placed and is_changing(self.observed.obj) else None

    def list_problems(self) -> list[ServiceProblem | None]:
        """Return why pods of it are not ready, or cannot be created; None for a pod that is only starting.

        If a new pod would fit nowhere, not even in the place of an earlier one, the message adds that these serve on.
        """
        problems = self.observed.list_problems() if self.observed is not None else []
        return [
            problem._replace(message=f"{problem.message}; {_EARLIER_PODS_SERVE_ON}")
            if problem is not None and self.lacks_room
            else problem
            for problem in problems
        ]

    def keep_template(self) -> list[_KeptDeployment]:
        """Return it with its present template and the wanted number of pods; empty if it does not exist."""
        if self.observed is None:
            return []
        return [_KeptDeployment(self.observed, self.observed.scale(self.replicas, may_grow=True))]


def observe_pods(
    snapshot: Snapshot,
    service: InferenceService,
    served: Served | None,
    choice: EngineChoice | None,
    wanted: int,
    *,
    settings: PodSettings,
    may_roll_out: bool = True,
    label: str = "",
    is_one_of_several: bool = False,
) -> Replicas:
    """Return the replicas of a service in pods, and what to apply to its Deployments next.

    Without `served`, the Models to serve, nothing new is created; existing pods count and are only scaled down. Without
    `may_roll_out`, an update of Pomona changes no template yet, and existing pods count as wanted. `label` is the value
    of LABEL_ACCELERATOR of the pods, or empty; if the accelerator is one of several, other pods stay as they are.
    """
    deployments, pods = _observe_deployments(snapshot, service, label if is_one_of_several else None)
    if not wanted or choice is None or served is None:
        return _leave_deployments(deployments, pods, wanted, are_current=served is None)

    # 1. Set Deployments of another queue aside, to be deleted: Kueue lets nobody edit the queue of one that serves.
    moved = [deployment for deployment in deployments if read_local_queue(deployment.obj) != name_local_queue(service)]
    moved_names = {deployment.name for deployment in moved}
    deployments = [deployment for deployment in deployments if deployment.name not in moved_names]

    # 2. Plan the wanted ones, with one pod more (the surge) while it replaces a slow one. A moved Deployment is made
    # anew under its name once it is gone.
    surge = count_surge(service.status.replacement, list_present_replicas(pods.pods), wanted)
    plan = CopyPlan([(None, wanted + surge)])  # None: one Deployment for all replicas
    if served.model.spec.cache.scope == "node":
        plan = plan_copies(snapshot, service, served.model, (deployments, pods), wanted, label=label)
    planned = _list_wanted(snapshot, service, served, choice, (plan, deployments, pods), settings=settings, label=label)
    targets = [target for target in planned if target.name not in moved_names]

    # 3. Select the wanted Deployments that are applied now. The others keep their template; unwanted ones serve until
    # wanted ones do.
    changes = [(target.change, target.observed.obj if target.observed is not None else None) for target in targets]
    refused = [target.name for target in targets if target.is_refused(pods)]
    selected = list(zip(targets, select_changes(changes, may_roll_out=may_roll_out, refused=refused), strict=True))
    ready = [uid for deployment, is_applied in selected for uid in deployment.list_ready(is_applied=is_applied)]
    waiting = [deployment for deployment, is_applied in selected if not is_applied]  # they are not changed now
    kept = [kept for deployment in waiting for kept in deployment.keep_template()]
    kept += _keep_unwanted(targets, deployments, wanted - len(ready))
    problems = [problem for target in targets for problem in target.list_problems()]
    return Replicas(
        total=pods.total - plan.surplus,  # a refused pod beside a copy is no further replica
        ready=tuple(sorted(ready)),
        available=pods.ready,
        nodes=pods.nodes,
        problem=_explain_refusal(snapshot, service, served, choice, pick_most_severe((*problems, plan.problem))),
        apply=tuple((DEPLOYMENTS, deployment.change.desired) for deployment, is_applied in selected if is_applied),
        keep=tuple((DEPLOYMENTS, deployment.observed.obj) for deployment in kept),
        awaiting=tuple(deployment.name for deployment in waiting if deployment.change.cause == "update"),
        patch=(*(patch for old in kept for patch in old.patch), *mark_leaving(service.status.replacement, pods.pods)),
        delete=tuple(ref(DEPLOYMENTS, old.obj) for old in moved if "deletionTimestamp" not in old.obj["metadata"]),
        again_seconds=_find_recheck_seconds(targets, pods, snapshot.now),
    )


def _observe_deployments(
    snapshot: Snapshot, service: InferenceService, label: str | None
) -> tuple[list[ObservedDeployment], ServicePods]:
    """Return the Deployments of a service, and its pods; with a label, those of one of several accelerators only."""
    owned = snapshot.children(DEPLOYMENTS, service.metadata.namespace, service.metadata.uid)
    if label is not None:
        owned = [deployment for deployment in owned if accelerator_label(deployment) == label]
    pods = list_service_pods(snapshot, service, label) if owned else ServicePods(())
    return list_deployments(owned, pods), pods


def hold_pods(snapshot: Snapshot, service: InferenceService, label: str, most: int) -> Replicas:
    """Return the replicas on an accelerator that is not chosen any more: up to `most` of them serve until others do.

    The patches scale its Deployments down to that number.
    """
    deployments, pods = _observe_deployments(snapshot, service, label)
    kept = _keep_unwanted((), deployments, most)
    return Replicas(
        total=pods.total,
        available=pods.ready,
        nodes=pods.nodes,
        keep=tuple((DEPLOYMENTS, deployment.observed.obj) for deployment in kept),
        patch=tuple(patch for deployment in kept for patch in deployment.patch),
    )


def _find_recheck_seconds(targets: Sequence[_WantedDeployment], pods: ServicePods, now: datetime) -> float | None:
    """Return the seconds until the first moment at which time alone may change the decision; None: it never does."""
    # Pods that end may still make room for a refused one, and each Deployment may have a pause of its own.
    waits = [pods.refusal_seconds(now), *(target.again_seconds for target in targets)]
    # Beside copies, a pod that the queue has let wait for long is tried on another node.
    if any(target.node for target in targets):
        waits.append(pods.queue_seconds)
    waits += [_ROOM_SECONDS for target in targets if target.lacks_room]  # ask again whether one would fit
    return min((seconds for seconds in waits if seconds is not None), default=None)


def _list_wanted(
    snapshot: Snapshot,
    service: InferenceService,
    served: Served,
    choice: EngineChoice,
    planned: tuple[CopyPlan, Sequence[ObservedDeployment], ServicePods],
    *,
    settings: PodSettings,
    label: str,
) -> list[_WantedDeployment]:
    """Return the Deployments that a service should have, one for all replicas or for each copy, with their changes."""
    plan, deployments, pods = planned
    present = {deployment.name: deployment for deployment in deployments}  # those that exist, by name
    build = partial(build_deployment, service, companions=companion_weights(served), settings=settings, label=label)

    def compare_with_present(copy: NodeCopy | None, replicas: int) -> _WantedDeployment:
        """Return the Deployment beside a copy, or for all replicas (None), with what applying it would change.

        From outside come the service, its Models (`served`), its engine (`choice`), its Deployments and its `pods`.
        """
        # 1. Build the desired one. The mark is the value of a label by which pods of a one-node volume stay together.
        weights = mounted_weights(served.model, copy)
        observed = present.get(name_deployment(service.metadata.name, weights, label))  # of those that exist
        mark = _choose_volume_mark(snapshot, service, weights, observed)
        inputs = digest_inputs(without_choice(snapshot, service), served, copy)
        _, made = build(choice, weights._replace(mark=mark.value), replicas=replicas)
        if observed is None:
            change = TemplateChange(annotate(mark_template(made), inputs))
            return _WantedDeployment(change, replicas, observed=None, node=weights.node)

        # 2. Compare it with the present one. Beside a copy (with a node), the strategy is fixed.
        find_change = partial(
            compare_template,
            observed=observed.obj,
            inputs=inputs,
            is_estimate=choice.is_estimate,
            is_stated=replica_memory.is_memory_stated(served),
            has_places=observed.count_pods().placed > 0,
        )
        change = find_change(made)
        if weights.node:
            return _WantedDeployment(change, replicas, observed, weights.node)

        # 3. Else the strategy follows from the change. It is a part of what is compared, so compare once more.
        replacement = _choose_replacement(snapshot, change, observed, pods, replicas)
        if replacement.strategy != made["spec"]["strategy"]:
            made["spec"]["strategy"] = replacement.strategy
            change = find_change(made)
        pauses = (mark.again_seconds, replacement.again_seconds)
        again_seconds = min((seconds for seconds in pauses if seconds is not None), default=None)
        return _WantedDeployment(change, replicas, observed, weights.node, replacement.lacks_room, again_seconds)

    results = []
    for copy, replicas in plan.replicas:
        wanted = compare_with_present(copy, replicas)
        # While the pods of a copy get another template, none is added.
        if (limit := wanted.limit_change()) is not None and limit < replicas:
            wanted = wanted._replace(change=compare_with_present(copy, limit).change)
        results.append(wanted)
    return results


def _choose_replacement(
    snapshot: Snapshot, change: TemplateChange, observed: ObservedDeployment, pods: ServicePods, replicas: int
) -> Replacement:
    """Return how pods that may run on any node are replaced: as a change begins, or as the one under way goes on."""
    if change.cause:
        return Replacement(choose_first_strategy("", replicas))
    making_way_for_kueue = make_way_for_kueue(observed, replicas, snapshot.now)
    return making_way_for_kueue or continue_rollout(observed, pods, replicas, snapshot.store)


def _list_mounting(snapshot: Snapshot, service: InferenceService, weights: MountedWeights) -> Sequence[Obj]:
    """Return the pods that mount a volume that only one node can attach; empty for any other volume."""
    if not weights.claim or not weights.has_one_node:
        return []
    return snapshot.store.by_index(PODS, CLAIM_INDEX, namespaced(service.metadata.namespace, weights.claim))


def _choose_volume_mark(
    snapshot: Snapshot, service: InferenceService, weights: MountedWeights, observed: ObservedDeployment | None
) -> VolumeMark:
    """Return the value of the label by which new pods run on the one node of their ReadWriteOnce volume.

    It follows from the pods that mount the volume, of any service. For other volumes it does not matter.
    """
    if not weights.claim or not weights.has_one_node:
        return VolumeMark(weights.mark)
    mounting = _list_mounting(snapshot, service, weights)
    return choose_volume_mark(weights.claim, mounting, observed.obj if observed is not None else None, snapshot.now)


def _keep_unwanted(
    targets: Sequence[_WantedDeployment], deployments: Sequence[ObservedDeployment], replicas_to_cover: int
) -> list[_KeptDeployment]:
    """Return the unwanted Deployments that keep serving until `replicas_to_cover` more wanted replicas are ready.

    They are scaled down to that number together. If the scheduler refused a wanted pod on a node that they use (a full
    node), one replica fewer is kept, to make room.
    """
    wanted_names = {target.observed.name for target in targets if target.observed is not None}
    retired = sorted((item for item in deployments if item.name not in wanted_names), key=lambda item: item.name)
    if not retired:
        return []

    # Nodes of copies on which the scheduler has refused a wanted pod.
    full_nodes = {
        target.node for target in targets if target.node and target.observed and target.observed.count_pods().refused
    }
    if any(deployment.nodes & full_nodes for deployment in retired):
        replicas_to_cover -= 1  # room for the refused pod

    # Those on no full node are kept first, and of these the ones with the most ready pods.
    retired.sort(key=lambda deployment: deployment.count_pods().ready, reverse=True)
    retired.sort(key=lambda deployment: bool(deployment.nodes & full_nodes))

    # Keep as many of their pods as are to be covered.
    kept = []
    for deployment in retired:
        replicas = min(replicas_to_cover, deployment.count_pods().placed)
        if replicas > 0:
            kept.append(_KeptDeployment(deployment, deployment.scale(replicas, may_grow=False)))
            replicas_to_cover -= replicas
    return kept


def _leave_deployments(
    deployments: Sequence[ObservedDeployment], pods: ServicePods, wanted: int, *, are_current: bool
) -> Replicas:
    """Return the existing pods of a service for which no Deployment is built: no pod is wanted, or can be made.

    `are_current`: no other template is known, so the pods count as wanted, and Deployments with too many are scaled
    down. Else, or if no pod is wanted, they stay as they are: the reconciler decides whether to delete them.
    """
    if not are_current:
        return Replicas(total=pods.total, available=pods.ready, nodes=pods.nodes)

    kept = choose_copies(wanted, {deployment.name: deployment.count_pods() for deployment in deployments})
    scaled = deployments if wanted else ()
    return Replicas(
        total=pods.total,
        # None: the template that the Deployment has.
        ready=tuple(sorted(uid for deployment in deployments for uid in deployment.list_current(None))),
        available=pods.ready,
        nodes=pods.nodes,
        patch=tuple(patch for item in scaled for patch in item.scale(kept.get(item.name, 0), may_grow=False)),
    )


def _explain_refusal(
    snapshot: Snapshot,
    service: InferenceService,
    served: Served,
    choice: EngineChoice,
    problem: ServiceProblem | None,
) -> ServiceProblem | None:
    """Return the problem, with what the scheduler's message omits if no node fits, and the way out.

    That may be a volume that is on one node at a time, a device memory that the cluster has not, or more memory than
    the largest node has. Other problems are returned as they are.
    """
    if problem is None or problem.reason != "Unschedulable":
        return problem
    if "Insufficient cpu" in problem.message:
        problem = problem._replace(message=f"{problem.message}; state less in resources.cpu")

    # 1. A volume holds the pods on one node.
    if has_one_node(served.model) and "didn't match pod affinity rules" in problem.message:
        name = served.model.metadata.name
        message = (
            f"{problem.message}; the volume of Model {name} is ReadWriteOnce, so its pods share one node: give their "
            f"services a Model whose cache.accessMode is ReadWriteMany or whose cache.scope is node, to use several"
        )
        return problem._replace(message=message)

    # 2. No device has the memory that is stated.
    if (stated := service.spec.hardware.memory) is not None:
        largest_device = find_device_sizes(snapshot.store, choice.accelerator).largest_bytes
        if largest_device is not None and quantity_bytes(stated) * ACCEPTED_SHARE > largest_device:
            message = (
                f"{problem.message}; hardware.memory is {stated}, and the largest {choice.accelerator} device of the "
                f"cluster has {size_text(largest_device)}: lower it, unless an autoscaler adds a node with more"
            )
            return problem._replace(message=message)

    # 3. No node has the memory that is requested.
    needed, largest = quantity_bytes(choice.memory), find_largest_memory(snapshot.store)
    if largest is None or needed < largest + GIB:
        return problem
    if service.spec.resources.memory is not None:
        way_out = "lower resources.memory"
    elif request_devices(service, choice.vendor).number:
        way_out = "lower hardware.count, or state resources.memory"  # weights and cache are in the devices
    else:
        way_out = replica_memory.advise_memory(service, served, largest).way_out
    message = (
        f"{problem.message}; a replica requests {size_text(needed)} of memory, and the largest node has "
        f"{size_text(largest)}: {way_out}"
    )
    return problem._replace(message=message)
