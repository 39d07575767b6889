"""The runtime of a service that names none: by format and place, and by the images that an accelerator has."""

import itertools
from typing import get_args

import pytest

from crds.weights_header import WeightsFormat
from devices.vendor_file import parse_vendors
from devices.vendors import VENDORS
from runtimes.registry import RUNTIMES, list_pod_engines
from runtimes.runtime import RuntimeDemand
from runtimes.runtime_choice import choose_runtime, refuse_demand

IN_PODS = {"gguf": "llama.cpp", "safetensors": "vllm", "mlx": "mlx-lm", "ollama": "ollama"}
ON_HOSTS = IN_PODS | {"safetensors": "mlx-lm"}


@pytest.mark.parametrize(("weights", "accelerator"), list(itertools.product(get_args(WeightsFormat), VENDORS)))
def test_default_of_the_format_is_chosen_on_every_built_in_accelerator(
    weights: WeightsFormat, accelerator: str
) -> None:
    in_pods = VENDORS[accelerator].in_pods
    chosen = choose_runtime(RuntimeDemand(weights, accelerator, in_pods))
    assert chosen == (IN_PODS if in_pods else ON_HOSTS)[weights]
    assert weights in RUNTIMES[chosen].formats


@pytest.mark.parametrize(
    ("images", "weights", "chosen"),
    [
        ("sglang: a/sglang:1", "safetensors", "sglang"),
        ("tgi: a/tgi:1, sglang: a/sglang:1", "safetensors", "sglang"),
        ("sglang: a/sglang:1, vllm: a/vllm:1", "safetensors", "vllm"),
        ("llama.cpp: a/llama:1", "safetensors", "vllm"),
        ("generic: a/generic:1", "safetensors", "vllm"),
        ("ollama: a/ollama:1", "gguf", "ollama"),
        ("ollama: a/ollama:1, llama.cpp: a/llama:1", "gguf", "llama.cpp"),
        ("sglang: a/sglang:1", "gguf", "llama.cpp"),
        ("sglang: a/sglang:1", "mlx", "mlx-lm"),
    ],
)
def test_first_runtime_with_an_image_of_the_vendors_file_is_chosen(
    images: str, weights: WeightsFormat, chosen: str
) -> None:
    vendors = parse_vendors(f"acme: {{resource: a.example/npu, images: {{{images}}}}}\n", list_pod_engines())
    assert choose_runtime(RuntimeDemand(weights, "acme", in_pods=True, vendors=vendors)) == chosen


def test_image_of_the_service_is_one_of_the_default_runtime() -> None:
    vendors = parse_vendors("acme: {resource: a.example/npu, images: {sglang: a/sglang:1}}\n", list_pod_engines())
    demand = RuntimeDemand("safetensors", "acme", in_pods=True, vendors=vendors, has_image=True)
    assert choose_runtime(demand) == "vllm"


def test_accelerator_that_does_not_exist_leaves_the_default() -> None:
    assert choose_runtime(RuntimeDemand("safetensors", "no-such", in_pods=True)) == "vllm"


def test_refusal_lists_the_accelerators_of_the_vendors_file() -> None:
    vendors = parse_vendors(
        "acme: {resource: a.example/npu, images: {sglang: a/sglang:1}}\nintel-gaudi: {images: {vllm: a/vllm:1}}\n",
        list_pod_engines(),
    )
    demand = RuntimeDemand("safetensors", "cpu", in_pods=True, vendors=vendors)
    refused = refuse_demand(RUNTIMES["sglang"], demand)
    assert refused is not None
    assert "no image for accelerator cpu: set hardware.accelerator to acme or amd or nvidia, choose" in refused
    refused = refuse_demand(RUNTIMES["vllm"], demand._replace(accelerator="acme"))
    assert refused is not None
    assert "set hardware.accelerator to amd or cpu or intel-gaudi or nvidia, choose another runtime" in refused
    refused = refuse_demand(RUNTIMES["sglang"], demand._replace(accelerator="metal", in_pods=False))
    assert refused is not None
    assert "set hardware.accelerator to acme or amd or nvidia, or runtime to mlx-lm" in refused


def test_refused_format_names_a_runtime_that_has_an_image() -> None:
    vendors = parse_vendors("acme: {resource: a.example/npu, images: {sglang: a/sglang:1}}\n", list_pod_engines())
    refused = refuse_demand(RUNTIMES["llama.cpp"], RuntimeDemand("safetensors", "acme", in_pods=True, vendors=vendors))
    assert refused is not None
    assert "set runtime to sglang, or give the Model a GGUF file" in refused


def test_runtime_that_no_accelerator_has_an_image_for_names_none() -> None:
    refused = refuse_demand(RUNTIMES["generic"], RuntimeDemand("gguf", "cpu", in_pods=True))
    assert refused is not None
    assert "set hardware.accelerator to an accelerator in pods" in refused
