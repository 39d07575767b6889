"""The node of another copy: what its Job reserves, and the nodes that it leaves out.

The scheduler chooses the node by what a replica asks for, so that a replica fits where the weights are.
"""

import hashlib
from collections.abc import Collection
from typing import Final

import msgspec

from controller.models.jobs import Placement, Reservation
from kube.client import Obj

_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_DIGITS: Final = 16


def reserve_elsewhere(reservation: Reservation, taken: Collection[str]) -> Reservation:
    """Return the reservation on a node that is not taken."""
    # The API allows one name in each requirement.
    left_out = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in sorted(taken)]
    return _join(reservation, left_out) if left_out else reservation


def reserve_on(node: str) -> Reservation:
    """Return the reservation of nothing but the node, for a volume that is there.

    The devices of a replica are still in use where its weights are replaced, and the service may ask for others by now.
    """
    return _join(Reservation(), [{"key": "metadata.name", "operator": "In", "values": [node]}])


def digest_placement(placement: Placement, reservation: Reservation) -> str:
    """Return a digest of all that decides on which nodes a Job's pod fits."""
    encoded = msgspec.json.encode((placement, reservation), order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:_DIGITS]


def _join(reservation: Reservation, fields: list[Obj]) -> Reservation:
    """Return the reservation with conditions on the node's name in each of its alternatives."""
    nodes = reservation.affinity.get("nodeAffinity", {})
    terms = nodes.get(_REQUIRED, {}).get("nodeSelectorTerms") or [{"matchFields": []}]
    # An empty term matches no node, and would match some with a condition.
    joined = [{**term, "matchFields": [*term.get("matchFields", ()), *fields]} if term else term for term in terms]
    affinity = {**reservation.affinity, "nodeAffinity": {**nodes, _REQUIRED: {"nodeSelectorTerms": joined}}}
    return msgspec.structs.replace(reservation, affinity=affinity)
