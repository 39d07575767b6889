"""What mlx-lm holds, part by part, as its own source computes it (mlx-lm 0.32: `models/cache.py`, `generate.py`).

Metal's own allocator keeps what was freed for the next use, so the peak stays: a long prompt once is a long prompt for
ever.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from crds.model import Layout
from crds.serving import CacheType
from fitness.parts import Parts, Settings

_STEP: Final = 256
"""Tokens by which a cache grows (`KVCache.step`)."""
_PREFILL: Final = 2048
"""Tokens of a prompt that are computed at once (`--prefill-step-size`)."""
_BYTES: Final = 2
"""Of an element of the cache and of intermediate results: bfloat16 or float16."""
_CACHE_BITS: Final[Mapping[CacheType, int]] = MappingProxyType({"f16": 32, "q8_0": 17, "q4_0": 9})
"""Of two elements of a cache; a quantized group of 64 has two halves beside it (`--kv-bits`)."""
_PROCESS_BYTES: Final = 400 * 2**20
"""Python with mlx, mlx-lm and transformers."""
_TOKEN_BYTES: Final = 1200
"""Of each token of the vocabulary, which a tokenizer of transformers keeps in Python and in Rust."""


def parts(layout: Layout, settings: Settings) -> Parts:
    """Compute what one server holds after prompts of the full context on all slots."""
    context = -(-settings.context_length // _STEP) * _STEP
    cache = 0
    for layers in layout.layers:
        # A window is kept in a ring, with the part of the prompt that is being computed beside it.
        tokens = context if layers.window is None else min(context, layers.window + _PREFILL)
        elements = tokens * (layers.key_elements + layers.value_elements)
        cache += layers.count * (
            elements * _CACHE_BITS.get(settings.cache_type_k, _CACHE_BITS["f16"]) // 16 + layers.state_bytes
        )
    return Parts(
        weights_bytes=layout.tensor_bytes,
        cache_bytes=cache * settings.parallel,
        # As many conversations that have ended are kept (`--prompt-cache-size`, see `runtimes/mlx_lm.py`).
        checkpoints_bytes=cache * settings.parallel,
        compute_bytes=_compute_bytes(layout, settings),
        further_bytes=settings.further_bytes,
        engine_bytes=_PROCESS_BYTES + _TOKEN_BYTES * layout.vocabulary_size,
    )


def _compute_bytes(layout: Layout, settings: Settings) -> int:
    batch = min(_PREFILL, settings.context_length) * settings.parallel
    experts = layout.embedding_size * layout.expert_outputs
    wide = 5 * layout.embedding_size + max(3 * layout.feed_forward_size + experts, 3 * layout.attention_size)
    # The logits of the last token of each request, as f32 and again for sampling.
    return batch * wide * _BYTES + 2 * settings.parallel * layout.vocabulary_size * 4
