"""The catalog is valid, honest about its figures, and every entry with a source can be deployed."""

import pytest
import yaml
from click.testing import CliRunner
from msgspec import structs

from artifacts.formats.folder_config import find_layout
from artifacts.source import parse
from cli.main import main
from cli.queue.model_headers import find_catalog_header
from cli.service.manifests import ServiceOptions, build_objects
from crds.serving import ServingOptions
from crds.size import GIB, size_text
from crds.weights_header import WeightsFormat
from devices.vendors import VENDORS
from fitness.catalog_entries import CatalogError, choose_source, load_catalog
from fitness.memory import Workload, estimate_pod
from runtimes.registry import RUNTIMES
from runtimes.runtime import RuntimeDemand
from runtimes.runtime_choice import choose_runtime
from tests.support.catalog_headers import CONFIGURATIONS, UNKNOWN
from tests.unit.fitness.test_memory import QWEN3_8B

SOURCES = [
    (name, source, accelerator)
    for name, entry in load_catalog().items()
    for source in entry.sources
    for accelerator in source.accelerators
]


@pytest.mark.parametrize(("name", "source", "accelerator"), SOURCES, ids=[f"{row[0]}-{row[2]}" for row in SOURCES])
def test_every_source_is_valid_and_deployed_on_its_accelerator(name: str, source: object, accelerator: str) -> None:
    assert accelerator in VENDORS
    model, service = build_objects(ServiceOptions(name=name, accelerator=accelerator), None)
    parse(model["spec"]["source"])
    assert service["spec"]["hardware"]["accelerator"] == accelerator
    assert service["spec"]["modelRef"] == model["metadata"]["name"]
    del source


def test_default_accelerator_of_every_entry_has_a_source_and_an_image() -> None:
    for name, entry in load_catalog().items():
        accelerator, source = choose_source(name, entry, None)
        assert accelerator == entry.accelerator
        pod = RUNTIMES[source.runtime].pod
        assert pod is not None
        assert pod.find_image(accelerator, VENDORS[accelerator], source.runtime) is not None, name


def test_samples_of_the_guide_are_there() -> None:
    made = {
        name: build_objects(ServiceOptions(name=name), None)
        for name in ("gemma-4-26b-a4b", "qwen3-6-35b-a3b", "gemma-4-31b", "qwen3-5-9b")
    }
    hardware = {name: objects[1]["spec"]["hardware"] for name, objects in made.items()}
    assert hardware["gemma-4-26b-a4b"] == {"accelerator": "amd", "preferredProducts": ["AMD_Instinct_MI300X_OAM"]}
    assert hardware["qwen3-6-35b-a3b"] == {"accelerator": "nvidia", "count": 2}
    _, on_gaudi = build_objects(ServiceOptions(name="qwen3-6-35b-a3b", accelerator="intel-gaudi"), None)
    assert on_gaudi["spec"]["hardware"] == {"accelerator": "intel-gaudi"}
    assert made["qwen3-6-35b-a3b"][0]["spec"]["thinking"] is True
    assert hardware["gemma-4-31b"]["preferredProducts"] == ["NVIDIA-H100-80GB-HBM3"]
    assert made["qwen3-5-9b"][0]["spec"] == {"source": "ollama://qwen3.5:9b", "memoryBytes": 9 * GIB}
    assert hardware["qwen3-5-9b"] == {"accelerator": "cpu"}


def test_product_is_preferred_only_on_the_default_accelerator() -> None:
    _, service = build_objects(ServiceOptions(name="gemma-4-31b", accelerator="amd"), None)
    assert service["spec"]["hardware"] == {"accelerator": "amd"}


def test_entry_without_a_source_for_an_accelerator_needs_one() -> None:
    entries = load_catalog()
    with pytest.raises(CatalogError, match=r"for intel: use --accelerator amd or cpu or metal or nvidia"):
        choose_source("qwen3-5-9b", entries["qwen3-5-9b"], "intel")


def test_figures_below_four_bits_are_marked() -> None:
    marked = {name for name, entry in load_catalog().items() if entry.is_below_four_bits}
    assert marked == {"deepseek-v4-flash", "mistral-large-3", "glm-5-1", "kimi-k2-5", "deepseek-v4-pro"}


def test_table_has_figures_of_others_and_our_own_in_different_columns() -> None:
    lines = CliRunner().invoke(main, ["catalog"]).output.splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["NAME"] == ["NAME", "PARAMETERS", "ACTIVE", "~4", "BIT", "BF16", "POMONA", "ON"]
    assert rows["qwen3-8b"][3:] == ["-", "-", "5.8", "GB", "cpu"]
    assert rows["gemma-4-31b"][3:] == ["16", "GB", "62", "GB", "77.4", "GB", "nvidia"]
    assert rows["kimi-k2-5"][3:] == ["250", "GB*", "2,000", "GB", "718.0", "GB", "nvidia"], "the table is cut off"
    assert rows["deepseek-v4-pro"][3:] == ["430", "GB*", "-", "-", "nvidia"]
    assert "unchecked" in "\n".join(lines)


def test_catalog_is_printed_as_yaml() -> None:
    printed = yaml.safe_load(CliRunner().invoke(main, ["catalog", "-o", "yaml"]).output)
    assert printed["gemma-4-31b"]["bf16GB"] == 62
    assert "estimatedBytes" not in printed["deepseek-v4-flash"], "no formula is known for its caches"
    assert printed["qwen3-5-9b"]["estimatedBytes"] == printed["qwen3-5-9b"]["sources"][0]["memoryBytes"]
    assert size_text(printed["qwen3-8b"]["estimatedBytes"]) == "5.4 GiB"


def test_estimate_is_of_what_deploy_runs() -> None:
    printed = yaml.safe_load(CliRunner().invoke(main, ["catalog", "-o", "yaml"]).output)
    for name, entry in load_catalog().items():
        if entry.layout is None:
            continue
        accelerator, source = choose_source(name, entry, None)
        assert source == entry.sources[0], "layout describes the first source"
        written: WeightsFormat = "gguf" if source.source.endswith(".gguf") else "safetensors"
        written = "ollama" if source.source.startswith("ollama://") else written
        demand = RuntimeDemand(written, accelerator, VENDORS[accelerator].in_pods)
        assert source.runtime == choose_runtime(demand)
        assert printed[name]["estimatedBytes"] > entry.layout.tensor_bytes
    # Four devices, of which each keeps a quarter of the weights and memory of its own.
    layout = load_catalog()["mistral-medium-3-5"].layout
    needed = estimate_pod(Workload(layout, "vllm"), ServingOptions(parallel=1), 4)
    assert needed
    assert needed.device_bytes_each
    assert printed["mistral-medium-3-5"]["estimatedBytes"] == 4 * needed.device_bytes_each


def test_weights_of_a_header_are_between_the_figures_of_others() -> None:
    for name, entry in load_catalog().items():
        if entry.layout is None or entry.quantized_gb is None or entry.bf16_gb is None:
            continue
        weights = entry.layout.tensor_bytes / 10**9
        # The figures of third parties are without vision encoders and without prediction of further tokens.
        assert 0.6 * entry.quantized_gb < weights < 1.03 * entry.bf16_gb, name


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_layout_is_computed_from_the_configuration_of_the_model(name: str) -> None:
    """By the reader of `pomona inspect`, from public copies of config.json."""
    layout = load_catalog()[name].layout
    assert layout
    assert layout == find_layout(dict(CONFIGURATIONS[name]), layout.tensor_bytes)


def test_layout_of_a_gguf_file_is_that_of_its_header() -> None:
    """As the estimates are tested by, which measurements of llama.cpp were compared with."""
    assert load_catalog()["qwen3-8b"].layout == QWEN3_8B


def test_model_without_a_layout_has_none_by_its_configuration() -> None:
    unknown = {name for name, entry in load_catalog().items() if entry.layout is None}
    assert unknown == {"deepseek-v4-flash", "deepseek-v4-pro"}
    for name, configuration in UNKNOWN.items():
        assert name in unknown
        assert find_layout(dict(configuration), 1) is None


def test_further_source_has_the_same_layout_and_a_size_of_its_own() -> None:
    entry = load_catalog()["qwen3-6-35b-a3b"]
    folder, file = (entry.find_workload(accelerator) for accelerator in ("intel-gaudi", "cpu"))
    assert folder
    assert folder.layout
    assert (folder.runtime, folder.quantization, folder.layout.tensor_bytes) == ("vllm", "bfloat16", 71_903_645_408)
    assert file
    assert (file.runtime, file.quantization) == ("llama.cpp", "Q4_K_M")
    assert file.layout == structs.replace(folder.layout, tensor_bytes=22_134_528_992)
    header = find_catalog_header("hf://unsloth/Qwen3.6-35B-A3B-GGUF/Qwen3.6-35B-A3B-UD-Q4_K_M.gguf")
    assert header
    assert header.layout == file.layout
    # Its size is not known, so that it is not guessed.
    assert load_catalog()["gemma-4-31b"].find_workload("metal") is None


def test_service_of_a_model_for_embeddings_is_for_embeddings() -> None:
    _, service = build_objects(ServiceOptions(name="qwen3-embedding-0-6b"), None)
    assert service["spec"]["mode"] == "embeddings"
