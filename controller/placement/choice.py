"""The choice of accelerators for a service that may use several: how many of its replicas go to each.

A replica that runs stays. A new one goes to the first accelerator with room for it now, rather than evict others in an
earlier one. Where none has room, it waits in the first one that could ever run it, whose queue may evict others for it.
A replica that has waited for `SETTLE_SECONDS` goes to another accelerator that has room. If the service names its
pools, a replica moves to an earlier one that had room for `BETTER_SECONDS` without a break: one at a time, and only
while all are ready. The last choice is in the status of the service, so each decision begins with it.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from crds.accelerator_choice import AcceleratorShare, ShareReason
from crds.rate import format_rate

SETTLE_SECONDS: Final = 10.0
"""Time for which a replica waits before it goes elsewhere: by then the queue has certainly looked at it."""
BETTER_SECONDS: Final = 600.0
"""Time for which an earlier pool must have had room before a replica that runs is loaded again there."""


class Candidate(NamedTuple):
    """One accelerator that a service may use, with its replicas there."""

    accelerator: str
    refusal: str = ""
    """Why the service can have no replica there; empty if it can."""
    room: int = 0
    """Further replicas that have room there now."""
    could_run: bool = True
    """A node or host there could run a replica if nothing else ran."""
    lack: str = ""
    """Why there is no room, in words."""
    running: int = 0
    """Replicas that have a node or host."""
    ready: int = 0
    """Replicas of these that serve."""
    settled: int = 0
    """Replicas that have waited there for `SETTLE_SECONDS`."""
    tokens_per_second: float = 0.0
    """Speed of a replica on the fastest device class that has room there, or that is there if none has; 0: unknown."""
    is_better: bool = False
    """It had room for `BETTER_SECONDS`, and the service prefers it to those that come later."""


class _Trial:
    """The replicas of each accelerator while they are chosen."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        """Start with no replica on each accelerator that is not refused."""
        self.candidates = [candidate for candidate in candidates if not candidate.refusal]
        self.replicas = {candidate.accelerator: 0 for candidate in self.candidates}

    @property
    def total(self) -> int:
        """Number of replicas on all accelerators."""
        return sum(self.replicas.values())

    def find_room(self, candidate: Candidate) -> int:
        """Return the further replicas that a candidate takes at once: those that run there anyway, and its room."""
        planned = self.replicas[candidate.accelerator]
        return max(0, candidate.running + candidate.room - planned)

    def add(self, wanted: int) -> None:
        """Add replicas until there are as many as wanted: in order where there is room now.

        The rest is added where it waits: on the first accelerator that could ever run a replica.
        """
        # `find_room` counts the replicas that run there anyway, and the free room.
        for candidate in self.candidates:
            self.replicas[candidate.accelerator] += min(self.find_room(candidate), wanted - self.total)

        if self.candidates and self.total < wanted:
            waits_for = next((candidate for candidate in self.candidates if candidate.could_run), self.candidates[0])
            self.replicas[waits_for.accelerator] += wanted - self.total

    def remove(self, wanted: int) -> None:
        """Remove replicas until there are as many as wanted: first those that wait, then those that run.

        Of both, replicas of the last accelerators go first, since the service prefers earlier ones.
        """
        # The first pass leaves each accelerator the replicas that run there; the second one leaves none.
        for keeps_running in (True, False):
            for candidate in reversed(self.candidates):
                kept = candidate.running if keeps_running else 0
                removable = self.replicas[candidate.accelerator] - kept
                surplus = self.total - wanted
                # `surplus` is 0 once enough are removed; `removable` is negative where fewer are left than run there.
                self.replicas[candidate.accelerator] -= max(0, min(removable, surplus))

    def move(self, origin: Candidate, number: int, targets: Sequence[Candidate]) -> None:
        """Move up to this number of replicas from an accelerator to the first targets with room."""
        for target in targets:
            moved = min(number, self.find_room(target)) if target is not origin else 0
            self.replicas[origin.accelerator] -= moved
            self.replicas[target.accelerator] += moved
            number -= moved


def choose(wanted: int, candidates: Sequence[Candidate], last: Mapping[str, int] | None) -> dict[str, int]:
    """Return the number of replicas on each accelerator that is not refused; the sum is `wanted`.

    It is empty if all are refused. A replica that runs stays, unless it is not wanted any more, or all are ready and a
    better accelerator has room.

    Args:
        wanted: the replicas of the service.
        candidates: its accelerators, in the order in which it prefers them.
        last: the last choice; None: there is none for the present spec.
    """
    trial = _Trial(candidates)  # leaves out refused candidates
    if last is None:
        trial.add(wanted)
        return trial.replicas

    # 1. Begin with the last choice, without the replicas that are not wanted any more.
    for candidate in trial.candidates:
        trial.replicas[candidate.accelerator] = last.get(candidate.accelerator, 0)
    if trial.total > wanted:
        trial.remove(wanted)

    # 2. Move replicas that have waited for long (`settled`) to accelerators that have room. Those that run stay.
    for candidate in trial.candidates:
        waiting = max(0, trial.replicas[candidate.accelerator] - candidate.running)
        trial.move(candidate, min(waiting, candidate.settled), trial.candidates)
        # No replica waits where none could ever run, if one could elsewhere: `add` finds it another place.
        if not candidate.could_run and any(other.could_run for other in trial.candidates):
            trial.replicas[candidate.accelerator] = min(trial.replicas[candidate.accelerator], candidate.running)

    # 3. Add the replicas that are missing; once all are ready, move one to a better place.
    trial.add(wanted)
    if _is_settled(trial):
        _move_to_better(trial)
    return trial.replicas


def _is_settled(trial: _Trial) -> bool:
    """Return whether each accelerator has as many ready replicas as are planned there."""
    return all(candidate.ready == trial.replicas[candidate.accelerator] for candidate in trial.candidates)


def _move_to_better(trial: _Trial) -> None:
    """Move one replica to the first accelerator that is better than its own, if any is.

    Better is one that the service prefers and that has had room for BETTER_SECONDS (`is_better`). The replica is taken
    from the last accelerator in use. Call it only while all replicas are ready, so that one at a time moves.
    """
    for position, better in enumerate(trial.candidates):
        later = [candidate for candidate in trial.candidates[position + 1 :] if trial.replicas[candidate.accelerator]]
        if better.is_better and better.room > 0 and later:
            trial.move(later[-1], 1, [better])
            return


def list_watched(candidates: Sequence[Candidate], chosen: Mapping[str, int], *, is_ordered: bool) -> frozenset[str]:
    """Return the accelerators whose room may change the choice when it changes.

    Args:
        candidates: the accelerators.
        chosen: the present choice.
        is_ordered: True if the service prefers earlier accelerators to later ones.
    """
    usable = [candidate for candidate in candidates if not candidate.refusal]

    # A replica that waits may go to any accelerator that gets room.
    is_any_waiting = any(chosen.get(candidate.accelerator, 0) > candidate.running for candidate in usable)
    if is_any_waiting:
        return frozenset(candidate.accelerator for candidate in usable)

    # Replicas that run move only to an accelerator that is better than the last one in use.
    used_positions = [position for position, candidate in enumerate(usable) if chosen.get(candidate.accelerator, 0)]
    if not used_positions or not is_ordered:
        return frozenset()
    return frozenset(candidate.accelerator for candidate in usable[: used_positions[-1]])


def list_shares(candidates: Sequence[Candidate], chosen: Mapping[str, int]) -> list[AcceleratorShare]:
    """Return the choice in the form of the status: replicas by accelerator, with reasons for those without any."""
    shares = []
    for candidate in candidates:
        reason = _find_reason(candidate, chosen)
        share = AcceleratorShare(
            accelerator=candidate.accelerator,
            replicas=chosen.get(candidate.accelerator, 0),
            reason=reason,
            message=_explain_reason(candidate, reason),
            tokens_per_second=format_rate(candidate.tokens_per_second) if candidate.tokens_per_second else None,
        )
        shares.append(share)
    return shares


def _find_reason(candidate: Candidate, chosen: Mapping[str, int]) -> ShareReason | None:
    """Return what the status says beside the number of an accelerator's replicas; None if the number says it all."""
    if candidate.refusal:
        return "Refused"
    if not candidate.could_run:
        return "NoSuchHardware"
    if chosen.get(candidate.accelerator, 0):
        return None
    return "NotNeeded" if candidate.room > 0 else "NoRoom"


def _explain_reason(candidate: Candidate, reason: ShareReason | None) -> str:
    """Return the message for a reason; of an accelerator that is not needed, the speed that it would give.

    It is empty if there is no reason, or if that speed is unknown.
    """
    if reason == "Refused":
        return candidate.refusal
    if reason in {"NoSuchHardware", "NoRoom"}:
        return candidate.lack
    if reason == "NotNeeded" and candidate.tokens_per_second > 0:
        return f"{format_rate(candidate.tokens_per_second)} tokens/s there"
    return ""


def describe_shares(shares: Sequence[AcceleratorShare]) -> str:
    """Return a choice in words, such as `2 on metal (52 tokens/s), 1 on nvidia; amd: no node has amd.com/gpu`."""
    used = ", ".join(
        f"{share.replicas} on {share.accelerator}"
        + (f" ({share.tokens_per_second} tokens/s)" if share.tokens_per_second is not None else "")
        for share in shares
        if share.replicas
    )
    unused = [f"{share.accelerator}: {share.message}" for share in shares if share.message and not share.replicas]
    return "; ".join(filter(None, (used, *unused)))
