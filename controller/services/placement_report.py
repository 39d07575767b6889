"""`status.placement` of a service: the place of its last replica, with the score and the best other places."""

from collections.abc import Collection, Iterable

from controller.placement.alternatives import NO_ROOM, Alternative
from controller.placement.placement_notes import PlacementNote
from controller.placement.units import NOT_FASTER, SPEED_UNKNOWN, TOO_SLOW, TOO_TIGHT
from crds.placement import ClassSpeed, PlacementAlternative, PlacementStatus
from crds.rate import format_rate
from devices.device_class import find_single_class

_REFUSALS = {
    NO_ROOM: "too little is free there",
    TOO_SLOW: "slower than spec.placement.minTokensPerSecond",
    SPEED_UNKNOWN: "its speed is unknown, and spec.placement.minTokensPerSecond is stated",
    TOO_TIGHT: "fits less well than spec.placement.minFit",
    NOT_FASTER: "not known to be faster than the slow replica that was replaced",
}


def report_placement(
    note: PlacementNote | None, last: PlacementStatus | None, speeds: Iterable[ClassSpeed], nodes: Collection[str]
) -> PlacementStatus | None:
    """Return `status.placement`, the place of the last placed replica; None: no replica runs there any more.

    Args:
        note: the place that this leader has chosen, with the others that it compared; None: it has chosen none, so the
            last report stays while a replica is there. Without a score, others were evicted for the replica.
        last: the last report. Its place is `node/NAME` or `host/NAME`, and so is `note.cell`: a cell is a node or host
            as the queue sees it.
        speeds: the speed by device class.
        nodes: names of the nodes and hosts with a replica.
    """
    # Without a replica at the place, there is nothing to report. A place is `node/NAME` or `host/NAME`.
    if note is None:
        return last if last is not None and last.place.partition("/")[2] in nodes else None
    if note.cell.partition("/")[2] not in nodes:
        return None

    # The queue places by the class of one device, and a replica may have several.
    by_class = {find_single_class(speed.device_class): speed for speed in speeds}
    speed = by_class.get(note.device_class)

    return PlacementStatus(
        place=note.cell,
        device_class=speed.device_class if speed is not None else note.device_class,
        score=note.score.points if note.score is not None else None,
        tokens_per_second=speed.tokens_per_second if speed is not None else None,
        source=speed.source if speed is not None else None,
        fit=speed.fit if speed is not None else None,
        reason=note.score.explain() if note.score is not None else "others ended to make room for it there",
        others=[_describe_alternative(other, by_class.get(other.device_class)) for other in note.others],
    )


def _describe_alternative(other: Alternative, speed: ClassSpeed | None) -> PlacementAlternative:
    """Return a place that was not chosen as the status has it, with its score, or the reason why it was refused.

    Its speed is the one that its score was computed from, else that of its device class.
    """
    score = other.score
    tokens_per_second = speed.tokens_per_second if speed is not None else None
    if score is not None and score.tokens_per_second:
        tokens_per_second = format_rate(score.tokens_per_second)

    return PlacementAlternative(
        place=other.cell,
        device_class=speed.device_class if speed is not None else other.device_class,
        score=score.points if score is not None else None,
        tokens_per_second=tokens_per_second,
        reason=score.explain() if score is not None else _REFUSALS.get(other.refusal, other.refusal),
    )
