"""What is changed and counted of an engine's answer, as pure functions over bytes."""

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy import asked, errors
from gateway.proxy.answers import Stream, Tokens, whole
from gateway.proxy.asked import NotUnderstoodError


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(text: str, model: str = "engine-name") -> bytes:
    return event(model=model, choices=[{"index": 0, "delta": {"content": text}}])


# Streams, in the forms of llama.cpp, mlx_lm and the other two APIs

LLAMA = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null}}],"model":"chat"}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}],"model":"chat"}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":" there"}}],"model":"chat"}\n\n'
    b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"model":"chat",'
    b'"timings":{"cache_n":3,"prompt_n":4,"predicted_n":2}}\n\ndata: [DONE]\n\n'
)
USAGE = {"prompt_tokens": 7, "completion_tokens": 5}


@given(cuts=st.lists(st.integers(0, 600), max_size=8))
def test_a_stream_is_the_same_however_it_arrives(cuts: list[int]) -> None:
    sent = b": keepalive 1/1\n\n" + delta("a") + delta("b") + event(choices=[], model="engine-name", usage=USAGE)
    stream = Stream("chat")
    places = [0, *sorted(cuts), len(sent)]
    got = b"".join(stream.feed(sent[a:b]) for a, b in itertools.pairwise(places)) + stream.rest()
    assert got == sent.replace(b"engine-name", b"chat")
    assert stream.tokens == Tokens(7, 5)


def test_a_stream_under_the_right_name_is_passed_on_as_the_very_bytes() -> None:
    stream = Stream("chat")
    assert stream.feed(LLAMA) is LLAMA
    assert stream.tokens == Tokens(7, 2)


def test_events_are_passed_on_before_the_next_exists() -> None:
    stream = Stream("chat")
    assert stream.feed(delta("a") + b'data: {"mod') == delta("a", "chat")
    assert stream.feed(b'el":"x"}\n') == b'data: {"model":"chat"}\n'


def test_what_a_model_says_about_a_model_is_not_touched() -> None:
    said = 'my "model":"gpt" is \\ "model": "x"'
    stream = Stream("chat")
    assert stream.feed(delta(said)) == delta(said, "chat")


def test_tokens_are_counted_where_the_engine_does_not() -> None:
    stream = Stream("chat")
    for text in ("", "a", "b"):
        stream.feed(delta(text))
    assert stream.tokens == Tokens(None, 2)


def test_the_names_in_events_of_the_other_apis_are_found() -> None:
    stream = Stream("chat")
    responses = event(type="response.completed", response={"model": "x", "usage": {"input_tokens": 3}})
    messages = event(type="message_start", message={"model": "x", "usage": {"input_tokens": 4, "output_tokens": 1}})
    last = event(type="message_delta", usage={"output_tokens": 9})
    assert stream.feed(responses + messages + last).count(b'"model": "chat"') == 2
    assert stream.tokens == Tokens(4, 9)


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    stream = Stream("chat")
    long = b"data: " + b"x" * (1 << 20)
    assert stream.feed(long) == long
    assert stream.feed(b"y\n") == b"y\n"


@given(st.binary(max_size=300))
def test_whatever_an_engine_streams_comes_through(junk: bytes) -> None:
    stream = Stream("chat")
    assert len(stream.feed(junk) + stream.rest()) >= len(junk) - junk.count(b"model") * 300


# Answers that come at once


def test_an_answer_gets_the_services_name_and_keeps_every_other_byte() -> None:
    body = b'{"model": "/weights/x", "big": 1234567890123456789012, "f": 1.0, "usage": {"prompt_tokens": 7}}'
    found = whole(body, "chat")
    assert found.body == b'{"model":"chat","big":1234567890123456789012,"f":1.0,"usage":{"prompt_tokens": 7}}'
    assert (found.tokens, found.failed) == (Tokens(7, None), False)


def test_an_answer_under_the_right_name_is_the_very_bytes() -> None:
    body = b'{ "model": "chat", "choices": [] }'
    assert whole(body, "chat").body is body


@pytest.mark.parametrize(
    ("body", "failed"),
    [
        (b'{"error": {"message": "no"}}', True),
        (b'{"error": "no"}', True),
        (b'{"error": null, "output": []}', False),
        (b'{"error": "x", "choices": []}', False),
        (b"[1]", False),
        (b"\xff", False),
        (b"[" * 5000, False),
    ],
)
def test_an_error_under_the_status_200_is_seen(body: bytes, failed: bool) -> None:
    found = whole(body, "chat")
    assert (found.body, found.failed) == (body, failed)


# Requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"model": 1}',
        b'{"model": "a"',
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b'{"\xff": 1}',
        b'{"a": ' + b"[" * 100_000,
        b"\x1f\x8b gzip",
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(NotUnderstoodError, match="not the JSON object"):
        asked.read(body)


@pytest.mark.parametrize(
    "keys", ['"model":"x"', '"model":"x","model":"chat"', '"Model":"x"', '"\\u006dodel":"x"', '"MODEL":"x","model":"y"']
)
def test_an_engine_hears_one_name_of_a_model_and_it_is_ours(keys: str) -> None:
    body = b'{"n": 1.50, ' + keys.encode() + b', "draft_model": "evil", "adapters": "/etc", "messages": [{"a":  1}]}'
    assert asked.rewritten(body, "default_model") == b'{"model":"default_model","n":1.50,"messages":[{"a":  1}]}'


@given(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=5))
def test_everything_else_of_a_request_stays(fields: dict[str, object]) -> None:
    fields = {key: value for key, value in fields.items() if key.lower() != "model"}
    body = msgspec.json.encode(fields | {"model": "chat"})
    assert asked.read(body).model == "chat"
    assert msgspec.json.decode(asked.rewritten(body, "x")) == fields | {"model": "x"}


# Errors: what llama.cpp, mlx_lm, Ollama, oMLX and vLLM answer


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            400,
            {"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error", "n_ctx": 8}},
            (400, "too long", "invalid_request_error", "context_length_exceeded"),
        ),
        (
            500,
            {"error": {"code": 500, "message": "oh", "type": "server_error"}},
            (500, "oh", "server_error", "server_error"),
        ),
        (404, {"error": "generation thread died"}, (404, "generation thread died", "invalid_request_error", "")),
        (503, {"error": "server busy, please try again."}, (503, "server busy, please try again.", "server_error", "")),
        (429, {"error": {"message": "slow", "code": "rate"}}, (429, "slow", "rate_limit_error", "rate")),
        (507, {"detail": "not enough memory"}, (507, "not enough memory", "server_error", "")),
        (
            422,
            {"detail": [{"loc": ["body", "messages"], "msg": "field required", "type": "missing"}]},
            (422, "body.messages: field required", "invalid_request_error", ""),
        ),
        (401, {"detail": "Invalid API key"}, (502, "refuses the proxy (Invalid API key)", "server_error", "")),
        (
            501,
            {"error": {"code": 501, "message": "no embeddings", "type": "not_supported_error"}},
            (
                400,
                "does not serve this: its spec.mode is another one (no embeddings)",
                "invalid_request_error",
                "not_supported_error",
            ),
        ),
        (404, "Not Found", (404, "Not Found", "invalid_request_error", "")),
        (500, "", (500, "answered 500 and no reason", "server_error", "")),
    ],
)
def test_an_engines_error_is_said_in_openais_form(
    status: int, body: object, expected: tuple[int, str, str, str]
) -> None:
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    got, said = errors.of_engine(status, raw, "ns/chat")
    error = json.loads(said)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert expected[1] in error["message"]
    assert (got, error["type"], error["code"]) == (expected[0], expected[2], expected[3] or "engine_error")
