"""The choice of copies: the number of a service's replicas beside each copy of its Model's weights.

A copy is on one node, so each choice of a copy is a choice of a node, and Kubernetes' scheduler has the last word: it
may refuse a pod because the node has no room. What runs stays where it is. A replica that is refused is tried beside
another copy, and its refused pod stays meanwhile: it is the memory by which no copy is tried twice in a row, and it
starts if its node gets room first. When all replicas have a node, such pods go.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class CopyPods(NamedTuple):
    """The pods of one service beside one copy."""

    replicas: int = 0
    """Pods that its Deployment asks for; 0 if it has none."""
    placed: int = 0
    """Pods that have a node."""
    ready: int = 0
    """Pods that have a node and are ready."""
    refused: int = 0
    """Pods for which the scheduler found no room."""


def choose_copies(replicas: int, copies: Mapping[str, CopyPods], coming: int = 0) -> dict[str, int]:
    """Return the replicas beside each copy, refused ones included; a copy with none is left out.

    The same pods give the same answer, and what has been applied once changes nothing.

    Args:
        replicas: replicas that are wanted.
        copies: the pods beside each usable copy, by name.
        coming: copies that are being made and will take their share, so that these replicas wait for them.
    """
    names = sorted(copies)
    pods = [copies[name] for name in names]
    placed = [min(pod.placed, pod.replicas) for pod in pods]
    refused = [
        min(copy_pods.refused, copy_pods.replicas - there) for copy_pods, there in zip(pods, placed, strict=True)
    ]
    # Of what runs, as much is kept as is wanted: ready pods first.
    kept = _spread(
        replicas, [0] * len(pods), [min(copy_pods.ready, there) for copy_pods, there in zip(pods, placed, strict=True)]
    )
    kept = _spread(replicas, kept, placed)
    missing = replicas - sum(kept)
    # The scheduler has decided about placed and refused pods, and not yet about the rest that Deployments ask for.
    settled = [there + tries for there, tries in zip(placed, refused, strict=True)]
    undecided = [copy_pods.replicas - decided for copy_pods, decided in zip(pods, settled, strict=True)]
    counted = _spread(replicas, kept, [there + more for there, more in zip(kept, undecided, strict=True)])
    # The replicas still missing go to the least loaded copies: not to one that refused, and some to copies to come.
    limits = [count if copy_pods.refused else replicas for copy_pods, count in zip(pods, counted, strict=True)]
    given = _spread(replicas, [*counted, *[0] * coming], [*limits, *[replicas] * coming])[: len(pods)]
    # Refused pods stay while replicas are missing. Beside undecided ones all stay: scaling down might end one of those.
    kept_refused = [
        tries if count > there else min(tries, missing)
        for tries, count, there in zip(refused, counted, kept, strict=True)
    ]
    chosen = {name: count + tries for name, count, tries in zip(names, given, kept_refused, strict=True)}
    return {name: count for name, count in chosen.items() if count}


def _spread(total: int, loads: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Return loads that are filled up to `total` together, the least loaded first and none above its limit."""
    filled = list(loads)
    for _ in range(total - sum(loads)):
        free = [place for place, limit in enumerate(limits) if filled[place] < limit]
        if not free:
            break
        filled[min(free, key=filled.__getitem__)] += 1
    return filled
