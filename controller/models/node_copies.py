"""The decision about copies of a Model's weights on nodes (spec.cache.scope node): those that are made, and that go.

A copy is made by a claim and a Job. The scheduler chooses the node of both, because the Job asks for what a replica
asks for, on a node without a copy; at most one claim has no node yet, or two Jobs could choose the same. Devices belong
to those whom the queue admits, and a source may be as slow as it likes: once the volume is on a node, a Job that asks
for nothing but the node goes on with the download. A copy belongs
to the status once its Job has succeeded, and stays when no replica needs it any more: it is a cache. Where pods mount
earlier weights, the Job of their successor asks for nothing but the node, whose devices are still in use.
"""

import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from controller.models import claims, jobs, volume
from controller.models.copy_claims import (
    EVICTED,
    CopyClaim,
    CopyDemand,
    SortedClaims,
    count_demand,
    list_ready,
    sort_claims,
    survey_claims,
)
from controller.models.copy_observation import NODE
from controller.models.copy_status import CopyReport, find_obstacle
from controller.models.decision import DONE, InspectedModel, ModelDecision
from controller.models.jobs import JobProgress, Placement, Reservation, Work
from controller.models.served import weights_path
from controller.reconcile.plan import Patch, ref_to
from crds.cache import NodeCopy, NodeShortage
from crds.meta import GROUP
from crds.model import Model, ModelFacts
from crds.quantity import parse_quantity
from kube.client import Obj
from kube.resources import PVCS, Resource
from kube.time import rfc3339

MOST_FETCHES: Final = 4
"""Copies of a Model that are made at the same time."""
PLACEMENT: Final = f"{GROUP}/placement"
"""Annotation of a claim without a node: digest of what its Job asks of one. If that changes, the claim is replaced."""
NO_SPACE: Final = "NoSpace"
"""Reason of a fetch to a disk that is full."""
_DIGITS: Final = 8
_PLACEMENT_DIGITS: Final = 16
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_LONGEST_NAME: Final = 63
"""Characters of a claim's name, which is the value of a label."""


class _Fetch(NamedTuple):
    """The work that makes one copy."""

    claim: CopyClaim
    progress: JobProgress

    @property
    def is_done(self) -> bool:
        return self.progress.outcome.state == "Succeeded" and bool(self.claim.node)


def decide_copies(inspected: InspectedModel, *, is_for_pods: bool) -> ModelDecision:
    """Decide about the copies of an inspected Model."""
    model, observed, facts = inspected.model, inspected.observed, inspected.facts
    path = weights_path(model.spec.source, facts.revision, facts.file, tuple(model.spec.files))
    surveyed = survey_claims(inspected, path)
    consumers = observed.copies.consumers if is_for_pods else ()
    demand = count_demand(consumers, list_ready(surveyed, observed.copies.gone_nodes), surveyed)
    claims = sort_claims(inspected, surveyed, demand)
    # The replicas of an inspection that the status does not have yet cannot be measured.
    is_news = facts != volume.read_facts(model)
    plan = _CopyPlan(inspected, path, demand, claims).without_outdated()
    obstacle = find_obstacle(inspected) if demand.number > len(claims.ready) else None
    fetches = [] if obstacle else plan.fetch()
    create = () if obstacle or is_news else tuple(plan.new_claims())
    going = [fetch.progress for fetch in fetches if not fetch.is_done]
    copies = plan.list_copies(fetch.claim for fetch in fetches if fetch.is_done)
    report = CopyReport(inspected, path, demand, obstacle, copies, going)
    offered = {copy.claim for copy in model.status.copies}
    released = [claim for claim in (*plan.found.evicted, *plan.found.deleted) if not claim.is_mounted]
    is_offered = any(claim.claim.metadata.uid in offered for claim in released)
    waits = (obstacle.again_seconds if obstacle else None, *(consumer.final_seconds for consumer in consumers))
    return ModelDecision(
        phase=report.phase(),
        conditions=report.conditions(claims.earlier),
        facts=_update_facts(inspected, claims, fetches),
        copies=copies,
        shortages=[short for fetch in fetches if (short := _find_shortage(inspected, fetch)) is not None],
        works=[inspected.inspected, *(fetch.progress for fetch in fetches), *plan.records()],
        create=create,
        patch=tuple(_mark_evicted(claim) for claim in claims.evicted if not claim.is_evicted),
        # A claim is deleted when the status does not offer it to services any more.
        delete=tuple(
            ref_to(PVCS, claim.claim.metadata) for claim in released if claim.claim.metadata.uid not in offered
        ),
        again_seconds=0.0
        if is_offered or (is_news and demand.number)
        else min((wait for wait in waits if wait is not None), default=None),
    )


class _CopyPlan(NamedTuple):
    """The claims of a Model, and what follows for each."""

    inspected: InspectedModel
    path: str
    demand: CopyDemand
    found: SortedClaims

    def without_outdated(self) -> "_CopyPlan":
        """Return the plan without the claim that has no node yet if its Job would ask for something else now."""
        wanted, claims = _digest_placement(*self._place_anywhere()), self.found
        outdated = [claim for claim in claims.unplaced if claim.claim.metadata.annotations.get(PLACEMENT) != wanted]
        unplaced = [claim for claim in claims.unplaced if claim not in outdated]
        return self._replace(found=claims._replace(unplaced=unplaced, deleted=[*claims.deleted, *outdated]))

    def fetch(self) -> list[_Fetch]:
        """Return the works that make copies."""
        return [self._fetch(claim) for claim in (*self.found.making, *self.found.unplaced)]

    def _fetch(self, claim: CopyClaim) -> _Fetch:
        asked = self._place_anywhere()
        holds_devices = asked[1].has_devices and not claim.is_made_for_node
        if claim.node:
            asked = Placement(tolerations=asked[0].tolerations), _reserve_on(claim.node)
        if holds_devices:
            first = self._proceed(self._work(claim, *asked, holds_devices=True))
            # A small download has ended before its volume is seen to be there.
            if not claim.is_bound or first.outcome.state == "Succeeded":
                return _Fetch(claim, first)
        return _Fetch(claim, self._proceed(self._work(claim, *asked)))

    def _proceed(self, work: Work) -> JobProgress:
        observed = self.inspected.observed
        return jobs.proceed(work, observed.jobs, observed.pods, self.inspected.now)

    def _work(
        self, claim: CopyClaim, placement: Placement, reservation: Reservation, *, holds_devices: bool = False
    ) -> Work:
        model, facts, settings = self.inspected.model, self.inspected.facts, self.inspected.settings
        return volume.fetching(
            model, facts, claim.claim, placement, settings, reservation=reservation, holds_devices=holds_devices
        )

    def _place_anywhere(self) -> tuple[Placement, Reservation]:
        """Return what a Job asks whose node the scheduler chooses."""
        consumer, claims = self.demand.consumer, self.found
        if consumer is None:
            return Placement(), Reservation()
        placement = volume.place_fetch(self.inspected.model, consumer.service, self.inspected.settings)
        return placement, _reserve_elsewhere(consumer.reservation, {*claims.taken_nodes, *claims.replaced_nodes})

    def records(self) -> list[JobProgress]:
        """Return the ended works of the copies, whose last Jobs are kept."""
        observed = self.inspected.observed.jobs
        works = (
            self._work(copy, Placement(), Reservation(), holds_devices=held)
            for copy in self.found.ready
            for held in (False, True)
        )
        return [JobProgress(outcome=DONE, job=jobs.last(work, observed)) for work in works]

    def new_claims(self) -> Iterator[tuple[Resource, Obj]]:
        """Yield the claims to create: where earlier weights are replaced, and one whose node the scheduler chooses."""
        claims, model, observed = self.found, self.inspected.model, self.inspected.observed.claims
        lacking = max(0, min(self.demand.number - len(claims.ready), MOST_FETCHES) - claims.going)
        nodes = claims.replaced_nodes[: max(0, lacking - len(claims.unplaced))]
        if (
            not nodes
            and any(copy_claim.is_refused for copy_claim in claims.unplaced)
            and self.demand.consumer is not None
        ):
            # What has the room may be the very pods that are to be replaced.
            nodes = sorted(self.demand.consumer.other_nodes - claims.taken_nodes)[:lacking]
        marks = [{NODE: node} for node in nodes]
        if lacking > len(nodes) and not claims.unplaced:
            marks.append({PLACEMENT: _digest_placement(*self._place_anywhere())})
        used = {*(volume_claim.metadata.name for volume_claim in observed.claims), *observed.leaving}
        used |= {copy.name for copy in model.status.copies}
        for mark in marks:
            name = _free_name(model, self.path, used)
            used.add(name)
            resource, claim = volume.new_claim(model, self.inspected.facts, name, self.path)
            claim["metadata"]["annotations"] |= mark
            yield resource, claim

    def list_copies(self, done: Iterable[CopyClaim]) -> list[NodeCopy]:
        """Return the copies for the status, with the time since which each is not in use."""
        sorted_claims, now = self.found, rfc3339(self.inspected.now)
        copies = [
            NodeCopy(
                node=copy_claim.node,
                name=copy_claim.name,
                claim=copy_claim.claim.metadata.uid,
                path=self.path,
                sha256=self.inspected.facts.sha256,
                size_bytes=claims.requested_bytes(copy_claim.claim),
            )
            for copy_claim in done
        ]
        for copy_claim in (*sorted_claims.ready, *sorted_claims.earlier):
            if (copy := copy_claim.copy) is not None:
                since = "" if copy_claim.name in sorted_claims.in_use else copy.unused_since or now
                size_bytes = claims.requested_bytes(copy_claim.claim)
                copies.append(msgspec.structs.replace(copy, unused_since=since, size_bytes=size_bytes))
        return sorted(copies, key=lambda copy: (copy.node, copy.name))


def _free_name(model: Model, path: str, used: Collection[str]) -> str:
    """Return a name that no claim has, also none that is being deleted and may have other weights."""
    cache = model.spec.cache
    # The name has to fit into a label, and its digest tells apart Models whose names begin alike.
    start = model.metadata.name[: _LONGEST_NAME - len("-cache-") - _DIGITS].rstrip("-.")
    stated = (path, cache.storage_class_name or "", str(cache.size or ""))
    digests = (hashlib.sha256("\0".join((*stated, str(ordinal))).encode()) for ordinal in itertools.count())
    names = (f"{start}-cache-{digest.hexdigest()[:_DIGITS]}" for digest in digests)
    return next(name for name in names if name not in used)


def _update_facts(inspected: InspectedModel, claims: SortedClaims, fetches: Iterable[_Fetch]) -> ModelFacts:
    """Return the facts, with those of the header that arrived."""
    if claims.ready:
        return volume.keep_fetched(inspected.facts, inspected.model)
    answer = next((fetch.progress.outcome.answer for fetch in fetches if fetch.is_done), None)
    return volume.take_fetched(inspected.facts, answer) if answer is not None else inspected.facts


def _find_shortage(inspected: InspectedModel, fetch: _Fetch) -> NodeShortage | None:
    """Return the shortage that a fetch found last; each attempt that finds one demands its space once."""
    node, outcome = fetch.claim.node, fetch.progress.outcome
    known = next((shortage for shortage in inspected.model.status.shortages if shortage.node == node), None)
    if fetch.is_done or outcome.state == "Failed":
        return None
    # With the next attempt comes the outcome of the last one, which is known.
    is_news = known is None or known.job != fetch.progress.job
    if (outcome.state, outcome.reason) != ("Broken", NO_SPACE) or fetch.progress.create is not None or not is_news:
        return known
    requested, weights = claims.requested_bytes(fetch.claim.claim), inspected.facts.size_bytes
    if weights is None or requested < weights:
        return known  # the volume itself may be too small, and copies of others would go for nothing
    needed = min(requested, int(parse_quantity(volume.sufficient_size(inspected.facts)) or 0))
    keep_bytes = inspected.observed.copies.node_bytes.get(node, 0) - needed
    return NodeShortage(node=node, job=fetch.progress.job, keep_bytes=max(0, keep_bytes))


def _mark_evicted(claim: CopyClaim) -> Patch:
    """Return the patch after which a claim is not taken for a copy again when the status has lost it."""
    operations = (
        {"op": "test", "path": "/metadata/uid", "value": claim.claim.metadata.uid},
        {"op": "add", "path": f"/metadata/annotations/{EVICTED.replace('/', '~1')}", "value": "true"},
    )
    return Patch(ref_to(PVCS, claim.claim.metadata), operations)


def _reserve_elsewhere(reservation: Reservation, taken: Collection[str]) -> Reservation:
    """Return the reservation on a node that is not taken."""
    # The API allows one name in each requirement.
    left_out = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in sorted(taken)]
    return _join(reservation, left_out) if left_out else reservation


def _reserve_on(node: str) -> Reservation:
    """Return the reservation of nothing but the node, for a volume that is there.

    The devices of a replica are still in use where its weights are replaced, and the service may ask for others by now.
    """
    return _join(Reservation(), [{"key": "metadata.name", "operator": "In", "values": [node]}])


def _digest_placement(placement: Placement, reservation: Reservation) -> str:
    """Return a digest of all that decides on which nodes a Job's pod fits."""
    encoded = msgspec.json.encode((placement, reservation), order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:_PLACEMENT_DIGITS]


def _join(reservation: Reservation, fields: list[Obj]) -> Reservation:
    """Return the reservation with conditions on the node's name in each of its alternatives."""
    nodes = reservation.affinity.get("nodeAffinity", {})
    terms = nodes.get(_REQUIRED, {}).get("nodeSelectorTerms") or [{"matchFields": []}]
    # An empty term matches no node, and would match some with a condition.
    joined = [{**term, "matchFields": [*term.get("matchFields", ()), *fields]} if term else term for term in terms]
    affinity = {**reservation.affinity, "nodeAffinity": {**nodes, _REQUIRED: {"nodeSelectorTerms": joined}}}
    return msgspec.structs.replace(reservation, affinity=affinity)
