"""The choice of copies: the number of a service's replicas beside each copy of its Model's weights.

A copy is on one node, so each choice of a copy is a choice of a node, and Kubernetes' scheduler has the last word: it
may refuse a pod because the node has no room. What runs stays where it is. A replica that is refused is tried beside
another copy, and its refused pod stays meanwhile: it is the memory by which no copy is tried twice in a row, and it
starts if its node gets room first. When all replicas have a node, such pods go.
"""

from collections.abc import Mapping
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
    """Return how many pods to ask for beside each copy of the weights; a copy with none is left out.

    A pod beside a copy runs on the one node of the copy, so this chooses nodes. A pod is placed if it has a node,
    refused if the scheduler found no room there, and else undecided. Placed pods stay. For a refused one, another pod
    is tried beside another copy; the refused one stays as a mark that its node was tried, until all replicas have a
    node. The same pods give the same answer, and once the answer has been applied, it stays.

    Args:
        replicas: replicas that are wanted.
        copies: the pods beside each usable copy, by name.
        coming: number of copies that are still being made: each will take its share, which nobody else gets.
    """
    pods = {name: copies[name] for name in sorted(copies)}
    # Of each copy, no more pods count than its Deployment asks for (`copy.replicas`).
    placed = {name: min(copy.placed, copy.replicas) for name, copy in pods.items()}
    refused = {name: min(copy.refused, copy.replicas - placed[name]) for name, copy in pods.items()}

    # 1. Keep as many of the placed pods as are wanted, ready ones first.
    ready = {name: min(copy.ready, placed[name]) for name, copy in pods.items()}
    kept = _fill_up(replicas, dict.fromkeys(pods, 0), ready)
    kept = _fill_up(replicas, kept, placed)
    missing = replicas - sum(kept.values())

    # 2. Add the pods that Deployments ask for and about which the scheduler has not decided yet.
    undecided = {name: copy.replicas - placed[name] - refused[name] for name, copy in pods.items()}
    with_undecided = _fill_up(replicas, kept, {name: kept[name] + undecided[name] for name in pods})

    # 3. Give the replicas still missing to the least loaded copies: none to one that refused, some to copies to come.
    # The share of these is left out of the result: those replicas wait.
    limits = {name: with_undecided[name] if copy.refused else replicas for name, copy in pods.items()}
    coming_names = [f"coming/{number}" for number in range(coming)]
    with_new = _fill_up(
        replicas, with_undecided | dict.fromkeys(coming_names, 0), limits | dict.fromkeys(coming_names, replicas)
    )

    # 4. Add refused pods while replicas are missing. Beside undecided pods all refused ones stay, because scaling down
    # might end one of the undecided.
    chosen = {}
    for name in pods:
        has_undecided = with_undecided[name] > kept[name]
        chosen[name] = with_new[name] + (refused[name] if has_undecided else min(refused[name], missing))
    return {name: number for name, number in chosen.items() if number}


def _fill_up(total: int, loads: Mapping[str, int], limits: Mapping[str, int]) -> dict[str, int]:
    """Return loads that are filled up to `total` together, the least loaded first and none above its limit."""
    filled = dict(loads)
    for _ in range(total - sum(loads.values())):
        names_with_room = [name for name, load in filled.items() if load < limits[name]]
        if not names_with_room:
            break
        least_loaded = min(names_with_room, key=filled.__getitem__)
        filled[least_loaded] += 1
    return filled
