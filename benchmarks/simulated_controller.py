"""A controller on a simulated API server, with as many services and hosts as a figure needs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final
from unittest import mock

from benchmarks.simulated_server import SimulatedServer, simulated_host
from controller.controller_options import ControllerOptions
from controller.pod_settings import PodSettings
from controller.reconcile import feed
from controller.run import Controller
from controller.services import readiness_probe
from crds.meta import Accelerator
from kube.client import Client, Obj
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, METAL_HOSTS, MODELS
from runtimes.probe import ProbeResult, build_success
from tests.support.background import running
from tests.support.watched_controller import follow_by_watches, no_credentials

NAMESPACE: Final = "team"
GIB: Final = 2**30
SILENCE_SECONDS: Final = 2.5
"""Longer than a second look at a service that waits for a binding."""


@dataclass(frozen=True)
class SimulatedController:
    """A running controller and its API server."""

    server: SimulatedServer
    controller: Controller

    async def settle(self) -> None:
        """Wait until no reconcile waits and no object has changed for a while."""
        store, now = self.controller.store, asyncio.get_running_loop().time
        since, revision = now(), -1
        while now() - since < SILENCE_SECONDS:
            await asyncio.sleep(SILENCE_SECONDS / 10)
            if store.revision != revision:
                revision, since = store.revision, now()


def simulated_service(name: str, accelerator: Accelerator) -> Obj:
    """Return a service with the values that the API server fills in."""
    spec = {
        "modelRef": "tiny" if accelerator == "metal" else "fetched",
        "hardware": {"accelerator": accelerator},
        "cacheTypeK": "f16",
        "cacheTypeV": "f16",
        "contextLength": 4096,
        "mode": "chat",
        "parallel": 1,
        "priority": "normal",
        "replicas": 1,
        "suspend": False,
    }
    return {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


def fill(
    server: SimulatedServer, *, in_pods: int, on_hosts: int, waiting: int, hosts: int, per_host: int, spare: int = 0
) -> None:
    """Create Models, hosts with room for `on_hosts` services, at most `per_host` on each, and all services.

    Each host has room for `spare` more.
    """
    sources = {"tiny": "file:///models/tiny.gguf", "fetched": "https://models.example/tiny.gguf"}
    for name, source in sources.items():
        spec = {"source": source, "memoryBytes": GIB}
        server.put(MODELS, {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec})
    server.put(ENDPOINT_SLICES, {"metadata": {"name": "kubernetes", "namespace": "default"}, "endpoints": []})
    for number in range(hosts):
        room = max(0, min(per_host, on_hosts - number * per_host))
        server.put(METAL_HOSTS, simulated_host(number, (room + spare) * GIB + GIB // 2))
    for number in range(in_pods + on_hosts + waiting):
        accelerator: Accelerator = "nvidia" if number < in_pods else "metal"
        server.put(INFERENCE_SERVICES, simulated_service(f"s{number:05}", accelerator))


async def _answer(_session: object, base_url: str, **_options: object) -> ProbeResult:
    return build_success(base_url, "chat")


@contextlib.asynccontextmanager
async def simulated_controller(server: SimulatedServer) -> AsyncIterator[SimulatedController]:
    """Run a controller until it has nothing more to do, and to the end of the block; probes are answered at once.

    Our own kinds come by watches as all others do, not by kopf.
    """
    with (
        mock.patch.object(feed, "follow", follow_by_watches),
        mock.patch.object(readiness_probe, "generate_token", _answer),
    ):
        controller = Controller(
            Client(server), no_credentials, ControllerOptions(PodSettings("pomona:test"), elects=False)
        )
        async with running(controller.run()):
            world = SimulatedController(server, controller)
            await world.settle()
            yield world
