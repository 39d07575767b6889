"""Many hosts in one process: each renews its Lease, reports memory that always changes, and serves what is bound to it.

Their agents are simulated, because a hundred real ones do not fit on a machine that measures a controller; the API
server sees the same objects, written as often.
"""

import asyncio
import random
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from crds.meta import (
    HOSTS_NAMESPACE,
    LABEL_MANAGED_BY,
    LABEL_SERVICE_NAME,
    LABEL_SLICE_MANAGED_BY,
    MANAGED_BY,
    SLICE_MANAGED_BY,
    slice_name,
)
from kube.apply import apply_status
from kube.client import Client, Obj
from kube.errors import ApiError
from kube.resources import ENDPOINT_SLICES, LEASES, METAL_HOSTS, METAL_PROCESSES, Resource
from kube.store import Store
from kube.time import micro_time
from tests.controlplane.network import BRIDGE, ip

FIELD_MANAGER: Final = "pomona-metal-agent"
REPORT_SECONDS: Final = 10.0
LEASE_SECONDS: Final = 40
TENDERS: Final = 8
JITTER_BYTES: Final = 2**28
"""Memory that other programs of a host take and give back; no process fits into it."""


def host_name(number: int) -> str:
    """Return the name of a host."""
    return f"mac-{number:03}"


def host_address(number: int) -> str:
    """Return the address of a host, for up to 65,000 of them."""
    return f"10.78.{number // 250}.{number % 250 + 1}"


class HostFleet:
    """Hosts with `budget_bytes` each; `store` must reflect all MetalProcesses."""

    def __init__(self, client: Client, store: Store, hosts: int, budget_bytes: int) -> None:
        self.reports = 0
        """Reports of all hosts so far, each a Lease and a status."""
        self._client = client
        self._store = store
        self._addresses = {host_name(number): host_address(number) for number in range(hosts)}
        self._budget_bytes = budget_bytes
        self._untended: asyncio.Queue[Obj] = asyncio.Queue()
        self._port = 0
        store.index(METAL_PROCESSES, "host", lambda obj: [obj["spec"].get("hostName", "")])
        store.subscribe(self._tend_later)

    async def run(self) -> None:
        """Run all hosts until cancelled."""
        await ip(*(f"address add {address}/32 dev {BRIDGE}" for address in self._addresses.values()))
        app = web.Application()
        app.router.add_post("/v1/chat/completions", _complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", 0).start()
        self._port = runner.addresses[0][1]
        try:
            async with asyncio.TaskGroup() as group:
                for number, name in enumerate(self._addresses):
                    group.create_task(self._report(name, REPORT_SECONDS * number / len(self._addresses)))
                for _ in range(TENDERS):
                    group.create_task(self._tend())
        finally:
            await runner.cleanup()

    async def _report(self, name: str, wait_seconds: float) -> None:
        host = {"metadata": {"name": name}, "spec": {}}
        await self._client.apply(METAL_HOSTS, host, field_manager=FIELD_MANAGER)
        loop = asyncio.get_running_loop()
        due = loop.time() + wait_seconds
        while True:
            spec = {
                "holderIdentity": name,
                "leaseDurationSeconds": LEASE_SECONDS,
                "renewTime": micro_time(datetime.now(UTC)),
            }
            lease = {"metadata": {"name": name, "namespace": HOSTS_NAMESPACE}, "spec": spec}
            await self._client.apply(LEASES, lease, field_manager=FIELD_MANAGER)
            held = [each for each in self._store.by_index(METAL_PROCESSES, "host", name) if _phase(each) == "Ready"]
            status = {"metadata": {"name": name}, "status": self._status(name, held)}
            await self._client.apply(METAL_HOSTS, status, field_manager=FIELD_MANAGER, subresource="status")
            self.reports += 1
            due += REPORT_SECONDS
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _status(self, name: str, held: Collection[Obj]) -> Obj:
        reserved = sum(each["spec"]["memoryBytes"] for each in held)
        free = self._budget_bytes - reserved - random.randrange(JITTER_BYTES)  # noqa: S311 - no secret
        return {
            "address": self._addresses[name],
            "runtimes": ["llama.cpp"],
            "budgetBytes": self._budget_bytes,
            "availableBytes": max(0, free),
            "processes": [{"uid": each["metadata"]["uid"]} for each in held],
        }

    def _tend_later(self, resource: Resource, _old: Obj | None, new: Obj | None) -> None:
        if resource != METAL_PROCESSES or new is None or "hostName" not in new["spec"]:
            return
        deleted = "deletionTimestamp" in new["metadata"]
        if _phase(new) != ("Stopped" if deleted else "Ready"):
            self._untended.put_nowait(new)

    async def _tend(self) -> None:
        """Serve bound processes, and end deleted ones."""
        while True:
            process = await self._untended.get()
            deleted = "deletionTimestamp" in process["metadata"]
            try:
                if not deleted:
                    await self._publish(process)
                status = {"phase": "Stopped" if deleted else "Ready"}
                await apply_status(self._client, METAL_PROCESSES, process, status, FIELD_MANAGER)
            except ApiError:
                # Deleted or changed meanwhile: its next event comes.
                continue

    async def _publish(self, process: Obj) -> None:
        metadata, service, host = process["metadata"], process["spec"]["serviceName"], process["spec"]["hostName"]
        owner = {key: process[key] for key in ("apiVersion", "kind")} | {key: metadata[key] for key in ("name", "uid")}
        conditions = {"ready": True, "serving": True, "terminating": False}
        published = {
            "metadata": {
                "name": slice_name(service, host),
                "namespace": metadata["namespace"],
                "labels": {
                    LABEL_SERVICE_NAME: service,
                    LABEL_SLICE_MANAGED_BY: SLICE_MANAGED_BY,
                    LABEL_MANAGED_BY: MANAGED_BY,
                },
                "ownerReferences": [owner],
            },
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": self._port, "protocol": "TCP"}],
            "endpoints": [{"addresses": [self._addresses[host]], "conditions": conditions}],
        }
        await self._client.apply(ENDPOINT_SLICES, published, field_manager=FIELD_MANAGER)


def _phase(process: Obj) -> str:
    return str((process.get("status") or {}).get("phase", ""))


async def _complete(_request: web.Request) -> web.Response:
    return web.json_response({"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}})
