"""The rules as Prometheus' own tool reads them, and what they say of given series."""

from pathlib import Path

import pytest
import yaml

from tests.controlplane.helm import CHART
from tests.controlplane.prometheus import run_promtool

RULES = CHART / "files" / "rules.yaml"
FOLDER = Path(__file__).parent


@pytest.mark.long
def test_rules_are_valid() -> None:
    checked = run_promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES), folder=FOLDER)
    assert checked.returncode == 0, checked.stderr
    count = sum(len(group["rules"]) for group in yaml.safe_load(RULES.read_text())["groups"])
    assert f"{count} rules found" in checked.stdout


@pytest.mark.long
def test_alerts_fire_at_their_thresholds() -> None:
    tested = run_promtool("test", "rules", "rules_test.yaml", folder=FOLDER)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    tests = yaml.safe_load((FOLDER / "rules_test.yaml").read_text())["tests"]
    fired = {rule["alertname"] for test in tests for rule in test.get("alert_rule_test", ()) if rule.get("exp_alerts")}
    groups = yaml.safe_load(RULES.read_text())["groups"]
    assert fired == {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
