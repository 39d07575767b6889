"""`pomona fit`: the models that are asked for, and no others."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from cli.density.fit import command
from console.density_feed import CONTEXT_LENGTH
from console.density_snapshot import DensitySnapshot
from console.fit_table import FitTable
from tests.support.density_worlds import build_feed, gpu_node, model


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
