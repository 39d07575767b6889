"""The terms of an engine's estimates: its memory formulas, and how fast it reads weights."""

from typing import Final, NamedTuple

from crds.serving import ServingOptions
from crds.weights_header import Layout

PART_NAMES: Final = (
    *("weights", "context", "checkpoints", "compute buffers", "engine", "projector and adapters"),
    "remembered conversations",
)
"""Names of the fields of `Parts` in messages, in their order."""


class Parts(NamedTuple):
    """Bytes of each part."""

    weights_bytes: int = 0
    cache_bytes: int = 0
    """Keys, values and recurrent states of all slots."""
    checkpoints_bytes: int = 0
    """Copies of states that a shortened cache cannot restore, kept so that a conversation continues at once."""
    compute_bytes: int = 0
    """Intermediate results of one batch."""
    engine_bytes: int = 0
    """The engine itself, with its vocabulary."""
    further_bytes: int = 0
    """Projector and adapters."""
    prompts_bytes: int = 0
    """Earlier conversations, kept so that their next turn computes only what is new."""


class DeviceParts(NamedTuple):
    """Bytes of a replica in a pod with devices: two figures, because each has a limit of its own."""

    container: Parts
    """Memory of the container."""
    device: Parts
    """Memory of each device; all devices of a replica are alike."""
    devices: int
    """Devices that share the model."""
    used_permille: int = 1000
    """Share of each device that the engine uses, in thousandths."""


class EngineMemory:
    """The memory formulas of one engine, by which `fitness/memory.py` computes; this one is unknown."""

    __slots__ = ()

    def estimate_parts(self, layout: Layout, options: ServingOptions) -> Parts | None:
        """Compute the memory of a replica without devices of its own: on a host, or in a container on the processor.

        None: the layout has layers for which the formulas do not hold.
        """
        del layout, options
        return None

    def estimate_device_parts(self, layout: Layout, options: ServingOptions, devices: int) -> DeviceParts | None:
        """Compute the memory of a replica in a pod with `devices` devices; None if it cannot be known."""
        del layout, options, devices
        return None

    def propose_prompt_cache(self, layout: Layout, options: ServingOptions, free_bytes: int) -> int:
        """Return the bytes for remembered conversations that are worth while; `free_bytes` are free beside others."""
        del layout, options, free_bytes
        return 0

    def refuse_devices(self, layout: Layout, devices: int) -> str | None:
        """Return why the engine cannot divide a model among `devices` devices, or None if it can."""
        del layout, devices
        return None

    def least_free_bytes(self, options: ServingOptions, memory_bytes: int) -> int:
        """Return the bytes of a device that must be free when the engine starts, however few of them it needs."""
        del options, memory_bytes
        return 0


class SpeedPrior(NamedTuple):
    """Habits of an engine on a vendor's devices."""

    efficiency: float
    """Share of the bandwidth that reading weights achieves."""
    layer_ms: float
    """Time that a layer takes beside reading: starting its kernels, and what they wait for."""
