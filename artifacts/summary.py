"""What a GGUF header means to people and to placement: names, sizes, and the KV cache that a token of context costs."""

from artifacts.gguf import GGUFHeader, Value
from crds.model import GGUF

_F16_BYTES = 2
_MAX_INT64 = (1 << 63) - 1
_MAX_CHARACTERS = 256

# `general.file_type`, from llama.cpp's include/llama.h (enum llama_ftype); a test holds it against the gguf package.
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
    """Return the header's facts; what it does not say, or says in a form that makes no sense, is absent."""
    read = header.metadata.get
    architecture = _text(read("general.architecture"))
    heads_kv = read(f"{architecture}.attention.head_count_kv", read(f"{architecture}.attention.head_count"))
    return GGUF(
        architecture=architecture,
        model_name=_text(read("general.name")),
        quantization=_quantization(header),
        context_length=_count(read(f"{architecture}.context_length")),
        embedding_size=_count(read(f"{architecture}.embedding_length")),
        layer_count=_count(read(f"{architecture}.block_count")),
        head_count=_widest(read(f"{architecture}.attention.head_count")),
        head_count_kv=_widest(heads_kv),
        tensor_count=header.tensor_count,
        file_version=header.version,
        license=_text(read("general.license")),
        kv_bytes_per_token=_kv_bytes_per_token(header.metadata, architecture, heads_kv),
    )


def _kv_bytes_per_token(metadata: dict[str, Value], architecture: str, heads_kv: Value) -> int | None:
    """Return the bytes of an f16 KV cache for a token of context over all layers, or None if the header hides it.

    Every layer keeps keys and values for each of its KV heads; a layer with none (a recurrent one) keeps nothing. With
    a sliding window, or with latent attention, a runtime may keep less: this is what it keeps at most.
    """
    layers = _count(metadata.get(f"{architecture}.block_count"))
    widths = [_head_width(metadata, architecture, part) for part in ("key_length", "value_length")]
    if layers is None or None in widths:
        return None
    if isinstance(heads_kv, tuple):
        per_layer = [_count(heads) for heads in heads_kv]
        if len(per_layer) != layers or None in per_layer:
            return None
        all_heads = sum(heads or 0 for heads in per_layer)
    else:
        heads = _count(heads_kv)
        if heads is None:
            return None
        all_heads = heads * layers
    return _count(all_heads * sum(width or 0 for width in widths) * _F16_BYTES)


def _head_width(metadata: dict[str, Value], architecture: str, part: str) -> int | None:
    """Return elements of a head: as stated, else the embedding divided among the heads."""
    stated = _count(metadata.get(f"{architecture}.attention.{part}"))
    if stated is not None:
        return stated
    embedding = _count(metadata.get(f"{architecture}.embedding_length"))
    heads = _widest(metadata.get(f"{architecture}.attention.head_count"))
    return embedding // heads if embedding is not None and heads else None


def _quantization(header: GGUFHeader) -> str:
    stated = header.metadata.get("general.file_type")
    if isinstance(stated, int) and stated in FILE_TYPES:
        return FILE_TYPES[stated]
    return max(header.bytes_by_type, key=lambda name: header.bytes_by_type[name], default="")


def _text(value: Value) -> str:
    """Return a string fit for a status and a terminal."""
    if not isinstance(value, str):
        return ""
    return "".join(letter if letter.isprintable() else " " for letter in value[:_MAX_CHARACTERS]).strip()


def _count(value: Value) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT64
    return value if is_count and isinstance(value, int) else None


def _widest(value: Value) -> int | None:
    """Return the largest of one number per layer, or the one for all."""
    if not isinstance(value, tuple):
        return _count(value)
    counts = [_count(number) for number in value]
    return None if not counts or None in counts else max(count or 0 for count in counts)
