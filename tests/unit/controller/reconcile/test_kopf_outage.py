"""kopf after an outage: no watch may end for good if the returning API server refuses it for a while."""

import asyncio
import contextlib
import gc
import pwd
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from controller.reconcile import kopf_feed
from controller.reconcile.kopf_feed import follow
from kube import credentials
from kube.client import Client
from kube.credentials import Credentials, StaticToken
from kube.resources import JOBS, MODELS, PODS, Resource
from kube.store import Store
from kube.transport import AiohttpTransport
from kube.watch import Selection
from tests.support.background import running
from tests.support.eventually import eventually
from tests.unit.kube.test_credentials import write

WATCHED = (MODELS, JOBS, PODS)
VERBS = ["get", "list", "watch"]


class ReturningServer:
    """An empty API server. While it is `away`, it ends connections, and answers watches of `refused` with 403.

    It answers 401 to other tokens than the one that is `accepted`.
    """

    def __init__(self) -> None:
        self.away = False
        self.accepted = "token"
        self.unauthorized: Counter[str] = Counter()
        self.refused: Resource | None = None
        self._left = asyncio.Event()
        self.lists: Counter[str] = Counter()
        self.watches: Counter[str] = Counter()
        self.open: set[str] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        application = web.Application()
        application.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            self.leave()
            await runner.cleanup()

    def leave(self, refused: Resource | None = None) -> None:
        self.away, self.refused = True, refused
        self._left.set()

    def come_back(self) -> None:
        self.away, self.refused = False, None
        self._left.clear()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        plural = request.path.rpartition("/")[2]
        if request.headers["Authorization"] != f"Bearer {self.accepted}":
            self.unauthorized["watch" if "watch" in request.query else "list"] += 1
            return web.json_response({"kind": "Status", "code": 401, "reason": "Unauthorized"}, status=401)
        if plural not in {resource.plural for resource in WATCHED}:
            return web.json_response(self._discovery(request.path.strip("/").split("/")))
        if "watch" not in request.query:
            self.lists[plural] += 1
            return web.json_response({"kind": "List", "metadata": {"resourceVersion": "5"}, "items": []})
        self.watches[plural] += 1
        if self.away and self.refused and plural == self.refused.plural:
            status = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "no role is known so far"}
            return web.json_response(status, status=403)
        if not self.away:
            return await self._stream(request, plural)
        assert request.transport
        request.transport.abort()
        return web.Response()

    async def _stream(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.open.add(plural)
        await self._left.wait()
        self.open.discard(plural)
        assert request.transport
        request.transport.abort()
        return response

    def _discovery(self, path: list[str]) -> object:
        match path:
            case ["api"]:
                return {"versions": ["v1"]}
            case ["apis"]:
                groups = {resource.group: resource.version for resource in WATCHED if resource.group}
                return {
                    "groups": [
                        {"name": group, "preferredVersion": {"version": version}, "versions": [{"version": version}]}
                        for group, version in groups.items()
                    ]
                }
            case _:
                group = path[1] if path[0] == "apis" else ""
                names = [(resource.plural, resource.kind, True) for resource in WATCHED if resource.group == group]
                names += [] if group else [("namespaces", "Namespace", False)]
                return {
                    "resources": [
                        {"name": name, "kind": kind, "namespaced": namespaced, "singularName": "", "verbs": VERBS}
                        for name, kind, namespaced in names
                    ]
                }


@contextlib.asynccontextmanager
async def following(login: Callable[[], Credentials], *resources: Resource) -> AsyncIterator[None]:
    """Follow the resources of the server of a login."""
    transport = AiohttpTransport(login())
    watched = [Selection(resource) for resource in resources]
    async with running(follow(Client(transport), Store(), watched, login, synced=asyncio.Event())):
        yield
    await transport.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kopf_feed, "RETRY_SECONDS", (0.05, 0.05, 0.05))
    monkeypatch.setattr(kopf_feed, "STOP_SECONDS", 0.3)


async def test_a_refused_watch_after_an_outage_ends_no_watch_for_good() -> None:
    server = ReturningServer()
    async with server.running() as url, following(lambda: Credentials(url, StaticToken("token")), *WATCHED):
        everything = {resource.plural for resource in WATCHED}
        await eventually(lambda: server.open == everything)

        server.leave(refused=JOBS)
        refused = server.watches[JOBS.plural] + 4
        await eventually(lambda: server.watches[JOBS.plural] >= refused)
        server.come_back()

        await eventually(lambda: server.open == everything, timeout=30)


async def test_user_id_without_a_name_is_watched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user that its /etc/passwd does not have."""

    def find_no_user(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", find_no_user)
    server = ReturningServer()
    async with server.running() as url, following(lambda: Credentials(url, StaticToken("token")), MODELS):
        await eventually(lambda: server.open == {MODELS.plural}, timeout=10)


@pytest.mark.parametrize("is_readable", [True, False])
async def test_refused_token_is_not_sent_again_and_again_and_a_new_one_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_readable: bool
) -> None:
    server = ReturningServer()
    async with server.running() as url:
        config = write(tmp_path / "config", {"token": "token"}, server=url)
        async with following(lambda: credentials.load(config), *WATCHED):
            everything = {resource.plural for resource in WATCHED}
            await eventually(lambda: server.open == everything)

            if not is_readable:
                config.write_text("{")
            server.accepted = "another"
            server.leave()
            server.come_back()
            # kopf has given up: our own lists, after a pause, find out whether the token is accepted again.
            await eventually(lambda: server.unauthorized["list"] >= 2)
            assert server.unauthorized["watch"] <= 2 * len(WATCHED)
            gc.collect()  # asyncio reports an error that nobody took when its task is collected
            refusals = [record.message for record in caplog.records if record.exc_info]
            assert refusals == [], "the refusal has a line, no traceback"
            write(config, {"token": "another"}, server=url)
            await eventually(lambda: server.open == everything, timeout=30)
