"""Memory and speed of engines made of mlx-lm, as its own source computes it (0.32: `models/cache.py`, `generate.py`).

Metal's own allocator keeps freed memory for the next use, so that memory stays at its peak after one long prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from crds.serving import CacheType, ServingOptions
from crds.size import divide_up
from crds.weights_header import Layout
from runtimes.engine_estimate import EngineMemory, Parts, SpeedPrior
from runtimes.serving import SHARED_REQUESTS, count_requests, count_shared_tokens

_STEP: Final = 256
"""Tokens by which a cache grows (`KVCache.step`)."""
_PREFILL: Final = 2048
"""Tokens of a prompt that are computed at once (`--prefill-step-size`)."""
_ELEMENT_BYTES: Final = 2
"""Bytes of an element of the cache and of intermediate results: bfloat16 or float16."""
_CACHE_BITS: Final[Mapping[CacheType, int]] = {"f16": 32, "q8_0": 17, "q4_0": 9}
"""Bits of two elements of a cache; a quantized group of 64 has two 16-bit numbers in addition (`--kv-bits`)."""
PROMPTS_AT_ONCE: Final = 2
"""Prompts that are computed at once (`--prompt-concurrency`): more take memory and delay the answers beside them."""
_MOST_CONVERSATIONS: Final = 4
"""Conversations that are remembered, unless more are served at once."""
_FURTHER_ENTRIES_PERCENT: Final = 230
"""A conversation with the further entries that it has if its cache cannot go back (`LRUPromptCache`, simulated)."""
_PROCESS_BYTES: Final = 400 * 2**20
"""Python with mlx, mlx-lm and transformers."""
_TOKEN_BYTES: Final = 1200
"""Bytes of each token of the vocabulary, which a tokenizer of transformers keeps in Python and in Rust."""

MLX_SPEED: Final[Mapping[str, SpeedPrior]] = {"metal": SpeedPrior(0.88, 0.10), "cpu": SpeedPrior(0.4, 0.50)}
"""By vendor; see `Runtime.speed_priors`."""


@dataclass(frozen=True, slots=True)
class MlxMemory(EngineMemory):
    """The memory formulas of mlx-lm and what is made of it."""

    def estimate_parts(self, layout: Layout, options: ServingOptions) -> Parts | None:
        """Compute the memory of one server after prompts of the full context on all slots.

        None: a layer keeps a recurrent state or a latent (keys without values), of which mlx-lm makes further copies.
        """
        if any(layers.state_bytes or (layers.key_elements and not layers.value_elements) for layers in layout.layers):
            return None

        cache_bytes = _cache_bytes(layout, options, options.context_tokens) * (options.parallel or 1)
        if (shared_tokens := count_shared_tokens(options)) is not None:
            # The cache of each request beside the long one grows by _STEP tokens at a time.
            others = SHARED_REQUESTS - 1
            cache_bytes += _cache_bytes(layout, options, shared_tokens + others * _STEP, requests=others)
        return Parts(
            weights_bytes=layout.tensor_bytes,
            cache_bytes=cache_bytes,
            prompts_bytes=_budget_conversations(layout, options),
            compute_bytes=_compute_bytes(layout, options),
            engine_bytes=_PROCESS_BYTES + _TOKEN_BYTES * layout.vocabulary_size,
        )

    def propose_prompt_cache(self, layout: Layout, options: ServingOptions, free_bytes: int) -> int:
        """Return the bytes for four conversations, or for as many as fit into half of what is free, too."""
        each_bytes = _kept_bytes(layout, options)
        least = options.parallel or 1  # they are a part of the estimate already
        return each_bytes * min(_MOST_CONVERSATIONS, least + free_bytes // 2 // max(1, each_bytes))


def count_cache_entries(layout: Layout | None, options: ServingOptions) -> int:
    """Return the entries of mlx-lm's cache (`--prompt-cache-size`), whose limit in bytes does not hold.

    A window or a recurrent state cannot go back to an earlier token, so mlx-lm keeps the prompt and what precedes it.
    """
    least = options.parallel or 1
    if layout is None:
        return least
    conversations = max(least, _budget_conversations(layout, options) // max(1, _kept_bytes(layout, options)))
    return conversations if _can_go_back(layout) else 2 * conversations + 2


def _budget_conversations(layout: Layout, options: ServingOptions) -> int:
    """Return the bytes for remembered conversations: in any case one for each slot, so that it continues."""
    each_bytes = _kept_bytes(layout, options)
    return max((options.parallel or 1) * each_bytes, min(_MOST_CONVERSATIONS * each_bytes, options.prompt_cache_bytes))


def _kept_bytes(layout: Layout, options: ServingOptions) -> int:
    """Return the bytes of one remembered conversation, with its further entries."""
    percent = 100 if _can_go_back(layout) else _FURTHER_ENTRIES_PERCENT
    return _cache_bytes(layout, options, options.context_tokens) * percent // 100


def _can_go_back(layout: Layout) -> bool:
    return not any(layers.window or layers.state_bytes for layers in layout.layers)


def _cache_bytes(layout: Layout, options: ServingOptions, tokens: int, requests: int = 1) -> int:
    """Return the bytes of the caches of `requests` conversations with this number of tokens together."""
    padded = divide_up(tokens, _STEP) * _STEP
    size_bytes, bits = 0, _CACHE_BITS.get(options.cache_type_k, _CACHE_BITS["f16"])
    for layers in layout.layers:
        # A layer with a window keeps the window, and beside it the part of the prompt that is being computed.
        kept = padded if layers.window is None else min(padded, requests * (layers.window + _PREFILL))
        elements = kept * (layers.key_elements + layers.value_elements)
        # `bits` are those of two elements, hence the division by 2 * 8.
        size_bytes += layers.count * (elements * bits // 16 + requests * layers.state_bytes)
    return size_bytes


def _compute_bytes(layout: Layout, options: ServingOptions) -> int:
    """Return the bytes of the intermediate results that are live at once: of one batch of prompts, and the logits.

    For each token of the batch these are 5 vectors of the embedding's size, and either 3 of the feed-forward's with the
    outputs of its experts or 3 of the attention's, whichever is more.
    """
    requests = count_requests(options)
    batch = min(_PREFILL, options.context_tokens) * min(requests, PROMPTS_AT_ONCE)
    expert_elements = layout.embedding_size * layout.expert_outputs
    widest = max(3 * layout.feed_forward_size + expert_elements, 3 * layout.attention_size)
    elements_per_token = 5 * layout.embedding_size + widest
    # The logits of the last token of each request, as f32 and again for sampling.
    return batch * elements_per_token * _ELEMENT_BYTES + 2 * requests * layout.vocabulary_size * 4
