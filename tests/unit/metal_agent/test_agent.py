"""The agent between two answers of the API: concurrent assignments, a gap in contact, and a Secret that disappears."""

import asyncio
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import pytest

from crds.meta import HOSTS_NAMESPACE, host_secret_key
from crds.metalhost import MetalHostStatus
from devices import host
from kube.client import Client
from kube.credentials import Credentials, StaticToken
from kube.errors import Unreachable
from kube.resources import SECRETS
from kube.transport import Request, Response, Stream
from metal_agent import agent as agent_module
from metal_agent.agent import Agent
from metal_agent.assignments import Assignment, LastKnownFile
from metal_agent.cluster import host_status
from metal_agent.cluster.api_connection import ApiConnection
from metal_agent.cluster.endpoint_slices import Clocks
from metal_agent.control.agent_client import AgentClient
from metal_agent.host import Host
from metal_agent.memory.ledger import Ledger
from metal_agent.native import engine_command
from metal_agent.options import AgentOptions
from metal_agent.supervise.runner import Runner
from metal_agent.supervise.supervisor import Supervisor
from tests.support.api_objects import GIB

TOKENS = {host_secret_key("team-a", "chat-token"): b64encode(b"token").decode()}


class Empty:
    """An API server without objects; it calls `on_request` before each answer."""

    def __init__(self) -> None:
        self.on_request: Callable[[Request], None] = lambda _: None

    async def request(self, request: Request) -> Response:
        self.on_request(request)
        return Response(200, b'{"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []}')

    def stream(self, request: Request, *, idle_seconds: float) -> AbstractAsyncContextManager[Stream]:
        raise NotImplementedError

    async def reconnect(self) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture
def api() -> Empty:
    return Empty()


@pytest.fixture
async def agent(tmp_path: Path, api: Empty) -> AsyncIterator[Agent]:
    options = AgentOptions("studio-1", tmp_path / "state")
    async with aiohttp.ClientSession() as session:
        yield Agent(
            Client(api),
            session,
            options,
            connection=ApiConnection(Credentials("http://10.77.0.1", StaticToken(None))),
            address="10.77.1.1",
            host_facts=host.read(),
            ledger=Ledger(100 * GIB),
        )


async def test_process_assigned_during_the_fresh_list_is_not_suspended(
    agent: Agent, api: Empty, assignment: Callable[..., Assignment]
) -> None:
    def assign(request: Request) -> None:
        if "endpointslices" in request.path:
            agent._runners["new"] = Runner(assignment("new"), agent._host.context)

    api.on_request = assign
    agent._runners["old"] = Runner(assignment("old"), agent._host.context)
    await agent._list_again()
    assert agent._exposed.suspended == {"old"}


async def test_list_of_before_another_gap_confirms_no_assignment(
    agent: Agent, api: Empty, assignment: Callable[..., Assignment], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, freshness = [0.0], agent._exposed.freshness
    monkeypatch.setattr(agent_module, "read_clocks", lambda: Clocks(now[0], now[0]))
    agent._runners["old"] = Runner(assignment("old"), agent._host.context)
    agent._lease_renewed()

    def sleep_an_hour(request: Request) -> None:
        if "endpointslices" in request.path and not now[0]:  # the list of assignments was answered before
            now[0] = 3600.0
            agent._lease_renewed()

    api.on_request = sleep_an_hour
    await agent._list_again()
    assert (freshness.has_fresh_list, agent._may_have_slept) == (False, True), "the list is an hour old"
    await agent._list_again()
    assert (freshness.has_fresh_list, agent._may_have_slept) == (True, False)


async def test_agent_is_ready_once_it_has_recovered_and_the_lease_is_renewed_or_the_api_away(agent: Agent) -> None:
    assert not agent._describe().ready
    agent._recovered.set()
    assert not agent._describe().ready, "no call is answered yet"
    agent.connection.note_failure(Unreachable("connection refused"))
    assert agent._describe().ready, "it serves what it knows"
    agent.connection.note_answer(Request("GET", "/api"), 200)
    assert not agent._describe().ready
    agent._lease_renewed()
    assert agent._describe().ready


async def test_agent_without_recovery_is_not_ready(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bool] = []

    async def fail(_host: Host, _group: asyncio.TaskGroup) -> None:
        answers.append((await AgentClient(tmp_path / "state").status()).ready)
        raise PermissionError("the record of an engine")

    monkeypatch.setattr(Host, "recover", fail)
    with pytest.raises(ExceptionGroup):
        await agent.run()
    assert answers == [False]


async def test_missing_secret_revokes_no_token(agent: Agent, tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group:
        agent._host.supervisor = Supervisor(agent._host.context, agent._runners, group)
        agent._synced.set()
        agent._renewed_once.set()
        agent._store.put(
            SECRETS, {"metadata": {"namespace": HOSTS_NAMESPACE, "name": "studio-1", "uid": "s"}, "data": TOKENS}
        )
        agent._assign()
        agent._store.remove(SECRETS, "studio-1", HOSTS_NAMESPACE)
        agent._assign()
    assert agent._tokens.read("team-a", "chat-token") == "token"
    assert LastKnownFile(tmp_path / "state" / "assignments.json").load("studio-1").secret == TOKENS


async def test_host_report_includes_a_process_that_is_assigned_meanwhile(
    agent: Agent, assignment: Callable[..., Assignment], monkeypatch: pytest.MonkeyPatch
) -> None:
    def assign_during_the_read() -> list[str]:
        agent._runners["new"] = Runner(assignment("new"), agent._host.context)
        agent._ledger.reserve("new", GIB)
        return []

    reported: list[MetalHostStatus] = []

    async def keep(_client: Client, _name: str, status: MetalHostStatus, _conditions: object) -> None:
        reported.append(status)

    monkeypatch.setattr(engine_command, "list_installed", assign_during_the_read)
    monkeypatch.setattr(host_status, "report_host", keep)
    await agent._report_host()
    assert [process.uid for process in reported[0].processes] == ["new"]
    assert reported[0].available_bytes == 99 * GIB


async def test_host_report_has_the_weights_on_disk_which_are_read_beside_the_loop(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported, threads = list[MetalHostStatus](), list[int]()

    async def keep(_client: Client, _name: str, status: MetalHostStatus, _conditions: object) -> None:
        reported.append(status)

    def list_weights() -> list[str]:
        threads.append(threading.get_ident())
        return ["b" * 64, "a" * 64]

    monkeypatch.setattr(host_status, "report_host", keep)
    monkeypatch.setattr(agent._host.context.weights.store, "identities", list_weights)
    await agent._report_host()
    assert reported[0].weights == ["a" * 64, "b" * 64]
    assert threads != [threading.get_ident()]
