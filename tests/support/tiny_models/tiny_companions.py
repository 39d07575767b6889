"""Companions of `tiny_gguf`'s model: a LoRA adapter and a projector, with generated weights."""

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
