"""Fit is judged on free memory by the artifact's own bytes, and says what is missing and what would help."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from crds.serving import ServingOptions
from crds.size import size_text
from fitness.fit import FIT_LEVELS, LADDER, Fit, FitLevel, advise_quantization, assess_fit
from fitness.memory import Workload, estimate, estimate_pod
from fitness.offload import Offload, find_offload
from fitness.serving_devices import ServingDevices, describe_devices, describe_host, describe_processor
from tests.unit.fitness.test_speed import LLAMA_8B, QWEN3_30B, QWEN3_30B_ACTIVE

GIB = 2**30
CARD = describe_devices("nvidia", "NVIDIA GeForce RTX 4090", memory_bytes=24 * GIB)
BESIDE = CARD._replace(host_memory_bytes=64 * GIB, host_bandwidth_bytes_per_second=60 * 10**9)
DENSE = Workload(LLAMA_8B)
EXPERTS = Workload(QWEN3_30B)


def _assess(devices: ServingDevices = CARD, workload: Workload = DENSE, **more: Any) -> Fit:
    options = more.pop("options", ServingOptions())
    found = assess_fit(workload, options, devices, **more)
    assert found
    return found


def _needed(workload: Workload = DENSE, count: int = 1, **options: Any) -> int:
    found = estimate_pod(workload, ServingOptions(**options), count)
    assert found
    assert found.device_bytes_each
    return found.device_bytes_each


@pytest.mark.parametrize(
    ("headroom", "level"),
    [(1.4, "perfect"), (1.31, "perfect"), (1.29, "good"), (1.11, "good"), (1.09, "marginal"), (1.0, "marginal")],
)
def test_level_follows_the_headroom(headroom: float, level: FitLevel) -> None:
    found = _assess(CARD._replace(free_bytes=round(_needed() * headroom) + 1))
    assert (found.level, found.run_mode, found.shortfall) == (level, "accelerator", "")
    assert found.utilization == pytest.approx(1 / headroom, rel=0.001)
    assert found.speed


def test_level_counts_free_memory_and_tells_that_of_an_idle_device() -> None:
    found = _assess(CARD._replace(free_bytes=3 * GIB))
    assert (found.level, found.level_if_idle) == ("too_tight", "perfect")
    assert (found.available_bytes, found.speed) == (3 * GIB, None)
    short = size_text(_needed() - 3 * GIB)
    assert found.shortfall == (
        f"needs {size_text(_needed())}, 3.0 GiB free on nvidia-geforce-rtx-4090x1: short {short}; it would fit if "
        "nothing else used the 24.0 GiB there"
    )


def test_shortfall_of_a_small_device_names_a_way_out_that_helps() -> None:
    devices = CARD._replace(memory_bytes=12 * GIB, free_bytes=12 * GIB)
    options = ServingOptions(context_length=131_072)
    found = _assess(devices, options=options)
    assert found.level == found.level_if_idle == "too_tight"
    context = re.search(r"a contextLength of (\d+)", found.shortfall)
    assert context
    assert _assess(devices, options=structs.replace(options, context_length=int(context[1]))).level != "too_tight"


def test_unknown_memory_has_no_fit() -> None:
    assert assess_fit(DENSE, ServingOptions(), CARD._replace(memory_bytes=None)) is None
    assert assess_fit(Workload(None), ServingOptions(), CARD) is None
    assert assess_fit(Workload(LLAMA_8B, "generic"), ServingOptions(), CARD) is None


def test_memory_counts_as_free_where_nothing_reports_the_free_part() -> None:
    assert _assess(CARD._replace(free_bytes=None)).available_bytes == 24 * GIB
    assert _assess(CARD._replace(free_bytes=0)).level == "too_tight"


def test_vllm_needs_its_share_of_the_device_to_be_free() -> None:
    small = Workload(structs.replace(LLAMA_8B, tensor_bytes=10**9), "vllm")
    assert _assess(CARD, small).level == "perfect"
    found = _assess(CARD._replace(free_bytes=20 * GIB), small)
    assert (found.level, found.level_if_idle) == ("too_tight", "perfect")
    assert found.shortfall.startswith(
        "needs 22.1 GiB, 20.0 GiB free on nvidia-geforce-rtx-4090x1: short 2.1 GiB; it would"
    )
    lower = ServingOptions(extra_args=["--gpu-memory-utilization", "0.5"])
    assert _assess(CARD._replace(free_bytes=20 * GIB), small, options=lower).level != "too_tight"
    assert _assess(CARD._replace(free_bytes=20 * GIB), small._replace(runtime="sglang")).level == "perfect"


def test_heads_that_devices_cannot_divide_do_not_fit() -> None:
    found = _assess(CARD._replace(device_count=3), Workload(LLAMA_8B, "vllm"))
    assert found.level == "too_tight"
    assert "does not divide the 32 attention heads" in found.shortfall


def test_experts_are_left_in_host_memory_before_layers_are() -> None:
    small = BESIDE._replace(free_bytes=12 * GIB)
    found = _assess(small, EXPERTS, active_share=QWEN3_30B_ACTIVE)
    assert (found.run_mode, found.shortfall) == ("moe_offload", "")
    assert found.level in {"good", "marginal"}
    assert found.needed_bytes <= 12 * GIB
    layers = _assess(small, EXPERTS._replace(layout=structs.replace(QWEN3_30B, expert_outputs=0)))
    assert (layers.run_mode, layers.level) == ("partial_offload", "marginal")
    assert found.speed
    assert layers.speed
    assert found.speed.generation.expected > 2 * layers.speed.generation.expected
    assert (found.speed.run_mode, layers.speed.run_mode) == ("moe_offload", "partial_offload")


def test_experts_in_host_memory_leave_headroom_in_the_device() -> None:
    needed = _needed(EXPERTS)
    found = _assess(BESIDE._replace(free_bytes=needed - 1, memory_bytes=needed), EXPERTS, active_share=QWEN3_30B_ACTIVE)
    assert (found.run_mode, found.level, found.level_if_idle) == ("moe_offload", "good", "good")
    assert found.needed_bytes * 1.1 <= needed
    whole = _assess(CARD._replace(free_bytes=needed), EXPERTS, active_share=QWEN3_30B_ACTIVE)
    assert (whole.run_mode, whole.level) == ("accelerator", "marginal")


def test_headroom_is_not_bought_by_leaving_whole_layers_to_the_host() -> None:
    share = 0.9
    free = _needed(EXPERTS) - round(0.62 * QWEN3_30B.tensor_bytes)
    found = _assess(BESIDE._replace(free_bytes=free), EXPERTS, active_share=share)
    assert (found.run_mode, found.level) == ("moe_offload", "marginal")


def _offload(workload: Workload, in_devices: float, *, with_cache: bool, **more: Any) -> Offload | None:
    """Return the division with room for this share of the weights beside all else."""
    found = estimate_pod(workload, ServingOptions(), 1)
    assert found
    assert found.device
    weights, cache = found.device.parts.weights_bytes, found.device.parts.cache_bytes
    rest = _needed(workload) - weights - cache
    free = rest + round(cache + weights * in_devices if with_cache else (weights + cache) * in_devices)
    return find_offload(workload, ServingOptions(), more.pop("devices", BESIDE), free, **more)


def test_device_without_room_for_attention_gets_no_experts_offload() -> None:
    enough = _offload(EXPERTS, 0.06, with_cache=True, active_share=QWEN3_30B_ACTIVE)
    assert enough
    assert enough.place.run_mode == "moe_offload"
    # Beside attention the device has the experts of whole layers.
    attention, layer = (
        _offload(EXPERTS, each, with_cache=True, active_share=QWEN3_30B_ACTIVE) for each in (0.05, 0.07)
    )
    assert attention
    assert layer
    assert enough.place.device_share == attention.place.device_share < layer.place.device_share
    assert _offload(EXPERTS, 0.03, with_cache=True, active_share=QWEN3_30B_ACTIVE) is None


@pytest.mark.parametrize(("workload", "share"), [(DENSE, None), (EXPERTS, QWEN3_30B_ACTIVE)], ids=["dense", "experts"])
def test_host_must_have_room_for_what_the_devices_have_not(workload: Workload, share: float | None) -> None:
    found = _offload(workload, 0.5, with_cache=False, active_share=share)
    assert found
    just = BESIDE._replace(host_memory_bytes=found.host_bytes)
    assert _offload(workload, 0.5, with_cache=False, active_share=share, devices=just) == found
    less = BESIDE._replace(host_memory_bytes=found.host_bytes - 1)
    assert _offload(workload, 0.5, with_cache=False, active_share=share, devices=less) is None


def test_few_layers_in_the_device_are_not_worth_it() -> None:
    assert _offload(DENSE, 0.2, with_cache=False)
    assert _offload(DENSE, 0.08, with_cache=False) is None


def test_model_with_a_draft_is_not_divided() -> None:
    draft = structs.replace(LLAMA_8B, tensor_bytes=10**8, layers=[structs.replace(LLAMA_8B.layers[0], count=1)])
    assert _assess(BESIDE._replace(free_bytes=5 * GIB), DENSE).run_mode == "partial_offload"
    assert _assess(BESIDE._replace(free_bytes=5 * GIB), DENSE._replace(draft=draft)).level == "too_tight"


@pytest.mark.parametrize(
    ("devices", "workload"),
    [
        (BESIDE._replace(host_memory_bytes=None), DENSE),
        (BESIDE._replace(host_memory_bytes=2 * GIB), DENSE),
        (BESIDE, Workload(LLAMA_8B, "vllm")),
        (BESIDE._replace(free_bytes=GIB), DENSE),
    ],
    ids=["unknown host", "small host", "engine without offload", "no room for a layer"],
)
def test_model_that_cannot_be_divided_is_too_tight(devices: ServingDevices, workload: Workload) -> None:
    free = min(devices.free_bytes or 4 * GIB, 4 * GIB)
    assert _assess(devices._replace(free_bytes=free), workload).level == "too_tight"


def test_host_and_processor_need_all_of_the_estimate() -> None:
    whole = estimate(DENSE, ServingOptions())
    assert whole
    host = _assess(
        describe_host("Apple M2 Max", 38, 64 * GIB, budget_bytes=48 * GIB, free_bytes=40 * GIB),
        Workload(LLAMA_8B, "llama.cpp"),
    )
    assert (host.needed_bytes, host.level, host.run_mode) == (whole.total_bytes, "perfect", "accelerator")
    node = _assess(describe_processor("", 8, memory_bytes=64 * GIB, free_bytes=60 * GIB, bandwidth=10**10))
    assert (node.needed_bytes, node.level, node.run_mode) == (whole.total_bytes, "good", "cpu")


def test_quantization_advice_takes_the_best_that_fits_well() -> None:
    for free_gib, best in ((24, "Q8_0"), (10.5, "Q6_K"), (8, "Q5_K_M")):
        devices = CARD._replace(free_bytes=round(free_gib * GIB))
        found = advise_quantization(DENSE, ServingOptions(), devices, 8_030_000_000)
        assert found
        assert found.best
        assert (found.best.quantization, found.best.fit.level in {"perfect", "good"}) == (best, True)
        assert [step.quantization for step in found.steps] == [name for name, _ in LADDER]
        sizes = [step.fit.needed_bytes for step in found.steps]
        assert sizes == sorted(sizes, reverse=True)
        speeds = [step.fit.speed.generation.expected for step in found.steps if step.fit.speed]
        assert speeds == sorted(speeds)


def test_quantization_advice_prefers_a_smaller_one_in_the_device_to_experts_in_memory() -> None:
    devices = BESIDE._replace(free_bytes=24 * GIB)
    found = advise_quantization(EXPERTS, ServingOptions(), devices, 30_500_000_000, active_share=QWEN3_30B_ACTIVE)
    assert found
    assert found.best
    by_name = {step.quantization: step.fit for step in found.steps}
    assert (by_name["Q8_0"].run_mode, by_name["Q8_0"].level) == ("moe_offload", "good")
    assert (found.best.quantization, found.best.fit.run_mode) == ("Q5_K_M", "accelerator")
    assert found.best.fit.level in {"perfect", "good"}
    tiny = devices._replace(free_bytes=5 * GIB)
    offloaded = advise_quantization(EXPERTS, ServingOptions(), tiny, 30_500_000_000, active_share=QWEN3_30B_ACTIVE)
    assert offloaded
    assert offloaded.best
    assert (offloaded.best.quantization, offloaded.best.fit.run_mode) == ("Q8_0", "moe_offload")


def test_quantization_advice_without_a_fit_names_none() -> None:
    found = advise_quantization(DENSE, ServingOptions(), CARD._replace(free_bytes=2 * GIB), 8_030_000_000)
    assert found
    assert found.best is None
    assert all(step.fit.shortfall for step in found.steps)
    assert advise_quantization(Workload(LLAMA_8B, "vllm"), ServingOptions(), CARD, 8_030_000_000) is None
    assert advise_quantization(Workload(None), ServingOptions(), CARD, 1) is None


def test_quantization_advice_falls_back_to_what_fits_barely() -> None:
    needed = _needed(Workload(structs.replace(LLAMA_8B, tensor_bytes=round(8.03e9 * LADDER[-1][1] / 8))))
    found = advise_quantization(DENSE, ServingOptions(), CARD._replace(free_bytes=needed + 1), 8_030_000_000)
    assert found
    assert found.best
    assert (found.best.quantization, found.best.fit.level) == ("Q2_K", "marginal")


@given(
    free=st.integers(0, 80 * GIB),
    more=st.integers(0, 40 * GIB),
    context=st.integers(512, 65_536),
    host=st.none() | st.integers(0, 128 * GIB),
    experts=st.booleans(),
)
def test_more_free_memory_never_worsens_a_fit(
    free: int, more: int, context: int, host: int | None, *, experts: bool
) -> None:
    options = ServingOptions(context_length=context)
    workload, share = (EXPERTS, QWEN3_30B_ACTIVE) if experts else (DENSE, None)
    devices = BESIDE._replace(memory_bytes=200 * GIB, host_memory_bytes=host)
    less, much = (
        _assess(devices._replace(free_bytes=each), workload, options=options, active_share=share)
        for each in (free, free + more)
    )
    if less.run_mode == much.run_mode:
        assert FIT_LEVELS.index(much.level) <= FIT_LEVELS.index(less.level)
    assert (much.level == "too_tight") <= (less.level == "too_tight")
    for found in (less, much):
        fits = found.level != "too_tight"
        assert fits == (found.needed_bytes <= found.available_bytes)
        assert fits == (not found.shortfall) == (found.speed is not None)
        assert FIT_LEVELS.index(found.level_if_idle) <= FIT_LEVELS.index(found.level)
