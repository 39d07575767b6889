"""The URL paths that clients may use. No other path of an engine can be reached: no loading, pulling or settings."""

import re
from collections.abc import Mapping
from typing import Final

HEALTH: Final = "/health"
ENGINE_LIVENESS: Final = "/live/engine"
"""Served by the proxy of a pod only, for the kubelet's liveness probe of the engine."""
MODELS: Final = "/v1/models"
METRICS: Final = "/metrics"
"""Served by the proxy of a pod only: that of a host has its metrics on its control socket."""
METRICS_OF_PROXY: Final = f"{METRICS}?engine=false"
"""The proxy's series without those of its engine."""

RERANK_ALIAS: Final = "/rerank"
INFERENCE: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    RERANK_ALIAS: "rerank",
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "input_tokens",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/translations": "translations",
}
"""Paths to which clients POST a body that names the model, with their name in metrics and log.

They are the paths of OpenAI's and Anthropic's APIs that an engine here has and that need no state between two requests:
stored responses and chats, batches and `compact` are not among them. An engine's own paths are not served either, for
two engines of one service would answer them in two forms (`/tokenize`), or they act on the requests of others.
"""
TOKEN_COUNT_ROUTES: Final = frozenset({"input_tokens", "count_tokens"})
"""Names of the paths that only count the tokens of a prompt: an engine whose model fails answers them all the same."""
FORM_ROUTES: Final = frozenset({"transcriptions", "translations"})
"""Names of the paths whose body is a form with a file, and not JSON."""
ANTHROPIC_ROUTES: Final = frozenset({"messages", "count_tokens"})
"""Names of the paths of Anthropic's API, whose clients read another form of errors."""

OLLAMA_PREFIX: Final = "/api/"
"""Begin of the paths of Ollama's API, which only the router of `pomona up` serves."""
OLLAMA_INFERENCE: Final[Mapping[str, str]] = {
    "/api/chat": "ollama_chat",
    "/api/generate": "ollama_generate",
    "/api/embed": "ollama_embed",
    "/api/embeddings": "ollama_embed",
}
"""Those for inference, with their names in metrics and log; engines are asked for OpenAI's paths instead."""
_OLLAMA: Final = "ollama"
OLLAMA_ROUTES: Final = frozenset({*OLLAMA_INFERENCE.values(), _OLLAMA})
"""Names of the paths of Ollama's API, whose clients read a third form of errors."""

_ALIAS_PREFIX: Final = re.compile(r"^/engines(?:/llama\.cpp)?(?=/v1/)")

SERVED: Final = ", ".join((MODELS, *INFERENCE))
"""The list for an error message."""


def resolve_alias(path: str) -> str:
    """Return the path that another one stands for, or the path itself.

    Docker Model Runner serves the same API under `/engines/llama.cpp/v1` and `/engines/v1`: a program that was written
    for it finds it here, too, and only its base URL changes.
    """
    return _ALIAS_PREFIX.sub("", path)


def route_name(path: str) -> str:
    """Return the label of `path` in metrics and log; never the path itself, which a client may fill with anything."""
    path = resolve_alias(path)
    if path.startswith(OLLAMA_PREFIX):
        return OLLAMA_INFERENCE.get(path, _OLLAMA)
    return INFERENCE.get(path, "models" if path == MODELS else "other")
