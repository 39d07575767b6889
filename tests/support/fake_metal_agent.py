"""A metal agent controlled by a test: through the real API it registers, renews, reports and publishes.

It simulates states that a real host does not enter on request: an amount of memory, refusal, silence and return. Its
engine is an HTTP server that answers completions if the token is in the Secret that the controller wrote for this host.
"""

import asyncio
import base64
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from functools import partial

from aiohttp import web

from crds.meta import HOSTS_NAMESPACE, slice_name
from kube.apply import apply_status
from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from kube.resources import ENDPOINT_SLICES, LEASES, METAL_HOSTS, METAL_PROCESSES, SECRETS
from metal_agent.cluster.endpoint_slices import FIELD_MANAGER, LEASE_SECONDS
from tests.controlplane.network import BRIDGE, ip
from tests.support.agent_objects import lease_of_host, slice_of_process, status_of_host

LOOK_SECONDS = 0.1
REPEAT_SECONDS = 1.0
"""Time after which the same Lease, slice or host is written again, as somebody may have changed or deleted it."""
_NUMBERS = itertools.count(1)


class FakeMetalAgent:
    """One host.

    Attributes:
        silent: while set, the host neither renews nor reports, as if its link were cut; its engine still answers.
        refuses: while set, the host rejects every process that is bound to it.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        budget_bytes: int,
        *,
        lease_seconds: int = LEASE_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        runtimes: Collection[str] = ("llama.cpp",),
    ) -> None:
        self.client = client
        self.name = name
        self.budget_bytes = budget_bytes
        self.lease_seconds = lease_seconds
        self._look_seconds = look_seconds
        self.silent = False
        self.refuses = False
        self._runtimes = runtimes
        self.most_reserved_bytes = 0
        self._port = 0
        self._written: dict[str, tuple[Obj, float]] = {}
        number = next(_NUMBERS)
        self._address = f"10.77.{240 + number // 250}.{1 + number % 250}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["FakeMetalAgent"]:
        """Run the agent until the context ends; then delete the host's objects from the API."""
        # An address of its own on the bridge: a host is not granted the API server's, nor that of another host.
        await ip(f"address add {self._address}/32 dev {BRIDGE}")
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, self._address, 0).start()
        self._port = runner.addresses[0][1]
        await self._report([])
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._live())
                yield self
                task.cancel()
        finally:
            await runner.cleanup()
            await ip(f"address del {self._address}/32 dev {BRIDGE}")
            for resource, namespace in ((METAL_HOSTS, None), (LEASES, HOSTS_NAMESPACE), (SECRETS, HOSTS_NAMESPACE)):
                with contextlib.suppress(ApiError):
                    await self.client.delete(resource, self.name, namespace)

    async def _live(self) -> None:
        while True:
            if not self.silent:
                # A busy API server may miss the limit of one request, as for any agent.
                with contextlib.suppress(Unreachable):
                    await self._look()
            await asyncio.sleep(self._look_seconds)

    async def _look(self) -> None:
        await self._write("lease", {}, self._renew)
        listed = await self.client.list(METAL_PROCESSES, field_selector=f"spec.hostName={self.name}")
        for process in listed.items:
            # The process may have been deleted in the meantime, as for any agent.
            with contextlib.suppress(ApiError):
                await self._tend(process)
        await self._report(listed.items)

    async def _tend(self, process: Obj) -> None:
        """Withdraw the endpoint of a deleted process and report it as Stopped; serve or refuse any other process."""
        if "deletionTimestamp" in process["metadata"]:
            name = slice_name(process["spec"]["serviceName"], self.name)
            with contextlib.suppress(ApiError):
                await self.client.delete(ENDPOINT_SLICES, name, process["metadata"]["namespace"])
            phase: Obj = {"phase": "Stopped"}
        elif self.refuses:
            phase = {"phase": "Rejected", "reason": "Refused", "message": "this host was told to refuse"}
        else:
            phase = {"phase": "Ready"}
            published = slice_of_process(process, self._address, self._port)
            apply = partial(self.client.apply, ENDPOINT_SLICES, published, field_manager=FIELD_MANAGER)
            await self._write(f"slice of {process['metadata']['uid']}", published, apply)
        await apply_status(self.client, METAL_PROCESSES, process, phase, FIELD_MANAGER)

    async def _report(self, processes: Collection[Obj]) -> None:
        """Report reserved and available memory; stopped and refused processes reserve nothing."""
        held = [
            process for process in processes if process.get("status", {}).get("phase") not in {"Stopped", "Rejected"}
        ]
        reserved = sum(process["spec"]["memoryBytes"] for process in held)
        self.most_reserved_bytes = max(self.most_reserved_bytes, reserved)
        status = status_of_host(self._address, self.budget_bytes, self.budget_bytes - reserved, held, self._runtimes)
        await self._write("host", status, partial(self._register, status))

    async def _renew(self) -> None:
        await self.client.apply(LEASES, lease_of_host(self.name, self.lease_seconds), field_manager=FIELD_MANAGER)

    async def _register(self, status: Obj) -> None:
        host = await self.client.apply(
            METAL_HOSTS, {"metadata": {"name": self.name}, "spec": {}}, field_manager=FIELD_MANAGER
        )
        await apply_status(self.client, METAL_HOSTS, host, status, FIELD_MANAGER)

    async def _write(self, what: str, content: Obj, write: Callable[[], Awaitable[object]]) -> None:
        """Write what is not the content that was written last, or was written a while ago."""
        last, at = self._written.get(what, (None, 0.0))
        now = time.monotonic()
        if content != last or now >= at + REPEAT_SECONDS:
            await write()
            self._written[what] = (content, now)

    async def _complete(self, request: web.Request) -> web.Response:
        secret = await self.client.get(SECRETS, self.name, HOSTS_NAMESPACE)
        tokens = {base64.b64decode(value).decode() for value in (secret.get("data") or {}).values()}
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in tokens:
            return web.json_response({"error": {"message": "no such token on this host"}}, status=401)
        return web.json_response({"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}})
