"""The speed of a model follows from what a token reads, where it is, and who reads it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from crds.meta import ObjectMeta
from crds.metalhost import MetalHostStatus
from crds.model import Model, ModelSpec, ModelStatus
from crds.serving import ServingOptions
from crds.weights_header import Layers, Layout
from fitness.corrections import SpeedRatio, learn_corrections
from fitness.performance import MeasuredPerformance
from fitness.serving_devices import ServingDevices, describe_devices
from fitness.speed import SpeedEstimate, build_measured_speed, estimate_speed, find_active_share
from fitness.stated_hardware import describe_host
from runtimes.llama_estimate import LLAMA_SPEED
from runtimes.paged_estimate import PAGED_SPEED
from runtimes.registry import RUNTIMES

LLAMA_8B = Layout(
    tensor_bytes=4_920_000_000,
    vocabulary_size=128_256,
    embedding_size=4096,
    attention_size=4096,
    head_count=32,
    feed_forward_size=14_336,
    layers=[Layers(count=32, key_elements=1024, value_elements=1024)],
)
QWEN3_30B = Layout(
    tensor_bytes=18_600_000_000,
    vocabulary_size=151_936,
    embedding_size=2048,
    attention_size=4096,
    head_count=32,
    feed_forward_size=8 * 768,
    layers=[Layers(count=48, key_elements=512, value_elements=512)],
    expert_outputs=8,
)
QWEN3_30B_ACTIVE = 3.3 / 30.5
RTX_4090 = describe_devices("nvidia", "NVIDIA GeForce RTX 4090")
EPYC = ServingDevices("cpu", "cpu-amd-epyc-7763x16", cores=16, bandwidth_bytes_per_second=60 * 10**9)


def _estimate(
    layout: Layout = LLAMA_8B, devices: ServingDevices = RTX_4090, runtime: str = "llama.cpp", **more: Any
) -> SpeedEstimate:
    options = more.pop("options", ServingOptions())
    estimate = estimate_speed(layout, options, runtime, devices, **more)
    assert estimate
    return estimate


def _expected(*arguments: Any, **more: Any) -> float:
    return _estimate(*arguments, **more).generation.expected


# Speeds of llama-bench (128 tokens) on products of which llmfit's community has no measurement with this engine:
# llama.cpp pull requests 26705 (R9700) and 4766 (P40), a user's report (RTX 4090), a benchmark page (RTX 3090).
@pytest.mark.parametrize(
    ("vendor", "product", "tensor_bytes", "layers", "measured"),
    [
        ("nvidia", "NVIDIA GeForce RTX 4090", 6_596_000_000, 32, 93),
        ("nvidia", "NVIDIA GeForce RTX 3090", 2_490_000_000, 34, 189),
        ("nvidia", "Tesla P40", 2_950_000_000, 32, 30.9),
        ("amd", "AMD Radeon AI PRO R9700", 3_170_000_000, 32, 116),
    ],
)
def test_published_speed_is_within_the_range(
    vendor: str, product: str, tensor_bytes: int, layers: int, measured: float
) -> None:
    layout = structs.replace(
        LLAMA_8B, tensor_bytes=tensor_bytes, layers=[structs.replace(LLAMA_8B.layers[0], count=layers)]
    )
    speed = _estimate(layout, describe_devices(vendor, product)).generation
    assert speed.low <= measured <= speed.high


@pytest.mark.parametrize(("product", "measured"), [("RTX 3090", 3500), ("RTX 4090", 5700)])
def test_published_prompt_speed_is_within_the_range(product: str, measured: float) -> None:
    speed = _estimate(devices=describe_devices("nvidia", product)).prompt
    assert speed
    assert speed.low <= measured <= speed.high


def test_bytes_decide_the_speed_of_a_large_model() -> None:
    half = structs.replace(LLAMA_8B, tensor_bytes=LLAMA_8B.tensor_bytes // 2)
    large = structs.replace(LLAMA_8B, tensor_bytes=LLAMA_8B.tensor_bytes * 8)
    assert _expected(half) < 2 * _expected()
    assert _expected(large) == pytest.approx(_expected() / 8, rel=0.35)


def test_overhead_of_layers_bounds_the_speed_of_a_tiny_model() -> None:
    tiny = structs.replace(LLAMA_8B, tensor_bytes=1_000_000)
    assert _expected(tiny) < 1000 / (32 * LLAMA_SPEED["nvidia"].layer_ms)


def test_full_context_is_slower_than_a_short_prompt() -> None:
    options = ServingOptions(context_length=131_072)
    short, full = _expected(options=options), _expected(options=options, filled_tokens=131_072)
    cache = 131_072 * 32 * 2048 * 2
    seconds = cache / (1008e9 * LLAMA_SPEED["nvidia"].efficiency)
    assert 1 / full - 1 / short == pytest.approx(seconds, rel=0.01)


def test_smaller_cache_and_windows_are_faster_at_a_full_context() -> None:
    options = ServingOptions(context_length=65_536)
    windowed = structs.replace(LLAMA_8B, layers=[structs.replace(LLAMA_8B.layers[0], window=1024)])
    plain = _expected(options=options, filled_tokens=65_536)
    small = structs.replace(options, cache_type_k="q8_0", cache_type_v="q8_0")
    assert _expected(options=small, filled_tokens=65_536) > 1.2 * plain
    assert _expected(windowed, options=options, filled_tokens=65_536) > 1.5 * plain


def test_model_with_experts_reads_its_active_share_only() -> None:
    whole = structs.replace(QWEN3_30B, expert_outputs=0)
    assert _expected(QWEN3_30B, active_share=QWEN3_30B_ACTIVE) > 4 * _expected(whole)


@pytest.mark.parametrize("share", [None, 0.0, -1.0, 1.5])
def test_model_with_experts_of_unknown_share_has_no_estimate(share: float | None) -> None:
    assert estimate_speed(QWEN3_30B, ServingOptions(), "llama.cpp", RTX_4090, active_share=share) is None


@pytest.mark.parametrize(
    "devices",
    [
        describe_devices("nvidia", "NVIDIA Titan of Tomorrow"),
        describe_devices("nvidia", "NVIDIA GeForce RTX 3060"),
        describe_devices("intel", ""),
        ServingDevices("cpu", "cpu-unknownx8", cores=8),
        describe_host(MetalHostStatus(chip="Apple M3 Max")),
        ServingDevices("npu-of-tomorrow", "npu-x1", bandwidth_bytes_per_second=10**12),
    ],
    ids=lambda devices: devices.product or devices.vendor,
)
def test_device_of_unknown_bandwidth_has_no_estimate(devices: ServingDevices) -> None:
    assert estimate_speed(LLAMA_8B, ServingOptions(), "llama.cpp", devices) is None


def test_unknown_engine_or_artifact_has_no_estimate() -> None:
    assert estimate_speed(LLAMA_8B, ServingOptions(), "generic", RTX_4090) is None
    empty = structs.replace(LLAMA_8B, tensor_bytes=0)
    assert estimate_speed(empty, ServingOptions(), "llama.cpp", RTX_4090) is None


def test_devices_share_layers_in_one_engine_and_take_turns_in_another() -> None:
    two = RTX_4090._replace(device_count=2)
    assert _expected(devices=two) == _expected()
    assert _expected() < _expected(devices=two, runtime="vllm")
    assert 1.2 < _expected(devices=two, runtime="vllm") / _expected(runtime="vllm") < 2
    assert "take turns" in _estimate(devices=two).basis
    assert "share each layer" in _estimate(devices=two, runtime="vllm").basis


def test_time_of_a_token_is_reading_and_the_overhead_of_layers() -> None:
    prior, cache = PAGED_SPEED["nvidia"], 32 * 512 * 2048 * 2
    one, two = (1 / _expected(devices=RTX_4090._replace(device_count=count), runtime="vllm") for count in (1, 2))
    reading = (LLAMA_8B.tensor_bytes + cache) / (1008e9 * prior.efficiency)
    assert one == pytest.approx(reading + 32 * prior.layer_ms / 1000)
    assert two == pytest.approx(reading / 2 + 32 * (prior.layer_ms + 0.03) / 1000)


def test_cache_is_never_longer_than_the_context() -> None:
    options = ServingOptions(context_length=1024)
    assert _expected(options=options, filled_tokens=10**6) == _expected(options=options, filled_tokens=1024)


def test_few_cores_cannot_use_all_of_the_bandwidth() -> None:
    two, sixteen, many = (_expected(devices=EPYC._replace(cores=cores)) for cores in (2, 16, 64))
    assert two < 0.6 * sixteen
    assert sixteen == many
    assert _estimate(devices=EPYC).run_mode == "cpu"


def test_old_architecture_reads_quantized_weights_slowly() -> None:
    pascal = RTX_4090._replace(product="NVIDIA GeForce GTX 1080 Ti")
    assert _expected(devices=pascal) < 0.6 * _expected()


def test_prompt_speed_follows_from_arithmetic() -> None:
    speed_range = _estimate().prompt
    assert speed_range
    # 8 * 10^9 parameters but for the embeddings, two operations each.
    assert speed_range.expected == pytest.approx(330.3e12 * 0.3 / (2 * 6.98e9), rel=0.02)
    assert _estimate(devices=describe_devices("nvidia", "GeForce RTX 4060")).prompt is None
    two = _estimate(devices=RTX_4090._replace(device_count=2), runtime="vllm").prompt
    one = _estimate(runtime="vllm").prompt
    assert one
    assert two
    assert two.expected == 2 * one.expected


def test_share_of_the_arithmetic_that_a_prompt_achieves_depends_on_the_engine() -> None:
    # The engines that share layers among devices are not measured: half of the arithmetic is assumed.
    alone, shared = _estimate().prompt, _estimate(runtime="vllm").prompt
    assert alone
    assert shared
    assert shared.expected == pytest.approx(alone.expected * 0.5 / 0.3)


def test_measurements_of_a_class_correct_the_estimate_and_narrow_its_range() -> None:
    plain = _estimate()
    ratios = [
        SpeedRatio("nvidia", RTX_4090.device_class, "llama.cpp", plain.generation.expected * 0.8, expected)
        for expected in [plain.generation.expected] * 40
    ]
    estimate = _estimate(corrections=learn_corrections(ratios))
    assert (plain.method, estimate.method) == ("roofline", "corrected")
    assert estimate.generation.expected == pytest.approx(0.8 * plain.generation.expected, rel=0.02)
    assert estimate.generation.high / estimate.generation.low < 0.7 * plain.generation.high / plain.generation.low
    assert "corrected by 0.80 from 40 measurements" in estimate.basis


@pytest.mark.parametrize(
    ("stated", "read", "share"),
    [
        ((None, None), (30, 3), 0.1),
        ((20, 5), (30, 3), 0.25),
        ((None, None), (30, None), None),
        ((None, None), (None, None), None),
        ((None, None), (3, 30), None),
    ],
)
def test_active_share_is_that_of_the_user_or_of_the_header(
    stated: tuple[int | None, int | None], read: tuple[int | None, int | None], share: float | None
) -> None:
    source = "hf://org/repo/file.gguf"
    spec = ModelSpec(source=source, total_parameters=stated[0], active_parameters=stated[1])
    status = ModelStatus(total_parameters=read[0], active_parameters=read[1])
    model = Model(metadata=ObjectMeta(name="tiny"), spec=spec, status=status)
    assert find_active_share(model) == share


def test_measured_speed_has_the_range_of_its_runs() -> None:
    record = MeasuredPerformance(tokens_per_second=50, runs=[48, 50, 53], node="a", measured_at="2026-11-26T22:00:00Z")
    estimate = build_measured_speed(record, "accelerator")
    assert (estimate.method, estimate.generation) == ("measured", (48, 50, 53))
    assert estimate.basis == "measured 2026-11-26T22:00:00Z on a"
    wild = build_measured_speed(MeasuredPerformance(tokens_per_second=50, runs=[1, 50, 900]), "cpu").generation
    assert wild.high <= 3.001 * wild.low


ANY_DEVICES = st.builds(
    ServingDevices,
    vendor=st.sampled_from(["nvidia", "amd", "intel", "intel-gaudi", "metal", "cpu"]),
    device_class=st.just("any"),
    device_count=st.integers(1, 16),
    bandwidth_bytes_per_second=st.integers(10**9, 10**14),
    flops=st.none() | st.floats(1e12, 1e16),
    cores=st.none() | st.integers(1, 256),
)


@given(
    layers=st.integers(1, 200),
    tensor_bytes=st.integers(1, 10**13),
    devices=ANY_DEVICES,
    runtime=st.sampled_from(sorted(RUNTIMES)),
    tokens=st.integers(1, 2_000_000),
)
def test_ranges_are_ordered_positive_and_at_most_threefold(
    layers: int, tensor_bytes: int, devices: ServingDevices, runtime: str, tokens: int
) -> None:
    layout = structs.replace(
        LLAMA_8B, tensor_bytes=tensor_bytes, layers=[structs.replace(LLAMA_8B.layers[0], count=layers)]
    )
    speed = estimate_speed(layout, ServingOptions(context_length=2_097_152), runtime, devices, filled_tokens=tokens)
    assert (speed is None) == (devices.vendor not in RUNTIMES[runtime].speed_priors)
    for speed_range in (speed.generation, speed.prompt) if speed else ():
        if speed_range:
            assert 0 < speed_range.low <= speed_range.expected <= speed_range.high <= 3.0001 * speed_range.low
    if speed:
        # No token is read faster than memory delivers its weights.
        bandwidth = devices.bandwidth_bytes_per_second or 0
        assert speed.generation.expected <= bandwidth * devices.device_count / tensor_bytes
