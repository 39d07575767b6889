"""docs/metrics.md explains each alert and dashboard, and both are whole."""

import json
import re
from typing import Any

import pytest
import yaml

from controller.metrics import ControllerMetrics
from tests.controlplane.process import CHECKOUT

PAGE = "https://github.com/pomona-dev/pomona/blob/main/docs/metrics.md"
TEXT = (CHECKOUT / "docs" / "metrics.md").read_text()
FILES = CHECKOUT / "deploy" / "chart" / "files"
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FILES / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]


def read_section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_each_alert_has_a_section_and_each_section_an_alert() -> None:
    sections = re.findall(r"^### (\w+)$", read_section("Rules and alerts"), re.MULTILINE)
    assert sections == [alert["alert"] for alert in ALERTS]
    for alert in ALERTS:
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"{PAGE}#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in {"warning", "critical"}


def test_each_dashboard_is_in_the_table() -> None:
    stated = re.findall(r"^\| `(\w+\.json)` \|", read_section("Dashboards"), re.MULTILINE)
    assert sorted(stated) == [path.name for path in DASHBOARDS]
    template = (CHECKOUT / "deploy" / "chart" / "templates" / "monitoring.yaml").read_text()
    assert {f'"{path.stem}"' for path in DASHBOARDS} <= set(template.split())


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_names_no_data_source_of_its_own(path: Any) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == f"pomona-{path.stem}"
    assert "id" not in board, "it would be that of one Grafana"
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(target["expr"] for panel in panels for target in panel["targets"])
    assert not [panel["title"] for panel in panels if not panel.get("description")]
    # An interval that is shorter than two scrapes has no rate, and a long one hides what is short.
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    intervals = {interval for expression in expressions for interval in re.findall(r"[})a-z]\[([^\]]+)\]", expression)}
    assert intervals <= {"$__rate_interval"}


def test_prefix_is_that_of_the_documented_names() -> None:
    rows = re.findall(
        r"^\| `(pomona_\w+)` \| `(flexinfer_\w+)` \|$", read_section("Names of another project"), re.MULTILINE
    )
    assert [name.replace("pomona", "flexinfer", 1) for name, _ in rows] == [other for _, other in rows]
    served = {family.name for family in ControllerMetrics("flexinfer").registry.collect()}
    own = {name for name in served if name.startswith("flexinfer_")}
    assert own == {"flexinfer_tokens_per_second", "flexinfer_model_load_seconds"}
    assert own <= {other for _, other in rows}
