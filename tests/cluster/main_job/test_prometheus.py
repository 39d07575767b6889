"""A real Prometheus scrapes real processes, and has a series for each metric of the rules and dashboards."""

import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from crds.nodefitness import NodeDevice
from kube.client import Client
from kube.resources import NODE_FITNESSES
from node_agent.metrics import NodeMetrics
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, READY_SECONDS, Cluster
from tests.controlplane.helm import CHART
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.controlplane.prometheus import Prometheus
from tests.support.eventually import eventually
from tests.support.node_tokens import node_agent_kubeconfig

NODE = "cpu-1"
RULES = CHART / "files" / "rules.yaml"
DASHBOARDS = CHART / "files" / "dashboards"
OF_DEVICES = {
    "pomona_gpu_temperature_celsius",
    "pomona_gpu_utilization_ratio",
    "pomona_gpu_memory_bytes",
    "pomona_gpu_memory_free_bytes",
}
"""Metrics that a node without a device has not: they are compared with those of a node agent that is told of one."""
NOT_HERE = re.compile(
    r"(vllm:|sglang:|tgi_|llamacpp:|DCGM_|(amd_)?gpu_|habanalabs_)\w+|pomona_device_\w+|pomona_cache_usage_ratio"
    r"|pomona_service_degraded"
)
"""Metrics of engines and exporters that do not run here, and what is recorded of them: the rules are tried with series
of their names by tests/cluster/metrics, and llama.cpp in a pod by `test_alerts.py`. No service here is degraded: its
series is that of tests/unit/controller/test_model_metrics.py."""
DEVICE = NodeDevice("GPU-1", memory_bytes=GIB, free_bytes=GIB, utilization_percent=1, temperature_celsius=50)


@pytest_asyncio.fixture
async def node_agent(
    node: Process, plane: ControlPlane, client: Client, tmp_path: Path, watched: list[Process]
) -> AsyncIterator[str]:
    """The address of the metrics of a node agent."""
    del node  # the agent reports about it
    async with contextlib.AsyncExitStack() as stack:
        kubeconfig = await node_agent_kubeconfig(plane, client, NODE, stack)
        stack.push_async_callback(plane.request, "DELETE", NODE_FITNESSES.path(None, NODE), accept={404})
        argv = [sys.executable, "-m", "cli.main", "node-agent", f"--node-name={NODE}", f"--kubeconfig={kubeconfig}"]
        agent = Process("node agent", [*argv, "--interval=1s", "--port=0"], tmp_path / "node-agent.log")
        agent.start()
        watched.append(agent)
        stack.push_async_callback(agent.kill)
        yield "127.0.0.1:9100"


def list_expressions() -> list[str]:
    """Return the expressions of all rules and panels."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    boards = [json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))]
    targets: list[dict[str, Any]] = [
        target for board in boards for panel in board["panels"] for target in panel.get("targets", ())
    ]
    shown = [target["expr"].replace("$__rate_interval", "5m") for target in targets]
    return [*(rule["expr"] for group in groups for rule in group["rules"]), *shown]


def list_variables() -> set[str]:
    """Return the expressions whose labels are variables of dashboards, as in `label_values(EXPRESSION, NAME)`."""
    boards = [json.loads(path.read_text()) for path in DASHBOARDS.glob("*.json")]
    queries = [
        variable["definition"]
        for board in boards
        for variable in board["templating"]["list"]
        if "definition" in variable
    ]
    return {query.removeprefix("label_values(").rpartition(",")[0] for query in queries}


@pytest.mark.long
async def test_every_metric_of_rules_and_dashboards_has_a_series(
    cluster: Cluster, metal_host: StartMetalHost, node_agent: str, tmp_path: Path, watched: list[Process]
) -> None:
    host = await metal_host("studio-1", f"--memory-budget={64 * GIB}", "--metrics-address=0.0.0.0:17999")
    targets = {
        "controller": ["127.0.0.1:8080"],
        "hosts": [f"{host.address}:17999"],
        "node-agents": [node_agent],
    }
    prometheus = Prometheus(tmp_path, RULES, targets)
    watched.append(prometheus.process)
    try:
        await prometheus.start()
        services = (cluster.service("chat", "metal"), cluster.service("pod", "cpu"), cluster.service("waits", "nvidia"))
        await cluster.apply(cluster.model(), *services)
        await cluster.ready("chat", "pod")
        wanted = set[str]()
        for expression in (*list_expressions(), *list_variables()):
            wanted |= await prometheus.list_metrics(expression)
        wanted = {name for name in wanted if not NOT_HERE.fullmatch(name)}
        assert "pomona_time_to_first_token_p95_seconds" in wanted

        async def are_known() -> bool:
            assert (await cluster.ask("chat")).status == 200
            assert await prometheus.list_problems() == []
            assert wanted - OF_DEVICES - await prometheus.list_known() == set()
            await check_labels(prometheus, cluster.namespace)
            return True

        await eventually(are_known, READY_SECONDS)
    finally:
        watched.remove(prometheus.process)
        await prometheus.process.kill()


async def check_labels(prometheus: Prometheus, namespace: str) -> None:
    """Compare the labels of what another project has, too."""

    async def labels(metric: str) -> list[dict[str, str]]:
        answer = await prometheus.read("query", query=f'{metric}{{namespace="{namespace}"}}')
        return [
            {name: series["metric"][name] for name in ("model", "backend", "node") if name in series["metric"]}
            for series in answer["result"]
        ]

    of_host = {"model": "tiny", "backend": "llama.cpp", "node": "studio-1"}
    # The pod has generated tokens, too, if its probe came after its counters were read first.
    of_pod = of_host | {"node": NODE}
    assert [speed for speed in await labels("pomona_tokens_per_second") if speed != of_pod] == [of_host]
    loads = await labels("pomona_model_load_seconds")
    assert sorted(load["node"] for load in loads) == [NODE, "studio-1"]
    assert {load["model"] for load in loads} == {"tiny"}


def test_metrics_of_devices_are_those_of_a_node_agent_that_has_one() -> None:
    metrics = NodeMetrics("gpu-1", "pomona")
    metrics.show_devices([DEVICE])
    families = text_string_to_metric_families(metrics.render().decode())
    assert {
        family.name for family in families if family.name.startswith("pomona_gpu_") and family.samples
    } == OF_DEVICES
