"""Alerts fire for real engines under load, which a real Prometheus reads: llama.cpp in a pod, llama.cpp and mlx-lm on a
host. The engines that need a GPU or gigabytes are in ../metrics/rules_test.yaml."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from controller.services.pods.beside_pods import build_pod_monitor
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, READY_SECONDS, Cluster
from tests.cluster.metrics.test_forged_series import RULES, build_job
from tests.controlplane.process import Process
from tests.controlplane.prometheus import Prometheus
from tests.support.eventually import eventually
from tests.support.tiny_models import tiny_mlx

CLIENTS = 100
"""Clients of each service: the last one waits for more than ten seconds, and the queue of a proxy holds them all."""
LONG = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "stream": True, "ignore_eos": True}
TIMEOUT = aiohttp.ClientTimeout(total=120)


@contextlib.asynccontextmanager
async def under_load(cluster: Cluster, *services: str) -> AsyncIterator[None]:
    """Start clients that ask each service all the time."""

    async def ask(session: aiohttp.ClientSession, url: str, service: str, token: str) -> None:
        headers, body = {"Authorization": f"Bearer {token}"}, {**LONG, "model": service}
        while True:
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                await response.read()

    async with (
        aiohttp.ClientSession(timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as clients,
    ):
        tasks = [
            clients.create_task(ask(session, url, service, token))
            for service in services
            for url, token in [((await cluster.urls(service))[0], await cluster.token(service))]
            for _ in range(CLIENTS)
        ]
        yield
        for task in tasks:
            task.cancel()


@pytest.mark.long
async def test_alerts_and_traffic_of_each_engine_that_runs_here(
    cluster: Cluster, metal_host: StartMetalHost, tmp_path: Path, watched: list[Process]
) -> None:
    host = await metal_host("studio-1", f"--memory-budget={64 * GIB}", "--metrics-address=0.0.0.0:17999")
    folder = host.file_root / "mlx"
    tiny_mlx.write(folder, text="The MLX model speaks.", loop=True)
    weights = cluster.model("mlx", memoryBytes=GIB)
    weights["spec"]["source"] = f"file://{folder}/"
    await cluster.apply(
        cluster.model(),
        weights,
        cluster.service("chat", "metal", parallel=1, contextLength=512),
        cluster.service("mlx", "metal", modelRef="mlx", extraArgs=[], contextLength=512),
        cluster.service("pod", "cpu", parallel=1, contextLength=512),
    )
    await cluster.ready("chat", "mlx", "pod")
    ((_, monitor),) = build_pod_monitor(await cluster.get("pod"), "llama.cpp", {}, exists=True)
    address = (await cluster.urls("pod"))[0].removeprefix("http://")
    job = build_job(monitor, address, cluster.namespace, "pod")
    job["authorization"] = {"credentials": await cluster.token("pod")}
    rules = tmp_path / "rules.yaml"
    rules.write_text(re.sub(r"for: \d+m", "for: 0s", RULES.read_text()))
    prometheus = Prometheus(tmp_path, rules, {"hosts": [f"{host.address}:17999"]}, [job])
    watched.append(prometheus.process)
    wanted = {("LLMHighQueueDepth", service) for service in ("chat", "mlx", "pod")}
    wanted |= {("LLMHighLatency", service) for service in ("chat", "mlx", "pod")}
    try:
        await prometheus.start()

        async def fired() -> bool:
            assert await prometheus.list_problems() == []
            alerts = (await prometheus.read("alerts"))["alerts"]
            firing = {(alert["labels"]["alertname"], alert["labels"].get("service")) for alert in alerts}
            assert wanted - firing == set()
            return True

        async def is_shown() -> bool:
            for service in ("chat", "mlx", "pod"):
                status = (await cluster.get(service)).status
                assert status.requests_per_minute, status
                assert status.average_latency_ms, status
            return True

        async with under_load(cluster, "chat", "mlx", "pod"):
            await eventually(fired, READY_SECONDS)
            await eventually(is_shown, READY_SECONDS)
        series = 'pomona_agent_process_cpu_seconds_total{service="%s"}'
        for service in ("chat", "mlx"):
            (sample,) = (await prometheus.read("query", query=series % service))["result"]
            assert float(sample["value"][1]) > 1
    finally:
        watched.remove(prometheus.process)
        await prometheus.process.kill()
