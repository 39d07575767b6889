"""Estimator of the speed of a model on hardware where it may never have run.

Each token of an answer reads all active weights and the cache once, so that memory bandwidth bounds its speed, and
launching kernels takes time however small the model is. That is the roofline with two terms:

    seconds for each token = bytes that are read / (bandwidth x efficiency) + layers x overhead of a layer

A prompt is computed in batches, so that arithmetic bounds its speed. What was measured on a device class corrects the
estimate (`fitness/corrections.py`). Without bandwidth there is no estimate: a constant would be wrong by a factor of
four (docs/fit-and-speed.md), and nobody could see it.
"""

from typing import Final, Literal, NamedTuple

from crds.model import Layout
from crds.serving import ServingOptions
from fitness.corrections import NO_CORRECTIONS, Corrections
from fitness.serving_devices import ServingDevices

RunMode = Literal["accelerator", "partial_offload", "moe_offload", "cpu"]
"""Where the weights are: all in devices; some layers in host memory; the experts in host memory; no devices."""
Method = Literal["measured", "corrected", "roofline"]


class SpeedRange(NamedTuple):
    """Tokens a second."""

    low: float
    expected: float
    high: float


class SpeedEstimate(NamedTuple):
    """The speed of one stream, and how it is known."""

    generation: SpeedRange
    prompt: SpeedRange | None
    """Prompt tokens a second; None: the arithmetic speed of the devices is unknown."""
    method: Method
    run_mode: RunMode
    basis: str
    """The figures behind it, for people."""


class WeightsPlace(NamedTuple):
    """Where the weights are while the model runs."""

    run_mode: RunMode
    device_share: float = 1.0
    """Share of the bytes of the weights that the devices hold, from 0 to 1."""


def estimate_speed(
    layout: Layout,
    options: ServingOptions,
    runtime: str,
    devices: ServingDevices,
    corrections: Corrections = NO_CORRECTIONS,
    *,
    active_share: float | None = None,
    place: WeightsPlace | None = None,
) -> SpeedEstimate | None:
    """Estimate the speed of one stream; None if bandwidth or bytes are not known.

    Args:
        layout: layout of the model, from the artifact's header.
        options: serving options.
        runtime: the engine.
        devices: devices of one replica.
        corrections: what was learned from measurements.
        active_share: share of the parameters that a token uses, of a model with experts; None: unknown.
        place: where the weights are; None: in the devices, or in memory if the replica has none.
    """
    raise NotImplementedError
