"""Models of several files: their Jobs, the paths of their weights, and Models that an earlier release inspected."""

from typing import Any

import msgspec
import pytest

from controller.models.served import cache_path, format_of, weights_path
from controller.models.volume import FOLDER_INSPECTION, INSPECTION
from crds.cache import CachedWeights
from crds.model import ModelStatus
from crds.weights_header import GGUF
from kube.client import Obj
from kube.resources import PVCS
from tests.support.simulated_model import HTTP, SimulatedModel, make_cached
from tests.unit.controller.models.test_reconciler import SMALL, arguments

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


class TestEarlierRelease:
    def cached_before(self) -> SimulatedModel:
        """Return a cached GGUF Model as the last release left it."""
        simulated = make_cached()
        status = msgspec.structs.replace(simulated.model.status, format=None)
        simulated.model = msgspec.structs.replace(simulated.model, status=status)
        simulated.jobs, simulated.pods, simulated.made = {}, {}, []
        return simulated

    def test_cached_file_keeps_its_path_and_is_neither_inspected_nor_fetched_again(self) -> None:
        simulated = self.cached_before()
        before = simulated.model.status.cached
        simulated.settle()
        assert simulated.made == []
        assert simulated.model.status.cached == before
        # Written out: a release that computed another path would fetch all weights again.
        assert weights_path(HTTP, '"etag-1"', "tiny.gguf") == "dca1280c52bf573a/tiny.gguf"
        assert (INSPECTION, simulated.model.status.inspection) == (1, 1)

    def folder_before(self) -> SimulatedModel:
        simulated = inspected_folder(FOLDER | {"layout": SMALL})
        simulated.claim, simulated.jobs, simulated.pods, simulated.made = None, {}, {}, []
        status: ModelStatus = msgspec.structs.replace(
            simulated.model.status, format=None, total_parameters=None, active_parameters=None, inspection=1
        )
        simulated.model = msgspec.structs.replace(simulated.model, status=status)
        return simulated

    def test_folder_is_inspected_again_for_its_format_and_keeps_its_layout(self) -> None:
        simulated = self.folder_before()
        simulated.settle()
        assert [each["kind"] for each in simulated.made if each["kind"] == PVCS.kind] == [], "it may be one of MLX"
        assert simulated.model.status.phase == "Ready", "hosts serve it meanwhile"
        assert f"hf://acme/tiny@{COMMIT}" in arguments(simulated.job("inspect"))
        simulated.end("inspect", 0, FOLDER | {"format": "mlx", "layout": SMALL | {"tensorBytes": 2}})
        simulated.settle()
        status = simulated.model.status
        assert (status.format, status.total_parameters, status.inspection) == ("mlx", 100, FOLDER_INSPECTION)
        assert msgspec.to_builtins(status.layout) == SMALL
        simulated.jobs, simulated.pods = {}, {}
        made = len(simulated.made)
        simulated.settle()
        assert len(simulated.made) == made

    def test_folder_is_inspected_again_for_a_layout_that_is_known_now(self) -> None:
        """A folder whose layout was known is not read again."""
        simulated = self.folder_before()
        for layout, is_read in ((simulated.model.status.layout, False), (None, True)):
            status = msgspec.structs.replace(simulated.model.status, format="safetensors", layout=layout, inspection=2)
            simulated.model = msgspec.structs.replace(simulated.model, status=status)
            simulated.settle()
            assert any("-inspect-" in each for each in simulated.jobs) == is_read
        simulated.end("inspect", 0, FOLDER | {"layout": SMALL})
        simulated.settle()
        status = simulated.model.status
        assert (msgspec.to_builtins(status.layout), status.inspection) == (SMALL, FOLDER_INSPECTION)

    def test_folder_that_cannot_be_inspected_again_stays_ready(self) -> None:
        simulated = self.folder_before()
        simulated.settle()
        simulated.end("inspect", 2, {"reason": "HeaderInvalid", "message": "is cut"})
        simulated.settle()
        status = simulated.model.status
        assert (status.phase, status.format, status.inspection) == ("Ready", None, FOLDER_INSPECTION)
        assert status.gguf == GGUF(architecture="llama")
