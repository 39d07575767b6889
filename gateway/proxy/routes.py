"""What a client may ask for. Nothing else of an engine can be reached: no loading, pulling, slots or settings."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

HEALTH: Final = "/health"
MODELS: Final = "/v1/models"

INFERENCE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "/v1/chat/completions": "chat",
        "/v1/completions": "completions",
        "/v1/embeddings": "embeddings",
        "/v1/rerank": "rerank",
        "/rerank": "rerank",
        "/v1/responses": "responses",
        "/v1/messages": "messages",
    }
)
"""Paths that a client posts JSON to, which names its model, and what metrics and log call them."""

LISTED: Final = ", ".join((MODELS, *INFERENCE))
"""For who asks for something else."""


def name(path: str) -> str:
    """Return what log and metrics call a path: never the path itself, in which a client may have put anything."""
    return INFERENCE.get(path, "models" if path == MODELS else "other")
