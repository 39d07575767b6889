"""Fit is judged on free memory by the artifact's own bytes, and says what is missing and what would help."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from crds.serving import ServingOptions
from crds.size import size_text
from fitness.fit import FIT_LEVELS, Fit, FitLevel, assess_fit
from fitness.memory import Workload, estimate, estimate_pod
from fitness.serving_devices import ServingDevices, describe_devices
from tests.unit.fitness.test_speed import LLAMA_8B, QWEN3_30B, QWEN3_30B_ACTIVE

GIB = 2**30
CARD = describe_devices("nvidia", "NVIDIA GeForce RTX 4090", memory_bytes=24 * GIB)
DENSE = Workload(LLAMA_8B)
EXPERTS = Workload(QWEN3_30B)


def _assess(devices: ServingDevices = CARD, workload: Workload = DENSE, **more: Any) -> Fit:
    options = more.pop("options", ServingOptions())
    fit = assess_fit(workload, options, devices, **more)
    assert fit
    return fit


def _needed(workload: Workload = DENSE, count: int = 1, **options: Any) -> int:
    memory = estimate_pod(workload, ServingOptions(**options), count)
    assert memory
    assert memory.device_bytes_each
    return memory.device_bytes_each


@pytest.mark.parametrize(
    ("headroom", "level"),
    [(1.4, "perfect"), (1.31, "perfect"), (1.29, "good"), (1.11, "good"), (1.09, "marginal"), (1.0, "marginal")],
)
def test_level_follows_the_headroom(headroom: float, level: FitLevel) -> None:
    fit = _assess(CARD._replace(free_bytes=round(_needed() * headroom) + 1))
    assert (fit.level, fit.run_mode, fit.shortfall) == (level, "accelerator", "")
    assert fit.utilization == pytest.approx(1 / headroom, rel=0.001)
    assert fit.speed


def test_level_counts_free_memory_and_tells_that_of_an_idle_device() -> None:
    fit = _assess(CARD._replace(free_bytes=3 * GIB))
    assert (fit.level, fit.level_if_idle) == ("too_tight", "perfect")
    assert (fit.available_bytes, fit.speed) == (3 * GIB, None)
    short = size_text(_needed() - 3 * GIB)
    assert fit.shortfall == (
        f"needs {size_text(_needed())}, 3.0 GiB free on nvidia-geforce-rtx-4090x1: short {short}; it would fit if "
        "nothing else used the 24.0 GiB there"
    )


def test_shortfall_of_a_small_device_names_a_way_out_that_helps() -> None:
    devices = CARD._replace(memory_bytes=12 * GIB, free_bytes=12 * GIB)
    options = ServingOptions(context_length=131_072)
    fit = _assess(devices, options=options)
    assert fit.level == fit.level_if_idle == "too_tight"
    context = re.search(r"a contextLength of (\d+)", fit.shortfall)
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
    fit = _assess(CARD._replace(free_bytes=20 * GIB), small)
    assert (fit.level, fit.level_if_idle) == ("too_tight", "perfect")
    assert fit.shortfall.startswith(
        "needs 22.1 GiB, 20.0 GiB free on nvidia-geforce-rtx-4090x1: short 2.1 GiB; it would"
    )
    lower = ServingOptions(extra_args=["--gpu-memory-utilization", "0.5"])
    assert _assess(CARD._replace(free_bytes=20 * GIB), small, options=lower).level != "too_tight"
    assert _assess(CARD._replace(free_bytes=20 * GIB), small._replace(runtime="sglang")).level == "perfect"


def test_heads_that_devices_cannot_divide_do_not_fit() -> None:
    fit = _assess(CARD._replace(device_count=3), Workload(LLAMA_8B, "vllm"))
    assert fit.level == "too_tight"
    assert "does not divide the 32 attention heads" in fit.shortfall


@pytest.mark.parametrize(
    ("vendor", "product", "family", "refused"),
    [
        ("nvidia", "Tesla-V100-SXM2-32GB", "", "which is nvidia volta"),
        ("nvidia", "Tesla-V100-SXM2-32GB", "volta", "which is nvidia volta"),
        ("nvidia", "Card-Of-A-Reseller", "volta", "which is nvidia volta"),
        ("nvidia", "Card-Of-A-Reseller", "ada-lovelace", None),
        ("nvidia", "Card-Of-A-Reseller", "", None),
        ("nvidia", "NVIDIA-L40S", "", None),
        ("amd", "AMD_Instinct_MI250X", "", "which is amd cdna2"),
        ("amd", "74a1", "", None),
        ("cpu", "AMD EPYC", "", "where it takes unquantized"),
    ],
)
def test_weights_do_not_fit_on_an_architecture_that_cannot_serve_them(
    vendor: str, product: str, family: str, refused: str | None
) -> None:
    small = Workload(structs.replace(LLAMA_8B, tensor_bytes=10**9), "vllm", quantization="fp8")
    devices = describe_devices(vendor, product, memory_bytes=64 * GIB)._replace(family=family)
    fit = _assess(devices, small)
    assert (fit.level == fit.level_if_idle == "too_tight") == bool(refused)
    assert (refused or "") in fit.shortfall
    assert not refused or fit.shortfall.startswith("runtime vllm cannot serve fp8 weights on ")
    for quantization in ("", "bfloat16", "of-tomorrow"):
        assert _assess(devices, small._replace(quantization=quantization)).level != "too_tight"


def test_host_and_processor_need_all_of_the_estimate() -> None:
    whole = estimate(DENSE, ServingOptions())
    assert whole
    host = _assess(
        ServingDevices("metal", "apple-m2-max", memory_bytes=48 * GIB, free_bytes=40 * GIB),
        Workload(LLAMA_8B, "llama.cpp"),
    )
    assert (host.needed_bytes, host.level, host.run_mode) == (whole.total_bytes, "perfect", "accelerator")
    node = _assess(ServingDevices("cpu", "cpu-x8", memory_bytes=64 * GIB, free_bytes=60 * GIB))
    assert (node.needed_bytes, node.level, node.run_mode) == (whole.total_bytes, "good", "cpu")


@given(
    free=st.integers(0, 80 * GIB),
    more=st.integers(0, 40 * GIB),
    context=st.integers(512, 65_536),
    experts=st.booleans(),
)
def test_more_free_memory_never_worsens_a_fit(free: int, more: int, context: int, *, experts: bool) -> None:
    options = ServingOptions(context_length=context)
    workload, share = (EXPERTS, QWEN3_30B_ACTIVE) if experts else (DENSE, None)
    devices = CARD._replace(memory_bytes=200 * GIB)
    less, much = (
        _assess(devices._replace(free_bytes=size), workload, options=options, active_share=share)
        for size in (free, free + more)
    )
    assert FIT_LEVELS.index(much.level) <= FIT_LEVELS.index(less.level)
    assert (much.level == "too_tight") <= (less.level == "too_tight")
    for fit in (less, much):
        fits = fit.level != "too_tight"
        assert fits == (fit.needed_bytes <= fit.available_bytes)
        assert fits == (not fit.shortfall) == (fit.speed is not None)
        assert FIT_LEVELS.index(fit.level_if_idle) <= FIT_LEVELS.index(fit.level)
