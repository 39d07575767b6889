"""The measured speed of an engine, as services and processes on hosts show it."""

from typing import Annotated

from msgspec import Meta

from crds.meta import ApiStruct, described
from crds.rate import Rate


class MeasuredRates(ApiStruct, frozen=True, kw_only=True):
    """The rates that every measurement has."""

    tokens_per_second: Annotated[
        Rate, described("Tokens that one request generates per second: the median of the runs, a decimal number.")
    ]
    prompt_tokens_per_second: Annotated[
        Rate, described("Tokens of a prompt that are read per second, a decimal number. Absent if it is unknown.")
    ] = ""
    time_to_first_token_ms: Annotated[
        int | None,
        described("Time to the first token of an answer to a prompt of 128 tokens, in milliseconds.", format="int32"),
    ] = None
    measured_at: Annotated[
        Annotated[str, Meta(max_length=64)], described("Time of the measurement.", format="date-time")
    ] = ""


class ProcessPerformance(MeasuredRates, frozen=True, kw_only=True):
    """The speed of a process, as the agent of its host measured it."""

    inter_token_latency_ms: Annotated[
        Rate, described("Time between two tokens in milliseconds, a decimal number. Absent if it is unknown.")
    ] = ""
    load_seconds: Annotated[
        int | None,
        described("Time from the start of the engine to its first token, in seconds.", format="int32"),
    ] = None
