"""ClusterIPs and names of Services in a sandbox, in place of kube-proxy and CoreDNS; only the demo needs them.

One process listens at each TCP port of each ClusterIP that has a ready endpoint, and passes connections on to one of
the endpoints. A port without one is refused, as kube-proxy does; there is no UDP and no session affinity.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kube import credentials
from kube.client import Obj, connect
from kube.resources import ENDPOINT_SLICES, SERVICES, ObjectKey, object_key
from kube.store import Store
from kube.watch import Selection, reflect
from tests.controlplane import cluster_dns
from tests.controlplane.network import SERVICE_RANGE, Host, Network, ip
from tests.controlplane.streams import copy

RESOLV_CONF = Path("/etc/resolv.conf")
MACHINE, ADDRESS = "services", "10.77.0.2"
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
"""Pods send to a ClusterIP by way of the bridge's own address."""


class Address(NamedTuple):
    """Where a Service or one of its endpoints listens."""

    host: str
    port: int


def find_endpoints(services: Iterable[Obj], slices: Iterable[Obj]) -> dict[Address, list[Address]]:
    """Return the ready endpoints of each TCP port of each ClusterIP; ports without one are left out."""
    ready: dict[tuple[ObjectKey, str], list[Address]] = {}
    for endpoint_slice in slices:
        metadata = endpoint_slice["metadata"]
        name = metadata.get("labels", {}).get("kubernetes.io/service-name", "")
        hosts = [
            host
            for endpoint in endpoint_slice.get("endpoints") or []
            if endpoint.get("conditions", {}).get("ready", True)
            for host in endpoint["addresses"]
        ]
        for port in endpoint_slice.get("ports") or []:
            key = ObjectKey(metadata["namespace"], name), port.get("name") or ""
            ready.setdefault(key, []).extend(Address(host, port["port"]) for host in hosts)
    return {
        Address(service["spec"]["clusterIP"], port["port"]): endpoints
        for service in services
        if has_address(service)
        for port in service["spec"].get("ports", [])
        if port.get("protocol", "TCP") == "TCP"
        if (endpoints := ready.get((object_key(service), port.get("name") or "")))
    }


def has_address(service: Obj) -> bool:
    """Return whether a Service has a ClusterIP: it is neither headless nor an ExternalName."""
    return service["spec"].get("clusterIP", "None") not in {"", "None"}


class ServiceProxy:
    """Listeners at the ClusterIPs of a store, which has Services and EndpointSlices."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._endpoints: dict[Address, list[Address]] = {}
        self._servers: dict[Address, asyncio.Server] = {}
        self._turns = itertools.count()

    async def update(self) -> None:
        """Listen at what has a ready endpoint now, and at nothing else."""
        self._endpoints = find_endpoints(self._store.list(SERVICES), self._store.list(ENDPOINT_SLICES))
        for address in self._servers.keys() - self._endpoints.keys():
            self._servers.pop(address).close()
        for address in self._endpoints.keys() - self._servers.keys():
            self._servers[address] = await asyncio.start_server(partial(self._pass_on, address), *address)

    def find_address(self, service: str, namespace: str) -> str | None:
        """Return the ClusterIP of a Service, None if it has none."""
        stored = self._store.get(SERVICES, service, namespace)
        return str(stored["spec"]["clusterIP"]) if stored and has_address(stored) else None

    async def _pass_on(self, service: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        endpoints = self._endpoints.get(service, [])
        try:
            chosen = endpoints[next(self._turns) % len(endpoints)]
            endpoint_reader, endpoint_writer = await asyncio.open_connection(*chosen)
        except (OSError, ZeroDivisionError):  # the endpoint is away, or it has just been removed
            writer.transport.abort()
            return
        await asyncio.gather(copy(reader, endpoint_writer), copy(endpoint_reader, writer))
        for finished in (writer, endpoint_writer):
            finished.close()


async def add_machine(network: Network) -> Host:
    """Return a machine of its own for the proxy, to which the sandbox and its pods route all ClusterIPs.

    The sandbox's own network has programs that listen at a port of all addresses, and so of each ClusterIP there.
    """
    machine = await network.add_host(MACHINE, ADDRESS)
    # All addresses of the range are the machine's own: one route in place of an address for each Service.
    await ip(f"route add local {SERVICE_RANGE} dev lo", netns=machine.netns)
    await ip(f"route add {SERVICE_RANGE} via {ADDRESS}")
    await asyncio.to_thread(FORWARDING.write_text, "1")
    return machine


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.controlplane.service_proxy", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--resolv-conf", type=Path, required=True, help="file to be made and mounted on /etc")
    return parser.parse_args()


async def run(kubeconfig: Path) -> None:
    """Serve all Services of a cluster until SIGTERM."""
    store, changed = Store(), asyncio.Event()
    store.subscribe(lambda *_: changed.set())
    proxy = ServiceProxy(store)
    async with connect(credentials.load(kubeconfig)) as client, asyncio.TaskGroup() as tasks:
        for resource in (SERVICES, ENDPOINT_SLICES):
            tasks.create_task(reflect(client, store, Selection(resource)))
        tasks.create_task(cluster_dns.serve(proxy.find_address))
        while True:
            await changed.wait()
            changed.clear()
            await proxy.update()


def mount_resolv_conf(source: Path) -> None:
    """Make the names known to every program of this mount namespace; a kubelet does so for its pods."""
    source.write_text(cluster_dns.resolv_conf("default", cluster_dns.ADDRESS))
    target = RESOLV_CONF.resolve()
    if not target.exists():  # a link into /run, which is new in a sandbox
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    subprocess.run(["mount", "--bind", source, target], check=True)


def main() -> None:
    """Serve on the machine of the proxy and in the sandbox's mount namespace."""
    options = parse()
    mount_resolv_conf(options.resolv_conf)
    asyncio.run(run(options.kubeconfig))


if __name__ == "__main__":
    main()
