"""Models of several files: their Jobs and the paths of their weights."""

from typing import Any

import pytest

from controller.models.served import cache_path, format_of, weights_path
from crds.cache import CachedWeights
from kube.client import Obj
from tests.support.simulated_model import HTTP, SimulatedModel
from tests.unit.controller.models.test_reconciler import arguments

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDER = {
    "revision": COMMIT,
    "file": "",
    "sizeBytes": 7 << 20,
    "format": "safetensors",
    "gguf": {"architecture": "llama"},
}
FOLDER |= {"totalParameters": 100, "activeParameters": 30}


def inspected_folder(answer: Obj, **spec: Any) -> SimulatedModel:
    simulated = SimulatedModel(**({"source": "hf://acme/tiny"} | spec))
    simulated.add_consumer()
    simulated.settle()
    simulated.end("inspect", 0, answer)
    simulated.settle()
    return simulated


def test_folder_is_fetched_to_one_folder_of_the_volume() -> None:
    simulated = inspected_folder(FOLDER)
    status = simulated.model.status
    assert (status.format, status.total_parameters, status.active_parameters) == ("safetensors", 100, 30)
    args = arguments(simulated.job("fetch"))
    path = cache_path(simulated.model)
    assert "/" not in path
    assert args[args.index("--to") + 1] == f"/models/{path}"
    assert args[args.index("--revision") + 1] == COMMIT
    assert "--size-bytes" not in args, "a later version may choose other files"
    simulated.end("fetch", 0, FOLDER | {"path": f"/models/{path}"})
    simulated.settle()
    assert simulated.model.status.cached == CachedWeights(name="tiny-cache", claim="uid-1", path=path)
    assert simulated.model.status.phase == "Ready"


def test_weights_that_mlx_wrote_are_not_fetched_for_pods() -> None:
    simulated = inspected_folder(FOLDER | {"format": "mlx"})
    assert simulated.claim is None
    assert simulated.condition("Cached").reason == "NoConsumers"


def test_patterns_are_passed_to_both_jobs_and_name_another_folder() -> None:
    parts = {"revision": COMMIT, "file": "x-00001-of-00002.gguf", "sizeBytes": 7 << 20, "format": "gguf"}
    simulated = inspected_folder(parts, files=["*Q4*.gguf"])
    for verb in ("inspect", "fetch"):
        assert "--files=*Q4*.gguf" in arguments(simulated.job(verb))
    path = cache_path(simulated.model)
    assert path.endswith("/x-00001-of-00002.gguf")
    assert path != weights_path("hf://acme/tiny", COMMIT, "x-00001-of-00002.gguf")
    simulated.end("fetch", 0, parts)
    simulated.settle()
    simulated.edit(files=["*Q8*.gguf"])
    simulated.settle()
    assert "--files=*Q8*.gguf" in arguments(simulated.job("inspect"))


@pytest.mark.parametrize("files", [["../*.gguf"], ["*.gguf", "a/../b.gguf"]])
def test_patterns_that_are_not_valid_fail_the_model_without_a_job(files: list[str]) -> None:
    simulated = SimulatedModel(source="hf://acme/tiny", files=files)
    simulated.settle()
    assert simulated.made == []
    assert simulated.model.status.phase == "Failed"
    assert "edit spec.source or spec.files" in simulated.condition("Ready").message


def test_format_is_that_of_the_source_until_it_is_inspected() -> None:
    def found(source: str, *files: str) -> str:
        return format_of(SimulatedModel(source=source, files=list(files)).model)

    assert found("hf://acme/tiny") == "safetensors"
    assert found("hf://acme/tiny", "*.gguf") == "gguf"
    assert found("hf://acme/tiny/x.gguf") == "gguf"
    assert found("ollama://qwen3:8b") == "ollama"


def test_model_of_ollama_has_its_format() -> None:
    simulated = SimulatedModel(source="ollama://qwen3:8b", memory_bytes=5)
    simulated.settle()
    assert simulated.model.status.format == "ollama"


def test_path_of_weights_stays_the_same() -> None:
    """With another path, all weights would be fetched again."""
    assert weights_path(HTTP, '"etag-1"', "tiny.gguf") == "dca1280c52bf573a/tiny.gguf"
