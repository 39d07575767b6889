"""Write a tiny model that llama.cpp loads and answers from, with the standard library only.

`make run` serves it, so that a new user waits for no download, and the tests build their models from the same parts
(`tests/support/tiny_models/tiny_gguf.py`). The weights are built, not trained: word i of a sentence has a random unit
embedding e_i, the output row of its successor is 4 * e_i, and attention and feed-forward are zero. So every prompt
starts the sentence and each word predicts the next. A prompt has one token for each byte.

    python examples/tiny.py tiny.gguf
"""

import math
import random
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

SENTENCE: Final = (
    "Hello from a tiny model with generated weights. It was written moments ago, knows nothing, but answers."
)
TEMPLATE: Final = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] or '') + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
END: Final = 2
"""Id of the token that ends an answer."""
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
"""Kinds of tokens, as GGUF numbers them."""
F32: Final = 0
"""Type of a tensor, as GGUF numbers it."""
_MAGIC: Final = b"GGUF"
_VERSION: Final = 3
_ALIGNMENT: Final = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9

Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]


class Token(NamedTuple):
    """A token of the vocabulary."""

    text: str
    kind: int
    score: float = 0.0


class Dimensions(NamedTuple):
    """Dimensions of a model."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    heads_kv: int | Sequence[int] = 2
    """Heads of keys and values, or those of each layer."""
    feed_forward: int = 128
    context: int = 32768

    def heads_kv_of_layers(self) -> list[int]:
        """Return the heads of keys and values of each layer."""
        return [self.heads_kv] * self.layers if isinstance(self.heads_kv, int) else list(self.heads_kv)


class EncodedTensor(NamedTuple):
    """A tensor as it is in the file."""

    name: str
    shape: tuple[int, ...]
    """Sizes, the fastest-varying dimension first."""
    data: bytes
    kind: int = F32


def build_vocabulary(text: str = SENTENCE) -> tuple[list[Token], list[int]]:
    """Return all tokens, and the ids of those for the words of `text`, in order."""
    tokens = [Token("<unk>", UNKNOWN), Token("<s>", CONTROL), Token("</s>", CONTROL)]
    tokens += [Token(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [Token(f"<|{role}|>", CONTROL) for role in ("system", "user", "assistant", "tool")]
    first, seen = len(tokens), dict[str, int]()
    for position, word in enumerate(text.split()):
        piece = word if position == 0 else "\u2581" + word
        # A token's successor is fixed, so a repeated word needs a token of its own: zero-width spaces distinguish them.
        repeats = seen.get(piece, 0)
        seen[piece] = repeats + 1
        tokens.append(Token(piece + "\u200b" * repeats, NORMAL, -float(position)))
    return tokens, list(range(first, len(tokens)))


def build_chain(
    size: int, chain: Sequence[int], width: int, *, loop: bool = False, seed: int = 0
) -> tuple["array[float]", "array[float]"]:
    """Return token embedding and output matrix, a row for each token: each word of the chain predicts the next.

    With `loop`, the last word predicts the first instead of the end.
    """
    dice = random.Random(seed)  # noqa: S311 - weights, no secret
    directions = [_draw_unit(dice, width) for _ in range(len(chain) + 1)]
    position_of = {token: position for position, token in enumerate(chain)}
    embedding, output = array("f"), array("f", bytes(4 * size * width))
    for token in range(size):
        if token in position_of:
            embedding.extend(directions[position_of[token] + 1])
        else:  # the first word follows any token with which a prompt may end
            noise = _draw_unit(dice, width)
            embedding.extend(0.05 * small + start for small, start in zip(noise, directions[0], strict=True))
    for token, direction in zip([*chain, chain[0] if loop else END], directions, strict=True):
        for column, component in enumerate(direction):
            output[token * width + column] += 4.0 * component
    return embedding, output


def list_layer_matrices(dimensions: Dimensions) -> list[tuple[str, tuple[int, int]]]:
    """Return name and shape of the matrices of all layers, which may all be zeros."""
    width, head = dimensions.width, dimensions.width // dimensions.heads
    matrices = []
    for layer, heads_kv in enumerate(dimensions.heads_kv_of_layers()):
        shapes = {
            "attn_q": (width, width),
            "attn_k": (width, heads_kv * head),
            "attn_v": (width, heads_kv * head),
            "attn_output": (width, width),
            "ffn_gate": (width, dimensions.feed_forward),
            "ffn_up": (width, dimensions.feed_forward),
            "ffn_down": (dimensions.feed_forward, width),
        }
        matrices += [(f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items()]
    return matrices


def list_norms(dimensions: Dimensions) -> list[EncodedTensor]:
    """Return the norms of all layers and of the output, which are 1."""
    names = [f"blk.{layer}.{name}" for layer in range(dimensions.layers) for name in ("attn_norm", "ffn_norm")]
    ones = array("f", [1.0] * dimensions.width).tobytes()
    return [EncodedTensor(f"{name}.weight", (dimensions.width,), ones) for name in (*names, "output_norm")]


def describe(tokens: Sequence[Token], dimensions: Dimensions, name: str) -> dict[str, Value]:
    """Return the metadata of a model with these tokens and dimensions."""
    heads_kv = dimensions.heads_kv
    return {
        "general.architecture": "llama",
        "general.name": name,
        "general.license": "CC0-1.0",
        "general.file_type": 0,
        "llama.context_length": dimensions.context,
        "llama.embedding_length": dimensions.width,
        "llama.block_count": dimensions.layers,
        "llama.feed_forward_length": dimensions.feed_forward,
        "llama.rope.dimension_count": dimensions.width // dimensions.heads,
        "llama.attention.head_count": dimensions.heads,
        "llama.attention.head_count_kv": heads_kv if isinstance(heads_kv, int) else list(heads_kv),
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token.text for token in tokens],
        "tokenizer.ggml.scores": [token.score for token in tokens],
        "tokenizer.ggml.token_type": [token.kind for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def encode_gguf(metadata: Mapping[str, Value], tensors: Sequence[EncodedTensor]) -> bytes:
    """Return the file: header, metadata, the position of each tensor, and the tensors."""
    header = _MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))
    for name, value in metadata.items():
        kind, encoded = _encode_value(value)
        header += _encode_text(name) + struct.pack("<I", kind) + encoded
    data = bytearray()
    for name, shape, values, kind in tensors:
        header += _encode_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += _pad(values)
    return _pad(header) + bytes(data)


def build_model() -> bytes:
    """Return the file of the tiny model."""
    dimensions = Dimensions()
    tokens, chain = build_vocabulary()
    embedding, output = build_chain(len(tokens), chain, dimensions.width)
    shape = (dimensions.width, len(tokens))
    tensors = [
        EncodedTensor("token_embd.weight", shape, embedding.tobytes()),
        *(EncodedTensor(name, sizes, bytes(4 * math.prod(sizes))) for name, sizes in list_layer_matrices(dimensions)),
        *list_norms(dimensions),
        EncodedTensor("output.weight", shape, output.tobytes()),
    ]
    return encode_gguf(describe(tokens, dimensions, "tiny"), tensors)


def _draw_unit(dice: random.Random, width: int) -> list[float]:
    drawn = [dice.gauss(0, 1) for _ in range(width)]
    length = math.hypot(*drawn)
    return [component / length for component in drawn]


def _encode_value(value: Value) -> tuple[int, bytes]:
    """Return the GGUF type of a value and its bytes; integers are signed in an array and unsigned elsewhere."""
    if isinstance(value, str):
        return _STRING, _encode_text(value)
    if isinstance(value, bool):
        return _BOOL, bytes([value])
    if isinstance(value, int):
        return _UINT32, struct.pack("<I", value)
    if isinstance(value, float):
        return _FLOAT32, struct.pack("<f", value)
    kind = _INT32
    encoded = [struct.pack("<i", entry) if isinstance(entry, int) else _encode_value(entry)[1] for entry in value]
    if not isinstance(value[0], int):
        kind = _encode_value(value[0])[0]
    return _ARRAY, struct.pack("<IQ", kind, len(encoded)) + b"".join(encoded)


def _encode_text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


if __name__ == "__main__":
    if len(sys.argv) != 2:  # noqa: PLR2004 - the program and its one argument
        sys.exit(f"usage: python {sys.argv[0]} FILE")
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(build_model())
