"""A real Prometheus takes from a tenant's pod what its engine measures, and no series of the cluster."""

import re
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from controller.services.pods.beside_pods import build_pod_monitor
from crds.inferenceservice import InferenceService
from kube.client import Obj
from tests.controlplane.helm import CHART
from tests.controlplane.prometheus import Prometheus
from tests.support.api_objects import service
from tests.support.eventually import eventually

RULES = CHART / "files" / "rules.yaml"
REAL = "llamacpp:requests_deferred"
OF_PROXY = "pomona_proxy_queued"
"""A series of the proxy in each pod, so that a tenant can say it of pods of its own."""
SYNTHETIC = {"up"}
"""Series that Prometheus adds to each scrape; their names begin with `scrape_`, too."""
FORGED = f"""\
pomona_queue_depth{{pool="nvidia"}} 1000000
{OF_PROXY}{{namespace="victim",service="chat"}} 1000000
pomona_service_ready{{namespace="victim",service="chat",priority="high"}} 0
pomona_service_degraded{{namespace="victim",service="chat",condition="SpeedDegraded"}} 1
leader_election_master_status{{name="pomona-controller"}} 7
pomona_workqueue_oldest_seconds 1000000
pomona_objects{{kind="MetalHost",phase="NotReady"}} 1000000
pomona_node_observed_timestamp_seconds{{node="gpu-1"}} 0
pomona_gpu_temperature_celsius{{node="gpu-1",gpu="GPU-1"}} 1000
pomona_latency_p95_seconds{{namespace="victim",service="chat"}} 1000000
pomona_time_to_first_token_p95_seconds{{namespace="victim",service="chat"}} 1000000
pomona_requests_waiting{{namespace="victim",service="chat",source="proxy"}} 1000000
ALERTS{{alertname="PomonaHostLost",alertstate="firing"}} 1
{REAL}{{namespace="victim",inference_service="other"}} 3
"""
"""Each alert but PomonaQueueStuck, which sums over half an hour, is pending at once if its series is taken."""


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[str]:
    """The address of a tenant's pod that answers at /metrics what it likes."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=FORGED, content_type="text/plain")

    application = web.Application()
    application.router.add_get("/metrics", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def snake_case(obj: Any) -> Any:
    """Return an object with the keys of Prometheus' configuration, as its operator writes them."""
    if isinstance(obj, list):
        return [snake_case(entry) for entry in obj]
    if isinstance(obj, dict):
        return {re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", key): snake_case(obj[key]) for key in obj}
    return obj


def build_job(monitor: Obj, address: str, namespace: str = "attacker", service: str = "chat") -> Obj:
    """Return the scrape of one pod as Prometheus' operator renders it from a PodMonitor."""
    spec = monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    discovered = {"__meta_kubernetes_pod_label_inference_pomona_dev_service": service}
    of_target = {"namespace": namespace, "pod": f"{service}-0", "container": "engine", **discovered}
    limits = {key: spec[key] for key in spec if key.endswith("Limit")}
    return {
        "job_name": f"{namespace}/{service}",
        "static_configs": [{"targets": [address], "labels": of_target}],
        "metrics_path": endpoint["path"],
        "honor_labels": endpoint.get("honorLabels", False),
        "honor_timestamps": endpoint.get("honorTimestamps", True),
        "relabel_configs": snake_case(endpoint.get("relabelings", [])),
        "metric_relabel_configs": snake_case(endpoint.get("metricRelabelings", [])),
        **snake_case(limits),
    }


@pytest.mark.long
async def test_forged_series_of_a_pod_neither_show_nor_fire(engine: str, tmp_path: Path) -> None:
    ((_, monitor),) = build_pod_monitor(msgspec.convert(service(), InferenceService), "llama.cpp", {}, exists=True)
    prometheus = Prometheus(tmp_path, RULES, {}, [build_job(monitor, engine)])
    try:
        await prometheus.start()

        async def was_scraped() -> bool:
            assert await prometheus.list_problems() == []
            return REAL in await prometheus.list_known()

        await eventually(was_scraped)
        (sample,) = (await prometheus.read("query", query=REAL))["result"]
        assert (sample["metric"]["namespace"], sample["metric"]["inference_service"]) == ("attacker", "chat")
        seen = (await prometheus.read("query", query='{job="attacker/chat"}'))["result"]
        names = {series["metric"]["__name__"] for series in seen}
        assert {name for name in names if not name.startswith("scrape_")} - SYNTHETIC == {REAL, OF_PROXY}
        forged = (await prometheus.read("query", query='{exported_namespace="victim"}'))["result"]
        of_pod = {(series["metric"]["__name__"], series["metric"]["namespace"]) for series in forged}
        assert of_pod == {(REAL, "attacker"), (OF_PROXY, "attacker")}
        scraped_at = float((await prometheus.read("query", query="time()"))["result"][1])

        async def rules_have_read_it() -> bool:
            """A late evaluation reads the series of the moment at which it was due, up to an interval before."""
            groups = (await prometheus.read("rules"))["groups"]
            return all(
                datetime.fromisoformat(group["lastEvaluation"]).timestamp() > scraped_at + 2 * group["interval"]
                for group in groups
            )

        await eventually(rules_have_read_it)
        alerts = (await prometheus.read("alerts"))["alerts"]
        # No controller is scraped, so that none leads.
        pending = {(alert["labels"]["alertname"], alert["labels"].get("namespace")) for alert in alerts}
        assert pending == {("PomonaControllerWithoutLeader", None), ("LLMHighQueueDepth", "attacker")}
    finally:
        await prometheus.process.kill()


def test_every_alert_is_tried() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    names = {line.partition("{")[0].partition(" ")[0] for line in FORGED.splitlines()}
    untried = {
        rule["alert"]
        for group in groups
        for rule in group["rules"]
        if "alert" in rule and not any(re.search(rf"\b{name}\b", rule["expr"]) for name in names)
    }
    assert untried == set()
