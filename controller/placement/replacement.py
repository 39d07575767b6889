"""The replacement of a replica whose speed has fallen: whether one begins, how it goes on, and when it is over.

A replica is replaced only by one that is ready before it ends, only where a free place is known to be faster than what
is observed, and after a cool-down only. A replacement that did not help is the last one: what slows the replica down,
such as long prompts, has gone along. The state is in the status of the service, so another leader decides alike.
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
    "Protected",
    "NotMovable",
    "NotReady",
    "CoolDown",
    "DidNotHelp",
    "TooManyMoves",
    "NoBetterPlace",
    "RoomUnknown",
    "BudgetForbids",
]
"""Why a replica whose speed has fallen stays where it is."""


class ReplacementRules(NamedTuple):
    """The administrator's rules."""

    degrade_threshold: float = 0.3
    """Share of the expected speed that is missing at the least."""
    check_seconds: float = 30.0
    """Time between two checks of a replica that is slow."""
    cool_down_seconds: float = 1800.0
    """Time after a replacement in which the service has no other one."""


class SlowReplica(NamedTuple):
    """A replica that was slow at every check for some time."""

    place: str
    """`Cell.id`."""
    observed: float
    """Speed of a single request, in tokens/s."""
    expected: float
    address: str = ""
    """Address of its pod."""

    @property
    def share(self) -> float:
        """The observed speed in relation to the expected one."""
        return self.observed / self.expected


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
    """Return the pods beyond those that are wanted: one, until the new replica is ready, or the old one has gone.

    The old one is marked by then, so that it is the one which ends.
    """
    if replacement is None or not is_active(replacement):
        return 0
    leaving = next((each for each in replicas if each.uid == replacement.uid), None)
    if leaving is None:
        return 0
    ready = sum(each.is_ready for each in replicas if each is not leaving)
    return 0 if ready >= wanted and leaving.is_marked else 1


def find_replica(slow: SlowReplica, replicas: Sequence[PresentReplica]) -> PresentReplica | None:
    """Return a replica that is slow among those that are there; None: it has gone, or its node is known no more."""
    return next((each for each in replicas if each.place == slow.place and slow.address in each.addresses), None)


def pick_slowest(slow: Sequence[SlowReplica]) -> SlowReplica:
    """Return the replica that is the slowest in relation to what is expected of it."""
    return min(slow, key=lambda each: (each.share, each.place))


def find_cool_down(last: SpeedReplacement, cool_down_seconds: float) -> float:
    """Return the time after a replacement in which there is no other one, in seconds.

    A tenant decides how long a replica takes to be ready: so it has a second place for a tenth of the time at the most.
    """
    started, ended = parse_time(last.started_at), parse_time(last.ended_at or "")
    lasted = (ended - started).total_seconds() if started is not None and ended is not None else 0.0
    return max(cool_down_seconds, LEAST_PAUSE * lasted)


def find_hold(
    last: SpeedReplacement | None,
    facts: ServiceFacts,
    others: Sequence[str],
    now: datetime,
    cool_down_seconds: float,
) -> ReplacementHold | None:
    """Return why no replica of a service may be replaced now, whatever places are free; None if one may.

    Args:
        last: its last replacement.
        facts: the service.
        others: the services of which a replica is being replaced, and that stand in the way, in words.
        now: the wall clock.
        cool_down_seconds: the cool-down.
    """
    if facts.is_protected:
        return ReplacementHold("Protected", "spec.evictionProtection keeps it there: remove it, or delete the pod")
    if facts.obstacle:
        return ReplacementHold("NotMovable", facts.obstacle)
    ended = parse_time(last.ended_at) if last is not None else None
    if last is not None and ended is not None:
        left = find_cool_down(last, cool_down_seconds) - max(0.0, (now - ended).total_seconds())
        if left > 0:
            return ReplacementHold(
                "CoolDown", f"the last replacement ended at {last.ended_at}, and the cool-down holds", left
            )
        is_there = any(each.place == last.to_place for each in facts.replicas)
        if last.outcome == "Moved" and not last.helped and is_there:
            message = f"its move to {last.to_place} did not help: look for the cause in prompts, clients or the Model"
            return ReplacementHold("DidNotHelp", message)
    placed = sum(each.is_ready for each in facts.replicas)
    if not facts.is_settled or placed != facts.wanted or len(facts.replicas) != facts.wanted:
        return ReplacementHold("NotReady", "not all replicas are ready, or an edit is rolled out")
    if others:
        message = f"waiting for the replacement of replicas of {', '.join(sorted(others))}"
        return ReplacementHold("TooManyMoves", message, PLACE_SECONDS)
    return None


def describe_slow(slow: SlowReplica, replica: PresentReplica | None) -> str:
    """Return what is slow, and how much, for people."""
    who = f"replica {replica.name} on {slow.place}" if replica is not None else f"a replica on {slow.place}"
    return f"{who} gives a single request {format_rate(slow.observed)} of {format_rate(slow.expected)} tokens/s"


def least_speed(slow: SlowReplica, rules: ReplacementRules) -> float:
    """Return the speed of a place, in tokens/s, at which it is better than what is observed."""
    return slow.observed / (1.0 - rules.degrade_threshold)


def begin_replacement(
    slow: SlowReplica, leaving: PresentReplica, least: float, target: str, now: datetime
) -> SpeedReplacement:
    """Return a replacement that begins now; `target` is what was found to be better, as node/NAME."""
    observed, expected = format_rate(slow.observed), format_rate(slow.expected)
    return SpeedReplacement(
        uid=leaving.uid,
        from_place=slow.place,
        observed=observed,
        expected=expected,
        least_tokens_per_second=format_rate(least),
        started_at=rfc3339(now),
        message=f"{describe_slow(slow, leaving)}: a replica for a better place, such as {target}, is being started, "
        "and this one ends when that is ready",
    )


class Progress(NamedTuple):
    """A replacement as it stands now."""

    replacement: SpeedReplacement
    again_seconds: float | None = None
    """Time after which it may be given up; None: it is over."""


def go_on(replacement: SpeedReplacement, facts: ServiceFacts, now: datetime) -> Progress:
    """Return a replacement that goes on, or has ended now."""
    leaving = next((each for each in facts.replicas if each.uid == replacement.uid), None)
    others = [each for each in facts.replicas if each is not leaving]
    ready = [each for each in others if each.is_ready]
    if leaving is None:
        if len(ready) >= facts.wanted and facts.wanted:
            to_place = ready[-1].place
            return Progress(_end(replacement, "Moved", f"replaced by a replica on {to_place}", now, to_place))
        return Progress(_end(replacement, "GivenUp", "the replica ended before another one was ready", now))
    if not facts.is_settled or facts.obstacle or facts.is_protected:
        return Progress(_end(replacement, "GivenUp", facts.obstacle or "the service was edited", now))
    started = parse_time(replacement.started_at)
    # Clocks of leaders differ by little; whoever may write the status can state a time at which it never ends.
    passed = abs((now - started).total_seconds()) if started is not None else math.inf
    has_place = sum(bool(each.place) for each in others) >= facts.wanted
    limit, what = PLACE_SECONDS, "the better place was taken"
    if len(ready) >= facts.wanted:
        # A tenant who takes the mark of the pod away again and again keeps it.
        limit = START_SECONDS + PLACE_SECONDS
        what = f"the replica did not end within {limit:.0f} s although a new one is ready"
    elif not leaving.is_ready:
        return Progress(_end(replacement, "GivenUp", "the replica is not ready any more", now))
    elif has_place:
        limit, what = START_SECONDS, f"the new replica was not ready within {START_SECONDS:.0f} s"
    if passed >= limit:
        return Progress(_end(replacement, "GivenUp", what, now))
    return Progress(replacement, limit - passed)


def note_help(replacement: SpeedReplacement, healthy: Sequence[str]) -> SpeedReplacement:
    """Return a replacement that helped if the speed at its new place was seen to be as expected."""
    if replacement.outcome != "Moved" or replacement.helped or replacement.to_place not in healthy:
        return replacement
    return msgspec.structs.replace(replacement, helped=True)


def _end(
    replacement: SpeedReplacement, outcome: Literal["Moved", "GivenUp"], message: str, now: datetime, to_place: str = ""
) -> SpeedReplacement:
    figures = f"{replacement.observed} of {replacement.expected} tokens/s on {replacement.from_place}"
    return msgspec.structs.replace(
        replacement, ended_at=rfc3339(now), outcome=outcome, to_place=to_place, message=f"{figures}: {message}"
    )
