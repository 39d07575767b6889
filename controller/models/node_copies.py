"""The decision about copies of a Model's weights on nodes (spec.cache.scope node): those that are made, and that go.

A copy is made by a claim and a Job. The scheduler chooses the node of both, because the Job asks for what a replica
asks for, on a node without a copy; at most one claim has no node yet, or two Jobs could choose the same. Devices belong
to those whom the queue admits, and a source may be as slow as it likes: once the volume is on a node, a Job that asks
for nothing but the node goes on with the download. A copy belongs to the status once its Job has succeeded, and stays
when no replica needs it any more: it is a cache. Where pods of the services serve anything else, such as earlier
weights, a copy is made by a Job that asks for nothing but their node, whose devices are still in use.
"""

import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from controller.models import claims, jobs, volume
from controller.models.copy_claims import CopyClaim, CopyDemand, SortedClaims, count_demand, sort_claims, survey_claims
from controller.models.copy_observation import NODE, CopyConsumer
from controller.models.decision import (
    DONE,
    Explanation,
    InspectedModel,
    ModelDecision,
    explain_progress,
    refused_secret,
)
from controller.models.jobs import JobProgress, Placement, Reservation, Work
from controller.models.served import weights_path
from controller.models.volume import MODELS_PATH
from controller.reconcile.plan import ref_to
from crds.cache import NodeCopy, NodeShortage
from crds.model import Model, ModelFacts
from crds.quantity import parse_quantity
from kube.client import Obj
from kube.resources import PVCS, Resource
from kube.time import rfc3339

MOST_FETCHES: Final = 4
"""Copies of a Model that are made at the same time."""
NO_SPACE: Final = "NoSpace"
"""Reason of a fetch to a disk that is full."""
_READ_AGAIN_SECONDS: Final = 60.0
"""Time within which another StorageClass of the same name is noticed."""
_MOST_NAMED: Final = 3
"""Nodes that a message names."""
_DIGITS: Final = 8
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
    """Decide about the copies of an inspected Model: fetches, copies in the status, and claims to create and delete.

    A copy is the verified weights on a claim whose volume is on one node. Without services that need copies in pods
    none is made, and verified ones stay until they are evicted.
    """
    model, observed, facts = inspected.model, inspected.observed, inspected.facts

    # 1. Sort the existing claims by what becomes of them, and count the copies that replicas need.
    path = weights_path(model.spec.source, facts.revision, facts.file, tuple(model.spec.files))
    surveyed = survey_claims(inspected, path)
    consumers = observed.copies.consumers if is_for_pods else ()
    demand = count_demand(consumers, surveyed)
    claims = sort_claims(observed.copies.victims, surveyed, demand)
    # Outdated nodes: pods of the services serve something else there, such as earlier weights.
    plan = _CopyPlan(inspected, path, demand, claims, _list_outdated_nodes(consumers, claims))

    # 2. Take the next step of each fetch, unless no copy can be made.
    obstacle = find_obstacle(inspected) if demand.number > len(claims.ready) else None
    fetches = [] if obstacle else plan.proceed_fetches()
    unfinished = [fetch for fetch in fetches if not fetch.is_done]
    copies = plan.list_copies(fetch.claim for fetch in fetches if fetch.is_done)
    phase, lack = obstacle or _explain_lack(model, demand, copies, unfinished)

    # 3. Delete the unneeded claims that nothing mounts, each once the status does not offer it to services any more.
    unmounted = [claim for claim in claims.deleted if not claim.is_mounted]
    offered_uids = {copy.claim for copy in model.status.copies}
    deletable = [claim for claim in unmounted if claim.claim.metadata.uid not in offered_uids]

    # 4. What a replica takes is measured by the facts in the status: until it has the new ones, no claim is created.
    # For that, and before further claims are deleted, this status is written first, and the Model is decided again.
    has_new_facts = facts != volume.read_facts(model)
    # The seconds until the next decision: the least of these.
    waits = [consumer.final_seconds for consumer in consumers if consumer.final_seconds is not None]
    if obstacle:
        waits.append(_READ_AGAIN_SECONDS)
    if len(deletable) < len(unmounted) or (has_new_facts and demand.number):
        waits.append(0.0)  # again, as soon as this status is written

    return ModelDecision(
        phase="Ready" if copies else phase,
        conditions=_report_copies(inspected, claims, copies, lack),
        facts=_update_facts(inspected, claims, fetches),
        copies=copies,
        shortages=[short for fetch in fetches if (short := _find_shortage(inspected, fetch)) is not None],
        works=[inspected.inspection, *(fetch.progress for fetch in fetches), *plan.list_ended_works()],
        create=() if obstacle or has_new_facts else tuple(plan.build_claims()),
        delete=tuple(ref_to(PVCS, claim.claim.metadata) for claim in deletable),
        again_seconds=min(waits, default=None),
    )


def _list_outdated_nodes(consumers: Iterable[CopyConsumer], claims: SortedClaims) -> list[str]:
    """Return the nodes without a copy where pods of the services serve something else, such as earlier weights.

    A copy is made for each of these nodes: their pods hold the devices that they need after the update, too.
    """
    nodes = frozenset[str]().union(*(consumer.nodes for consumer in consumers))
    # The scheduler has refused the Job that would have made a copy on any other node.
    has_no_other_node = any(claim.is_refused for claim in claims.unplaced)
    if not has_no_other_node:
        # While the scheduler may find other nodes, only those with earlier weights count: a copy surely fits there.
        nodes &= {claim.node for claim in (*claims.earlier, *claims.deleted) if claim.is_mounted and not claim.fits}
    return sorted(nodes - claims.taken_nodes)  # without those that have or get a copy of the wanted weights


def find_obstacle(inspected: InspectedModel) -> tuple[str, Explanation] | None:
    """Return the phase of a Model of which no copy can be made, and why, with the way out; None if one can be made."""
    cache, observed = inspected.model.spec.cache, inspected.observed
    if observed.copies.binds_immediately:
        message = (
            f"StorageClass {cache.storage_class_name} of spec.cache.storageClassName has volumeBindingMode "
            "Immediate, so its volume may be on any node: name a class with WaitForFirstConsumer, such as one of local "
            "volumes, or make a Model with cache.scope model"
        )
        return "Failed", ("StorageClassUnsuitable", message)
    if problem := claims.find_size_problem(inspected.model, inspected.facts):
        return "Failed", problem
    if refused := refused_secret(observed):
        return "Downloading", (refused.reason, refused.message)
    return None


def _explain_lack(
    model: Model, demand: CopyDemand, copies: Sequence[NodeCopy], unfinished: Sequence[_Fetch]
) -> tuple[str, Explanation | None]:
    """Return the phase that the Model has as long as it has no copy at all, and why a needed copy is lacking.

    The worst of the unfinished fetches explains it; without any, a claim is missing. None: no copy is lacking.
    """
    # A fetch is not done: the worst one explains it.
    if unfinished:
        severity = {"Failed": 3, "Broken": 2, "Going": 1, "Succeeded": 0}
        # Of equally bad fetches, one that states a reason is explained.
        progresses = (fetch.progress for fetch in unfinished)
        worst = max(progresses, key=lambda work: (severity[work.outcome.state], bool(work.outcome.reason)))
        phase = "Failed" if worst.outcome.state == "Failed" else "Downloading"
        return phase, explain_progress(model, worst, doing="Fetching", what="fetches the weights to the volume")

    if demand.number > len(copies):
        return "Downloading", ("Fetching", "waiting for a PersistentVolumeClaim")
    return "Ready", None  # there are as many copies as replicas need, which may be none


def _report_copies(
    inspected: InspectedModel, claims: SortedClaims, copies: Sequence[NodeCopy], lack: Explanation | None
) -> list[Obj]:
    """Return the conditions of a Model with these copies, from which pods serve; `lack` says why one is lacking."""
    if not copies:
        return inspected.report_weights("", lack)

    # 1. Where they are; the message of the lack, lack[1], is added to what is said of them.
    nodes = sorted({copy.node for copy in copies})
    more = f" and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
    location = f"copies on node{'s' if len(nodes) > 1 else ''} {', '.join(nodes[:_MOST_NAMED])}{more} at "
    location += f"{MODELS_PATH}/{copies[0].path}"
    if copies[0].sha256:
        location += f", sha256 {copies[0].sha256}"

    # 2. Pods read the wanted weights, so the lack of a further copy is no more than a remark.
    if not claims.earlier:
        return inspected.report_weights(f"{location}; for another copy: {lack[1]}" if lack else location)

    # 3. Some read earlier weights, which are being replaced.
    earlier_names = ", ".join(sorted(claim.name for claim in claims.earlier))
    change = (
        f"copies are replaced: pods serve from PersistentVolumeClaim {earlier_names} until the weights on the new "
        "volume are verified"
    )
    return inspected.report_weights(location, lack, ("VolumeReplaced", f"{change}; {lack[1]}" if lack else change))


class _CopyPlan(NamedTuple):
    """The claims of a Model, and what follows for each."""

    inspected: InspectedModel
    path: str
    demand: CopyDemand
    claims: SortedClaims
    outdated_nodes: Sequence[str]
    """Nodes without a copy on which pods of the services serve something else."""

    def proceed_fetches(self) -> list[_Fetch]:
        """Return the next step of each work that makes a copy."""
        return [_Fetch(claim, self._proceed_fetch(claim)) for claim in (*self.claims.making, *self.claims.unplaced)]

    def _proceed_fetch(self, claim: CopyClaim) -> JobProgress:
        """Return the next step of the fetch to a claim, which is done by one Job, or by two in turn.

        One Job is enough if the replica needs no devices, or if this controller has chosen the node. Else the scheduler
        chooses it, and a first Job asks for the devices of a replica, so that the node has them. Once the volume is
        bound to a node, a second Job without devices goes on with the download, unless the first has succeeded.
        """
        # Where the Job runs, and what it asks of its node.
        placement, reservation = self._place_anywhere()
        needs_devices = reservation.has_devices
        if claim.node:
            # A Job on a known node asks for no devices: they may be in use, and the service may need others by now.
            placement, reservation = Placement(tolerations=placement.tolerations), _reserve_node("In", [claim.node])

        # The first of two Jobs.
        if needs_devices and not claim.is_made_for_node:
            first_step = self._proceed(self._prepare_fetch(claim, placement, reservation, holds_devices=True))
            # Before the volume is bound to a node, the first Job decides alone.
            has_volume = bool(claim.node) and claim.claim.is_bound
            if not has_volume or first_step.outcome.state == "Succeeded":
                return first_step

        # The second of two Jobs, or the only one.
        return self._proceed(self._prepare_fetch(claim, placement, reservation))

    def _proceed(self, work: Work) -> JobProgress:
        observed = self.inspected.observed
        return jobs.proceed(work, observed.jobs, observed.pods, self.inspected.now)

    def _prepare_fetch(
        self, claim: CopyClaim, placement: Placement, reservation: Reservation, *, holds_devices: bool = False
    ) -> Work:
        """Return the work that fetches the weights to a claim; `holds_devices` tells the first Job from the second."""
        model, facts, settings = self.inspected.model, self.inspected.facts, self.inspected.settings
        return volume.prepare_fetch(
            model, facts, claim.claim, placement, settings, reservation=reservation, holds_devices=holds_devices
        )

    def _place_anywhere(self) -> tuple[Placement, Reservation]:
        """Return placement and reservation of a Job whose node the scheduler chooses, among those without a copy."""
        consumer = self.demand.consumer
        if consumer is None:
            return Placement(), Reservation()
        placement = volume.place_fetch(self.inspected.model, consumer.service, self.inspected.settings)
        # On outdated nodes, pods serve something else; these get a copy by a Job for each of them.
        taken = sorted({*self.claims.taken_nodes, *self.outdated_nodes})
        return placement, _reserve_node("NotIn", taken, consumer.reservation)

    def list_ended_works(self) -> list[JobProgress]:
        """Return the ended fetches of the ready copies, whose last Jobs are kept as a record.

        It is not known any more whether a copy was fetched by a Job with devices, by one without, or by both.
        """
        works = (
            self._prepare_fetch(copy, Placement(), Reservation(), holds_devices=holds_devices)
            for copy in self.claims.ready
            for holds_devices in (False, True)
        )
        # A work without a Job has an empty name, which keeps nothing.
        return [JobProgress(outcome=DONE, job=jobs.name_last_job(work, self.inspected.observed.jobs)) for work in works]

    def build_claims(self) -> Iterator[tuple[Resource, Obj]]:
        """Yield the claims to create: on `outdated_nodes`, and at most one whose node the scheduler chooses."""
        claims, model, observed = self.claims, self.inspected.model, self.inspected.observed.claims
        # 1. As many as copies are missing, but no more than may be made at once, without those that are being made.
        proceeding = sum(not claim.is_refused for claim in claims.making)
        most_created = max(0, min(self.demand.number - len(claims.ready), MOST_FETCHES) - proceeding)

        # 2. The annotation of each, which states its node.
        annotations = [{NODE: node} for node in self.outdated_nodes[:most_created]]
        if most_created > len(annotations) and not claims.unplaced:
            annotations.append({})  # the scheduler chooses the node

        # 3. The claims, each with a name that is free.
        used_names = {*(claim.metadata.name for claim in observed.claims), *observed.leaving}
        used_names |= {copy.name for copy in model.status.copies}
        for node_annotation in annotations:
            name = _choose_free_name(model, self.path, used_names)
            used_names.add(name)
            resource, claim = volume.new_claim(model, self.inspected.facts, name, self.path)
            claim["metadata"]["annotations"] |= node_annotation
            yield resource, claim

    def list_copies(self, done: Iterable[CopyClaim]) -> list[NodeCopy]:
        """Return the copies for the status, with the time since which each is not in use.

        `done` are the claims whose fetch has just succeeded; the others are in the status already.
        """
        facts, now = self.inspected.facts, rfc3339(self.inspected.now)
        copies = []

        # New copies, which are in use.
        for claim in done:
            uid, size_bytes = claim.claim.metadata.uid, claims.requested_bytes(claim.claim)
            copies.append(NodeCopy(claim.node, claim.name, uid, self.path, facts.sha256, size_bytes))

        # Copies that the status has already; the time is empty while one is in use.
        for claim in (*self.claims.ready, *self.claims.earlier):
            if (copy := claim.copy) is not None:
                unused_since = "" if claim.name in self.claims.in_use else (copy.unused_since or now)
                size_bytes = claims.requested_bytes(claim.claim)
                copies.append(msgspec.structs.replace(copy, unused_since=unused_since, size_bytes=size_bytes))
        return sorted(copies, key=lambda copy: (copy.node, copy.name))


def _choose_free_name(model: Model, path: str, used_names: Collection[str]) -> str:
    """Return a name for a claim that is not among `used_names`."""
    cache = model.spec.cache
    # The name has to fit into a label, so it begins with a part of the Model's. Its digest tells apart Models, weights,
    # class and size; an ordinal in the digest is raised until the name is free.
    start = model.metadata.name[: _LONGEST_NAME - len("-cache-") - _DIGITS].rstrip("-.")
    stated = (model.metadata.name, path, cache.storage_class_name or "", str(cache.size or ""))
    digests = (hashlib.sha256("\0".join((*stated, str(ordinal))).encode()) for ordinal in itertools.count())
    names = (f"{start}-cache-{digest.hexdigest()[:_DIGITS]}" for digest in digests)
    return next(name for name in names if name not in used_names)


def _update_facts(inspected: InspectedModel, claims: SortedClaims, fetches: Iterable[_Fetch]) -> ModelFacts:
    """Return the facts of the inspection, with the header as a fetch has read it once there is a fetched copy.

    With ready copies, the status has that header already; else the first fetch that has succeeded states it.
    """
    if claims.ready:  # the header in the status is that of a fetch
        return volume.keep_fetched(inspected.facts, inspected.model)
    answer = next((fetch.progress.outcome.answer for fetch in fetches if fetch.is_done), None)
    return volume.take_fetched(inspected.facts, answer) if answer is not None else inspected.facts


def _find_shortage(inspected: InspectedModel, fetch: _Fetch) -> NodeShortage | None:
    """Return the shortage of disk on the node of a fetch; None if there is none, or if the fetch has ended.

    A shortage says how many bytes of copies may stay on the node (`keep_bytes`) so that this one fits; the others are
    evicted by it. It is computed once for each attempt that fails for lack of space, whose Job it names, and stays in
    the status until the next one fails so.
    """
    # 1. None for a fetch that has ended.
    node, progress = fetch.claim.node, fetch.progress
    outcome = progress.outcome
    if fetch.is_done or outcome.state == "Failed":
        return None

    # 2. The shortage in the status, if it has one, unless another attempt has failed for lack of space since.
    reported = next((shortage for shortage in inspected.model.status.shortages if shortage.node == node), None)
    lacks_space = outcome.state == "Broken" and outcome.reason == NO_SPACE
    # If the next attempt is created now, the progress still has the outcome of the last one, which is reported already.
    is_new_attempt = progress.create is not None
    is_reported = reported is not None and reported.job == progress.job
    if not lacks_space or is_new_attempt or is_reported:
        return reported

    # 3. A new one: the bytes that may stay so that this copy fits.
    requested_bytes, weights_bytes = claims.requested_bytes(fetch.claim.claim), inspected.facts.size_bytes
    if weights_bytes is None or requested_bytes < weights_bytes:
        return reported  # the volume itself may be too small: to evict copies would not help
    needed_bytes = min(requested_bytes, int(parse_quantity(volume.sufficient_size(inspected.facts)) or 0))
    # All copies on the node now, less the space that this one needs.
    keep_bytes = inspected.observed.copies.node_bytes.get(node, 0) - needed_bytes
    return NodeShortage(node=node, job=progress.job, keep_bytes=max(0, keep_bytes))


def _reserve_node(operator: str, nodes: Iterable[str], reservation: Reservation | None = None) -> Reservation:
    """Return a reservation, by default of nothing, that is also bound to the one node (In) or to none of these (NotIn).

    `operator` is that of a node selector requirement. The requirements are added to each term of the node affinity that
    the reservation has: the terms are alternatives, so each must have them.
    """
    reservation = reservation or Reservation()

    # The requirements: the API allows one name in each.
    fields = [{"key": "metadata.name", "operator": operator, "values": [node]} for node in nodes]
    if not fields:
        return reservation

    # Add them to each term. Without any term, one is added for them; it is not empty.
    affinity = reservation.affinity.get("nodeAffinity", {})
    terms = affinity.get(_REQUIRED, {}).get("nodeSelectorTerms") or [{"matchFields": []}]
    # An empty term matches no node, so it stays empty: with a condition it would match some.
    narrowed = [{**term, "matchFields": [*term.get("matchFields", ()), *fields]} if term else term for term in terms]
    affinity = {**reservation.affinity, "nodeAffinity": {**affinity, _REQUIRED: {"nodeSelectorTerms": narrowed}}}
    return msgspec.structs.replace(reservation, affinity=affinity)
