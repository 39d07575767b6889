"""Options of `pomona extender`: weights from options or variables, and nothing that makes no score."""

from typing import Any

import pytest
from click.testing import CliRunner

from cli import extender
from extender.run import ExtenderOptions
from extender.score import ScoreWeights


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ExtenderOptions]:
    """The options with which the extender would run."""
    kept: list[ExtenderOptions] = []

    async def run(_kubeconfig: Any, options: ExtenderOptions) -> None:
        kept.append(options)

    monkeypatch.setattr(extender, "_run", run)
    monkeypatch.setattr("cli.log.configure", lambda **_: None)
    return kept


def test_defaults_are_for_a_scheduler_in_the_same_pod(started: list[ExtenderOptions]) -> None:
    assert CliRunner().invoke(extender.command, []).exit_code == 0
    (options,) = started
    assert options == ExtenderOptions()
    assert (options.address, options.port, options.weights) == ("127.0.0.1", 8888, ScoreWeights(0.7, 0.2, 0.1))


def test_weights_are_those_of_the_options_else_of_the_variables(started: list[ExtenderOptions]) -> None:
    environment = {"SCHED_TPS_WEIGHT": "3", "SCHED_UTIL_WEIGHT": "2", "SCHED_COST_WEIGHT": "1"}
    said = CliRunner().invoke(extender.command, ["--tps-weight=5"], env=environment)
    assert said.exit_code == 0
    assert started[0].weights == ScoreWeights(5, 2, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tps-weight=nan"], "each must be a number from 0"),
        (["--util-weight=-1"], "each must be a number from 0"),
        (["--tps-weight=0", "--util-weight=0", "--cost-weight=0"], "at least one of tps, util and cost must be more"),
        (["--tps-weight=much"], "not a valid float"),
        (["--annotation-prefix=a b"], "'a b' is no prefix of annotations: give one such as flexinfer.ai"),
        (["--port=65536"], "65536"),
        (["--metrics-address=here"], "is not an address and port"),
    ],
)
def test_option_that_makes_no_sense_is_refused(
    started: list[ExtenderOptions], arguments: list[str], words: str
) -> None:
    said = CliRunner().invoke(extender.command, arguments)
    assert (said.exit_code, started) == (2, [])
    assert words in " ".join(said.output.split())


def test_prefix_of_annotations_may_have_its_slash(started: list[ExtenderOptions]) -> None:
    CliRunner().invoke(extender.command, ["--annotation-prefix=flexinfer.ai/", "--metrics-address=0.0.0.0:8080"])
    assert (started[0].annotation_prefix, started[0].metrics_address) == ("flexinfer.ai", ("0.0.0.0", 8080))


def test_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(_kubeconfig: Any, _options: ExtenderOptions) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(extender, "_run", run)
    monkeypatch.setattr("cli.log.configure", lambda **_: None)
    said = CliRunner().invoke(extender.command, [])
    assert said.exit_code == 1
    assert "127.0.0.1:8888 or --metrics-address cannot be served: [Errno 98] Address already in use" in said.output
