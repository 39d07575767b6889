"""Many hosts in one process: each renews its Lease, reports memory that always changes, and serves what is bound to it.

Their agents are simulated, because a hundred real ones do not fit on a machine that measures a controller; the API
server sees the same objects, written as often.
"""

import asyncio
from typing import Final

from aiohttp import web

from benchmarks.simulated_host import host_address, host_name, report_status
from kube.apply import apply_status
from kube.client import Client, Obj
from kube.errors import ApiError
from kube.resources import ENDPOINT_SLICES, LEASES, METAL_HOSTS, METAL_PROCESSES, Resource
from kube.store import Store
from metal_agent.cluster.endpoint_slices import FIELD_MANAGER
from tests.controlplane.network import BRIDGE, ip
from tests.support.agent_objects import lease_of_host, slice_of_process

REPORT_SECONDS: Final = 10.0
TENDERS: Final = 8


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
        store.add_index(METAL_PROCESSES, "host", lambda obj: [obj["spec"].get("hostName", "")])
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
            await self._client.apply(LEASES, lease_of_host(name), field_manager=FIELD_MANAGER)
            held = [
                process for process in self._store.by_index(METAL_PROCESSES, "host", name) if _phase(process) == "Ready"
            ]
            report = report_status(self._addresses[name], self._budget_bytes, held)
            status = {"metadata": {"name": name}, "status": report}
            await self._client.apply(METAL_HOSTS, status, field_manager=FIELD_MANAGER, subresource="status")
            self.reports += 1
            due += REPORT_SECONDS
            await asyncio.sleep(max(0.0, due - loop.time()))

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
                    published = slice_of_process(process, self._addresses[process["spec"]["hostName"]], self._port)
                    await self._client.apply(ENDPOINT_SLICES, published, field_manager=FIELD_MANAGER)
                status = {"phase": "Stopped" if deleted else "Ready"}
                await apply_status(self._client, METAL_PROCESSES, process, status, FIELD_MANAGER)
            except ApiError:
                # Deleted or changed meanwhile: its next event comes.
                continue


def _phase(process: Obj) -> str:
    return str((process.get("status") or {}).get("phase", ""))


async def _complete(_request: web.Request) -> web.Response:
    return web.json_response({"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}})
