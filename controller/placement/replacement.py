"""The replacement of a replica whose speed or fit has fallen: whether one begins, how it goes on, and when it is over.

A replica is replaced only by one that is ready before it ends, only where a free place is known to be better, one in
the cluster at once, and after a cool-down of its namespace only. A replacement that did not help is the last one: what
slows the replica down, such as long prompts, has gone along. The state is in the status of the service, so another
leader decides alike.
"""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Final, Literal, NamedTuple

import msgspec

from controller.placement.queue_places import parse_time
from crds.placement import SpeedReplacement
from crds.rate import format_rate
from kube.time import rfc3339

PLACE_SECONDS: Final = 120.0
"""Time in which the new replica gets its place: if others were faster, nothing is held up for it."""
START_SECONDS: Final = 3600.0
"""Time in which it is ready."""
LEAST_PAUSE: Final = 9.0
"""The cool-down is at least so many times as long as the replacement took."""

HoldReason = Literal[
    "Protected", "NotMovable", "NotReady", "CoolDown", "DidNotHelp", "TooManyMoves", "NoBetterPlace", "ReplacementOff"
]
"""Why a replica whose speed or fit has fallen stays where it is."""


class ReplacementRules(NamedTuple):
    """The administrator's rules."""

    degrade_threshold: float = 0.3
    """Share of the expected speed that is missing at the least."""
    check_seconds: float = 30.0
    """A tenth of the time over which the speed of a replica is read."""
    cool_down_seconds: float = 1800.0
    """Time after a replacement in which its namespace has no other one."""
    is_on: bool = False
    """Replicas are replaced; else their state is reported only."""


class DegradedReplica(NamedTuple):
    """A replica that is slow, or whose device class fits it no more."""

    place: str
    """`Cell.id`."""
    address: str = ""
    """Address of its pod; empty: any there."""
    observed: float = 0.0
    """Speed of a single request, in tokens/s."""
    expected: float = 0.0
    misfit: str = ""
    """Why it fits no more; empty: it is slow."""

    @property
    def share(self) -> float:
        """The observed speed in relation to the expected one."""
        return self.observed / self.expected if self.expected else 0.0


class PresentReplica(NamedTuple):
    """A replica in a pod that is not being deleted."""

    uid: str
    place: str
    """`Cell.id`; empty while it waits for a node."""
    is_ready: bool
    is_marked: bool = False
    """It ends first when there are too many."""
    name: str = ""
    """Name of its pod."""
    addresses: tuple[str, ...] = ()


class ServiceFacts(NamedTuple):
    """The facts about a service by which its replacements are decided."""

    wanted: int
    """Replicas that it should have, without the one that replaces another."""
    replicas: Sequence[PresentReplica]
    """The newest last."""
    is_settled: bool = True
    """Its spec was not edited since its last status, and no rollout is on its way."""
    is_protected: bool = False
    """spec.evictionProtection."""
    obstacle: str = ""
    """Why no replica of it can be replaced while it serves; empty if it can."""


class ReplacementHold(NamedTuple):
    """Why a slow replica stays where it is, for now or for good."""

    reason: HoldReason
    message: str
    again_seconds: float | None = None
    """Time after which that may be otherwise; None: a reading of its speed tells."""


def is_active(replacement: SpeedReplacement | None) -> bool:
    """Return whether a replacement goes on."""
    return replacement is not None and replacement.ended_at is None


def count_surge(replacement: SpeedReplacement | None, replicas: Sequence[PresentReplica], wanted: int) -> int:
    """Return the number of pods that a service has beyond those wanted while a slow one is replaced: 0 or 1.

    It is 1 until the new replica is ready and the old one is marked to end first, or the old one has gone: without the
    mark, a smaller number might end the new one.
    """
    if replacement is None or not is_active(replacement):
        return 0
    leaving = next((replica for replica in replicas if replica.uid == replacement.uid), None)
    if leaving is None:
        return 0
    ready = sum(replica.is_ready for replica in replicas if replica is not leaving)
    return 0 if ready >= wanted and leaving.is_marked else 1


def find_replica(degraded: DegradedReplica, replicas: Sequence[PresentReplica]) -> PresentReplica | None:
    """Return a replica that is degraded among those that are there; None: it has gone, or its node is known no more."""
    candidates = (replica for replica in replicas if replica.place == degraded.place)
    return next(
        (replica for replica in candidates if not degraded.address or degraded.address in replica.addresses), None
    )


def pick_worst(degraded: Sequence[DegradedReplica]) -> DegradedReplica:
    """Return the replica to replace first: one that does not fit, else the slowest in relation to what is expected."""
    return min(degraded, key=lambda replica: (replica.share, replica.place))


def find_cool_down(last: SpeedReplacement, cool_down_seconds: float, now: datetime) -> float:
    """Return the seconds until the namespace may have another replacement; 0 or negative if it may have one now.

    While a replica is replaced, its service holds two places, and the tenant decides how long that takes. So the pause
    is at least LEAST_PAUSE times as long as the last replacement: a second place for a tenth of the time at the most.
    """
    started, ended = parse_time(last.started_at), parse_time(last.ended_at or "")
    if ended is None:
        return 0.0
    lasted = (ended - started).total_seconds() if started is not None else 0.0
    return max(cool_down_seconds, LEAST_PAUSE * lasted) - max(0.0, (now - ended).total_seconds())


def find_hold(
    last: SpeedReplacement | None,
    facts: ServiceFacts,
    beside: Sequence[SpeedReplacement],
    now: datetime,
    rules: ReplacementRules,
    *,
    is_other_moving: bool = False,
) -> ReplacementHold | None:
    """Return why no replica of a service may be replaced now, whatever places are free; None if one may.

    Args:
        last: its last replacement.
        facts: the service.
        beside: the last replacements of other services of its namespace.
        now: the wall clock.
        rules: the administrator's rules.
        is_other_moving: a replica of another service is being replaced.
    """
    if not rules.is_on:
        return ReplacementHold("ReplacementOff", "the controller replaces none: see placement.replacement of the chart")

    # 1. The service must not, or cannot, be moved at all.
    if facts.is_protected:
        return ReplacementHold("Protected", "spec.evictionProtection keeps it there: remove it, or delete the pod")
    if facts.obstacle:
        return ReplacementHold("NotMovable", facts.obstacle)

    # 2. A replacement in its namespace was not long ago; the longest cool-down that still lasts counts.
    past = [replacement for replacement in (last, *beside) if replacement is not None]
    cool_downs = [
        (find_cool_down(replacement, rules.cool_down_seconds, now), replacement.ended_at)
        for replacement in past
        if replacement.ended_at
    ]
    seconds, ended_at = max(cool_downs, default=(0.0, ""))
    if seconds > 0:
        message = f"the last replacement in its namespace ended at {ended_at}, and the cool-down holds"
        return ReplacementHold("CoolDown", message, seconds)

    # 3. The last move has not helped, and the replica is still where it went to.
    places = {replica.place for replica in facts.replicas}
    if last is not None and last.outcome == "Moved" and not last.helped and last.to_place in places:
        message = f"its move to {last.to_place} did not help: look for the cause in prompts, clients or the Model"
        return ReplacementHold("DidNotHelp", message)

    # 4. Other changes come first.
    ready = sum(replica.is_ready for replica in facts.replicas)
    if not facts.is_settled or ready != facts.wanted or len(facts.replicas) != facts.wanted:
        return ReplacementHold("NotReady", "not all replicas are ready, or an edit is rolled out")
    if is_other_moving:
        message = "waiting for the replacement of a replica of another service"
        return ReplacementHold("TooManyMoves", message, PLACE_SECONDS)
    return None


def describe_degraded(degraded: DegradedReplica, replica: PresentReplica | None) -> str:
    """Return what is slow or does not fit, and how much, for people."""
    who = f"replica {replica.name} on {degraded.place}" if replica is not None else f"a replica on {degraded.place}"
    if degraded.misfit:
        return f"{who} does not fit there any more: {degraded.misfit}"
    return f"{who} gives a single request {format_rate(degraded.observed)} of {format_rate(degraded.expected)} tokens/s"


def least_speed(degraded: DegradedReplica, rules: ReplacementRules) -> float:
    """Return the speed of a place, in tokens/s, at which it is better than what is observed; 0: any is."""
    return degraded.observed / (1.0 - rules.degrade_threshold)


def begin_replacement(
    degraded: DegradedReplica, leaving: PresentReplica, least: float, target: str, now: datetime
) -> SpeedReplacement:
    """Return a replacement that begins now; `target` is what was found to be better, as node/NAME."""
    return SpeedReplacement(
        uid=leaving.uid,
        from_place=degraded.place,
        observed="" if degraded.misfit else format_rate(degraded.observed),
        expected="" if degraded.misfit else format_rate(degraded.expected),
        least_tokens_per_second=format_rate(least),
        started_at=rfc3339(now),
        message=f"{describe_degraded(degraded, leaving)}: a replica for a better place, such as {target}, is being "
        "started, and this one ends when that is ready",
    )


class Progress(NamedTuple):
    """A replacement as it stands now."""

    replacement: SpeedReplacement
    again_seconds: float | None = None
    """Time after which it may be given up; None: it is over."""


def continue_replacement(replacement: SpeedReplacement, facts: ServiceFacts, now: datetime) -> Progress:
    """Return the replacement as it is now: still under way, or ended with its outcome.

    It has Moved once the old replica has gone and enough others are ready. It is given up if the old replica is lost,
    not ready or must not be replaced any more, or if the new one takes too long: to get a place, to become ready, or to
    let the old one end.
    """
    leaving = next((replica for replica in facts.replicas if replica.uid == replacement.uid), None)
    others = [replica for replica in facts.replicas if replica is not leaving]
    ready = [other for other in others if other.is_ready]

    # 1. The old replica has gone, or may not be replaced any more.
    if leaving is None:
        if len(ready) >= facts.wanted and facts.wanted:
            to_place = ready[-1].place
            return Progress(_end(replacement, "Moved", f"replaced by a replica on {to_place}", now, to_place))
        return Progress(_end(replacement, "GivenUp", "the replica ended before another one was ready", now))
    if not facts.is_settled or facts.obstacle or facts.is_protected:
        return Progress(_end(replacement, "GivenUp", facts.obstacle or "the service was edited", now))

    # 2. Give up after a time, which depends on how far the new replica has come.
    started = parse_time(replacement.started_at)
    # Clocks of leaders differ by little; whoever may write the status can state a time at which it never ends.
    passed = abs((now - started).total_seconds()) if started is not None else math.inf
    # The new replica has a place, or is ready, once as many of the others as are wanted are.
    has_place = sum(bool(other.place) for other in others) >= facts.wanted
    if len(ready) >= facts.wanted:
        # A tenant can keep the old pod by removing its mark again and again.
        limit_seconds = START_SECONDS + PLACE_SECONDS
        failure = f"the replica did not end within {limit_seconds:.0f} s although a new one is ready"
    elif not leaving.is_ready:
        return Progress(_end(replacement, "GivenUp", "the replica is not ready any more", now))
    elif has_place:
        limit_seconds = START_SECONDS
        failure = f"the new replica was not ready within {START_SECONDS:.0f} s"
    else:
        limit_seconds = PLACE_SECONDS
        failure = "the better place was taken"
    if passed >= limit_seconds:
        return Progress(_end(replacement, "GivenUp", failure, now))
    return Progress(replacement, again_seconds=limit_seconds - passed)


def record_recovery(replacement: SpeedReplacement, healthy: Sequence[str]) -> SpeedReplacement:
    """Return an ended replacement, marked as helpful if its new place is seen to have the expected speed."""
    if replacement.outcome != "Moved" or replacement.helped or replacement.to_place not in healthy:
        return replacement
    return msgspec.structs.replace(replacement, helped=True)


def _end(
    replacement: SpeedReplacement, outcome: Literal["Moved", "GivenUp"], message: str, now: datetime, to_place: str = ""
) -> SpeedReplacement:
    """Return a replacement that has ended now; its message begins with the speed, if known, and the place it left."""
    place = replacement.from_place
    figures = f"{replacement.observed} of {replacement.expected} tokens/s on {place}" if replacement.observed else place
    return msgspec.structs.replace(
        replacement, ended_at=rfc3339(now), outcome=outcome, to_place=to_place, message=f"{figures}: {message}"
    )
