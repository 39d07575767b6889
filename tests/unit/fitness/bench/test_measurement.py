"""A measurement has the stated runs, ends, and says what it has measured."""

import itertools
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from crds.performance import BenchmarkOptions
from fitness.bench.measurement import (
    SERVING_SECONDS,
    BenchPlan,
    BenchResult,
    PromptSource,
    compute_common_rate,
    list_stream_counts,
    measure_endpoint,
    plan_one_stream,
    summarize,
)
from fitness.bench.streamed_completion import BenchError, CompletionTiming
from tests.support.stub_server import serve_stub


class SimulatedEngine:
    """An engine that takes a word for two tokens, and generates all tokens that are asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.requests: list[dict[str, Any]] = []
        self.refuses: Callable[[dict[str, Any]], bool] = lambda _body: False

    def clock(self) -> float:
        self.now += 0.1
        return self.now

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        self.requests.append(body)
        if self.refuses(body):
            return web.Response(status=400, text="ignore_eos is no field")
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(4):
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        counted = {"prompt_tokens": 2 * len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        await response.write(b"data: " + msgspec.json.encode({"usage": counted}) + b"\n\ndata: [DONE]\n\n")
        return response

    async def measure(self, **plan: Any) -> BenchResult:
        async with serve_stub(self.answer) as url, aiohttp.ClientSession() as session:
            return await measure_endpoint(session, url, "chat", BenchPlan(**plan), clock=self.clock)


@pytest.fixture
def engine() -> SimulatedEngine:
    return SimulatedEngine()


async def test_warm_up_is_not_counted(engine: SimulatedEngine) -> None:
    result = await engine.measure()
    # One request to learn the form, two to warm up, five that count.
    assert len(engine.requests) == 8
    assert len(result.timings) == 5
    assert [request["max_tokens"] for request in engine.requests] == [16] + [128] * 7


async def test_each_prompt_is_new_and_has_about_the_stated_tokens(engine: SimulatedEngine) -> None:
    result = await engine.measure(prompt_tokens=300)
    prompts = [request["prompt"] for request in engine.requests]
    assert len({prompt.split()[0] for prompt in prompts}) == len(prompts)
    assert all(250 <= timing.prompt_tokens <= 350 for timing in result.timings)


async def test_runs_go_on_until_the_least_duration(engine: SimulatedEngine) -> None:
    short = await engine.measure(min_duration_seconds=1.0)
    assert len(short.timings) == 5
    long = await engine.measure(min_duration_seconds=20.0)
    assert long.timings[-1].last - long.timings[0].started >= 19.0
    assert 5 < len(long.timings) <= 100


async def test_number_of_runs_is_bounded(engine: SimulatedEngine) -> None:
    assert len((await engine.measure(min_duration_seconds=1e9, most_seconds=1e9)).timings) == 100


async def test_slow_engine_is_measured_by_fewer_runs(engine: SimulatedEngine) -> None:
    result = await engine.measure(most_seconds=0.1, parallel=4)
    assert len(result.timings) == 1
    assert set(result.concurrency) == {1}


async def test_several_streams_are_measured_up_to_the_stated_number(engine: SimulatedEngine) -> None:
    result = await engine.measure(parallel=6)
    assert list(result.concurrency) == [1, 2, 4, 6]
    assert len(engine.requests) == 8 + 2 + 4 + 6


async def test_engine_that_refuses_several_streams_is_known_by_one(engine: SimulatedEngine) -> None:
    engine.refuses = lambda _body: len(engine.requests) == 10
    result = await engine.measure(parallel=4)
    assert list(result.concurrency) == [1]
    assert result.failed is not None
    assert result.failed.reason == "Refused"


async def test_extension_that_an_engine_refuses_is_left_out(engine: SimulatedEngine) -> None:
    engine.refuses = lambda body: "ignore_eos" in body
    result = await engine.measure()
    assert len(result.timings) == 5
    assert ["ignore_eos" in request for request in engine.requests] == [True] + [False] * 8


async def test_engine_that_refuses_all_is_an_error(engine: SimulatedEngine) -> None:
    engine.refuses = lambda _body: True
    with pytest.raises(BenchError, match="ignore_eos is no field"):
        await engine.measure()
    assert len(engine.requests) == 2


@given(st.integers(-3, 1000))
def test_streams_double_up_to_the_most(parallel: int) -> None:
    counts = list_stream_counts(parallel)
    assert counts[0] == 1
    assert counts[-1] == min(max(parallel, 1), 64)
    assert all(later <= 2 * sooner and later > sooner for sooner, later in itertools.pairwise(counts))


def timing(first: float, last: float, tokens: int = 11, prompt: int = 20, cached: int = 0) -> CompletionTiming:
    return CompletionTiming(first - 0.5, first, last, prompt, cached, tokens)


def test_common_rate_is_from_the_first_token_to_the_last_of_all() -> None:
    assert compute_common_rate([timing(1, 3, tokens=30), timing(2, 6, tokens=20)]) == 10


def test_summary_has_medians() -> None:
    timings = (timing(1, 2), timing(10, 20), timing(30, 32), timing(40, 43, cached=20), timing(50, 55))
    performance = summarize(BenchResult(timings, {1: 3.33333, 4: 12.34567}), BenchPlan())
    assert performance.tokens_per_second == 3.333
    assert performance.runs == [10, 1, 5, 3.333, 2]
    assert performance.prompt_tokens_per_second == 40
    assert performance.time_to_first_token_ms == 500
    assert performance.inter_token_latency_ms == 300
    assert performance.concurrency == {"1": 3.333, "4": 12.35}
    assert (performance.micro_batch_tokens, performance.warmup) == (128, 2)


def test_prompts_of_a_source_differ_from_their_beginning_on() -> None:
    source = PromptSource(5, seed=1)
    prompts = [source.next() for _ in range(100)]
    assert len({prompt.split()[0] for prompt in prompts}) == 100
    assert {len(prompt.split()) for prompt in prompts} == {6}


@pytest.mark.parametrize(
    ("options", "extent"),
    [
        (BenchmarkOptions(), (2, 5, 0.0)),
        (BenchmarkOptions(warmup_iterations=0, runs=50, min_duration="30s"), (0, 50, 30.0)),
        (BenchmarkOptions(min_duration="2m"), (2, 5, 120.0)),
    ],
)
def test_extent_is_that_of_the_service(options: BenchmarkOptions, extent: tuple[int, int, float]) -> None:
    plan = plan_one_stream(options, 2048)
    assert (plan.warmup, plan.runs, plan.min_duration_seconds) == extent
    assert plan.most_seconds == SERVING_SECONDS, "however long it is to take, it ends"


@given(st.integers(1, 1 << 20))
def test_prompt_and_answer_have_room_in_the_context(context: int) -> None:
    plan = plan_one_stream(None, context)
    assert plan.prompt_tokens + plan.tokens <= max(3, context)
    assert (plan.prompt_tokens, plan.tokens) == (128, 128) or context < 512
    assert (plan.warmup, plan.runs, plan.parallel) == (2, 5, 1)
