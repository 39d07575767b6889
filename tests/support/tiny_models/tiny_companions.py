"""Companions of `tiny_gguf`'s model: a LoRA adapter, and projectors that see or hear, with generated weights."""

import struct
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from examples.tiny import build_vocabulary
from tests.support.tiny_models.tiny_gguf import Matrix, chain_weights


def write_adapter(path: Path, *, first: int, n_embd: int = 64) -> None:
    """Write a LoRA adapter with which the model's answer begins with word number `first` of its sentence.

    At scale 1 it outweighs the model's own first word twice; at less than a half it does not.
    """
    tokens, chain = build_vocabulary()
    _, output = chain_weights(chain, len(tokens), n_embd, loop=False)
    # Before the first word, the state of the model points along the row of that word in the output matrix.
    down: Matrix = output[chain[0]][None, :] / np.float32(4)
    up: Matrix = np.zeros((len(tokens), 1), np.float32)
    up[chain[first]] = 8.0
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    writer.add_tensor("output.weight.lora_a", down)
    writer.add_tensor("output.weight.lora_b", up)
    _finish(writer)


def write_attention_adapter(path: Path, *, first: int, n_embd: int = 64) -> None:
    """Write a LoRA adapter with which the answer repeats word number `first`, because of what the prompt's cells hold.

    Cells that were computed without it, or with another one, do not make it say that word.
    """
    tokens, chain = build_vocabulary()
    _, output = chain_weights(chain, len(tokens), n_embd, loop=False)
    # All tokens of a prompt point along the row of the first word; the attention turns that to the row of another one.
    start, turned = (output[chain[word]] / np.float32(4) for word in (0, first))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    writer.add_tensor("blk.0.attn_v.weight.lora_a", start[None, :])
    writer.add_tensor("blk.0.attn_v.weight.lora_b", np.ones((n_embd // 2, 1), np.float32))
    writer.add_tensor("blk.0.attn_output.weight.lora_a", np.full((1, n_embd), 1 / n_embd, np.float32))
    writer.add_tensor("blk.0.attn_output.weight.lora_b", turned[:, None] / np.float32(2))
    _finish(writer)


def write_projector(path: Path, *, n_embd: int = 64, width: int = 32, image_size: int = 28) -> None:
    """Write a CLIP projector that converts an image of `image_size` pixels into 4 tokens of the model."""
    patch, n_ff, n_layer = 14, 64, 2
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_file_type(int(gguf.LlamaFileType.ALL_F32))
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    for key, number in (
        ("image_size", image_size),
        ("patch_size", patch),
        ("embedding_length", width),
        ("feed_forward_length", n_ff),
        ("projection_dim", n_embd),
        ("block_count", n_layer),
        ("attention.head_count", 2),
    ):
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape, np.float32) * np.float32(0.02)))

    add("v.patch_embd.weight", width, 3, patch, patch)
    add("v.class_embd", width)
    add("v.position_embd.weight", (image_size // patch) ** 2 + 1, width)
    norms = ["v.pre_ln", *(f"v.blk.{layer}.ln{number}" for layer in range(n_layer) for number in (1, 2))]
    for name in norms:
        add(f"{name}.weight", width)
        add(f"{name}.bias", width)
    matrices = {"mm.0": (n_embd, width), "mm.2": (n_embd, n_embd)}
    for layer in range(n_layer):
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            matrices[f"v.blk.{layer}.{part}"] = (width, width)
        matrices |= {f"v.blk.{layer}.ffn_up": (n_ff, width), f"v.blk.{layer}.ffn_down": (width, n_ff)}
    for name, shape in matrices.items():
        add(f"{name}.weight", *shape)
        add(f"{name}.bias", shape[0])
    _finish(writer)


def write_hearing_projector(path: Path, *, n_embd: int = 64, width: int = 32) -> None:
    """Write a projector that converts each 30 s of sound into 75 tokens of the model."""
    n_ff, n_layer, mel_bins, stack = 64, 1, 80, 20
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_file_type(int(gguf.LlamaFileType.ALL_F32))
    writer.add_bool("clip.has_audio_encoder", True)
    writer.add_string("clip.projector_type", "ultravox")
    writer.add_bool("clip.use_gelu", True)
    for key, number in (
        ("embedding_length", width),
        ("feed_forward_length", n_ff),
        ("projection_dim", n_embd),
        ("block_count", n_layer),
        ("attention.head_count", 2),
        ("num_mel_bins", mel_bins),
        ("projector.stack_factor", stack),
    ):
        writer.add_uint32(f"clip.audio.{key}", number)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)

    shapes: dict[str, tuple[int, ...]] = {
        "a.conv1d.1.weight": (width, mel_bins, 3),
        "a.conv1d.1.bias": (width, 1),
        "a.conv1d.2.weight": (width, width, 3),
        "a.conv1d.2.bias": (width, 1),
        "a.position_embd.weight": (1500, width),
        "a.post_ln.weight": (width,),
        "a.post_ln.bias": (width,),
        "mm.a.mlp.1.weight": (2 * n_embd, width * stack),
        "mm.a.mlp.2.weight": (n_embd, n_embd),
        "mm.a.norm_pre.weight": (width * stack,),
        "mm.a.norm_mid.weight": (n_embd,),
    }
    for layer in range(n_layer):
        block = f"a.blk.{layer}"
        matrices = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (width, width))
        for name, shape in (matrices | {"ffn_up": (n_ff, width), "ffn_down": (width, n_ff)}).items():
            shapes[f"{block}.{name}.weight"] = shape
            if name != "attn_k":  # of an encoder as Whisper's, keys have no bias
                shapes[f"{block}.{name}.bias"] = shape[:1]
        for part in ("ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias"):
            shapes[f"{block}.{part}"] = (width,)
    for name, whole_shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(whole_shape, np.float32) * np.float32(0.02))
    _finish(writer)


def wav(seconds: int = 1) -> bytes:
    """Return a tone as a WAV file."""
    tone = (np.sin(np.arange(16_000 * seconds) / 10) * 9000).astype("<i2").tobytes()
    sound = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 16_000, 32_000, 2, 16)
    data = struct.pack("<4sI", b"data", len(tone)) + tone
    return struct.pack("<4sI4s", b"RIFF", 4 + len(sound) + len(data), b"WAVE") + sound + data


def png(size: int = 28) -> bytes:
    """Return a grey square as a PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\x80" * 3 * size) * size)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
