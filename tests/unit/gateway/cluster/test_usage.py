"""Usage by key and service: bounded, counted, and as the documented series."""

import re

import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.cluster.usage import MOST_LABEL_SETS, UsageTable
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.metrics import render_metrics
from gateway.proxy.service import Service
from tests.controlplane.process import CHECKOUT
from tests.unit.gateway.proxy.running_proxy import make_service


def test_usage_is_counted_by_key_and_service() -> None:
    table = UsageTable()
    table.count("team-a", "ci", "team-b/tiny", prompt_tokens=10, generated_tokens=3)
    table.count("team-a", "ci", "team-b/tiny", prompt_tokens=5, generated_tokens=0)
    table.count("team-a", "ci", "small", prompt_tokens=1, generated_tokens=1)
    assert msgspec.to_builtins(table.list_usages()) == [
        {"namespace": "team-a", "key": "ci", "service": "team-b/tiny"}
        | {"requests": 2, "prompt_tokens": 15, "generated_tokens": 3},
        {"namespace": "team-a", "key": "ci", "service": "small"}
        | {"requests": 1, "prompt_tokens": 1, "generated_tokens": 1},
    ]
    assert (
        'pomona_gateway_key_prompt_tokens_total{key="ci",namespace="team-a",service="team-b/tiny"} 15.0\n'
        in table.render_metrics().decode()
    )


def test_label_sets_are_bounded_and_free_again() -> None:
    table = UsageTable()
    for number in range(MOST_LABEL_SETS + 50):
        table.count("team-a", f"key-{number}", "tiny", prompt_tokens=1, generated_tokens=1)
    assert len(table.list_usages()) == MOST_LABEL_SETS + 1
    assert table.list_usages()[-1] == msgspec.structs.replace(
        table.list_usages()[-1], namespace="other", key="other", service="other", requests=50
    )
    for namespace, key in (("team-a", "key-7"), ("team-a", "key-8"), ("team-b", "key-9")):
        table.forget_key(namespace, key)
    assert len(table.list_usages()) == MOST_LABEL_SETS - 1
    table.count("team-a", "new", "tiny", prompt_tokens=1, generated_tokens=1)
    assert table.list_usages()[-1].key == "new"


def test_documented_metrics_are_those_that_only_the_gateway_has() -> None:
    table = UsageTable()
    table.count("team-a", "ci", "tiny", prompt_tokens=1, generated_tokens=1)
    service = Service(make_service(name="team-a/tiny"), InFlight(lambda _: None))
    of_proxy = {family.name for family in families(render_metrics({"team-a/tiny": service}, "pomona_gateway"))}
    service.metrics.fallbacks["NoCapacity"] += 1
    served = {
        f"{family.name}_total": {label for sample in family.samples for label in sample.labels}
        for family in families(render_metrics({"team-a/tiny": service}, "pomona_gateway") + table.render_metrics())
        if family.name not in of_proxy
    }
    page = (CHECKOUT / "docs" / "metrics.md").read_text()
    section = page.partition("## Metrics of the gateway\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    assert {row[1].strip(" `"): set(re.findall(r"`(\w+)`", row[3])) for row in rows} == served


def families(text: bytes) -> list[Metric]:
    return list(text_string_to_metric_families(text.decode()))
