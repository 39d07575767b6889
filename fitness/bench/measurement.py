"""The measurement of one engine: warm-up, runs of one stream, then several streams at once.

The speed of an engine is the median of its runs, each of which generates one micro-batch of 128 tokens from a prompt
that no earlier run had, so that no cache answers in its place. `min_duration` is a lower bound, as its name says:
after the stated number of runs, more follow until it is over. `most_seconds` is the upper one: a slow engine is
measured by fewer runs, and without several streams. What has been measured until then counts.
"""

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import aiohttp

from crds.performance import BenchmarkOptions
from fitness.bench.streamed_completion import BenchError, CompletionRequest, CompletionTiming, stream_completion
from fitness.performance import MeasuredPerformance

MICRO_BATCH_TOKENS: Final = 128
MOST_RUNS: Final = 100
MOST_STREAMS: Final = 64
SERVING_SECONDS: Final = 60.0
"""Time after which the measurement of an engine that serves begins no further run: a slow one is measured by fewer."""
_FIRST_WORDS: Final = 16
_FIRST_TOKENS: Final = 16
_WORDS: Final = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company"),
)


class BenchPlan(NamedTuple):
    """The extent of a measurement."""

    warmup: int = 2
    """Runs before those that count."""
    runs: int = 5
    """Least number of runs that count."""
    min_duration_seconds: float = 0.0
    """Least time of these runs together."""
    prompt_tokens: int = 128
    """Tokens of each prompt, about."""
    tokens: int = MICRO_BATCH_TOKENS
    """Tokens that each run generates."""
    parallel: int = 1
    """Most streams at once."""
    most_seconds: float = 600.0
    """Time after which nothing more is begun."""


def plan_one_stream(options: BenchmarkOptions | None, context_length: int) -> BenchPlan:
    """Return the plan to measure one stream of an engine that serves users, so that it disturbs them little.

    Prompt and answer are short enough for a small context, and no run begins after `SERVING_SECONDS`.

    Args:
        options: the runs that the service states (spec.benchmark); None: the defaults.
        context_length: the context of the service, in tokens.
    """
    options = options or BenchmarkOptions()
    return BenchPlan(
        warmup=options.warmup_iterations,
        runs=options.runs,
        min_duration_seconds=options.min_duration_seconds,
        # At most a quarter of the context for the prompt, and half for the answer, which needs two tokens for a rate.
        prompt_tokens=max(1, min(BenchPlan().prompt_tokens, context_length // 4)),
        tokens=max(2, min(MICRO_BATCH_TOKENS, context_length // 2)),
        most_seconds=SERVING_SECONDS,
    )


class BenchResult(NamedTuple):
    """The times of all runs of one stream, and the rate of several streams by their number."""

    timings: tuple[CompletionTiming, ...]
    concurrency: dict[int, float]
    failed: BenchError | None = None
    """The reason why more streams were not measured, though there was time."""


async def measure_engine(url: str, model: str, token: str | None, plan: BenchPlan) -> MeasuredPerformance:
    """Return the record of a measurement of the engine at the base URL. Raises BenchError."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers, trust_env=False) as session:
        return summarize(await measure_endpoint(session, url, model, plan), plan)


async def measure_endpoint(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    plan: BenchPlan | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> BenchResult:
    """Measure the engine that serves `model` at the base URL.

    1. Warm up, by runs that do not count.
    2. Measure one stream, until the plan's runs and its least time are over.
    3. Measure 2, 4 and more streams at once. Where that fails, the result has the error and what was measured before.

    No step begins anything more after the plan's longest time, but one run always counts.

    Raises:
        BenchError: the engine does not answer a run in a way that can be measured.
    """
    plan = plan or BenchPlan()
    ends_at = clock() + plan.most_seconds
    # It keeps the form of request that the engine takes, and makes a new prompt for each run.
    engine = _MeasuredEngine(session, url, CompletionRequest(model=model, prompt="", tokens=plan.tokens), clock)

    # 1. Warm up.
    await engine.find_request_form(plan.prompt_tokens)
    for _ in range(plan.warmup):
        if clock() < ends_at:
            await engine.run_once()

    # 2. Measure one stream: by one run at least, however slow the engine is.
    timings = list[CompletionTiming]()
    started = clock()
    while _needs_another_run(plan, len(timings), clock() - started) and (not timings or clock() < ends_at):
        timings.append(await engine.run_once())

    # 3. Measure several streams at once.
    # Tokens a second by number of streams.
    rates = {1: statistics.median(timing.tokens_per_second for timing in timings)}
    # The first count is 1, which is measured already.
    for streams in list_stream_counts(plan.parallel)[1:]:
        if clock() >= ends_at:
            break
        try:
            rates[streams] = compute_common_rate(await engine.run_together(streams))
        except BenchError as error:
            # One stream was measured: an engine that cannot serve several is still known by that.
            return BenchResult(tuple(timings), rates, failed=error)
    return BenchResult(tuple(timings), rates)


class _MeasuredEngine:
    """An engine, the form of a request that it takes, and the prompts that it is sent."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, request: CompletionRequest, clock: Callable[[], float]
    ) -> None:
        self._session, self._url, self._request, self._clock = session, url, request, clock
        self._prompts = PromptSource(_FIRST_WORDS)

    async def find_request_form(self, prompt_tokens: int) -> None:
        """Find out, by a first short request, which form of it the engine takes and how many tokens a word has.

        All further runs use that form, and prompts of `prompt_tokens` tokens.

        Raises:
            BenchError: the engine does not answer as it should.
        """
        # The first run asks for fewer tokens than all further ones.
        further_request = self._request
        self._request = further_request._replace(tokens=min(further_request.tokens, _FIRST_TOKENS))

        try:
            timing = await self.run_once()
        except BenchError as error:
            # Some engines refuse `ignore_eos`, which the API of OpenAI lacks.
            if error.reason != "Refused":
                raise
            further_request = further_request._replace(ignores_end=False)
            self._request = self._request._replace(ignores_end=False)
            timing = await self.run_once()
        self._request = further_request

        # The first prompt had _FIRST_WORDS words, and the engine has counted its tokens.
        words = round(prompt_tokens * _FIRST_WORDS / timing.prompt_tokens)
        self._prompts = PromptSource(max(1, words))

    async def run_once(self) -> CompletionTiming:
        """Send one request with a new prompt; return its times. Raises BenchError."""
        request = self._request._replace(prompt=self._prompts.next())
        return await stream_completion(self._session, self._url, request, self._clock)

    async def run_together(self, streams: int) -> list[CompletionTiming]:
        """Make one run in each of several streams at once, and return their times. Raises BenchError if one failed."""
        outcomes = await asyncio.gather(*(self.run_once() for _ in range(streams)), return_exceptions=True)
        if failed := next((exception for exception in outcomes if isinstance(exception, BaseException)), None):
            raise failed
        return [timing for timing in outcomes if isinstance(timing, CompletionTiming)]


def _needs_another_run(plan: BenchPlan, runs: int, seconds: float) -> bool:
    """Return whether another run of one stream follows: not after the plan's runs and least time, nor `MOST_RUNS`.

    Args:
        plan: the plan.
        runs: the runs so far.
        seconds: the time that they took together.
    """
    return runs < MOST_RUNS and (runs < plan.runs or seconds < plan.min_duration_seconds)


def list_stream_counts(parallel: int) -> list[int]:
    """Return the numbers of streams that are measured at once: 1, 2, 4 and so on, at last `parallel`, 64 at most."""
    most = min(max(parallel, 1), MOST_STREAMS)
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def compute_common_rate(timings: Sequence[CompletionTiming]) -> float:
    """Return the tokens a second of several streams together, from the first token of any to the last of all."""
    spent = max(timing.last for timing in timings) - min(timing.first for timing in timings)
    return sum(timing.tokens for timing in timings) / spent


class PromptSource:
    """Prompts of one length, each of which begins differently: an engine has none of them in its cache."""

    def __init__(self, words: int, seed: int | None = None) -> None:
        self._words = words
        self._random = random.Random(seed)  # noqa: S311 - no secret

    def next(self) -> str:
        """Return a random prompt, which begins with a random number that hardly any other one has."""
        return " ".join([str(self._random.getrandbits(32)), *self._random.choices(_WORDS, k=self._words)])


def summarize(result: BenchResult, plan: BenchPlan) -> MeasuredPerformance:
    """Return the record of a measurement, with medians over its runs.

    Model, runtime, image, node and time are left empty for the caller, as the engine does not state them.
    """
    timings = result.timings
    prompt_rates = [rate for timing in timings if (rate := timing.prompt_tokens_per_second) is not None]
    return MeasuredPerformance(
        tokens_per_second=_round(statistics.median(timing.tokens_per_second for timing in timings)),
        runs=[_round(timing.tokens_per_second) for timing in timings],
        prompt_tokens_per_second=_round(statistics.median(prompt_rates)) if prompt_rates else None,
        time_to_first_token_ms=_round(1000 * statistics.median(timing.first_seconds for timing in timings)),
        inter_token_latency_ms=_round(1000 * statistics.median(timing.seconds_each for timing in timings)),
        concurrency={str(streams): _round(rate) for streams, rate in result.concurrency.items()},
        micro_batch_tokens=plan.tokens,
        warmup=plan.warmup,
    )


def _round(value: float) -> float:
    """Return four significant digits: more are noise, and a Job's result has 4,096 bytes."""
    return round(value, 3 - math.floor(math.log10(value))) if value > 0 else value
