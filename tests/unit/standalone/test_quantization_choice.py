"""The best quantization of a model that fits the memory is chosen, and names of files state which one they have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.inspect import Inspection
from artifacts.quantized_models import QuantizedModel, list_quantized_models, match_quantization
from artifacts.repositories.repository import RepositoryFile
from crds.size import GIB
from crds.weights_header import GGUF
from fitness.catalog_entries import load_catalog
from standalone.quantization_choice import choose_quantization, is_held

HEADER = Inspection(gguf=GGUF(context_length=40_960), layout=load_catalog()["qwen3-8b"].layout)
SIZES = {"BF16": 16.4, "Q8_0": 8.7, "Q6_K": 6.7, "Q4_K_M": 5.0, "IQ2_M": 3.0}
MODELS = [QuantizedModel(name, f"Qwen3-8B-{name}.gguf", int(size * 10**9)) for name, size in SIZES.items()]


@pytest.mark.parametrize(
    ("budget_gib", "chosen"),
    [(64, "Q8_0"), (12, "Q8_0"), (10, "Q6_K"), (8, "Q4_K_M"), (6, "IQ2_M"), (2, "IQ2_M")],
)
def test_best_that_fits_is_chosen(budget_gib: int, chosen: str) -> None:
    model, reason = choose_quantization(MODELS, HEADER, budget_gib * GIB)
    assert model.quantization == chosen
    assert reason == (f"the best that fits {budget_gib} GiB" if budget_gib > 2 else "the smallest, as none fits 2 GiB")


def test_weights_of_16_bits_are_taken_if_there_are_no_others() -> None:
    assert choose_quantization(MODELS[:1], HEADER, 64 * GIB)[0].quantization == "BF16"


@given(st.lists(st.integers(1, 100), min_size=1, max_size=9, unique=True), st.integers(1, 1 << 40))
def test_choice_fits_whenever_any_does(sizes: list[int], budget: int) -> None:
    """The layout of the model is not known, so that its size alone decides."""
    models = [QuantizedModel(f"Q{index}", "", size << 30) for index, size in enumerate(sorted(sizes, reverse=True))]
    chosen, reason = choose_quantization(models, Inspection(), budget)
    fitting = [model for model in models if is_held(Inspection(size_bytes=model.size_bytes), budget, 4096)]
    assert chosen == (fitting[0] if fitting else models[-1])
    assert bool(fitting) == reason.startswith("the best that fits")


def files(*names: str) -> list[RepositoryFile]:
    return [RepositoryFile(name, 10, None) for name in names]


@pytest.mark.parametrize(
    ("path", "quantization"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen3-8b.q8_0.gguf", "Q8_0"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("gemma-iq2_xxs.gguf", "IQ2_XXS"),
        ("model-bf16.gguf", "BF16"),
        ("BF16/model-00001-of-00002.gguf", "BF16"),
        ("Q5_K_S/model.gguf", "Q5_K_S"),
        ("model-Q4_K_M-00001-of-00002.gguf", "Q4_K_M"),
        ("model.gguf", ""),
        ("FAQ8_0.gguf", ""),
    ],
)
def test_name_of_a_file_states_its_quantization(path: str, quantization: str) -> None:
    parts = [path, path.replace("00001", "00002")]
    (model,) = list_quantized_models(files(*dict.fromkeys(parts)))
    assert (model.quantization, model.path, model.size_bytes) == (quantization, path, 10 * len(set(parts)))


def test_what_is_no_whole_model_is_left_out() -> None:
    names = ("mmproj-F16.gguf", "model-mmproj-BF16.gguf", "a-imatrix.gguf", "b-00001-of-00002.gguf", "c.json")
    assert list_quantized_models(files(*names, "d-99999-of-00001.gguf")) == []


def test_quantization_is_matched_in_any_case_and_without_its_prefix() -> None:
    models = list_quantized_models(files("m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m-UD-Q4_K_M.gguf"))
    assert [model.path for model in match_quantization(models, "q4_k_m")] == ["m-Q4_K_M.gguf"]
    assert [model.path for model in match_quantization(models, "Q4_K_XL")] == ["m-UD-Q4_K_XL.gguf"]
    assert match_quantization(models, "Q4") == []
