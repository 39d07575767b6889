"""llmfit's estimates of the models of its catalog, beside ours of the same models, quantizations and contexts."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from benchmarks.llmfit_data import estimate_catalog, read_catalog
from crds.serving import ServingOptions
from crds.size import MIB
from crds.weights_header import Layers, Layout
from fitness.fit import BITS_PER_WEIGHT
from fitness.memory import Workload, estimate
from fitness.serving_devices import describe_devices
from fitness.speed import estimate_speed

PRODUCTS_COMPARED: Final = (
    ("NVIDIA GeForce RTX 4090", 24_564),
    ("NVIDIA GeForce RTX 2080", 8192),
    ("NVIDIA L4", 23_034),
    ("NVIDIA A100-SXM4-80GB", 81_920),
    ("NVIDIA H100 80GB HBM3", 81_559),
    ("NVIDIA RTX A1000", 8188),
    ("NVIDIA GeForce GTX 1080 Ti", 11_264),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", 8188),
    ("NVIDIA A40", 46_068),
    ("NVIDIA B200", 183_359),
)
"""Devices that both know, that llmfit takes for others, and that it does not know."""
_GB: Final = 10**9
_LEAST_BILLIONS: Final = 3.0
"""With a smaller model the second term of our estimate decides, which llmfit does not have."""
_DIMENSIONS: Final = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "parameters_raw")


class PeerMemory(NamedTuple):
    """Memory of one model by both."""

    name: str
    billions: float
    """Parameters in 10^9."""
    ratio: float
    """Ours by theirs."""


class PeerSpeed(NamedTuple):
    """Speeds of models on one device by both."""

    gb_per_second: float
    peer_gb_per_second: float | None
    """The bandwidth from which llmfit computes; None: it takes a constant instead."""
    ratios: list[float]
    """Ours by theirs."""


def compare_memory() -> list[PeerMemory]:
    """Compare the memory of dense models, which llmfit states in units of 10^9 bytes."""
    product, memory_mib = PRODUCTS_COMPARED[0]
    compared = []
    for row, layout in _dense_rows(product, memory_mib):
        options = ServingOptions(context_length=max(128, row["effective_context_length"]), parallel=1)
        estimated = estimate(Workload(layout), options)
        if estimated is not None:
            ours = estimated.total_bytes / _GB
            compared.append(PeerMemory(row["name"], row["params_b"], ours / row["memory_required_gb"]))
    return compared


def compare_speed(product: str, memory_mib: int) -> PeerSpeed:
    """Compare the speed of dense models on a device."""
    devices = describe_devices("nvidia", product, memory_bytes=memory_mib * MIB)
    ratios, peer_bandwidth = [], None
    for row, layout in _dense_rows(product, memory_mib):
        estimate = estimate_speed(layout, ServingOptions(), "llama.cpp", devices)
        if estimate is None or row["params_b"] < _LEAST_BILLIONS or row["run_mode"] != "GPU":
            continue
        peer_bandwidth = row["estimate_basis"]["gpu_bandwidth_gbps"]
        ratios.append(estimate.generation.expected / row["estimated_tps"])
    return PeerSpeed((devices.bandwidth_bytes_per_second or 0) / _GB, peer_bandwidth, ratios)


def count_understated_experts(product: str, memory_mib: int) -> tuple[int, int]:
    """Return how many models with experts llmfit puts whole on a device, and how many need less than their file."""
    rows = [row for row in estimate_catalog(product, memory_mib) if row["is_moe"] and row["run_mode"] == "GPU"]
    return len(rows), sum(row["memory_required_gb"] < row["disk_size_gb"] for row in rows if row["disk_size_gb"])


def _dense_rows(product: str, memory_mib: int) -> Iterator[tuple[dict[str, Any], Layout]]:
    """Yield llmfit's rows of dense models whose dimensions its catalog has, with a layout of the same weights."""
    entries = {entry["name"]: entry for entry in read_catalog()}
    for row in estimate_catalog(product, memory_mib):
        bits, entry = BITS_PER_WEIGHT.get(row["best_quant"] or ""), entries.get(row["name"])
        if bits is None or entry is None or row["runtime"] != "llama.cpp" or row["is_moe"]:
            continue
        if (layout := _build_layout(entry, bits)) is not None:
            yield row, layout


def _build_layout(entry: dict[str, Any], bits: float) -> Layout | None:
    """Return the layout of a catalog entry; the width of its feed-forward part follows from its parameters."""
    if not all(entry.get(name) for name in _DIMENSIONS):
        return None
    count, heads, width, vocabulary, parameters = (int(entry[name]) for name in _DIMENSIONS)
    head = entry.get("head_dim") or width // heads
    queries, kept = heads * head, (entry.get("num_key_value_heads") or heads) * head
    rest = parameters - vocabulary * width - count * width * 2 * (queries + kept)
    if rest <= 0:
        return None
    return Layout(
        tensor_bytes=round(parameters * bits / 8),
        vocabulary_size=vocabulary,
        embedding_size=width,
        attention_size=queries,
        head_count=heads,
        feed_forward_size=rest // (3 * width * count),
        layers=[Layers(count=count, key_elements=kept, value_elements=kept)],
    )
