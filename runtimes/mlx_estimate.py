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

_STEP: Final = 256
"""Tokens by which a cache grows (`KVCache.step`)."""
_PREFILL: Final = 2048
"""Tokens of a prompt that are computed at once (`--prefill-step-size`)."""
_ELEMENT_BYTES: Final = 2
"""Bytes of an element of the cache and of intermediate results: bfloat16 or float16."""
_CACHE_BITS: Final[Mapping[CacheType, int]] = {"f16": 32, "q8_0": 17, "q4_0": 9}
"""Bits of two elements of a cache; a quantized group of 64 has two 16-bit numbers in addition (`--kv-bits`)."""
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

        # A cache grows by _STEP tokens at a time.
        context = divide_up(options.context_length, _STEP) * _STEP
        slot_bytes, bits = 0, _CACHE_BITS.get(options.cache_type_k, _CACHE_BITS["f16"])
        for layers in layout.layers:
            # A layer with a window keeps the window, and beside it the part of the prompt that is being computed.
            tokens = context if layers.window is None else min(context, layers.window + _PREFILL)
            elements = tokens * (layers.key_elements + layers.value_elements)
            # `bits` are those of two elements, hence the division by 2 * 8.
            slot_bytes += layers.count * (elements * bits // 16 + layers.state_bytes)

        return Parts(
            weights_bytes=layout.tensor_bytes,
            cache_bytes=slot_bytes * options.parallel,
            # One finished conversation for each slot is kept (`--prompt-cache-size`, see `runtimes/mlx_lm.py`).
            checkpoints_bytes=slot_bytes * options.parallel,
            compute_bytes=_compute_bytes(layout, options),
            engine_bytes=_PROCESS_BYTES + _TOKEN_BYTES * layout.vocabulary_size,
        )


def _compute_bytes(layout: Layout, options: ServingOptions) -> int:
    """Return the bytes of the intermediate results that are live at once: of one batch of prompts, and the logits.

    For each token of the batch these are 5 vectors of the embedding's size, and either 3 of the feed-forward's with the
    outputs of its experts or 3 of the attention's, whichever is more.
    """
    batch = min(_PREFILL, options.context_length) * options.parallel
    expert_elements = layout.embedding_size * layout.expert_outputs
    widest = max(3 * layout.feed_forward_size + expert_elements, 3 * layout.attention_size)
    elements_per_token = 5 * layout.embedding_size + widest
    # The logits of the last token of each request, as f32 and again for sampling.
    return batch * elements_per_token * _ELEMENT_BYTES + 2 * options.parallel * layout.vocabulary_size * 4
