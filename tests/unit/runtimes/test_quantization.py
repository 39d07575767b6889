"""Weights that an engine cannot serve on an accelerator are refused with the pairs that can, and emulation is told."""

import pytest

from devices.products import list_families
from devices.vendors import VENDORS
from runtimes.quantization import name_method, refuse_quantization, warn_quantization
from runtimes.registry import RUNTIMES

H100, A100, V100, B200 = "NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB", "Tesla-V100-SXM2-16GB", "NVIDIA-B200"


@pytest.mark.parametrize(
    ("stated", "method"),
    [
        ("", "unquantized"),
        ("bfloat16", "unquantized"),
        ("F16", "unquantized"),
        ("float32", "unquantized"),
        ("awq 4-bit", "awq"),
        ("awq_marlin", "awq"),
        ("gptq 8-bit", "gptq"),
        ("gptq_marlin", "gptq"),
        ("fp8", "fp8"),
        ("fbgemm_fp8", "fp8"),
        ("modelopt", "fp8"),
        ("FP8_PB_WO", "fp8"),
        ("modelopt_fp4", "nvfp4"),
        ("NVFP4", "nvfp4"),
        ("petit_nvfp4", "nvfp4"),
        ("nvfp4_awq", "nvfp4"),
        ("mxfp4", "mxfp4"),
        ("w4a8_mxfp4_fp8", "mxfp4"),
        ("mxfp6_e3m2", "mxfp6"),
        ("compressed-tensors 4-bit", "compressed-tensors"),
        ("bitsandbytes 4-bit", "bitsandbytes"),
        ("quark", "quark"),
        ("torchao", "torchao"),
        ("w8a8_int8", "int8"),
        ("Q4_K_M", "gguf"),
        ("IQ2_XXS", "gguf"),
        ("TQ1_0", "gguf"),
        ("MXFP4_MOE", "gguf"),
        ("GGUF-Q8_0", "gguf"),
        ("4-bit", "mlx"),
        ("of-tomorrow", None),
    ],
)
def test_method_is_named_as_models_state_it(stated: str, method: str | None) -> None:
    assert name_method(stated) == method


def test_refusal_names_what_the_pair_takes_and_the_pairs_that_work() -> None:
    assert refuse_quantization("awq 4-bit", "vllm", "intel-gaudi") == (
        "runtime vllm cannot serve awq 4-bit weights on accelerator intel-gaudi, where it takes unquantized, gptq, "
        "int8, compressed-tensors, fp8, inc: it works with vllm on nvidia from turing on, amd, intel, cpu; sglang on "
        "nvidia from turing on, amd; tgi on nvidia from turing on, amd"
    )
    assert refuse_quantization("mxfp4", "vllm", "amd", "AMD_Instinct_MI300X_OAM") == (
        "runtime vllm cannot serve mxfp4 weights on AMD_Instinct_MI300X_OAM, which is amd cdna3: it works with vllm on "
        "nvidia from ampere on, amd MI350X/MI355X, intel; sglang on nvidia from hopper on, amd MI350X/MI355X"
    )
    assert refuse_quantization("4-bit", "vllm", "cpu") == (
        "runtime vllm cannot serve 4-bit weights on accelerator cpu, where it takes unquantized, awq, gptq, int8, "
        "compressed-tensors: use other weights of the model"
    )
    assert refuse_quantization("bfloat16", "tgi", "metal") == (
        "runtime tgi does not run on accelerator metal: it runs on nvidia, amd, intel-gaudi"
    )


@pytest.mark.parametrize(
    ("quantization", "engine", "vendor", "device", "is_refused"),
    [
        ("awq", "vllm", "nvidia", H100, False),
        ("awq", "vllm", "nvidia", V100, True),
        ("awq", "vllm", "amd", "MI300X", False),
        ("gptq 4-bit", "vllm", "intel-gaudi", "Gaudi2", False),
        ("mxfp4", "vllm", "amd", "MI350X", False),
        ("mxfp4", "sglang", "amd", "MI325X", True),
        ("mxfp6", "vllm", "amd", "75a3", False),
        ("mxfp6", "vllm", "nvidia", B200, True),
        ("nvfp4", "vllm", "nvidia", H100, False),
        ("nvfp4", "vllm", "nvidia", "turing", False),
        ("nvfp4", "vllm", "nvidia", V100, True),
        ("nvfp4", "sglang", "nvidia", H100, True),
        ("nvfp4", "vllm", "cpu", "", True),
        ("fp8", "vllm", "nvidia", A100, False),
        ("fp8", "vllm", "nvidia", V100, True),
        ("fp8", "vllm", "amd", "MI210", True),
        ("Q4_K_M", "vllm", "intel-gaudi", "", True),
        ("Q4_K_M", "vllm", "nvidia", B200, True),
        ("bitsandbytes 4-bit", "vllm", "nvidia", B200, True),
        ("bitsandbytes 4-bit", "sglang", "nvidia", B200, False),
        ("Q4_K_M", "llama.cpp", "amd", "MI210", False),
        ("Q4_K_M", "sglang", "amd", "", True),
        ("bfloat16", "vllm", "intel-gaudi", "", False),
        ("bfloat16", "sglang", "cpu", "", True),
        ("of-tomorrow", "vllm", "nvidia", H100, False),
        ("awq", "engine-of-tomorrow", "nvidia", H100, False),
        ("awq", "vllm", "npu-of-tomorrow", "", False),
        ("mxfp4", "vllm", "amd", "MI999X", False),
        ("mxfp4", "vllm", "amd", "", False),
    ],
)
def test_pair_is_refused_only_where_it_is_known_to_fail(
    quantization: str, engine: str, vendor: str, device: str, *, is_refused: bool
) -> None:
    assert (refuse_quantization(quantization, engine, vendor, device) is not None) is is_refused


def test_emulation_and_unknown_products_are_told() -> None:
    assert warn_quantization("nvfp4", "vllm", "nvidia", H100) == (
        "runtime vllm emulates nvfp4 on NVIDIA-H100-80GB-HBM3, which is nvidia hopper: the weights save memory, but "
        "are computed with 16 bits; nvidia from blackwell on would compute with them"
    )
    assert warn_quantization("nvfp4", "vllm", "amd", "MI300X") == (
        "runtime vllm emulates nvfp4 on MI300X, which is amd cdna3: the weights save memory, but are computed with 16 "
        "bits"
    )
    assert warn_quantization("mxfp4", "vllm", "amd") == (
        "mxfp4 with vllm needs amd MI350X/MI355X: set hardware.products"
    )


@pytest.mark.parametrize(
    "pair",
    [
        ("nvfp4", "vllm", "nvidia", B200),
        ("fp8", "vllm", "intel-gaudi", ""),
        ("of-tomorrow", "vllm", "nvidia", H100),
        ("awq", "vllm", "intel-gaudi", ""),
    ],
)
def test_native_unknown_and_refused_pairs_have_no_remark(pair: tuple[str, ...]) -> None:
    assert warn_quantization(*pair) is None


def test_table_names_vendors_and_architectures_that_exist() -> None:
    for by_vendor in (runtime.quantizations for runtime in RUNTIMES.values()):
        for vendor, by_method in by_vendor.items():
            assert vendor in VENDORS
            for method, terms in by_method.items():
                assert method == "unquantized" or name_method(method) == method
                assert terms == "*" or {term.strip("~+") for term in terms.split()} <= set(list_families(vendor))
                # Only NVIDIA's architectures are one line.
                assert "+" not in terms or vendor == "nvidia"
