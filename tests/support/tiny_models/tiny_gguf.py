"""Tiny llama-architecture GGUF files with generated weights, which llama.cpp loads and answers from.

Tests and the demo need a model with a known answer and without a download. `examples/tiny.py` has the model and writes
the file; this module adds any size and type, a little noise in attention and feed-forward instead of zeros, and the
variations that tests need. That program must not use numpy, which this module needs for noise and quantization. The
residual stream stays near a word's embedding, so the successor wins. A width of 64 and 2 layers make 0.5 MB; larger
dimensions make a model that really uses memory.
"""

import argparse
import functools
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from examples.tiny import (
    SENTENCE,
    TEMPLATE,
    Dimensions,
    EncodedTensor,
    build_chain,
    build_vocabulary,
    describe,
    encode_gguf,
    list_layer_matrices,
    list_norms,
)

__all__ = ["SENTENCE", "TEMPLATE", "Matrix", "chain_weights", "write"]

FileType = Literal["f32", "f16", "q8_0"]
Matrix = NDArray[np.float32]

_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


def chain_weights(
    chain: list[int], vocabulary_size: int, width: int, *, loop: bool, seed: int = 0
) -> tuple[Matrix, Matrix]:
    """Return token embedding and output matrix with which each word of the chain is followed by the next."""
    return _draw_chain_weights(tuple(chain), vocabulary_size, width, loop, seed)


@functools.lru_cache(maxsize=8)
def _draw_chain_weights(
    chain: tuple[int, ...], vocabulary_size: int, width: int, loop: bool, seed: int
) -> tuple[Matrix, Matrix]:
    embedding, output = (
        np.frombuffer(bytes(values), np.float32).reshape(vocabulary_size, width)  # read-only, for others have it, too
        for values in build_chain(vocabulary_size, chain, width, loop=loop, seed=seed)
    )
    return embedding, output


def write(
    path: Path,
    *,
    text: str | None = None,
    loop: bool = False,
    n_embd: int = 64,
    n_layer: int = 2,
    n_head: int = 4,
    n_head_kv: int | list[int] = 2,
    n_ff: int = 128,
    n_ctx: int = 4096,
    ftype: FileType = "f32",
    name: str = "tiny-llama",
    pooling: gguf.PoolingType | None = None,
    template: str | None = None,
    scores: bool = False,
    seed: int = 0,
) -> None:
    """Write a model to `path` that answers every prompt with `text` (default SENTENCE).

    `loop` starts the sentence again instead of ending it, so a request runs to its max_tokens: for streams, drains and
    cancels. `n_head_kv` may be a list with one entry per layer. `pooling` makes a model for embeddings, `scores`
    one for reranking, and `template` is its chat template. The same arguments write the same bytes.
    """
    dimensions = Dimensions(n_embd, n_layer, n_head, n_head_kv, n_ff, n_ctx)
    tokens, chain = build_vocabulary(text or SENTENCE)
    embedding, output = chain_weights(chain, len(tokens), n_embd, loop=loop, seed=seed)
    metadata = describe(tokens, dimensions, name) | {
        "general.description": "generated weights, for tests only",
        "general.file_type": int(_FILE_TYPES[ftype]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    if pooling is not None:
        metadata["llama.pooling_type"] = int(pooling)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    rng = np.random.default_rng(seed)
    tensors = [_encode("token_embd.weight", embedding, ftype)]
    for matrix, (columns, rows) in list_layer_matrices(dimensions):
        noise: Matrix = rng.standard_normal((rows, columns), np.float32)
        noise *= np.float32(0.02 / np.sqrt(columns))
        tensors.append(_encode(matrix, noise, ftype))
    tensors += [*list_norms(dimensions), _encode("output.weight", output, ftype)]
    if scores:
        # llama.cpp takes such a head of some architectures only.
        metadata = {
            key.replace("llama.", "qwen3.", 1): "qwen3" if key == "general.architecture" else value
            for key, value in metadata.items()
        }
        ones: Matrix = np.ones((1, n_embd // n_head), np.float32)
        tensors += [
            EncodedTensor(f"blk.{layer}.attn_{part}_norm.weight", (n_embd // n_head,), ones.tobytes())
            for layer in range(n_layer)
            for part in ("q", "k")
        ]
        tensors.append(_encode("cls.output.weight", rng.standard_normal((1, n_embd), np.float32), "f32"))
    path.write_bytes(encode_gguf(metadata, tensors))


def _encode(name: str, values: Matrix, ftype: FileType) -> EncodedTensor:
    kind = gguf.GGMLQuantizationType[ftype.upper()]
    data = gguf.quants.quantize(values, kind).tobytes()
    return EncodedTensor(name, values.shape[::-1], data, int(kind))


def main() -> None:
    """Write a model from the command line: `python -m tests.support.tiny_models.tiny_gguf tiny.gguf --loop`."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.tiny_models.tiny_gguf", description=main.__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--text", help="the sentence to answer with")
    parser.add_argument("--loop", action="store_true", help="never end the sentence")
    parser.add_argument("--n-embd", type=int, default=64)
    parser.add_argument("--n-layer", type=int, default=2)
    parser.add_argument("--n-ff", type=int, default=128)
    parser.add_argument("--ftype", choices=list(_FILE_TYPES), default="f32")
    options = vars(parser.parse_args())
    path: Path = options["path"]
    write(**options)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
