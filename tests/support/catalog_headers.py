"""Fields of `config.json` of models of the catalog, as public copies of the files have them.

Each entry is the language model's configuration as far as a layout follows from it. The copies: NVIDIA's aiconfigurator
(`model_configs/`: Llama 4, Kimi K2.5, GLM-5), a report on GLM-5.1 with its whole config.json, llmfit 1.1.17 (layers,
heads and sizes of all of them but Llama 4), llama.cpp logs of GGUF files of Qwen3.5 and Qwen3.6 (`qwen35.ssm.*`), and
for Mistral Large 3 vLLM's `transformers_utils/configs/mistral.py`, which loads it as `deepseek_v3`, with the sizes of
DeepSeek V3.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

_LINEAR: Final = {
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
    "head_dim": 256,
    "vocab_size": 248_320,
}
_QWEN35_4B: Final = _LINEAR | {
    "model_type": "qwen3_5",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 32,
}
_QWEN35_9B: Final = _QWEN35_4B | {"hidden_size": 4096, "intermediate_size": 12_288}
_QWEN35_27B: Final = _LINEAR | {
    "model_type": "qwen3_5",
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
}
_QWEN35_35B: Final = _LINEAR | {
    "model_type": "qwen3_5_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
}
_QWEN3_8B: Final = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
_LLAMA_4: Final = {
    "model_type": "llama4_text",
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "vocab_size": 202_048,
}
_DEEPSEEK_V3: Final = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

CONFIGURATIONS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "qwen3-8b": _QWEN3_8B,
        "qwen3-5-4b": _QWEN35_4B,
        "qwen3-5-9b": _QWEN35_9B,
        "qwen3-5-27b": _QWEN35_27B,
        "qwen3-6-27b": _QWEN35_27B,
        "qwen3-5-35b-a3b": _QWEN35_35B,
        "qwen3-6-35b-a3b": _QWEN35_35B,
        "llama-4-scout": _LLAMA_4 | {"num_local_experts": 16},
        "llama-4-maverick": _LLAMA_4 | {"num_local_experts": 128},
        "mistral-large-3": _DEEPSEEK_V3
        | {
            "intermediate_size": 16_384,
            "moe_intermediate_size": 4096,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "vocab_size": 131_072,
        },
        "kimi-k2-5": _DEEPSEEK_V3
        | {
            "model_type": "kimi_k2",
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 64,
            "vocab_size": 163_840,
        },
        "glm-5-1": {
            "model_type": "glm_moe_dsa",
            "head_dim": 64,
            "hidden_size": 6144,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "intermediate_size": 12_288,
            "kv_lora_rank": 512,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_attention_heads": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 78,
            "num_key_value_heads": 64,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "vocab_size": 154_880,
        },
        "qwen2-5-coder-14b": {
            "model_type": "qwen2",
            "hidden_size": 5120,
            "intermediate_size": 13_824,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152_064,
        },
        "qwen3-embedding-0-6b": _QWEN3_8B
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "vocab_size": 151_669,
        },
        "qwen3-vl-8b": _QWEN3_8B | {"model_type": "qwen3_vl_text"},
    }
)
"""By name of the entry."""

UNKNOWN: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "deepseek-v4-flash": {
            "model_type": "deepseek_v4",
            "compress_ratios": [0, 0, 4, 128],
            "head_dim": 512,
            "hidden_size": 4096,
            "intermediate_size": 2048,
            "index_head_dim": 128,
            "moe_intermediate_size": 2048,
            "num_attention_heads": 64,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 43,
            "num_key_value_heads": 1,
            "qk_rope_head_dim": 64,
            "sliding_window": 128,
            "vocab_size": 129_280,
        },
    }
)
"""Models without a formula for their caches."""
