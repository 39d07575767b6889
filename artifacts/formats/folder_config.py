"""Facts of the `config.json` of a folder of weights (Hugging Face layout, MLX's too); see gguf_facts for a GGUF.

The names are those of transformers' configurations. A layer keeps keys and values of its heads, those of a window, a
latent of both (MLA: DeepSeek V3, Kimi K2, GLM-5), or the state of gated delta rule attention (Qwen3-Next, Qwen3.5). A
configuration with any other state has no layout, and the user must state its memory.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from artifacts.errors import ArtifactError
from artifacts.formats.header_values import count_active_parameters, read_count, read_text
from crds.serving import Mode
from crds.weights_header import GGUF, Layers, Layout

CONFIG: Final = "config.json"
QUANTIZATION: Final = "hf_quant_config.json"
"""File in which ModelOpt states the quantization, if config.json does not."""
CHECKED: Final = (
    *(CONFIG, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"),
    *("video_preprocessor_config.json", "generation_config.json", "adapter_config.json"),
)
"""Files of a folder from which loaders take the names of classes."""
_CODE_KEYS: Final = frozenset({"model_file", "custom_generate"})
"""Keys with which a loader imports Python: mlx_lm's own (CVE-2026-5843), and one of transformers."""
_CLASSES: Final = "auto_map"
"""Key that names classes in Python files beside the weights, for a loader that is set to trust them."""
_CLASS_BESIDE: Final = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)
"""A class of a file of the same folder; `REPO--FILE.CLASS` names another repository, and a slash another folder."""
_KERNEL_KEYS: Final = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
"""Keys that name attention code; a name with a slash is a repository (CVE-2026-4372)."""
_HAS_WINDOW: Final = {"full_attention": False, "sliding_attention": True}
"""By layer type, whether layers of that type attend through a window."""
_OTHER_STATE_KEYS: Final = (
    *("state_size", "mamba_d_state", "ssm_cfg", "conv_kernel", "conv_L_cache", "linear_attn_config", "compress_ratios"),
    *("attn_layer_indices", "layers_block_type", "hybrid_override_pattern", "rwkv", "cross_attention_layers"),
)
"""Fields of models that keep state of which no size is computed here, such as DeepSeek V4 (compress_ratios)."""
_LATENT_KEY: Final = "kv_lora_rank"
"""Field of models whose layers keep a latent of keys and values."""
_LATENT_TYPES: Final = frozenset({"full_attention", "deepseek_sparse_attention"})
"""Layer types of them, of which all layers keep the same."""
_RECURRENT_KEYS: Final = (
    *("linear_conv_kernel_dim", "linear_num_key_heads", "linear_key_head_dim"),
    *("linear_num_value_heads", "linear_value_head_dim"),
)
"""Fields of models with layers of gated delta rule attention."""
_RECURRENT_TYPE: Final = "linear_attention"
_RECURRENT_KIND: Final = (-1, 0)
"""Stands for the window and the elements of a layer that keeps neither."""
_STATE_BYTES: Final = 4
"""Bytes of an element of a state. Engines keep the inputs of the convolution, 2 % of it, with 16 bits."""
_SIZE_KEYS: Final = (
    *("head_dim", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok"),
    *("global_head_dim", "num_global_key_value_heads", "top_k_experts", "intermediate_size_mlp"),
    *(_LATENT_KEY, "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", *_RECURRENT_KEYS),
)
_GEMMA_4_KEYS: Final = ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers")
"""Fields of Gemma 4 that may lessen the memory. Engines ignore them in a model of another type."""
_PACKED_FORMATS: Final = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4", "float-quantized": "fp8"}
"""Formats of compressed-tensors that have a name of their own, by which devices are chosen."""
_GENERATING: Final = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Ends of the classes of models that generate text."""
_SHARED_KEYS: Final = ("quantization", "quantization_config", "torch_dtype", "dtype", "architectures")
"""Keys that the configuration of a multimodal model states beside that of its language model."""
MOST_VALUES: Final = 600_000
"""A tokenizer with 70,000 added tokens has fewer. Each value takes some 80 bytes, also of an agent without a limit."""
_MOST_STATE_BYTES: Final = 1 << 40
"""More than any layer keeps; it is a product of three sizes."""
_LARGEST: Final = 1 << 24
"""Larger than any size of a model; no product of two such sizes overflows a status."""


def parse(text: bytes, python_files: Sequence[str] = (), quantization: bytes | None = None) -> dict[str, Any]:
    """Parse a config.json as `parse_safe` does; for a multimodal model, return that of its language model.

    A multimodal model has that part in `text_config`, but states some keys, such as the quantization, beside it; they
    are copied into the result. `quantization` is the text of hf_quant_config.json, if there is one: it is used if
    config.json states no quantization.

    Raises ArtifactError: HeaderInvalid, or CustomCode.
    """
    config = parse_safe(CONFIG, text, python_files)
    inner = config.get("text_config")
    merged = dict(inner) if isinstance(inner, dict) else config

    # _SHARED_KEYS, such as the quantization; a value of the language model's own takes precedence.
    for key in _SHARED_KEYS:
        if key in config:
            merged.setdefault(key, config[key])

    if quantization is not None and "quantization_config" not in merged:
        stated = parse_safe(QUANTIZATION, quantization).get("quantization")
        if isinstance(stated, dict):
            merged["quantization_config"] = stated
    return merged


def parse_safe(name: str, text: bytes, python_files: Sequence[str] = ()) -> dict[str, Any]:
    """Parse a JSON file of a folder of weights, and refuse one with which a loader would run Python.

    The key `auto_map` names classes in Python files. Many conversions keep it, though their engine needs no such class,
    and a repository's Python files are never fetched. So it is refused only if it names a class of another repository
    or folder, or if there are `python_files`: those beside the weights in the owner's own folder.

    Raises ArtifactError: HeaderInvalid, or CustomCode.
    """
    # Count separators instead of values, since decoded values take many times the memory of their text.
    if sum(map(text.count, (b",", b"[", b"{"))) > MOST_VALUES:
        problem = f"has more than {MOST_VALUES} values, and no configuration has so many"
        raise ArtifactError("HeaderInvalid", f"{name} {problem}")
    try:
        config = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError("HeaderInvalid", f"{name} is not valid JSON: {error}") from error

    problem = _find_code(config, python_files)
    if problem:
        raise ArtifactError("CustomCode", f"{name} has the key {problem}")
    return config


def _find_code(config: object, python_files: Sequence[str]) -> str:
    """Return the first key, at any depth, that makes a loader run Python, with the remedy; empty if there is none."""
    for value in _list_nested(config):
        if isinstance(value, dict):
            for key, inner in value.items():
                if problem := _describe_code(str(key), inner, python_files):
                    return problem
    return ""


def _list_nested(value: object) -> Iterator[object]:
    """Yield a value and all that is in it, at any depth."""
    pending = [value]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, dict):
            pending += node.values()
        elif isinstance(node, list):
            pending += node


def _describe_code(key: str, value: object, python_files: Sequence[str]) -> str:
    """Return the key with the remedy if it makes a loader run Python; empty if it does not."""
    # _CLASSES is `auto_map`, _CODE_KEYS name Python files to import, and _KERNEL_KEYS name code for attention.
    if key == _CLASSES:
        return _describe_classes(value, python_files)
    # The value of such a key is the name of a built-in kernel, or with a slash a repository with code.
    is_kernel = key in _KERNEL_KEYS and isinstance(value, str) and "/" in value
    if is_kernel or (key in _CODE_KEYS and value):
        return (
            f"{key}, which names Python code for a loader to run: use weights without it, or a copy of them without "
            f"the key {key} if the engine implements this architecture itself"
        )
    return ""


def _describe_classes(value: object, python_files: Sequence[str]) -> str:
    """Return the problem with an `auto_map`, with the remedy; empty if no class that it names can be loaded."""
    if not value:
        return ""
    foreign = _find_foreign_class(value)
    if foreign is not None:
        return (
            f"{_CLASSES} with the value {foreign[:100]!r}, which names Python code outside of this folder: use a copy "
            f"of these weights without the key {_CLASSES} if the engine implements this architecture itself"
        )
    if python_files:
        return (
            f"{_CLASSES}, which names Python code for a loader to run, and {python_files[0]} is beside it: remove the "
            f"Python files of this folder, which no engine of Pomona needs, or the key {_CLASSES}"
        )
    return ""


def _find_foreign_class(classes: object) -> str | None:
    """Return the first entry of an `auto_map` that is no class of a file in this folder (FILE.CLASS), or None."""
    for entry in _list_nested(classes):
        if entry is None or isinstance(entry, (dict, list)):
            continue  # names no class itself
        # _CLASS_BESIDE matches FILE.CLASS, and neither a repository (REPO--FILE.CLASS) nor a path with a slash.
        if not (isinstance(entry, str) and _CLASS_BESIDE.fullmatch(entry)):
            return str(entry)
    return None


def summarize(config: dict[str, Any]) -> GGUF:
    """Return the facts for users, in the struct of a GGUF header; a fact that is missing or not valid is absent."""
    return GGUF(
        architecture=read_text(config.get("model_type")),
        quantization=_describe_quantization(config),
        context_length=read_count(config.get("max_position_embeddings")),
        embedding_size=read_count(config.get("hidden_size")),
        layer_count=read_count(config.get("num_hidden_layers")),
        head_count=read_count(config.get("num_attention_heads")),
        head_count_kv=read_count(config.get("num_key_value_heads")),
        key_head_size=_find_head_size(config),
        value_head_size=_find_head_size(config),
        modes=_list_modes(config),
    )


def _find_head_size(config: dict[str, Any]) -> int | None:
    """Return the elements of an attention head, which the blocks of a quantized cache have to divide.

    Gemma 4 has heads of two sizes; a block divides both if it divides their greatest common divisor. None: no size is
    stated, or the layers cache something else than the keys and values of their heads.
    """
    # _LATENT_KEY: layers keep one vector for all heads. _OTHER_STATE_KEYS: they keep a state of unknown size.
    if any(config.get(key) for key in (_LATENT_KEY, *_OTHER_STATE_KEYS)):
        return None
    embedding, heads = read_count(config.get("hidden_size")), read_count(config.get("num_attention_heads"))
    width = read_count(config.get("head_dim")) or (embedding // heads if embedding and heads else 0)
    global_width = read_count(config.get("global_head_dim")) or 0
    # The divisor of a number and 0 is the number.
    return math.gcd(width, global_width) or None


def _list_modes(config: dict[str, Any]) -> list[Mode]:
    """Return the serving modes for which a model is made, by the names of its classes; none if they are not stated."""
    stated = config.get("architectures")
    names = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
    if not names:
        return []
    # _GENERATING: ends of names of classes, such as ForCausalLM.
    if any(name.endswith(_GENERATING) for name in names):
        # A class that generates text. Many models for embeddings have one, too: engines then pool the last token.
        return ["chat", "embeddings"]
    # A model for embeddings ranks by the similarity of its embeddings.
    return ["embeddings", "rerank"]


def is_mlx(config: dict[str, Any]) -> bool:
    """Return whether the weights are quantized by MLX, which no other framework reads."""
    stated = config.get("quantization")
    return isinstance(stated, dict) and {"bits", "group_size"} <= stated.keys()


def count_active(config: dict[str, Any], parameters: int, expert_parameters: int) -> int | None:
    """Return the number of parameters that one token uses, of a model with experts; None if it is not known exactly."""
    counts = [read_count(config.get(key)) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    experts = next((count for count in counts if count), 0)
    return count_active_parameters(parameters, expert_parameters, experts, _count_used_experts(config))


def _describe_quantization(config: dict[str, Any]) -> str:
    """Return the method of quantization, with its bits if a method has several, else the type of the weights."""
    mlx = config.get("quantization")  # MLX states it in a key of its own
    bits = read_count(mlx.get("bits")) if isinstance(mlx, dict) else None
    if bits:
        return f"{bits}-bit"
    stated = config.get("quantization_config")
    if isinstance(stated, dict) and (method := _name_method(stated)):
        return method
    return read_text(config.get("torch_dtype") or config.get("dtype"))


def _name_method(stated: dict[str, Any]) -> str:
    """Return the name of a method that `quantization_config` states: awq 4-bit, fp8, mxfp4 and so on.

    Each tool states it in its own way: ModelOpt in `quant_algo`, compressed-tensors in `format` or in the bits of its
    groups, bitsandbytes as a flag for 4 bits, and the others in `quant_method` and `bits`.
    """
    method = read_text(stated.get("quant_method")).lower()
    if method.startswith("modelopt") or (not method and "quant_algo" in stated):
        return read_text(stated.get("quant_algo")).lower() or method
    if method == "compressed-tensors":
        form = read_text(stated.get("format"))
        # _PACKED_FORMATS: short names of forms, such as mxfp4 for mxfp4-pack-quantized.
        if form in _PACKED_FORMATS:
            return _PACKED_FORMATS[form]
    bits = read_count(stated.get("bits")) or _find_packed_bits(stated)
    if method == "bitsandbytes":
        bits = 4 if stated.get("load_in_4bit") else 8
    return f"{method} {bits}-bit" if method and bits else method


def _find_packed_bits(stated: dict[str, Any]) -> int | None:
    """Return the bits of the weights in the first group of compressed-tensors that has weights; None: none has."""
    groups = stated.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            return read_count(weights.get("num_bits"))
    return None


def find_layout(config: dict[str, Any], tensor_bytes: int) -> Layout | None:
    """Return the layout, the dimensions from which the memory of serving is computed.

    None: the configuration lacks one of them or has one that no model has, or a layer keeps state that is not known
    here. The user then has to state the memory.
    """
    embedding = read_count(config.get("hidden_size"))
    heads = read_count(config.get("num_attention_heads"))
    vocabulary = read_count(config.get("vocab_size"))
    layer_count = read_count(config.get("num_hidden_layers"))
    # _OTHER_STATE_KEYS: fields of models whose layers keep a state of which no size is computed here.
    keeps_other_state = any(config.get(key) for key in _OTHER_STATE_KEYS)
    if not embedding or not heads or not vocabulary or not layer_count or keeps_other_state:
        return None

    # _SIZE_KEYS: sizes that are read below; one that is missing cannot be too large.
    further_sizes = [read_count(config.get(key)) or 0 for key in _SIZE_KEYS]
    if max(embedding, heads, vocabulary, layer_count, *further_sizes) > _LARGEST:
        return None

    # These keys count in Gemma 4 only; engines ignore them in another model.
    if not read_text(config.get("model_type")).startswith("gemma4"):
        config = {key: value for key, value in config.items() if key not in _GEMMA_4_KEYS}

    # Describe what each layer caches of the tokens: a latent, or keys and values of its heads.
    if config.get(_LATENT_KEY):
        attention = _read_latent_attention(config, layer_count)
    else:
        attention = _read_attention(config, layer_count, heads, embedding // heads)
    feed_forward = _count_feed_forward(config)
    if attention is None or feed_forward is None:
        return None
    return Layout(
        tensor_bytes=tensor_bytes,
        vocabulary_size=vocabulary,
        embedding_size=embedding,
        # Elements of all query heads together.
        attention_size=heads * attention.head_size,
        head_count=heads,
        feed_forward_size=feed_forward,
        expert_outputs=_count_used_experts(config) or 0,
        layers=attention.layers,
    )


class _Attention(NamedTuple):
    """The layers of a model, and the elements of its widest head."""

    head_size: int
    layers: list[Layers]


def _read_attention(config: dict[str, Any], layer_count: int, heads: int, default_head_size: int) -> _Attention | None:
    """Return the layers that cache keys and values of their heads, and the recurrent ones, grouped by kind.

    None: types or sizes are not valid, recurrent layers are described incompletely, or no layer attends.

    Args:
        config: configuration of the language model.
        layer_count: number of all layers.
        heads: query heads.
        default_head_size: elements of a head if none are stated.
    """
    head_size = read_count(config.get("head_dim")) or default_head_size
    # In Gemma 4, heads have another size and number in layers that attend to the whole context.
    full_head_size = read_count(config.get("global_head_dim")) or head_size
    heads_kv = read_count(config.get("num_key_value_heads")) or heads
    # Without `attention_k_eq_v`, these layers have as many heads as the others.
    full_heads_kv = read_count(config.get("num_global_key_value_heads")) if config.get("attention_k_eq_v") else None
    window_elements = heads_kv * head_size
    full_elements = (full_heads_kv or heads_kv) * full_head_size

    # Each kind is a pair: the window in tokens or None, and the elements of the keys of one token.
    kinds = _count_layer_kinds(config, layer_count, window_elements, full_elements)
    state_bytes = _count_state_bytes(config)

    # Recurrent layers are counted as one kind, _RECURRENT_KIND, which has no cache.
    recurrent = kinds.pop(_RECURRENT_KIND, 0) if kinds is not None else 0
    # Recurrent layers and the sizes of their state (_RECURRENT_KEYS) must be stated together, and be plausible, or not
    # be stated at all: the three flags are equal.
    is_stated = any(config.get(key) for key in _RECURRENT_KEYS)
    has_valid_state = 0 < state_bytes <= _MOST_STATE_BYTES
    is_consistent = bool(recurrent) == is_stated == has_valid_state
    if not window_elements or not kinds or not is_consistent:
        return None

    # Each kind becomes one group of layers.
    layers = [Layers(count=recurrent, state_bytes=state_bytes)] if recurrent else []
    for (window, elements), number in kinds.items():
        layers.append(Layers(count=number, key_elements=elements, value_elements=elements, window=window))
    # By window (0: the whole context), then by elements.
    layers.sort(key=lambda group: (group.window or 0, group.key_elements))
    return _Attention(head_size=max(head_size, full_head_size), layers=layers)


def _read_latent_attention(config: dict[str, Any], layer_count: int) -> _Attention | None:
    """Return the layers of a model with latent attention (MLA, as in DeepSeek V3).

    Each layer keeps one short vector of a token, the latent, from which the keys and values of all heads are computed,
    and beside it the rotary part of the key. None: a size is missing, or a layer is of another type.
    """
    # _LATENT_TYPES: layer types of such models, of which all layers keep the same.
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list) or not {str(kind) for kind in types} <= _LATENT_TYPES):
        return None

    sizes = [read_count(config.get(key)) for key in (_LATENT_KEY, "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")]
    latent, rotary, not_rotary, value = (size or 0 for size in sizes)
    if not all(sizes) or any(config.get(key) for key in _RECURRENT_KEYS):
        return None

    # Sparse attention (DSA) keeps a key beside it, by which it chooses the tokens to attend to. It has fewer bits, so
    # this is an upper bound.
    kept = latent + rotary + (read_count(config.get("index_head_dim")) or 0)
    # An estimate of the memory counts the width of a head three times. Here three vectors of a head have different
    # widths: its query, its query in the latent space, and its output there. So the width is their mean.
    query, latent_query, latent_output = not_rotary + rotary, latent + rotary, max(latent, value)
    width = math.ceil((query + latent_query + latent_output) / 3)
    return _Attention(head_size=width, layers=[Layers(count=layer_count, key_elements=kept)])


def _count_state_bytes(config: dict[str, Any]) -> int:
    """Return the bytes that a recurrent layer keeps for each request; 0 if a size is missing, as without such layers.

    A layer of gated delta rule attention (Qwen3-Next) keeps a matrix for each value head, of the sizes of a key and a
    value, and the last inputs of a short convolution over keys, queries and values.
    """
    sizes = [read_count(config.get(key)) for key in _RECURRENT_KEYS]
    kernel, key_heads, key_size, value_heads, value_size = (size or 0 for size in sizes)
    if not all(sizes):
        return 0
    # The last kernel - 1 inputs: queries and keys, which have equal sizes, and values.
    convolution_inputs = (kernel - 1) * (2 * key_heads * key_size + value_heads * value_size)
    return _STATE_BYTES * (convolution_inputs + value_heads * key_size * value_size)


def _count_layer_kinds(
    config: dict[str, Any], layer_count: int, window_elements: int, full_elements: int
) -> Counter[tuple[int | None, int]] | None:
    """Return the number of layers of each kind; None if `layer_types` is not valid or has no layer with its own cache.

    A kind is a pair: the window in tokens (None: the whole context), and the elements of the keys of one token.
    Recurrent layers are counted as `_RECURRENT_KIND`, and layers that reuse the cache of another one as (None, 0).

    Args:
        config: configuration of the language model.
        layer_count: number of all layers.
        window_elements: elements of the keys of a layer with a window.
        full_elements: the same of a layer that attends to the whole context.
    """
    types, interval = config.get("layer_types"), read_count(config.get("full_attention_interval"))
    # Some configurations state only an interval, some nothing, and others the type of each layer.
    if types is None and interval:
        attending = layer_count // interval
        # Of every `interval` layers, one attends. The unary plus drops a kind of which there is no layer.
        return +Counter({(None, full_elements): attending, _RECURRENT_KIND: layer_count - attending})
    if types is None:
        # One window for all layers is ignored: some models do not use it, so the most memory is assumed.
        return Counter({(None, max(window_elements, full_elements)): layer_count})

    window = read_count(config.get("sliding_window"))
    # _HAS_WINDOW: by layer type, whether its layers attend through a window.
    supported = {*_HAS_WINDOW, _RECURRENT_TYPE}
    if not isinstance(types, list) or len(types) != layer_count or any(str(kind) not in supported for kind in types):
        return None
    recurrent = Counter({_RECURRENT_KIND: types.count(_RECURRENT_TYPE)})
    types = [kind for kind in types if kind != _RECURRENT_TYPE]
    layer_count = len(types)

    # The last layers reuse the cache of earlier ones, so they are counted without one.
    shared = read_count(config.get("num_kv_shared_layers")) or 0
    if shared >= layer_count:
        return None
    kinds = Counter(
        (window or None, window_elements) if _HAS_WINDOW[kind] else (None, full_elements)
        for kind in types[: layer_count - shared]
    )
    return kinds + Counter({(None, 0): shared}) + recurrent  # the sum has no kind without layers


def _count_feed_forward(config: dict[str, Any]) -> int | None:
    """Return the inner elements of the widest feed-forward layer; None if they are not stated.

    In a layer with experts, those of all experts that a token uses are added up.
    """
    # In Llama 4, `intermediate_size_mlp` is the width of a dense layer, and `intermediate_size` that of an expert.
    dense = read_count(config.get("intermediate_size_mlp")) or read_count(config.get("intermediate_size"))
    if dense and config.get("use_double_wide_mlp"):
        # The layers of Gemma 4 that reuse a cache are twice as wide.
        dense *= 2

    expert = read_count(config.get("moe_intermediate_size"))
    if expert is None and config.get("intermediate_size_mlp"):
        expert = read_count(config.get("intermediate_size"))

    used = _count_used_experts(config)
    if not used:
        return dense
    expert_width = expert or dense or 0
    # None: neither width is stated.
    return max(dense or 0, expert_width * used) or None


def _count_used_experts(config: dict[str, Any]) -> int | None:
    """Return the number of experts that a token uses, which Gemma 4 names in a way of its own."""
    return read_count(config.get("num_experts_per_tok")) or read_count(config.get("top_k_experts"))
