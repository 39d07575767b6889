"""Estimator of the speed of a model on hardware where it may never have run.

Each token of an answer reads all active weights and the cache once, so that memory bandwidth bounds its speed, and
starting the kernels of a layer takes time however small the layer is. That is a roofline with two terms:

    seconds of a token = bytes that are read / (bandwidth x efficiency) + layers x overhead of a layer

A prompt is computed in batches, so that arithmetic bounds its speed. What was measured on a device class corrects the
estimate (`fitness/corrections.py`). Without bandwidth there is no estimate: a constant instead of it is wrong by up to
a factor of five (docs/fit-and-speed.md), and nobody sees it.
"""

import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from crds.model import Model
from crds.serving import ServingOptions
from crds.size import size_text
from crds.weights_header import Layout
from devices.products import find_family
from fitness.corrections import NO_CORRECTIONS, Correction, Corrections
from fitness.performance import MeasuredPerformance
from fitness.serving_devices import ServingDevices
from runtimes.llama_estimate import token_bytes
from runtimes.registry import find_runtime

RunMode = Literal["accelerator", "cpu"]
"""Where the weights are: all in devices, or in memory where there are no devices."""
SpeedMethod = Literal["measured", "corrected", "roofline"]
"""measured: this model on this device class; corrected: other models on the class or its vendor; roofline: neither."""

_FAMILY_EFFICIENCY: Final[Mapping[str, float]] = {"pascal": 0.5}
"""Factor for architectures that unpack quantized weights more slowly than they read them, having no matrix units: from
0.3 on a GTX 1080 Ti to 0.8 on a P40."""
_EXPERTS_EFFICIENCY: Final = 0.85
"""Factor for models with experts: what is read of each is small and scattered."""
_REDUCE_MS: Final = 0.03
"""Two exchanges between the devices for each layer that they share."""
_CORE_BYTES_PER_SECOND: Final = 8e9
"""Weights that one core unpacks and multiplies in a second, however fast the memory is: llama.cpp b11549 on a Xeon of
2026 with AVX-512 does 7 GB with Q8_0 and 12 GB with F16."""
_PROMPT_EFFICIENCY: Final[Mapping[bool, float]] = {True: 0.5, False: 0.3}
"""Share of the arithmetic speed that a prompt achieves, by `Runtime.divides_layers`: with llama.cpp 0.34 on an
RTX 3090 and 0.25 on an RTX 4090 (its pull requests 7860 and 7716); assumed for the others."""
_PROMPT_SPREAD: Final = 0.45
_TYPICAL_TOKENS: Final = 512
"""Tokens in the cache while speed is measured: a short question, and half of the answer."""
_WIDTH: Final = 1.645
"""Standard deviations on each side of the expectation: nine of ten measurements of a normal distribution."""
_LARGEST_RATIO: Final = 3.0
"""Upper end of a range by its lower one: a wider range helps nobody to choose."""


class SpeedRange(NamedTuple):
    """Tokens a second."""

    low: float
    expected: float
    high: float


class SpeedEstimate(NamedTuple):
    """The speed of one stream, and how it is known."""

    generation: SpeedRange
    prompt: SpeedRange | None
    """Prompt tokens a second; None: the arithmetic speed of the devices is unknown."""
    method: SpeedMethod
    run_mode: RunMode
    basis: str
    """The figures behind it, for people."""
    measurements: int = 0
    """Number of measurements of other models by which it is corrected."""


def find_run_mode(devices: ServingDevices) -> RunMode:
    """Return where the weights of a replica on these devices are."""
    return "cpu" if devices.vendor == "cpu" else "accelerator"


def estimate_speed(
    layout: Layout,
    options: ServingOptions,
    runtime: str,
    devices: ServingDevices,
    corrections: Corrections = NO_CORRECTIONS,
    *,
    active_share: float | None = None,
    filled_tokens: int | None = None,
) -> SpeedEstimate | None:
    """Estimate how fast one stream (one request at a time) generates tokens, and how fast its prompt is computed.

    1. Count the bytes that each token reads: the weights that it uses, and the cache of the tokens before it.
    2. Compute the seconds that reading them takes on these devices, without corrections.
    3. Correct them by what was measured on devices of the same class or vendor.

    None: the bandwidth, the active share or the size of the weights is unknown, or the engine's efficiency on such
    devices is.

    Args:
        layout: layout of the model, from the artifact's header.
        options: serving options.
        runtime: the engine.
        devices: devices of one replica.
        corrections: what was learned from measurements.
        active_share: share of the parameters that a token uses, of a model with experts; None: unknown.
        filled_tokens: tokens in the cache; None: as while speeds are measured, with a short prompt.
    """
    # Count the bytes that each token reads; a model without experts uses all its weights for each.
    used_share = active_share if layout.expert_outputs else 1.0
    if used_share is None or not 0 < used_share <= 1 or not layout.tensor_bytes:
        return None
    reads = _TokenReads(
        weights_bytes=layout.tensor_bytes * used_share,
        # While speeds are measured, prompts are short: _TYPICAL_TOKENS are in the cache.
        cache_bytes=_count_cache_bytes(layout, options, min(filled_tokens or _TYPICAL_TOKENS, options.context_tokens)),
        layers=sum(layer.count for layer in layout.layers),
        active_share=used_share,
    )

    seconds = _compute_token_seconds(reads, runtime, devices)
    if seconds is None:
        return None

    correction = corrections.find(devices.vendor, devices.device_class, runtime)
    return SpeedEstimate(
        generation=_build_range(correction.ratio / seconds, correction.spread),
        prompt=_estimate_prompt(layout, runtime, devices),
        method="corrected" if correction.measurements else "roofline",
        run_mode=find_run_mode(devices),
        basis=_describe_basis(reads, runtime, devices, correction),
        measurements=correction.measurements,
    )


def correct_speed(estimate: SpeedEstimate, correction: Correction) -> SpeedEstimate:
    """Return an estimate with a correction applied, as `estimate_speed` applies it, without estimating anew.

    Only an uncorrected estimate (method `roofline`: by bandwidth and bytes alone) is changed. Any other is returned as
    it is, and so is every one if the correction was learned from no measurement.
    """
    if estimate.method != "roofline" or not correction.measurements:
        return estimate
    return estimate._replace(
        generation=_build_range(estimate.generation.expected * correction.ratio, correction.spread),
        method="corrected",
        basis=estimate.basis + _describe_correction(correction),
        measurements=correction.measurements,
    )


def find_active_share(model: Model) -> float | None:
    """Return the share of a model's parameters that each token uses, as of a model with experts only some are active.

    Both numbers are those that the user states in the Model, else those of the weights' header. None: one of them is
    unknown, or more parameters are active than there are.
    """
    total = model.spec.total_parameters or model.status.total_parameters
    active = model.spec.active_parameters or model.status.active_parameters
    if not total or not active or active > total:
        return None
    return active / total


def build_measured_speed(performance: MeasuredPerformance, run_mode: RunMode) -> SpeedEstimate:
    """Return a measurement in the form of an estimate; its range is from the slowest run to the fastest.

    However far the runs differ, the range is never wider than that of an estimate can be (`_LARGEST_RATIO`).
    """
    expected, prompt = performance.tokens_per_second, performance.prompt_tokens_per_second
    rates, largest_factor = [*performance.runs, expected], math.sqrt(_LARGEST_RATIO)
    # Each end is at most the root of _LARGEST_RATIO away, so the ends are at most _LARGEST_RATIO apart.
    low = max(min(rates), expected / largest_factor)
    high = min(max(rates), expected * largest_factor)
    return SpeedEstimate(
        generation=SpeedRange(low=low, expected=expected, high=high),
        prompt=SpeedRange(low=prompt, expected=prompt, high=prompt) if prompt else None,
        method="measured",
        run_mode=run_mode,
        basis=f"measured {performance.measured_at or 'at an unknown time'} "
        f"on {performance.node or 'a node of this class'}",
    )


class _TokenReads(NamedTuple):
    """Bytes that a token reads, and the layers that it passes."""

    weights_bytes: float
    cache_bytes: int
    layers: int
    active_share: float
    """Share of the weights that a token uses."""


def _compute_token_seconds(reads: _TokenReads, runtime: str, devices: ServingDevices) -> float | None:
    """Return the seconds that one token takes, without corrections: time to read its bytes, and overhead of each layer.

    None: the bandwidth of the devices is unknown, or there is no prior, which is the known habit of this engine on
    devices of this vendor.
    """
    bandwidth, prior = devices.bandwidth_bytes_per_second, find_runtime(runtime).speed_priors.get(devices.vendor)
    if not bandwidth or prior is None:
        return None

    # With experts, what is read of each is small and scattered, which is slower (_EXPERTS_EFFICIENCY).
    bytes_per_second = bandwidth * prior.efficiency * (_EXPERTS_EFFICIENCY if reads.active_share < 1 else 1.0)
    # Each layer takes `layer_ms` beside the reading.
    layers_seconds = reads.layers * prior.layer_ms / 1000

    if find_run_mode(devices) == "accelerator":
        family = find_family(devices.vendor, devices.product)
        # Some old architectures unpack quantized weights more slowly than they read them.
        bytes_per_second *= _FAMILY_EFFICIENCY.get(family or "", 1.0)
        if devices.device_count > 1 and find_runtime(runtime).divides_layers:
            # All devices read their part of a layer at once, and then exchange the results. Without this division
            # they take turns, so that more devices are not faster.
            bytes_per_second *= devices.device_count
            layers_seconds += reads.layers * _REDUCE_MS / 1000
    elif devices.cores:
        # On a processor, the slower of memory and cores decides.
        bytes_per_second = min(bytes_per_second, devices.cores * _CORE_BYTES_PER_SECOND)

    return (reads.weights_bytes + reads.cache_bytes) / bytes_per_second + layers_seconds


def _count_cache_bytes(layout: Layout, options: ServingOptions, tokens: int) -> int:
    """Return the bytes of the cache that a new token reads when `tokens` tokens are in it.

    A layer with a sliding window reads at most the tokens of its window, and a recurrent layer a state of fixed size.
    """
    return sum(
        kind.count * (min(tokens, kind.window or tokens) * token_bytes(kind, options) + kind.state_bytes)
        for kind in layout.layers
    )


def _count_layer_parameters(layout: Layout) -> int:
    """Return the number of parameters that a token uses in all layers, as the sum of the sizes of their matrices.

    Each matrix maps between the width of the model and an inner size: queries and output of attention, keys and values,
    and the three matrices of the feed-forward network.
    """
    width, count = layout.embedding_size, sum(layer.count for layer in layout.layers)
    query_and_output = 2 * layout.attention_size * count
    key_and_value = sum(layer.count * (layer.key_elements + layer.value_elements) for layer in layout.layers)
    feed_forward = 3 * layout.feed_forward_size * count
    return width * (query_and_output + key_and_value + feed_forward)


def _estimate_prompt(layout: Layout, runtime: str, devices: ServingDevices) -> SpeedRange | None:
    """Estimate how many tokens of a prompt are computed in a second, which the arithmetic speed of devices bounds.

    None: that speed or the size of the layers is unknown, or the replica has no devices and computes on the processor.
    """
    parameters = _count_layer_parameters(layout)
    if not devices.flops or not parameters or find_run_mode(devices) == "cpu":
        return None
    divides_layers = find_runtime(runtime).divides_layers
    # _PROMPT_EFFICIENCY: share of the arithmetic speed that a prompt achieves. Devices that take turns add no speed.
    flops = devices.flops * (devices.device_count if divides_layers else 1) * _PROMPT_EFFICIENCY[divides_layers]
    # Each token takes a multiplication and an addition for each parameter.
    return _build_range(flops / (2 * parameters), _PROMPT_SPREAD)


def _build_range(expected: float, spread: float) -> SpeedRange:
    """Return the range in which nine of ten measurements lie, as far as it is of use (`_LARGEST_RATIO`)."""
    factor = min(math.exp(_WIDTH * spread), math.sqrt(_LARGEST_RATIO))
    return SpeedRange(low=expected / factor, expected=expected, high=expected * factor)


def _describe_basis(reads: _TokenReads, runtime: str, devices: ServingDevices, correction: Correction) -> str:
    """Return the figures behind an estimate for people, such as `4.6 GiB for each token at 3350 GB/s`."""
    words = f"{size_text(round(reads.weights_bytes + reads.cache_bytes))} for each token"
    words += f" at {(devices.bandwidth_bytes_per_second or 0) / 1e9:.4g} GB/s"
    if devices.device_count > 1:
        shared = "which share each layer" if find_runtime(runtime).divides_layers else "which take turns by layer"
        words += f" of each of {devices.device_count} devices, {shared}"
    return words + _describe_correction(correction)


def _describe_correction(correction: Correction) -> str:
    """Return the end of the text of `_describe_basis`; empty if nothing is corrected."""
    if not correction.measurements:
        return ""
    return f"; corrected by {correction.ratio:.2f} from {correction.measurements} measurements"
