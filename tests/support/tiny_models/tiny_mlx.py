"""Tiny folders of weights in Hugging Face layout, which mlx-lm loads and answers from: `tiny_gguf`'s other form.

The weights are built as there, so a prompt is answered with the same known sentence. The tokenizer has one token for
each byte and one for each word of the sentence.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.tiny_models.tiny_gguf import SENTENCE, TEMPLATE, Matrix, chain_weights

_SPECIAL = ("<unk>", "<s>", "</s>", *(f"<|{role}|>" for role in ("system", "user", "assistant", "tool")))
_EOS = 2


def write(
    folder: Path,
    *,
    text: str = SENTENCE,
    loop: bool = False,
    n_embd: int = 64,
    n_layer: int = 2,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 128,
    n_ctx: int = 4096,
    seed: int = 0,
    written_for: str = "mlx",
) -> None:
    """Write a model to `folder` that answers every prompt with `text`; `loop` starts it again instead of ending it.

    `written_for` is the framework in the header of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    vocabulary, chain = _vocabulary(text.split())
    embedding, output = chain_weights(chain, len(vocabulary), n_embd, loop=loop, seed=seed)
    head_size = n_embd // n_head
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": output,
        "model.norm.weight": np.ones(n_embd, np.float32),
    }
    for layer in range(n_layer):
        tensors |= _layer(f"model.layers.{layer}", rng, n_embd, head_size * n_head_kv, n_ff)
    save_file(tensors, folder / "model.safetensors", metadata={"format": written_for})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": n_embd,
        "intermediate_size": n_ff,
        "num_hidden_layers": n_layer,
        "num_attention_heads": n_head,
        "num_key_value_heads": n_head_kv,
        "head_dim": head_size,
        "vocab_size": len(vocabulary),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": n_ctx,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": _EOS,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", _tokenizer(vocabulary))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "model_max_length": n_ctx,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
    )


def write_adapter(folder: Path, *, n_embd: int = 64, n_layer: int = 2, n_head: int = 4, n_head_kv: int = 2) -> None:
    """Write a LoRA adapter in mlx-lm's layout that makes the model of the same sizes answer something else."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, rank = np.random.default_rng(7), 4
    width_kv = n_embd // n_head * n_head_kv
    tensors: dict[str, Matrix] = {}
    for layer in range(n_layer):
        for key, width in (("v_proj", width_kv), ("o_proj", n_embd)):
            name = f"model.layers.{layer}.self_attn.{key}"
            tensors[f"{name}.lora_a"] = rng.standard_normal((n_embd, rank), np.float32)
            tensors[f"{name}.lora_b"] = rng.standard_normal((rank, width), np.float32)
    save_file(tensors, folder / "adapters.safetensors")
    parameters = {"rank": rank, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.v_proj", "self_attn.o_proj"]}
    _write_json(
        folder / "adapter_config.json",
        {"fine_tune_type": "lora", "num_layers": n_layer, "lora_parameters": parameters},
    )


def _layer(name: str, rng: np.random.Generator, n_embd: int, width_kv: int, n_ff: int) -> dict[str, Matrix]:
    shapes = {
        "self_attn.q_proj": (n_embd, n_embd),
        "self_attn.k_proj": (width_kv, n_embd),
        "self_attn.v_proj": (width_kv, n_embd),
        "self_attn.o_proj": (n_embd, n_embd),
        "mlp.gate_proj": (n_ff, n_embd),
        "mlp.up_proj": (n_ff, n_embd),
        "mlp.down_proj": (n_embd, n_ff),
    }
    tensors: dict[str, Matrix] = {
        f"{name}.{norm}.weight": np.ones(n_embd, np.float32) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for part, shape in shapes.items():
        noise: Matrix = rng.standard_normal(shape, np.float32)
        tensors[f"{name}.{part}.weight"] = noise * np.float32(0.02 / np.sqrt(shape[1]))
    return tensors


def _vocabulary(words: list[str]) -> tuple[dict[str, int], list[int]]:
    """Return the ids by token, and the ids of `words` in order."""
    letters = _byte_letters()
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *letters])}
    chain: list[int] = []
    for position, word in enumerate(words):
        token = "".join(letters[byte] for byte in f"{' ' if position else ''}{word}".encode())
        while token in vocabulary:  # each token has one successor, so a repeated word needs another token
            token += "".join(letters[byte] for byte in "\u200b".encode())
        chain.append(vocabulary.setdefault(token, len(vocabulary)))
    return vocabulary, chain


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a ByteLevel vocabulary, as GPT-2's tokenizer defined it.

    A byte that is a visible Latin-1 character is that character; the others follow from U+0100 on, in their order.
    """
    visible = [chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD) for byte in range(256)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if is_visible else chr(next(others)) for byte, is_visible in enumerate(visible)]


def _tokenizer(vocabulary: dict[str, int]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[token], "content": token, **flags} for token in _SPECIAL],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False))
