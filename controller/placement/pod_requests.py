"""The resources that a pod takes, as Kubernetes' scheduler counts them, and the node on which it takes them.

A sidecar, which is an init container that runs on, counts beside the containers; another init container runs before
them, so the pod needs the larger of both. What a pod states for all of its containers outranks their sum. A change of a
running pod's resources counts as soon as it is in the spec, which the kubelet may follow later.
"""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Final

from controller.placement.units import CPU, MEMORY, PODS, Amounts
from crds.meta import ENQUEUED_AT, QUEUE_GATE
from crds.quantity import parse_quantity
from kube.client import Obj

_ENDED: Final = frozenset({"Succeeded", "Failed"})
_OF_WHOLE_PODS: Final = (CPU, MEMORY, "hugepages-")
"""Resources that a pod can state for all of its containers; the last one is a prefix."""
_MILLI: Final = 1000
_ZERO: Final = Decimal()


def sum_requests(pod_spec: Obj) -> dict[str, Decimal]:
    """Return the requests of a pod."""
    # 1. Sum up the containers that run at once, and find the most that init containers take at one time.
    running = add_up(map(_requests_of, pod_spec.get("containers") or ()))
    starting: dict[str, Decimal] = {}
    sidecars: dict[str, Decimal] = {}
    for container in pod_spec.get("initContainers") or ():
        needed = add_up((sidecars, _requests_of(container)))
        if container.get("restartPolicy") == "Always":
            sidecars = needed  # it runs on, beside all later ones
        starting = _take_larger(starting, needed)
    total = _take_larger(add_up((running, sidecars)), starting)
    # 2. What the pod states for all of its containers (CPU, memory, huge pages) outranks that; its overhead is added.
    total |= {name: amount for name, amount in _requests_of(pod_spec).items() if name.startswith(_OF_WHOLE_PODS)}
    return add_up((total, _parse(pod_spec.get("overhead") or {})))


def count_requests(pod_spec: Obj) -> Amounts:
    """Return what a pod takes of a node: its requests as whole numbers, and its place among the node's pods."""
    return count_amounts(sum_requests(pod_spec)) | {PODS: 1}


def count_amounts(quantities: Mapping[str, Decimal]) -> dict[str, int]:
    """Return quantities as whole numbers, rounded up: CPU in thousandths, all else in units."""
    return {name: math.ceil(amount * _MILLI if name == CPU else amount) for name, amount in quantities.items()}


def count_allocatable(allocatable: Mapping[str, object]) -> dict[str, int]:
    """Return what a node has for pods as whole numbers, rounded down; what is no quantity counts as none."""
    amounts = {name: _quantity(value) for name, value in allocatable.items()}
    return {name: math.floor(amount * _MILLI if name == CPU else amount) for name, amount in amounts.items()}


def add_up(requests: Iterable[Mapping[str, Decimal]]) -> dict[str, Decimal]:
    """Return the sums by resource."""
    total: dict[str, Decimal] = {}
    for request in requests:
        for resource, quantity in request.items():
            total[resource] = total.get(resource, _ZERO) + quantity
    return total


def find_taken_node(pod: Obj) -> str:
    """Return the node on which a pod takes room; empty if it takes none, or if it is not known where.

    A pod that is bound takes room until it has ended, also while it is being deleted. One that the queue has pinned to
    a node takes it there before it is bound, but not if it is being deleted: then it can be bound no more. The queue
    notes the place of each pod that it admits: a tenant may pin pods, too, but no note of the queue is its own.
    """
    spec = pod.get("spec") or {}
    if (pod.get("status") or {}).get("phase") in _ENDED:
        return ""
    if node := spec.get("nodeName"):
        return str(node)
    # It is not bound. `is_noted`: the queue has written the annotation ENQUEUED_AT, which it does with each admission.
    if "deletionTimestamp" in pod["metadata"] or is_gated(spec) or not is_noted(pod):
        return ""
    return find_pinned_node(spec)


def is_noted(pod: Obj) -> bool:
    """Return whether the queue has noted the place of a pod, as it does at the latest when it admits the pod."""
    return ENQUEUED_AT in (pod["metadata"].get("annotations") or {})


def is_gated(pod_spec: Obj) -> bool:
    """Return whether a pod waits for the queue."""
    return any(gate["name"] == QUEUE_GATE for gate in pod_spec.get("schedulingGates") or ())


def find_pinned_node(pod_spec: Obj) -> str:
    """Return the only node to which the required node affinity of a pod pins it by name; empty if it does not.

    A pod needs to meet one term only. The queue pins each term; one that a tenant had pinned to another node before
    names two nodes then, and is met by none, so it does not count.
    """
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    names_of_terms = {_names_of_term(term) for term in required.get("nodeSelectorTerms") or ()}
    # A term that names two nodes is met by none, so that the others decide.
    satisfiable = [names for names in names_of_terms if len(names) <= 1]
    if len(satisfiable) != 1:
        return ""
    return next(iter(satisfiable[0]), "")


def _names_of_term(term: Obj) -> frozenset[str]:
    """Return the nodes that a term names, all of which a node would have to be."""
    return frozenset(
        requirement["values"][0]
        for requirement in term.get("matchFields") or ()
        if requirement["key"] == "metadata.name"
        and requirement["operator"] == "In"
        and len(requirement.get("values") or ()) == 1
    )


def _requests_of(spec: Obj) -> dict[str, Decimal]:
    """Return the requests of a container, or those that a pod states as a whole."""
    return _parse((spec.get("resources") or {}).get("requests") or {})


def _parse(quantities: Mapping[str, object]) -> dict[str, Decimal]:
    """Return quantities as numbers, by resource."""
    return {name: _quantity(value) for name, value in quantities.items()}


def _quantity(value: object) -> Decimal:
    """Return a quantity as a number; 0 if it cannot be read."""
    return parse_quantity(value) or _ZERO


def _take_larger(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    """Return the larger amount of each resource."""
    return {name: max(one.get(name, _ZERO), other.get(name, _ZERO)) for name in {**one, **other}}
