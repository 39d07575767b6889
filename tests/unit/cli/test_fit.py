"""`pomona fit`: the models that are asked for, and no others."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from artifacts.errors import ArtifactError
from cli.density import simulate
from cli.density.fit import command
from cli.density.queue_simulation import SimulatedQueue
from console.density_answers import SimulateRequest
from console.density_simulation import simulate_model
from console.density_snapshot import CONTEXT_LENGTH
from console.fit_table import FitTable
from crds.serving import ServingOptions
from fitness.catalog_entries import load_catalog
from fitness.memory import estimate
from kube.client import Obj
from tests.support import api_objects
from tests.support.density_worlds import GIB, GPU, build_source, cpu_node, gpu_node, host, model
from tests.support.file_server import FileServer
from tests.support.tiny_models import tiny_gguf


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster with a model for code and one for anything."""
    objects = [*gpu_node("g1"), model("plain"), model("coder", domains=["coding"])]
    snapshot = build_source(objects).take_snapshot()

    monkeypatch.setattr("cli.density.reading.read_density", lambda *_: (snapshot, FitTable(CONTEXT_LENGTH)))


@pytest.mark.usefixtures("cluster")
def test_only_models_for_a_use_case_are_shown() -> None:
    for stated, names in (([], {"plain", "coder"}), (["--use-case=coding"], {"coder"})):
        said = CliRunner().invoke(command, ["team/", "--json", *stated])
        assert said.exit_code == 0, said.output
        (node,) = json.loads(said.output)["node_results"]
        assert {fit["name"].rpartition("/")[2] for fit in node["top"]} == names


@pytest.mark.usefixtures("cluster")
async def test_model_of_any_source_is_asked_for_by_its_header(tmp_path: Path) -> None:
    async with FileServer(tmp_path) as hub:
        tiny_gguf.write(tmp_path / "tiny.gguf")
        asked = [f"{hub.url}/tiny.gguf", "--allow-private-sources=127.0.0.0/8", "--json"]
        said = await asyncio.to_thread(CliRunner().invoke, command, asked)
    assert said.exit_code == 0, said.output
    (node,) = json.loads(said.output)["node_results"]
    assert [fit["fit_level"] for fit in node["top"]] == ["perfect"]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("Qwen2.5-Coder-72B", "pomona fit hf://ORG/REPO"),
        ("deepseek-v4-flash", "pomona deploy deepseek-v4-flash --memory GIB"),
    ],
    ids=["nowhere", "without a formula"],
)
def test_model_that_is_not_known_is_not_said_to_fit_nowhere(name: str, way_out: str) -> None:
    said = CliRunner().invoke(command, [name])
    assert said.exit_code == 1
    assert f"it is unknown where {name} fits" in said.output
    assert way_out in said.output
    assert "nowhere" not in said.output


@pytest.mark.usefixtures("cluster")
def test_model_that_fits_nowhere_is_said_to_and_why() -> None:
    said = CliRunner().invoke(command, ["kimi-k2-5"])
    assert (said.exit_code, said.output) == (1, "kimi-k2-5 fits nowhere: --min-fit too_tight says why\n")
    assert "short" in CliRunner().invoke(command, ["kimi-k2-5", "--min-fit", "too_tight"]).output


def test_words_of_a_host_move_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host says why it is paused, and whoever has stolen its token writes that."""
    paused = [
        api_objects.condition("Ready", "True"),
        api_objects.condition("Paused", "True", message="no\x1b]52;\x9b1A"),
    ]
    snapshot = build_source([*gpu_node("g1"), model("plain"), host("mac", conditions=paused)]).take_snapshot()
    table = FitTable(CONTEXT_LENGTH)
    monkeypatch.setattr("cli.density.reading.read_density", lambda *_: (snapshot, table))
    monkeypatch.setattr(
        "cli.density.simulate.run_in_cluster",
        lambda *_: (simulate_model(snapshot, table, None, SimulateRequest(model="plain")), SimulatedQueue(problem="")),
    )
    for asked in (command, simulate.command):
        said = CliRunner().invoke(asked, ["plain"], color=True)  # as on a terminal: all arrives as it is
        assert "mac: not considered: " in said.stderr
        assert r"no\x1b]52;\x9b1A" in said.stderr


def _node(name: str, vendor: str, resource: str, product: str, gib: int) -> list[tuple[Any, Obj]]:
    """Return a node with eight devices."""
    listed, reported = gpu_node(name, 8, product=product, memory=gib * GIB)
    listed[1]["status"]["allocatable"][resource] = listed[1]["status"]["allocatable"].pop(GPU)
    reported[1]["status"]["vendor"] = vendor
    return [listed, reported]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster with devices of every kind, and no hub."""
    objects = [
        *_node("h200", "nvidia", GPU, "NVIDIA H200", 140),
        *_node("mi300", "amd", "amd.com/gpu", "AMD Instinct MI300X", 192),
        *_node("gaudi", "intel-gaudi", "habana.ai/gaudi", "Intel Gaudi3", 128),
        *cpu_node("cpu"),
        host("mac"),
    ]
    table = FitTable(CONTEXT_LENGTH)
    snapshot = build_source(objects).take_snapshot()

    async def inspect_source(*_stated: Any, **_more: Any) -> Obj:
        raise ArtifactError("SourceUnreachable", "the hub does not answer")

    monkeypatch.setattr("cli.density.reading.read_density", lambda *_: (snapshot, table))
    monkeypatch.setattr("cli.density.fit_report.inspect_source", inspect_source)


def _ask(name: str, *stated: str) -> dict[str, Any]:
    """Return the best answer of each node on which a model of the catalog fits."""
    said = CliRunner().invoke(command, [name, "--json", *stated])
    assert said.exit_code == 0, said.output
    results = json.loads(said.stdout)["node_results"]
    return {result["node"]: result["top"][0] for result in results if result.get("top")}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", [name for name, entry in load_catalog().items() if entry.layout])
def test_every_model_of_the_catalog_is_answered_offline(name: str) -> None:
    entry, fits = load_catalog()[name], _ask(name)
    kinds = {"h200": "nvidia", "mi300": "amd", "gaudi": "intel-gaudi", "cpu": "cpu", "mac": "metal"}
    assert any(kinds[node] == entry.accelerator for node in fits), fits
    usable = {node for node, accelerator in kinds.items() if entry.find_workload(accelerator)}
    assert fits.keys() <= usable
    # Each node on which it does not fit says what is missing.
    said = CliRunner().invoke(command, [name, "--min-fit", "too_tight", "--json"])
    tight = json.loads(said.stdout)["node_results"]
    assert {row["node"] for row in tight if row.get("top")} == usable


@pytest.mark.usefixtures("offline")
def test_the_catalog_has_models_for_each_use_and_accelerator() -> None:
    answers = {use: _ask("*", f"--use-case={use}") for use in ("coding", "embedding", "multimodal", "reasoning")}
    assert all(answers.values()), answers
    assert {"h200", "mi300", "gaudi"} <= answers["coding"].keys()
    assert {"h200", "cpu", "mac"} <= answers["embedding"].keys()
    assert {"h200", "mi300", "gaudi"} <= answers["multimodal"].keys()


@pytest.mark.usefixtures("offline")
def test_model_for_embeddings_needs_the_memory_of_embeddings() -> None:
    """A text is embedded in one batch, however long it is."""
    entry = load_catalog()["qwen3-embedding-0-6b"]
    workload = entry.find_workload("cpu")
    assert workload
    needed = estimate(workload, ServingOptions(context_length=CONTEXT_LENGTH, mode="embeddings"))
    assert needed
    assert _ask("qwen3-embedding-0-6b")["cpu"]["memory_required_gb"] == pytest.approx(
        needed.total_bytes / GIB, abs=0.01
    )
    asked = SimulateRequest(model="qwen3-embedding-0-6b")
    (node,) = simulate_model(build_source(cpu_node("c")).take_snapshot(), FitTable(512), None, asked).ranked_nodes
    shorter = estimate(workload, ServingOptions(context_length=512, mode="embeddings"))
    assert shorter
    assert node.required_memory_gb == pytest.approx(shorter.total_bytes / GIB, abs=0.01)


@pytest.mark.usefixtures("offline")
def test_source_of_the_catalog_is_answered_without_its_hub() -> None:
    assert _ask("hf://Qwen/Qwen3.5-27B").keys() >= {"h200", "mi300"}
    said = CliRunner().invoke(command, ["hf://Qwen/Qwen3.5-27B"])
    assert "the hub does not answer; using the figures of the catalog" in said.stderr
    unknown = CliRunner().invoke(command, ["hf://Qwen/Qwen9-27B"])
    assert unknown.exit_code == 1
    assert "hf://Qwen/Qwen9-27B is not known: the hub does not answer" in unknown.output
