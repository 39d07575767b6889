"""The fit of a model on the devices of a replica: run mode, level, speed, and what is missing, in words.

A level compares what the model needs, by its own header, with the memory that is free, because a card that another
process fills serves nobody. The level with nothing else on the devices is told beside it. The need is an upper bound
after prompts of the full context on all slots, so that little headroom is enough:

    perfect    all in the devices, which have 1.3 times the need
    good       all in the devices, or on the processor, with 1.1 times the need
    marginal   it fits
    too_tight  it does not

llmfit, a peer, compares with all memory of the devices, calls twice the size of a 4-bit quantization perfect and 1.2
times the need good; docs/fit-and-speed.md compares both.
"""

import functools
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from crds.serving import ServingOptions
from crds.size import size_text
from devices.products import find_family
from fitness.corrections import NO_CORRECTIONS, Corrections
from fitness.memory import Workload, estimate_pod, least_free_bytes, refuse_device_count, way_out
from fitness.serving_devices import ServingDevices
from fitness.speed import RunMode, SpeedEstimate, estimate_speed, find_run_mode
from runtimes.quantization import refuse_quantization

FitLevel = Literal["perfect", "good", "marginal", "too_tight"]
FIT_LEVELS: Final[tuple[FitLevel, ...]] = ("perfect", "good", "marginal", "too_tight")
"""From the best to the worst."""
PERFECT_HEADROOM: Final = 1.3
GOOD_HEADROOM: Final = 1.1
_BEST_LEVEL: Final[Mapping[RunMode, FitLevel]] = {"accelerator": "perfect", "cpu": "good"}
"""The best level of a run mode, however much memory is free: the others are slower than they need to be."""

BITS_PER_WEIGHT: Final[Mapping[str, float]] = {
    "Q8_0": 8.5008,
    "Q6_K": 6.5633,
    "Q5_K_M": 5.7036,
    "Q4_K_M": 4.8944,
    "Q3_K_M": 4.0,
    "Q2_K": 3.1593,
}
"""Quantizations of GGUF files from the best, with bits of a weight: llama.cpp, tools/quantize/README.md, Llama 3.1 8B;
Q3_K_M is not in that table, and its file of the same model has 4.02 GB."""


class Fit(NamedTuple):
    """The fit of one model on the devices of one replica, with what is free now."""

    level: FitLevel
    run_mode: RunMode
    needed_bytes: int
    """Memory that each device must have in this run mode, or the container or host if it has no devices."""
    available_bytes: int
    """The memory that is free there."""
    utilization: float
    """needed_bytes by available_bytes."""
    speed: SpeedEstimate | None
    """None: it is unknown, or the model does not fit."""
    shortfall: str
    """Message with the missing bytes and the way out; empty if the model fits."""
    level_if_idle: FitLevel
    """The level if nothing else ran there."""


class _GradedNeed(NamedTuple):
    """The memory that a replica needs on each device, and the level of its fit there."""

    level: FitLevel
    needed_bytes: int


def assess_fit(
    workload: Workload,
    options: ServingOptions,
    devices: ServingDevices,
    corrections: Corrections = NO_CORRECTIONS,
    *,
    active_share: float | None = None,
) -> Fit | None:
    """Return the fit of `workload` on the devices; None if its memory or that of the devices is unknown.

    The level is that with the memory that is free now, or with all memory if the free part is unknown. The fit also has
    the level that all memory would give, and either the speed or, if the model does not fit, what is missing.

    Args:
        workload: what the engine loads.
        options: serving options.
        devices: devices of one replica.
        corrections: what was learned from measurements.
        active_share: share of the parameters that a token uses, of a model with experts; None: unknown.
    """
    # If the free part is unknown, all memory counts as free.
    free_bytes = devices.free_bytes if devices.free_bytes is not None else devices.memory_bytes
    if free_bytes is None:
        return None

    # The level now, and the memory that is needed.
    need = _grade_need(workload, options, devices, free_bytes)
    if need is None:
        return None

    # The level if nothing else used the devices.
    idle_need = need
    whole_bytes = max(free_bytes, devices.memory_bytes or 0)
    if whole_bytes != free_bytes:
        idle_need = _grade_need(workload, options, devices, whole_bytes) or need

    # The speed, or what is missing; a model whose memory the user states may have no layout, and then no speed.
    speed, shortfall = None, ""
    if need.level == "too_tight":
        shortfall = describe_shortfall(workload, options, devices, need.needed_bytes, free_bytes)
    elif workload.layout is not None:
        layout, runtime = workload.layout, workload.runtime
        speed = estimate_speed(layout, options, runtime, devices, corrections, active_share=active_share)
    return Fit(
        level=need.level,
        run_mode=find_run_mode(devices),
        needed_bytes=need.needed_bytes,
        available_bytes=free_bytes,
        utilization=need.needed_bytes / free_bytes if free_bytes else float("inf"),
        speed=speed,
        shortfall=shortfall,
        level_if_idle=idle_need.level,
    )


def regrade_fit(idle: Fit, free_bytes: int, least_bytes: int = 0) -> Fit | None:
    """Return a fit with less free memory: only that, level and utilization change, so nothing is estimated anew.

    None: the model does not fit any more, or did not before; `assess_fit` then says what is missing.

    Args:
        idle: the fit with nothing else on the devices.
        free_bytes: memory that is free on each device.
        least_bytes: `least_free_bytes` of these devices.
    """
    if idle.level == "too_tight" or free_bytes < max(idle.needed_bytes, least_bytes):
        return None
    # What is needed, the speed and the level without others stay as they are.
    return idle._replace(
        level=grade_fit(idle.run_mode, idle.needed_bytes, free_bytes),
        available_bytes=free_bytes,
        utilization=idle.needed_bytes / free_bytes if free_bytes else float("inf"),
    )


def _count_pod_devices(devices: ServingDevices) -> int:
    """Return the number of devices with memory of their own that a pod has; 0 on a host or processor."""
    return 0 if devices.vendor in {"cpu", "metal"} else devices.device_count


def refuse_devices(workload: Workload, devices: ServingDevices) -> str | None:
    """Return why the engine cannot serve the weights on these devices however much memory they have, with the way out.

    None: it can, or it is not known that it cannot. An unknown quantization or architecture is no reason to refuse.
    """
    # 1. The number of devices; a host or processor counts as one.
    refused = refuse_device_count(workload, max(1, _count_pod_devices(devices)))
    if refused is not None or not workload.quantization:
        return refused

    # 2. The quantization, which not every device can compute with.
    return _refuse_weights(workload.quantization, workload.runtime, devices.vendor, devices.product, devices.family)


@functools.lru_cache(maxsize=4096)
def _refuse_weights(quantization: str, engine: str, vendor: str, product: str, family: str) -> str | None:
    """Return why an engine cannot serve weights on a product, or on the architecture of one that is not listed."""
    device = family if family and find_family(vendor, product) is None else product
    return refuse_quantization(quantization, engine, vendor, device)


def _grade_need(
    workload: Workload, options: ServingOptions, devices: ServingDevices, free_bytes: int
) -> _GradedNeed | None:
    """Return the memory that a replica needs, and its level with `free_bytes`; None if the need is unknown.

    Both are of each device, or of the container or host if it has no devices of its own.
    """
    count = _count_pod_devices(devices)
    memory = estimate_pod(workload, options, count)
    if memory is None:
        return None

    # Without devices, all memory is that of the container or host.
    needed = memory.container_bytes if memory.device_bytes_each is None else memory.device_bytes_each

    # The engine may be unable to serve these weights on such devices, however much is free.
    if refuse_devices(workload, devices) is not None:
        return _GradedNeed(level="too_tight", needed_bytes=needed)

    # An engine may refuse to start unless a part of each device is free, even if the model takes less.
    least = least_free_bytes(workload, options, devices.memory_bytes or 0) if count else 0
    if needed <= free_bytes < least:
        return _GradedNeed(level="too_tight", needed_bytes=least)
    return _GradedNeed(level=grade_fit(find_run_mode(devices), needed, free_bytes), needed_bytes=needed)


def grade_fit(mode: RunMode, needed_bytes: int, free_bytes: int) -> FitLevel:
    """Return the level of a need in free memory; on a processor, which is slow, at most good (`_BEST_LEVEL`)."""
    if needed_bytes > free_bytes:
        return "too_tight"
    # Headrooms are factors of the need, a little above 1.
    level: FitLevel = "marginal"
    if needed_bytes * PERFECT_HEADROOM <= free_bytes:
        level = "perfect"
    elif needed_bytes * GOOD_HEADROOM <= free_bytes:
        level = "good"
    # FIT_LEVELS begins with the best, so the one with the higher index is the worse.
    return max(level, _BEST_LEVEL[mode], key=FIT_LEVELS.index)


def describe_shortfall(
    workload: Workload, options: ServingOptions, devices: ServingDevices, needed_bytes: int, free_bytes: int
) -> str:
    """Return the message that a model does not fit, with the way out.

    Args:
        workload: what the engine loads.
        options: serving options.
        devices: devices of one replica.
        needed_bytes: the memory that it needs on each device, or of the container or host.
        free_bytes: the memory that is free there.
    """
    count, refused = _count_pod_devices(devices), refuse_devices(workload, devices)
    if refused is not None:
        return refused

    prefix = "each of " if count > 1 else ""
    words = (
        f"needs {size_text(needed_bytes)}, {size_text(free_bytes)} free on {prefix}{devices.device_class}: "
        f"short {size_text(needed_bytes - free_bytes)}"
    )

    # The way out: wait for free memory, or change the service.
    if devices.memory_bytes is not None and devices.memory_bytes >= needed_bytes:
        return f"{words}; it would fit if nothing else used the {size_text(devices.memory_bytes)} there"
    return f"{words}; {way_out(workload, options, free_bytes, count)}"
