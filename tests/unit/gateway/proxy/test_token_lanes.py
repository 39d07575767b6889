"""Requests to an engine whose slots share cells: which run, which wait, and how their tokens are found."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy import upstream_request
from gateway.proxy.config import Backend
from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.request_body import SHORT_BODY_BYTES, RequestBody, read_short_body, scan_body
from gateway.proxy.service import Service
from gateway.proxy.token_lanes import ALONE, UNKNOWN, read_demand, read_limit
from gateway.proxy.upstream_request import count_prompt
from tests.unit.gateway.proxy.running_proxy import fake_engine, make_service

POOL = UpstreamPool()
SHARED = 100
SLOTS = 4
BACKEND = Backend("a", "http://127.0.0.1:1", concurrency=SLOTS, shared_tokens=SHARED)


class PlainRequest:
    """A request that only takes part in the queue."""

    def __init__(self, demand: int) -> None:
        self.adapter = ""
        self.demand = demand
        self.reserved = 0
        self.backend: Backend | None = None

    def take_slot(self, backend: Backend) -> None:
        self.backend = backend


class Traffic:
    """The requests of one service."""

    def __init__(self, *backends: Backend) -> None:
        self.in_flight = InFlight(lambda _: self.service.queue.admit_waiting())
        self.service = Service(make_service(*backends), self.in_flight)
        self.running: list[PlainRequest] = []
        self.waiting: list[PlainRequest] = []
        self.overtaken: list[tuple[PlainRequest, PlainRequest]] = []
        """Each request that waited while a later one began, with that one."""

    def arrive(self, demand: int) -> PlainRequest:
        request = PlainRequest(demand)
        if slot := self.service.queue.take_free_slot(cast("InferenceRequest", request)):
            request.take_slot(slot)
        else:
            self.service.queue.enqueue(cast("InferenceRequest", request))
        self.waiting.append(request)
        self._change(self.service.queue.admit_waiting)
        return request

    def end(self, request: PlainRequest) -> None:
        self.running.remove(request)
        assert request.backend
        uid = request.backend.uid
        self._change(lambda: self.in_flight.end(uid, request.reserved))

    def leave(self, request: PlainRequest) -> None:
        self.waiting.remove(request)
        self._change(lambda: self.service.queue.leave(cast("InferenceRequest", request)))

    def _change(self, act: Callable[[], None]) -> None:
        act()
        admitted = [request for request in self.waiting if request.backend]
        for late in admitted:
            early = self.waiting[: self.waiting.index(late)]
            self.overtaken += [(request, late) for request in early if not request.backend]
        self.running += admitted
        self.waiting = [request for request in self.waiting if not request.backend]


DEMANDS = st.sampled_from([0, 1, 30, 50, SHARED, UNKNOWN, UNKNOWN, ALONE])


@given(st.lists(st.tuples(st.sampled_from(["arrive", "arrive", "end", "leave"]), DEMANDS, st.integers(0, 99))))
@pytest.mark.interpreted
def test_what_runs_fits_into_the_cells_and_none_waits_for_ever(steps: list[tuple[str, int, int]]) -> None:
    traffic = Traffic(BACKEND)
    for action, demand, index in steps:
        if action == "arrive":
            traffic.arrive(demand)
        elif action == "end" and traffic.running:
            traffic.end(traffic.running[index % len(traffic.running)])
        elif action == "leave" and traffic.waiting:
            traffic.leave(traffic.waiting[index % len(traffic.waiting)])
        assert_fits(traffic.running)
        assert traffic.running or not traffic.waiting

    # In each lane the first that came is the first that runs; only into the short lane may a later one go.
    for early, late in traffic.overtaken:
        assert early.demand == UNKNOWN
        assert late.demand <= SHARED

    # All that wait run at last.
    waiting = list(traffic.waiting)
    while traffic.running:
        traffic.end(traffic.running[0])
        assert_fits(traffic.running)
    assert all(request.backend for request in waiting)
    assert traffic.in_flight.find_reservation(BACKEND, ALONE) == ALONE, "all is given back"


def assert_fits(running: list[PlainRequest]) -> None:
    """Check that one request at most may use a whole context, and the others the shared tokens together."""
    assert len(running) <= SLOTS
    demands = sorted(request.demand for request in running if request.demand)
    assert ALONE not in demands or len(demands) == 1
    assert sum(demands[:-1]) <= SHARED


@pytest.mark.interpreted
def test_small_request_leaves_the_long_lane_to_others() -> None:
    traffic = Traffic(BACKEND)
    small, large, second = traffic.arrive(60), traffic.arrive(UNKNOWN), traffic.arrive(60)
    assert traffic.running == [small, large]
    traffic.end(large)
    assert traffic.running == [small, second], "a small one takes whichever lane is free first"


@pytest.mark.interpreted
def test_request_that_leaves_lets_smaller_ones_behind_it_run() -> None:
    traffic = Traffic(BACKEND)
    traffic.arrive(UNKNOWN)
    traffic.arrive(60)
    large, small = traffic.arrive(50), traffic.arrive(40)
    assert small in traffic.waiting
    traffic.leave(large)
    assert small in traffic.running


@pytest.mark.interpreted
def test_each_backend_has_lanes_of_its_own_or_none() -> None:
    traffic = Traffic(BACKEND, Backend("b", "http://127.0.0.1:2", concurrency=1))
    uids = [request.backend.uid for request in [traffic.arrive(UNKNOWN) for _ in range(2)] if request.backend]
    assert uids == ["a", "b"]
    assert traffic.arrive(UNKNOWN) in traffic.waiting
    other = traffic.service.take_backend(cast("InferenceRequest", PlainRequest(UNKNOWN)), ["b"])
    assert other is None, "also in place of a backend that accepts no connection, no request exceeds the cells"


@pytest.mark.interpreted
def test_requests_of_an_older_proxy_count_as_long_ones() -> None:
    traffic = Traffic(BACKEND)
    traffic.in_flight.count_elsewhere({"a": 2})
    short, long, lone = (traffic.arrive(demand) for demand in (50, UNKNOWN, ALONE))
    assert traffic.running == []
    traffic.in_flight.count_elsewhere({"a": 1})
    traffic._change(lambda: None)
    assert traffic.running == [short]
    traffic.in_flight.count_elsewhere({})
    traffic._change(lambda: None)
    assert traffic.running == [short, long]
    traffic.end(short)
    traffic.end(long)
    assert traffic.running == [lone]


# The size of a request, by its body and its engine


def read_both(**fields: Any) -> list[RequestBody]:
    """Return a body as it is read when it is short, and when it is scanned."""
    short = read_short_body(json.dumps(fields).encode())
    scan = scan_body(json.dumps(fields | {"filling": "x" * SHORT_BODY_BYTES}).encode())
    assert short
    while True:
        try:
            next(scan)
        except StopIteration as end:
            return [short, end.value]


@pytest.mark.parametrize(
    ("route", "fields", "demand"),
    [
        ("chat", {}, UNKNOWN),
        ("chat", {"n": 1, "n_cmpl": None, "max_tokens": 5}, UNKNOWN),
        ("chat", {"n": 2}, ALONE),
        ("chat", {"n_cmpl": 3}, ALONE),
        ("chat", {"n": "2"}, ALONE),
        ("completions", {"prompt": "[1]"}, UNKNOWN),
        ("completions", {"prompt": ["a" * 100, "b"]}, ALONE),
        ("embeddings", {"input": ["a", "b"]}, 0),
        ("count_tokens", {}, 0),
    ],
)
def test_demand_is_read_from_the_body(route: str, fields: dict[str, Any], demand: int) -> None:
    assert [read_demand(route, body.fields) for body in read_both(**fields)] == [demand] * 2


@pytest.mark.parametrize(
    ("route", "fields", "limit"),
    [
        ("chat", {"max_tokens": 5}, 5),
        ("chat", {"max_completion_tokens": 6}, 6),
        ("completions", {"n_predict": 7, "max_tokens": 5}, 7),
        ("responses", {"max_output_tokens": 8}, 8),
        ("responses", {"max_output_tokens": 8, "n_predict": 9}, 9),
        ("responses", {"max_tokens": 8}, 0),
        ("messages", {"max_tokens": 9}, 9),
        ("messages", {"n_predict": 9}, 0),
        ("chat", {"max_output_tokens": 5}, 0),
        ("chat", {"max_tokens": -1}, 0),
        ("chat", {"max_tokens": 5.5}, 0),
        ("chat", {"max_tokens": "5"}, 0),
        ("chat", {"max_tokens": 5, "n_predict": -1}, 0),
        ("chat", {"max_tokens": None}, 0),
        ("chat", {"max_tokens": 10**40}, None),
        ("chat", {}, 0),
    ],
)
def test_limit_of_an_answer_is_read_from_the_body(route: str, fields: dict[str, Any], limit: int | None) -> None:
    for body in read_both(**fields):
        read = read_limit(route, body.fields)
        assert read == limit if limit is not None else read > UNKNOWN
    assert read_limit("chat", {"max_tokens": msgspec.Raw(b"9" * 5000)}) > UNKNOWN


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (404, {"error": {"message": "File Not Found", "code": 404, "input_tokens": 1}}),
        (400, {"error": "no template"}),
        (200, {"input_tokens": None}),
        (200, {"input_tokens": "many"}),
        (200, {}),
        (200, ["x" * 2_000_000]),
    ],
)
async def test_prompt_that_the_engine_does_not_count_is_as_long_as_can_be(status: int, answer: object) -> None:
    async def refuse(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response(answer, status=status)

    (body, _) = read_both(messages=[])
    async with fake_engine(refuse) as backend:
        assert await count_prompt(POOL, structs.replace(backend, engine="llama.cpp"), "chat", body) == UNKNOWN
    assert await count_prompt(POOL, structs.replace(backend, engine="llama.cpp"), "chat", body) == UNKNOWN, "it is gone"


@pytest.mark.interpreted
async def test_engine_that_hangs_while_it_counts_holds_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: web.BaseRequest) -> web.StreamResponse:
        return await asyncio.Future()

    monkeypatch.setattr(upstream_request, "_COUNT_SECONDS", 0.05)
    (body, _) = read_both(messages=[])
    async with fake_engine(hang) as backend:
        assert await count_prompt(POOL, structs.replace(backend, engine="llama.cpp"), "chat", body) == UNKNOWN


async def test_prompt_for_an_engine_that_cannot_count_has_no_more_tokens_than_bytes() -> None:
    (body, _) = read_both(messages=[{"role": "user", "content": "Hi"}])
    assert len(body.content) < await count_prompt(POOL, BACKEND, "chat", body) < len(body.content) + 1000
