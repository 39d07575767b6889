"""The fit of a model on the devices of a replica: run mode, level, speed, and what is missing, in words."""

from typing import Literal, NamedTuple

from crds.serving import ServingOptions
from fitness.corrections import NO_CORRECTIONS, Corrections
from fitness.memory import Workload
from fitness.serving_devices import ServingDevices
from fitness.speed import RunMode, SpeedEstimate

FitLevel = Literal["perfect", "good", "marginal", "too_tight"]
"""From the best to the worst."""


class Fit(NamedTuple):
    """The fit of one model on the devices of one replica, with what is free now."""

    level: FitLevel
    run_mode: RunMode
    needed_bytes: int
    """Memory that each device must have, or the container or host if the model runs without devices."""
    available_bytes: int
    """The part of it that is free."""
    utilization: float
    """needed_bytes by available_bytes."""
    speed: SpeedEstimate | None
    shortfall: str
    """What is missing, and the way out; empty if the model fits."""
    level_if_idle: FitLevel
    """The level if nothing else ran on the devices."""


def assess_fit(
    workload: Workload,
    options: ServingOptions,
    devices: ServingDevices,
    corrections: Corrections = NO_CORRECTIONS,
    *,
    active_share: float | None = None,
) -> Fit | None:
    """Assess the fit of `workload`; None if its memory or that of the devices is unknown."""
    raise NotImplementedError
