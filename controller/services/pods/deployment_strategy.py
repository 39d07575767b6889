"""The strategy of a Deployment: a new pod is ready before an earlier one ends, or takes its place.

Only the scheduler knows whether there is room for both, so it is asked: each change of a template begins with one pod
more than wanted. If that is refused for lack of room, earlier pods make way, one at a time, provided that the new one
fits in the place of one. Else they serve on: a mistake in a request must not end what runs.

The pods beside a copy of weights are on one node, which seldom has room for one more: there, earlier pods make way.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final, NamedTuple

from controller.reconcile.triggers import is_refused
from controller.services.pods.observed_deployments import ObservedDeployment, ServicePods, node_of
from controller.services.pods.template_rollout import is_changing
from crds.quantity import parse_quantity
from kube.client import Obj
from kube.resources import NODES
from kube.store import Store

_LACKING: Final = re.compile(r"Insufficient ([A-Za-z0-9./-]*[A-Za-z0-9])")
"""The scheduler's words for a resource of which a node has too little left."""
_IN_THE_WAY: Final = re.compile("anti-affinity rules|topology spread constraints")
"""The scheduler's words for a node on which other pods, such as the earlier one, are in the way."""
_OVER_QUOTA: Final = re.compile(r"exceeded quota: [^,]*, requested: (.*), used: ")
"""The API server's words for a quota, with the resources of which it has too little left."""
_TEMPLATE: Final = "pod-template-hash"
"""Label by which a Deployment tells the pods of its templates apart."""


def _roll(surge: int, unavailable: int) -> Obj:
    # Stated in full: a change to Recreate must remove these fields, or it is refused.
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}


SURGE: Final = _roll(1, 0)


class Replacement(NamedTuple):
    """The way in which the pods of a Deployment are replaced."""

    strategy: Obj
    lacks_room: bool = False
    """True if a new pod has no room, and would not fit in the place of an earlier one."""


def begin(node: str, replicas: int) -> Obj:
    """Return the strategy with which a change begins; `node` has the copy of weights, if there are copies."""
    if not node:
        return SURGE
    return {"type": "Recreate"} if replicas == 1 else _roll(0, 1)


def go_on(observed: ObservedDeployment, pods: ServicePods, store: Store) -> Replacement:
    """Return how the last change of a Deployment goes on; at rest, when nothing is replaced, its strategy stays.

    Args:
        observed: the Deployment, which is for no copy of weights.
        pods: all pods of its service.
        store: has the nodes.
    """
    present: Obj = observed.obj["spec"].get("strategy") or {}
    # Earlier versions recreated a single pod. What anybody else wrote is overruled.
    if present.get("type") == "Recreate" or (present.get("rollingUpdate") or {}).get("maxSurge") == 0:
        return Replacement(present)
    placed = observed.list_placed()
    fitting = [
        _fits_on_node(new, earlier, store)
        for new in filter(is_refused, observed.pods)
        for earlier in placed
        if new["metadata"]["labels"].get(_TEMPLATE) != earlier["metadata"]["labels"].get(_TEMPLATE)
    ]
    if is_changing(observed.obj) and (exceeded := _read_exceeded_quota(observed.obj)):
        asked = sum_requests(observed.obj["spec"]["template"]["spec"])
        fitting += [_asks_no_more(asked, sum_requests(earlier["spec"]), exceeded) for earlier in placed]
    # A pod that ends makes room: until it has, no refusal is final.
    if pods.leaving or not any(fitting):
        return Replacement(SURGE, lacks_room=bool(fitting) and not pods.leaving)
    # Replicas that never had room are unavailable already: without them, one earlier pod less must be allowed.
    return Replacement(_roll(0, 1 + max(0, observed.replicas - len(placed))))


def _fits_on_node(new: Obj, earlier: Obj, store: Store) -> bool:
    """Return whether a refused pod fits in the place of an earlier one, as far as that can be known.

    Of devices, which are what is scarce, it may ask for more than the earlier pod if their node has as many.
    """
    message = next(each.get("message", "") for each in new["status"]["conditions"] if each["type"] == "PodScheduled")
    lacking = set(_LACKING.findall(message))
    asked = sum_requests(new["spec"])
    devices = {resource for resource in lacking if "/" in resource}
    if not devices:
        is_about_room = bool(lacking) or _IN_THE_WAY.search(message) is not None
        return is_about_room and _asks_no_more(asked, sum_requests(earlier["spec"]), lacking)
    node = store.get(NODES, node_of(earlier)) or {}
    allocatable: Mapping[str, str] = node.get("status", {}).get("allocatable") or {}
    return all(asked.get(each, 0) <= (parse_quantity(allocatable.get(each, "0")) or 0) for each in devices)


def _asks_no_more(asked: Mapping[str, Decimal], earlier: Mapping[str, Decimal], resources: set[str]) -> bool:
    return all(asked.get(each, 0) <= earlier.get(each, 0) for each in resources)


def _read_exceeded_quota(deployment: Obj) -> set[str]:
    """Return the resources of which a quota has too little left for another pod."""
    for condition in deployment.get("status", {}).get("conditions", ()):
        found = _OVER_QUOTA.search(condition.get("message", "")) if condition["type"] == "ReplicaFailure" else None
        if found is not None:
            names = (each.partition("=")[0] for each in found[1].split(","))
            return {name.removeprefix("requests.").removeprefix("limits.") for name in names}
    return set()


def sum_requests(pod_spec: Obj) -> dict[str, Decimal]:
    """Return the requests of all containers of a pod; those of init containers are sidecars."""
    total: dict[str, Decimal] = {}
    for container in (*pod_spec.get("initContainers", ()), *pod_spec.get("containers", ())):
        for resource, quantity in container.get("resources", {}).get("requests", {}).items():
            total[resource] = total.get(resource, Decimal()) + (parse_quantity(quantity) or 0)
    return total
