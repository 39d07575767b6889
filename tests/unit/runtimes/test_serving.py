"""The demands that each runtime supports, and the messages for the others."""

from typing import Any

import pytest

from crds.serving import ServingOptions
from crds.weights_header import GGUF
from runtimes.registry import RUNTIMES
from runtimes.runtime import RuntimeDemand
from runtimes.runtime_choice import refuse_demand

LLAMA = RuntimeDemand("gguf", "metal", in_pods=False)
MLX = RuntimeDemand("mlx", "metal", in_pods=False)
ALL: dict[str, Any] = {"draft": True, "adapter_scales": ("1",), "chat_template": "{{ messages }}"}


def changed(demand: RuntimeDemand, **changes: Any) -> RuntimeDemand:
    """Return the demand with other options, companions or weights, by name."""
    options = {name: changes.pop(name) for name in ServingOptions.__struct_fields__ if name in changes}
    return demand._replace(options=ServingOptions(**options), **changes)


@pytest.mark.parametrize(
    ("runtime", "demand"),
    [
        ("llama.cpp", changed(LLAMA, **ALL, projector=True, parallel=4, cache_type_k="q8_0", cache_type_v="q4_0")),
        ("llama.cpp", changed(LLAMA, mode="rerank", extra_args=["--pooling", "rank"], adapter_scales=("0.5", "2"))),
        ("llama.cpp", RuntimeDemand("gguf", "nvidia", in_pods=True)),
        ("mlx-lm", changed(MLX, **ALL)),
        ("mlx-lm", changed(MLX, parallel=4, extra_args=["--temp", "0.5"])),
        ("mlx-lm", changed(MLX, cache_type_k="q8_0", cache_type_v="q8_0")),
    ],
)
def test_supported_demand_is_not_refused(runtime: str, demand: RuntimeDemand) -> None:
    assert refuse_demand(RUNTIMES[runtime], demand) is None


CHAT = GGUF(architecture="llama", modes=["chat"], key_head_size=16, value_head_size=16)
EMBEDDER = GGUF(architecture="bert", modes=["embeddings"])
RANKER = GGUF(architecture="qwen3", modes=["chat", "rerank"])
CLASS = GGUF(architecture="qwen3", modes=["chat", "embeddings"], key_head_size=80, value_head_size=80)


@pytest.mark.parametrize(
    ("runtime", "change"),
    [
        ("llama.cpp", {"header": RANKER, "mode": "rerank"}),
        ("llama.cpp", {"header": EMBEDDER, "mode": "embeddings"}),
        ("llama.cpp", {"header": CHAT, "mode": "embeddings", "extra_args": ["--pooling", "mean"]}),
        ("llama.cpp", {"mode": "rerank"}),
        ("llama.cpp", {"header": CHAT, "cache_type_k": "bf16", "cache_type_v": "f32"}),
        ("llama.cpp", {"header": CHAT, "cache_type_k": "q8_0", "extra_args": ["-fa", "off"]}),
        ("llama.cpp", {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}),
        ("llama.cpp", {"header": CHAT, "adapter_scales": ("1",), "companion_headers": [("adapter", CHAT)]}),
        ("mlx-lm", {"format": "mlx", "header": CLASS}),
        (
            "vllm",
            {"format": "safetensors", "accelerator": "nvidia", "in_pods": True, "header": CLASS, "mode": "embeddings"},
        ),
    ],
)
def test_header_that_fits_or_is_not_known_is_not_refused(runtime: str, change: dict[str, Any]) -> None:
    assert refuse_demand(RUNTIMES[runtime], changed(LLAMA, **change)) is None


@pytest.mark.parametrize(
    ("runtime", "change", "says"),
    [
        ("llama.cpp", {"header": CHAT, "mode": "rerank"}, "no head that scores (such as the tensors cls.weight"),
        ("llama.cpp", {"header": CHAT, "mode": "embeddings"}, "set extraArgs to [--pooling, mean]"),
        (
            "llama.cpp",
            {"header": CHAT, "mode": "embeddings", "extra_args": ["--pooling", "none"]},
            "set extraArgs to [--pooling, mean]",
        ),
        ("llama.cpp", {"header": EMBEDDER}, "generates no text: set mode to embeddings, or name a Model for chat"),
        (
            "llama.cpp",
            {"header": RANKER, "mode": "rerank", "extra_args": ["--pooling", "mean"]},
            "turns mode rerank off",
        ),
        ("llama.cpp", {"header": CHAT, "cache_type_k": "q8_0"}, "cacheTypeK q8_0 keeps blocks of 32 elements"),
        ("llama.cpp", {"header": CHAT, "cache_type_v": "q4_0"}, "with 16 elements: set cacheTypeV to f16"),
        ("llama.cpp", {"cache_type_v": "q4_0", "extra_args": ["-fa", "off"]}, "cacheTypeV q4_0 needs flash attention"),
        (
            "llama.cpp",
            {"cache_type_k": "q8_0", "draft": True, "companion_headers": [("draft", CHAT)]},
            "do not divide the heads of the draft",
        ),
        (
            "llama.cpp",
            {"header": CHAT, "adapter_scales": ("1",), "companion_headers": [("adapter", RANKER)]},
            "adapters has an adapter for architecture qwen3, and the model is of architecture llama",
        ),
        ("llama.cpp", {"header": GGUF(architecture="clip")}, "are a projector, not a model: name them in projectorMod"),
        (
            "llama.cpp",
            {"projector": True, "companion_headers": [("projector", CHAT)]},
            "projectorModelRef names a model of architecture llama, not a projector",
        ),
        (
            "llama.cpp",
            {"draft": True, "companion_headers": [("draft", GGUF(architecture="clip"))]},
            "draftModelRef names a projector",
        ),
        (
            "mlx-lm",
            {"format": "mlx", "header": CLASS, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
            "keeps blocks of 64 elements, which do not divide the heads of the model with 80 elements",
        ),
        ("mlx-lm", {"format": "mlx", "header": EMBEDDER}, "generates no text: name a Model for chat"),
        (
            "vllm",
            {"format": "safetensors", "accelerator": "nvidia", "in_pods": True, "header": CLASS, "mode": "rerank"},
            "would answer numbers without meaning",
        ),
    ],
)
def test_header_that_rules_a_demand_out_is_refused_with_the_way_out(
    runtime: str, change: dict[str, Any], says: str
) -> None:
    refused = refuse_demand(RUNTIMES[runtime], changed(LLAMA, **change))
    assert refused is not None
    assert says in refused


@pytest.mark.parametrize(
    ("runtime", "change", "says"),
    [
        ("llama.cpp", {"format": "mlx"}, "cannot serve a folder of MLX weights: set runtime to mlx-lm, or give the Mo"),
        ("mlx-lm", {"format": "gguf"}, "cannot serve a GGUF file: set runtime to llama.cpp, or give the Model a folde"),
        ("mlx-lm", {"in_pods": True, "accelerator": "cpu"}, "does not run in pods, where accelerator cpu is: set hard"),
        ("mlx-lm", {"mode": "embeddings"}, "has no mode embeddings: use chat, or llama.cpp"),
        ("mlx-lm", {"parallel": 65}, "at most 64 requests at once, each with a whole context: lower parallel of 65"),
        ("mlx-lm", {"projector": True}, "cannot do projectorModelRef: remove it"),
        ("mlx-lm", {"cache_type_v": "q5_1"}, "has no cacheTypeV q5_1: use f16, q4_0, q8_0"),
        ("mlx-lm", {"cache_type_v": "q8_0"}, "cacheTypeK f16 and cacheTypeV q8_0 differ"),
        (
            "mlx-lm",
            {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "parallel": 2},
            "one request at a time: set parallel to 1",
        ),
        ("mlx-lm", {"draft": True, "parallel": 2}, "or remove speculative"),
        ("mlx-lm", {"adapter_scales": ("1", "1")}, "takes one adapter"),
        ("mlx-lm", {"adapter_scales": ("0.5",)}, "with the scale that it was trained with"),
        (
            "mlx-lm",
            {"adapter_scales": ("1",), "adapters_on_request": True},
            "applies its adapters to each request: remo",
        ),
        (
            "llama-cpp-python",
            {"format": "gguf", "adapter_scales": ("1",), "adapters_on_request": True},
            "remove onRequest of adapters, or serve a GGUF file with llama.cpp",
        ),
        (
            "llama.cpp",
            {"format": "gguf", "mode": "embeddings", "adapters_on_request": True},
            "in mode embeddings requests choose no adapters: remove onRequest",
        ),
        (
            "llama.cpp",
            {"format": "gguf", "prompt_cache": "1Gi", "adapters_on_request": True},
            "promptCache cannot tell apart conversations with different adapters: remove it, or onRequest",
        ),
        ("mlx-lm", {"extra_args": ["-t", "1"]}, "does not take -t in extraArgs: it takes --temp --top-p"),
        (
            "llama.cpp",
            {"format": "gguf", "extra_args": ["--max-tokens", "1"]},
            "does not take --max-tokens in extraArgs",
        ),
    ],
)
def test_unsupported_demand_is_refused_with_the_way_out(runtime: str, change: dict[str, Any], says: str) -> None:
    told = refuse_demand(RUNTIMES[runtime], changed(MLX, **change))
    assert told is not None
    assert says in told
