"""The counts of tokens that engines report, in each form in which the APIs have them.

They are charged to clients and their sums are shown, and an engine may be anybody's: what is no plain count is none.
"""

from typing import Annotated, Final

import msgspec


class TokenCount(msgspec.Struct):
    """The tokens of a prompt and of the generated text, as the engine reports them; None: not reported."""

    prompt: int | None = None
    generated: int | None = None


NO_TOKENS: Final = TokenCount()
"""Nothing is reported. It is never changed."""


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A number of tokens. What an engine states beyond is no count: it would end sums and limits of others."""


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    cache_read_input_tokens: _Count | None = None
    """In Anthropic's API, whose input_tokens are those that were not in the cache."""
    cache_creation_input_tokens: _Count | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's own report, in the last event of every stream."""

    prompt_n: _Count = 0
    cache_n: _Count = 0
    predicted_n: _Count = 0


class _Envelope(msgspec.Struct):
    usage: _Usage | None = None


class _MessageUsage(msgspec.Struct):
    """The report at the begin of a stream of /v1/messages: the count of the generated text is that of the begin."""

    input_tokens: _Count | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None


class _Message(msgspec.Struct):
    usage: _MessageUsage | None = None


class _Event(msgspec.Struct):
    usage: _Usage | None = None
    timings: _Timings | None = None
    response: _Envelope | None = None
    """Only in events of /v1/responses."""
    message: _Message | None = None
    """Only in events of /v1/messages."""


_event = msgspec.json.Decoder(_Event)


def take_over_counts(tokens: TokenCount, body: bytes) -> None:
    """Replace the counts in `tokens` by those that an event or a response reports; counts that it lacks stay.

    The APIs name the counts differently, and Anthropic's and the responses API report them within another object.
    llama.cpp's `timings` count only without `usage`. A text that cannot be decoded changes nothing.
    """
    try:
        event = _event.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return

    # 1. `usage`, of the event itself and of the object within it. OpenAI says prompt and completion tokens; Anthropic
    #    and the responses API say input and output tokens.
    for usage in (event.usage, event.response.usage if event.response else None):
        if usage:
            if usage.prompt_tokens is not None:
                tokens.prompt = usage.prompt_tokens
            if usage.input_tokens is not None:
                tokens.prompt = _sum_input(usage)
            for generated in (usage.completion_tokens, usage.output_tokens):
                if generated is not None:
                    tokens.generated = generated
    if event.message and event.message.usage and event.message.usage.input_tokens is not None:
        tokens.prompt = _sum_input(event.message.usage)

    # 2. `timings`: tokens of the prompt that were read now or were cached, and those that were generated.
    if event.timings and not event.usage:
        tokens.prompt = event.timings.prompt_n + event.timings.cache_n
        tokens.generated = event.timings.predicted_n


def _sum_input(usage: _Usage | _MessageUsage) -> int:
    """Return the tokens of a prompt, also those that were in a cache."""
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return (usage.input_tokens or 0) + cached
