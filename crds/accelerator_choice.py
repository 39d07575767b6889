"""`status.choice` of an InferenceService that may use several accelerators: its replicas on each, and why."""

from typing import Annotated, Literal

from crds.meta import Accelerator, ApiStruct, Count, ShortText, described, keyed_by
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
    message: Annotated[str, described("The reason in words, with the way out.", max_length=1024)] = ""
    tokens_per_second: Annotated[
        Rate | None,
        "Speed of a replica on the fastest device class with room there, in tokens per second: see status.speeds. "
        "Absent if it is unknown.",
    ] = None


class AcceleratorChoice(ApiStruct, frozen=True):
    """The choice among several accelerators."""

    message: Annotated[
        str,
        described(
            "The choice in words, such as: 2 on metal, 1 on nvidia; amd: no node has amd.com/gpu.", max_length=4096
        ),
    ] = ""
    accelerators: Annotated[
        list[AcceleratorShare],
        described(
            "All accelerators that were compared, in their order: that of spec.scheduling.pools, else the fastest "
            "first, and those of unknown speed in the order of the controller's table (nvidia, amd, intel-gaudi, "
            "intel, metal, then further ones).",
            max_length=32,
            **keyed_by("accelerator"),
        ),
    ] = []
    inputs: Annotated[
        ShortText,
        "Digest of the spec by which the accelerators were chosen. After an edit they are chosen anew, unless it "
        "is one of replicas, suspend, priority or evictionProtection alone.",
    ] = ""
    probing_since: Annotated[
        str,
        described(
            "Time at which the first choice began to wait for measurements, for 3 minutes at most. Absent if it never "
            "waited.",
            max_length=64,
            format="date-time",
        ),
    ] = ""
