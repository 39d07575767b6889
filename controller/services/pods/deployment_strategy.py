"""The strategy of a Deployment: a new pod is ready before an earlier one ends, or takes its place.

Only the scheduler knows whether there is room for both, so it is asked: each change of a template begins with one pod
more than wanted. If that is refused for lack of room, earlier pods make way, one at a time, provided that the new one
fits in the place of one. Else they serve on: a mistake in a request must not end what runs. Of pods that wait for the
queue, the queue says so (`queued_rollout.py`).

The pods beside a copy of weights are on one node, which seldom has room for one more: there, earlier pods make way.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Final, NamedTuple

from controller.placement.node_rules import admits
from controller.placement.pod_requests import add_up, sum_requests
from controller.reconcile.indexes import NODE_INDEX, waits_for_kueue
from controller.reconcile.triggers import is_refused, waits_for_node
from controller.services.pods.observed_deployments import ObservedDeployment, ServicePods, node_of
from controller.services.pods.one_node import may_follow
from controller.services.pods.queue_gate import has_gate
from controller.services.pods.queued_rollout import limit_unavailable
from controller.services.pods.template_rollout import is_changing
from crds.quantity import parse_quantity
from kube.client import Obj
from kube.resources import NODES, PODS
from kube.store import Store

_LACKING: Final = re.compile(r"(\d+) Insufficient ([A-Za-z0-9._/-]*[A-Za-z0-9])")
"""The scheduler's words for a resource of which that many nodes have too little left."""
_NODES: Final = re.compile(r"0/(?P<number>\d+) nodes are available")
_IN_THE_WAY: Final = re.compile(
    "Too many pods|anti-affinity rules|topology spread constraints|ReadWriteOncePod access mode"
)
"""The scheduler's words for a node on which other pods, such as the earlier one, are in the way."""
_OVER_QUOTA: Final = re.compile(r"exceeded quota: [^,]*, requested: (?P<requested>.*), used: ")
"""The API server's words for a quota, with the resources of which it has too little left."""
_TEMPLATE: Final = "pod-template-hash"
"""Label by which a Deployment tells the pods of its templates apart."""


def _build_rolling_update(*, surge: int, unavailable: int) -> Obj:
    # Stated in full: a change to Recreate must remove these fields, or it is refused.
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}


SURGE: Final = _build_rolling_update(surge=1, unavailable=0)
KUEUE_SECONDS: Final = 20.0
"""Time for which a new pod waits for Kueue before earlier ones make way: each pod waits for a moment."""
RECREATE: Final[Obj] = {"type": "Recreate"}


class Replacement(NamedTuple):
    """The way in which the pods of a Deployment are replaced."""

    strategy: Obj
    lacks_room: bool = False
    """True if a new pod has no room, and would not fit in the place of an earlier one."""
    again_seconds: float | None = None
    """Time after which the decision may be another one."""


def choose_first_strategy(node: str, replicas: int) -> Obj:
    """Return the strategy with which a change of a template begins.

    `node` is the one that has the copy of weights, or empty if pods may run on any: then a new pod comes first.
    """
    if not node:
        return SURGE
    return RECREATE if replicas == 1 else _build_rolling_update(surge=0, unavailable=1)


def continue_rollout(observed: ObservedDeployment, pods: ServicePods, replicas: int, store: Store) -> Replacement:
    """Return how the pods of a Deployment are replaced from now on, by what became of the last change of its template.

    A change begins with SURGE: one new pod more, and no earlier pod ends before it is ready. If the scheduler refuses
    the new pod for lack of room, but it would fit in the place of an earlier one, earlier pods make way: maxSurge 0,
    and some may be unavailable. If it would fit nowhere, the earlier ones serve on, and `lacks_room` says so. For pods
    that wait for the queue, `limit_unavailable` decides how many may be unavailable.

    Args:
        observed: the Deployment, which is for no copy of weights.
        pods: all pods of its service.
        replicas: pods that it should have.
        store: has the nodes.
    """
    # The present strategy tells how far the change has come: with maxSurge 0, earlier pods make way.
    rolling: Obj = (observed.obj["spec"].get("strategy") or {}).get("rollingUpdate") or {}
    placed, is_queued = observed.list_placed(), has_gate(observed.obj)
    # One earlier pod makes way at a time. Replicas that never had room are unavailable already, so they come on top.
    most = 1 + max(0, replicas - len(placed) - pods.ending)

    # 1. If earlier pods make way already, they go on doing so.
    if rolling.get("maxSurge") == 0 and not is_queued:
        unavailable = _limit_unavailable(rolling.get("maxUnavailable"), observed, replicas, most)
        return Replacement(_build_rolling_update(surge=0, unavailable=unavailable))

    # 2. Until the Deployment's controller has seen the change, refusals are those of an earlier one.
    if not _has_controller_seen(observed.obj):
        # Earlier pods that wait, or make way for a nominated one, may still do so.
        return Replacement(_keep_strategy(rolling) if is_queued else SURGE)

    # 3. For each refusal of a new pod, by the scheduler or a quota: would the pod fit in the place of an earlier one?
    pairs = _pair_refused_with_earlier(observed, placed)
    refusal_fits = [_fits_in_place_of_one(new, earlier, placed, store) for new, earlier in pairs]
    # The report of a refusal outlives it for a moment: nothing is refused if all pods are there.
    is_missing_a_pod = len(placed) + sum(not node_of(pod) for pod in observed.pods) <= replicas
    if is_missing_a_pod and is_changing(observed.obj) and (exceeded := _read_exceeded_quota(observed.obj)):
        asked = sum_requests(observed.obj["spec"]["template"]["spec"])
        # A pod counts for a quota although no node has room for it.
        counted = [*placed, *filter(waits_for_node, observed.pods)]
        refusal_fits += [_asks_no_more(asked, sum_requests(earlier["spec"]), exceeded) for earlier in counted]

    # 4. Earlier pods make way if a refused pod would fit. A pod that ends makes room: until then no refusal is final.
    would_fit = any(refusal_fits)
    lacks_room = bool(refusal_fits) and not would_fit and not pods.leaving
    if is_queued:
        # None: there are pods of one template alone.
        allowed = limit_unavailable(observed.pods, replicas - pods.ending, is_refused=would_fit)
        strategy = _keep_strategy(rolling) if allowed is None else _build_rolling_update(surge=1, unavailable=allowed)
        return Replacement(strategy, lacks_room=lacks_room)
    if would_fit and not pods.leaving:
        return Replacement(_build_rolling_update(surge=0, unavailable=most))
    return Replacement(SURGE, lacks_room=lacks_room)


def make_way_for_kueue(observed: ObservedDeployment, replicas: int, now: datetime) -> Replacement | None:
    """Return how a change goes on whose new pods wait for Kueue; None: none waits beside earlier ones that serve.

    Kueue gives the quota of an earlier pod to a new one only after the earlier one has ended. So after `KUEUE_SECONDS`
    one earlier pod makes way: one replica more may be unavailable than those without a node, which are anyway.
    """
    placed = observed.list_placed()
    placed_templates = {_template_of(pod) for pod in placed}
    # Pods that wait while a pod of another template has a node, which can only be an earlier one.
    waiting = [pod for pod in observed.pods if waits_for_kueue(pod) and placed_templates - {_template_of(pod)}]
    if not waiting:
        return None

    # Any new pod waits for Kueue for a moment, so the earlier ones stay for some time.
    since = min(datetime.fromisoformat(pod["metadata"]["creationTimestamp"]) for pod in waiting)
    seconds_left = KUEUE_SECONDS - (now - since).total_seconds()
    if seconds_left > 0:
        return Replacement(SURGE, again_seconds=seconds_left)

    # One earlier pod makes way.
    unplaced = max(0, replicas - len(placed))
    return Replacement(_build_rolling_update(surge=0, unavailable=1 + unplaced))


def _keep_strategy(rolling: Obj) -> Obj:
    """Return the present strategy if it is one of those for pods that wait for the queue, else SURGE to begin with."""
    # For the queue there is always one new pod more, and a number of pods that may be unavailable.
    unavailable = rolling.get("maxUnavailable")
    if rolling.get("maxSurge") == 1 and isinstance(unavailable, int):
        return _build_rolling_update(surge=1, unavailable=unavailable)
    return SURGE


def _limit_unavailable(present: object, observed: ObservedDeployment, replicas: int, most: int) -> int:
    """Return maxUnavailable while earlier pods make way: the `present` value, adjusted to a new number of replicas.

    Kubernetes keeps `replicas` less this number of pods serving. Scaling must not change how many serve, since added
    replicas may have no room, so the value grows and shrinks with `replicas`. At least 1, and no more than `most`.
    """
    if not isinstance(present, int):  # absent, or a percentage that somebody else wrote
        return most

    # The replicas that scaling adds, negative if it removes some.
    added = replicas - observed.replicas
    if added > 0 and not is_changing(observed.obj):
        added = 0  # the change is rolled out: no earlier pod is left that would have to make way
    return max(1, min(present + added, most))


def _has_controller_seen(deployment: Obj) -> bool:
    """Return whether a status is of the present spec; True also if no pod is ready, so that a mistake ends none."""
    status = deployment.get("status") or {}
    is_current = status.get("observedGeneration") == deployment["metadata"].get("generation")
    return is_current or not status.get("readyReplicas")


def _pair_refused_with_earlier(observed: ObservedDeployment, placed: Sequence[Obj]) -> list[tuple[Obj, Sequence[Obj]]]:
    """Return pods that the scheduler refused, each with the placed pods that might make way for it.

    Pods of one template ask for the same, so one of each template is enough; pods of other templates may make way.
    """
    status = observed.obj.get("status") or {}
    # updatedReplicas counts the pods of the present template. If there is none yet, a refused pod is one of the change
    # before, which is about to be deleted.
    if status.get("readyReplicas") and not status.get("updatedReplicas"):
        return []

    refused = {_template_of(pod): pod for pod in observed.pods if is_refused(pod)}
    pairs = ((new, [pod for pod in placed if _template_of(pod) != name]) for name, new in refused.items())
    return [(new, earlier) for new, earlier in pairs if earlier]


def _template_of(pod: Obj) -> str:
    template: str = pod["metadata"]["labels"].get(_TEMPLATE, "")
    return template


def _fits_in_place_of_one(new: Obj, earlier: Sequence[Obj], placed: Sequence[Obj], store: Store) -> bool:
    """Return whether a refused pod would fit on the node of one of these earlier pods if that one ended.

    The node must admit it (selector, taints), have its volume if that is on one node (`placed` pods show which), and
    have enough of each resource for it.
    """
    # The resources that all of our pods on a node request, by the name of the node.
    taken_by_ours: dict[str, Mapping[str, Decimal]] = {}
    for pod in earlier:
        name = node_of(pod)
        node = store.get(NODES, name)
        if node is None or not admits(node, new["spec"]) or not may_follow(new, pod, placed):
            continue

        if name not in taken_by_ours:
            our_pods = store.by_index(PODS, NODE_INDEX, name)
            requests = (store.derive(PODS, our, "requests", partial(sum_requests, our["spec"])) for our in our_pods)
            taken_by_ours[name] = add_up(requests)
        if _fits_on_node(new, pod, node, taken_by_ours[name]):
            return True
    return False


def _fits_on_node(new: Obj, earlier: Obj, node: Obj, taken: Mapping[str, Decimal]) -> bool:
    """Return whether a refused pod would fit if an earlier one on this node ended, as far as is known.

    The scheduler's message, such as "0/3 nodes are available: 3 Insufficient memory", says what was lacking. `taken`
    are the resources of all of our pods on the node; what pods of others take is not known. So of what was lacking, the
    new pod may ask for no more than the earlier one gives back; of devices, for all that our other pods leave free.
    """
    message = next(
        condition.get("message", "") for condition in new["status"]["conditions"] if condition["type"] == "PodScheduled"
    )
    # 1. The resources that nodes lack, by name, with the number of these nodes; a device's name has a slash.
    # Behind "preemption:" is why it would not help to evict others, which is about no lack.
    lacking = {resource: count for count, resource in _LACKING.findall(message.partition("preemption:")[0])}
    if not lacking:  # no resource, but perhaps other pods are in the way, such as the earlier one
        return _IN_THE_WAY.search(message) is not None

    # 2. On this node there must be enough of each beside our other pods.
    asked, freed = sum_requests(new["spec"]), sum_requests(earlier["spec"])
    allocatable: Mapping[str, str] = node.get("status", {}).get("allocatable") or {}
    for resource in lacking:
        free = (parse_quantity(allocatable.get(resource, "0")) or 0) - taken.get(resource, 0)
        available = free + freed.get(resource, 0)
        # A resource that the node does not state is compared only if it is a device, of which the node then has none.
        if asked.get(resource, 0) > available and ("/" in resource or resource in allocatable):
            return False

    # 3. Of all but devices, it must not ask for more than the earlier pod. If devices are lacking, too, the nodes that
    # lack something else may be other ones, unless all nodes lack it.
    if not any("/" in resource for resource in lacking):
        return _asks_no_more(asked, freed, set(lacking))
    match = _NODES.search(message)
    node_count = match["number"] if match is not None else ""
    lacking_everywhere = {
        resource for resource, count in lacking.items() if "/" not in resource and count == node_count
    }
    return _asks_no_more(asked, freed, lacking_everywhere)


def _asks_no_more(asked: Mapping[str, Decimal], earlier: Mapping[str, Decimal], resources: set[str]) -> bool:
    return all(asked.get(resource, 0) <= earlier.get(resource, 0) for resource in resources)


def _read_exceeded_quota(deployment: Obj) -> set[str]:
    """Return the resources of which a quota has too little left for another pod; empty if no quota refuses one."""
    for condition in deployment.get("status", {}).get("conditions", ()):
        # _OVER_QUOTA: the API server's words, with the resources that a new pod requests, such as "requests.cpu=4".
        match = _OVER_QUOTA.search(condition.get("message", "")) if condition["type"] == "ReplicaFailure" else None
        if match is not None:
            names = (part.partition("=")[0] for part in match["requested"].split(","))
            return {name.removeprefix("requests.").removeprefix("limits.") for name in names}
    return set()
