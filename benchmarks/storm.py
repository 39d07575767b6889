"""A storm: many InferenceServices created at once, and a controller beside a bare loop that sends the same writes.

The services want `nvidia`, which no node has, of one Model that real Jobs have inspected and fetched: its volume makes
the Deployments appear, and their pods stay pending. All times are those of the API server's audit log. SERVICES=50
makes a small storm; LIMIT_SECONDS bounds the wait for the controller to fall silent.
"""

import asyncio
import collections
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import psutil

from benchmarks.audit_log import AuditLog, Call, CpuSample
from benchmarks.measured_cluster import MeasuredCluster, measured_cluster
from benchmarks.replay import BareLoop, record_write, writes_by_service
from benchmarks.report import Figure, print_figures
from kube import credentials
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import INFERENCE_SERVICES, MODELS, NAMESPACES
from kube.transport import AiohttpTransport
from tests.controlplane import members, sandbox
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.controlplane.network import ADDRESS
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.tiny_models import tiny_gguf

SERVICES: Final = int(os.environ.get("SERVICES", "500"))
CLIENTS: Final = 8
WORKERS: Final = 8
SILENCE_SECONDS: Final = 30.0
LIMIT_SECONDS: Final = float(os.environ.get("LIMIT_SECONDS", "900"))
STORM: Final = "storm"
FLOOR: Final = "floor"
MIB: Final = 2**20
MOST_CPU_MILLISECONDS: Final = 15
MOST_CALLS: Final = 6
LEAST_OF_THE_FLOOR: Final = 0.75
MOST_OF_THE_FLOOR: Final = 1.5
SPEC: Final = {"modelRef": "tiny", "hardware": {"accelerator": "nvidia"}}
NAMES: Final = [f"s{number:05}" for number in range(SERVICES)]


class Progress(NamedTuple):
    """The times of a storm, from the audit log."""

    services_per_second: float
    """Until each Deployment and Service existed, from the first create."""
    latencies: list[float]
    """Seconds from the answer to a service's create to that of its Deployment's, sorted."""


async def make_model(cluster: MeasuredCluster, namespace: str, url: str) -> None:
    """Create a Model, and wait until Jobs have inspected and fetched it."""
    source = {"source": f"{url}/tiny.gguf"}
    await cluster.client.create(MODELS, {"metadata": {"name": "tiny", "namespace": namespace}, "spec": source})
    # Weights are fetched once a service in pods needs them.
    consumer = {"metadata": {"name": "consumer", "namespace": namespace}, "spec": SPEC}
    await cluster.client.create(INFERENCE_SERVICES, consumer)

    async def cached() -> bool:
        status = (await cluster.client.get(MODELS, "tiny", namespace)).get("status", {})
        conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", [])}
        assert conditions == {"Ready": "True", "Cached": "True"}, status  # noqa: S101 - `eventually` shows it
        return True

    await eventually(cached)


async def create_services(client: Client, namespace: str, created: Callable[[Obj], None]) -> None:
    """Create all services by several clients at once; `created` gets each answer."""
    names = iter(NAMES)

    async def create() -> None:
        for name in names:
            metadata = {"name": name, "namespace": namespace}
            created(await client.create(INFERENCE_SERVICES, {"metadata": metadata, "spec": SPEC}))

    await asyncio.gather(*(create() for _ in range(CLIENTS)))


def measure_progress(calls: Iterable[Call], namespace: str) -> Progress:
    """Return the times of the storm in this namespace."""
    answered: dict[str, dict[str, datetime]] = collections.defaultdict(dict)
    begin: datetime | None = None
    for call in calls:
        reference = call.object_ref
        if reference.namespace != namespace or not call.succeeded or reference.subresource:
            continue
        if reference.resource in {"inferenceservices", "deployments", "services"}:
            begin = begin or call.request_received_timestamp
            answered[reference.resource].setdefault(reference.name, call.stage_timestamp)
    missing = [name for name in NAMES if not all(name in answered[kind] for kind in ("deployments", "services"))]
    if begin is None or missing:
        raise RuntimeError(f"{len(missing)} services have no Deployment or no Service, such as {missing[:1]}")
    end = max(answered[kind][name] for kind in ("deployments", "services") for name in NAMES)
    created, deployed = answered["inferenceservices"], answered["deployments"]
    latencies = sorted((deployed[name] - created[name]).total_seconds() for name in NAMES)
    return Progress(SERVICES / (end - begin).total_seconds(), latencies)


async def raise_storm(cluster: MeasuredCluster) -> tuple[Sequence[Call], Mapping[str, str], CpuSample, float]:
    """Create all services; return the calls until silence, the uids, CPU time and resident MiB of the controller."""
    uids: dict[str, str] = {}
    start = cluster.audit.size_bytes
    cpu = CpuSample(cluster.controller.pid)

    def note(service: Obj) -> None:
        uids[service["metadata"]["name"]] = service["metadata"]["uid"]

    await create_services(cluster.client, STORM, note)
    await cluster.audit.wait_for_silence(SILENCE_SECONDS, LIMIT_SECONDS, cpu)
    resident_mib = psutil.Process(cluster.controller.pid).memory_info().rss / MIB
    return cluster.audit.read(start), uids, cpu, resident_mib


async def clear(cluster: MeasuredCluster) -> None:
    """Delete the namespace of the storm, and wait until all is gone: the floor begins with as little as the storm."""
    await cluster.client.delete(NAMESPACES, STORM)

    async def gone() -> bool:
        try:
            await cluster.client.get(NAMESPACES, STORM)
        except NotFound:
            return True
        return False

    await eventually(gone, timeout=600)


async def measure_floor(cluster: MeasuredCluster, storm: Iterable[Call], uids: Mapping[str, str]) -> Progress:
    """Repeat the writes of the storm in a bare loop."""
    written = writes_by_service(cluster.audit.of_user(storm), NAMES)
    recorded = {name: [record_write(call, STORM, FLOOR) for call in calls] for name, calls in written.items()}
    login = credentials.load(await cluster.plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT))
    transport = AiohttpTransport(login)
    start = cluster.audit.size_bytes
    loop = BareLoop(transport, recorded, uids)
    try:
        async with running(*(loop.work() for _ in range(WORKERS))):
            await create_services(cluster.client, FLOOR, loop.add)
            await loop.join()
    finally:
        await transport.close()
    return measure_progress(cluster.audit.read(start), FLOOR)


def call_figures(audit: AuditLog, calls: Iterable[Call]) -> list[Figure]:
    """Return the controller's calls per service, in all and by kind."""
    ours = [call for call in audit.of_user(calls) if call.object_ref.namespace == STORM]
    others = [call for call in audit.of_user(calls) if call.object_ref.namespace != STORM]
    counted = [call for call in ours if not call.is_event]
    kinds = collections.Counter(f"{call.verb} {call.resource}" for call in ours)
    refused = sum(not call.succeeded for call in ours)
    return [
        Figure("calls per service until silence, Events aside", len(counted) / SERVICES, None, MOST_CALLS, ""),
        Figure("of these GET and LIST", sum(call.verb in {"get", "list"} for call in ours) / SERVICES, None, 0, ""),
        *(Figure(f"  {kind}", count / SERVICES, None, None, "") for kind, count in kinds.most_common()),
        Figure("calls that were refused", refused, None, None, ""),
        Figure("calls for no service", len(others), None, None, ""),
    ]


async def run() -> None:
    """Start all parts, measure, and print the figures."""
    async with measured_cluster() as cluster:
        node = members.kubelet(cluster.plane, "cpu-1", cluster.folder)
        node.start()
        files = cluster.folder / "files"
        files.mkdir()
        tiny_gguf.write(files / "tiny.gguf")
        cluster.controller.start()
        await cluster.make_namespace(STORM)
        async with FileServer(files, address=ADDRESS) as server:
            await make_model(cluster, STORM, server.url)
        await cluster.audit.wait_for_silence(SILENCE_SECONDS / 6, LIMIT_SECONDS)
        began = time.monotonic()
        calls, uids, cpu, resident_mib = await raise_storm(cluster)
        silent_seconds = time.monotonic() - began - SILENCE_SECONDS
        storm = measure_progress(calls, STORM)
        await cluster.controller.stop()
        await clear(cluster)
        await cluster.make_namespace(FLOOR)
        floor = await measure_floor(cluster, calls, uids)
        await node.kill()
    p50, floor_p50 = (1000 * statistics.median(progress.latencies) for progress in (storm, floor))
    p99, floor_p99 = (1000 * progress.latencies[int(0.99 * SERVICES)] for progress in (storm, floor))
    rate, floor_rate = storm.services_per_second, floor.services_per_second
    print_figures(
        f"storm of {SERVICES} services, created by {CLIENTS} clients; the floor is a bare loop with the same writes",
        [
            Figure(
                "services with Deployment and Service",
                rate,
                floor_rate,
                LEAST_OF_THE_FLOOR * floor_rate,
                "/s",
                at_least=True,
            ),
            Figure("create to Deployment, p50", p50, floor_p50, MOST_OF_THE_FLOOR * floor_p50, "ms"),
            Figure("create to Deployment, p99", p99, floor_p99, None, "ms"),
            Figure(
                "CPU of the controller per service", 1000 * cpu.seconds / SERVICES, None, MOST_CPU_MILLISECONDS, "ms"
            ),
            *call_figures(cluster.audit, calls),
            Figure("last call of the controller after", silent_seconds, None, None, "s"),
            Figure("resident", resident_mib, None, None, "MiB"),
        ],
    )


if __name__ == "__main__":
    if not sandbox.inside():
        sys.exit(sandbox.run([sys.executable, "-m", "benchmarks.storm"]))
    asyncio.run(run())
