"""The chart's gateway: every value reaches it, it is left out where it cannot serve, and it reads few Secrets."""

from pathlib import Path
from typing import Any

import pytest

from crds.meta import GATEWAY_SHARDS
from tests.cluster.install.chart_values import EVERYTHING
from tests.cluster.install.test_chart import CONTROLLER, Identity, render, render_everything

VALUES = EVERYTHING["gateway"]
GATEWAY: Identity = ("Deployment", "pomona-system", "pomona-gateway")
SERVICE: Identity = ("Service", "pomona-system", "pomona-gateway")
INGRESS: Identity = ("Ingress", "pomona-system", "pomona-gateway")
ROUTE: Identity = ("HTTPRoute", "pomona-system", "pomona-gateway")
ARGUMENTS = ["gateway", "--address=0.0.0.0:8080", "--metrics-address=0.0.0.0:8081", "--drain-seconds=580"]


def read_container(objects: dict[Identity, Any]) -> Any:
    (container,) = objects[GATEWAY]["spec"]["template"]["spec"]["containers"]
    return container


async def test_every_value_reaches_the_gateway(tmp_path: Path) -> None:
    objects = await render_everything(tmp_path)
    deployment = objects[GATEWAY]["spec"]
    pod, container = deployment["template"]["spec"], read_container(objects)
    assert deployment["replicas"] == VALUES["replicas"]
    assert container["resources"] == VALUES["resources"]
    assert (pod["nodeSelector"], pod["tolerations"]) == (EVERYTHING["nodeSelector"], EVERYTHING["tolerations"])
    assert container["args"] == [
        *ARGUMENTS,
        *("--tls-certificate=/etc/pomona/tls/tls.crt", "--tls-key=/etc/pomona/tls/tls.key"),
        *("--hosts-ca=/etc/pomona/hosts-ca/all.pem", "--redis-url-file=/etc/pomona/redis/url", "--verbose"),
    ]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {name: f"/etc/pomona/{name}" for name in ("tls", "hosts-ca", "redis")}
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()
    (port,) = objects[SERVICE]["spec"]["ports"]
    assert (port["port"], port["name"]) == (443, "https")
    for kind, *path in (("Service", "selector"), ("PodMonitor", "selector", "matchLabels")):
        selected = objects[kind, "pomona-system", "pomona-gateway"]["spec"]
        for part in path:
            selected = selected[part]
        assert selected.items() <= deployment["template"]["metadata"]["labels"].items()


async def test_gateway_is_on_by_default_and_the_controller_knows_it() -> None:
    objects = await render()
    assert objects[GATEWAY]["spec"]["replicas"] == 2
    assert read_container(objects)["args"] == ARGUMENTS
    (port,) = objects[SERVICE]["spec"]["ports"]
    assert (port["port"], port["name"], port["targetPort"]) == (80, "http", "api")
    (controller,) = objects[CONTROLLER]["spec"]["template"]["spec"]["containers"]
    assert "--gateway" in controller["args"]
    assert not {INGRESS, ROUTE} & objects.keys()


@pytest.mark.parametrize("value", ["gateway.enabled=false", "scope.namespaces={team-a}"])
async def test_cluster_without_a_gateway_has_nothing_of_it(value: str) -> None:
    objects = await render("--set", value)
    assert [identity for identity in objects if "pomona-gateway" in identity[2].replace("gatewaykeys", "keys")] == []
    (controller,) = objects[CONTROLLER]["spec"]["template"]["spec"]["containers"]
    assert "--gateway" not in controller["args"]


async def test_ingress_leads_to_the_gateway(tmp_path: Path) -> None:
    ingress = (await render_everything(tmp_path))[INGRESS]
    stated = VALUES["ingress"]
    assert ingress["metadata"]["annotations"] == stated["annotations"]
    assert ingress["spec"]["ingressClassName"] == stated["className"]
    assert ingress["spec"]["tls"] == [{"hosts": [stated["host"]], "secretName": stated["tlsSecret"]}]
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["path"], path["pathType"]) == (stated["host"], "/", "Prefix")
    assert path["backend"] == {"service": {"name": "pomona-gateway", "port": {"name": "https"}}}


async def test_route_of_the_gateway_api_leads_to_the_gateway() -> None:
    route = (
        await render(
            "--set=gateway.httpRoute.enabled=true",
            "--set=gateway.httpRoute.parentRefs[0].name=public,gateway.httpRoute.parentRefs[0].namespace=networking",
            "--set=gateway.httpRoute.hostnames={llm.example.com}",
        )
    )[ROUTE]["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "networking"}]
    assert route["hostnames"] == ["llm.example.com"]
    (rule,) = route["rules"]
    assert rule["backendRefs"] == [{"name": "pomona-gateway", "port": 80}]


async def test_gateway_only_reads_and_of_secrets_only_its_own() -> None:
    objects = await render()
    cluster, own = (
        objects[kind, namespace, "pomona-gateway"]["rules"]
        for kind, namespace in (("ClusterRole", ""), ("Role", "pomona-system"))
    )
    assert {verb for rule in cluster for verb in rule["verbs"]} == {"list", "watch"}
    assert "secrets" not in {name for rule in cluster for name in rule["resources"]}
    (secrets,) = own
    assert secrets["resourceNames"] == list(GATEWAY_SHARDS)
    assert set(secrets["verbs"]) == {"get", "list", "watch"}
