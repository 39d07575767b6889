"""docs/node-agent.md lists the labels, metrics, reasons and values that there are."""

import re
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from crds.definitions import DEFINITIONS
from crds.nodefitness import NodeDevice, NodeFitnessStatus
from kube.resources import NODES
from node_agent.metrics import NodeMetrics
from node_agent.node_labels import build_labels
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks

TEXT = (CHECKOUT / "docs" / "node-agent.md").read_text()
L4 = NodeDevice(
    id="GPU-1",
    architecture="sm_89",
    memory_bytes=23034 << 20,
    free_bytes=1 << 30,
    utilization_percent=10,
    temperature_celsius=50,
)
HARDWARE = NodeFitnessStatus(vendor="nvidia", devices=[L4], int4=True, cpu_features=["avx2"])


def read_section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def read_rows(title: str) -> list[list[str]]:
    lines = [line for line in read_section(title).splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_labels_are_those_of_an_l4() -> None:
    labels = build_labels(HARDWARE, "inference.pomona.dev")
    (block,) = list_blocks(read_section("Labels"))
    assert block.splitlines() == [f"{name}={value}" for name, value in sorted(labels.items())]


def test_metrics_are_those_that_are_served() -> None:
    metrics = NodeMetrics("gpu-1", "pomona")
    metrics.show_devices([L4])
    metrics.count_call("list", NODES, 200, 0.1)
    served = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                served[sample.name] = (family.type, ", ".join(sample.labels))
    stated = {name: (kind, labels.replace("`", "")) for name, kind, labels, _ in read_rows("Metrics")}
    assert {name: (kind, ", ".join(sorted(labels.split(", ")))) for name, (kind, labels) in stated.items()} == {
        name: (kind, ", ".join(sorted(labels.split(", ")))) for name, (kind, labels) in served.items()
    }


def test_values_are_those_of_the_chart() -> None:
    def list_values(section: dict[str, Any], *path: str) -> list[str]:
        paths = []
        for name, child in section.items():
            where = (*path, name)
            paths += list_values(child, *where) if name == "nvidia" else [".".join(where)]
        return paths

    chart = yaml.safe_load((CHECKOUT / "deploy" / "chart" / "values.yaml").read_text())
    assert {row[0] for row in read_rows("Values")} == set(list_values(chart["nodeAgent"], "nodeAgent"))


def test_reasons_are_those_of_the_condition() -> None:
    code = (CHECKOUT / "node_agent" / "node_fitness.py").read_text()
    reasons = re.findall(r'^        "([A-Z]\w+)": ', code, re.MULTILINE)
    assert [row[0] for row in read_rows("The hardware of nodes")] == reasons


def test_columns_are_those_that_kubectl_prints() -> None:
    (definition,) = [definition for definition in DEFINITIONS if definition.kind == "NodeFitness"]
    columns = ["NAME", *(column.name.upper() for column in definition.columns if not column.wide), "AGE"]
    assert re.search(r"^NAME .*$", TEXT, re.MULTILINE)[0].split() == columns  # type: ignore[index]
