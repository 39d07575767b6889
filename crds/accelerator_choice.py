"""`status.choice` of an InferenceService that may use several accelerators: its replicas on each, and why."""

from typing import Annotated, Literal

from msgspec import Meta

from crds.meta import Accelerator, ApiStruct, Count, ShortText, keyed_by
from crds.rate import Rate

ShareReason = Literal["Refused", "NoSuchHardware", "NoRoom", "NotNeeded"]


class AcceleratorShare(ApiStruct, frozen=True):
    """The replicas of a service on one accelerator."""

    accelerator: Annotated[Accelerator, "The accelerator."]
    replicas: Annotated[Count, "Replicas that the controller has chosen to run there, also those that wait."] = 0
    reason: Annotated[
        ShareReason | None,
        "Why no replica is there. Refused: the service cannot run there. NoSuchHardware: no node or host there "
        "could ever run a replica. NoRoom: there was no room. NotNeeded: there was room, but faster "
        "accelerators, or those before it, had enough. Absent if it has replicas.",
    ] = None
    message: Annotated[str, Meta(max_length=1024), "The reason in words, with the way out."] = ""
    tokens_per_second: Annotated[
        Rate | None,
        "Speed of a replica on the fastest device class with room there, in tokens per second: see status.speeds. "
        "Absent if it is unknown.",
    ] = None


class AcceleratorChoice(ApiStruct, frozen=True):
    """The choice among several accelerators."""

    message: Annotated[
        str,
        Meta(max_length=4096),
        "The choice in words, such as: 2 on metal, 1 on nvidia; amd: no node has amd.com/gpu.",
    ] = ""
    accelerators: Annotated[
        list[AcceleratorShare],
        Meta(max_length=32),
        "All accelerators that were compared, in their order: that of spec.scheduling.pools, else the fastest "
        "first, and those of unknown speed in the order of the controller's table (nvidia, amd, intel-gaudi, "
        "intel, metal, then further ones).",
        keyed_by("accelerator"),
    ] = []
    inputs: Annotated[
        ShortText,
        "Digest of the spec by which the accelerators were chosen. After an edit they are chosen anew, unless it "
        "is one of replicas, suspend, priority or evictionProtection alone.",
    ] = ""
    probing_since: Annotated[
        str,
        Meta(max_length=64),
        "Time at which the first choice began to wait for measurements, for 3 minutes at most. Absent if it never "
        "waited.",
        {"format": "date-time"},
    ] = ""
