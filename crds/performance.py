"""The extent of benchmarks, and the speed that they measure, of services and of processes on hosts."""

from typing import Annotated

from msgspec import Meta

from crds.meta import ApiStruct, Count
from crds.rate import Rate


class BenchmarkOptions(ApiStruct, frozen=True):
    """The extent of the benchmarks of a service."""

    warmup_iterations: Annotated[int, Meta(ge=0, le=20), "Runs before those that count."] = 2
    runs: Annotated[int, Meta(ge=1, le=50), "Least number of runs that count, of which the median is the speed."] = 5
    min_duration: Annotated[
        Annotated[str, Meta(max_length=8, pattern=r"^[1-9][0-9]{0,3}[sm]$")] | None,
        "Least time of these runs together, such as 30s: more runs follow until it is over. No run begins after "
        "one minute. Default: none.",
    ] = None

    @property
    def min_duration_seconds(self) -> float:
        """The least time of the runs together, in seconds; 0 if there is none."""
        if not self.min_duration:
            return 0.0
        return int(self.min_duration[:-1]) * (60.0 if self.min_duration.endswith("m") else 1.0)


class MeasuredRates(ApiStruct, frozen=True, kw_only=True):
    """The rates that every measurement has."""

    tokens_per_second: Annotated[
        Rate, "Tokens that one request generates per second: the median of the runs, a decimal number."
    ]
    prompt_tokens_per_second: Annotated[
        Rate, "Tokens of a prompt that are read per second, a decimal number. Absent if it is unknown."
    ] = ""
    time_to_first_token_ms: Annotated[
        Count | None, "Time to the first token of an answer to a prompt of 128 tokens, in milliseconds."
    ] = None
    measured_at: Annotated[str, Meta(max_length=64), "Time of the measurement.", {"format": "date-time"}] = ""


class ProcessPerformance(MeasuredRates, frozen=True, kw_only=True):
    """The speed of a process, as the agent of its host measured it."""

    inter_token_latency_ms: Annotated[
        Rate, "Time between two tokens in milliseconds, a decimal number. Absent if it is unknown."
    ] = ""
    load_seconds: Annotated[Count | None, "Time from the start of the engine to its first token, in seconds."] = None
