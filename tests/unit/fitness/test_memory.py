"""The memory estimate follows llama.cpp and mlx-lm part by part, and the suggested settings really fit."""

import re
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from crds.serving import ServingOptions, stated_options
from crds.weights_header import Layers, Layout
from fitness.memory import Workload, estimate, find_largest_context, way_out
from runtimes.llama_estimate import _BLOCK_BYTES, count_checkpoints
from runtimes.mlx_estimate import count_cache_entries

MIB, GIB = 2**20, 2**30
QWEN3_8B = Layout(
    tensor_bytes=5_027_783_488,
    vocabulary_size=151_936,
    embedding_size=4096,
    attention_size=4096,
    head_count=32,
    feed_forward_size=12_288,
    layers=[Layers(count=36, key_elements=1024, value_elements=1024)],
)


def _parts(layout: Layout, **options: Any) -> dict[str, int]:
    """Return the parts of the estimate by name: of one request at a time, unless `parallel` says otherwise."""
    runtime = options.pop("runtime", "llama.cpp")
    estimated = estimate(Workload(layout, runtime), ServingOptions(**{"parallel": 1} | options))
    assert estimated
    return {name.removesuffix("_bytes"): size for name, size in estimated.parts._asdict().items()}


def _total(workload: Workload, options: ServingOptions) -> int:
    estimated = estimate(workload, options)
    assert estimated
    return estimated.total_bytes


def test_estimate_of_a_known_model_matches_the_log_of_llama_cpp() -> None:
    # llama.cpp's own log for Qwen3-8B-Q4_K_M at 4,096 tokens: KV buffer 576 MiB, weights 4,794.9 MiB.
    parts = _parts(QWEN3_8B)
    assert parts["cache"] == 576 * MIB
    assert parts["weights"] == 5_027_783_488
    assert 80 * MIB < parts["compute"] < 160 * MIB
    assert parts["checkpoints"] == 0


@pytest.mark.parametrize(
    ("settings", "cache_mib"),
    [
        ({"parallel": 4}, 4 * 576),
        ({"context_length": 4097}, 576 + 36),
        ({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 306),
        ({"cache_type_k": "q8_0"}, 441),
        ({"cache_type_v": "q4_0"}, 369),
        ({"parallel": 3, "context_length": 1100}, 540),
        ({"runtime": "mlx-lm"}, 576),
        # Requests at once share one context, as many tokens again or 8,192, whichever is less, and 256 of probes. In
        # mlx-lm the caches of three of them grow by 256 tokens.
        ({"parallel": None}, 2 * 576 + 36),
        ({"parallel": None, "context_length": 32_768}, 36 * 161),
        ({"parallel": None, "context_length": 1000}, 36 * 9),
        ({"parallel": None, "mode": "embeddings"}, 576),
        ({"parallel": None, "runtime": "mlx-lm"}, 2 * 576 + 3 * 36),
        ({"parallel": None, "runtime": "omlx"}, 2 * 576 + 3 * 36),
        ({"parallel": None, "runtime": "ollama"}, 576),
        ({"parallel": None, "runtime": "llama-cpp-python"}, 576),
    ],
)
def test_the_cache_follows_type_slots_and_padding(settings: dict[str, object], cache_mib: int) -> None:
    assert _parts(QWEN3_8B, **settings)["cache"] == cache_mib * MIB


def test_sliding_window_bounds_the_cache_and_its_checkpoints_count() -> None:
    near = Layers(count=5, key_elements=1024, value_elements=1024, window=1024)
    whole = Layers(count=1, key_elements=1024, value_elements=1024)
    layout = structs.replace(QWEN3_8B, layers=[near, whole])
    token_bytes = 2 * 1024 * 2
    parts = _parts(layout, context_length=32_768, parallel=2)
    # Two slots, each with 1,024 tokens of window and a batch of 512.
    assert parts["cache"] == 2 * token_bytes * (5 * 1536 + 32_768)
    checkpoint = token_bytes * 5 * 1536
    assert parts["checkpoints"] == 2 * 3 * checkpoint
    assert _parts(layout, context_length=32_768, extra_args=("--swa-full",))["checkpoints"] == 0
    assert _parts(layout, context_length=32_768, extra_args=("--swa-full",))["cache"] == token_bytes * 6 * 32_768
    # Slots that share a cache have a window each.
    shared = _parts(layout, context_length=32_768, parallel=None)
    assert shared["cache"] == token_bytes * (5 * (4 * 1024 + 512) + 32_768 + 8192 + 256)
    assert shared["checkpoints"] == 4 * 3 * checkpoint


def test_a_recurrent_state_does_not_grow_with_the_context() -> None:
    layout = structs.replace(QWEN3_8B, layers=[Layers(count=48, state_bytes=MIB)])
    assert _parts(layout, context_length=512)["cache"] == _parts(layout, context_length=131_072)["cache"] == 48 * MIB
    assert _parts(layout, parallel=4)["cache"] == _parts(layout, parallel=None)["cache"] == 4 * 48 * MIB
    assert _parts(layout)["checkpoints"] == 3 * 48 * MIB


@pytest.mark.parametrize(
    ("context_length", "prompt_cache", "checkpoints"),
    [(4096, "0", 3), (65_536, "0", 3), (65_536, "864Mi", 9), (65_536, "8Gi", 11), (2_000_000, "900Gi", 32)],
)
def test_checkpoints_grow_with_the_context_within_half_of_the_prompt_cache(
    context_length: int, prompt_cache: str, checkpoints: int
) -> None:
    """A checkpoint of 48 MiB for each 8,192 tokens, and three: so that a long loop of tools can be continued."""
    layout = structs.replace(QWEN3_8B, layers=[Layers(count=48, state_bytes=MIB)])
    options = ServingOptions(context_length=context_length, parallel=1, prompt_cache=prompt_cache)
    estimated = estimate(Workload(layout), options)
    assert estimated
    assert estimated.parts.checkpoints_bytes == checkpoints * 48 * MIB
    assert count_checkpoints(layout, options) == checkpoints
    assert count_checkpoints(None, options) == 3


def test_remembered_conversations_are_a_part_of_the_estimate() -> None:
    assert _parts(QWEN3_8B, prompt_cache="2Gi")["prompts"] == 2 * GIB
    estimated = estimate(Workload(QWEN3_8B), ServingOptions(prompt_cache="2Gi"))
    assert estimated
    assert "2.0 GiB remembered conversations" in estimated.text()
    # mlx-lm keeps whole conversations: one for each stated slot in any case, and four at most if nothing is stated.
    for prompt_cache, parallel, conversations in (("0", None, 1), ("0", 6, 6), ("64Gi", None, 4), ("64Gi", 6, 6)):
        options = {"prompt_cache": prompt_cache, "parallel": parallel, "runtime": "mlx-lm"}
        assert _parts(QWEN3_8B, **options)["prompts"] == conversations * 576 * MIB


def test_windows_of_mlx_are_kept_for_each_request_that_shares() -> None:
    near = Layers(count=5, key_elements=1024, value_elements=1024, window=1024)
    layout = structs.replace(QWEN3_8B, layers=[near])
    cache = _parts(layout, context_length=32_768, parallel=None, runtime="mlx-lm")["cache"]
    # One request has a window and the part of its prompt that is computed; the other three have 8,192 tokens in all.
    assert cache == 5 * 4096 * ((1024 + 2048) + (8192 + 3 * 256))


@pytest.mark.parametrize("layers", [Layers(count=48, state_bytes=MIB), Layers(count=48, key_elements=576)])
def test_memory_of_mlx_is_known_for_keys_and_values_alone(layers: Layers) -> None:
    layout = structs.replace(QWEN3_8B, layers=[*QWEN3_8B.layers, layers])
    assert estimate(Workload(layout, "mlx-lm"), ServingOptions()) is None


def test_compute_buffer_has_all_scores_without_flash_attention() -> None:
    plain = _parts(QWEN3_8B, context_length=8192)["compute"]
    assert (
        _parts(QWEN3_8B, context_length=8192, extra_args=("-fa", "off"))["compute"] > plain + 32 * 8192 * 512 * 4 // 2
    )


def test_llama_cpp_python_and_ollama_are_estimated_with_their_own_defaults() -> None:
    flash = _parts(QWEN3_8B, context_length=8192)["compute"]
    python = {"context_length": 8192, "runtime": "llama-cpp-python"}
    assert _parts(QWEN3_8B, **python)["compute"] > 2 * flash
    assert _parts(QWEN3_8B, **python, extra_args=("--flash_attn", "true"))["compute"] == flash
    assert _parts(QWEN3_8B, **python, cache_type_k="q8_0", cache_type_v="q8_0")["compute"] == flash
    assert _parts(QWEN3_8B, context_length=8192, runtime="ollama")["compute"] > 2 * flash
    near = structs.replace(QWEN3_8B, layers=[Layers(count=36, key_elements=1024, value_elements=1024, window=512)])
    assert _parts(near, **python)["cache"] == _parts(QWEN3_8B, **python)["cache"]
    assert _parts(near, **python)["checkpoints"] == _parts(near, runtime="ollama")["checkpoints"] == 0


def test_a_text_is_embedded_in_one_batch() -> None:
    assert _parts(QWEN3_8B, context_length=8192, mode="embeddings")["compute"] > 8 * _parts(QWEN3_8B)["compute"]


def test_a_draft_counts_without_another_engine() -> None:
    estimated = estimate(Workload(QWEN3_8B, draft=QWEN3_8B, further_bytes=7), ServingOptions(parallel=1))
    assert estimated
    assert estimated.draft
    assert estimated.draft.engine_bytes == estimated.draft.further_bytes == 0
    assert estimated.total_bytes == sum(estimated.parts) + sum(estimated.draft)
    assert estimated.text().startswith("5.4 GiB the draft, 4.7 GiB weights, 576.0 MiB context, ")


def test_unknown_layout_or_runtime_has_no_estimate() -> None:
    assert estimate(Workload(None), ServingOptions()) is None
    assert estimate(Workload(QWEN3_8B, "of-tomorrow"), ServingOptions()) is None
    assert find_largest_context(Workload(None), ServingOptions(), GIB) is None


def test_cache_types_are_those_of_the_gguf_package() -> None:
    for name, size_bytes in _BLOCK_BYTES.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
        assert size_bytes == 32 // block * block_bytes, name


SIZES = st.integers(0, 65_536)
LAYERS = st.builds(
    Layers,
    count=st.integers(1, 128),
    key_elements=SIZES,
    value_elements=SIZES,
    window=st.none() | st.integers(1, 8192),
    state_bytes=st.integers(0, 2**24),
)
LAYOUTS = st.builds(
    Layout,
    tensor_bytes=st.integers(0, 2**42),
    vocabulary_size=st.integers(0, 2**20),
    embedding_size=SIZES,
    attention_size=SIZES,
    head_count=st.integers(0, 512),
    feed_forward_size=SIZES,
    expert_outputs=st.integers(0, 64),
    layers=st.lists(LAYERS, max_size=4),
)
HEADS = LAYOUTS.map(
    lambda layout: structs.replace(
        layout,
        layers=[structs.replace(layer, state_bytes=0, key_elements=layer.value_elements) for layer in layout.layers],
    )
)
WORKLOADS = st.one_of(
    [
        st.builds(
            Workload,
            layout=layouts,
            runtime=st.sampled_from(runtimes),
            draft=st.none() | layouts,
            further_bytes=st.integers(0, 2**32),
        )
        for layouts, runtimes in ((LAYOUTS, ["llama.cpp", "llama-cpp-python", "ollama"]), (HEADS, ["mlx-lm", "omlx"]))
    ]
)
OPTIONS = st.builds(
    ServingOptions,
    context_length=st.integers(128, 2**21),
    parallel=st.none() | st.integers(1, 64),
    prompt_cache=st.none() | st.integers(0, 2**36),
    mode=st.sampled_from(["chat", "embeddings"]),
    cache_type_k=st.sampled_from(sorted(_BLOCK_BYTES)),
    cache_type_v=st.sampled_from(sorted(_BLOCK_BYTES)),
    extra_args=st.sampled_from([[], ["--swa-full"], ["-fa", "off"]]),
)


def _with_context(options: ServingOptions, tokens: int) -> ServingOptions:
    return structs.replace(options, context_length=tokens)


def add(options: ServingOptions, context: int, slots: int) -> ServingOptions:
    """Return the options with more context, and more slots if their number is stated."""
    parallel = options.parallel + slots if options.parallel is not None else None
    return structs.replace(options, context_length=options.context_tokens + context, parallel=parallel)


@given(WORKLOADS, OPTIONS, st.integers(0, 2**20), st.integers(0, 8))
def test_estimate_never_falls_with_more_context_slots_or_companions(
    workload: Workload, options: ServingOptions, context: int, slots: int
) -> None:
    assert workload.layout
    larger = workload._replace(further_bytes=workload.further_bytes + 1)
    assert workload.layout.tensor_bytes <= _total(workload, options) < _total(larger, add(options, context, slots))


@given(WORKLOADS, OPTIONS, st.integers(0, 2**30))
def test_estimate_grows_by_what_is_remembered_and_its_checkpoints(
    workload: Workload, options: ServingOptions, added: int
) -> None:
    more = structs.replace(options, prompt_cache=options.prompt_cache_bytes + added)
    drafts = 1 if workload.draft is None else 2
    assert 0 <= _total(workload, more) - _total(workload, options) <= drafts * (added + added // 2 + 1)


@given(LAYOUTS, OPTIONS)
def test_checkpoints_that_are_kept_are_within_the_estimate(layout: Layout, options: ServingOptions) -> None:
    chat = structs.replace(options, mode="chat")
    least = _parts(layout, **stated_options(structs.replace(chat, prompt_cache=None)))["checkpoints"] // 3
    kept = count_checkpoints(layout, chat)
    assert 3 <= kept <= 32
    assert kept * least <= _parts(layout, **stated_options(chat))["checkpoints"]


@given(HEADS, OPTIONS)
def test_conversations_that_mlx_keeps_are_within_the_estimate(layout: Layout, options: ServingOptions) -> None:
    stated = stated_options(options) | {"runtime": "mlx-lm"}
    one = _parts(layout, **stated | {"parallel": 1, "prompt_cache": None})["prompts"]
    entries = count_cache_entries(layout, options)
    conversations = (entries - 2) // 2 if any(layers.window for layers in layout.layers) else entries
    assert conversations * one <= _parts(layout, **stated)["prompts"]
    assert (options.parallel or 1) <= conversations <= max(4, options.parallel or 1)


@given(WORKLOADS, OPTIONS, st.floats(0, 1))
def test_the_largest_context_fits_and_the_next_does_not(
    workload: Workload, options: ServingOptions, share: float
) -> None:
    limit = int(_total(workload, options) * share)
    context = find_largest_context(workload, options, limit)
    if context is None:
        assert options.context_tokens <= 512 or _total(workload, _with_context(options, 512)) > limit
        return
    assert context < options.context_tokens
    assert _total(workload, _with_context(options, context)) <= limit
    if context + 256 < options.context_tokens:
        assert _total(workload, _with_context(options, context + 256)) > limit


@pytest.mark.parametrize(
    ("limit_bytes", "expected"),
    [
        (7 * GIB, r"a contextLength of 1\d{4} would fit"),
        (4 * GIB, r"a quantization with weights of at most \d\d% of the size and a contextLength of 512 would fit"),
        (GIB // 2, r"no quantization of this model would fit: use a smaller model or a larger host"),
    ],
)
def test_way_out_names_a_context_or_quantization_that_fits(limit_bytes: int, expected: str) -> None:
    options = ServingOptions(context_length=32_768, parallel=1)
    assert re.fullmatch(expected, way_out(Workload(QWEN3_8B), options, limit_bytes))


@pytest.mark.parametrize(
    ("options", "share", "expected"),
    [
        (
            ServingOptions(context_length=512, parallel=64),
            0.5,
            "a quantization with weights of at most 95% of the size and a parallel of 1 would fit",
        ),
        (ServingOptions(context_length=4096, parallel=64), 0.2, "a contextLength of 512 and a parallel of 1 would fit"),
        (
            ServingOptions(context_length=300, parallel=1),
            0.999,
            "a quantization with weights of at most 99% of the size would fit",
        ),
    ],
)
def test_way_out_names_all_needed_changes(options: ServingOptions, share: float, expected: str) -> None:
    workload = Workload(QWEN3_8B)
    assert way_out(workload, options, int(_total(workload, options) * share)) == expected
