"""The facts in the header of weights, from which memory, engines and labels follow: a GGUF file's or a folder's."""

from typing import Annotated, Literal

from msgspec import Meta

from crds.meta import AS_SET, Amount, ApiStruct
from crds.serving import Mode


class Layers(ApiStruct, frozen=True):
    """Layers whose caches have equal sizes. A model lists its layers by kind, not one by one."""

    count: Annotated[int, Meta(ge=1, le=1 << 62), "Number of layers of this kind."]
    key_elements: Annotated[
        Amount, "Key elements that one layer keeps for each token; 0 if the layer keeps no keys."
    ] = 0
    value_elements: Annotated[
        Amount, "Value elements that one layer keeps for each token; 0 if the layer keeps no values."
    ] = 0
    window: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 62)] | None,
        "Length of the layer's sliding window, in tokens. Absent: the layer uses the whole context.",
    ] = None
    state_bytes: Annotated[
        Amount, "Bytes that one recurrent layer keeps for each request; the context length does not change them."
    ] = 0


class Layout(ApiStruct, frozen=True):
    """Dimensions that decide how much memory serving takes, whatever the format of the weights."""

    tensor_bytes: Annotated[Amount, "Size of all weights, in bytes."]
    vocabulary_size: Annotated[Amount, "Number of tokens in the vocabulary."]
    embedding_size: Annotated[Amount, "Number of elements that each layer passes to the next layer."]
    attention_size: Annotated[Amount, "Number of elements of all query heads together, in the widest layer."]
    head_count: Annotated[Amount, "Number of query heads of the widest layer."]
    feed_forward_size: Annotated[
        Amount, "Number of inner feed-forward elements of the widest layer, summed over all experts that a token uses."
    ]
    layers: Annotated[list[Layers], Meta(max_length=16), "All layers, grouped by kind."]
    expert_outputs: Annotated[Amount, "Number of experts that a token uses; 0 if the model has no experts."] = 0


HeaderText = Annotated[str, Meta(max_length=256)]
"""A text of a header, which is cut off when it is read."""


class GGUF(ApiStruct, frozen=True):
    """Facts of the artifact's own header."""

    architecture: Annotated[HeaderText, "Architecture of the model, for example llama or qwen3."] = ""
    model_name: Annotated[HeaderText, "Name of the model according to the artifact."] = ""
    quantization: Annotated[HeaderText, "Quantization of the weights, for example Q4_K_M or F16."] = ""
    context_length: Annotated[Amount | None, "Longest context that the model was trained for, in tokens."] = None
    embedding_size: Annotated[Amount | None, "Width of the embedding."] = None
    layer_count: Annotated[Amount | None, "Number of transformer blocks."] = None
    head_count: Annotated[Amount | None, "Attention heads of the widest layer."] = None
    head_count_kv: Annotated[Amount | None, "Key and value heads of the widest layer (grouped-query attention)."] = None
    key_head_size: Annotated[
        Amount | None,
        "Elements of a key head; of heads of several sizes their greatest common divisor, which the blocks of a "
        "quantized cache have to divide.",
    ] = None
    value_head_size: Annotated[Amount | None, "The same of a value head."] = None
    modes: Annotated[
        list[Mode],
        Meta(max_length=3),
        "Modes of serving that the artifact is made for, as its header shows: chat if it generates text, "
        "embeddings if it states how it pools, rerank if it has a head that scores. Absent if that is not known.",
        AS_SET,
    ] = []
    tensor_count: Annotated[Amount | None, "Number of tensors."] = None
    file_version: Annotated[Amount | None, "Version of the GGUF format."] = None
    license: Annotated[HeaderText, "License that the artifact states."] = ""
    chat_format: Annotated[
        HeaderText, "Form of tool calls and thoughts in the chat template, such as hermes-think."
    ] = ""


WeightsFormat = Literal["gguf", "safetensors", "mlx", "ollama"]
"""Form of the weights, by which engines are chosen."""
