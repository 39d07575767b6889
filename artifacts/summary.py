"""What a GGUF header means to people: names and sizes. What it means for memory is in `layout.py`."""

from artifacts.gguf import GGUFHeader
from artifacts.values import count_of, text_of, widest
from crds.model import GGUF

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
    architecture = text_of(read("general.architecture"))
    heads_kv = read(f"{architecture}.attention.head_count_kv", read(f"{architecture}.attention.head_count"))
    return GGUF(
        architecture=architecture,
        model_name=text_of(read("general.name")),
        quantization=_quantization(header),
        context_length=count_of(read(f"{architecture}.context_length")),
        embedding_size=count_of(read(f"{architecture}.embedding_length")),
        layer_count=count_of(read(f"{architecture}.block_count")),
        head_count=widest(read(f"{architecture}.attention.head_count")),
        head_count_kv=widest(heads_kv),
        tensor_count=header.tensor_count,
        file_version=header.version,
        license=text_of(read("general.license")),
    )


def _quantization(header: GGUFHeader) -> str:
    stated = header.metadata.get("general.file_type")
    if isinstance(stated, int) and stated in FILE_TYPES:
        return FILE_TYPES[stated]
    return max(header.bytes_by_type, key=lambda name: header.bytes_by_type[name], default="")
