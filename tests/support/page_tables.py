"""The tables of docs/concepts.md, docs/engines and docs/vendors, rendered from the tables of the product.

`make golden` writes them between two marks of a page, so that a page can neither lack nor contradict an entry.
"""

import textwrap
from collections.abc import Iterable, Mapping
from typing import Final

from controller.services.pods.device_claims import ACCEPTED_SHARE
from crds.size import MIB
from devices.product_table import PRODUCTS, Product
from devices.vendors import VENDORS, Exporter, Vendor
from runtimes.output_parsers import SGLANG_PARSERS, VLLM_PARSERS, ParserTable
from runtimes.pod import EngineMetrics, EnginePod
from runtimes.registry import RUNTIMES
from runtimes.runtime import Runtime

BEGIN: Final = "<!-- From here on `make golden` writes: -->"
END: Final = "<!-- Until here. -->"
_FORMATS: Final = {
    "gguf": "GGUF",
    "safetensors": "safetensors",
    "mlx": "MLX",
    "ollama": "models of Ollama's library",
}
_METRICS: Final = {
    "requests_running": "requests that run",
    "requests_waiting": "requests that wait",
    "prompt_tokens": "tokens of prompts",
    "generated_tokens": "generated tokens",
    "requests": "requests that have ended",
    "cache_usage": "share of the KV cache in use",
    "first_token_seconds": "time to the first token",
    "request_seconds": "time of a request",
}
_PARSERS: Final = {"vllm": VLLM_PARSERS, "sglang": SGLANG_PARSERS}
_MODELS: Final = {
    "plain": "without tools, thinking in `<think>`: DeepSeek R1 and its distils",
    "hermes": "JSON in `<tool_call>`: Hermes, Qwen2.5, Qwen3, QwQ, Granite 4",
    "qwen3-coder": "XML in `<tool_call>`: Qwen3-Coder, Qwen3.5, Granite 4.2",
    "nemotron-3": "Nemotron 3",
    "glm-4.5": "GLM 4.5, 4.6",
    "glm-4.7": "GLM 4.7, 5",
    "minimax-m2": "MiniMax M2",
    "gpt-oss": "gpt-oss",
    "gemma-4": "Gemma 4",
    "seed-oss": "Seed-OSS",
    "mistral": "Mistral with a tokenizer of Hugging Face; it thinks where the template has `[THINK]`",
    "llama-3": "Llama 3.1, 3.2, 3.3",
    "granite": "Granite 3",
    "lfm2": "LFM2, LFM2.5",
}
"""Models by form of their chat template."""


def describe_engine(runtime: Runtime) -> str:
    """Return the tables of an engine's page."""
    pod = runtime.pod
    places = [f"in pods on {_describe_places(runtime)}"] if pod else []
    facts = {
        "formats": ", ".join(_FORMATS[file_format] for file_format in sorted(runtime.formats)),
        "runs": "; ".join([*places, *(["on hosts (accelerator metal)"] if runtime.on_hosts else [])]),
        "modes": ", ".join(sorted(runtime.modes)),
        "settings beside the context length": ", ".join(sorted(runtime.settings)) or "none",
        "types of the KV cache": ", ".join(sorted(runtime.cache_types)),
    }
    if runtime.on_hosts:
        facts |= {"on a host": runtime.install_hint}
    if pod is not None:
        facts |= _describe_pod(pod)
    parts = [_table(("", ""), facts.items())]
    if pod is not None and pod.images:
        parts += [_describe_images(runtime)]
    if pod is not None and pod.metrics is not None:
        parts += [_describe_metrics(pod.metrics)]
    if runtime.quantizations:
        parts += [_table(("accelerator", "quantizations"), _quantization_rows(runtime.quantizations))]
    if runtime.name in _PARSERS:
        parts += [_describe_parsers(_PARSERS[runtime.name])]
    return "\n".join([*parts, _wrap(_describe_tuning(runtime))])


def describe_pairs() -> str:
    """Return the table of docs/concepts.md: the engines and where they run."""
    rows = []
    for name, runtime in RUNTIMES.items():
        formats = ", ".join(_FORMATS[file_format] for file_format in sorted(runtime.formats))
        rows.append((name, formats, _describe_places(runtime), "yes" if runtime.on_hosts else ""))
    return _table(("engine", "formats", "in pods on", "on hosts"), rows)


def describe_vendor(name: str, vendor: Vendor) -> str:
    """Return the tables of a vendor's page."""
    parts = [_table(("", ""), [("accelerator", f"`{name}`"), *_vendor_facts(vendor)])]
    parts += [_describe_vendor_engines(name, vendor)]
    rows = [
        (engine, runtime.quantizations[name])
        for engine, runtime in RUNTIMES.items()
        if name in runtime.quantizations and (runtime.pod or not vendor.in_pods)
    ]
    if rows:
        parts += [_table(("engine", "quantizations"), _quantization_rows(dict(rows)))]
    if products := PRODUCTS.get(name):
        parts += [_describe_products(products)]
    return "\n".join(parts)


def _describe_products(products: Iterable[Product]) -> str:
    """Return a row for each architecture and capability, with the products and their memory, unless it differs."""
    rows: dict[tuple[str, str], list[str]] = {}
    for product in products:
        memory = f" ({product.memory_mib:,} MiB)" if product.memory_mib else ""
        rows.setdefault((product.family, product.capability), []).append(product.name + memory)
    described = [(family, capability, ", ".join(names)) for (family, capability), names in rows.items()]
    return _table(("architecture", "capability", "products, with their memory where it is always the same"), described)


def _list_images(runtime: Runtime) -> dict[str, str | None]:
    """Return the image of an engine by accelerator in pods; None: it runs there, but a user has to name an image."""
    pod = runtime.pod
    if pod is None:
        return {}
    in_pods = {name: vendor for name, vendor in VENDORS.items() if vendor.in_pods}
    images = {name: pod.find_image(name, vendor, runtime.name) for name, vendor in in_pods.items()}
    by_users = in_pods if pod.from_container else runtime.quantizations
    return {name: image for name, image in images.items() if image or name in by_users}


def _describe_places(runtime: Runtime) -> str:
    """Return the accelerators in pods: first those with an image, then those for which a user has to name one."""
    images = _list_images(runtime)
    provided = ", ".join(name for name, image in images.items() if image)
    stated = ", ".join(name for name, image in images.items() if not image)
    if runtime.pod and runtime.pod.from_container:
        stated = "any accelerator"
    return "; ".join(
        [*([provided] if provided else []), *([f"{stated} with an image that you name"] if stated else [])]
    )


def _describe_pod(pod: EnginePod) -> dict[str, str]:
    facts = {
        "container": f"`{pod.container}`",
        "the service's token": (
            f"Pomona's proxy in the same pod checks it; the engine listens on loopback at port {pod.port}"
        ),
        "health": f"`{pod.health_path}` of the engine, which the proxy asks",
        "root of the file system": "read-only" if pod.read_only_root else "writable",
        "`/dev/shm`": "as large as the vendor's page says" if pod.shared_memory else "64 MiB, as in any container",
    }
    both = "the proxy's own and those of the engine" if pod.metrics else "the proxy's own"
    facts |= {"metrics": f"{both}, at `/metrics`, which needs the token"}
    if pod.from_container:
        facts |= {"port, health, folder of weights": "these are the defaults; `spec.container` may state others"}
    if pod.store:
        facts |= {"folder for its copy of the weights": f"`{pod.store}`"}
    return facts | ({"warning": pod.warning} if pod.warning else {})


def _describe_images(runtime: Runtime) -> str:
    rows = [(name, _describe_image(image)) for name, image in _list_images(runtime).items()]
    return _table(("accelerator", "image"), rows)


def _describe_image(image: str | None) -> str:
    return f"`{image}`" if image else "none: name one in `spec.image`"


def _describe_metrics(metrics: EngineMetrics) -> str:
    rows = [(meaning, f"`{name}`") for field, meaning in _METRICS.items() if (name := getattr(metrics, field))]
    return _table(("metric at `/metrics` of the proxy, which needs the token", "name"), rows)


def _describe_parsers(table: ParserTable) -> str:
    rows = [
        (f"`{form}`", _MODELS[form], *(f"`{name}`" if name else "none" for name in names))
        for form, names in table.items()
        if any(names)
    ]
    return _table(("`chatFormat`", "models", "`--tool-call-parser`", "`--reasoning-parser`, with `-think`"), rows)


def _describe_tuning(runtime: Runtime) -> str:
    if not runtime.tuning:
        return "`extraArgs` takes no arguments."
    return f"`extraArgs` takes these arguments: {' '.join(f'`{argument}`' for argument in runtime.tuning)}."


def _quantization_rows(by_name: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return for each engine or vendor its methods, with the architectures if not all of the vendor serve them."""
    return [
        (
            name,
            ", ".join(
                method if on == "*" else f"{method} ({_describe_families(on)})" for method, on in methods.items()
            ),
        )
        for name, methods in by_name.items()
    ]


def _describe_families(terms: str) -> str:
    """Return the architectures in words: `ada+ ~ampere` are those from Ada on, and Ampere computes with 16 bits."""
    native = [f"from {term[:-1]} on" if term.endswith("+") else term for term in terms.split() if term[0] != "~"]
    emulated = [term[1:] for term in terms.split() if term[0] == "~"]
    parts = [", ".join(native)] if native else []
    return "; ".join([*parts, *([f"with 16 bits on {', '.join(emulated)}"] if emulated else [])])


def _vendor_facts(vendor: Vendor) -> Iterable[tuple[str, str]]:
    if not vendor.in_pods:
        yield "replicas", "native processes on off-cluster hosts"
        return
    yield "resource of `hardware.count`", _code(vendor.resource)
    yield (
        "further ones for `hardware.resource`",
        ", ".join(_code(resource) for resource in vendor.further_resources) or "none",
    )
    tolerations = [f"`{toleration.key}` {toleration.operator} {toleration.effect}" for toleration in vendor.tolerations]
    yield "tolerations", ", ".join(tolerations) or "none"
    yield "label of `hardware.products`", _code(vendor.product_label)
    yield "label of `hardware.memory`", _describe_memory(vendor)
    if vendor.shared_label:
        shared = " or ".join(f"`{shared_value}`" for shared_value in vendor.shared_values)
        yield "devices that pods share", f"`{vendor.shared_label}` is {shared}: not for `hardware.memory`"
    yield "runtimeClass", _code(vendor.runtime_class)
    yield "environment", ", ".join(f"`{name}={value}`" for name, value in vendor.environment.items()) or "none"
    yield "supplemental groups", ", ".join(str(group) for group in vendor.supplemental_groups) or "none"
    if vendor.resource:
        yield "`/dev/shm` for each device", f"{vendor.shared_memory_mib} MiB"
        yield "pages of 2 MiB for each device", f"{vendor.hugepages_mib} MiB" if vendor.hugepages_mib else "none"
    yield "exporter", _describe_exporter(vendor.exporter)


def _describe_memory(vendor: Vendor) -> str:
    if vendor.memory_label is None:
        return "none"
    unit = f"one of {', '.join(vendor.memory_values)}" if vendor.memory_values else "a number of MiB"
    return f"`{vendor.memory_label}`, {unit}; {1 - ACCEPTED_SHARE:.0%} less than stated is accepted"


def _describe_exporter(exporter: Exporter | None) -> str:
    if exporter is None:
        return "none"
    unit = {1: "bytes", MIB: "MiB"}[exporter.memory_unit_bytes]
    return f"port {exporter.port}: `{exporter.utilization}` in percent, `{exporter.memory_used}` in {unit}"


def _describe_vendor_engines(name: str, vendor: Vendor) -> str:
    if not vendor.in_pods:
        hosts = [(engine, runtime.install_hint) for engine, runtime in RUNTIMES.items() if runtime.on_hosts]
        return _table(("engine", "installation on the host"), hosts)
    images = {engine: _list_images(runtime) for engine, runtime in RUNTIMES.items()}
    rows = [(engine, _describe_image(by_vendor[name])) for engine, by_vendor in images.items() if name in by_vendor]
    return _table(("engine", "image"), rows)


def _code(text: str | None) -> str:
    return f"`{text}`" if text else "none"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _wrap(text: str) -> str:
    return textwrap.fill(text, width=125, break_long_words=False, break_on_hyphens=False) + "\n"
