"""The speed of a single request by the metrics of pods, whatever their load.

The rate of tokens of a pod is 0 while nobody asks, and the time between two tokens grows with the requests beside. So
only what was generated for one request alone is compared with a measured speed, which Pomona's proxy counts by itself.
"""

from collections.abc import Mapping
from typing import Final

from controller.services.endpoints import Endpoint
from controller.services.traffic import MetricsSample, find_increase

LEAST_TOKENS: Final = 32
"""Tokens between two readings below which the speed is unknown: of a few, chance decides."""
LONE_TOKENS: Final = "pomona_proxy_lone_tokens_total"
"""Counter of the tokens of requests that ran alone."""
LONE_SECONDS: Final = "pomona_proxy_lone_token_seconds_total"
"""Counter of the time that these took."""
STREAM_SERIES: Final = (LONE_TOKENS, LONE_SECONDS)


def measure_streams(
    before: Mapping[Endpoint, MetricsSample], after: Mapping[Endpoint, MetricsSample]
) -> dict[Endpoint, float]:
    """Return the tokens per second of a single request between two readings of each pod, where it is known."""
    speeds = {pod: _measure(before[pod], sample) for pod, sample in after.items() if pod in before}
    return {pod: speed for pod, speed in speeds.items() if speed is not None}


def _measure(before: MetricsSample, after: MetricsSample) -> float | None:
    if any(name not in after.values for name in STREAM_SERIES):
        return None
    tokens, seconds = (find_increase(before, after, name) for name in STREAM_SERIES)
    return tokens / seconds if tokens >= LEAST_TOKENS and seconds > 0 else None
