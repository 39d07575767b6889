"""Placement by fit and speed: what a service demands, its speed on each device class, and the place that it got."""

from typing import Annotated, Final, Literal

from msgspec import Meta

from crds.meta import ApiStruct, Count, ShortText, Time, keyed_by
from crds.rate import Rate

FitLevel = Literal["perfect", "good", "marginal", "too_tight"]
"""The fit of a replica on a device, from the best to the worst."""
SpeedSource = Literal["Measured", "Corrected", "Estimated"]
"""Measured: a benchmark of this model on this class. Corrected: an estimate that is corrected by benchmarks of other
models on the class, or on others of its vendor. Estimated: by memory bandwidth, the bytes of a token and the engine."""
SpeedBasis = Literal["cache", "probe", "estimate"]
"""cache: a stored measurement that was not made for this choice. probe: it was measured while the choice of an
accelerator waited. estimate: it was not measured."""
SpeedRefusal = Literal["TooSlow", "SpeedUnknown", "TooTight"]
MOST_CLASSES: Final = 32
"""Device classes that a service lists at most."""
MOST_NODE_SPEEDS: Final = 100
"""Nodes and hosts whose speed a service lists at most: as many as it may have replicas."""


class PlacementDemands(ApiStruct, frozen=True):
    """Demands of a service on the devices of its replicas."""

    min_tokens_per_second: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        "Least speed of generation for a single request, in tokens per second. No replica is placed on a device "
        "class whose measured or estimated speed in status.speeds is lower, or unknown. Default: any speed.",
    ] = None
    min_fit: Annotated[
        Literal["perfect", "good", "marginal"],
        "Least fit of a replica in the memory of a device class: see status.speeds. Default: marginal, any class "
        "on which it fits at all.",
    ] = "marginal"


class ClassSpeed(ApiStruct, frozen=True):
    """The speed and the fit of one replica on one device class."""

    device_class: Annotated[ShortText, "Device class, for example nvidia-l4x1 or apple-m4-max-40c-128gb."]
    tokens_per_second: Annotated[
        Rate | None, "Generation for a single request, in tokens per second. Absent if it is unknown."
    ] = None
    low: Annotated[
        Rate | None, "Lower end of the range in which 4 of 5 measurements are expected. Absent if it is measured."
    ] = None
    high: Annotated[Rate | None, "Upper end of that range, at most three times the lower one."] = None
    source: Annotated[
        SpeedSource | None,
        "Measured: a benchmark of this model on this class. Corrected: an estimate, corrected by benchmarks of "
        "other models on the class, or on others of its vendor. Estimated: by the memory bandwidth of the class, "
        "the bytes that a token reads, and the engine.",
    ] = None
    measurements: Annotated[
        Count | None,
        "Number of benchmarks of other models by which the estimate is corrected: those of this namespace, and of "
        "pomona-system. Absent if it is not corrected.",
    ] = None
    fit: Annotated[
        FitLevel | None,
        "Fit of a replica in the memory of the class, if nothing else runs there: perfect, good, marginal or "
        "too_tight. Absent if it is unknown.",
    ] = None
    shortfall: Annotated[str, Meta(max_length=512), "What is missing if the replica does not fit, and the way out."] = (
        ""
    )
    refusal: Annotated[
        SpeedRefusal | None,
        "Why no replica is placed on the class. TooSlow, SpeedUnknown: spec.placement.minTokensPerSecond. "
        "TooTight: spec.placement.minFit. Absent if it may be placed there.",
    ] = None


ClassSpeeds = Annotated[
    list[ClassSpeed],
    Meta(max_length=MOST_CLASSES),
    "Speed and fit of one replica on each device class of the cluster that it may use, the fastest first.",
    keyed_by("deviceClass"),
]


class NodeSpeed(ApiStruct, frozen=True):
    """The speed of a replica on one node or host."""

    node: Annotated[ShortText, "Name of the node or host."]
    tokens_per_second: Annotated[Rate, "Generation for a single request, in tokens per second."]


NodeSpeeds = Annotated[
    list[NodeSpeed],
    Meta(max_length=MOST_NODE_SPEEDS),
    "Speed of a replica on each node and host that runs one, as in status.speeds, by which the gateway divides "
    "conversations. Absent unless they differ by more than a tenth; a change of a tenth or less is not shown.",
    keyed_by("node"),
]


class PlacementAlternative(ApiStruct, frozen=True):
    """Another place that was compared."""

    device_class: Annotated[ShortText, "Device class of the place; empty if it is unknown."] = ""
    place: Annotated[
        ShortText,
        "The best free node or host of the class, as node/NAME or host/NAME. Absent if none is free or accepted.",
    ] = ""
    score: Annotated[Count | None, "Points of the place, from 0 to 100."] = None
    tokens_per_second: Annotated[
        Rate | None, "Speed of the replica there, in tokens per second. Absent if it is unknown."
    ] = None
    reason: Annotated[str, Meta(max_length=512), "What makes up the score, or why it is no place."] = ""


class PlacementStatus(ApiStruct, frozen=True):
    """The place of the last replica that the queue has placed, and why it is there."""

    place: Annotated[ShortText, "Node or host, as node/NAME or host/NAME."]
    device_class: Annotated[ShortText, "Device class of the place; empty if it is unknown."] = ""
    score: Annotated[
        Count | None,
        "Points of the place when it was chosen, from 0 to 100: up to 60 for the speed in relation to the fastest "
        "class, 16 if the weights are there, up to 14 for packing, 5 for low utilization and 5 for low cost. "
        "Absent if others ended to make room there.",
    ] = None
    tokens_per_second: Annotated[
        Rate | None, "Speed of the replica there, in tokens per second: see status.speeds."
    ] = None
    source: Annotated[SpeedSource | None, "Where the speed comes from: Measured, Corrected or Estimated."] = None
    basis: Annotated[
        SpeedBasis | None,
        "How the speed is known. cache: a stored measurement that was not made for this choice; probe: it was "
        "measured while the choice of an accelerator waited for that; for both, source is Measured. estimate: it "
        "was not measured; source is Corrected or Estimated.",
    ] = None
    fit: Annotated[FitLevel | None, "Fit of the replica in the memory of the place."] = None
    reason: Annotated[str, Meta(max_length=512), "What makes up the score, in words."] = ""
    others: Annotated[
        list[PlacementAlternative],
        Meta(max_length=3),
        "The best three other places when it was chosen, one for each device class, the best first.",
    ] = []


class SpeedReplacement(ApiStruct, frozen=True):
    """The last replacement of a replica whose speed or fit had fallen."""

    uid: Annotated[str, Meta(max_length=64), "uid of the pod that ends."]
    from_place: Annotated[ShortText, "Its node, as node/NAME."]
    observed: Annotated[
        Rate, "Speed of a single request that was observed there, in tokens per second. Empty: it did not fit."
    ]
    expected: Annotated[Rate, "Speed that was expected there, in tokens per second."]
    least_tokens_per_second: Annotated[
        Rate, "The replica goes only to a device class whose speed in status.speeds is known and not lower."
    ]
    started_at: Annotated[Time, "When the new replica was asked for."]
    ended_at: Annotated[
        Time | None,
        "When it was over. The next one in its namespace begins after a cool-down. Absent while it goes on.",
    ] = None
    outcome: Annotated[
        Literal["Moved", "GivenUp"] | None,
        "Moved: the new replica is in its place. GivenUp: the old one stayed, for the reason in message.",
    ] = None
    to_place: Annotated[ShortText, "Node of the new replica, as node/NAME. Absent before it is ready."] = ""
    helped: Annotated[
        bool,
        "The speed was seen to be as expected on the new node. Without that, no other replica of the service is "
        "replaced: what slows it down has gone along.",
    ] = False
    message: Annotated[str, Meta(max_length=1024), "Explanation for people."] = ""
