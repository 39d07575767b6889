"""Facts of a GGUF header: `summarize` for users, `find_layout` for the memory that serving takes.

The layout is computed layer by layer as llama.cpp does when it loads the file (`src/llama-hparams.cpp`,
`load_arch_hparams` of `src/models/*.cpp`, `create_memory` of `src/llama-model.cpp`). An architecture that is not named
here may cache state that no key of its header describes, so it has no layout: the user must state its memory.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from artifacts.formats.gguf import GGUFHeader, Value
from artifacts.formats.header_values import count_active_parameters, read_count, read_text
from crds.serving import Mode
from crds.weights_header import GGUF, Layers, Layout

_F32_BYTES: Final = 4
_MAX_LAYERS: Final = 4096
_LARGEST: Final = 1 << 48
"""Larger than any product of two sizes of a model; a status takes no more than 63 bits."""
_MAX_KINDS: Final = 16
"""Kubernetes cuts a Job's termination message at 4,096 bytes."""

# `general.file_type`, from llama.cpp's include/llama.h (enum llama_ftype); a test compares it with the gguf package.
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
}


def summarize(header: GGUFHeader) -> GGUF:
    """Return the header's facts for users; a fact that is missing or not valid is absent."""
    read = header.metadata.get
    # Most keys of the metadata begin with the architecture, such as llama.context_length.
    architecture = read_text(read("general.architecture"))

    # Heads of keys and values; a header without them has one for each query head.
    heads_kv = read(f"{architecture}.attention.head_count_kv", read(f"{architecture}.attention.head_count"))
    return GGUF(
        architecture=architecture,
        model_name=read_text(read("general.name")),
        quantization=_name_quantization(header),
        context_length=read_count(read(f"{architecture}.context_length")),
        embedding_size=read_count(read(f"{architecture}.embedding_length")),
        layer_count=read_count(read(f"{architecture}.block_count")),
        head_count=find_widest(read(f"{architecture}.attention.head_count")),
        head_count_kv=find_widest(heads_kv),
        key_head_size=_find_head_size(header, architecture, "key"),
        value_head_size=_find_head_size(header, architecture, "value"),
        modes=_list_modes(header, architecture),
        tensor_count=header.tensor_count,
        file_version=header.version,
        license=read_text(read("general.license")),
    )


def _find_head_size(header: GGUFHeader, architecture: str, part: str) -> int | None:
    """Return the elements of a key or value head (`part`), which the blocks of a quantized cache have to divide.

    If heads have another size in layers with a window, return the greatest common divisor: a block that divides it
    divides both. None: no size is stated.
    """
    read = header.metadata.get
    heads = find_widest(read(f"{architecture}.attention.head_count"))
    embedding = read_count(read(f"{architecture}.embedding_length")) or 0
    full = read_count(read(f"{architecture}.attention.{part}_length")) or (embedding // heads if heads else 0)
    windowed = read_count(read(f"{architecture}.attention.{part}_length_swa")) or 0
    # The divisor of a number and 0 is the number.
    return math.gcd(full, windowed) or None


def _list_modes(header: GGUFHeader, architecture: str) -> list[Mode]:
    """Return the serving modes for which the model is made: by its architecture, its pooling and its tensors.

    Empty for an architecture that is not known, such as a projector.
    """
    if architecture not in KNOWN:
        return []
    pooling = header.metadata.get(f"{architecture}.pooling_type")
    is_made_for: dict[Mode, bool] = {
        "chat": architecture not in _ENCODERS,  # such as BERT: they generate no text
        # _POOLING_OF_TEXTS: by mean, first or last token, each of which makes one embedding of a text.
        "embeddings": pooling in _POOLING_OF_TEXTS,
        # _SCORING_TENSORS: those of a head that scores a text.
        "rerank": any(name in header.shapes for name in _SCORING_TENSORS),
    }
    return [mode for mode, is_made in is_made_for.items() if is_made]


def count_active(header: GGUFHeader) -> int | None:
    """Return the parameters that one token uses, for a model with experts (MoE), of which each token uses a few.

    None if the model has no experts, or the number is not known exactly.
    """
    architecture = read_text(header.metadata.get("general.architecture"))
    experts = find_widest(header.metadata.get(f"{architecture}.expert_count"))
    used = find_widest(header.metadata.get(f"{architecture}.expert_used_count"))
    return count_active_parameters(header.parameters, header.expert_parameters, experts, used)


def _name_quantization(header: GGUFHeader) -> str:
    """Return the quantization that the header states, else the type of most bytes."""
    stated = header.metadata.get("general.file_type")
    if isinstance(stated, int) and stated in FILE_TYPES:
        return FILE_TYPES[stated]
    return max(header.bytes_by_type, key=lambda name: header.bytes_by_type[name], default="")


_PLAIN: Final = """
llama deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2 qwen2moe qwen2vl qwen3
qwen3moe qwen3vl qwen3vlmoe phi2 phi3 phimoe plamo codeshell orion internlm2 minicpm minicpm3 gemma starcoder2 xverse
command-r dbrx olmo olmoe openelm arctic deepseek deepseek2 deepseek2-ocr chatglm glm4 glm4moe bitnet jais jais2
nemotron exaone granite granitemoe chameleon plm bailingmoe bailingmoe2 dots1 arcee ernie4_5 ernie4_5-moe hunyuan-moe
hunyuan-dense hunyuan_vl hy_v3 smollm3 seed_oss grovemoe apertus minimax-m2 cogvlm pangu-embedded mistral3 mistral4
paddleocr llama-embed maincoder
"""
"""Architectures whose layers all attend to the whole context: llama.cpp ignores a window that the header states."""

_WINDOWS: Final[dict[str, tuple[int, bool]]] = {
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gemma4": (0, False),
    "gpt-oss": (2, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "llama4": (4, False),
    "exaone4": (4, False),
    "exaone-moe": (4, False),
    "olmo2": (4, False),
    "afmoe": (4, False),
    "smallthinker": (4, True),
    "laguna": (4, True),
    "mellum": (4, False),
    "muse-glimmer": (4, False),
    "plamo3": (8, False),
    "mimo2": (0, False),
    "granite_swa": (0, False),
    "maple": (0, False),
    "spark2_5": (0, False),
    "step35": (0, False),
}
"""Period n and a flag: one layer of every n attends to the whole context, the first if the flag is True, else the last.
0: the header has to state the pattern. A pattern in the header takes precedence over this table."""
_FIXED_WINDOWS: Final = {"llama4": 8192, "smallthinker": 4096}
_WINDOWED_FROM_LAYERS: Final = {"exaone4": 64}
"""llama.cpp uses the window only in the variant with this many layers."""

_FULLY_RECURRENT: Final = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_RECURRENT_WITHOUT_HEADS: Final = frozenset(
    {"jamba", "granitehybrid", "plamo2", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"}
)
"""A layer that has no key and value heads is recurrent."""
_RECURRENT_BY_INTERVAL: Final = frozenset({"qwen3next", "qwen35", "qwen35moe"})
_ATTENDING_AND_RECURRENT: Final = frozenset({"falcon-h1"})
_ENCODERS: Final = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert"}
    | {"gemma-embedding"}
)
_POOLING_OF_TEXTS: Final = (1, 2, 3)
"""Mean, first token and last token, of llama.cpp's llama_pooling_type: each makes one embedding of a text."""
_SCORING_TENSORS: Final = ("cls.weight", "cls.output.weight")
"""A head that scores a text. Without one, llama.cpp answers numbers that mean nothing."""
KNOWN: Final = (
    frozenset(_PLAIN.split())
    | _WINDOWS.keys()
    | _FULLY_RECURRENT
    | _RECURRENT_WITHOUT_HEADS
    | _RECURRENT_BY_INTERVAL
    | _ATTENDING_AND_RECURRENT
    | _ENCODERS
)


def find_layout(header: GGUFHeader) -> Layout | None:
    """Return the layout that decides the memory of serving, or None when the header does not have all of it."""
    return _LayoutReader(header).read_layout()


class _LayoutReader:
    """The layout of one header, read with the keys of its architecture."""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header
        self._architecture = read_text(header.metadata.get("general.architecture"))
        self._layer_count = self._read_number("block_count") or 0

    def read_layout(self) -> Layout | None:
        """Return the dimensions from which the memory of serving is computed.

        None: a value is missing or larger than that of any model, or it is not known what the layers cache. The user
        then has to state the memory.
        """
        # The second dimension of this table is the size of the vocabulary.
        embedding_shape = self._header.shapes.get("token_embd.weight", ())
        embedding = self._read_number("embedding_length")
        kinds = self._group_layers()
        if len(embedding_shape) <= 1 or embedding is None or kinds is None:
            return None

        # The query heads, and the width of one.
        heads = find_widest(self._read_per_layer("attention.head_count", 0)) or 0
        head_size = self._read_number("attention.key_length", embedding // heads if heads else 0) or 0
        if latent_query := self._read_number("attention.key_length_mla"):
            # Latent attention (MLA): an estimate counts the width of a head three times, but three vectors of a head
            # have different widths: its query, its query in the latent space and its output there. Take their mean.
            latent_output = self._read_number("attention.value_length") or 0
            head_size = math.ceil((latent_query + head_size + latent_output) / 3)

        layout = Layout(
            tensor_bytes=self._header.tensor_bytes,
            vocabulary_size=embedding_shape[1],
            embedding_size=embedding,
            attention_size=heads * head_size,
            head_count=heads,
            feed_forward_size=self._count_feed_forward(),
            expert_outputs=find_widest(self._header.metadata.get(f"{self._architecture}.expert_used_count")) or 0,
            layers=kinds,
        )

        # Refuse a size that is larger than that of any model.
        sizes = [size for struct in (layout, *layout.layers) for size in msgspec.structs.astuple(struct)]
        return layout if all(size <= _LARGEST for size in sizes if isinstance(size, int)) else None

    def _read_number(self, key: str, default: int | None = None) -> int | None:
        """Return a number of the architecture; `default` if it is missing or not valid."""
        number = read_count(self._header.metadata.get(f"{self._architecture}.{key}"))
        return default if number is None else number

    def _read_per_layer(self, key: str, default: int | None) -> tuple[int, ...] | None:
        """Return the value of each layer; the header states a value for each layer, or one for all layers."""
        return expand_to_layers(self._header.metadata.get(f"{self._architecture}.{key}", default), self._layer_count)

    def _group_layers(self) -> list[Layers] | None:
        """Return the layers grouped by kind: layers of a kind keep equal bytes of each token and request.

        A layer caches keys and values of each token, of the whole context or of a window of the last tokens. A
        recurrent layer keeps a state of one size for each request, however many tokens it has.

        None: it is not known what a layer keeps, or there are too many layers or kinds.
        """
        # KNOWN: the architectures of which it is known what their layers keep.
        if not 0 < self._layer_count <= _MAX_LAYERS or self._architecture not in KNOWN or self._has_unknown_caches():
            return None

        # Find out what each layer keeps; None: it is not known.
        cached_elements, recurrent = self._count_cached_elements(), self._list_recurrent()
        windows = self._list_windows()
        if cached_elements is None or recurrent is None or windows is None:
            return None
        state_bytes = self._count_state_bytes() if any(recurrent) else 0
        if state_bytes is None:
            return None

        # Count the layers of each kind: elements of keys, elements of values, window, bytes of recurrent state.
        counts: dict[tuple[int, int, int | None, int], int] = {}
        for (key, value), is_recurrent, window in zip(cached_elements, recurrent, windows, strict=True):
            # In few architectures (_ATTENDING_AND_RECURRENT), a layer can attend and be recurrent at once.
            attends = (key or value) and (self._architecture in _ATTENDING_AND_RECURRENT or not is_recurrent)
            state = state_bytes if is_recurrent else 0
            kind = (key, value, window, state) if attends else (0, 0, None, state)
            counts[kind] = counts.get(kind, 0) + 1

        kinds = [
            Layers(count=count, key_elements=key, value_elements=value, window=window, state_bytes=state)
            for (key, value, window, state), count in counts.items()
        ]
        return kinds if len(kinds) <= _MAX_KINDS else None

    def _has_unknown_caches(self) -> bool:
        """Return whether the header has keys of caches of which no size is computed here."""
        prefix = f"{self._architecture}."
        keys = [key.removeprefix(prefix) for key in self._header.metadata if key.startswith(prefix)]
        return any(key.startswith(("attention.indexer.", "kda.")) for key in keys)

    def _count_cached_elements(self) -> Sequence[tuple[int, int]] | None:
        """Return the elements of keys and of values that each layer caches of a token.

        A layer without a cache, or with that of an earlier layer, has (0, 0). None: a size is not known.
        """
        if self._architecture in _ENCODERS | _FULLY_RECURRENT:
            return [(0, 0)] * self._layer_count

        heads = self._read_per_layer("attention.head_count", None)
        # A header that states no number of key and value heads has one for each query head.
        states_kv = f"{self._architecture}.attention.head_count_kv" in self._header.metadata
        heads_kv = self._read_per_layer("attention.head_count_kv", None) if states_kv else heads

        embedding, widest_heads = self._read_number("embedding_length"), find_widest(heads)
        if heads_kv is None or embedding is None:
            return None
        default_size = embedding // widest_heads if widest_heads else None

        # 1. Sizes of keys and values of a head, in layers that attend to the whole context and in those with a window.
        full_sizes = [self._read_number(f"attention.{part}_length", default_size) for part in ("key", "value")]
        window_sizes = [
            self._read_number(f"attention.{part}_length_swa", size)
            for part, size in zip(("key", "value"), full_sizes, strict=True)
        ]
        windows = self._list_windows()
        if windows is None or None in full_sizes or None in window_sizes:
            return None

        # 2. The elements of each layer. A latent cache (MLA) has no separate values: they are part of the key. The last
        # layers may reuse the cache of earlier ones.
        has_latent_cache = self._read_number("attention.key_length_mla") is not None
        layers_with_cache = len(heads_kv) - self._count_shared_layers()
        sizes = [window_sizes if window else full_sizes for window in windows]
        elements = []
        for layer, (heads_of_layer, (key, value)) in enumerate(zip(heads_kv, sizes, strict=True)):
            values = 0 if has_latent_cache else heads_of_layer * (value or 0)
            reuses_cache = layer >= layers_with_cache
            elements.append((0, 0) if reuses_cache else (heads_of_layer * (key or 0), values))
        return elements

    def _count_shared_layers(self) -> int:
        """Return the number of last layers that reuse the cache of earlier ones."""
        if self._architecture == "gemma3n":  # llama.cpp: only the first 20 layers have their own cache
            return max(0, self._layer_count - 20)
        if self._architecture == "gemma4":
            return self._read_number("attention.shared_kv_layers") or 0
        return 0

    def _list_windows(self) -> Sequence[int | None] | None:
        """Return the attention window of each layer; None in the list means the whole context.

        None instead of a list: it is not known which layers have the window.
        """
        whole: list[int | None] = [None] * self._layer_count
        # LFM2 has one window for all layers, or none. Architectures that are not in _WINDOWS have none; of those in
        # _WINDOWED_FROM_LAYERS, only a variant with at least that many layers has one.
        if self._architecture in {"lfm2", "lfm2moe"}:
            return [self._read_number("attention.sliding_window") or None] * self._layer_count
        if self._architecture not in _WINDOWS or self._layer_count < _WINDOWED_FROM_LAYERS.get(self._architecture, 0):
            return whole

        # 1. The size of the window. A header that states 0 has none; any other does not change a fixed one.
        fixed_window = _FIXED_WINDOWS.get(self._architecture)
        window = self._read_number("attention.sliding_window", fixed_window)
        if not window:
            return whole
        window = fixed_window or window

        # 2. The layers that have it: as the header lists them, or all but one of each period.
        stated = self._header.metadata.get(f"{self._architecture}.attention.sliding_window_pattern")
        if isinstance(stated, tuple):
            pattern = expand_to_layers(stated, self._layer_count)
            return None if pattern is None else [window if has_window else None for has_window in pattern]

        # One layer of each period attends to the whole context: its first or its last.
        known_period, is_first_full = _WINDOWS[self._architecture]
        period = read_count(stated) or known_period
        # 0: the architecture has no period of its own, and the header states none.
        if not period:
            return None
        full_layer = 0 if is_first_full else period - 1
        return [None if layer % period == full_layer else window for layer in range(self._layer_count)]

    def _list_recurrent(self) -> Sequence[bool] | None:
        """Return a flag for each layer: True if the layer keeps a recurrent state. None: this is not known.

        Depending on the architecture these are all layers, none, those without key and value heads, or those that the
        header lists, else all but one of each interval and the prediction layers.
        """
        # All layers keep a state.
        if self._architecture in _FULLY_RECURRENT | _ATTENDING_AND_RECURRENT:
            return [True] * self._layer_count

        # Layers without key and value heads keep one.
        if self._architecture in _RECURRENT_WITHOUT_HEADS:
            head_counts = self._read_per_layer("attention.head_count_kv", None)
            if head_counts is None:
                return None
            # A layer is recurrent that has no heads, and in Nemotron no feed-forward network either: there, layers
            # that only feed forward have neither heads nor a state.
            widths: Sequence[int] = (0,) * self._layer_count
            if self._architecture.startswith("nemotron"):
                widths = self._read_per_layer("feed_forward_length", 0) or widths
            return [not heads and not width for heads, width in zip(head_counts, widths, strict=True)]

        # The layers that the header lists keep one, else all but one of each interval.
        if self._architecture in _RECURRENT_BY_INTERVAL:
            stated = self._header.metadata.get(f"{self._architecture}.attention.recurrent_layers")
            if stated is not None:
                flags = expand_to_layers(stated, self._layer_count)
                return None if flags is None else [bool(flag) for flag in flags]
            # The last layer of each interval attends; so do the last layers, which predict further tokens.
            interval = self._read_number("full_attention_interval", 4) or 4
            prediction_layers = self._read_number("nextn_predict_layers") or 0
            trunk = self._layer_count - prediction_layers
            return [layer < trunk and (layer + 1) % interval != 0 for layer in range(self._layer_count)]

        # No layer keeps one.
        return [False] * self._layer_count

    def _count_state_bytes(self) -> int | None:
        """Return the bytes that a recurrent layer keeps per request: state and inputs of its convolution, as f32.

        None: a size is not stated.
        """
        # RWKV: a matrix for each head, and the last inputs (shifts)
        embedding, wkv = self._read_number("embedding_length"), self._read_number("wkv.head_size")
        if embedding and wkv:
            default_shifts = 1 if self._architecture in {"rwkv6qwen2", "arwkv7"} else 2
            shifts = self._read_number("token_shift_count") or default_shifts
            # Each head has a matrix of wkv x wkv elements: wkv for each element of the embedding.
            return (wkv + shifts) * embedding * _F32_BYTES

        # Short convolutions, such as LFM2: their last inputs
        if embedding and (short_kernel := self._read_number("shortconv.l_cache")):
            return embedding * (short_kernel - 1) * _F32_BYTES

        # Mamba, and what has the same keys: the state, and the last inputs of a convolution
        kernel, inner, state = (self._read_number(f"ssm.{key}") for key in ("conv_kernel", "inner_size", "state_size"))
        if kernel is None or inner is None or state is None:
            return None

        groups = self._read_number("ssm.group_count") or 0
        # Its inputs are the inner vector, and two vectors of the state's size for each group.
        convolution_inputs = max(0, kernel - 1) * (inner + 2 * groups * state)
        return (convolution_inputs + state * inner) * _F32_BYTES

    def _count_feed_forward(self) -> int:
        """Return the inner elements of the widest layer for one token: of a feed-forward network or a recurrent mixer.

        In a layer with experts, those of all experts that a token uses are added up. Shared experts, which every token
        uses, are computed separately.
        """
        metadata, prefix = self._header.metadata, self._architecture

        dense = find_widest(metadata.get(f"{prefix}.feed_forward_length")) or 0
        used = find_widest(metadata.get(f"{prefix}.expert_used_count")) or 0
        # Without a width of their own, experts are as wide as a dense layer, and shared experts as the others.
        expert = find_widest(metadata.get(f"{prefix}.expert_feed_forward_length")) or dense
        shared_experts = self._read_number("expert_shared_count") or 0
        shared = self._read_number("expert_shared_feed_forward_length", expert * shared_experts)

        inner = self._read_number("ssm.inner_size") or 0
        widest_layer = max(dense, used * expert, shared or 0)
        # In a layer that attends and is recurrent, half of the recurrent mixer's output is kept while the rest of the
        # layer is computed.
        return widest_layer + inner // 2 if self._architecture in _ATTENDING_AND_RECURRENT else max(widest_layer, inner)


def expand_to_layers(value: Value, layers: int) -> tuple[int, ...] | None:
    """Return the count (or flag) of each layer, from a value for each layer or one for all; None if it is not valid."""
    if not isinstance(value, tuple):
        one = read_count(value)
        return None if one is None else (one,) * layers
    counts = [int(number) if isinstance(number, bool) else read_count(number) for number in value]
    valid_counts = tuple(count for count in counts if count is not None)
    return valid_counts if len(valid_counts) == len(value) == layers else None


def find_widest(value: Value) -> int | None:
    """Return the largest of the counts per layer, or the single count for all layers; None: one is not valid."""
    if not isinstance(value, tuple):
        return read_count(value)
    counts = [read_count(number) for number in value]
    return None if not counts or None in counts else max(count or 0 for count in counts)
