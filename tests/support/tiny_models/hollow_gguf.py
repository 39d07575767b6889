"""Models of several architectures whose weights are holes: as large in memory as real ones, written in milliseconds.

llama.cpp loads them and computes with zeros, so that its memory can be compared with an estimate. The file is sparse
and takes no space on disk; in memory each mapped page of the file counts as any other page.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args

import gguf
import numpy as np

Kind = Literal["llama", "gemma3", "qwen3moe", "mamba2", "lfm2", "deepseek2", "falcon-h1", "gpt-oss"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Tensors = Iterator[tuple[str, tuple[int, ...]]]

_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dimensions of a model; an architecture ignores the dimensions that it does not have."""

    kind: Kind = "llama"
    layers: int = 8
    embedding: int = 512
    heads: int = 8
    heads_kv: int = 2
    head: int = 64
    feed_forward: int = 1536
    vocabulary: int = 32_000
    window: int = 512
    experts: int = 16
    experts_used: int = 2
    state: int = 64
    inner: int = 1024
    latent: int = 256
    tensor_type: Literal["F16", "Q8_0"] = "F16"


def write(path: Path, shape: Shape) -> None:
    """Write a model of `shape`, a sparse file."""
    writer = gguf.GGUFWriter(path, shape.kind)
    _add_facts(writer, shape)
    _add_tokens(writer, shape.vocabulary)
    for name, dimensions in _tensors(shape):
        # Dimensions as in numpy, the innermost last. llama.cpp accepts norms and biases only as f32; vectors are f32.
        small = len(dimensions) == 1 or name.endswith(
            (".ssm_a", ".ssm_d", "conv1d.weight", "conv.weight", "ssm_norm.weight", ".bias")
        )
        kind = gguf.GGMLQuantizationType["F32" if small else shape.tensor_type]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size_bytes = int(np.prod(dimensions)) // block * block_bytes
        writer.tensors[-1][name] = gguf.gguf_writer.TensorInfo(shape=dimensions, dtype=kind, nbytes=size_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    total = path.stat().st_size
    for info in writer.tensors[-1].values():
        total = -(-total // _ALIGNMENT) * _ALIGNMENT + info.nbytes
    with path.open("r+b") as file:
        file.truncate(-(-total // _ALIGNMENT) * _ALIGNMENT)


def _add_tokens(writer: Any, count: int) -> None:
    """Add a tokenizer of byte pairs, as most models have: its merges take as much memory as its tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]
    tokens = ["<|end|>", *map(chr, printable)]
    extra = range(count - len(tokens))
    writer.add_vocab_size(count)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, *(f"word{number}" for number in extra)])
    writer.add_token_types([int(gguf.TokenType.CONTROL), *([int(gguf.TokenType.NORMAL)] * (count - 1))])
    writer.add_token_merges([f"wor{number % 1000} d{number}" for number in extra])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def _add_facts(writer: Any, shape: Shape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(131_072)
    writer.add_embedding_length(shape.embedding)
    writer.add_feed_forward_length(0 if shape.kind == "mamba2" else shape.feed_forward)
    writer.add_head_count(0 if shape.kind == "mamba2" else shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.kind != "mamba2":
        latent = shape.kind == "deepseek2"
        writer.add_head_count_kv(1 if latent else _heads_kv(shape))
        writer.add_key_length(shape.latent + 32 if latent else shape.head)
        writer.add_value_length(shape.latent if latent else shape.head)
        writer.add_rope_dimension_count(32 if latent else shape.head)
    if shape.kind in {"gemma3", "gpt-oss"}:
        writer.add_sliding_window(shape.window)
    if shape.kind in {"qwen3moe", "deepseek2", "gpt-oss"}:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.feed_forward)
    if shape.kind == "deepseek2":
        writer.add_kv_lora_rank(shape.latent)
        writer.add_key_length_mla(shape.head + 32)
        writer.add_value_length_mla(shape.head)
        writer.add_leading_dense_block_count(0)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_weights_norm(True)
        writer.add_q_lora_rank(shape.embedding)
    if shape.kind in {"mamba2", "falcon-h1"}:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(shape.inner)
        writer.add_ssm_state_size(shape.state)
        writer.add_ssm_time_step_rank(shape.inner // 64)
        writer.add_ssm_group_count(1)
    if shape.kind == "lfm2":
        writer.add_shortconv_l_cache(3)


def _heads_kv(shape: Shape) -> int | list[int]:
    """Return the number of KV heads, for lfm2 by layer: one layer of four has attention."""
    if shape.kind != "lfm2":
        return shape.heads_kv
    return [shape.heads_kv if layer % 4 == 2 else 0 for layer in range(shape.layers)]


def _tensors(shape: Shape) -> Tensors:
    yield "token_embd.weight", (shape.vocabulary, shape.embedding)
    yield "token_embd_norm.weight" if shape.kind == "lfm2" else "output_norm.weight", (shape.embedding,)
    if shape.kind != "gemma3":
        yield "output.weight", (shape.vocabulary, shape.embedding)
    for layer in range(shape.layers):
        for name, dimensions in _layer(shape, layer):
            yield f"blk.{layer}.{name}", dimensions


def _layer(shape: Shape, layer: int) -> Tensors:
    yield "attn_norm.weight", (shape.embedding,)
    if shape.kind in {"mamba2", "falcon-h1"}:
        yield from _mixer(shape)
    if shape.kind == "mamba2":
        return
    if shape.kind == "deepseek2":
        yield from _latent_attention(shape)
    elif shape.kind == "lfm2" and layer % 4 != 2:
        yield "shortconv.conv.weight", (shape.embedding, 3)
        yield "shortconv.in_proj.weight", (3 * shape.embedding, shape.embedding)
        yield "shortconv.out_proj.weight", (shape.embedding, shape.embedding)
    else:
        yield from _attention(shape)
    yield from _feed_forward(shape)


def _attention(shape: Shape) -> Tensors:
    embedding, head = shape.embedding, shape.head
    yield "attn_q.weight", (shape.heads * head, embedding)
    yield "attn_k.weight", (shape.heads_kv * head, embedding)
    yield "attn_v.weight", (shape.heads_kv * head, embedding)
    yield "attn_output.weight", (embedding, shape.heads * head)
    if shape.kind in {"gemma3", "qwen3moe", "lfm2"}:
        yield "attn_q_norm.weight", (head,)
        yield "attn_k_norm.weight", (head,)
    if shape.kind == "gemma3":
        yield "post_attention_norm.weight", (embedding,)
        yield "post_ffw_norm.weight", (embedding,)
    if shape.kind == "gpt-oss":
        yield "post_attention_norm.weight", (embedding,)
        yield "attn_sinks.weight", (shape.heads,)
        yield "attn_output.bias", (embedding,)


def _latent_attention(shape: Shape) -> Tensors:
    embedding, latent, heads, head = shape.embedding, shape.latent, shape.heads, shape.head
    yield "attn_q_a.weight", (embedding, embedding)
    yield "attn_q_a_norm.weight", (embedding,)
    yield "attn_q_b.weight", (heads * (head + 32), embedding)
    yield "attn_kv_a_norm.weight", (latent,)
    yield "attn_kv_a_mqa.weight", (latent + 32, embedding)
    yield "attn_k_b.weight", (heads, latent, head)
    yield "attn_v_b.weight", (heads, head, latent)
    yield "attn_output.weight", (embedding, heads * head)


def _mixer(shape: Shape) -> Tensors:
    convolved, steps = shape.inner + 2 * shape.state, shape.inner // 64
    yield "ssm_in.weight", (shape.inner + convolved + steps, shape.embedding)
    yield "ssm_conv1d.weight", (convolved, 4)
    yield "ssm_conv1d.bias", (convolved,)
    yield "ssm_dt.bias", (steps,)
    yield "ssm_a", (steps, 1)
    yield "ssm_d", (steps, 1)
    yield "ssm_norm.weight", (1, shape.inner)
    yield "ssm_out.weight", (shape.embedding, shape.inner)


def _feed_forward(shape: Shape) -> Tensors:
    embedding, inner, experts = shape.embedding, shape.feed_forward, shape.experts
    if shape.kind != "gpt-oss":
        yield "ffn_norm" if shape.kind == "falcon-h1" else "ffn_norm.weight", (embedding,)
    if shape.kind not in {"qwen3moe", "deepseek2", "gpt-oss"}:
        yield "ffn_gate.weight", (inner, embedding)
        yield "ffn_up.weight", (inner, embedding)
        yield "ffn_down.weight", (embedding, inner)
        return
    yield "ffn_gate_inp.weight", (experts, embedding)
    yield "ffn_gate_exps.weight", (experts, inner, embedding)
    yield "ffn_up_exps.weight", (experts, inner, embedding)
    yield "ffn_down_exps.weight", (experts, embedding, inner)
    if shape.kind == "deepseek2":
        yield "ffn_gate_shexp.weight", (inner, embedding)
        yield "ffn_up_shexp.weight", (inner, embedding)
        yield "ffn_down_shexp.weight", (embedding, inner)
    if shape.kind == "gpt-oss":
        yield "ffn_gate_inp.bias", (experts,)
        for name, width in (("gate", inner), ("up", inner), ("down", embedding)):
            yield f"ffn_{name}_exps.bias", (experts, width)
