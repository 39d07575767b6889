"""The URL paths that clients may use. No other path of an engine can be reached: no loading, pulling or settings."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

HEALTH: Final = "/health"
ENGINE_LIVENESS: Final = "/live/engine"
"""Served by the proxy of a pod only, for the kubelet's liveness probe of the engine."""
MODELS: Final = "/v1/models"
METRICS: Final = "/metrics"
"""Served by the proxy of a pod only: that of a host has its metrics on its control socket."""
METRICS_OF_PROXY: Final = f"{METRICS}?engine=false"
"""The proxy's series without those of its engine; a proxy of an earlier version ignores the query."""

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
"""Paths to which clients POST a JSON body that names the model, with their name in metrics and log."""
ANTHROPIC_ROUTES: Final = frozenset({"messages", "count_tokens"})
"""Names of the paths of Anthropic's API, whose clients read another form of errors."""

SERVED: Final = ", ".join((MODELS, *INFERENCE))
"""The list for an error message."""


def route_name(path: str) -> str:
    """Return the label of `path` in metrics and log; never the path itself, which a client may fill with anything."""
    return INFERENCE.get(path, "models" if path == MODELS else "other")
