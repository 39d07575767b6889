"""The prober with real HTTP servers; only the source of the Secret is a stand-in."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from controller.reconcile.plan import Leading
from controller.services import probe_policy, readiness_probe
from controller.services.endpoints import Endpoint
from controller.services.probe_policy import Question
from controller.services.readiness_probe import Prober
from controller.services.tokens import token_secret
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import ObjectKey, Resource
from kube.store import Store
from runtimes.probe import ProbeResult
from tests.support.api_objects import as_service, service
from tests.support.background import running
from tests.support.eventually import eventually

KEY = ObjectKey("team", "chat")
TOKEN = "right"


class Secrets(Client):
    """An API that has only the token Secret."""

    def __init__(self, token: str | None = TOKEN, owner: str = "uid-chat") -> None:
        self.token = token
        self.owner = owner
        self.annotations: dict[str, str] = {}

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert resource.plural == "secrets"
        assert name in {"chat-token", "hung-token"}
        if self.token is None:
            raise NotFound("get secrets", status=404)
        return {
            "metadata": {
                "name": name,
                "ownerReferences": [{"uid": self.owner_in(namespace), "controller": True}],
                "annotations": self.annotations,
            },
            "data": {"token": base64.b64encode(self.token.encode()).decode()} if self.token else {},
        }

    def owner_in(self, namespace: str | None) -> str:
        return f"uid-{namespace.removeprefix('team-')}" if namespace and namespace != "team" else self.owner


class Engine:
    """An engine that answers a completion if the token is right and `well` is set; once `idle` if it is `busy`."""

    def __init__(self) -> None:
        self.asked = 0
        self.well = True
        self.broken = False
        self.broken_once = False
        self.busy = asyncio.Event()
        self.idle = asyncio.Event()

    async def complete(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.busy.is_set():
            await self.idle.wait()
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        if self.broken or self.broken_once:
            self.broken_once = False
            return web.json_response({"error": {"message": "Compute error; full"}}, status=500)
        if not self.well:
            return web.json_response({"error": {"message": "Loading model"}}, status=503)
        return web.json_response({"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}})


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Engine, Endpoint]]:
    served = Engine()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield served, Endpoint("127.0.0.1", runner.addresses[0][1])
    await runner.cleanup()


def leading(client: Client, enqueued: list[ObjectKey]) -> Leading:
    enqueue: Callable[[Resource, ObjectKey], None] = lambda _resource, key: enqueued.append(key)  # noqa: E731 - one line
    recorder: Any = None
    return Leading(client, Store(), recorder, enqueue)


def ask(prober: Prober, question: Question, proof: ProbeResult | None = None) -> ProbeResult | None:
    """Ask a question as a service does, and return the answer to it if there is one already."""
    prober.ask(KEY, question, proof)
    return prober.find_answer(KEY, question)


async def settled(prober: Prober, question: Question, *, ok: bool = True) -> ProbeResult:
    def answered() -> ProbeResult | None:
        answer = ask(prober, question)
        return answer if answer and answer.ok == ok else None

    answer = await eventually(answered)
    assert answer is not None
    return answer


async def test_endpoint_is_probed_once_and_the_service_enqueued(engine: tuple[Engine, Endpoint]) -> None:
    served, endpoint = engine
    prober, told = Prober(), list[ObjectKey]()
    question = Question("uid-chat", 1, ("a",), (endpoint,))
    async with running(prober.run(leading(Secrets(), told))):
        assert ask(prober, question) is None
        assert (await settled(prober, question)).ok
        assert told == [KEY]
        other = question._replace(generation=2)
        assert ask(prober, other) is None, "an answer is for its own question only"
        await settled(prober, other)
    assert served.asked == 2


async def test_failed_probe_is_repeated_until_it_succeeds(engine: tuple[Engine, Endpoint]) -> None:
    served, endpoint = engine
    served.well = False
    prober, told = Prober(), list[ObjectKey]()
    question = Question("uid-chat", 1, ("a",), (endpoint,))
    async with running(prober.run(leading(Secrets(), told))):
        failed = await settled(prober, question, ok=False)
        assert failed.reason == "Loading"
        assert "Loading model" in failed.message
        served.well = True
        await settled(prober, question)


@pytest.mark.parametrize(
    ("token", "reason"), [("wrong", "Unauthorized"), (None, "TokenNotFound"), ("", "TokenNotFound")]
)
async def test_probe_sends_the_token(engine: tuple[Engine, Endpoint], token: str | None, reason: str) -> None:
    _, endpoint = engine
    prober = Prober()
    question = Question("uid-chat", 1, ("a",), (endpoint,))
    async with running(prober.run(leading(Secrets(token), []))):
        assert (await settled(prober, question, ok=False)).reason == reason


async def test_token_of_another_owner_is_not_sent(engine: tuple[Engine, Endpoint]) -> None:
    served, endpoint = engine
    prober = Prober()
    async with running(prober.run(leading(Secrets(owner="uid-other"), []))):
        failed = await settled(prober, Question("uid-chat", 1, ("a",), (endpoint,)), ok=False)
    assert failed.reason == "TokenNotFound"
    assert served.asked == 0


async def test_one_broken_endpoint_does_not_decide_for_all(
    engine: tuple[Engine, Endpoint], monkeypatch: pytest.MonkeyPatch, refused_port: int
) -> None:
    monkeypatch.setattr("random.sample", lambda endpoints, _count: list(endpoints))
    _, endpoint = engine
    nobody = Endpoint("127.0.0.1", refused_port)
    prober, told = Prober(), list[ObjectKey]()
    async with running(prober.run(leading(Secrets(), told))):
        answer = await settled(prober, Question("uid-chat", 1, ("a", "b"), (nobody, endpoint)))
    assert told == [KEY], "it was never called not ready"
    assert endpoint.url in answer.message
    assert nobody.url in answer.message, "what is broken is told"


async def test_endpoint_that_failed_beside_others_is_probed_until_it_answers(
    engine: tuple[Engine, Endpoint], monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """Else the status would call it broken until the service changes."""
    monkeypatch.setattr("random.sample", lambda endpoints, _count: list(endpoints))
    monkeypatch.setattr(probe_policy, "FIRST_RETRY_SECONDS", 0.05)
    served, endpoint = engine
    late = Endpoint("127.0.0.1", unused_tcp_port)
    prober, told = Prober(), list[ObjectKey]()
    question = Question("uid-chat", 1, ("a", "b"), (late, endpoint))
    async with running(prober.run(leading(Secrets(), told))):
        assert late.url in (await settled(prober, question)).message
        app = web.Application()
        app.router.add_post("/v1/chat/completions", served.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, late.address, late.port).start()
        await eventually(lambda: told == [KEY, KEY])
        assert (await settled(prober, question)).message == f"{late.url} generated a token"
        await runner.cleanup()


async def test_probe_interrupted_by_lost_leadership_is_repeated(engine: tuple[Engine, Endpoint]) -> None:
    _, endpoint = engine
    asked = asyncio.Event()

    class Hangs(Secrets):
        async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
            asked.set()
            await asyncio.Event().wait()
            return await super().get(resource, name, namespace)

    prober = Prober()
    question = Question("uid-chat", 1, ("a",), (endpoint,))
    prober.ask(KEY, question)
    async with running(prober.run(leading(Hangs(), []))):
        await asked.wait()
    async with running(prober.run(leading(Secrets(), []))):
        await settled(prober, question)


async def test_unneeded_probe_result_is_forgotten(engine: tuple[Engine, Endpoint]) -> None:
    served, endpoint = engine
    prober = Prober()
    question = Question("uid-chat", 1, ("a",), (endpoint,))
    async with running(prober.run(leading(Secrets(), []))):
        await settled(prober, question)
        prober.forget(KEY)
        assert ask(prober, question) is None
        await settled(prober, question)
    assert served.asked == 2


@contextlib.asynccontextmanager
async def silent_endpoint() -> AsyncIterator[tuple[Endpoint, list[asyncio.StreamWriter]]]:
    """An endpoint that accepts connections and never answers."""
    connections: list[asyncio.StreamWriter] = []
    hung = await asyncio.start_server(lambda _reader, writer: connections.append(writer), "127.0.0.1", 0)
    async with hung:
        yield Endpoint("127.0.0.1", hung.sockets[0].getsockname()[1]), connections
        for connection in connections:
            connection.close()


async def test_hanging_services_delay_no_other(engine: tuple[Engine, Endpoint]) -> None:
    _, endpoint = engine
    prober = Prober()
    async with silent_endpoint() as (silent, connections), running(prober.run(leading(Secrets(), []))):
        for number in range(30):
            question = Question(f"uid-{number}", 1, ("b",), (silent,))
            prober.ask(ObjectKey(f"team-{number}", "hung"), question)
        await eventually(lambda: len(connections) == 30)
        await settled(prober, Question("uid-chat", 1, ("a",), (endpoint,)))


async def test_services_that_hang_on_are_probed_by_other_workers(
    engine: tuple[Engine, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness_probe, "QUICK_WORKERS", 2)
    monkeypatch.setattr(readiness_probe, "QUICK_SECONDS", 0.1)
    _, endpoint = engine
    prober = Prober()
    async with silent_endpoint() as (silent, connections), running(prober.run(leading(Secrets(), []))):
        for number in range(6):
            prober.ask(ObjectKey(f"team-{number}", "hung"), Question(f"uid-{number}", 1, ("b",), (silent,)))
        await eventually(lambda: len(connections) >= 12)
        await settled(prober, Question("uid-chat", 1, ("a",), (endpoint,)))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness_probe, "QUICK_SECONDS", 0.05)
    monkeypatch.setattr(readiness_probe, "TOKEN_SECONDS", 0.2)
    monkeypatch.setattr(probe_policy, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(probe_policy, "LAST_RETRY_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
async def test_silence_of_an_endpoint_that_has_answered_is_no_answer(engine: tuple[Engine, Endpoint]) -> None:
    served, endpoint = engine
    prober, first = Prober(), Question("uid-chat", 1, ("a",), (endpoint,))
    async with running(prober.run(leading(Secrets(), []))):
        await settled(prober, first)
        served.busy.set()
        scaled = first._replace(generation=2)
        assert ask(prober, scaled) is None
        asked = served.asked
        await eventually(lambda: served.asked > asked + 3)
        assert ask(prober, scaled) is None, "it is busy, perhaps"
        served.busy.clear()
        await settled(prober, scaled)


@pytest.mark.usefixtures("impatient")
async def test_answer_that_an_earlier_leader_got_is_not_requested_again(engine: tuple[Engine, Endpoint]) -> None:
    served, endpoint = engine
    prober, question = Prober(), Question("uid-chat", 1, ("a",), (endpoint,))
    proof = ProbeResult(ok=True, reason="Generated", message="generated a token")
    async with running(prober.run(leading(Secrets(), []))):
        assert ask(prober, question, proof) == proof
        served.busy.set()
        scaled = question._replace(generation=2)
        prober.ask(KEY, scaled)
        await eventually(lambda: served.asked > 3)
        assert ask(prober, scaled) is None, "its endpoints have answered the earlier leader"
    assert question.digest == question._replace().digest
    assert question.digest != scaled.digest


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_policy, "REPEAT_SECONDS", 0.05)
    monkeypatch.setattr(probe_policy, "DOUBT_SECONDS", 0.3)
    monkeypatch.setattr(probe_policy, "FIRST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(probe_policy, "LAST_RETRY_SECONDS", 0.1)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("inherited", [False, True], ids=["same leader", "new leader"])
async def test_pod_that_fails_after_its_first_answer_is_found(
    engine: tuple[Engine, Endpoint], *, inherited: bool
) -> None:
    """The kubelet asks for /health only, which says nothing about the model."""
    served, endpoint = engine
    prober, told = Prober(), list[ObjectKey]()
    question = Question("uid-chat", 1, ("a",), (endpoint,))
    proof = ProbeResult(ok=True, reason="Generated", message="generated a token") if inherited else None
    async with running(prober.run(leading(Secrets(), told))):
        prober.ask(KEY, question, proof)
        await settled(prober, question)
        await eventually(lambda: served.asked > 3)
        assert told == ([] if inherited else [KEY]), "the same answer is no news"
        served.broken = True
        failed = await settled(prober, question, ok=False)
        assert (failed.reason, failed.message) == (
            "BadAnswer",
            f"{endpoint.url} answered 500: Compute error; full",
        )
        served.broken = False
        await settled(prober, question)


@pytest.mark.usefixtures("often")
async def test_service_on_hosts_is_asked_once(engine: tuple[Engine, Endpoint]) -> None:
    """Its proxy sees each answer of the engine."""
    served, endpoint = engine
    prober, question = Prober(), Question("uid-chat", 1, ("a",), (endpoint._replace(host="studio-1"),))
    async with silent_endpoint() as (silent, connections), running(prober.run(leading(Secrets(), []))):
        await settled(prober, question)
        in_pods = Question("uid-1", 1, ("b",), (silent,))
        proof = ProbeResult(ok=True, reason="Generated", message="generated a token")
        prober.ask(ObjectKey("team-1", "hung"), in_pods, proof)
        await eventually(lambda: connections)
    assert served.asked == 1


@pytest.mark.usefixtures("often")
async def test_answer_is_judged_against_what_another_probe_found_meanwhile(
    engine: tuple[Engine, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the service stays not ready although it answered last."""
    monkeypatch.setattr(probe_policy, "DOUBT_SECONDS", 0.0)
    served, endpoint = engine
    prober, question = Prober(), Question("uid-chat", 1, ("a",), (endpoint,))
    async with running(prober.run(leading(Secrets(), []))):
        await settled(prober, question)
        monkeypatch.setattr(readiness_probe, "QUICK_SECONDS", 0.1)
        served.busy.set()
        asked = served.asked
        await eventually(lambda: served.asked >= asked + 2)  # the second one is patient, and hangs
        monkeypatch.setattr(readiness_probe, "QUICK_SECONDS", 10.0)
        for name in ("FIRST_RETRY_SECONDS", "LAST_RETRY_SECONDS", "REPEAT_SECONDS"):
            monkeypatch.setattr(probe_policy, name, 3600.0)
        served.busy.clear()
        served.broken = True
        prober.ask(KEY, question._replace(generation=2))
        await settled(prober, question, ok=False)
        served.broken = False
        served.idle.set()
        await settled(prober, question)


@pytest.mark.usefixtures("often")
async def test_edited_token_is_not_sent_before_the_edit_is_followed(engine: tuple[Engine, Endpoint]) -> None:
    served, endpoint = engine
    stale, told, api = list[ObjectKey](), list[ObjectKey](), Secrets()
    prober = Prober(on_stale_token=stale.append)
    first, scaled = [Question("uid-chat", number, ("a",), (endpoint,)) for number in (1, 2)]
    _, made = token_secret(as_service(service()), TOKEN)
    async with running(prober.run(leading(api, told))):
        api.annotations = made["metadata"]["annotations"]
        await settled(prober, first)
        assert not stale
        api.token, told[:] = "edited", []
        assert ask(prober, scaled) is None
        await eventually(lambda: KEY in stale)
        assert KEY in told, "it is reconciled, and the edit followed, at once"
        asked = served.asked  # a probe that had read the token before may have asked meanwhile
        stale.clear()
        await eventually(lambda: KEY in stale)
        assert (served.asked, ask(prober, scaled)) == (asked, None), "it is not called not ready"
        api.token = TOKEN
        await settled(prober, scaled)
