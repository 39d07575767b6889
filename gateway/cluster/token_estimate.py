"""The most tokens that a request may use, estimated from its bytes: no engine is asked, and no tokenizer is loaded.

Text counts a token for each three bytes of the body, which is a third more than English and code have, and about what
other scripts have in UTF-8. An image, a sound or a file counts a fixed number, for its size in base64 says nothing of
its tokens. Real usage settles both.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.proxy import paths
from gateway.proxy.request_body import RequestBody
from gateway.proxy.token_lanes import UNKNOWN, read_demand, read_limit

_BYTES_OF_TOKEN: Final = 3
_TOKENS_OF_MEDIUM: Final = 1024
ANSWER_TOKENS: Final = 2048
"""The reservation for an answer whose length the request does not limit."""
_LONGEST_LIST_BYTES: Final = 64 << 10
"""A longer list of prompts is not decoded: that takes ten times its memory."""
_prompts = msgspec.json.Decoder(list[msgspec.Raw])


def estimate_tokens(route: str, body: RequestBody, context_length: int | None) -> int:
    """Return the most tokens of prompt and answers that a request may use; 0: its path uses none.

    Args:
        route: the name of its path.
        body: its body, with its content.
        context_length: the most tokens that the model of its service has for prompt and answer; None: not known.
    """
    if route in paths.TOKEN_COUNT_ROUTES:
        return 0
    tokens = estimate_prompt_tokens(body)
    demand = read_demand(route, body.fields)
    if not demand:  # it has no answer
        return tokens
    answer = read_limit(route, body.fields) or ANSWER_TOKENS
    if context_length is not None:
        answer = min(answer, context_length)
    return tokens + answer * (1 if demand == UNKNOWN else _count_answers(body.fields))


def estimate_prompt_tokens(body: RequestBody) -> int:
    """Return the most tokens that the prompt in a body has."""
    return -(-(len(body.content) - body.media_bytes) // _BYTES_OF_TOKEN) + body.media_count * _TOKENS_OF_MEDIUM


def _count_answers(fields: Mapping[str, msgspec.Raw]) -> int:
    """Return the number of answers to all prompts; each has its own."""
    stated = [bytes(fields.get(name, b"1")) for name in ("n", "n_cmpl")]
    answers = max(int(number[:3]) if number.isdigit() else 1 for number in stated)
    return answers * _count_prompts(memoryview(fields.get("prompt", b"")))


def _count_prompts(value: memoryview) -> int:
    """Return the number of prompts of a completion; of a long list that is not decoded, the most that it may have."""
    begin = bytes(value[:64])
    if not begin.startswith(b"[") or begin[1:].lstrip()[:1].isdigit():  # a text, or the ids of its tokens
        return 1
    if len(value) > _LONGEST_LIST_BYTES:
        return max(1, bytes(value).count(b","))
    try:
        return max(1, len(_prompts.decode(value)))
    except msgspec.DecodeError:
        return 1
