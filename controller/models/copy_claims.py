"""The claims of a Model with a copy on each node, by what becomes of them; and the number of copies that replicas need.

Earlier weights stay on a node while pods mount them there, until their successor on that node is verified.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from controller.models import claims
from controller.models.copy_observation import NODE, CopyConsumer, stated_node
from controller.models.decision import InspectedModel
from controller.models.volume import WEIGHTS
from crds.cache import NodeCopy
from crds.inferenceservice import wanted_replicas
from kube.kinds import PersistentVolumeClaim

MOST_COPIES: Final = 64


class CopyClaim(NamedTuple):
    """One claim of the Model."""

    claim: PersistentVolumeClaim
    node: str
    """Node that its volume is on, or will be; empty until the scheduler has chosen one."""
    copy: NodeCopy | None
    """The verified weights on it, as the status has them."""
    fits: bool
    """True if it is for the weights, the class and the size that the Model states now."""
    is_mounted: bool
    is_refused: bool = False
    """True if the scheduler finds no place for the pod that fetches to it."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.claim.metadata.name

    @property
    def is_made_for_node(self) -> bool:
        """True if the controller has chosen its node, and not the scheduler."""
        return NODE in self.claim.metadata.annotations

    @property
    def age(self) -> tuple[str, str]:
        """Creation time and name, by which claims are sorted from the oldest to the newest."""
        return self.claim.metadata.creation_timestamp, self.name


class CopyDemand(NamedTuple):
    """The number of copies that replicas need, and the service for which the next one is made."""

    number: int
    consumer: CopyConsumer | None = None


class SortedClaims(NamedTuple):
    """The claims of a Model by what becomes of them."""

    ready: Sequence[CopyClaim] = ()
    """Verified copies of the wanted weights, one on a node."""
    earlier: Sequence[CopyClaim] = ()
    """Verified copies of other weights, class or size, from which pods serve meanwhile."""
    making: Sequence[CopyClaim] = ()
    """Claims that have a node, to which the weights are being fetched, and those whose node takes no pod for that."""
    unplaced: Sequence[CopyClaim] = ()
    """The same without a node."""
    deleted: Sequence[CopyClaim] = ()
    """Claims that nothing needs once no pod mounts them."""
    in_use: frozenset[str] = frozenset()
    """Names of the claims of copies that are mounted or that a replica needs."""

    @property
    def taken_nodes(self) -> frozenset[str]:
        """Nodes that have, or get, a copy of the wanted weights."""
        return frozenset(claim.node for claim in (*self.ready, *self.making))


def survey_claims(inspected: InspectedModel, path: str) -> list[CopyClaim]:
    """Return the claims of the Model that are not being deleted, the oldest first, with what each is good for.

    `path` is that of the wanted weights. A claim fits if it is for these, has the stated class and size, and its node
    exists. It has no `copy` if nothing on it is verified, or if its node is gone. A copy of other weights does not
    count on a claim that fits, which gets the wanted ones; nor after an edit of the Model, as the user wants no earlier
    weights then.
    """
    model, observed, facts = inspected.model, inspected.observed, inspected.facts
    cache, verified = model.spec.cache, {copy.claim: copy for copy in model.status.copies}
    surveyed = []
    for claim in observed.claims.claims:
        name, copy = claim.metadata.name, verified.get(claim.metadata.uid)

        # Its node: where its copy is, else where a pod with it runs, else the node that it states.
        node = copy.node if copy is not None else observed.copies.pod_nodes.get(name) or stated_node(claim)
        is_gone = node in observed.copies.gone_nodes

        # It fits if it is as the Model states it now, and its node exists.
        is_of_class = claim.spec.storage_class_name == cache.storage_class_name
        is_for_weights = claim.metadata.annotations.get(WEIGHTS) == path
        fits = is_for_weights and is_of_class and not claims.is_too_small(claim, cache) and not is_gone

        # Its copy, unless that does not count.
        has_wanted_weights = copy is not None and (copy.path, copy.sha256) == (path, facts.sha256)
        # A copy of other weights: the claim gets the wanted ones, or an edit has made the copy worthless.
        is_unwanted = not has_wanted_weights and (fits or inspected.is_edited)
        if is_gone or is_unwanted:
            copy = None

        is_mounted, is_refused = name in observed.claims.mounted, name in observed.copies.refused
        surveyed.append(CopyClaim(claim, node, copy, fits, is_mounted, is_refused))
    return sorted(surveyed, key=lambda claim: claim.age)


def list_ready(surveyed: Iterable[CopyClaim]) -> list[CopyClaim]:
    """Return the verified copies of the wanted weights, one for each node: a mounted one, else the oldest."""
    verified = (claim for claim in surveyed if claim.copy is not None and claim.fits)
    by_node: dict[str, CopyClaim] = {}
    for claim in sorted(verified, key=lambda claim: not claim.is_mounted):
        by_node.setdefault(claim.node, claim)
    return list(by_node.values())


def count_demand(consumers: Sequence[CopyConsumer], surveyed: Sequence[CopyClaim]) -> CopyDemand:
    """Return the number of copies that are needed, and the service for whose pods the next one is made.

    Services share copies, so the one with the most replicas decides: it needs one for each. One more than the ready
    copies is needed if the scheduler refuses pods of a service on the nodes of all ready copies. Its refusal does not
    count while pods with earlier weights are still on the node of a ready copy, because they are about to leave it.
    """
    # 1. One copy for each replica of the largest service.
    serving = [consumer for consumer in consumers if wanted_replicas(consumer.service) > 0]
    if not serving:
        return CopyDemand(0)
    largest = max(serving, key=lambda consumer: wanted_replicas(consumer.service))
    number = min(wanted_replicas(largest.service), MOST_COPIES)

    # 2. One more than there are, for a service whose pods find no room where the ready copies are.
    ready = list_ready(surveyed)
    ready_names = {claim.name for claim in ready}
    # Where pods still mount a copy of earlier weights.
    leaving_nodes = {claim.node for claim in surveyed if claim.is_mounted and not claim.fits}
    if ready and leaving_nodes.isdisjoint(claim.node for claim in ready):
        for consumer in serving:
            # `refused` names the claims on whose nodes a pod of the service finds no room.
            has_no_room = ready_names <= consumer.refused
            if has_no_room:
                return CopyDemand(min(max(number, len(ready) + 1), MOST_COPIES), consumer)
    return CopyDemand(number, largest)


def sort_claims(victims: Collection[str], surveyed: Sequence[CopyClaim], demand: CopyDemand) -> SortedClaims:
    """Decide what becomes of each claim: it stays, with the wanted or earlier weights, is fetched to, or is deleted.

    `victims` are the uids of the claims whose copies are to be evicted, because the cache of their node is full.
    """
    # 1. Verified copies of the wanted weights stay, except victims that no replica needs.
    ready = list_ready(surveyed)
    in_use = _list_in_use(ready, demand)
    ready = [claim for claim in ready if claim.name in in_use or claim.claim.metadata.uid not in victims]
    ready_nodes = {claim.node for claim in ready}
    other_claims = [claim for claim in surveyed if claim not in ready]

    # 2. Earlier weights stay where pods mount them and no ready copy is; without any ready copy, they all stay.
    earlier = [
        claim
        for claim in other_claims
        if claim.copy is not None
        and not claim.fits
        and (not ready or (claim.is_mounted and claim.node not in ready_nodes))
    ]
    in_use |= {claim.name for claim in earlier if claim.is_mounted or (not ready and demand.number)}

    # 3. Weights are fetched to as many further claims as copies are missing: on each node to the oldest one.
    unverified = [claim for claim in other_claims if claim.copy is None and claim.fits]
    # Reversed, so that the oldest claim of a node replaces the later ones.
    unverified_by_node = {
        claim.node: claim for claim in reversed(unverified) if claim.node and claim.node not in ready_nodes
    }
    missing_count = max(0, demand.number - len(ready))
    making = sorted(unverified_by_node.values(), key=lambda claim: claim.age)
    proceeding = [claim for claim in making if not claim.is_refused][:missing_count]
    # While the scheduler refuses the pod of a claim, another copy is made beside it. The refused pod stays, because the
    # refusal is read from its status.
    making = [*proceeding, *[claim for claim in making if claim.is_refused][:missing_count]]
    # One claim at most has no node yet: of two, the scheduler could choose the same node.
    unplaced = [claim for claim in unverified if not claim.node][:1] if missing_count > len(proceeding) else []

    # 4. All others are deleted.
    kept = [*ready, *earlier, *making, *unplaced]
    deleted = [claim for claim in surveyed if claim not in kept]
    return SortedClaims(ready, earlier, making, unplaced, deleted, frozenset(in_use))


def _list_in_use(ready: Sequence[CopyClaim], demand: CopyDemand) -> set[str]:
    """Return the names of the copies that pods mount, and of those that a replica needs beside them.

    The latter are the copies that were in use last.
    """

    def find_last_use(claim: CopyClaim) -> str:
        """Return the time since which a copy is unused, as text that sorts by time."""
        unused_since = claim.copy.unused_since if claim.copy is not None else ""
        return unused_since or "9"  # still in use: later than every time

    mounted = {claim.name for claim in ready if claim.is_mounted}
    unmounted = sorted((claim for claim in ready if not claim.is_mounted), key=find_last_use, reverse=True)
    missing_count = max(0, demand.number - len(mounted))
    return mounted | {claim.name for claim in unmounted[:missing_count]}
