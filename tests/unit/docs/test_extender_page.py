"""The page of the extender agrees with its options, scores, annotations, reasons and metrics."""

import re

import yaml
from prometheus_client import Metric

from cli.extender import command
from devices.vendors import VENDORS
from extender.extender_metrics import ExtenderMetrics
from extender.run import DEFAULT_PORT
from extender.score import ScoreWeights, compute_score
from extender.server import VERBS
from extender.speed_table import SpeedTable
from fitness.performance_store import PerformanceTable
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks

PAGE = (CHECKOUT / "docs" / "extender.md").read_text()
SCORES = {
    "the fastest, idle and free": (1.0, 0.0, 0.0),
    "half as fast, idle and free": (0.5, 0.0, 0.0),
    "the fastest, busy and the dearest": (1.0, 1.0, 1.0),
    "of unknown speed, idle and free; every node, if the model is not known": (0.0, 0.0, 0.0),
    "of unknown speed, busy and the dearest": (0.0, 1.0, 1.0),
}
OF_THE_PROCESS = re.compile(r"process_\w+")


def list_rows(section: str, columns: int) -> list[list[str]]:
    """Return the cells of the rows of all tables of a section with this number of columns."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return [row for row in rows if len(row) == columns and row[0] != "---"]


def test_table_of_scores_is_computed() -> None:
    shown = {node: int(score) for node, score in list_rows("The score", 2) if score.isdecimal()}
    assert shown == {node: compute_score(*facts, ScoreWeights()) for node, facts in SCORES.items()}


def test_table_of_weights_has_the_options_variables_and_values() -> None:
    variables = {param.opts[0]: str(param.envvar) for param in command.params if param.envvar}
    defaults = {param.opts[0]: param.default for param in command.params}
    values = yaml.safe_load((CHECKOUT / "deploy" / "chart" / "values.yaml").read_text())["scheduler"]["weights"]
    rows = [[cell.strip("`") for cell in row] for row in list_rows("The score", 3)[1:]]
    assert {option: variable for option, variable, _ in rows} == variables
    for option, _, value in rows:
        assert values[value.rpartition(".")[2]] == defaults[option]


def test_every_metric_is_listed_with_its_type_and_labels() -> None:
    table = SpeedTable(VENDORS, ScoreWeights(), lambda _served, _devices, _corrections: None, PerformanceTable())
    metrics = ExtenderMetrics(table)
    metrics.count_request("filter", "scored", 0.001)
    served = {_describe(metric) for metric in metrics.registry.collect() if not OF_THE_PROCESS.match(metric.name)}
    rows = list_rows("Routes and metrics", 4)[1:]
    assert {(name.strip("`"), kind, labels.replace("`", "")) for name, kind, labels, _ in rows} == served


def _describe(metric: Metric) -> tuple[str, str, str]:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    labels = ", ".join(name for name in metric.samples[0].labels if name != "le") if metric.samples else ""
    return name, metric.type, labels


def test_every_route_is_listed() -> None:
    listed = set(re.findall(r"`(?:GET|POST) (/\w+)`", PAGE))
    assert listed == {*VERBS, "/healthz", "/readyz", "/metrics"}


def test_configuration_is_for_a_scheduler_in_the_same_pod() -> None:
    (block,) = list_blocks(PAGE, "yml")
    (extender,) = yaml.safe_load(block)["extenders"]
    assert extender["urlPrefix"] == f"http://127.0.0.1:{DEFAULT_PORT}"
    assert (extender["ignorable"], extender["nodeCacheCapable"]) == (True, True)
    assert not extender.keys() & {"preemptVerb", "bindVerb"}
    assert all(
        any(vendor.offers(resource["name"]) for vendor in VENDORS.values()) for resource in extender["managedResources"]
    )
