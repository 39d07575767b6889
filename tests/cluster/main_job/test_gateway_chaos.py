"""Faults at random around two replicas of the gateway, while clients count each token that they get and are charged.

Engines, gateways, Redis and the API server are killed, stopped and started again, one during the other. As long as no
gateway is killed, the charge in Redis is exact. A gateway that is killed takes with it which of its requests had ended,
so that their charge lies between what they used and what they reserved. Redis keeps all that it has answered, as its
option `appendfsync always` promises; what it forgets without is the subject of test_limit_stores.py.
"""

import asyncio
import contextlib
import functools
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE_NAME, LABEL_SLICE_MANAGED_BY, MANAGED_BY
from kube.resources import ENDPOINT_SLICES, GATEWAY_KEYS
from tests.chaos.counting_clients import CountingClients, KilledGateway
from tests.chaos.token_meter import LIMITS, TokenMeter
from tests.cluster.conftest import HUB_PORT
from tests.cluster.main_job.cluster import Cluster
from tests.cluster.shared_controller import SharedController
from tests.controlplane import pomona_image
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.servers.limit_stores import STORES, StoreServer, run_store

SEED: Final = int(os.environ.get("SEED", "1"))
FAULT_SECONDS: Final = 35.0
"""The time of each of the two phases."""
PAUSE_SECONDS: Final = (0.8, 3.0)
FAULTS: Final = {
    "engine killed": (4, 0.2, 3.0),
    "engine stopped": (3, 1.0, 6.0),
    "gateway killed": (2, 0.1, 2.0),
    "Redis killed": (1, 0.5, 4.0),
    "Redis stopped": (2, 0.3, 3.0),
    "API server killed": (1, 1.0, 5.0),
    "API server stopped": (1, 1.0, 5.0),
}
"""The number of each fault in a round, and its shortest and longest time; each round has an order of its own."""
CLIENTS: Final = 20


class FaultyWorld(NamedTuple):
    """The processes that break, and the faults so far."""

    plane: ControlPlane
    store: StoreServer
    gateways: Sequence[KilledGateway]
    engines: Sequence[Process]
    reports: Sequence[Path]
    """The reports of the engines: requests that they were asked, and tokens that they have made."""
    locks: defaultdict[str, asyncio.Lock]
    faults: list[str]
    outages: list[tuple[float, float]]
    """Begin and end of each time in which Redis did not answer, by the clock of the loop."""

    async def break_at_random(self, kinds: Sequence[str], seed: int) -> None:
        """Inject faults of these kinds, also several at a time; return when the last one is over."""
        chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
        began, round_ = time.monotonic(), list[str]()
        counts = [FAULTS[kind][0] for kind in kinds]
        async with asyncio.TaskGroup() as tasks:
            while (at := time.monotonic() - began) < FAULT_SECONDS:
                round_ = round_ or chance.sample(kinds, sum(counts), counts=counts)
                kind = round_.pop()
                number, seconds = chance.randrange(1000), chance.uniform(*FAULTS[kind][1:])
                tasks.create_task(self._inject(kind, number, seconds, at))
                await asyncio.sleep(chance.uniform(*PAUSE_SECONDS))

    async def _inject(self, kind: str, number: int, seconds: float, at: float) -> None:
        """Inject a fault, unless its target has one."""
        part = kind.rpartition(" ")[0]
        number %= {"engine": len(self.engines), "gateway": len(self.gateways)}.get(part, 1)
        lock = self.locks[f"{part} {number}"]
        if lock.locked():
            return
        async with lock:
            self.faults.append(f"{at:.1f} s: {part} {number} {kind.rpartition(' ')[2]} for {seconds:.1f} s")
            if kind == "engine killed":
                await self.engines[number].kill()
                await asyncio.sleep(seconds)
                self.engines[number].start()
            elif kind == "engine stopped":
                await stop_for(self.engines[number].pid, seconds)
            elif kind == "gateway killed":
                await self.gateways[number].kill(seconds)
            elif part == "Redis":
                await self._break_store(kind, seconds)
            elif kind == "API server killed":
                await self.plane.stop_apiserver()
                await asyncio.sleep(seconds)
                await self.plane.start_apiserver()
            else:
                await stop_for(self.plane.apiserver.pid, seconds)

    async def _break_store(self, kind: str, seconds: float) -> None:
        """Kill Redis and start it again, or stop it for a while; note the time that is surely an outage."""
        clock, process = asyncio.get_running_loop().time, self.store.process
        if kind == "Redis killed":
            await process.kill()
            begin = clock()
            await asyncio.sleep(seconds)
            self.outages.append((begin, clock()))
            await self.store.start()
        else:
            begin = clock()
            await stop_for(process.pid, seconds)
            self.outages.append((begin, begin + seconds))

    def are_all_ways_used(self, clients: CountingClients, since: float) -> bool:
        """Return whether each gateway has asked each engine for a request sent since then."""
        gateways = {request.name: request.gateway.url for request in clients.requests if request.began > since}
        ways = {
            (gateways[name], number)
            for number, report in enumerate(self.reports)
            for verb, name, *_ in map(str.split, report.read_text().splitlines())
            if verb == "asked" and name in gateways
        }
        return len(ways) == len(self.gateways) * len(self.engines)


async def stop_for(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest_asyncio.fixture
async def world(
    plane: ControlPlane, cluster: Cluster, shared_controller: SharedController, tmp_path: Path, watched: list[Process]
) -> AsyncIterator[FaultyWorld]:
    """A service with three engines, two gateways before it, and Redis."""
    await shared_controller.lend("--gateway")
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu", replicas=0))
    kubeconfig = await plane.service_account_kubeconfig("pomona-system", "pomona-gateway")
    engines, reports, gateways = list[Process](), list[Path](), list[KilledGateway]()
    for number in range(3):
        name, port = f"engine-{number}", HUB_PORT + 2 + number
        reports.append(tmp_path / f"{name}.report")
        argv = [sys.executable, "-m", "tests.chaos.numbered_engine", ADDRESS, str(port), str(reports[-1])]
        engines.append(Process(name, argv, tmp_path / f"{name}.log"))
        await cluster.client.create(ENDPOINT_SLICES, describe_slice(cluster.namespace, name, port))
    async with run_store(STORES[0], tmp_path, keeps_data=True) as store:
        url_file = tmp_path / "redis-url"
        url_file.write_text(store.url)
        for port in (8095, 8097):
            argv = [*pomona_image.find_program(pomona_image.find_root()), "gateway", f"--kubeconfig={kubeconfig}"]
            argv += [f"--address=127.0.0.1:{port}", f"--metrics-address=127.0.0.1:{port + 1}"]
            process = Process("gateway", [*argv, f"--redis-url-file={url_file}"], tmp_path / f"gateway-{port}.log")
            gateways.append(KilledGateway(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"))
        processes = [*engines, *(gateway.process for gateway in gateways)]
        watched += processes
        try:
            for process in processes:
                process.start()
            for gateway in gateways:
                await eventually(functools.partial(gateway.answers, "/readyz"))
            yield FaultyWorld(plane, store, gateways, engines, reports, defaultdict(asyncio.Lock), [], [])
        finally:
            for process in processes:
                watched.remove(process)
                await process.kill()


def describe_slice(namespace: str, name: str, port: int) -> dict[str, Any]:
    labels = {LABEL_SERVICE_NAME: "chat", LABEL_SLICE_MANAGED_BY: "test", LABEL_MANAGED_BY: MANAGED_BY}
    return {
        "metadata": {"name": f"chat-{name}", "namespace": namespace, "labels": labels},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        "endpoints": [{"addresses": [ADDRESS]}],
    }


class Charge(NamedTuple):
    """The tokens that were charged in a phase, and the least and the most that may be."""

    charged: float
    least: int
    most: int


async def run_phase(
    world: FaultyWorld, clients: CountingClients, meter: TokenMeter, kinds: Sequence[str], seed: int
) -> Charge:
    """Break what these kinds break while clients ask; return the charge when all works again, and all is settled."""
    clock = asyncio.get_running_loop().time
    await eventually(functools.partial(is_settled, clients, meter))
    began, clients.stopped = clock(), False
    await meter.begin()
    async with running(meter.keep_backlog()):
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(clients.run_client(number, seed))
            try:
                await world.break_at_random(kinds, seed)
                mended = clock()
                for gateway in world.gateways:
                    await eventually(functools.partial(gateway.answers, "/readyz"))
                await eventually(lambda: world.are_all_ways_used(clients, mended))
            finally:
                clients.stopped = True
        await eventually(functools.partial(is_settled, clients, meter))
        charged = await meter.read_charge()
    assert meter.least_us > 0, "the backlog ran empty, so that the charge cannot be read"
    return Charge(charged, *clients.bound_charge(began, world.outages))


async def is_settled(clients: CountingClients, meter: TokenMeter) -> bool:
    """Return whether no request runs; those of a gateway that died are forgotten with a later one."""
    if await meter.is_settled():
        return True
    await clients.ask_all()
    return False


@pytest.mark.long
async def test_faults_at_random_lose_and_double_no_text_and_no_charge(world: FaultyWorld, cluster: Cluster) -> None:
    """No request is stuck, either; and afterwards all gateways reach all engines."""
    key = await cluster.gateway_key("ci", **LIMITS)
    uid = (await cluster.client.get(GATEWAY_KEYS, "ci", cluster.namespace))["metadata"]["uid"]
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout())
    meter = TokenMeter(world.store.url, uid)
    async with session, contextlib.aclosing(meter):
        # 1. Faults, once all works.
        clients = CountingClients(world.gateways, key, session)

        async def works() -> bool:
            await clients.ask_all()
            return world.are_all_ways_used(clients, 0.0)

        await eventually(works)
        others = [kind for kind in FAULTS if kind != "gateway killed"]
        exact = await run_phase(world, clients, meter, others, SEED)
        charge = await run_phase(world, clients, meter, list(FAULTS), SEED)

        # 2. What clients got, and were charged.
        ends = Counter((request.end, request.status) for request in clients.requests)
        print(f"seed {SEED}: {dict(ends)}, {exact}, {charge}", *world.faults, sep="\n")
        assert [(defect, request) for request in clients.requests if (defect := request.describe_defect())] == []
        assert ends["whole", 200] > len(world.faults)
        assert exact.least == exact.charged == exact.most
        assert charge.least <= charge.charged <= charge.most

        # 3. What the last lives of the gateways have counted.
        for gateway in world.gateways:
            assert gateway.process.running
            life = (gateway, gateway.life)
            used = sum(request.used for request in clients.requests if (request.gateway, request.life) == life)

            async def counts_the_same(gateway: KilledGateway = gateway, used: int = used) -> bool:
                assert await gateway.read_used_tokens() == used
                return True

            await eventually(counts_the_same)
