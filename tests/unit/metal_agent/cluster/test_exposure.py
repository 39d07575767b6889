"""The exposure with ports in use, missing addresses, full disks and proxies that are down."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from crds.meta import PreviousToken
from gateway.http.control_client import ControlUnreachableError
from gateway.proxy.config import ListenerState, ProxyConfig, ProxyState
from kube.client import Client
from kube.errors import Unreachable
from kube.resources import ObjectKey
from kube.store import Store
from metal_agent.assignments import Assignment
from metal_agent.cluster import exposure
from metal_agent.cluster.exposure import ClusterExposure, ServicePorts
from metal_agent.cluster.host_tokens import HostTokens
from metal_agent.lifecycle import ProcessState
from metal_agent.supervise.runner import Runner
from metal_agent.traffic import exposure as base
from metal_agent.traffic.exposure import ProxyExposure
from metal_agent.traffic.proxy_process import Proxy
from metal_agent.traffic.service_rates import ServiceRates
from tests.support.local_host import Machine

CHAT, MAIL = ObjectKey("team-a", "chat"), ObjectKey("team-a", "mail")


class Answering:
    """A stand-in of the proxy, with the same error for each listener."""

    def __init__(self) -> None:
        self.answers = True
        self.error, self.taken = "", False
        self.asked: list[ProxyConfig] = []
        self.service_rates = ServiceRates()
        self.waited: list[str] = []

    @property
    def client(self) -> "Answering":
        return self

    async def wait_idle(self, uid: str, _timeout_seconds: float) -> bool:
        self.waited.append(uid)
        return True

    async def configure(self, config: ProxyConfig) -> ProxyState:
        self.asked.append(config)
        return ProxyState("1", 1, tuple(self._listener(service.name, service.port) for service in config.services))

    def _listener(self, name: str, port: int) -> ListenerState:
        return ListenerState(name, "10.77.1.1", port, self.error, (), port_taken=self.taken)


@pytest.fixture
def proxy() -> Answering:
    return Answering()


@pytest.fixture
async def exposed(
    tmp_path: Path, proxy: Answering, machine: Machine, assignment: Callable[..., Assignment]
) -> ClusterExposure:
    runners = {}
    for uid, service in (("u1", "chat"), ("u2", "mail")):
        runners[uid] = Runner(assignment(uid, service_name=service), machine.supervisor._host)
        runners[uid].state = ProcessState(phase="Ready")
    return ClusterExposure(
        client=cast("Client", None),
        host="studio-1",
        address="10.77.1.1",
        proxy=cast("Proxy", proxy),
        ports=ServicePorts(tmp_path / "ports" / "ports.json", 18000, 18999),
        runners=runners,
        tokens=OneToken(),
    )


class OneToken(HostTokens):
    """A host whose services all have the same token, which replaced another one."""

    def __init__(self) -> None:
        super().__init__(Store(), "studio-1", {})

    def read(self, namespace: str, name: str) -> str:
        del namespace, name
        return "token"

    def read_previous(self, namespace: str, name: str) -> PreviousToken:
        del namespace, name
        return PreviousToken("old", 1234)


async def test_token_that_was_replaced_reaches_the_proxy(exposed: ClusterExposure, proxy: Answering) -> None:
    await exposed.configure()
    (service, _) = proxy.asked[-1].services
    assert (service.token, service.previous_token, service.previous_token_until) == ("token", "old", 1234)


def served(proxy: Answering) -> dict[str, int]:
    return {service.name: service.port for service in proxy.asked[-1].services}


async def test_foreign_port_is_replaced_a_few_times_in_a_row(exposed: ClusterExposure, proxy: Answering) -> None:
    proxy.error, proxy.taken = "Address already in use", True
    await exposed.configure()
    assert 1 < len(proxy.asked) < 20
    assert exposed.find_problem(CHAT) == "Address already in use"
    proxy.error, proxy.taken = "", False
    assert await exposed.configure()
    assert exposed.find_problem(CHAT) == ""
    assert exposed.serves_all
    assert served(proxy)["team-a/chat"] > 18001


async def test_missing_address_does_not_change_the_port(exposed: ClusterExposure, proxy: Answering) -> None:
    await exposed.configure()
    before = served(proxy)
    proxy.error = "Cannot assign requested address"
    assert await exposed.configure(), "a process that is Ready has to say so"
    assert exposed.find_problem(CHAT) == "Cannot assign requested address"
    assert not exposed.serves_all
    assert served(proxy) == before
    assert exposed.find_port(CHAT) == before["team-a/chat"]


async def test_service_whose_port_cannot_be_saved_blocks_no_other(
    exposed: ClusterExposure, proxy: Answering, tmp_path: Path
) -> None:
    exposed._ports.assign("team-a/chat")
    (tmp_path / "ports").rename(tmp_path / "moved")
    (tmp_path / "ports").touch()
    await exposed.configure()
    assert served(proxy) == {"team-a/chat": 18000}
    assert "File exists" in exposed.find_problem(MAIL)
    assert exposed.find_problem(CHAT) == ""


async def test_proxy_that_is_down_is_reported(exposed: ClusterExposure, proxy: Answering) -> None:
    proxy.answers = False
    assert exposed.find_problem(CHAT) == "", "nothing is known before its first answer"
    await exposed.configure()
    assert "proxy of this host does not run" in exposed.find_problem(CHAT)


async def test_stopping_process_takes_requests_until_the_withdrawal_can_have_spread(
    exposed: ClusterExposure, proxy: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draining() -> dict[str, bool]:
        return {backend.uid: backend.draining for service in proxy.asked[-1].services for backend in service.backends}

    runner = exposed._runners["u1"]
    monkeypatch.setattr(Runner, "url", "http://127.0.0.1:1")
    monkeypatch.setattr(exposure, "LINGER_SECONDS", 0.2)
    runner.state = ProcessState(phase="Stopping")
    drained = asyncio.create_task(exposed.drain("u1", 1))
    await asyncio.sleep(0)
    await exposed.configure()
    assert draining() == {"u1": False, "u2": False}
    await drained
    assert draining() == {"u1": True, "u2": False}
    assert proxy.waited == ["u1"]

    runner.state = ProcessState(phase="Ready")
    await exposed.configure()
    assert draining() == {"u1": False, "u2": False}, "it was evicted, and is back"


async def test_stopping_process_beside_ready_one_is_closed_at_once(exposed: ClusterExposure, proxy: Answering) -> None:
    cast("dict[str, Runner]", exposed._runners)["u3"] = exposed._runners["u1"]
    exposed._runners["u1"].state = ProcessState(phase="Ready")
    async with asyncio.timeout(exposure.LINGER_SECONDS / 2):
        await exposed.drain("u3", 1)
    assert proxy.waited == ["u3"]


async def test_proxy_that_does_not_answer_for_a_moment_ends_no_drain(
    exposed: ClusterExposure, proxy: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer proxy takes its place, and counts what both of them answer."""
    gone = ControlUnreachableError("gone")
    outcomes: Iterator[ControlUnreachableError | bool] = iter([gone, gone, True])

    async def wait_idle(_uid: str, _timeout_seconds: float) -> bool:
        outcome = next(outcomes)
        if isinstance(outcome, ControlUnreachableError):
            raise outcome
        return outcome

    monkeypatch.setattr(proxy, "wait_idle", wait_idle)
    monkeypatch.setattr(base, "_ASK_AGAIN_SECONDS", 0.01)
    await ProxyExposure.drain(exposed, "u1", 60)
    assert list(outcomes) == [], "it waited until the newer one said that there is no request"


async def test_proxy_that_is_gone_holds_up_no_end(
    exposed: ClusterExposure, proxy: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def wait_idle(uid: str, _timeout_seconds: float) -> bool:
        asked.append(uid)
        raise ControlUnreachableError("gone")

    monkeypatch.setattr(proxy, "wait_idle", wait_idle)
    monkeypatch.setattr(base, "_ASK_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(base, "_PROXY_BACK_SECONDS", 0.1)
    await ProxyExposure.drain(exposed, "u1", 3600)
    assert len(asked) > 1


async def test_endpoint_stays_ready_until_the_proxy_has_the_successor(
    exposed: ClusterExposure, machine: Machine, assignment: Callable[..., Assignment]
) -> None:
    def is_ready() -> bool:
        slice_ = exposed._build_wanted_slice(CHAT)
        assert slice_ is not None
        return bool(slice_["endpoints"][0]["conditions"]["ready"])

    runners = cast("dict[str, Runner]", exposed._runners)
    successor = runners["u3"] = Runner(assignment("u3", service_name="chat"), machine.supervisor._host)
    successor.state = ProcessState(phase="Ready")
    runners["u1"].state = ProcessState(phase="Stopping")
    exposed._ports.assign(str(CHAT))
    exposed.freshness.note_renewal(exposure.read_clocks())
    exposed.freshness.has_fresh_list = True

    exposed.proxied_uids = frozenset({"u1"})
    assert is_ready(), "the proxy still sends requests to the predecessor"
    exposed.proxied_uids = frozenset()
    assert not is_ready(), "the proxy sends requests to neither"
    exposed.proxied_uids = frozenset({"u3"})
    assert is_ready()
    exposed.proxied_uids = frozenset({"u1"})
    del runners["u3"]
    assert not is_ready(), "without a successor it is withdrawn before it is drained"


async def test_machine_that_shuts_down_has_no_ready_endpoint_whatever_the_api_server_does(
    exposed: ClusterExposure, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[ObjectKey] = []

    async def publish(service: ObjectKey) -> None:
        written.append(service)
        if service == CHAT:
            raise Unreachable("connection refused")
        await asyncio.Event().wait()

    monkeypatch.setattr(exposure, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(exposed.endpoints, "publish", publish)
    exposed._ports.assign(str(CHAT))
    exposed.freshness.note_renewal(exposure.read_clocks())
    exposed.freshness.has_fresh_list = True
    exposed.proxied_uids = frozenset({"u1", "u2"})

    def is_ready() -> bool:
        slice_ = exposed._build_wanted_slice(CHAT)
        assert slice_ is not None
        return bool(slice_["endpoints"][0]["conditions"]["ready"])

    assert is_ready()
    await exposed.withdraw_all(0.05)
    assert not is_ready()
    assert written == [CHAT, MAIL]
