"""What an estimate is made of: how an artifact is served, and the parts of what that takes."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from crds.serving import CacheType, Mode

PART_NAMES: Final = ("weights", "context", "checkpoints", "compute buffers", "projector and adapters", "engine")
"""Of the fields of `Parts`, for people."""


class Settings(NamedTuple):
    """How an artifact is served, as far as memory depends on it."""

    context_length: int
    """Tokens of context of each request."""
    parallel: int = 1
    """Requests at the same time, each with its whole context."""
    mode: Mode = "chat"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    runtime: str = "llama.cpp"
    extra: Sequence[str] = ()
    """The user's own arguments, in the engine's words."""
    further_bytes: int = 0
    """Sizes of projector and adapters."""


class Parts(NamedTuple):
    """Bytes of each part."""

    weights_bytes: int
    cache_bytes: int
    """Keys, values and recurrent states of all slots."""
    checkpoints_bytes: int
    """Copies of what a shortened cache cannot give again, kept so that a conversation goes on at once."""
    compute_bytes: int
    """Intermediate results of one batch."""
    further_bytes: int
    engine_bytes: int
    """The engine itself, with its vocabulary."""
