"""The weights that do not fit into the devices of a replica, and are computed on the processor beside them.

llama.cpp keeps either the experts of the last layers in host memory (`--n-cpu-moe`) or whole layers (`--n-gpu-layers`).
Experts come first: a token reads few of them, so that little of the speed is lost.
"""

import math
from typing import Final, NamedTuple

from crds.model import Layout
from crds.serving import ServingOptions
from fitness.memory import Workload, estimate_pod
from fitness.speed import OFFLOADING_ENGINES, RunMode, WeightsPlace, experts_share

_LEAST_SHARE: Final = 0.1
"""With a smaller part of the layers in the devices, a replica on the processor alone is as fast."""


DividedLayers = tuple[RunMode, int]
"""Layers that are in the devices, or of which the experts are."""


class DividedModel(NamedTuple):
    """The parts of a model, by which it is divided between devices and host."""

    weights_bytes: int
    """Weights on each device if all are there."""
    cache_bytes: int
    """Cache on each device if all of it is there."""
    rest_bytes: int
    """Memory of each device that is never moved."""
    container_bytes: int
    """Memory of the container if nothing is moved there."""
    total_weights_bytes: int
    total_cache_bytes: int
    layers: int
    experts: float
    """Share of the experts in all weights; 0: the model has none, or it is unknown."""

    def find_least(self, host_bytes: int) -> float:
        """Return the free memory of each device below which no division fits beside so much host memory."""
        moved, kept = host_bytes - self.container_bytes, self.weights_bytes + self.cache_bytes
        if moved < 0 or not kept:
            return math.inf
        # A byte more on each side: sizes are rounded.
        share = max(_LEAST_SHARE, 1 - (moved + 1) / (self.total_weights_bytes + self.total_cache_bytes))
        least = kept * share
        if self.experts:
            share = max(1 - self.experts, 1 - (moved + 1) / self.total_weights_bytes)
            least = min(least, self.cache_bytes + self.weights_bytes * share)
        return self.rest_bytes + least - 1

    def count_layers(self, free_bytes: int) -> DividedLayers | None:
        """Return the most that fits into devices with so much free memory each; None: it is too little."""
        weights, rest, layers = self.weights_bytes, self.rest_bytes, self.layers
        if not weights or not layers:
            return None
        if self.experts:
            room = (free_bytes - rest - self.cache_bytes) / weights - (1 - self.experts)
            if room >= 0:
                return "moe_offload", int(min(1.0, room / self.experts) * layers)
        number = int(min(1.0, (free_bytes - rest) / (weights + self.cache_bytes)) * layers)
        return ("partial_offload", number) if number / layers >= _LEAST_SHARE else None

    def count_host_bytes(self, divided: DividedLayers) -> int:
        """Return the memory that the container must have with these layers in the devices."""
        mode, number = divided
        share = 1 - number / self.layers
        if mode == "moe_offload":
            return self.container_bytes + round(self.total_weights_bytes * self.experts * share)
        return self.container_bytes + round((self.total_weights_bytes + self.total_cache_bytes) * share)

    def place_layers(self, divided: DividedLayers) -> tuple[WeightsPlace, int]:
        """Return where the weights are with these layers in the devices, and the memory that each device must have."""
        mode, number = divided
        share = number / self.layers
        if mode == "moe_offload":
            share = 1 - self.experts * (1 - share)
            return WeightsPlace(mode, share), self.rest_bytes + self.cache_bytes + round(self.weights_bytes * share)
        return WeightsPlace(mode, share), self.rest_bytes + round((self.weights_bytes + self.cache_bytes) * share)

    def divide(self, free_bytes: int, host_bytes: int, headroom: float = 1.0) -> DividedLayers | None:
        """Return what is in the devices; None: no division fits.

        A little more in host memory costs little speed, and leaves the devices some headroom. So it is as much as fits
        with the headroom, or without, if no such division does, or none of the same kind.

        Args:
            free_bytes: free memory of each device.
            host_bytes: free memory beside the devices.
            headroom: factor by which the devices should have more than the need.
        """
        most = self.count_layers(free_bytes)
        if most is None or self.count_host_bytes(most) > host_bytes:
            return None
        roomy = self.count_layers(int(free_bytes / headroom))
        if roomy is None or roomy[0] != most[0] or self.count_host_bytes(roomy) > host_bytes:
            return most
        return roomy


def find_parts(
    workload: Workload, options: ServingOptions, device_count: int, active_share: float | None = None
) -> DividedModel | None:
    """Return the parts of a model; None if the engine divides nothing, or a size is unknown.

    Args:
        workload: what the engine loads.
        options: serving options.
        device_count: devices of one replica.
        active_share: share of the parameters that a token uses, of a model with experts; None: unknown.
    """
    layout = workload.layout
    if layout is None or workload.runtime not in OFFLOADING_ENGINES or workload.draft is not None:
        return None
    found = estimate_pod(workload, options, device_count)
    if found is None or found.device is None or found.device_bytes_each is None:
        return None
    weights, cache = found.device.parts.weights_bytes, found.device.parts.cache_bytes
    has_experts = layout.expert_outputs and active_share is not None
    return DividedModel(
        weights_bytes=weights,
        cache_bytes=cache,
        rest_bytes=found.device_bytes_each - weights - cache,
        container_bytes=found.container_bytes,
        total_weights_bytes=layout.tensor_bytes,
        total_cache_bytes=cache * device_count,
        layers=sum(each.count for each in layout.layers),
        experts=_stored_experts_share(layout, active_share) if has_experts and active_share is not None else 0.0,
    )


def _stored_experts_share(layout: Layout, active_share: float) -> float:
    """Return the share of the experts in all weights: all that a token does not use, and those that it does."""
    return 1 - active_share * (1 - experts_share(layout))
