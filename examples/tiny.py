"""Writes a tiny model that llama.cpp loads and answers from, with nothing but the standard library.

`make run` serves it, so that a new user waits for no download. The weights are built, not trained: word i of a sentence
has a random unit embedding e_i, the output row of its successor is 4 * e_i, and attention and feed-forward are zero, so
every prompt starts the sentence and each word calls the next. It is the model that the tests use, without its noise.

    python examples/tiny.py tiny.gguf
"""

import math
import random
import struct
import sys
from array import array
from pathlib import Path
from typing import Final

SENTENCE: Final = (
    "Hello from a tiny model with generated weights. It was written moments ago, knows nothing, but answers."
)
WIDTH: Final = 64
LAYERS: Final = 2
KV_WIDTH: Final = 32
FEED_FORWARD: Final = 128
CONTEXT: Final = 32768
END: Final = 2
TEMPLATE: Final = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] or '') + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
"""Kinds of tokens, as GGUF numbers them."""
_MAGIC: Final = b"GGUF"
_VERSION: Final = 3
_ALIGNMENT: Final = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9

Tensor = tuple[str, tuple[int, ...], "array[float]"]
"""Name, sizes with the fastest first, values."""


def vocabulary() -> tuple[list[tuple[str, int]], list[int]]:
    """Return all tokens with their kinds, and the ids of those that say the sentence."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [(f"<|{role}|>", CONTROL) for role in ("system", "user", "assistant", "tool")]
    words = SENTENCE.split()
    chain = list(range(len(tokens), len(tokens) + len(words)))
    # A token's successor is fixed, so that a word which comes twice would need two tokens: none does.
    tokens += [(word if word == words[0] else "\u2581" + word, NORMAL) for word in words]
    return tokens, chain


def tensors(size: int, chain: list[int]) -> list[Tensor]:
    """Return all weights for a vocabulary of this size."""
    dice = random.Random(0)  # noqa: S311 - weights, no secret
    directions = [_unit(dice) for _ in range(len(chain) + 1)]
    embedding, output = array("f"), array("f", bytes(4 * size * WIDTH))
    for token in range(size):
        if token in chain:
            embedding.extend(directions[token - chain[0] + 1])
        else:  # whatever the prompt ends with, the first word follows
            embedding.extend(0.05 * small + start for small, start in zip(_unit(dice), directions[0], strict=True))
    for position, token in enumerate([*chain, END]):
        output[token * WIDTH : (token + 1) * WIDTH] = array("f", [4.0 * each for each in directions[position]])
    norm = array("f", [1.0] * WIDTH)
    found: list[Tensor] = [("token_embd.weight", (WIDTH, size), embedding)]
    sizes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (WIDTH, KV_WIDTH),
        "attn_v": (WIDTH, KV_WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (WIDTH, FEED_FORWARD),
        "ffn_up": (WIDTH, FEED_FORWARD),
        "ffn_down": (FEED_FORWARD, WIDTH),
    }
    for layer in range(LAYERS):
        found += [(f"blk.{layer}.{name}.weight", (WIDTH,), norm) for name in ("attn_norm", "ffn_norm")]
        found += [
            (f"blk.{layer}.{name}.weight", shape, array("f", bytes(4 * math.prod(shape))))
            for name, shape in sizes.items()
        ]
    return [*found, ("output_norm.weight", (WIDTH,), norm), ("output.weight", (WIDTH, size), output)]


def gguf() -> bytes:
    """Return the file: header, metadata, where each tensor is, and the tensors."""
    tokens, chain = vocabulary()
    metadata = [
        _field("general.architecture", _STRING, _text("llama")),
        _field("general.name", _STRING, _text("tiny")),
        _field("general.license", _STRING, _text("CC0-1.0")),
        _field("general.file_type", _UINT32, struct.pack("<I", 0)),
        *(
            _field(f"llama.{name}", _UINT32, struct.pack("<I", value))
            for name, value in {
                "context_length": CONTEXT,
                "embedding_length": WIDTH,
                "block_count": LAYERS,
                "feed_forward_length": FEED_FORWARD,
                "rope.dimension_count": WIDTH // 4,
                "attention.head_count": 4,
                "attention.head_count_kv": 2,
                "vocab_size": len(tokens),
            }.items()
        ),
        _field("llama.attention.layer_norm_rms_epsilon", _FLOAT32, struct.pack("<f", 1e-5)),
        _field("tokenizer.ggml.model", _STRING, _text("llama")),
        _field("tokenizer.ggml.pre", _STRING, _text("default")),
        _list("tokenizer.ggml.tokens", _STRING, [_text(text) for text, _ in tokens]),
        _list(
            "tokenizer.ggml.scores", _FLOAT32, [struct.pack("<f", -max(0, i - chain[0])) for i in range(len(tokens))]
        ),
        _list("tokenizer.ggml.token_type", _INT32, [struct.pack("<i", kind) for _, kind in tokens]),
        *(
            _field(f"tokenizer.ggml.{name}_token_id", _UINT32, struct.pack("<I", token))
            for name, token in {"bos": 1, "eos": END, "unknown": 0}.items()
        ),
        *(
            _field(f"tokenizer.ggml.{name}", _BOOL, bytes([value]))
            for name, value in {"add_bos_token": True, "add_eos_token": False, "add_space_prefix": False}.items()
        ),
        _field("tokenizer.chat_template", _STRING, _text(TEMPLATE)),
    ]
    weights = tensors(len(tokens), chain)
    header = _MAGIC + struct.pack("<IQQ", _VERSION, len(weights), len(metadata)) + b"".join(metadata)
    data = b""
    for name, shape, values in weights:
        header += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
        data += _padded(values.tobytes())
    return _padded(header) + data


def _unit(dice: random.Random) -> list[float]:
    drawn = [dice.gauss(0, 1) for _ in range(WIDTH)]
    length = math.hypot(*drawn)
    return [each / length for each in drawn]


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _field(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _list(name: str, kind: int, values: list[bytes]) -> bytes:
    return _field(name, _ARRAY, struct.pack("<IQ", kind, len(values)) + b"".join(values))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


if __name__ == "__main__":
    if len(sys.argv) != 2:  # noqa: PLR2004 - the program and its one argument
        sys.exit(f"usage: python {sys.argv[0]} FILE")
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gguf())
