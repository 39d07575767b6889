"""What each runtime can do, and what a user reads of what it cannot."""

from typing import Any, get_args

import pytest

from crds.serving import TUNING_ARGUMENTS, RuntimeName
from runtimes.registry import RUNTIMES
from runtimes.serving import Wanted, default_runtime, refusal

LLAMA = Wanted("gguf", "metal", in_pods=False)
MLX = Wanted("mlx", "metal", in_pods=False)
ALL: dict[str, Any] = {
    "draft": True,
    "adapter_scales": ("1",),
    "chat_template": True,
}


@pytest.mark.parametrize(
    ("runtime", "wanted"),
    [
        ("llama.cpp", LLAMA._replace(**ALL, projector=True, parallel=4, cache_types=("q8_0", "q4_0"))),
        ("llama.cpp", LLAMA._replace(mode="rerank", extra=("--pooling", "mean"), adapter_scales=("0.5", "2"))),
        ("llama.cpp", Wanted("gguf", "nvidia", in_pods=True)),
        ("mlx-lm", MLX._replace(**ALL)),
        ("mlx-lm", MLX._replace(parallel=4, extra=("--temp", "0.5"))),
        ("mlx-lm", MLX._replace(cache_types=("q8_0", "q8_0"))),
    ],
)
def test_what_a_runtime_can_do_is_not_refused(runtime: str, wanted: Wanted) -> None:
    assert refusal(RUNTIMES[runtime], wanted) is None


@pytest.mark.parametrize(
    ("runtime", "change", "says"),
    [
        ("llama.cpp", {"format": "mlx"}, "cannot serve a folder of MLX weights: set runtime to mlx-lm, or give the Mo"),
        ("mlx-lm", {"format": "gguf"}, "cannot serve a GGUF file: set runtime to llama.cpp, or give the Model a folde"),
        ("mlx-lm", {"in_pods": True, "accelerator": "cpu"}, "does not run in pods, where accelerator cpu is: set hard"),
        ("mlx-lm", {"mode": "embeddings"}, "has no mode embeddings: use chat, or llama.cpp"),
        ("mlx-lm", {"projector": True}, "cannot do projectorModelRef: remove it"),
        ("mlx-lm", {"cache_types": ("f16", "q5_1")}, "has no cacheTypeV q5_1: use f16, q4_0, q8_0"),
        ("mlx-lm", {"cache_types": ("f16", "q8_0")}, "cacheTypeK f16 and cacheTypeV q8_0 differ"),
        ("mlx-lm", {"cache_types": ("q8_0", "q8_0"), "parallel": 2}, "one request at a time: set parallel to 1"),
        ("mlx-lm", {"draft": True, "parallel": 2}, "or remove speculative"),
        ("mlx-lm", {"adapter_scales": ("1", "1")}, "takes one adapter"),
        ("mlx-lm", {"adapter_scales": ("0.5",)}, "with the scale that it was trained with"),
        ("mlx-lm", {"extra": ("-t", "1")}, "does not take -t in extraArgs: it takes --temp --top-p"),
        ("llama.cpp", {"format": "gguf", "extra": ("--max-tokens", "1")}, "does not take --max-tokens in extraArgs"),
    ],
)
def test_what_it_cannot_do_is_told_with_the_way_out(runtime: str, change: dict[str, Any], says: str) -> None:
    told = refusal(RUNTIMES[runtime], MLX._replace(**change))
    assert told is not None
    assert says in told


def test_every_runtime_that_a_service_may_name_is_there_with_what_the_user_may_set() -> None:
    assert RUNTIMES.keys() == TUNING_ARGUMENTS.keys() == set(get_args(RuntimeName))


def test_each_format_has_a_runtime_that_serves_it() -> None:
    for artifact_format in ("gguf", "mlx"):
        assert artifact_format in RUNTIMES[default_runtime(artifact_format)].formats
