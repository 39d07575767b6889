"""The tokens that are reserved for a request, by its path, its bytes and its fields."""

import base64
import json
from typing import Any

import pytest

from gateway.cluster.token_estimate import ANSWER_TOKENS, estimate_tokens
from gateway.proxy.request_body import RequestBody, read_short_body, scan_body

IMAGE = base64.b64encode(bytes(range(256)) * 2000).decode()
URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}


def read(request: dict[str, Any], *, escape_slashes: bool = False) -> RequestBody:
    content = json.dumps(request).encode()
    if escape_slashes:
        content = content.replace(b"/", rb"\/")
    if body := read_short_body(content):
        return body
    scan = scan_body(content)
    while True:
        try:
            next(scan)
        except StopIteration as end:
            scanned: RequestBody = end.value
            return scanned


def estimate(route: str, context_length: int | None = None, **request: Any) -> int:
    return estimate_tokens(route, read(request), context_length)


@pytest.mark.parametrize("words", [10, 100_000])
def test_text_counts_a_token_for_three_bytes(words: int) -> None:
    messages = [{"role": "user", "content": "word " * words}]
    size = len(json.dumps({"messages": messages}))
    assert estimate("chat", messages=messages) - ANSWER_TOKENS == -(-size // 3)


@pytest.mark.parametrize(
    ("route", "fields", "answer"),
    [
        ("chat", {}, ANSWER_TOKENS),
        ("chat", {"max_tokens": 100}, 100),
        ("chat", {"max_completion_tokens": 100, "max_tokens": 300}, 300),
        ("chat", {"max_tokens": 100, "n": 3}, 300),
        ("messages", {"max_tokens": 32_000}, 32_000),
        ("responses", {"max_output_tokens": 50}, 50),
        ("completions", {"max_tokens": 10, "prompt": ["a", "b", "c"]}, 30),
        ("completions", {"max_tokens": 10, "prompt": [[1, 2], [3]], "n": 2}, 40),
        ("completions", {"max_tokens": 10, "prompt": [1, 2, 3]}, 10),
        ("embeddings", {"max_tokens": 10}, 0),
        ("rerank", {}, 0),
    ],
)
def test_answer_counts_what_the_request_allows(route: str, fields: dict[str, Any], answer: int) -> None:
    assert estimate(route, **fields) - -(-len(json.dumps(fields)) // 3) == answer


@pytest.mark.parametrize("route", ["count_tokens", "input_tokens"])
def test_path_that_counts_tokens_uses_none(route: str) -> None:
    assert estimate(route, messages=[{"role": "user", "content": "word"}]) == 0


def test_answer_is_no_longer_than_the_context() -> None:
    assert estimate("chat", 4096, max_tokens=1_000_000) < 4096 + 10


@pytest.mark.parametrize("escape_slashes", [False, True])
@pytest.mark.parametrize(
    "part",
    [
        URL,
        {"type": "input_audio", "input_audio": {"data": IMAGE, "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"},
    ],
)
def test_medium_does_not_count_by_its_size(part: dict[str, Any], escape_slashes: bool) -> None:
    body = read({"messages": [{"role": "user", "content": [part, part]}]}, escape_slashes=escape_slashes)
    assert 2048 < estimate_tokens("chat", body, None) - ANSWER_TOKENS < 2048 + 200


def test_text_beside_media_counts() -> None:
    document = {"type": "document", "source": {"type": "text", "data": "a plain text " * 10_000}}
    tokens = estimate("messages", max_tokens=1, messages=[{"role": "user", "content": [URL, document]}])
    assert tokens > 1024 + 130_000 // 3
