"""The estimate of engines with a paged cache follows their source and agrees with published logs of real devices."""

import re
from typing import Any

import pytest
from msgspec import structs

from crds.serving import ServingOptions
from crds.weights_header import Layers, Layout
from fitness.memory import PodMemory, Workload, estimate_pod, find_largest_context, refuse_device_count, way_out

MIB, GIB = 2**20, 2**30
LLAMA3_8B = Layout(
    tensor_bytes=16_060_522_496,
    vocabulary_size=128_256,
    embedding_size=4096,
    attention_size=4096,
    head_count=32,
    feed_forward_size=14_336,
    layers=[Layers(count=32, key_elements=1024, value_elements=1024)],
)
LLAMA3_70B_AWQ = Layout(
    tensor_bytes=39_770_000_000,
    vocabulary_size=128_256,
    embedding_size=8192,
    attention_size=8192,
    head_count=64,
    feed_forward_size=28_672,
    layers=[Layers(count=80, key_elements=1024, value_elements=1024)],
)
QWEN2_14B = Layout(
    tensor_bytes=29_540_067_328,
    vocabulary_size=152_064,
    embedding_size=5120,
    attention_size=5120,
    head_count=40,
    feed_forward_size=13_824,
    layers=[Layers(count=48, key_elements=1024, value_elements=1024)],
)
PHI4_MINI = Layout(
    tensor_bytes=int(7.15 * GIB),
    vocabulary_size=200_064,
    embedding_size=3072,
    attention_size=3072,
    head_count=24,
    feed_forward_size=8192,
    layers=[Layers(count=32, key_elements=1024, value_elements=1024)],
)
RTX_3090, A6000 = 24_576 * MIB, 49_140 * MIB


def _pod(layout: Layout, devices: int = 1, runtime: str = "vllm", **options: Any) -> PodMemory:
    """Return the memory of a replica that serves one request at a time, unless `parallel` says otherwise."""
    memory = estimate_pod(Workload(layout, runtime), ServingOptions(**{"parallel": 1} | options), devices)
    assert memory
    return memory


def _device(layout: Layout, devices: int = 1, runtime: str = "vllm", **options: Any) -> dict[str, int]:
    estimate = _pod(layout, devices, runtime, **options).device
    assert estimate
    return {name.removesuffix("_bytes"): size for name, size in estimate.parts._asdict().items()}


@pytest.mark.parametrize(
    ("layout", "devices", "published_gib", "source"),
    [
        (LLAMA3_8B, 1, 14.96, "vLLM pull request 10511: model weights take 14.96GiB"),
        (LLAMA3_8B, 2, 7.48, "vLLM pull request 10511, -tp 2: model weights take 7.48GiB"),
        (QWEN2_14B, 2, 13.9476, "vLLM issue 13061, -tp 2 (14.77 GB each are 13.75 GiB): took 13.9476 GB"),
    ],
)
def test_weights_of_each_device_are_those_of_published_logs(
    layout: Layout, devices: int, published_gib: float, source: str
) -> None:
    assert 1 <= _device(layout, devices)["weights"] / GIB / published_gib < 1.03, source


@pytest.mark.parametrize(
    ("layout", "options", "published_gib", "source"),
    [
        (
            LLAMA3_8B,
            {"parallel": 64, "extra_args": ["--max-num-batched-tokens", "8192", "--enforce-eager"]},
            14.96 + 0.97 + 1.79,
            "vLLM pull request 10511, without the logits of 256 sequences: weights, activation, non_torch on an H100",
        ),
        (
            LLAMA3_8B,
            {"extra_args": ["--max-num-batched-tokens=20000", "--enforce-eager"]},
            0.9 * 23.58 - 3.81,
            "vLLM issue 10517, RTX 3090, --max-model-len 20000: all but kv_cache_size=3.81GiB",
        ),
        (
            LLAMA3_8B,
            {"extra_args": ["--max-num-batched-tokens", "29000", "--enforce-eager"]},
            0.9 * 23.58 - 2.89,
            "vLLM issue 10517, RTX 3090, --max-model-len 29000: all but kv_cache_size=2.89GiB",
        ),
    ],
)
def test_all_but_the_cache_is_that_of_published_logs(
    layout: Layout, options: dict[str, Any], published_gib: float, source: str
) -> None:
    parts = _device(layout, **options)
    assert 0.98 < (sum(parts.values()) - parts["cache"]) / GIB / published_gib < 1.15, source


@pytest.mark.parametrize(
    ("layout", "devices", "device_bytes", "percent", "published"),
    [
        # vLLM issue 10517: 0.9 of 23.58 GiB less 14.99 GiB of weights, 0.35 GiB of context and 1 GiB in use.
        (LLAMA3_8B, 1, RTX_3090, 90, 39_000),
        # KAITO memory-estimator.md, on an A10.
        (PHI4_MINI, 1, RTX_3090, 84, 83_640),
        # Arithmetic: 0.9 of 47.5 GiB less 18.6 GiB and 1 GiB, at 160 KiB a token.
        (LLAMA3_70B_AWQ, 2, A6000, 90, 150_000),
    ],
)
def test_the_longest_context_is_near_to_what_is_published(
    layout: Layout, devices: int, device_bytes: int, percent: int, published: int
) -> None:
    options = ServingOptions(context_length=2**20, parallel=1, extra_args=[f"--gpu-memory-utilization=0.{percent}"])
    context = find_largest_context(Workload(layout, "vllm"), options, device_bytes, devices)
    assert context == pytest.approx(published, rel=0.2)


def test_the_engine_uses_its_share_of_a_device() -> None:
    memory = _pod(LLAMA3_8B, context_length=8192)
    assert memory.device
    assert memory.device_bytes_each
    assert memory.device.total_bytes <= 0.92 * (memory.device_bytes_each - 450 * MIB) < memory.device.total_bytes + 2


@pytest.mark.parametrize(
    ("runtime", "extra_args", "share"),
    [
        ("vllm", ["--gpu-memory-utilization", "0.95"], 0.95),
        ("vllm", ["--gpu-memory-utilization=.5"], 0.5),
        ("vllm", ["--gpu-memory-utilization", "most"], 0.92),
        ("vllm", ["--gpu-memory-utilization", "0"], 0.001),
        ("sglang", [], 1),
        ("sglang", ["--mem-fraction-static", "0.8"], 0.8),
        ("tgi", [], 0.9),
        ("tgi", ["--cuda-memory-fraction", "0.5"], 0.45),
    ],
)
def test_a_stated_share_of_the_device_counts(runtime: str, extra_args: list[str], share: float) -> None:
    pod = _pod(LLAMA3_8B, runtime=runtime, extra_args=extra_args)
    assert pod.device
    assert pod.device_bytes_each
    assert pod.device.total_bytes / (pod.device_bytes_each - 450 * MIB) == pytest.approx(share, rel=0.001)
    if runtime == "sglang" and extra_args:
        assert pod.device.parts.compute_bytes < GIB


def test_arguments_that_change_batch_and_blocks_count() -> None:
    whole = _device(LLAMA3_8B, context_length=32_768, extra_args=["--no-enable-chunked-prefill"])
    assert whole["compute"] > 3 * GIB
    assert _device(LLAMA3_8B, mode="embeddings", context_length=32_768)["compute"] == whole["compute"]
    token = 32 * 2 * 8 * 128 * 2
    assert _device(LLAMA3_8B, context_length=8193, extra_args=["--block-size", "128"])["cache"] == 8320 * token
    assert _device(LLAMA3_8B, extra_args=["--enforce-eager"])["compute"] < _device(LLAMA3_8B)["compute"]


def test_cache_has_whole_blocks() -> None:
    token = 32 * 2 * 8 * 128 * 2
    assert _device(LLAMA3_8B, context_length=8192)["cache"] == 8192 * token
    assert _device(LLAMA3_8B, context_length=8193)["cache"] == 8208 * token
    assert _device(LLAMA3_8B, 4, context_length=8192)["cache"] == 8192 * token // 4


@pytest.mark.parametrize("runtime", ["vllm", "sglang", "tgi"])
@pytest.mark.parametrize("devices", [0, 1])
def test_parallel_is_a_limit_that_reserves_no_further_context(runtime: str, devices: int) -> None:
    one, many, unset = (
        _pod(LLAMA3_8B, devices, runtime, context_length=32_768, parallel=parallel) for parallel in (1, 64, None)
    )
    for pod in (many, unset):
        cache, cache_of_one = ((each.device or each.container).parts.cache_bytes for each in (pod, one))
        assert cache == cache_of_one
    needs = [pod.device_bytes_each or pod.container_bytes for pod in (one, many, unset)]
    assert needs == sorted(needs)
    assert needs[-1] < needs[0] + 10 * GIB, "less than two further contexts"


@pytest.mark.parametrize(("runtime", "sequences"), [("vllm", 256), ("sglang", 48), ("tgi", 128)])
def test_unset_parallel_counts_the_buffers_of_the_own_choice_of_the_engine(runtime: str, sequences: int) -> None:
    assert _device(LLAMA3_8B, runtime=runtime, parallel=None) == _device(LLAMA3_8B, runtime=runtime, parallel=sequences)
    # On a processor it is 128.
    own, stated = (_pod(LLAMA3_8B, 0, runtime, parallel=parallel) for parallel in (None, 128))
    assert own == stated


def test_vllm_draws_the_tokens_of_more_requests_at_once_on_larger_devices() -> None:
    # 10 float32 copies of the logits, and graphs for 1, 2, 4, 8 and so on to 256, and by 16 to 512.
    logits, graphs = 10 * 128_256 * 4, (3 + 32 + 16) * 32 * MIB
    assert _device(LLAMA3_8B, parallel=None)["compute"] == 256 * logits + graphs
    wide = structs.replace(LLAMA3_8B, tensor_bytes=62 * GIB)
    assert _device(wide, parallel=None)["compute"] == 1024 * logits + graphs
    eager = _device(wide, parallel=None, extra_args=["--enforce-eager"])
    assert eager["compute"] == 1024 * logits


def test_heads_fewer_than_devices_are_repeated() -> None:
    eighth = _device(LLAMA3_8B, 8)
    sixteenth = _device(LLAMA3_8B, 16)
    assert sixteenth["cache"] == eighth["cache"]
    # Keys and values of a head have 32 x 2 x 128 x 4096 weights, and each device keeps one whole head.
    head = 32 * 2 * 128 * 4096 * 2
    rest = LLAMA3_8B.tensor_bytes - 8 * head
    assert sixteenth["weights"] == (rest // 16 + head) * 102 // 100


def test_a_sliding_window_is_kept_by_vllm_only() -> None:
    near = Layers(count=5, key_elements=1024, value_elements=1024, window=1024)
    layout = structs.replace(LLAMA3_8B, layers=[near, structs.replace(near, count=1, window=None)])
    token = 2 * 1024 * 2
    # The window less one, a batch of 2,048 tokens, and one more block, in whole blocks; then the whole context.
    assert _device(layout, context_length=32_768)["cache"] == token * (5 * (3072 + 16) + 32_768)
    assert _device(layout, context_length=32_768, runtime="sglang")["cache"] == token * 6 * 32_768
    # Groups of 2 layers: 5 layers take 3 groups. Of 5 and 4 layers, 4 are filled up to 5.
    two = structs.replace(layout, layers=[near, structs.replace(near, count=2, window=None)])
    assert _device(two, context_length=32_768)["cache"] == token * (6 * (3072 + 16) + 2 * 32_768)
    four = structs.replace(layout, layers=[near, structs.replace(near, count=4, window=None)])
    assert _device(four, context_length=32_768)["cache"] == token * (5 * (3072 + 16) + 5 * 32_768)


def test_a_larger_batch_counts_where_the_smallest_device_that_chooses_it_could_not_hold_it() -> None:
    wide, widest = (structs.replace(LLAMA3_8B, tensor_bytes=size * GIB) for size in (62, 145))
    assert _device(LLAMA3_8B)["compute"] < _device(wide)["compute"] < _device(widest)["compute"]
    stated = ["--max-num-batched-tokens", "2048"]
    assert _device(wide, extra_args=stated)["compute"] == _device(LLAMA3_8B)["compute"]
    absurd = ["--max-num-batched-tokens", "9" * 400]
    assert _device(wide, extra_args=absurd) == _device(wide)


def test_sglang_leaves_its_reserve_free() -> None:
    # 512 + 128 + 2 x 48 + 400 MiB and 1.5 MiB for each of 4,096 tokens on a device of 24 GiB.
    assert _device(LLAMA3_8B, runtime="sglang")["compute"] == 7280 * MIB
    shorter = _device(LLAMA3_8B, runtime="sglang", extra_args=["--chunked-prefill-size", "2048"])
    assert shorter["compute"] == (1136 + 3072) * MIB


def test_tgi_computes_a_prompt_in_one_batch() -> None:
    assert _device(LLAMA3_8B, runtime="tgi", context_length=32_768)["compute"] > 3 * GIB
    assert _device(LLAMA3_8B, context_length=32_768)["compute"] < GIB


def test_weights_are_not_asked_for_twice() -> None:
    memory = _pod(LLAMA3_8B, 2)
    assert 4 * GIB < memory.container_bytes < 8 * GIB
    assert memory.container.parts.weights_bytes == memory.cache_bytes == 0
    assert memory.text().startswith("7.6 GiB weights, ")
    assert memory.text().endswith(" on each device")


def test_without_devices_all_is_in_the_container_and_the_cache_has_whole_gib() -> None:
    memory = _pod(LLAMA3_8B, 0, context_length=10_000)
    assert memory.device is None
    assert memory.device_bytes_each is None
    assert memory.cache_bytes == 2 * GIB
    assert memory.container_bytes > LLAMA3_8B.tensor_bytes + 2 * GIB


RECURRENT, LATENT = Layers(count=96, state_bytes=MIB), Layers(count=32, key_elements=576)


@pytest.mark.parametrize(
    ("runtime", "layers"),
    [
        ("sglang", [*LLAMA3_8B.layers, RECURRENT]),
        ("tgi", [LATENT]),
        ("vllm", [LATENT, RECURRENT]),
        ("vllm", [RECURRENT]),
        ("vllm", [Layers(count=32, key_elements=1024, value_elements=1024, state_bytes=MIB)]),
    ],
)
def test_caches_of_which_no_formula_is_known_are_unknown(runtime: str, layers: list[Layers]) -> None:
    layout = structs.replace(LLAMA3_8B, layers=layers)
    for devices in (0, 1):
        assert estimate_pod(Workload(layout, runtime), ServingOptions(), devices) is None
        assert estimate_pod(Workload(LLAMA3_8B, runtime, draft=layout), ServingOptions(), 1) is None


def _hybrid(heads_kv: int, layers: int, value_heads: int, *, byte_elements: bool = False) -> Layout:
    """Return a layout as that of Qwen3.5, whose heads have 256 elements; with keys and values of one byte if asked."""
    elements = 256 * heads_kv // (2 if byte_elements else 1)
    convolution = 3 * (2 * 16 * 128 + value_heads * 128)
    state_bytes = 4 * (convolution + value_heads * 128 * 128)
    kinds = [
        Layers(count=layers, key_elements=elements, value_elements=elements),
        Layers(count=3 * layers, state_bytes=state_bytes),
    ]
    return structs.replace(LLAMA3_8B, attention_size=24 * 256, head_count=24, layers=kinds)


@pytest.mark.parametrize(
    ("layout", "context", "published", "source"),
    [
        (
            _hybrid(4, 16, 48),
            8192,
            16 * (11 + 3 * 2) * 784 * 4096,
            "vLLM 0.19, Qwen3.5-27B: attention block size of 784 tokens; a state of 48 layers takes two blocks",
        ),
        (
            _hybrid(2, 10, 32, byte_elements=True),
            131_072,
            5.98 * GIB / 4.33,
            "vLLM 0.24, Qwen3.6-35B-A3B, FP8 cache: 5.98 GiB hold 4.33 requests of 131,072 tokens",
        ),
    ],
)
def test_recurrent_states_are_padded_to_blocks_of_the_cache(
    layout: Layout, context: int, published: float, source: str
) -> None:
    # The inputs of the convolution are counted with 32 bits each, and vLLM keeps 16.
    assert 1 <= _device(layout, context_length=context)["cache"] / published < 1.03, source


def test_each_request_at_once_has_recurrent_states() -> None:
    layout = _hybrid(4, 16, 48)
    one, four, unset = (_device(layout, context_length=8192, parallel=parallel)["cache"] for parallel in (1, 4, None))
    states = 48 * 2 * 784 * 4096
    assert four - one == pytest.approx(3 * states, rel=0.03)
    assert unset - one > 255 * states


def test_devices_share_recurrent_states() -> None:
    layout = _hybrid(4, 16, 48)
    assert 0.5 <= _device(layout, 2)["cache"] / _device(layout)["cache"] < 0.52


def test_latents_are_whole_on_each_device() -> None:
    # DeepSeek V3: 576 elements of 61 layers, which vLLM pull request 10927 gives as 1152 bytes of a token and layer.
    layout = structs.replace(
        LLAMA3_8B,
        tensor_bytes=688_586_727_753,
        embedding_size=7168,
        attention_size=128 * 427,
        head_count=128,
        feed_forward_size=18_432,
        layers=[Layers(count=61, key_elements=576)],
    )
    alone, shared = _device(layout, 1, context_length=4096), _device(layout, 8, context_length=4096)
    assert shared["cache"] == alone["cache"] == 61 * 1152 * 4096
    # Beside its eighth of the file, a device has the absorbed weights of 61 layers, and compressed projections whole.
    least = layout.tensor_bytes / 8 + 61 * 512 * 128 * (128 + 128) * 2 / 8 + 61 * 7168 * (1536 + 576) * 7 / 8
    assert least < shared["weights"] < 1.05 * least
    # vLLM expands 8 contexts: 192 elements of each key, and 128 of each value.
    assert shared["compute"] > 8 * 4096 * 128 // 8 * (192 + 128) * 2
    longer = _device(layout, 8, context_length=131_072)
    assert longer["compute"] < 2 * shared["compute"] + GIB, "not more than 65,536 tokens are expanded at once"


def test_devices_that_do_not_divide_the_heads_are_refused() -> None:
    assert refuse_device_count(Workload(LLAMA3_8B, "vllm"), 3) == (
        "hardware.count 3 does not divide the 32 attention heads of the model: set it to 1 or 2 or 4 or 8 or 16"
    )
    assert refuse_device_count(Workload(LLAMA3_8B, "vllm"), 4) is None
    assert refuse_device_count(Workload(LLAMA3_8B, "llama.cpp"), 3) is None
    assert refuse_device_count(Workload(None, "vllm"), 3) is None


@pytest.mark.parametrize(
    ("options", "limit_bytes", "expected"),
    [
        ({"context_length": 131_072}, RTX_3090, r"a contextLength of 37120 or a hardware.count of 2 would fit"),
        ({"context_length": 8192}, 16 * GIB, "a hardware.count of 2 would fit"),
        ({"context_length": 8192}, 4 * GIB, "a hardware.count of 16 would fit"),
        (
            {"context_length": 8192},
            2 * GIB,
            "no quantization of this model would fit: use a smaller model, or more or larger devices",
        ),
    ],
)
def test_way_out_on_devices_names_a_context_or_a_number_of_devices(
    options: dict[str, Any], limit_bytes: int, expected: str
) -> None:
    stated = ServingOptions(parallel=1, **options)
    assert way_out(Workload(LLAMA3_8B, "vllm"), stated, limit_bytes, devices=1) == expected


def test_way_out_on_devices_names_a_quantization_that_fits_into_the_share_of_the_device() -> None:
    # One head cannot be divided, so no number of devices helps.
    layout = structs.replace(LLAMA3_8B, head_count=1)
    limit_bytes = 10 * GIB
    match = re.fullmatch(
        r"a quantization with weights of at most (\d+)% of the size would fit",
        way_out(Workload(layout, "vllm"), ServingOptions(context_length=512, parallel=1), limit_bytes, devices=1),
    )
    assert match
    for percent, fits in ((int(match[1]), True), (int(match[1]) + 2, False)):
        smaller = structs.replace(layout, tensor_bytes=layout.tensor_bytes * percent // 100)
        size = _pod(smaller, context_length=512).device_bytes_each
        assert size
        assert (size <= limit_bytes) is fits
