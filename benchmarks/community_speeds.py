"""Measurements that llmfit's community submitted, as rows that the speed estimate can be compared with.

A submission names a device and a tag of a model, and no sizes: they are read from the tag (`qwen2.5-coder:14b`,
`Qwen3-30B-A3B-Instruct-2507-Q4_K_M.gguf`), or from a short list of models whose tags name none. A row is dropped, and
counted by reason, if the tag does not say what was read from memory, or the submission does not say from which memory.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from benchmarks.llmfit_data import read_submissions
from crds.weights_header import Layers, Layout
from devices.chips import CHIPS
from devices.products import find_product
from fitness.serving_devices import ServingDevices

_GB: Final = 10**9
_BITS: Final[Mapping[str, float]] = MappingProxyType(
    {
        # llama.cpp, tools/quantize/README.md, Llama 3.1 8B.
        "q2_k": 3.16,
        "iq3_m": 3.76,
        "q3_k_m": 4.0,
        "iq4_xs": 4.46,
        "iq4_nl": 4.68,
        "q4_0": 4.55,
        "q4_k_m": 4.89,
        "q4_k_xl": 4.95,
        "q5_k_m": 5.70,
        "q6_k": 6.56,
        "q8_0": 8.50,
        # A scale for each 32 or 16 elements, and 64 with a bias in MLX.
        "mxfp4": 4.5,
        "nvfp4": 4.5,
        "mxfp8": 8.25,
        "4bit": 4.5,
        "8bit": 8.5,
        "awq": 4.5,
        "bf16": 16.0,
        "f16": 16.0,
    }
)
_QUANTIZATION: Final = re.compile(
    rf"(?:^|[-_.:])(?:ud-)?({'|'.join(sorted(_BITS, key=len, reverse=True))})(?=$|[-_.:])"
)
_SIZE: Final = re.compile(r"(?:^|[-_:. ])(e?)(\d+(?:\.\d+)?)(b|m)(?=a?\d|$|[-_.:])")
_ACTIVE: Final = re.compile(r"(?:[-_.:]|\d+b)a(\d+(?:\.\d+)?)(b|m)(?=$|[-_.:])")
_AGENT: Final = re.compile(r"(-latest)?(-v2ctx65k|-enfixed)*-agent-(gpu\d+|cpu)(:latest)?$|-hv-cpu-\d+k$")
_DASHED: Final = re.compile(r"(?<=[a-z])(\d)-(\d)(?=-\d)|(?<=-)(\d)-(\d)(?=b$)")
"""A decimal point that a tag writes as a dash: qwen2-5-7b."""
_EFFECTIVE: Final = MappingProxyType({"2": 2.3, "4": 4.5})
"""Parameters that Gemma reads, of those that it names effective; the others are looked up."""
_EXPERTS: Final = (
    (r"gpt-oss[-:]20b", 20.9, 3.6),
    (r"gpt-oss[-:]120b", 116.8, 5.1),
    (r"qwen3(-coder|-vl)?:30b", 30.5, 3.3),
    (r"qwen3[.-][5678]:?-?3[56]b", 35.0, 3.0),
    (r"gemma-?4:26b", 25.2, 3.8),
    (r"nemotron[-a-z0-9.]*:3[03]b", 31.6, 3.5),
    (r"ornith[-a-z0-9.:]*-?35b|-35b-|-36b-", 35.0, 3.0),
    (r"granite3.1-moe:3b", 3.3, 0.8),
    (r"granite3.1-moe:1b", 1.3, 0.4),
    (r"deepseek-v2[:-]16b|deepseek-coder-v2-lite", 15.7, 2.4),
    (r"lfm2[.-]?5[:-]8b", 8.3, 1.5),
    (r"glm-4\.7-flash", 30.0, 3.0),
    (r"qwen3-coder-next", 80.0, 3.0),
    (r"granite-?4(\.0)?[:-](tiny-h|h-tiny)", 7.0, 1.0),
    (r"granite-4\.0-h-small", 32.0, 9.0),
    (r"small-4-119b", 119.0, 6.5),
    (r"jamba2-mini", 52.0, 12.0),
)
"""Models with experts whose tags do not say so: parameters and active ones, in 10^9, by their publishers."""
_UNSIZED: Final = (
    ("phi-3.5-mini", 3.82),
    ("phi-3-medium", 13.96),
    ("phi-4-mini", 3.84),
    ("phi4-mini", 3.84),
    ("phi3:mini", 3.82),
    ("phi3-mini", 3.82),
    ("phi-4", 14.66),
    ("phi4", 14.66),
    ("mistral-nemo", 12.25),
    ("magistral-small", 23.6),
    ("devstral-small", 23.6),
    ("command-r7b", 8.03),
    ("llama3-groq-tool-use", 8.03),
)
_LAYERS: Final = ((0.1, 16), (0.5, 24), (1, 22), (3, 30), (8, 34), (14, 44), (32, 64), (70, 80), (1000, 80))
"""Layers of models in wide use by their parameters in 10^9: tags do not state them."""
_PROCESSOR_MEMORY: Final[Mapping[str, float]] = MappingProxyType(
    {
        "i5-3230M": 25.6,
        "i5-9500T": 41.6,
        "i7-1270P": 76.8,
        "i7-1365U": 76.8,
        "Ultra 7 258V": 136.5,
        "X7 358H": 136.5,
        "Ryzen 5 4600H": 51.2,
        "Ryzen 7 7730U": 51.2,
        "Ryzen 7 7840U": 89.6,
        "Ryzen 7 255": 89.6,
        "Ryzen AI 7 350": 89.6,
    }
)
"""Memory bandwidth of processors in GB/s by their makers, with two channels of the fastest memory that they take, which
not all of these machines have. It is also that of integrated devices."""
_COPY_SHARE: Final = 0.6
"""Share of it that a copy achieves, which is what a node agent measures and what integrated devices get as well."""
_VARIANTS: Final = MappingProxyType({"Apple M3 Max": 30, "Apple M5 Max": 40})
"""GPU cores of the submitted machines, which their memory or processor cores tell."""
_FULL: Final = 1.07
"""Weights above this share of the devices' memory do not fit even if a tag's size is rounded up."""
_BESIDE_GB: Final = 0.6


class CommunityRow(NamedTuple):
    """One measured model."""

    device: str
    """Name of the device, by which rows are held back."""
    devices: ServingDevices
    runtime: str
    tag: str
    layout: Layout
    active_share: float | None
    """None: a model without experts."""
    parameters: float
    tokens_per_second: float


class _Hardware(NamedTuple):
    """Where a row was measured."""

    device: str
    vendor: str
    gb_per_second: float
    memory_gb: float
    is_integrated: bool


def read_rows(dropped: Counter[str] | None = None) -> Iterator[CommunityRow]:
    """Yield all rows that say enough; count the others in `dropped` by reason."""
    counts = Counter[str]() if dropped is None else dropped
    for submission in read_submissions():
        for result in submission["results"]:
            row = _read_row(submission["hardware"], result)
            if isinstance(row, str):
                counts[row] += 1
            else:
                yield row


def _read_row(hardware: dict[str, Any], result: dict[str, Any]) -> CommunityRow | str:
    """Return the row, or the reason why it is dropped."""
    name = re.sub(r"\.gguf$", "", result["model"].split("/")[-1].lower())
    tag = _DASHED.sub(lambda match: f"{match[1] or match[3]}.{match[2] or match[4]}", _AGENT.sub("", name))
    size = _read_size(tag)
    runtime = _read_runtime(result["provider"], tag)
    bits = _read_bits(tag, result["provider"])
    if size is None:
        return "the tag states no size"
    if bits is None:
        return "the tag states no quantization"
    place = _read_hardware(hardware, runtime)
    if isinstance(place, str):
        return place
    total, active = size
    bytes_each = total * bits / 8
    if bytes_each + _BESIDE_GB > place.memory_gb * _FULL:
        return "weights do not fit into the devices"
    layout = Layout(
        tensor_bytes=round(bytes_each * _GB),
        vocabulary_size=0,
        embedding_size=0,
        attention_size=0,
        head_count=0,
        feed_forward_size=0,
        layers=[Layers(count=_guess_layers(total), key_elements=1024, value_elements=1024)],
        expert_outputs=1 if active else 0,
    )
    return CommunityRow(
        device=place.device,
        devices=ServingDevices(
            vendor=place.vendor,
            device_class=place.device,
            product=place.device,
            bandwidth_bytes_per_second=round(place.gb_per_second * _GB),
        ),
        runtime=runtime,
        tag=tag,
        layout=layout,
        active_share=active / total if active else None,
        parameters=total,
        tokens_per_second=result["avgTps"],
    )


def _read_runtime(provider: str, tag: str) -> str:
    if provider == "mlx" or (provider == "ollama" and "mlx" in tag):
        return "mlx-lm"
    return {"llamacpp": "llama.cpp"}.get(provider, provider)


def _read_size(tag: str) -> tuple[float, float | None] | None:
    """Return parameters and active ones in 10^9; the latter are None without experts."""
    for pattern, total, active in _EXPERTS:
        if re.search(pattern, tag):
            return total, active
    if match := _SIZE.search(tag):
        if match[1] and match[2] in _EFFECTIVE:
            return _EFFECTIVE[match[2]], None
        experts = _ACTIVE.search(tag)
        return _billions(match[2], match[3]), _billions(experts[1], experts[2]) if experts else None
    return next(((size, None) for name, size in _UNSIZED if name in tag), None)


def _billions(number: str, unit: str) -> float:
    return float(number) * (1 if unit == "b" else 1e-3)


def _read_bits(tag: str, provider: str) -> float | None:
    """Return bits of a weight; a tag of Ollama without a quantization has that of its library."""
    if match := _QUANTIZATION.search(tag):
        return _BITS[match[1]]
    if provider == "ollama":
        return 4.6 if "gpt-oss" in tag else _BITS["nvfp4" if "mlx" in tag else "q4_0" if "qat" in tag else "q4_k_m"]
    return {"vllm": _BITS["bf16"], "mlx": _BITS["4bit"]}.get(provider)


def _read_hardware(hardware: dict[str, Any], runtime: str) -> _Hardware | str:
    name, count = hardware["hardwareName"] or "", max(1, hardware["gpuCount"])
    memory_gb = (hardware["vramGb"] or 0) / count
    if name in CHIPS:
        variants = CHIPS[name]
        chip = next((variant for variant in variants if variant.gpu_cores in {None, _VARIANTS.get(name)}), None)
        # Metal gives a program three quarters of the memory.
        return _Hardware(name, "metal", chip.gb_per_second, memory_gb * 0.75, True) if chip else "unknown variant"
    vendor = "amd" if re.search("AMD|Radeon", name) else "nvidia" if re.search("NVIDIA|Tesla", name) else "intel"
    product = find_product(vendor, name.replace("(integrated)", ""), round(memory_gb * 1024) or None)
    if product is not None and product.gb_per_second is not None:
        if count > 1:
            return "several devices, of which the submission does not say how many were used"
        return _Hardware(product.name, vendor, product.gb_per_second, memory_gb, False)
    memory = next((gb for part, gb in _PROCESSOR_MEMORY.items() if part in hardware["cpu"]), None)
    if memory is None:
        return "unknown memory bandwidth"
    if vendor == "intel" and runtime == "ollama":
        # Ollama has no backend for them, and runs on the processor.
        return _Hardware(hardware["cpu"], "cpu", memory * _COPY_SHARE, hardware["ramGb"], True)
    return _Hardware(f"{name} of {hardware['cpu']}", vendor, memory * _COPY_SHARE, hardware["ramGb"], True)


def _guess_layers(parameters: float) -> int:
    for (less, fewer), (more, many) in itertools.pairwise(_LAYERS):
        if parameters <= more:
            return round(fewer + (many - fewer) * max(0.0, parameters - less) / (more - less))
    return _LAYERS[-1][1]
