"""Places in the queue: since when a replica waits, and which pods inherit the place of an earlier one.

A replica keeps its place while its pods come and go. So a place must be recognised: it is a time with microseconds,
which a pod without a predecessor takes from its uid. Two pods of one second have different places, and a place is
inherited by one successor, however many pods of the replica still end.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from controller.placement.units import Unit
from crds.meta import ENQUEUED_AT
from kube.client import Obj

_MICROSECONDS: Final = 1_000_000


class ReplicaUnit(NamedTuple):
    """A unit with what decides about its place and its predecessors."""

    unit: Unit
    rollout: str
    """The Deployment whose changes replace it; empty for a MetalProcess."""
    template: str
    """Identity of the spec that it was made from."""
    own_place: float
    """Place that it has if it inherits none."""
    is_present: bool | None = None
    """True if its template is the present one of its rollout; None: that is judged by time."""
    is_displaced: bool = False
    """Its host displaces it: it is replaced as one of an earlier template."""
    ends_by: float | None = None
    """When a unit that ends is over at the latest, in seconds since 1970; None: that is not known."""

    @property
    def has_inherited(self) -> bool:
        """True if it has the place of a predecessor."""
        return self.unit.enqueued_at < self.own_place


def parse_time(text: object) -> datetime | None:
    """Return the time in a field of an object; None if the text is no time, or has no time zone."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def parse_seconds(text: object) -> float | None:
    """Return a time in seconds since 1970; None for what is no time."""
    moment = parse_time(text)
    return None if moment is None else moment.timestamp()


def format_place(enqueued_at: float) -> str:
    """Return a place as the annotation and the ledger have it: with all its digits, by which it is recognised."""
    moment = datetime.fromtimestamp(enqueued_at, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def find_own_place(obj: Obj) -> float:
    """Return the place of an object that inherits none: its creation, with a fraction of a second from its uid."""
    metadata = obj["metadata"]
    return draw_place(metadata.get("creationTimestamp"), metadata.get("uid", ""))


def draw_place(creation_timestamp: object, uid: str) -> float:
    """Return the place in the queue of an object that inherits none: its creation time, which has whole seconds.

    The microseconds are drawn from the uid, so that two objects of one second have different places, and each object
    always the same. 0 if it states no time of creation.
    """
    created = parse_time(creation_timestamp)
    if created is None:
        return 0.0
    digest = hashlib.sha256(uid.encode()).digest()
    fraction = int.from_bytes(digest[:8], "big") % _MICROSECONDS
    return (created.replace(microsecond=0) + timedelta(microseconds=fraction)).timestamp()


def find_place(obj: Obj, service_created_at: float) -> float:
    """Return the place of an object."""
    stated = (obj["metadata"].get("annotations") or {}).get(ENQUEUED_AT)
    return limit_place(stated, find_own_place(obj), service_created_at)


def limit_place(stated: object, own: float, service_created_at: float) -> float:
    """Return the place that the annotation of an object states, or its own place if it states none.

    People may edit it, and clocks may jump: it is not before the creation of the service, and not after the object's
    own place.
    """
    place = parse_seconds(stated)
    return own if place is None else min(own, max(place, service_created_at))


def assign_places(replicas: Sequence[ReplicaUnit], freed: Iterable[float], wanted: int) -> dict[str, float]:
    """Return the places in the queue (times) that waiting units inherit now, by `Unit.uid`.

    Successors keep the place of the replica that they replace, or a rollout would put a service at the end of the
    queue.

    1. Units of the present spec (`current`) inherit from units that are ending or gone, then from those of an earlier
       spec.
    2. Units of an earlier spec inherit what is left of ending ones: one that is evicted during a rollout comes back
       first.
    3. The newest of the rest, as many as are beyond `wanted`, inherit from other rollouts, as of another accelerator.

    Most MetalProcesses have their place from the start.

    Args:
        replicas: all units of one service.
        freed: places of units of the service that are gone.
        wanted: the number of its replicas.
    """
    current, earlier, ending = split_replicas(replicas)
    # The places of units of the present spec, of an earlier spec, and of those that are ending or gone.
    taken, staying = _places_of(current), _places_of(earlier)
    leaving = _places_of(ending).union(freed)

    # 1. Units that end are soon gone, and their places with them; earlier ones keep theirs for later successors.
    inherited = _inherit(current, leaving=leaving, staying=staying, taken=taken)
    # 2. What is evicted during a change comes back with the earlier template first.
    taken_by_all = taken | staying | set(inherited.values())
    inherited |= _inherit(earlier, leaving=leaving, staying=set(), taken=taken_by_all)
    # 3. If there are more units of the present spec than wanted, the newest waiting ones replace others.
    return inherited | _inherit_elsewhere(current, inherited, len(current) - wanted)


def _inherit(
    replicas: Iterable[ReplicaUnit], leaving: Collection[float], staying: Collection[float], taken: Collection[float]
) -> dict[str, float]:
    """Return the earlier places that waiting replicas inherit, by uid; the oldest heir gets the earliest place.

    Args:
        replicas: the possible heirs. One that has inherited before gets nothing more.
        leaving: places of units that are ending or gone; these are inherited first.
        staying: places of units that will be replaced later.
        taken: places that others have already.
    """
    inherited = dict[str, float]()
    # 1. The places that are not taken. Sorted lists are heaps: even among thousands, the earliest is at hand.
    from_leaving = sorted(set(leaving) - set(taken))
    from_staying = sorted(set(staying) - set(leaving) - set(taken))

    # 2. Give each heir the earliest place that is left, the oldest heir first.
    heirs = [replica for replica in replicas if replica.unit.state == "waiting" and not replica.has_inherited]
    for heir in sorted(heirs, key=lambda replica: (replica.own_place, replica.unit.uid)):
        # An heir inherits only a place that is earlier than its own.
        sources = [places for places in (from_leaving, from_staying) if places and places[0] < heir.own_place]
        if sources:
            source = sources[0]  # a leaving unit first
            inherited[heir.unit.uid] = heapq.heappop(source)
            # The place that the heir gives up may also be that of a leaving unit, and was left out above as taken: the
            # next heir may have it.
            given_up = heir.unit.enqueued_at
            if given_up in leaving and given_up not in from_leaving:
                heapq.heappush(from_leaving, given_up)
    return inherited


def _inherit_elsewhere(
    current: Sequence[ReplicaUnit], inherited: Mapping[str, float], surplus: int
) -> dict[str, float]:
    """Return the places that the `surplus` newest waiting units inherit from units of other rollouts, by uid.

    There are more units than wanted while a service changes to another accelerator or other weights: the new ones
    (heirs) replace as many of the old ones (donors), which are about to end. Which donors will end is not known yet.
    The latest that wait are assumed to, so that no heir gets a better place than that of the unit that ends.
    """

    def wait_order(replica: ReplicaUnit) -> tuple[bool, float]:
        """Return a sort key: units that wait come last, and of these the latest."""
        return replica.unit.state == "waiting", replica.unit.enqueued_at

    # 1. List the units whose place may be inherited, by rollout, the latest that waits last.
    holders = Counter(replica.unit.enqueued_at for replica in current)  # by place: how many units have it
    holders.update(inherited.values())
    # A place that two units have was inherited already.
    donors = [donor for donor in current if holders[donor.unit.enqueued_at] == 1 and donor.unit.uid not in inherited]
    donors.sort(key=wait_order)
    donors_of: dict[str, list[ReplicaUnit]] = {}  # by rollout; the last of each list gives its place first
    for replica in donors:
        donors_of.setdefault(replica.rollout, []).append(replica)

    # 2. Give the newest heirs the place of the last unit of another rollout.
    heirs = [replica for replica in donors if replica.unit.state == "waiting" and not replica.has_inherited]
    # There are `surplus` more units than wanted: so many replace old ones, and these are the newest.
    newest_first = sorted(heirs, key=lambda replica: (-replica.own_place, replica.unit.uid))
    handed = dict[str, float]()  # the result
    for heir in newest_first[: max(0, surplus)]:
        for remaining in donors_of.values():
            # Heirs come from the newest to the oldest: a donor with a later place than this heir is of no use any more.
            while remaining and remaining[-1].unit.enqueued_at >= heir.own_place:
                remaining.pop()
        # Of the last donors of the other rollouts, the one that is last of all.
        last_donors = [units[-1] for rollout, units in donors_of.items() if units and rollout != heir.rollout]
        donor = max(last_donors, key=wait_order, default=None)
        if donor is not None:
            # A place is inherited once: the donor is used up.
            donors_of[donor.rollout].pop()
            handed[heir.unit.uid] = donor.unit.enqueued_at
    return handed


def list_open_places(
    replicas: Sequence[ReplicaUnit], freed: Iterable[float], assigned: Mapping[str, float], wanted: int
) -> list[float]:
    """Return the freed places that must be kept in the ledger for units that do not have them yet.

    A place that was assigned is kept until the unit is annotated with it. Of the others, as many are kept as replicas
    are missing; the rest is dropped, so that a replica added later does not pass units that wait by then.

    Args:
        replicas: all units of one service.
        freed: the places in the ledger.
        assigned: the places of `assign_places`, by uid.
        wanted: the number of replicas of the service.
    """
    current, earlier, _ending = split_replicas(replicas)

    # `unheld`: no living unit has these. A unit that inherits another place leaves its own to the next heir.
    unheld = set(freed) - _places_of(replica for replica in (*current, *earlier) if replica.unit.uid not in assigned)
    promised = unheld.intersection(assigned.values())  # assigned, and still to be annotated

    # The rest is limited: somebody who keeps deleting pods before they inherit would fill the ledger.
    lacking = max(0, wanted - len(current))
    return sorted(promised.union(sorted(unheld - promised)[:lacking]))


def _places_of(replicas: Iterable[ReplicaUnit]) -> set[float]:
    """Return the places in the queue that these replicas have."""
    return {replica.unit.enqueued_at for replica in replicas}


def assign_predecessors(replicas: Sequence[ReplicaUnit]) -> dict[str, frozenset[str]]:
    """Return the uids of running units of an earlier spec that each waiting unit may replace, by `Unit.uid`.

    Only units of the same rollout (Deployment) replace each other, and each running unit is replaced by one waiting
    unit: by that which is nominated for its place, else by turns.
    """
    # 1. List the waiting units of the present spec (heirs) and the running ones of an earlier spec, by rollout.
    current, earlier, _ending = split_replicas(replicas)
    heirs_of, earlier_of = dict[str, list[Unit]](), dict[str, list[str]]()
    for replica_unit in current:
        if replica_unit.unit.state == "waiting":
            heirs_of.setdefault(replica_unit.rollout, []).append(replica_unit.unit)
    for replica_unit in earlier:
        if replica_unit.unit.state == "running":
            earlier_of.setdefault(replica_unit.rollout, []).append(replica_unit.unit.uid)

    predecessors: dict[str, set[str]] = {}  # by uid of the heir
    for rollout, uids in earlier_of.items():
        heirs = sorted(heirs_of.get(rollout, ()), key=lambda unit: unit.order)
        unassigned = sorted(uids)
        # 2. An heir that is nominated replaces its victims.
        for heir in heirs:
            own = [] if heir.nomination is None else [uid for uid in unassigned if uid in heir.nomination.victims]
            predecessors.setdefault(heir.uid, set()).update(own)
            if own:
                unassigned = [uid for uid in unassigned if uid not in own]
        # 3. The rest is dealt out to the heirs in turn: each of n heirs gets every n-th.
        for index, heir in enumerate(heirs):
            predecessors[heir.uid].update(unassigned[index :: len(heirs)])
    return {uid: frozenset(replaced) for uid, replaced in predecessors.items() if replaced}


def find_superseded(replicas: Sequence[ReplicaUnit], wanted: int) -> frozenset[str]:
    """Return the uids of waiting units of an earlier spec that are not wanted any more.

    In their stead a unit of a later spec waits, or as many replicas as are wanted have a place. The latter counts only
    if the template is marked as an earlier one (`is_present` is False, not None): an order by time may be misleading.
    """
    current, earlier, _ending = split_replicas(replicas)
    waiting = [replica for replica in earlier if replica.unit.state == "waiting"]
    has_enough = sum(replica.unit.state == "running" for replica in (*current, *earlier)) >= wanted
    # Deployments of which a unit of the present spec waits already.
    rollouts = {replica.rollout for replica in current if replica.unit.state == "waiting"}
    return frozenset(
        replica.unit.uid
        for replica in waiting
        if replica.rollout in rollouts or (has_enough and replica.is_present is False)
    )


class SplitReplicas(NamedTuple):
    """The units of a service by their future."""

    current: list[ReplicaUnit]
    earlier: list[ReplicaUnit]
    """Units that current ones replace: they are displaced, or of an earlier template."""
    ending: list[ReplicaUnit]


def split_replicas(replicas: Iterable[ReplicaUnit]) -> SplitReplicas:
    """Return the units that stay, those that are to be replaced, and those that end.

    To be replaced are units that are displaced from their host, and those of an earlier template of their rollout. A
    unit may say itself whether its template is the present one. Otherwise the present one is the template whose first
    unit is the latest; not that of the latest unit, since an evicted unit comes back with its earlier template.
    """
    everything = list(replicas)
    ending = [replica for replica in everything if replica.unit.state == "ending"]
    living = [replica for replica in everything if replica.unit.state != "ending"]

    # 1. Find the present template of each rollout: that of which the first unit is the latest.
    first_place: dict[tuple[str, str], float] = {}
    for replica in everything:
        template = replica.rollout, replica.template
        first_place[template] = min(replica.own_place, first_place.get(template, replica.own_place))
    present: dict[str, tuple[float, str]] = {}  # by rollout
    for replica in living:
        # The latest first time wins; the name of the template decides ties.
        began = first_place[replica.rollout, replica.template], replica.template
        present[replica.rollout] = max(began, present.get(replica.rollout, began))

    # 2. Sort the units by it, unless they say themselves whether their template is the present one.
    current, earlier = list[ReplicaUnit](), list[ReplicaUnit]()
    for replica in living:
        _began, present_template = present[replica.rollout]
        is_present = replica.template == present_template if replica.is_present is None else replica.is_present
        if is_present and not replica.is_displaced:
            current.append(replica)
        else:
            earlier.append(replica)
    return SplitReplicas(current=current, earlier=earlier, ending=ending)
