"""The routes over real connections: kept alive, with a length, and bounded whatever a client sends."""

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from devices.vendors import VENDORS
from extender.answers import Answers
from extender.extender_metrics import ExtenderMetrics
from extender.score import ScoreWeights
from extender.server import list_probe_routes, list_verb_routes
from extender.speed_table import SpeedTable
from fitness.performance_store import PerformanceTable
from gateway.http.whole_answers import AnswerServer, BodyLimits, serve_answers
from tests.support.eventually import eventually
from tests.unit.extender.extender_objects import args_body

LOOPBACK = "127.0.0.1"


class Extender:
    """The server on a free port, and whether its lists are complete."""

    def __init__(self) -> None:
        table = SpeedTable(VENDORS, ScoreWeights(), lambda _served, _devices, _corrections: None, PerformanceTable())
        metrics = ExtenderMetrics(table)
        self.is_ready = True
        self.reads = list_probe_routes(metrics, lambda: self.is_ready)
        verbs = list_verb_routes(Answers(lambda _: None, ScoreWeights(), metrics), BodyLimits(1_000_000, 1_050_000))
        self.answers = AnswerServer(self.reads | verbs)
        self.port = 0
        self.metrics_port = 0

    def url(self, path: str) -> str:
        return f"http://{LOOPBACK}:{self.port}{path}"


@pytest_asyncio.fixture
async def extender() -> AsyncIterator[Extender]:
    extender = Extender()
    async with (
        serve_answers(extender.answers, LOOPBACK, 0) as (_, extender.port),
        serve_answers(AnswerServer(extender.reads), LOOPBACK, 0) as (_, extender.metrics_port),
    ):
        yield extender


@pytest_asyncio.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as client:
        yield client


@pytest.mark.parametrize("path", ["/prioritize", "/score"])
async def test_scores_are_served_at_both_paths(extender: Extender, client: aiohttp.ClientSession, path: str) -> None:
    async with client.post(extender.url(path), data=args_body({}, ["n1"])) as response:
        assert response.headers["Content-Type"] == "application/json"
        assert await response.json() == [{"Host": "n1", "Score": 3}]


async def test_connection_is_kept_and_answers_have_a_length(extender: Extender) -> None:
    reader, writer = await asyncio.open_connection(LOOPBACK, extender.port)
    names = [f"node-{number}.rack.example.com" for number in range(5000)]
    for sent in (["n1"], names, []):
        body = args_body({}, sent)
        writer.write(b"POST /filter HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 50_000):
            writer.write(body[start : start + 50_000])
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"chunked" not in head.lower()
        (length,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
        answer = json.loads(await reader.readexactly(int(length.partition(b": ")[2])))
        assert answer["NodeNames"] == sent
    writer.close()
    assert extender.answers.held_bytes == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/filter", 405),
        ("PUT", "/prioritize", 405),
        ("POST", "/preempt", 404),
        ("POST", "/bind", 404),
        ("GET", "/", 404),
        ("GET", "/healthz", 200),
        ("HEAD", "/healthz", 200),
        ("GET", "/readyz", 200),
        ("GET", "/metrics", 200),
        ("POST", "/healthz", 405),
    ],
)
async def test_route_takes_its_method_alone(
    extender: Extender, client: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with client.request(method, extender.url(path)) as response:
        assert response.status == status


async def test_extender_is_ready_only_with_all_lists(extender: Extender, client: aiohttp.ClientSession) -> None:
    extender.is_ready = False
    async with client.get(extender.url("/readyz")) as response:
        assert response.status == 503
    async with client.get(extender.url("/healthz")) as response:
        assert response.status == 200


async def test_address_of_metrics_schedules_nothing(extender: Extender, client: aiohttp.ClientSession) -> None:
    url = f"http://{LOOPBACK}:{extender.metrics_port}"
    async with client.post(f"{url}/filter", data=args_body({}, ["n1"])) as response:
        assert response.status == 404
    async with client.get(f"{url}/metrics") as response:
        assert "pomona_extender_nodes 0.0" in await response.text()


async def test_body_that_is_too_large_is_refused_before_it_comes(extender: Extender) -> None:
    reader, writer = await asyncio.open_connection(LOOPBACK, extender.port)
    writer.write(b"POST /filter HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (1 << 40))
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_chunks_without_end_are_refused(extender: Extender) -> None:
    reader, writer = await asyncio.open_connection(LOOPBACK, extender.port)
    writer.write(b"POST /filter HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(120):
        writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()
    assert extender.answers.held_bytes == 0


async def test_all_bodies_together_are_bounded(extender: Extender, client: aiohttp.ClientSession) -> None:
    _, first = await asyncio.open_connection(LOOPBACK, extender.port)
    first.write(b"POST /filter HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n" + b"x" * 100_000)
    await eventually(lambda: extender.answers.held_bytes == 100_000)
    async with client.post(extender.url("/filter"), data=b"x" * 990_000) as response:
        assert response.status == 503
    first.close()  # the scheduler gave up
    await eventually(lambda: extender.answers.held_bytes == 0)
    async with client.post(extender.url("/filter"), data=args_body({}, ["n1"])) as response:
        assert response.status == 200
