"""Memory and speed of engines made of llama.cpp, as its own source computes it (b11549; file names are of that source).

ggml's allocator lays out compute buffers and reuses those that are no longer read. The formulas here are upper bounds
of the bytes that are live at once, fitted to `--verbosity` logs of many shapes.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from crds.serving import CacheType, ServingOptions
from crds.size import divide_up
from crds.weights_header import Layers, Layout
from runtimes.engine_estimate import DeviceParts, EngineMemory, Parts, SpeedPrior

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
_UNIFIED_SWITCHES: Final = {"-kvu": True, "--kv-unified": True, "-no-kvu": False, "--no-kv-unified": False}


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

    checkpoints: int = 0
    """Copies of windows and recurrent states that each slot keeps."""
    keeps_whole_windows: bool = False
    """True if layers with a sliding window cache the whole context, which is llama.h's own default."""
    has_flash: Callable[[ServingOptions], bool]
    """Decide whether attention is computed without a matrix of all scores."""

    def estimate_parts(self, layout: Layout, options: ServingOptions) -> Parts:
        """Compute the memory of one server after prompts of the full context on all slots.

        A slot serves one request at a time. The cache keeps keys and values of `cache_tokens` tokens for each layer; a
        layer with a sliding window needs fewer cells. Checkpoints are copies of such a shortened cache and of recurrent
        states, with which a conversation can continue.
        """
        # 1. Each slot has a cache, or all share a unified one. Of contradicting arguments the last one counts.
        switches = [_UNIFIED_SWITCHES[argument] for argument in options.extra_args if argument in _UNIFIED_SWITCHES]
        is_unified = bool(switches) and switches[-1]
        slots = options.parallel
        # The number of caches, and of the slots that share each.
        caches, slots_per_cache = (1, slots) if is_unified else (slots, 1)
        cache_tokens = _pad_tokens(options.context_length * slots_per_cache)
        # A text is embedded in one batch, however long it is.
        batch = min(_BATCH, cache_tokens) if options.mode == "chat" else cache_tokens

        # 2. A cell of the cache has the keys and values of one token. Layers with a window keep cells for the window
        # and one batch, unless they are to keep the whole context. These and recurrent layers have checkpoints, too,
        # since they cannot go back to an earlier token.
        has_whole_windows = self.keeps_whole_windows or "--swa-full" in options.extra_args
        cache_bytes = checkpoint_bytes = 0
        for layers in layout.layers:
            cells = cache_tokens
            if layers.window is not None and not has_whole_windows:
                cells = _pad_tokens(min(cache_tokens, layers.window * slots_per_cache + batch))

            cell_bytes = token_bytes(layers, options)
            cache_bytes += layers.count * (cells * caches * cell_bytes + slots * layers.state_bytes)

            # A checkpoint has the state, and the cells of the window and one batch.
            if cells < cache_tokens or layers.state_bytes:
                kept_tokens = min(cells, layers.window + batch) if layers.window is not None else 0
                checkpoint_bytes += layers.count * (kept_tokens * cell_bytes + layers.state_bytes)

        return Parts(
            weights_bytes=layout.tensor_bytes,
            cache_bytes=cache_bytes,
            checkpoints_bytes=checkpoint_bytes * self.checkpoints * slots if options.mode == "chat" else 0,
            compute_bytes=_compute_bytes(layout, options, cache_tokens, batch, has_flash=self.has_flash(options)),
            engine_bytes=_PROCESS_BYTES + _TOKEN_BYTES * layout.vocabulary_size,
        )

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

        whole = self.estimate_parts(layout, options)
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
            compute_bytes=options.parallel * layout.vocabulary_size * _F32_BYTES,
            engine_bytes=whole.engine_bytes + _DRIVER_BYTES,
        )

        device = Parts(
            weights_bytes=min(layout.tensor_bytes, _split_bytes(layout, layout.tensor_bytes, devices) + output_bytes),
            cache_bytes=_split_bytes(layout, whole.cache_bytes, devices),
            compute_bytes=whole.compute_bytes,
            engine_bytes=_DEVICE_CONTEXT_BYTES,
        )
        return DeviceParts(container=container, device=device, devices=devices)


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


def _compute_bytes(layout: Layout, options: ServingOptions, cache_tokens: int, batch: int, *, has_flash: bool) -> int:
    """Return an upper bound of the intermediate results that are live at once while one batch is computed.

    It has, for each token of the batch, the elements of the widest layer and the masks of its attention; without flash
    attention also the scores of each head for the whole context. To these are added the logits, the scores of each
    token of the vocabulary. The small factors, such as 3 and 5, count vectors of one size; they were fitted to logs.
    """
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

    outputs = options.parallel if options.mode == "chat" else batch  # tokens of which logits are computed
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
