"""Memory and speed of engines with a paged KV cache (vLLM, SGLang, TGI).

These engines share one design: the cache consists of blocks of a few tokens, weights and cache are sharded over the
devices by tensor parallelism, and on start the engine takes a share of each device, loads weights, measures one batch
of the largest size, and gives the rest to the cache. So they share the formulas; the fields of `PagedMemory` are their
differences. The formulas are upper bounds of what must fit; `tests/unit/fitness/test_paged_engines.py` compares them
with published logs. Sources: vLLM 0.32 (`engine/arg_utils.py`, `v1/core/kv_cache_utils.py`,
`v1/kv_cache_interface.py`), SGLang 0.5 (`arg_groups/_handle_gpu_memory_settings`), TGI 3.3 (`models/globals.py`), and
KAITO's `memory-estimator.md`.

The cache has to hold one whole context, and what is left of a device is cache, too: `parallel` is a limit, for which
the buffers of sampling and the captured graphs count. If it is unset, they are those of the engine's own choice.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec import structs

from crds.serving import ServingOptions
from crds.size import GIB, MIB, divide_up
from crds.weights_header import Layers, Layout
from runtimes.engine_estimate import DeviceParts, EngineMemory, Parts, SpeedPrior

_KIB: Final = 2**10
_BLOCK: Final = 16
"""Tokens of one block of the cache (`--block-size`)."""
_PROCESSOR_SEQUENCES: Final = 128
"""Requests that vLLM computes at once at most on a processor."""
_CPU_BLOCK: Final = 128
"""The same of vLLM on CPUs, whose cache has whole GiB (`VLLM_CPU_KVCACHE_SPACE`)."""
_ELEMENT_BYTES: Final = 2
"""bfloat16 or float16, of cache and of intermediate results."""
_LOADED_WEIGHTS_PERCENT: Final = 102
"""Weights in an engine are up to 2 % larger than in files: rotary tables, padding of the vocabulary (KAITO)."""
_SAMPLER_COPIES: Final = 10
"""float32 copies of the logits while tokens are drawn: 1.26 GiB for 256 sequences of Llama 3 (vLLM pull request
10511)."""
_GRAPH_BYTES: Final = 32 * MIB
"""One captured graph: 24 to 28 MiB (vLLM pull request 22897, Llama 3 8B)."""
_FRONTEND_BYTES: Final = 2 * GIB
"""Processes that serve HTTP and schedule. With one worker they take 3 GiB (vLLM 0.32 on a CPU, measured)."""
_WORKER_BYTES: Final = 2 * GIB
"""One worker process for each device: PyTorch, its kernels, the device's driver, and staging buffers of weights."""
_TOKEN_BYTES: Final = 2 * 1200
"""Bytes of each token of the vocabulary: a tokenizer of transformers in two processes (see `mlx_estimate.py`)."""
_STATE_BLOCKS: Final = 2
"""Blocks that a request has in each recurrent layer: the current state and the one before (`MambaSpec`, mode align)."""
_LATENT_PROJECTIONS: Final = 4
"""Outputs of the projections of a layer with a latent cache that each device has whole, in sizes of what the cache
keeps of a token: that itself, and the compressed query, 2.7 times as large (DeepSeek V3, Kimi K2) to 2.9 times (GLM-5).
"""
_LATENT_CONTEXT: Final = 8
"""Contexts of which vLLM expands latents at once (`determine_chunked_prefill_workspace_size`)."""
_LATENT_BLOCKS: Final = 4 * 128
"""Tokens of each request that it expands at least: four of the largest blocks for latent caches."""
_MOST_LATENT_TOKENS: Final = 65_536
"""Most tokens of which it expands latents at once."""
_NUMBER: Final = re.compile(r"[0-9]{1,7}|[01]?\.[0-9]{1,7}")
"""A number of tokens, or a share of memory."""
_MOST_DEVICES: Final = 16
"""Devices of the largest nodes."""


class DeviceBatch(NamedTuple):
    """The engine's own choice for devices of a size."""

    from_gib: int
    """Memory of the smallest such device."""
    tokens: int
    """Tokens of prompts that are computed at once."""
    sequences: int = 256
    """Requests that are computed at once at most."""
    reserve_mib: int = 0
    """Memory that the engine leaves free beside `PagedMemory.token_reserve_kib`, however little of it is needed."""


PAGED_SPEED: Final[Mapping[str, SpeedPrior]] = {
    # One measurement on an RTX 4090 and the makers' own figures; captured graphs start all kernels at once.
    "nvidia": SpeedPrior(0.85, 0.03),
    "amd": SpeedPrior(0.70, 0.05),
    "intel-gaudi": SpeedPrior(0.60, 0.10),
    "intel": SpeedPrior(0.50, 0.10),
    "cpu": SpeedPrior(0.50, 0.50),
}
"""By vendor; see `Runtime.speed_priors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedMemory(EngineMemory):
    """The memory formulas of an engine with a paged KV cache."""

    batches: tuple[DeviceBatch, ...]
    """By size of the device, the smallest first."""
    share_argument: str
    """Argument with which a user sets the share of a device that the engine uses, from 0 to 1."""
    block_argument: str | None = None
    """Argument with which a user sets the tokens of a block."""
    batch_argument: str | None = None
    """Argument with which a user sets the tokens of a batch."""
    whole_prompts_argument: str | None = None
    """Argument with which a user has each prompt computed in one batch."""
    eager_argument: str | None = None
    """Argument with which a user switches graphs off."""
    has_windows: bool = False
    """True if layers with a sliding window keep the window only."""
    whole_prompts: bool = False
    """True if a prompt is computed in one batch, however long it is."""
    has_margin: bool = False
    """True if `device_percent` is a part of the share that the user sets, not the default of it."""
    device_percent: int = 92
    """Share of a device that the engine uses."""
    context_mib: int = 1536
    """Device context, NCCL buffers and workspace of the attention kernels of one worker: 0.4 GiB (RTX 3090, vLLM issue
    10517) to 1.8 GiB (H100, vLLM pull request 10511). The same for one device and for many; NCCL's part is within it.
    """
    token_reserve_kib: int = 0
    """Memory that the engine leaves free for each token of a batch."""
    has_states: bool = False
    """True if the formulas hold for recurrent layers."""
    has_latents: bool = False
    """True if the formulas hold for latent caches (MLA)."""
    needs_free_share: bool = False
    """True if the engine refuses to start while less than its share of the device is free."""

    def estimate_parts(self, layout: Layout, options: ServingOptions) -> Parts | None:
        """Compute the memory of one replica without devices: all is the container's, and the cache has whole GiB.

        None: the layout has layers for which the formulas do not hold.
        """
        if not self._is_computable(layout):
            return None

        options = structs.replace(options, parallel=options.parallel or _PROCESSOR_SEQUENCES)
        # `batches` begins with that of the smallest devices.
        tokens = self._batch_tokens(options, self.batches[0])
        # Tokens that a layer with a window keeps beside it; None: it keeps the whole context.
        extra_tokens = tokens if self.has_windows else None
        cache_bytes = _cache_bytes(layout, options, devices=1, extra_tokens=extra_tokens, block=_CPU_BLOCK)
        expansion_bytes = _expansion_bytes(layout, options, devices=1)
        return Parts(
            weights_bytes=_weights_bytes(layout, devices=1),
            cache_bytes=divide_up(cache_bytes, GIB) * GIB,
            compute_bytes=_compute_bytes(layout, options, devices=1, tokens=tokens) + expansion_bytes,
            engine_bytes=_container_bytes(layout, workers=1),
        )

    def estimate_device_parts(self, layout: Layout, options: ServingOptions, devices: int) -> DeviceParts | None:
        """Compute the memory of one replica on `devices` devices: of its container, and of each device.

        The size of the devices is not known yet, and the engine chooses a larger batch, which takes more memory, on
        larger devices. So the result must be enough for the batch of every device with at least that much memory. None:
        the layout has layers for which the formulas do not hold.
        """
        if not self._is_computable(layout):
            return None
        permille = self._used_permille(options)

        # The engine's own choices, each for devices from a size (`from_gib`) on, the smallest first.
        smallest_batch, *larger_batches = self.batches
        device = self._estimate_batch(layout, options, devices, smallest_batch)
        for batch in larger_batches:
            needed = self._estimate_batch(layout, options, devices, batch)
            usable_permille_bytes = batch.from_gib * GIB * permille
            # The smallest device that chooses this batch cannot hold it, though it may hold a smaller batch. So all
            # devices must have the memory for this batch.
            if sum(needed) * 1000 > usable_permille_bytes:
                device = needed

        container = Parts(engine_bytes=_container_bytes(layout, devices))
        return DeviceParts(container=container, device=device, devices=devices, used_permille=permille)

    def least_free_bytes(self, options: ServingOptions, memory_bytes: int) -> int:
        """Return the bytes of a device that must be free when the engine starts, however few of them it needs."""
        return memory_bytes * self._used_permille(options) // 1000 if self.needs_free_share else 0

    def refuse_devices(self, layout: Layout, devices: int) -> str | None:
        """Return why the attention heads of a model cannot be divided among `devices` devices, or None if they can.

        All of these engines refuse to start then (vLLM: `verify_with_parallel_config`).
        """
        heads = layout.head_count
        if devices <= 1 or not heads or heads % devices == 0:
            return None
        counts = [str(count) for count in range(1, _MOST_DEVICES + 1) if heads % count == 0]
        problem = f"hardware.count {devices} does not divide the {heads} attention heads of the model"
        return f"{problem}: set it to {' or '.join(counts)}"

    def _is_computable(self, layout: Layout) -> bool:
        """Return whether the formulas hold for the cache of these layers.

        Each engine pads and copies recurrent states and latents (compressed keys and values) in its own way; only those
        of engines with `has_states` and `has_latents` are known. For states, all layers must be either recurrent or
        attending, and some must cache keys and values.
        """
        is_recurrent = any(layers.state_bytes for layers in layout.layers)
        is_latent = any(map(_is_latent, layout.layers))
        if is_recurrent:
            # States are padded to blocks of keys and values, which other layers have to have.
            has_mixed_layers = any(layers.state_bytes and layers.key_elements for layers in layout.layers)
            has_values = any(layers.value_elements for layers in layout.layers)
            return self.has_states and has_values and not is_latent and not has_mixed_layers
        return self.has_latents or not is_latent

    def _estimate_batch(self, layout: Layout, options: ServingOptions, devices: int, batch: DeviceBatch) -> Parts:
        """Compute the memory of each device with the batch that the engine chooses for devices of a size.

        Intermediate results are within the memory that the engine reserves for them, so the larger of both counts.
        """
        options = structs.replace(options, parallel=options.parallel or batch.sequences)
        tokens = self._batch_tokens(options, batch)
        # Tokens of a block: as many as the user states, but at least _BLOCK.
        block = max(_BLOCK, _read_stated_number(options, self.block_argument) or 0)
        # Tokens that a layer with a window keeps beside it; None: it keeps the whole context.
        extra_tokens = tokens if self.has_windows else None

        compute_bytes = _compute_bytes(layout, options, devices, tokens) + self._graph_bytes(options)
        compute_bytes += _expansion_bytes(layout, options, devices)

        # The engine leaves free a fixed part, and one for each token of the batch.
        reserve_bytes = batch.reserve_mib * MIB + self.token_reserve_kib * tokens * _KIB
        if _find_stated(options, self.share_argument):
            # The engine then leaves free what is beyond the stated share, and nothing else.
            reserve_bytes = 0

        return Parts(
            weights_bytes=_weights_bytes(layout, devices),
            cache_bytes=_cache_bytes(layout, options, devices, extra_tokens=extra_tokens, block=block),
            compute_bytes=max(compute_bytes, reserve_bytes),
            engine_bytes=self.context_mib * MIB,
        )

    def _batch_tokens(self, options: ServingOptions, batch: DeviceBatch) -> int:
        """Return the tokens of the largest batch, which a user's argument decides."""
        tokens = _read_stated_number(options, self.batch_argument) or batch.tokens
        is_whole = self.whole_prompts or self.whole_prompts_argument in options.extra_args or options.mode != "chat"
        return max(tokens, options.context_tokens) if is_whole else tokens

    def _used_permille(self, options: ServingOptions) -> int:
        """Return the share of a device that the engine uses, in thousandths: as stated by the user, or its default.

        An engine with a margin (`has_margin`) uses only `device_percent` of the stated share.
        """
        stated = _find_stated(options, self.share_argument)
        if stated is None:
            return self.device_percent * 10
        # Without a margin, the engine uses all of the stated share.
        margin = self.device_percent if self.has_margin else 100
        return max(1, int(min(1.0, float(stated)) * margin * 10))

    def _graph_bytes(self, options: ServingOptions) -> int:
        """Return the bytes of captured graphs: for 1, 2 and 4 sequences, then each 8 up to 256, and each 16 up to 512.

        There are none for more than twice as many sequences as may run.
        """
        if self.eager_argument in options.extra_args:
            return 0
        most = min(2 * (options.parallel or 1), 512)
        return (3 + divide_up(min(most, 256), 8) + divide_up(max(0, most - 256), 16)) * _GRAPH_BYTES


def _is_latent(layers: Layers) -> bool:
    """Return whether values are a part of the keys, and every device keeps them whole."""
    return bool(layers.key_elements) and not layers.value_elements


def _find_stated(options: ServingOptions, name: str | None) -> str | None:
    """Return the text of the number that the last argument of this name states, as `NAME VALUE` or `NAME=VALUE`.

    None: there is no such argument, or its value is not valid.
    """
    # NAME=VALUE becomes two items, so that a value always follows its name.
    items = itertools.chain.from_iterable(argument.split("=", 1) for argument in options.extra_args)
    values = [value for argument, value in itertools.pairwise(items) if argument == name]
    last = values[-1] if values else ""
    return last if _NUMBER.fullmatch(last) else None


def _read_stated_number(options: ServingOptions, name: str | None) -> int | None:
    """Return the stated number as a whole one, or None."""
    text = _find_stated(options, name)
    return int(float(text)) if text else None


def _weights_bytes(layout: Layout, devices: int) -> int:
    """Return the bytes of the weights on each device.

    Almost all weights are divided evenly among the devices, with two exceptions:
    1. Weights that project tokens to keys and values. If the model has fewer of these heads than devices, several
       devices keep the same head, and the weights that compute it.
    2. Weights that expand latents (compressed keys and values). vLLM keeps a second form of them, which is multiplied
       with queries (`process_weights_after_loading` of `mla_attention.py`).
    """
    # 1. The projections for the cache: in the whole model (as on one device), and those that each device keeps.
    output_bytes = layout.embedding_size * _ELEMENT_BYTES
    whole_bytes = output_bytes * sum(group.count * _count_projected(layout, group, 1) for group in layout.layers)
    kept_bytes = output_bytes * sum(group.count * _count_projected(layout, group, devices) for group in layout.layers)
    if whole_bytes > layout.tensor_bytes:
        # Quantized weights are smaller, and all of them together are not more than the file.
        kept_bytes = divide_up(kept_bytes * layout.tensor_bytes, whole_bytes)
        whole_bytes = layout.tensor_bytes

    # 2. The second form of the weights that expand latents.
    latent_elements = sum(group.count * group.key_elements for group in layout.layers if _is_latent(group))
    absorbed_bytes = divide_up(latent_elements * layout.attention_size * _ELEMENT_BYTES, devices)

    # 3. All other weights are divided evenly.
    divided_bytes = divide_up(layout.tensor_bytes - whole_bytes, devices)
    return (divided_bytes + kept_bytes) * _LOADED_WEIGHTS_PERCENT // 100 + absorbed_bytes


def _count_projected(layout: Layout, layers: Layers, devices: int) -> int:
    """Return the outputs of the projections of a layer that each device keeps because it needs them for its cache."""
    return _LATENT_PROJECTIONS * layers.key_elements if _is_latent(layers) else _count_kept(layout, layers, devices)


def _count_kept(layout: Layout, layers: Layers, devices: int) -> int:
    """Return the elements that each device caches for one token in one layer.

    The heads are divided among the devices, and each keeps keys and values of at least one whole head. A latent belongs
    to all heads, so every device keeps all of it.
    """
    if _is_latent(layers):
        return layers.key_elements
    head_size = max(1, layout.attention_size // layout.head_count) if layout.head_count else 1

    def shard(elements: int) -> int:
        """Return the elements on each device, for whole heads; `elements` are those of all heads."""
        heads = divide_up(elements, head_size)
        return min(elements, divide_up(heads, devices) * head_size)

    return shard(layers.key_elements) + shard(layers.value_elements)


def _cache_bytes(layout: Layout, options: ServingOptions, devices: int, extra_tokens: int | None, block: int) -> int:
    """Return the bytes of the cache on each device, with which one request gets its whole context.

    For each kind of layers: layers (with those that fill up a group) times blocks per request times bytes per block;
    for recurrent layers, blocks for their states instead, which each request at once has: vLLM does not start without.

    Args:
        layout: layout of the model.
        options: serving options.
        devices: devices that share the cache.
        extra_tokens: tokens of the current batch that a layer with a window keeps in addition to it; None: it
            keeps the whole context.
        block: tokens of one block, the unit in which the engine reserves memory.
    """
    # vLLM divides the layers of each kind into groups of equal size. A group that is not full takes as much as others.
    counts = [layers.count for layers in layout.layers]
    fewest, most = min(counts, default=0), max(counts, default=0)
    # Groups are as large as the smallest kind, or as the largest if that has less than 1.5 times as many layers.
    group_size = most if most < fewest * 1.5 else fewest
    has_groups = extra_tokens is not None and len(counts) > 1

    # A block is enlarged until a state fits in, and states are padded to it (`_align_hybrid_block_size`). Its size is
    # that of the layers that keep most of a token: `most_kept` elements.
    most_kept = max((_count_kept(layout, layers, devices) for layers in layout.layers), default=0)
    state_bytes = divide_up(max((layers.state_bytes for layers in layout.layers), default=0), devices)
    if state_bytes:
        block *= divide_up(state_bytes, block * most_kept * _ELEMENT_BYTES)

    total_bytes = 0
    for layers in layout.layers:
        block_count = divide_up(options.context_tokens, block)
        if layers.window is not None and extra_tokens is not None:
            # The window seldom begins with a block, hence one more.
            block_count = divide_up(min(options.context_tokens, layers.window - 1 + extra_tokens), block) + 1
        # The last group of a kind counts as full.
        layer_count = divide_up(layers.count, group_size) * group_size if has_groups else layers.count
        if layers.state_bytes:
            state_blocks = _STATE_BLOCKS * (options.parallel or 1)
            total_bytes += layer_count * state_blocks * block * most_kept * _ELEMENT_BYTES
        token_bytes = _count_kept(layout, layers, devices) * _ELEMENT_BYTES
        total_bytes += layer_count * block_count * block * token_bytes
    return total_bytes


def _compute_bytes(layout: Layout, options: ServingOptions, devices: int, tokens: int) -> int:
    """Return the bytes that are live at once while the largest batch is computed, or while its tokens are drawn.

    Vectors of the embedding's size are whole on every device; the wider ones inside a layer are divided.
    """
    # The factors count vectors that are live at once.
    narrow = 5 * layout.embedding_size + layout.embedding_size * layout.expert_outputs
    wide = 3 * max(layout.feed_forward_size, layout.attention_size)
    batch_bytes = tokens * (narrow + divide_up(wide, devices)) * _ELEMENT_BYTES
    return max(batch_bytes, _SAMPLER_COPIES * (options.parallel or 1) * layout.vocabulary_size * 4)  # 4 bytes: float32


def _expansion_bytes(layout: Layout, options: ServingOptions, devices: int) -> int:
    """Return the bytes of the keys and values that are expanded from latents at once; 0: there are no latents.

    A latent is the short vector from which the keys and values of all heads are computed. The expanded ones are there
    twice: as the projection returns them, and in the form that the kernels of attention read.
    """
    largest_latent = max((layers.key_elements for layers in layout.layers if _is_latent(layers)), default=0)
    if not largest_latent:
        return 0
    # Tokens of which vLLM expands latents at once, before its upper limit.
    # _LATENT_CONTEXT: contexts of which latents are expanded at once. _LATENT_BLOCKS: at least so many tokens of each
    # request.
    tokens = max(_LATENT_CONTEXT * options.context_tokens, _LATENT_BLOCKS * (options.parallel or 1))
    expanded_elements = largest_latent + 2 * divide_up(layout.attention_size, devices)
    return min(_MOST_LATENT_TOKENS, tokens) * expanded_elements * _ELEMENT_BYTES


def _container_bytes(layout: Layout, workers: int) -> int:
    """Return the bytes of the processes. Weights are mapped from files, and their pages can be dropped at any time."""
    return _FRONTEND_BYTES + workers * _WORKER_BYTES + _TOKEN_BYTES * layout.vocabulary_size
