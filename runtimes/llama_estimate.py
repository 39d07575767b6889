"""Memory and speed of engines made of llama.cpp, as its own source computes it (b11549; file names are of that source).

ggml's allocator lays out compute buffers and reuses those that are no longer read. The formulas here are upper bounds
of the bytes that are live at once, fitted to `--verbosity` logs of many shapes.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec import structs

from crds.serving import CacheType, ServingOptions
from crds.size import GIB, divide_up
from crds.weights_header import Layers, Layout
from runtimes.engine_estimate import DeviceParts, EngineMemory, Parts, SpeedPrior
from runtimes.serving import PROBE_TOKENS, count_requests, count_shared_tokens

_PADDING: Final = 256
"""The number of cells of a cache is a multiple of this (`llama-context.cpp`, `llama-kv-cache-iswa.cpp`)."""
_BATCH: Final = 512
"""Tokens that are computed at once: n_ubatch in `common/common.h`, which Pomona does not change for chat."""
_F16_BYTES: Final = 2
_F32_BYTES: Final = 4

_BLOCK_BYTES: Final[dict[CacheType, int]] = {
    "f32": 128,
    "f16": 64,
    "bf16": 64,
    "q8_0": 34,
    "q5_1": 24,
    "q5_0": 22,
    "q4_1": 20,
    "q4_0": 18,
    "iq4_nl": 18,
}
"""Bytes of 32 elements (`block_*` in `ggml-common.h`); a test compares them with the gguf package."""
_BLOCK_ELEMENTS: Final = 32

_PROCESS_BYTES: Final = 32 * 2**20
"""Program and libraries of the server; measured with a model of 0.5 MB."""
_TOKEN_BYTES: Final = 400
"""Bytes of each token of the vocabulary: text, score, and its entries in the maps of `llama-vocab.cpp`; measured with
byte pairs, which take twice as much as other kinds."""
_DEVICE_CONTEXT_BYTES: Final = 640 * 2**20
"""Context of the device's driver, code of the kernels, and workspace of its matrix library, on each device."""
_DRIVER_BYTES: Final = 640 * 2**20
"""The device's driver and libraries in the process, with pinned buffers for inputs."""
_EMBEDDING_BYTES: Final = 2
"""Bytes of an element of the token embeddings, of which quantized files have fewer."""
_LAYER_ARGUMENTS: Final = frozenset({"-ngl", "--gpu-layers", "--n-gpu-layers"})
_SPLIT_ARGUMENTS: Final = frozenset({"-sm", "--split-mode"})
_MOST_PROMPT_CACHE_BYTES: Final = 8 * GIB
"""llama-server's own default of `--cache-ram`."""
_AGENT_TOKENS: Final = 16_384
"""Tokens of a conversation with an agent: its first request has 8,000 to 31,000."""
_LEAST_CHECKPOINTS: Final = 3
"""One of these is before the last answer of a conversation."""
_MOST_CHECKPOINTS: Final = 32
"""llama-server's own default."""
_CHECKPOINT_STEP: Final = 8192
"""Tokens between two checkpoints of earlier messages (`--checkpoint-min-step`)."""

LLAMA_SPEED: Final[Mapping[str, SpeedPrior]] = {
    "nvidia": SpeedPrior(0.76, 0.05),
    "amd": SpeedPrior(0.90, 0.10),
    "metal": SpeedPrior(0.92, 0.15),
    # No dedicated device of Intel is among the measurements: that of others, with a wide range.
    "intel": SpeedPrior(0.55, 0.20),
    "cpu": SpeedPrior(0.55, 0.30),
}
"""By vendor; see `Runtime.speed_priors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaMemory(EngineMemory):
    """The memory formulas of llama.cpp and what is made of it."""

    is_llama_server: bool = False
    """True for llama-server itself, whose requests may share a context, and which keeps checkpoints: copies of windows
    and recurrent states, with which a conversation can continue."""
    keeps_whole_windows: bool = False
    """True if layers with a sliding window cache the whole context, which is llama.h's own default."""
    has_flash: Callable[[ServingOptions], bool]
    """Decide whether attention is computed without a matrix of all scores."""

    def estimate_parts(self, layout: Layout, options: ServingOptions) -> Parts:
        """Compute the memory of one server after prompts of the full context on all slots.

        A slot serves one request at a time.
        """
        shape = _shape_cache(options, is_shared=self.is_llama_server)
        cache_bytes, checkpoint_bytes = _measure_cache(layout, options, shape, whole_windows=self.keeps_whole_windows)
        has_checkpoints = self.is_llama_server and options.mode == "chat"
        return Parts(
            weights_bytes=layout.tensor_bytes,
            cache_bytes=cache_bytes,
            checkpoints_bytes=_count_affordable(options, checkpoint_bytes) * checkpoint_bytes if has_checkpoints else 0,
            compute_bytes=_compute_bytes(layout, options, shape, has_flash=self.has_flash(options)),
            engine_bytes=_PROCESS_BYTES + _TOKEN_BYTES * layout.vocabulary_size,
            prompts_bytes=options.prompt_cache_bytes,
        )

    def propose_prompt_cache(self, layout: Layout, options: ServingOptions, free_bytes: int) -> int:
        """Return the bytes for two conversations of an agent: at most 8 GiB and a quarter of what is free; 0 for none.

        llama-server keeps whole conversations, and skips one that is larger than all of the memory for them.
        """
        lengths = (min(tokens, options.context_tokens) for tokens in (_AGENT_TOKENS // 2, _AGENT_TOKENS))
        conversations = (structs.replace(options, context_length=length, parallel=1) for length in lengths)
        half_bytes, whole_bytes = (self.estimate_parts(layout, one).cache_bytes for one in conversations)
        wanted_bytes = min(_MOST_PROMPT_CACHE_BYTES, 2 * whole_bytes, free_bytes // 4)
        return wanted_bytes if wanted_bytes >= half_bytes else 0

    def estimate_device_parts(self, layout: Layout, options: ServingOptions, devices: int) -> DeviceParts:
        """Compute the memory of one server with all layers on `devices` devices: of its container, and of each device.

        On the devices: each has some of the layers with their cache, and the last one the output as well (`--split-mode
        layer`). All are counted like the one with the most layers and the output.

        In the container: the process, checkpoints (`server-context.cpp`), and the token embeddings, which are always
        read on the processor. The other weights are mapped from their file, copied to the devices and unmapped, so
        their pages are the file's, and a node that needs their memory drops them.
        """
        # With `--split-mode none`, one device has everything.
        if find_last_value(options.extra_args, _SPLIT_ARGUMENTS) == "none":
            devices = 1

        whole, slots = self.estimate_parts(layout, options), _shape_cache(options, is_shared=self.is_llama_server).slots
        embedding_bytes = min(layout.tensor_bytes, layout.vocabulary_size * layout.embedding_size * _EMBEDDING_BYTES)
        # The share of a single device has the output already.
        output_bytes = embedding_bytes if devices > 1 else 0

        # If the user states how many layers the devices get, any part of weights and cache may stay in the container.
        is_partial = find_last_value(options.extra_args, _LAYER_ARGUMENTS) is not None
        container = Parts(
            weights_bytes=layout.tensor_bytes if is_partial else embedding_bytes,
            cache_bytes=whole.cache_bytes if is_partial else 0,
            checkpoints_bytes=whole.checkpoints_bytes,
            # The logits of each slot are copied back.
            compute_bytes=slots * layout.vocabulary_size * _F32_BYTES,
            engine_bytes=whole.engine_bytes + _DRIVER_BYTES,
            prompts_bytes=whole.prompts_bytes,
        )

        device = Parts(
            weights_bytes=min(layout.tensor_bytes, _split_bytes(layout, layout.tensor_bytes, devices) + output_bytes),
            cache_bytes=_split_bytes(layout, whole.cache_bytes, devices),
            compute_bytes=whole.compute_bytes,
            engine_bytes=_DEVICE_CONTEXT_BYTES,
        )
        return DeviceParts(container=container, device=device, devices=devices)


class _CacheShape(NamedTuple):
    """The cells of a cache."""

    slots: int
    caches: int
    """Caches: one for each slot, or one that all slots share."""
    tokens: int
    """Tokens of each cache."""
    batch: int
    """Tokens that are computed at once."""


def _shape_cache(options: ServingOptions, *, is_shared: bool) -> _CacheShape:
    """Return the cells of the cache: each slot has a context of its own, or all of them share one and some more."""
    shared_tokens = count_shared_tokens(options) if is_shared else None
    slots = count_requests(options) if is_shared else options.parallel or 1
    tokens = _pad_tokens(options.context_tokens + (0 if shared_tokens is None else shared_tokens + PROBE_TOKENS))
    # A text is embedded in one batch, however long it is.
    batch = min(_BATCH, tokens) if options.mode == "chat" else tokens
    return _CacheShape(slots, slots if shared_tokens is None else 1, tokens, batch)


def _measure_cache(
    layout: Layout, options: ServingOptions, shape: _CacheShape, *, whole_windows: bool = False
) -> tuple[int, int]:
    """Return the bytes of the cache, and those of one checkpoint of every slot.

    A cell has the keys and values of one token. Layers with a window keep cells for the window and one batch, unless
    they are to keep the whole context. These and recurrent layers have checkpoints, too, since they cannot go back to
    an earlier token.
    """
    slots, caches, tokens, batch = shape
    cache_bytes = checkpoint_bytes = 0
    for layers in layout.layers:
        cells = tokens
        if layers.window is not None and not (whole_windows or "--swa-full" in options.extra_args):
            cells = _pad_tokens(min(tokens, layers.window * (slots // caches) + batch))

        cell_bytes = token_bytes(layers, options)
        cache_bytes += layers.count * (cells * caches * cell_bytes + slots * layers.state_bytes)

        # A checkpoint has the state, and the cells of the window and one batch.
        if cells < tokens or layers.state_bytes:
            kept_tokens = min(cells, layers.window + batch) if layers.window is not None else 0
            checkpoint_bytes += slots * layers.count * (kept_tokens * cell_bytes + layers.state_bytes)
    return cache_bytes, checkpoint_bytes


def count_checkpoints(layout: Layout | None, options: ServingOptions) -> int:
    """Return the checkpoints that each slot of llama-server keeps (`--ctx-checkpoints`).

    One for each 8,192 tokens, and three (llama.cpp makes them so far apart, and two at the end of a prompt), so that a
    conversation continues from its last message after a long loop of tools. Those of all slots together take at most
    half as much as remembered conversations may, but there are three in any case.
    """
    if layout is None:
        return _LEAST_CHECKPOINTS
    _cache_bytes, checkpoint_bytes = _measure_cache(layout, options, _shape_cache(options, is_shared=True))
    return _count_affordable(options, checkpoint_bytes)


def _count_affordable(options: ServingOptions, checkpoint_bytes: int) -> int:
    """Return the checkpoints of each slot; `checkpoint_bytes` are those of one in every slot."""
    wanted = min(_MOST_CHECKPOINTS, divide_up(options.context_tokens, _CHECKPOINT_STEP) + _LEAST_CHECKPOINTS)
    return max(_LEAST_CHECKPOINTS, min(wanted, options.prompt_cache_bytes // 2 // max(1, checkpoint_bytes)))


def _split_bytes(layout: Layout, size_bytes: int, devices: int) -> int:
    """Return the share of `size_bytes` on the device with the most layers; all of it if the layers are unknown."""
    layer_count = sum(layers.count for layers in layout.layers)
    if not layer_count:
        return size_bytes
    most_layers = divide_up(layer_count, devices)
    return divide_up(size_bytes * most_layers, layer_count)


def token_bytes(layers: Layers, options: ServingOptions) -> int:
    """Return the bytes that one layer keeps of a token; a row has whole blocks only."""
    kept = ((layers.key_elements, options.cache_type_k), (layers.value_elements, options.cache_type_v))
    return sum(divide_up(elements, _BLOCK_ELEMENTS) * _BLOCK_BYTES[cache_type] for elements, cache_type in kept)


def _compute_bytes(layout: Layout, options: ServingOptions, shape: _CacheShape, *, has_flash: bool) -> int:
    """Return an upper bound of the intermediate results that are live at once while one batch is computed.

    It has, for each token of the batch, the elements of the widest layer and the masks of its attention; without flash
    attention also the scores of each head for the whole context. To these are added the logits, the scores of each
    token of the vocabulary. The small factors, such as 3 and 5, count vectors of one size; they were fitted to logs.
    """
    slots, _caches, cache_tokens, batch = shape
    # Only layers that attend have keys.
    attending = [layers for layers in layout.layers if layers.key_elements]
    cached_elements = max((layers.key_elements + layers.value_elements for layers in attending), default=0)

    # The widest layer: either its feed-forward part or its attention counts, whichever is wider.
    feed_forward = 3 * layout.feed_forward_size
    if layout.embedding_size * layout.expert_outputs > 2 * layout.feed_forward_size:
        # The output of the experts is wider than their input, and does not fit into the buffer that the input frees.
        feed_forward += layout.embedding_size * layout.expert_outputs
    attention = 3 * layout.attention_size + cached_elements
    layer_elements = 5 * layout.embedding_size + max(feed_forward, attention)

    whole_context = cache_tokens if attending else 0
    # A mask has an element for each token that a token may attend to: one for the whole context, one for each window.
    windows = {layers.window for layers in attending if layers.window}
    mask_elements = whole_context + sum(_pad_tokens(min(cache_tokens, window + batch)) for window in windows)

    outputs = slots if options.mode == "chat" else batch  # tokens of which logits are computed
    logits = 2 * outputs * layout.vocabulary_size * _F32_BYTES

    if has_flash:
        return batch * (layer_elements * _F32_BYTES + mask_elements * _F16_BYTES) + logits
    score_elements = layout.head_count * whole_context
    return batch * (layer_elements + score_elements + mask_elements) * _F32_BYTES + logits


def find_last_value(extra: Sequence[str], names: Collection[str]) -> str | None:
    """Return the value of the last of these arguments, which counts if they are repeated; None if none is there."""
    values = [value for name, value in itertools.pairwise(extra) if name in names]
    return values[-1] if values else None


def _pad_tokens(tokens: int) -> int:
    """Return the cells of a cache for this number of tokens."""
    return divide_up(tokens, _PADDING) * _PADDING
