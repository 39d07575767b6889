"""`pomona fit`: the models that are asked for, and no others."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.density.fit import command
from console.density_feed import CONTEXT_LENGTH
from console.density_snapshot import DensitySnapshot
from console.fit_table import FitTable
from tests.support.density_worlds import build_feed, gpu_node, model
from tests.support.file_server import FileServer
from tests.support.tiny_models import tiny_gguf


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster with a model for code and one for anything."""
    objects = [*gpu_node("g1"), model("plain"), model("coder", domains=["coding"])]
    snapshot = build_feed(objects).take_snapshot()

    def answer_by_cluster(_target: Any, _vendors: Any, answer: Callable[[DensitySnapshot, FitTable], Any]) -> Any:
        return answer(snapshot, FitTable(CONTEXT_LENGTH))

    monkeypatch.setattr("cli.density.reading.answer_by_cluster", answer_by_cluster)


@pytest.mark.usefixtures("cluster")
def test_only_models_for_a_use_case_are_shown() -> None:
    for stated, names in (([], {"plain", "coder"}), (["--use-case=coding"], {"coder"})):
        said = CliRunner().invoke(command, ["team/", "--json", *stated])
        assert said.exit_code == 0, said.output
        (node,) = json.loads(said.output)["node_results"]
        assert {each["name"].rpartition("/")[2] for each in node["top"]} == names


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
        ("Qwen2.5-Coder-14B", "pomona fit hf://ORG/REPO"),
        ("qwen3-6-27b", "pomona fit hf://Qwen/Qwen3.6-27B"),
    ],
    ids=["nowhere", "without a header in the catalog"],
)
def test_model_that_is_not_known_is_not_said_to_fit_nowhere(name: str, way_out: str) -> None:
    said = CliRunner().invoke(command, [name])
    assert said.exit_code == 1
    assert f"it is unknown where {name} fits" in said.output
    assert way_out in said.output
    assert "nowhere" not in said.output
