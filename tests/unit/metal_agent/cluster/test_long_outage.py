"""The agent and the API server over hours, in virtual time: an outage, refused writes, and clocks that jump.

The queue, the Lease, list and watch, freshness and slices are real; the API server is a table, the proxy accepts
everything, and the engine is always Ready.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import pytest

from crds.meta import HOSTS_NAMESPACE
from devices.facts import HostFacts
from gateway.proxy.config import BackendState, ListenerState, ProxyConfig, ProxyState
from kube.client import Client, Obj
from kube.credentials import Credentials, StaticToken
from kube.errors import Unreachable
from kube.queue import run_workers
from kube.resources import ENDPOINT_SLICES, LEASES, METAL_PROCESSES
from kube.transport import Request, Response, Stream
from kube.watch import Selection, reflect
from metal_agent import agent as agent_module
from metal_agent.agent import Agent
from metal_agent.assignments import Assignment
from metal_agent.cluster import exposure
from metal_agent.cluster.api_connection import ApiConnection
from metal_agent.cluster.endpoint_slices import Clocks
from metal_agent.cluster.host_lease import keep_host_lease
from metal_agent.lifecycle import ProcessState
from metal_agent.memory.ledger import Ledger
from metal_agent.options import AgentOptions
from metal_agent.supervise.records import Record
from metal_agent.supervise.runner import Runner
from metal_agent.supervise.supervisor import Supervisor
from tests.support import virtual_time
from tests.support.api_objects import GIB

HOUR = 3600.0
SLICE = ENDPOINT_SLICES.path("team-a", "chat.studio-1")
LEASE = LEASES.path(HOSTS_NAMESPACE, "studio-1")


class Api:
    """An API server that keeps applied objects; while `away` it answers no request, and its watches break."""

    def __init__(self, *objects: tuple[str, Obj]) -> None:
        self.objects = dict(objects)
        self.away = False
        self.asked = 0
        self.reconnected = 0
        self.applied: list[tuple[str, Obj]] = []
        self._version = 1
        self._cut = asyncio.Event()

    def leave(self) -> None:
        self.away, self.asked = True, 0
        self._cut.set()

    def come_back(self) -> None:
        self.away = False
        self._cut = asyncio.Event()

    async def request(self, request: Request) -> Response:
        self.asked += 1
        if self.away:
            raise Unreachable("away")
        path = request.path.removesuffix("/status")
        if request.method in {"PATCH", "POST"}:
            return self._write(path, msgspec.json.decode(request.body or b""))
        if path in self.objects:
            return Response(200, msgspec.json.encode(self.objects[path]))
        if path.rsplit("/", 1)[-1] in {"leases", "metalprocesses", "endpointslices", "secrets", "events"}:
            plural = f"/{path.rsplit('/', 1)[-1]}/"
            items = [obj for where, obj in self.objects.items() if plural in where]
            listing = {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": items}
            return Response(200, msgspec.json.encode(listing))
        return Response(404, b'{"kind": "Status", "code": 404, "reason": "NotFound"}')

    def _write(self, path: str, body: Obj) -> Response:
        self._version += 1
        self.applied.append((path, body))
        old: Any = self.objects.get(path, {})
        metadata = {"uid": path, **old.get("metadata", {}), **body["metadata"], "resourceVersion": str(self._version)}
        self.objects[path] = {**old, **body, "metadata": metadata}
        return Response(200, msgspec.json.encode(self.objects[path]))

    @contextlib.asynccontextmanager
    async def stream(self, request: Request, *, idle_seconds: float) -> AsyncIterator[Stream]:
        del request
        if self.away:
            raise Unreachable("away")
        yield Stream(200, self._chunks(self._cut, idle_seconds))

    async def _chunks(self, cut: asyncio.Event, idle_seconds: float) -> AsyncIterator[bytes]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(idle_seconds):
                await cut.wait()
        yield b""
        raise Unreachable("cut")

    async def reconnect(self) -> None:
        self.reconnected += 1
        self._cut.set()
        self._cut = asyncio.Event()

    async def close(self) -> None:
        pass


class Word:
    """A proxy that accepts every configuration."""

    answers = True
    process = None
    state: ProxyState | None = None

    @property
    def client(self) -> "Word":
        return self

    async def configure(self, config: ProxyConfig) -> ProxyState:
        listeners = [
            ListenerState(
                service.name,
                service.address,
                service.port,
                "",
                tuple(BackendState(backend.uid, backend.url, backend.draining, 0) for backend in service.backends),
            )
            for service in config.services
        ]
        return ProxyState("1", 1, tuple(listeners))


class Life:
    """An agent of host studio-1 that already serves `chat`; its wall clock is `wall` seconds ahead of the loop's."""

    def __init__(self, assignment: Assignment, folder: Path) -> None:
        spec = msgspec.to_builtins(assignment.spec) | {"hostName": "studio-1"}
        metadata = {"name": assignment.name, "namespace": assignment.namespace, "uid": assignment.uid}
        self.path = METAL_PROCESSES.path(assignment.namespace, assignment.name)
        process = {"metadata": metadata | {"resourceVersion": "1"}, "spec": spec}
        self.api = Api((self.path, process))
        self.wall = 0.0
        self._assignment = assignment
        self._folder = folder

    def clocks(self) -> Clocks:
        now = asyncio.get_running_loop().time()
        return Clocks(now, 1_700_000_000 + now + self.wall)

    async def live(self, story: Callable[["Life"], Coroutine[Any, Any, None]]) -> None:
        """Run the agent during `story`."""
        async with aiohttp.ClientSession() as session:
            client = Client(self.api)
            agent = Agent(
                client,
                session,
                AgentOptions("studio-1", self._folder),
                connection=ApiConnection(Credentials("https://10.77.0.1", StaticToken(None))),
                address="10.77.1.1",
                host_facts=HostFacts(),
                ledger=Ledger(100 * GIB),
            )
            agent._proxy = agent._exposed._proxy = Word()  # type: ignore[assignment]  # as much as is asked of it
            agent._report_host = _nothing  # type: ignore[method-assign]  # measures this machine, in threads
            agent._exposed._tokens.read = lambda *_: "token"  # type: ignore[method-assign]  # the Secret is not there
            self.runner = Runner(self._assignment, agent._host.context)
            self.runner.state = ProcessState("Ready", exists=True, admitted=True)
            spec = self._assignment.spec
            self.runner.record = Record(
                uid=self._assignment.uid,
                namespace=self._assignment.namespace,
                name=self._assignment.name,
                spec=spec,
                identity=None,
                started_at="",
                url="http://127.0.0.1:50000",
            )
            agent._runners[self._assignment.uid] = self.runner
            async with asyncio.TaskGroup() as group:
                agent._host.supervisor = Supervisor(agent._host.context, agent._runners, group)
                agent._store.subscribe(agent._object_changed)
                tasks = [
                    group.create_task(coroutine)
                    for coroutine in (
                        run_workers(agent._queue, agent._reconcile, 4, 30.0),
                        reflect(client, agent._store, Selection(METAL_PROCESSES), agent._synced),
                        keep_host_lease(client, agent._name, agent._identity, agent._lease_renewed),
                        agent._await_api(),
                    )
                ]
                agent._queue.add(("proxy",))
                await story(self)
                for task in tasks:
                    task.cancel()

    @property
    def reported(self) -> str | None:
        """The phase in the status of the process."""
        phase: str | None = self.api.objects[self.path].get("status", {}).get("phase")
        return phase

    @property
    def said(self) -> list[bool]:
        """The written conditions of the endpoint, in order."""
        return [obj["endpoints"][0]["conditions"]["ready"] for path, obj in self.api.applied if path == SLICE]


async def _nothing() -> None:
    pass


@pytest.fixture
def life(assignment: Callable[..., Assignment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    folder = tmp_path / "state"
    folder.mkdir()
    made = Life(assignment(), folder)
    for module in (agent_module, exposure):
        monkeypatch.setattr(module, "read_clocks", made.clocks)
    return made


def test_hour_without_api_server_changes_nothing_and_ends_within_seconds(life: Life) -> None:
    async def story(life: Life) -> None:
        await asyncio.sleep(60)
        assert life.said == [True]
        assert not life.api.reconnected
        life.api.leave()
        await asyncio.sleep(HOUR)
        assert life.runner.state.phase == "Ready"
        assert life.api.asked < HOUR, "an agent that cannot reach the server does not hammer at it"
        life.api.come_back()
        # The controller may have done this if only the controller could reach the server.
        del life.api.objects[SLICE]
        renewed = life.api.objects[LEASE]["spec"]["renewTime"]
        await asyncio.sleep(20)
        assert life.api.objects[LEASE]["spec"]["renewTime"] != renewed
        assert life.api.objects[SLICE]["endpoints"][0]["conditions"]["ready"]

    virtual_time.run(life.live(story))
    assert all(life.said), "it never was not ready"
    assert not life.runner.removed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("phase", ["Ready", "Stopped"])
def test_processes_of_a_start_without_api_server_are_reported_once_it_answers(
    life: Life, phase: Literal["Ready", "Stopped"], seed: int
) -> None:
    random.seed(seed)  # of the pauses between two tries

    async def story(life: Life) -> None:
        if phase == "Stopped":  # the last known assignments had its deletion mark
            life.runner.state = ProcessState("Stopped")
            life.api.objects[life.path]["metadata"]["deletionTimestamp"] = "2026-11-22T11:00:00Z"
        await asyncio.sleep(61 + seed / 2)
        life.api.come_back()
        await asyncio.sleep(60)
        assert life.reported == phase

    life.api.leave()
    virtual_time.run(life.live(story))


def test_status_that_others_keep_changing_is_written_later(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, refused = life.api.request, list[Request]()

    async def refuse_three_times(request: Request) -> Response:
        if request.method == "PATCH" and request.path == f"{life.path}/status" and len(refused) < 3:
            refused.append(request)
            return Response(409, b'{"kind": "Status", "code": 409, "reason": "Conflict"}')
        return await answer(request)

    monkeypatch.setattr(life.api, "request", refuse_three_times)

    async def story(life: Life) -> None:
        await asyncio.sleep(60)
        assert len(refused) == 3
        assert life.reported == "Ready"

    virtual_time.run(life.live(story))


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_wall_clock_that_jumps_interrupts_nothing(life: Life, jump: float) -> None:
    async def story(life: Life) -> None:
        await asyncio.sleep(60)
        life.wall += jump
        await asyncio.sleep(60)
        assert life.api.reconnected == 1, "it may have been asleep: connections of before may be dead"
        life.wall -= jump
        await asyncio.sleep(60)
        del life.api.objects[SLICE]
        await asyncio.sleep(70)
        assert life.api.objects[SLICE]["endpoints"][0]["conditions"]["ready"], "it still looks after its endpoints"

    virtual_time.run(life.live(story))
    assert all(life.said)
    assert not life.runner.removed
