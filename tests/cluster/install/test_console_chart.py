"""The chart's density API: every value reaches it, and its rights are to read and to ask for reviews."""

from pathlib import Path

import msgspec
import yaml

from cli.console import api
from console.density_prices import DensityPrices
from tests.cluster.install.chart_values import EVERYTHING
from tests.cluster.install.test_chart import Identity, render, render_everything

VALUES = EVERYTHING["console"]
CONSOLE: Identity = ("Deployment", "pomona-system", "pomona-console")


async def test_every_value_reaches_the_density_api(tmp_path: Path) -> None:
    objects = await render_everything(tmp_path)
    deployment = objects[CONSOLE]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert deployment["replicas"] == VALUES["replicas"]
    assert container["resources"] == VALUES["resources"]
    assert container["args"] == [
        *("console", "api", "--address=0.0.0.0:8090", "--metrics-address=0.0.0.0:8080"),
        *("--tls-certificate=/etc/pomona/tls/tls.crt", "--tls-key=/etc/pomona/tls/tls.key"),
        *("--prices=/etc/pomona/prices/prices.yaml", "--vendors=/etc/pomona/vendors/vendors.yaml", "--verbose"),
    ]
    options = {option for param in api.params for option in param.opts}
    assert {argument.partition("=")[0] for argument in container["args"][2:]} <= options
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    prices = yaml.safe_load(objects["ConfigMap", "pomona-system", "pomona-console"]["data"]["prices.yaml"])
    assert msgspec.convert(prices, DensityPrices).watts == {"nvidia-l4": 72}
    for kind, *path in (("Service", "selector"), ("PodMonitor", "selector", "matchLabels")):
        selected = objects[kind, "pomona-system", "pomona-console"]["spec"]
        for part in path:
            selected = selected[part]
        assert selected.items() <= deployment["template"]["metadata"]["labels"].items()


async def test_density_api_is_off_by_default() -> None:
    assert CONSOLE not in await render()


async def test_density_api_writes_nothing_but_reviews() -> None:
    objects = await render("--set=console.enabled=true")
    rules = objects["ClusterRole", "", "pomona-console"]["rules"]
    rules += objects["Role", "pomona-system", "pomona-console"]["rules"]
    written = {name for rule in rules for name in rule["resources"] if not {"list", "watch"}.issuperset(rule["verbs"])}
    assert written == {"tokenreviews", "subjectaccessreviews"}
    assert "secrets" not in {name for rule in rules for name in rule["resources"]}
