"""Prometheus and promtool, built once from the Go module beside this file, and a server that scrapes tests' processes.

They are built without the discovery of targets in clouds, which is half of their code, and without the web interface.
"""

import asyncio
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import yaml

from tests.controlplane.binaries import ensure_module_programs
from tests.controlplane.process import Process
from tests.support.eventually import eventually

MODULE = Path(__file__).parent
PACKAGES = {name: f"github.com/prometheus/prometheus/cmd/{name}" for name in ("prometheus", "promtool")}
TAGS = ("remove_all_sd",)
PORT = 9090
SCRAPE_SECONDS = 1


def ensure_prometheus() -> dict[str, Path]:
    """Return the programs `prometheus` and `promtool`; build what is not in the cache.

    Raises:
        BuildError: they cannot be built here.
    """
    return ensure_module_programs(MODULE, PACKAGES, "prometheus", tags=TAGS)


def run_promtool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run promtool in a folder, and return its exit code and output."""
    argv = [str(ensure_prometheus()["promtool"]), *arguments]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


class NotReadyError(Exception):
    """It listens, and reads its storage yet."""


class Prometheus:
    """A server with rules that scrapes targets every second.

    Args:
        folder: for its data, configuration and log.
        rules: file of rules.
        targets: HOST:PORT of each target, by the name of the job.
        jobs: further `scrape_configs`.
    """

    def __init__(
        self,
        folder: Path,
        rules: Path,
        targets: Mapping[str, Sequence[str]],
        jobs: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        configuration = folder / "prometheus.yaml"
        configuration.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
                    "rule_files": [str(rules)],
                    "scrape_configs": [
                        {"job_name": job, "static_configs": [{"targets": list(places)}]}
                        for job, places in targets.items()
                    ]
                    + [*jobs],
                }
            )
        )
        argv = [
            str(ensure_prometheus()["prometheus"]),
            f"--config.file={configuration}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{PORT}",
        ]
        self.process = Process("prometheus", argv, folder / "prometheus.log", {"GOMAXPROCS": "1"})

    async def start(self) -> None:
        """Start it, and wait until it is ready."""
        self.process.start()

        async def answers() -> bool:
            assert self.process.running, self.process.tail(20)
            try:
                return "activeTargets" in await self.read("targets")
            except (aiohttp.ClientConnectionError, NotReadyError):
                return False

        await eventually(answers)

    async def read(self, path: str, **parameters: str) -> Any:
        """Return the `data` of an answer of its API.

        Raises:
            NotReadyError: it listens, and is not ready yet.
        """
        url = f"http://127.0.0.1:{PORT}/api/v1/{path}?{urlencode(parameters)}"
        async with aiohttp.request("GET", url) as response:
            if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
                raise NotReadyError(await response.text())
            answer = json.loads(await response.read())
        assert answer["status"] == "success", (path, parameters, answer)
        return answer["data"]

    async def list_metrics(self, expression: str) -> set[str]:
        """Return the names of the metrics in an expression, as its own parser reads it."""
        return set(_walk(await self.read("parse_query", query=expression)))

    async def list_known(self) -> set[str]:
        """Return the names of all metrics of which there is a series."""
        return set(await self.read("label/__name__/values"))

    async def list_problems(self) -> list[str]:
        """Return the targets that are not scraped, and the rules that fail, with their errors."""
        targets, groups = await asyncio.gather(self.read("targets"), self.read("rules"))
        failing = [target for target in targets["activeTargets"] if target["health"] != "up"]
        rules = [rule for group in groups["groups"] for rule in group["rules"] if rule["health"] != "ok"]
        return [
            *(f"{target['scrapeUrl']}: {target['health']}: {target['lastError']}" for target in failing),
            *(f"{each['name']}: {each['health']}: {each.get('lastError')}" for each in rules),
        ]


def _walk(node: object) -> Iterator[str]:
    """Yield the name of each selector in a parsed expression."""
    if isinstance(node, list):
        for child in node:
            yield from _walk(child)
    if isinstance(node, dict):
        if node.get("type") in {"vectorSelector", "matrixSelector"}:
            yield node["name"]
        for child in node.values():
            yield from _walk(child)
