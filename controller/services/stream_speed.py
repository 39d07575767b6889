"""The speed of a single request by the metrics of pods, whatever their load.

The rate of tokens of a pod is 0 while nobody asks, and the time between two tokens grows with the requests beside. So
only what was generated for one request alone is compared with a measured speed: Pomona's proxy counts that by itself,
and llama.cpp counts its steps, of which each generates one token of every request.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from controller.services.endpoints import Endpoint
from controller.services.traffic import MetricsSample, find_increase
from runtimes.pod import EnginePod

LEAST_TOKENS: Final = 32
"""Tokens between two readings below which the speed is unknown: of a few, chance decides."""
_MOST_PER_STEP: Final = 1.05
"""Tokens of a step beyond which several requests shared it."""
_PRECISION: Final = 1e-5
"""Relative precision of the counters of an engine that prints six digits."""
_MOST_ERROR: Final = 0.05


class StreamSeries(NamedTuple):
    """The counters by which the speed of a single request is known."""

    tokens: str
    seconds: str
    steps: str | None = None
    """Steps of generation; None: the others count requests that run alone."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all series that are read."""
        return (self.tokens, self.seconds, *((self.steps,) if self.steps else ()))


OF_PROXY: Final = StreamSeries("pomona_proxy_lone_tokens_total", "pomona_proxy_lone_token_seconds_total")


def find_stream_series(engine: EnginePod) -> StreamSeries | None:
    """Return the counters of an engine's pods; None: they do not tell the speed of a single request."""
    if engine.key == "proxy":
        return OF_PROXY
    metrics = engine.metrics
    if metrics is None or not metrics.generated_tokens or not metrics.generation_seconds or not metrics.steps:
        return None
    return StreamSeries(metrics.generated_tokens, metrics.generation_seconds, metrics.steps)


def measure_streams(
    before: Mapping[Endpoint, MetricsSample], after: Mapping[Endpoint, MetricsSample], series: StreamSeries
) -> dict[Endpoint, float]:
    """Return the tokens per second of a single request between two readings of each pod, where it is known."""
    found = {each: _measure(before[each], sample, series) for each, sample in after.items() if each in before}
    return {each: speed for each, speed in found.items() if speed is not None}


def _measure(before: MetricsSample, after: MetricsSample, series: StreamSeries) -> float | None:
    if any(name not in after.values for name in series.names):
        return None
    tokens, seconds = (find_increase(before, after, name) for name in (series.tokens, series.seconds))
    if tokens < LEAST_TOKENS or seconds <= 0:
        return None
    if series.steps is not None:
        steps = find_increase(before, after, series.steps)
        is_vague = any(
            after.values[name] * _PRECISION > _MOST_ERROR * increase
            for name, increase in zip(series.names, (tokens, seconds, steps), strict=True)
        )
        if is_vague or tokens > _MOST_PER_STEP * steps:
            return None
    return tokens / seconds
