"""The weights that do not fit into the devices of a replica, and are computed on the processor beside them.

llama.cpp keeps either the experts of the last layers in host memory (`--n-cpu-moe`) or whole layers (`--n-gpu-layers`).
Experts come first: a token reads few of them, so that little of the speed is lost.
"""

from typing import Final, NamedTuple

from crds.model import Layout
from crds.serving import ServingOptions
from fitness.memory import Workload, estimate_pod
from fitness.serving_devices import ServingDevices
from fitness.speed import OFFLOADING_ENGINES, WeightsPlace, experts_share

_LEAST_SHARE: Final = 0.1
"""With a smaller part of the layers in the devices, a replica on the processor alone is as fast."""


class Offload(NamedTuple):
    """A division of the weights between devices and host."""

    place: WeightsPlace
    device_bytes_each: int
    """Memory that each device must have."""
    host_bytes: int
    """Memory that the container must have."""


def find_offload(
    workload: Workload,
    options: ServingOptions,
    devices: ServingDevices,
    free_bytes: int,
    active_share: float | None = None,
) -> Offload | None:
    """Return the division with the most in the devices; None if none fits, or the engine divides nothing.

    Args:
        workload: what the engine loads, which does not fit into the devices.
        options: serving options.
        devices: devices of one replica.
        free_bytes: free memory of each device.
        active_share: share of the parameters that a token uses, of a model with experts; None: unknown.
    """
    layout, host = workload.layout, devices.host_memory_bytes
    if layout is None or host is None or workload.runtime not in OFFLOADING_ENGINES or workload.draft is not None:
        return None
    found = estimate_pod(workload, options, devices.device_count)
    if found is None or found.device is None or found.device_bytes_each is None:
        return None
    weights, cache = found.device.parts.weights_bytes, found.device.parts.cache_bytes
    rest = found.device_bytes_each - weights - cache
    container = found.container_bytes
    total = layout.tensor_bytes
    if layout.expert_outputs and active_share is not None:
        experts = _stored_experts_share(layout, active_share)
        room = (free_bytes - rest - cache) / weights - (1 - experts) if weights and experts else -1.0
        if room >= 0:
            share = 1 - experts * (1 - _floor_to_layer(layout, room / experts))
            place = WeightsPlace("moe_offload", share)
            moved = Offload(place, rest + cache + round(weights * share), container + round(total * (1 - share)))
            return moved if moved.host_bytes <= host else None
    share = _floor_to_layer(layout, (free_bytes - rest) / (weights + cache) if weights else 0.0)
    if share < _LEAST_SHARE:
        return None
    moved_bytes = round((total + cache * devices.device_count) * (1 - share))
    moved = Offload(
        WeightsPlace("partial_offload", share), rest + round((weights + cache) * share), container + moved_bytes
    )
    return moved if moved.host_bytes <= host else None


def _floor_to_layer(layout: Layout, share: float) -> float:
    layers = sum(each.count for each in layout.layers)
    return int(min(1.0, share) * layers) / layers if layers and share > 0 else 0.0


def _stored_experts_share(layout: Layout, active_share: float) -> float:
    """Return the share of the experts in all weights: all that a token does not use, and those that it does."""
    return 1 - active_share * (1 - experts_share(layout))
