"""The caches of each architecture are those of llama.cpp; `tests/hosts` compares the sum with a running engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from artifacts.formats.gguf import GGUFHeader, Value, parse
from artifacts.formats.gguf_facts import find_layout
from crds.weights_header import Layers
from tests.support.tiny_models import hollow_gguf, tiny_gguf
from tests.support.tiny_models.hollow_gguf import Shape


def _header(architecture: str, **metadata: Any) -> GGUFHeader:
    defaults: dict[str, Value] = {"block_count": 4, "embedding_length": 1024, "attention.head_count": 8}
    stated = defaults | {key.replace("__", "."): value for key, value in metadata.items()}
    facts: dict[str, Value] = {f"{architecture}.{key}": value for key, value in stated.items() if value is not None}
    facts["general.architecture"] = architecture
    return GGUFHeader(3, facts, 1, 1000, {"F16": 1000}, {"token_embd.weight": (1024, 32_000)}, 0)


def _layers(architecture: str, **metadata: Any) -> Sequence[Layers] | None:
    layout = find_layout(_header(architecture, **metadata))
    return layout.layers if layout else None


def _full(count: int, elements: int = 1024, **more: Any) -> Layers:
    return Layers(count=count, key_elements=elements, value_elements=elements, **more)


def test_layout_of_a_written_file_has_its_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path, n_layer=3, n_head_kv=[2, 0, 4])
    data = path.read_bytes()
    layout = find_layout(parse(data, len(data)))
    assert layout
    assert layout.layers == [_full(1, 2 * 16), Layers(count=1), _full(1, 4 * 16)]
    assert (layout.vocabulary_size, layout.embedding_size, layout.feed_forward_size) == (280, 64, 128)
    assert (layout.attention_size, layout.head_count, layout.expert_outputs) == (64, 4, 0)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, [_full(4)]),
        ({"attention__head_count_kv": 2}, [_full(4, 256)]),
        (
            {"attention__head_count_kv": 2, "attention__key_length": 192, "attention__value_length": 64},
            [Layers(count=4, key_elements=384, value_elements=128)],
        ),
        ({"attention__head_count_kv": (8, 8, 2, 0)}, [_full(2), _full(1, 256), Layers(count=1)]),
        ({"attention__sliding_window": 512}, [_full(4)]),
        ({"attention__head_count": 0}, None),
        ({"attention__head_count_kv": (8, 8, 2)}, None),
        ({"block_count": None}, None),
        ({"attention__indexer__head_count": 4}, None),
        # Each number fits a status, but their products do not.
        ({"attention__head_count_kv": 1 << 40, "attention__key_length": 1 << 40}, None),
        ({"expert_used_count": 1 << 40, "expert_feed_forward_length": 1 << 40}, None),
    ],
)
def test_cache_of_grouped_heads(metadata: dict[str, Any], expected: list[Layers] | None) -> None:
    assert _layers("llama", **metadata) == expected


@pytest.mark.parametrize(
    ("architecture", "metadata", "near", "full"),
    [
        ("gemma3", {"block_count": 12, "attention__sliding_window": 512}, 10, 2),
        ("gemma3", {"block_count": 12, "attention__sliding_window": 0}, 0, 12),
        ("gemma2", {"attention__sliding_window": 4096}, 2, 2),
        ("gpt-oss", {"attention__sliding_window": 128}, 2, 2),
        ("exaone4", {"attention__sliding_window": 4096}, 0, 4),
        ("exaone4", {"block_count": 64, "attention__sliding_window": 4096}, 48, 16),
        (
            "mimo2",
            {"attention__sliding_window": 128, "attention__sliding_window_pattern": (True, True, True, False)},
            3,
            1,
        ),
        ("cohere2", {"block_count": 8, "attention__sliding_window": 128, "attention__sliding_window_pattern": 2}, 4, 4),
    ],
)
def test_layers_with_windows(architecture: str, metadata: dict[str, Any], near: int, full: int) -> None:
    groups = _layers(architecture, **metadata)
    assert groups is not None
    assert sum(layers.count for layers in groups if layers.window) == near
    assert sum(layers.count for layers in groups if not layers.window) == full


def test_windowed_layers_may_have_other_heads_and_last_layers_no_cache() -> None:
    groups = _layers(
        "gemma4",
        attention__sliding_window=512,
        attention__sliding_window_pattern=(True, False, True, False),
        attention__key_length=512,
        attention__value_length=512,
        attention__key_length_swa=256,
        attention__value_length_swa=256,
        attention__head_count_kv=1,
        attention__shared_kv_layers=1,
    )
    assert groups == [_full(2, 256, window=512), _full(1, 512), Layers(count=1)]


def test_a_missing_window_pattern_is_not_guessed() -> None:
    assert _layers("mimo2", attention__sliding_window=128) is None


def test_latent_attention_caches_no_values() -> None:
    latent = {"attention__head_count_kv": 1, "attention__key_length": 576, "attention__value_length": 512}
    groups = _layers("deepseek2", **latent, attention__key_length_mla=192, attention__value_length_mla=128)
    assert groups == [Layers(count=4, key_elements=576)]


SSM = {"ssm__conv_kernel": 4, "ssm__inner_size": 2048, "ssm__state_size": 128, "ssm__group_count": 1}
SSM_BYTES = 4 * (3 * (2048 + 2 * 128) + 128 * 2048)


@pytest.mark.parametrize(
    ("architecture", "metadata", "expected"),
    [
        ("mamba2", {"attention__head_count": 0, **SSM}, [Layers(count=4, state_bytes=SSM_BYTES)]),
        (
            "granitehybrid",
            {"attention__head_count_kv": (0, 0, 0, 2), **SSM},
            [Layers(count=3, state_bytes=SSM_BYTES), _full(1, 256)],
        ),
        ("falcon-h1", SSM, [_full(4, state_bytes=SSM_BYTES)]),
        ("qwen3next", SSM, [Layers(count=3, state_bytes=SSM_BYTES), _full(1)]),
        (
            "lfm2",
            {"attention__head_count_kv": (0, 0, 8, 0), "shortconv__l_cache": 3},
            [Layers(count=3, state_bytes=4 * 2 * 1024), _full(1)],
        ),
        ("rwkv7", {"wkv__head_size": 64, "token_shift_count": 2}, [Layers(count=4, state_bytes=4 * 66 * 1024)]),
        ("granitehybrid", {"attention__head_count_kv": (0, 0, 0, 2)}, None),
    ],
)
def test_state_of_recurrent_layers(architecture: str, metadata: dict[str, Any], expected: list[Layers] | None) -> None:
    assert _layers(architecture, **metadata) == expected


@pytest.mark.parametrize("architecture", ["deepseek4", "kimi-linear", "t5", "of-tomorrow", ""])
def test_an_architecture_with_unknown_caches_has_no_layout(architecture: str) -> None:
    assert _layers(architecture) is None


def test_only_experts_that_a_token_uses_count() -> None:
    layout = find_layout(
        _header("qwen3moe", feed_forward_length=8, expert_used_count=8, expert_feed_forward_length=768)
    )
    assert layout
    assert (layout.feed_forward_size, layout.expert_outputs) == (8 * 768, 8)


@pytest.mark.parametrize("kind", hollow_gguf.KINDS)
def test_every_model_of_the_measured_table_has_a_layout(tmp_path: Path, kind: hollow_gguf.Kind) -> None:
    path = tmp_path / "hollow.gguf"
    hollow_gguf.write(path, Shape(kind=kind, layers=4, vocabulary=300))
    with path.open("rb") as file:
        layout = find_layout(parse(file.read(2**20), path.stat().st_size))
    assert layout
    assert sum(layers.count for layers in layout.layers) == 4
