"""The replicas of a service, in pods and on hosts, and the next steps about them.

Only a replica of the wanted spec counts as ready: while an edit rolls out, replicas of the earlier spec do not count,
and if the two cannot be distinguished, the lower count is reported.
"""

from collections.abc import Sequence

import msgspec

from controller.reconcile.plan import Patch, Ref
from controller.services.diagnosis import pick_most_severe
from controller.services.preconditions import ServiceProblem
from kube.client import Obj
from kube.resources import Resource


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of a service, of either kind, and the next steps about them."""

    total: int
    """All that exist, also those that are being replaced."""
    ready: tuple[str, ...] = ()
    """Sorted uids of the ready replicas of the wanted spec."""
    available: int = 0
    """Ready replicas of any spec: those of an earlier one serve until the wanted ones do."""
    nodes: frozenset[str] = frozenset()
    """Nodes and hosts that run a replica."""
    problem: ServiceProblem | None = None
    """The most severe reason why a replica is not ready."""
    apply: tuple[tuple[Resource, Obj], ...] = ()
    keep: tuple[tuple[Resource, Obj], ...] = ()
    """Existing objects whose template stays as it is for now."""
    awaiting: tuple[str, ...] = ()
    """Names of Deployments that an update of Pomona will change when it is their turn."""
    create: tuple[tuple[Resource, Obj], ...] = ()
    """MetalProcesses."""
    patch: tuple[Patch, ...] = ()
    delete: tuple[Ref, ...] = ()
    """MetalProcesses, and Deployments that are made anew, because Kueue lets no queue be edited."""
    again_seconds: float | None = None
    """Decide again after this time even if no watch reports a change."""


def combine_replicas(parts: Sequence[Replicas]) -> Replicas:
    """Return the replicas of a service together, of which some are in pods and some on hosts.

    Counts add up, the most severe problem counts, and the steps of all parts follow each other.
    """
    pauses = [part.again_seconds for part in parts if part.again_seconds is not None]
    return Replicas(
        total=sum(part.total for part in parts),
        ready=tuple(uid for part in parts for uid in part.ready),
        available=sum(part.available for part in parts),
        nodes=frozenset(node for part in parts for node in part.nodes),
        problem=pick_most_severe([part.problem for part in parts]),
        apply=tuple(obj for part in parts for obj in part.apply),
        keep=tuple(obj for part in parts for obj in part.keep),
        awaiting=tuple(name for part in parts for name in part.awaiting),
        create=tuple(obj for part in parts for obj in part.create),
        patch=tuple(patch for part in parts for patch in part.patch),
        delete=tuple(ref for part in parts for ref in part.delete),
        again_seconds=min(pauses, default=None),
    )
