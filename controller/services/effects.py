"""The effects of a decision about a service in this process: what begins or ends beside its writes."""

from collections.abc import Mapping
from typing import Final

import msgspec

from controller.placement.candidate_room import ProspectiveReplica
from controller.services.probe_policy import Question
from controller.services.traffic import Traffic
from controller.services.traffic_meter import TrafficTarget
from runtimes.probe import ProbeResult


class StartProbe(msgspec.Struct, frozen=True):
    """Probe the endpoints until one has generated a token."""

    question: Question
    proof: ProbeResult | None
    """The answer that an earlier leader got."""


class StopProbe(msgspec.Struct, frozen=True):
    """Probe nothing of the service."""


class ReadTraffic(msgspec.Struct, frozen=True):
    """Read the metrics of the pods from now on."""

    target: TrafficTarget
    shown: Traffic
    """The traffic in the status, which stays until this leader has read the pods itself."""


class StopTraffic(msgspec.Struct, frozen=True):
    """Read no metrics of the service."""


class AwaitRollout(msgspec.Struct, frozen=True):
    """Wait until the pods of these Deployments may be replaced; none waits if there are none."""

    deployments: frozenset[str]


class FollowRooms(msgspec.Struct, frozen=True):
    """Decide again when the room for one of these replicas comes or goes, by accelerator."""

    prospects: Mapping[str, ProspectiveReplica]


class ForgetService(msgspec.Struct, frozen=True):
    """Forget all that is known of a service that is gone."""


ServiceEffect = StartProbe | StopProbe | ReadTraffic | StopTraffic | AwaitRollout | FollowRooms | ForgetService
NOTHING_LEFT: Final[tuple[ServiceEffect, ...]] = (
    StopProbe(),
    StopTraffic(),
    AwaitRollout(frozenset()),
    FollowRooms({}),
    ForgetService(),
)
"""The effects of the end of a service."""
