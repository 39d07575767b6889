"""Tiny llama-architecture GGUF files with generated weights, which llama.cpp loads and answers from.

Tests and the demo need a model that no download brings and whose answer is known. Every prompt is answered with one
sentence, because the weights are built so: word i of the sentence has a random unit embedding e_i, the output row of
its successor is 4 * e_i, and attention and feed-forward are small noise, so the residual stream stays near e_i and the
successor wins. Every other token points at the first word, so any prompt starts the sentence. One token of prompt per
byte. 64 wide and 2 layers make 0.5 MB; the dimensions scale it to a model that really uses memory.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

FileType = Literal["f32", "f16", "q8_0"]
Matrix = NDArray[np.float32]

SENTENCE = "Hello from a tiny model with generated weights. It was written moments ago, knows nothing, but answers."

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] or '') + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_EOS = 2
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


@dataclasses.dataclass
class _Vocabulary:
    tokens: list[bytes] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)
    types: list[int] = dataclasses.field(default_factory=list)

    def add(self, text: str, kind: int, score: float = 0.0) -> int:
        self.tokens.append(text.encode())
        self.scores.append(score)
        self.types.append(int(kind))
        return len(self.tokens) - 1


def vocabulary_of(words: list[str]) -> tuple[_Vocabulary, list[int]]:
    """Return the vocabulary and the token ids that say `words` in order."""
    kinds = gguf.TokenType
    vocabulary = _Vocabulary()
    vocabulary.add("<unk>", kinds.UNKNOWN)
    vocabulary.add("<s>", kinds.CONTROL)
    vocabulary.add("</s>", kinds.CONTROL)
    for byte in range(256):
        vocabulary.add(f"<0x{byte:02X}>", kinds.BYTE)
    for role in ("system", "user", "assistant", "tool"):
        vocabulary.add(f"<|{role}|>", kinds.CONTROL)
    chain: list[int] = []
    seen: dict[str, int] = {}
    for position, word in enumerate(words):
        text = word if position == 0 else "\u2581" + word
        # A token's successor is fixed, so a repeated word needs a token of its own: zero-width spaces tell them apart.
        repeats = seen.get(text, 0)
        seen[text] = repeats + 1
        chain.append(vocabulary.add(text + "\u200b" * repeats, kinds.NORMAL, -float(position)))
    return vocabulary, chain


def chain_weights(
    rng: np.random.Generator, chain: list[int], vocabulary_size: int, width: int, *, loop: bool
) -> tuple[Matrix, Matrix]:
    """Return token embedding and output matrix that make each word of the chain call the next."""

    def unit(rows: int) -> Matrix:
        drawn = rng.standard_normal((rows, width), np.float32)
        drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
        return drawn

    directions = unit(len(chain) + 1)  # 0 is "start", i + 1 belongs to chain[i]
    embedding: Matrix = (unit(vocabulary_size) * 0.05 + directions[0]).astype(np.float32)
    output: Matrix = np.zeros((vocabulary_size, width), np.float32)
    output[chain[0]] += 4.0 * directions[0]
    after_last = chain[0] if loop else _EOS
    for position, token in enumerate(chain):
        embedding[token] = directions[position + 1]
        output[[*chain[1:], after_last][position]] += 4.0 * directions[position + 1]
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
    seed: int = 0,
) -> None:
    """Write a model to `path` that answers every prompt with `text` (default SENTENCE).

    `loop` starts the sentence again instead of ending it, so a request runs to its max_tokens: for streams, drains and
    cancels. `n_head_kv` may be a list with one entry per layer. `pooling` makes it one for embeddings. The same
    arguments write the same bytes.
    """
    rng = np.random.default_rng(seed)
    vocabulary, chain = vocabulary_of((text or SENTENCE).split())
    embedding, output = chain_weights(rng, chain, len(vocabulary.tokens), n_embd, loop=loop)
    head_size = n_embd // n_head
    heads_kv = [n_head_kv] * n_layer if isinstance(n_head_kv, int) else n_head_kv

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_description("generated weights, for tests only")
    writer.add_license("CC0-1.0")
    writer.add_block_count(n_layer)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_rope_dimension_count(head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(int(_FILE_TYPES[ftype]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    _add_tokenizer(writer, vocabulary)

    _add_tensor(writer, "token_embd.weight", embedding, ftype)
    for layer, heads in enumerate(heads_kv):
        _add_layer(writer, layer, rng, ftype, {"embd": n_embd, "kv": head_size * heads, "ff": n_ff})
    _add_tensor(writer, "output_norm.weight", np.ones(n_embd, np.float32), "f32")
    _add_tensor(writer, "output.weight", output, ftype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_layer(writer: Any, layer: int, rng: np.random.Generator, ftype: FileType, sizes: dict[str, int]) -> None:
    embd, kv, ff = sizes["embd"], sizes["kv"], sizes["ff"]
    matrices = {
        "attn_q": (embd, embd),
        "attn_k": (kv, embd),
        "attn_v": (kv, embd),
        "attn_output": (embd, embd),
        "ffn_gate": (ff, embd),
        "ffn_up": (ff, embd),
        "ffn_down": (embd, ff),
    }
    for norm in ("attn_norm", "ffn_norm"):
        _add_tensor(writer, f"blk.{layer}.{norm}.weight", np.ones(embd, np.float32), "f32")
    for name, shape in matrices.items():
        noise: Matrix = rng.standard_normal(shape, np.float32)
        noise *= np.float32(0.02 / np.sqrt(shape[1]))
        _add_tensor(writer, f"blk.{layer}.{name}.weight", noise, ftype)


def _add_tokenizer(writer: Any, vocabulary: _Vocabulary) -> None:
    writer.add_vocab_size(len(vocabulary.tokens))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(_EOS)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)


def _add_tensor(writer: Any, name: str, values: Matrix, ftype: FileType) -> None:
    if ftype == "f32":
        writer.add_tensor(name, values)
    elif ftype == "f16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def main() -> None:
    """Write a model from the command line: `python -m tests.tiny_gguf tiny.gguf --loop`."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiny_gguf", description=main.__doc__)
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
