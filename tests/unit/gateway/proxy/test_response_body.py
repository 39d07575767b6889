"""The rewriting of response bodies and of engines' errors, as pure functions over bytes."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy import errors
from gateway.proxy.response_body import (
    LONGEST_LINE_BYTES,
    SHORT_JSON_BYTES,
    JsonResponse,
    LongJsonResponse,
    TokenStream,
    rewrite_json,
)
from gateway.proxy.response_end import ResponseEnd
from gateway.proxy.token_counts import TokenCount
from tests.support.pod_engines.dialects import DIALECTS


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
def test_rewritten_stream_does_not_depend_on_the_chunks(cuts: list[int]) -> None:
    sent = b": keepalive 1/1\n\n" + delta("a") + delta("b") + event(choices=[], model="engine-name", usage=USAGE)
    stream = TokenStream("chat")
    places = [0, *sorted(cuts), len(sent)]
    got = b"".join(stream.feed(sent[a:b]) for a, b in itertools.pairwise(places)) + stream.finish()
    assert got == sent.replace(b"engine-name", b"chat")
    assert stream.tokens == TokenCount(7, 5)


def test_stream_with_the_right_name_is_passed_on_byte_by_byte() -> None:
    stream = TokenStream("chat")
    assert stream.feed(LLAMA) is LLAMA
    assert stream.tokens == TokenCount(7, 2)


def test_complete_lines_are_passed_on_at_once() -> None:
    stream = TokenStream("chat")
    assert stream.feed(delta("a") + b'data: {"mod') == delta("a", "chat")
    assert stream.feed(b'el":"x"}\n') == b'data: {"model":"chat"}\n'


def test_generated_text_that_looks_like_a_model_field_is_unchanged() -> None:
    said = 'my "model":"gpt" is \\ "model": "x"'
    stream = TokenStream("chat")
    assert stream.feed(delta(said)) == delta(said, "chat")


@pytest.mark.parametrize("odd", [{"timings": "x"}, {"timings": {"prompt_n": 1.5}}, {"response": "x", "message": "hi"}])
def test_field_of_an_odd_type_hides_no_tokens(odd: dict[str, object]) -> None:
    assert rewrite_json(json.dumps({"usage": USAGE} | odd).encode(), "chat").tokens == TokenCount(7, 5)


def test_text_events_are_counted_if_the_engine_reports_no_tokens() -> None:
    stream = TokenStream("chat")
    for text in ("", "a", "b"):
        stream.feed(delta(text))
    assert stream.tokens == TokenCount(None, 2)


def test_model_names_in_events_of_the_other_apis_are_replaced() -> None:
    stream = TokenStream("chat")
    responses = event(type="response.completed", response={"model": "x", "usage": {"input_tokens": 3}})
    messages = event(type="message_start", message={"model": "x", "usage": {"input_tokens": 4, "output_tokens": 1}})
    last = event(type="message_delta", usage={"output_tokens": 9})
    assert stream.feed(responses + messages + last).count(b'"model": "chat"') == 2
    assert stream.tokens == TokenCount(4, 9)


def test_line_over_the_limit_is_passed_on_incomplete() -> None:
    stream = TokenStream("chat")
    long = b"data: " + b"x" * (1 << 20)
    assert stream.feed(long) == long
    assert stream.feed(b"y\n") == b"y\n"


FIELD = b'"model" : "engine \\" name"'


@pytest.mark.parametrize("place", range(len(FIELD) + 1))
def test_model_name_that_is_split_within_a_line_over_the_limit_is_replaced(place: int) -> None:
    stream = TokenStream("chat")
    sent = b'data: {"content":"' + b"x" * (1 << 20) + b'",' + FIELD
    cut = len(sent) - len(FIELD) + place
    rest = b',"object":"x"}\n\n'
    got = stream.feed(sent[:cut]) + stream.feed(sent[cut:] + rest)
    assert got == sent.replace(FIELD, b'"model" : "chat"') + rest


@pytest.mark.parametrize("place", range(len(FIELD) + 1))
def test_model_name_that_is_split_where_a_line_exceeds_the_limit_is_replaced(place: int) -> None:
    stream = TokenStream("chat")
    begin, comma = b'data: {"content":"', b'",'
    text = b"x" * (LONGEST_LINE_BYTES - len(begin) - len(comma) - place)
    sent = begin + text + comma + FIELD + b',"object":"'
    rest = b'x"}\n\n'
    # The first chunk is as long as what is held back; the next one has no end of a line either.
    got = stream.feed(sent[:LONGEST_LINE_BYTES]) + stream.feed(sent[LONGEST_LINE_BYTES:]) + stream.feed(rest)
    assert got == sent.replace(FIELD, b'"model" : "chat"') + rest


def test_memory_of_a_line_without_end_is_limited() -> None:
    stream = TokenStream("chat")
    passed_on_bytes = len(stream.feed(b'data: {"model":"'))
    piece = b"x" * (64 << 10)
    for number in range(1, 100):
        passed_on_bytes += len(stream.feed(piece))
        assert number * len(piece) - passed_on_bytes < (1 << 20) + len(piece)


@given(st.binary(max_size=300))
def test_any_bytes_of_a_stream_are_passed_on(junk: bytes) -> None:
    stream = TokenStream("chat")
    assert len(stream.feed(junk) + stream.finish()) >= len(junk) - junk.count(b"model") * 300


# Answers that are not streams


def test_json_response_gets_the_service_name_and_keeps_all_other_bytes() -> None:
    body = b'{"model": "/weights/x", "big": 1234567890123456789012, "f": 1.0, "usage": {"prompt_tokens": 7}}'
    json = rewrite_json(body, "chat")
    assert json.body == b'{"model":"chat","big":1234567890123456789012,"f":1.0,"usage":{"prompt_tokens": 7}}'
    assert (json.tokens, json.end) == (TokenCount(7, None), ResponseEnd.COMPLETE)


def test_json_response_with_the_right_name_is_unchanged() -> None:
    body = b'{ "model": "chat", "choices": [] }'
    assert rewrite_json(body, "chat").body is body


@given(cuts=st.lists(st.integers(0, 400), max_size=8), before=st.booleans())
def test_long_json_response_does_not_depend_on_the_pieces(cuts: list[int], before: bool) -> None:
    usage = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens": 5}
    data = [{"embedding": [0.5, 1], "text": 'my "model":"gpt"'}] * 3
    fields = {"usage": usage, "data": data} if before else {"data": data, "usage": usage}
    sent = json.dumps({"object": "list", "model": "engine-name"} | fields | {"id": "x"}).encode()
    response = LongJsonResponse("chat")
    places = [0, *sorted(cuts), len(sent)]
    got = b"".join(response.feed(sent[a:b]) for a, b in itertools.pairwise(places)) + response.finish()
    assert got == sent.replace(b"engine-name", b"chat")
    assert response.tokens == TokenCount(7, 5)


@pytest.mark.parametrize("text", [b'{"choices":[{"message":{"content":"half an', b'{"choices":[{"index":0}'])
def test_half_a_json_response_is_cut_off(text: bytes) -> None:
    """It may have come without a length, and would be sent on with one that is right."""
    response = JsonResponse("chat")
    assert (response.feed(text), response.finish()) == (b"", b"")
    assert (response.end, response.failed) == (ResponseEnd.CUT_OFF, False)


def test_half_a_long_json_response_is_cut_off() -> None:
    response = JsonResponse("chat")
    begin = b'{"choices":[{"message":{"content":"' + b"a" * SHORT_JSON_BYTES
    assert response.feed(begin) + response.finish() == begin
    assert response.end is ResponseEnd.CUT_OFF


@pytest.mark.parametrize("pieces", [(), (b"",), (b" ", b"\n")])
def test_json_response_of_which_nothing_came_is_cut_off(pieces: tuple[bytes, ...]) -> None:
    response = JsonResponse("chat")
    assert b"".join(map(response.feed, pieces)) == b"".join(pieces)
    assert (response.finish(), response.end) == (b"", ResponseEnd.CUT_OFF)


@pytest.mark.parametrize(
    ("body", "end"),
    [
        (b'{"error": {"message": "no"}}', ResponseEnd.FAILED),
        (b'{"error": "no"}', ResponseEnd.FAILED),
        (b'{"error": {"code": 400, "type": "invalid_request_error"}}', ResponseEnd.REFUSED),
        (b'{"error": null, "output": []}', ResponseEnd.COMPLETE),
        (b'{"error": "x", "choices": []}', ResponseEnd.COMPLETE),
        (b"[1]", ResponseEnd.COMPLETE),
        (b"\xff", ResponseEnd.COMPLETE),
        (b"[" * 5000, ResponseEnd.COMPLETE),
        (b'{"data": [NaN]}', ResponseEnd.COMPLETE),
    ],
)
def test_error_under_status_200_is_recognized(body: bytes, end: ResponseEnd) -> None:
    rewritten = rewrite_json(body, "chat")
    assert (rewritten.body, rewritten.end) == (body, end)


# Errors of llama.cpp, mlx_lm, Ollama, oMLX and vLLM, whose tables are not asked

UNSUPPORTED = "service ns/chat: its engine does not serve /v1/x: use /v1/y"


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
        (503, {"error": "server busy, please try again."}, (503, "server busy, please try again.", "server_error", "")),
        (429, {"error": {"message": "slow", "code": "rate"}}, (429, "slow", "rate_limit_error", "rate")),
        (507, {"detail": "not enough memory"}, (507, "not enough memory", "server_error", "")),
        (
            422,
            {"detail": [{"loc": ["body", "messages"], "msg": "field required", "type": "missing"}]},
            (422, "body.messages: field required", "invalid_request_error", ""),
        ),
        (401, {"detail": "Invalid API key"}, (502, "refuses the proxy's key (Invalid API key)", "server_error", "")),
        (
            501,
            {"error": {"code": 501, "message": "no embeddings", "type": "not_supported_error"}},
            (
                400,
                "service ns/chat: its engine does not serve /v1/x (no embeddings): use /v1/y",
                "invalid_request_error",
                "unsupported_path",
            ),
        ),
        (404, "Not Found", (400, UNSUPPORTED, "invalid_request_error", "unsupported_path")),
        (404, "", (400, UNSUPPORTED, "invalid_request_error", "unsupported_path")),
        (404, {"detail": "Not Found"}, (400, UNSUPPORTED, "invalid_request_error", "unsupported_path")),
        (404, "404 page not found", (400, UNSUPPORTED, "invalid_request_error", "unsupported_path")),
        (
            404,
            {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}},
            (400, UNSUPPORTED, "invalid_request_error", "unsupported_path"),
        ),
        (404, {"error": "model 'x' not found"}, (404, "model 'x' not found", "invalid_request_error", "")),
        (500, "", (500, "answered 500 without a reason", "server_error", "")),
    ],
)
def test_error_of_an_engine_is_translated_into_openais_form(
    status: int, body: object, expected: tuple[int, str, str, str]
) -> None:
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    answer = errors.translate_engine_error(status, raw, "ns/chat", path="/v1/x", way="use /v1/y")
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert expected[1] in error["message"]
    assert (answer.status, error["type"], error["code"]) == (
        expected[0],
        expected[2],
        expected[3] or "engine_error",
    )


LLAMA_TOO_LONG = {
    "code": 400,
    "message": "request (9050 tokens) exceeds the available context size (8192 tokens), try increasing it",
    "type": "exceed_context_size_error",
}
INPUT_TOO_LONG = "The input (9050 tokens) is longer than the model's context length (8192 tokens)."


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": LLAMA_TOO_LONG}),
        (400, DIALECTS["vllm"].too_long(9050, 50, 8192)),
        (400, DIALECTS["vllm"].too_long(9, 9050, 8192)),
        (400, DIALECTS["sglang"].too_long(9000, 50, 8192)),
        (400, {"message": INPUT_TOO_LONG, "type": "BadRequestError", "code": 400}),
        (422, DIALECTS["tgi"].too_long(9050, 50, 8192)),
    ],
)
def test_prompt_that_is_too_long_is_refused_with_both_numbers_and_the_field_to_set(status: int, body: object) -> None:
    answer = errors.translate_engine_error(status, json.dumps(body).encode(), "ns/chat")
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["type"], error["code"]) == (400, "invalid_request_error", "context_length_exceeded")
    assert "9050" in error["message"]
    assert "8192" in error["message"]
    assert error["message"].endswith("send less, or set spec.contextLength of the InferenceService")


def test_error_of_an_engine_is_translated_by_its_table() -> None:
    raw = b'{"error": {"code": 500, "message": "image input is not supported - hint", "type": "server_error"}}'
    mistake = errors.translate_engine_error(500, raw, "ns/chat", "llama.cpp")
    assert (mistake.status, json.loads(mistake.body)["error"]) == (
        400,
        {
            "message": "image input is not supported - hint",
            "type": "invalid_request_error",
            "param": None,
            "code": "engine_error",
        },
    )
    dead = errors.translate_engine_error(404, b'{"error": "generation thread died"}', "ns/chat", "mlx-lm")
    assert (dead.status, json.loads(dead.body)["error"]["type"]) == (503, "server_error")


@pytest.mark.parametrize(
    "message",
    [
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        'tool_choice="required" requires --tool-call-parser to be set',
    ],
)
def test_refusal_of_tools_has_the_way_out(message: str) -> None:
    raw = json.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}).encode()
    refusal = errors.translate_engine_error(400, raw, "ns/chat", "vllm")
    assert refusal.status == 400
    assert str(refusal).startswith(f"service ns/chat: {message}; the form of the model's tool calls is not known")
    assert "spec.extraArgs" in str(refusal)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.bad_request("no"), "invalid_request_error"),
        (errors.invalid_api_key(), "authentication_error"),
        (errors.model_not_found("x", ()), "not_found_error"),
        (errors.request_too_large(5), "request_too_large"),
        (errors.queue_full("x", 5), "rate_limit_error"),
        (errors.upstream_failed("x"), "api_error"),
        (errors.service_unavailable("x"), "overloaded_error"),
    ],
)
def test_error_on_a_path_of_anthropics_api_has_its_form(error: errors.RequestError, kind: str) -> None:
    for route in ("messages", "count_tokens"):
        expected = {"type": "error", "error": {"type": kind, "message": str(error)}}
        assert json.loads(error.encode_body(route)) == expected
    assert error.encode_body("chat") == error.body
