"""The density API over HTTP: who may ask, what each route answers, and that no request makes it fail."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final, cast
from urllib.parse import quote

import aiohttp
import jsonschema
import pytest
import yarl
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from console.access_reviews import MOST_KEPT, NO_SECONDS, YES_SECONDS, AccessReviews
from console.api_requests import MOST_BODY_BYTES
from console.api_routes import ROUTES, DensityContext
from console.api_server import build_api
from console.density_prices import DensityPrices
from console.density_service import DensityService
from console.openapi_document import build_document
from console.run import ConsoleOptions, build_health, run
from controller.placement.cluster_view import ClusterView
from gateway.http.whole_answers import serve_answers
from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from kube.resources import TOKEN_REVIEWS, Resource
from tests.support.density_worlds import GIB, GPU, Clock, build_view, cpu_node, gpu_node, host, model, pod, service

ADMIN, TENANT, NOBODY = "token-of-admin", "token-of-tenant", "token-of-nobody"
RIGHTS: Final = {
    "admin": {("nodefitnesses", ""), ("inferenceservices", "")},
    "tenant": {("nodefitnesses", ""), ("inferenceservices", "team")},
    "nobody": set[tuple[str, str]](),
}


class Reviewer:
    """An API server that reviews."""

    def __init__(self) -> None:
        self.asked: list[tuple[Resource, Obj]] = []
        self.failure: Exception | None = None

    async def review(self, resource: Resource, spec: Obj) -> Obj:
        self.asked.append((resource, spec))
        if self.failure is not None:
            raise self.failure
        if resource is TOKEN_REVIEWS:
            name = spec["token"].removeprefix("token-of-")
            if name not in RIGHTS:
                return {"status": {"authenticated": False}}
            return {"status": {"authenticated": True, "user": {"username": name, "groups": ["all"]}}}
        wanted = spec["resourceAttributes"]
        assert wanted["verb"] == "list"
        return {"status": {"allowed": (wanted["resource"], wanted["namespace"]) in RIGHTS[spec["user"]]}}


class Api:
    """A server, and a client of it."""

    def __init__(self, session: aiohttp.ClientSession, port: int, reviewer: Reviewer, clock: Clock) -> None:
        self.session, self.port, self.reviewer, self.clock = session, port, reviewer, clock

    async def ask(self, path: str, token: str | None = ADMIN, method: str = "GET", **more: Any) -> tuple[int, Any, Any]:
        headers = dict(more.pop("headers", {}))
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        url = yarl.URL(f"http://127.0.0.1:{self.port}{path}", encoded=True)
        async with self.session.request(method, url, headers=headers, **more) as response:
            body = await response.read()
            return response.status, json.loads(body) if body else None, response.headers.copy()


def make_view() -> ClusterView:
    view = build_view(
        [
            *(*gpu_node("g1"), *gpu_node("g2", 2), *cpu_node("c1"), host("mac")),
            *(model("tiny"), model("secret", "other")),
            *(service("chat", "tiny"), service("hidden", "secret", "other")),
            pod("p", "g2", {GPU: "1"}, "chat"),
        ]
    )
    for event in view._lists:  # the watches that set them run in tests/cluster
        event.set()
    return view


@contextlib.asynccontextmanager
async def serving(view: ClusterView | None = None) -> AsyncIterator[Api]:
    reviewer, clock = Reviewer(), Clock()
    prices = DensityPrices(per_kwh=0.3, watts={"nvidia": 72})
    context = DensityContext(DensityService(view or make_view()), prices)
    reviews = AccessReviews(reviewer, clock)  # type: ignore[arg-type] # it calls review() only
    server = build_api(context, reviews)
    async with serve_answers(server, "127.0.0.1", 0) as (_, port), aiohttp.ClientSession() as session:
        yield Api(session, port, reviewer, clock)


PATHS = {
    "/api/v1/density/nodes/{name}": "/api/v1/density/nodes/g1",
    "/api/v1/density/query": "/api/v1/density/query?model=tiny",
    "/api/v1/system": "/api/v1/system?node=g1",
}


async def ask_route(api: Api, route: Any, token: str | None = ADMIN) -> tuple[int, Any, Any]:
    body = {"data": b'{"model": "team/tiny", "context": 4096}'} if route.method == "POST" else {}
    return await api.ask(PATHS.get(route.path, route.path), token, route.method, **body)


async def test_address_that_cannot_be_served_is_an_os_error() -> None:
    for options in (ConsoleOptions(("203.0.113.7", 8090)), ConsoleOptions(("127.0.0.1", 0), ("203.0.113.7", 8090))):
        with pytest.raises(OSError, match="assign"):
            await run(cast("Client", Reviewer()), options)


async def test_every_route_answers_as_the_document_says() -> None:
    document = build_document()
    async with serving() as api:
        _, served, _ = await api.ask("/openapi.json", None)
        assert served == json.loads(json.dumps(document))
        for route in ROUTES:
            status, answer, _ = await ask_route(api, route)
            assert status == 200, (route.path, answer)
            described = document["paths"][route.path][route.method.lower()]
            schema = described["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(answer, {**schema, "components": document["components"]})


async def test_document_refuses_what_is_no_answer() -> None:
    document = build_document()
    schema = {"$ref": "#/components/schemas/QueryAnswer", "components": document["components"]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"query": "x", "rankedNodes": None}, schema)


async def test_caller_without_a_valid_token_sees_nothing() -> None:
    async with serving() as api:
        for route in ROUTES:
            for token in (None, "token-of-stranger", "", "x" * 5000):
                status, answer, headers = await ask_route(api, route, token)
                assert (status, list(answer)) == (401, ["error"])
                assert headers["WWW-Authenticate"] == "Bearer"


async def test_caller_without_rights_is_refused_and_sees_no_costs() -> None:
    async with serving() as api:
        for route in ROUTES:
            status, answer, _ = await ask_route(api, route, NOBODY)
            if route.demand is None:
                assert (status, answer["models"], answer["namespaces"]) == (200, [], [])
            else:
                assert (status, list(answer)) == (403, ["error"])


async def test_tenant_sees_models_and_costs_of_his_namespaces_only() -> None:
    async with serving() as api:
        for route in ROUTES:
            _, tenants, _ = await ask_route(api, route, TENANT)
            assert "secret" not in json.dumps(tenants), route.path
            assert "hidden" not in json.dumps(tenants), route.path
        _, costs, _ = await api.ask("/api/v1/density/cost", TENANT)
        assert [cost["name"] for cost in costs["models"]] == ["chat"]
        _, all_costs, _ = await api.ask("/api/v1/density/cost")
        assert [cost["name"] for cost in all_costs["models"]] == ["hidden", "chat"]


async def test_flood_of_one_caller_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's requests wait for each other, so that another's waits for one answer of his at the most."""
    computed: list[str] = []
    compute = DensityService.compute

    async def note(self: DensityService, answer: Any) -> Any:
        computed.append("asked")
        try:
            return await compute(self, answer)
        finally:
            computed.append("answered")

    monkeypatch.setattr(DensityService, "compute", note)
    async with serving() as api:
        await asyncio.gather(*(api.ask("/api/v1/density/nodes", TENANT) for _ in range(8)))
    assert computed == ["asked", "answered"] * 8


@pytest.mark.parametrize(
    "failure", [Unreachable("no answer"), ApiError("create tokenreviews", status=500, reason="", message=ADMIN)]
)
async def test_reviews_that_fail_open_nothing(failure: Exception) -> None:
    async with serving() as api:
        api.reviewer.failure = failure
        with capture_logs() as logs:
            status, answer, _ = await api.ask("/api/v1/density/nodes")
        assert (status, list(answer)) == (503, ["error"])
        assert ADMIN not in json.dumps([logs, answer], default=str)


async def test_answers_of_reviews_are_kept_for_seconds() -> None:
    async with serving() as api:
        for _ in range(3):
            await api.ask("/api/v1/density/nodes")
        reviews = len(api.reviewer.asked)
        assert reviews == 3
        api.clock.seconds += YES_SECONDS + 1
        await api.ask("/api/v1/density/nodes")
        assert len(api.reviewer.asked) == 2 * reviews
        await api.ask("/api/v1/density/nodes", "token-of-stranger")
        api.clock.seconds += NO_SECONDS + 0.1
        await api.ask("/api/v1/density/nodes", "token-of-stranger")
        assert len(api.reviewer.asked) == 2 * reviews + 2


async def test_flood_of_tokens_is_not_kept() -> None:
    reviewer = Reviewer()
    reviews = AccessReviews(reviewer)  # type: ignore[arg-type] # it calls review() only
    for number in range(MOST_KEPT + 10):
        assert await reviews.identify(f"token-of-stranger-{number}", "10.0.0.1") is None
    assert len(reviews._invalid_tokens._answers) == MOST_KEPT
    assert not any("token" in str(key) for key in reviews._invalid_tokens._answers)


async def test_answer_that_the_client_has_is_not_sent_again() -> None:
    async with serving() as api:
        _, _, headers = await api.ask("/api/v1/density/nodes")
        etag = headers["ETag"]
        for tag in (etag, f'"x", W/{etag}', "*"):
            status, body, again = await api.ask("/api/v1/density/nodes", headers={"If-None-Match": tag})
            assert (status, body, again["ETag"]) == (304, None, etag)
        assert (await api.ask("/api/v1/density/nodes", headers={"If-None-Match": '"x"'}))[0] == 200
        # Another caller gets another answer under the same path.
        assert headers["Vary"] == "Authorization"
        assert headers["Cache-Control"] == "private, no-cache"


async def test_pages_follow_each_other() -> None:
    async with serving() as api:
        seen = list[str]()
        offset: Any = 0
        while offset is not None:
            _, answer, _ = await api.ask(f"/api/v1/density/nodes?limit=1&offset={offset}")
            seen += [node["nodeName"] for node in answer["nodes"]]
            offset = answer["nextOffset"]
        assert seen == ["c1", "g1", "g2", "mac"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/density/query", 400),
        ("/api/v1/density/query?model=", 400),
        ("/api/v1/density/query?model=tiny&min_fit=best", 400),
        ("/api/v1/density/query?model=tiny&use_case=war", 400),
        ("/api/v1/density/query?model=tiny&limit=0", 400),
        ("/api/v1/density/query?model=tiny&limit=1001", 400),
        ("/api/v1/density/query?model=tiny&offset=-1", 400),
        ("/api/v1/density/query?model=tiny&limit=%D9%A1", 400),
        (f"/api/v1/density/query?model={'x' * 257}", 400),
        ("/api/v1/density/query?model=%00%0a%7f", 200),
        ("/api/v1/density/query?model=no-such-model", 200),
        ("/api/v1/density/nodes/absent", 404),
        ("/api/v1/density/nodes/..%2F..%2Fetc", 404),
        ("/api/v1/density/nodes/%00", 404),
        ("/api/v1/models?node=absent", 404),
        ("/api/v1/system", 400),
        ("/api/v1/nothing", 404),
        ("/", 404),
    ],
)
async def test_impossible_query_is_refused_as_json(path: str, status: int) -> None:
    async with serving() as api:
        code, answer, _ = await api.ask(path)
        assert code == status, answer
        assert ("error" in answer) == (status != 200)


async def test_method_that_a_route_has_not_is_refused_with_those_that_it_has() -> None:
    async with serving() as api:
        for path, method, allowed in (
            ("/api/v1/density/nodes", "DELETE", "GET"),
            ("/api/v1/density/simulate", "GET", "POST"),
        ):
            status, answer, headers = await api.ask(path, method=method)
            assert (status, list(answer)) == (405, ["error"])
            assert allowed in headers["Allow"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b'{"model": 1}', 400),
        (b'{"model": "tiny", "other": 1}', 400),
        (b'{"model": "tiny", "context": 1e400}', 400),
        (b'{"model": "tiny", "memoryGb": 1e400}', 400),
        (b'{"model": "tiny", "context": 99999999999999999999999}', 400),
        (b'{"model": "\xff"}', 400),
        (b'{"model": "\\ud800"}', 400),
        (b"[" * 60000, 400),
        (b'{"model": "' + b"x" * 300 + b'"}', 400),
        (b'{"model": "' + b"x" * MOST_BODY_BYTES + b'"}', 413),
        (b'{"model": "absent"}', 404),
        (b'{"model": "team/tiny"}', 200),
    ],
)
async def test_body_of_a_simulation_is_checked(body: bytes, status: int) -> None:
    async with serving() as api:
        code, answer, _ = await api.ask("/api/v1/density/simulate", method="POST", data=body)
        assert code == status, answer


@given(text=st.text(max_size=300), raw=st.binary(max_size=40))
async def test_no_name_makes_the_server_fail(text: str, raw: bytes) -> None:
    async with serving() as api:
        for quoted in (quote(text, safe=""), quote(raw, safe="")):
            for path in (f"query?model={quoted}", f"nodes/{quoted}", f"nodes?limit={quoted}"):
                status, _, _ = await api.ask(f"/api/v1/density/{path}")
                assert status in {200, 400, 404}, path


async def test_nothing_is_answered_before_the_cluster_was_read() -> None:
    view = build_view(gpu_node("g1"))
    async with serving(view) as api:
        assert (await api.ask("/api/v1/density/nodes"))[0] == 503


async def test_health_asks_for_no_token() -> None:
    view = build_view(gpu_node("g1", free=20 * GIB))
    async with (
        serve_answers(build_health(DensityService(view)), "127.0.0.1", 0) as (_, port),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        for path, status in (("/healthz", 200), ("/readyz", 503), ("/metrics", 200), ("/api/v1/catalog", 404)):
            async with session.get(path) as response:
                assert response.status == status
