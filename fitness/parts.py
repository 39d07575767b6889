"""The parts of a memory estimate, which every engine's formulas fill, and their split between container and device."""

from typing import Final, NamedTuple

PART_NAMES: Final = ("weights", "context", "checkpoints", "compute buffers", "engine", "projector and adapters")
"""Names of the fields of `Parts` in messages, in their order."""


class Parts(NamedTuple):
    """Bytes of each part."""

    weights_bytes: int
    cache_bytes: int
    """Keys, values and recurrent states of all slots."""
    checkpoints_bytes: int
    """Copies of states that a shortened cache cannot restore, kept so that a conversation continues at once."""
    compute_bytes: int
    """Intermediate results of one batch."""
    engine_bytes: int
    """The engine itself, with its vocabulary."""
    further_bytes: int = 0
    """Projector and adapters."""


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
