"""`status.queue` of an InferenceService: its place in the queue, and why it waits there."""

from typing import Annotated, Literal

from msgspec import Meta

from crds.meta import ApiStruct, Count, LongText, ShortText, Time

QueueReason = Literal[
    "InsufficientDevices",
    "InsufficientMemory",
    "HeadOfLine",
    "Draining",
    "Quota",
    "CellsClosed",
    "NotConsidered",
    "AdmissionFailed",
    "NoSuchHardware",
]
NoEstimate = Literal["TooFewSeen", "TooFewAhead", "Overtaken", "Draining", "NoPosition"]
_Place = Annotated[str, Meta(max_length=512)]
"""node/NAME, host/NAME or NAMESPACE/NAME."""


class EstimatedStart(ApiStruct, frozen=True):
    """The range in which a replica starts with a probability of 80 %."""

    earliest: Annotated[Time, "Lower end of the range."] = ""
    latest: Annotated[
        Time, "Upper end of the range. From the time of the estimate, it is at most three times as far away."
    ] = ""


class QueueNomination(ApiStruct, frozen=True):
    """The room that is kept for a replica until others have ended."""

    cells: Annotated[
        list[_Place], Meta(max_length=32), "The nodes and hosts, as node/NAME or host/NAME, one for each pod."
    ] = []
    victims: Annotated[
        list[_Place],
        Meta(max_length=32),
        "The services that give the room, as NAMESPACE/NAME: replicas of them end. Those of other namespaces "
        "are not named.",
    ] = []


class QueueStatus(ApiStruct, frozen=True):
    """The place of a service in the queue: that of its first replica that waits."""

    pool: Annotated[
        ShortText,
        "Pool in which the replica waits: the first one that it may use. In mode Kueue, kueue/ and the LocalQueue.",
    ] = ""
    position: Annotated[
        Count | None,
        "Place in the queue of the pool; the first is 1. Absent if no node or host could ever run the replica, or "
        "if limits allow less than it needs.",
    ] = None
    length: Annotated[Count | None, "Replicas that wait in the queue of the pool."] = None
    place: Annotated[ShortText, "Position and length in one, for example 3/12."] = ""
    ahead_by_priority: Annotated[
        dict[ShortText, Count], Meta(max_length=8), "Number of replicas ahead, by their priority."
    ] = {}
    waiting_for: Annotated[
        LongText, "What the replica needs, for example nvidia.com/gpu: 2, or on a host memory: 24.0 GiB."
    ] = ""
    enqueued_at: Annotated[
        Time | None, "When the replica came to the queue. One that is evicted keeps this time, and so its old place."
    ] = None
    nominated: Annotated[QueueNomination | None, "The room that is kept for the replica until others have ended."] = (
        None
    )
    reason: Annotated[
        QueueReason | None,
        "InsufficientDevices, InsufficientMemory: too little is free. HeadOfLine: what is free is kept for a "
        "replica ahead that waits for the same nodes or hosts. Draining: others end to make room. Quota: a limit "
        "of the pool or namespace is reached, or allows less than the replica needs. CellsClosed: all nodes or "
        "hosts that could run it take nothing new. "
        "NotConsidered: too many are ahead. AdmissionFailed: its turn could not be written, and is tried again. "
        "NoSuchHardware: no node or host could ever run it. None in mode Kueue.",
    ] = None
    message: Annotated[str, Meta(max_length=1024), "Why the replica waits, with the way out, in words for people."] = ""
    estimated_start: Annotated[
        EstimatedStart | None,
        "When the replica probably starts, by how long others ran: 4 of 5 starts are in the range. Absent if no "
        "such range can be given; noEstimate has the reason.",
    ] = None
    no_estimate: Annotated[
        NoEstimate | None,
        "Why there is no estimate. TooFewSeen: too few replicas have ended or started since this controller became "
        "the leader. TooFewAhead: so few are ahead that the end of a single one decides. Overtaken: replicas of "
        "higher priority come as fast as room becomes free. Draining: it starts as soon as others have ended. "
        "NoPosition: it cannot start.",
    ] = None
