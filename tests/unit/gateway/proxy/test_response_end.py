"""The end of a response under status 200: who was at fault, in the forms of the engines."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy import errors
from gateway.proxy.response_body import TokenStream
from gateway.proxy.response_end import STREAM_END_BYTES, ResponseEnd, StreamEnd, judge_error_in_body, read_stream_end
from gateway.proxy.responses_stream import ResponsesStream

TOKEN = b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"Hi"}}],"model":"chat"}\n\n'
FINISH = b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"model":"chat"}\n\n'
DONE = b"data: [DONE]\n\n"
COMPUTE = b'{"code":500,"message":"Compute error.","type":"server_error"}'
TOO_LONG = b'{"code":400,"message":"too long","type":"exceed_context_size_error"}'


STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
BROKEN = errors.response_broken_off("ns/chat")
TOLD = {
    "chat": b'data: {"error":{"message":"service ns/chat: its engine broke off',
    "completions": b'data: {"error":{"message":"service ns/chat: its engine broke off',
    "messages": b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"service ns/chat: its',
    "responses": b'event: error\ndata: {"type":"error","sequence_number":',
}


def open_stream(route: str) -> TokenStream:
    return ResponsesStream("chat") if route == "responses" else TokenStream("chat", route=route)


def end_of(sent: bytes, route: str = "chat") -> ResponseEnd:
    stream = open_stream(route)
    got = stream.feed(sent) + stream.finish()
    assert sent.startswith(got) if stream.end is ResponseEnd.CUT_OFF else got.startswith(sent)
    return stream.end


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (b'data: {"error":%b}\n\n', "llama.cpp"),
        (b'data: {"error": %b}\n\ndata: [DONE]\n\n', "vLLM and oMLX"),
        (b"error: %b\n\n", "llama.cpp, some years ago"),
        (b"event: error\ndata: %b\n\n", "llama.cpp for responses and messages"),
        (b'event: error\ndata: {"type":"error","error":%b}\n\n', "Anthropic's form"),
        (b'data: {"error":%b}', "cut off behind the error"),
    ],
)
def test_error_event_of_a_stream_is_a_failure_unless_the_request_is_to_blame(error: bytes, end: str) -> None:
    assert end_of(TOKEN + error % COMPUTE) is ResponseEnd.FAILED, end
    assert end_of(TOKEN + error % TOO_LONG) is ResponseEnd.REFUSED, end


def test_error_that_is_only_a_text_is_a_failure() -> None:
    assert end_of(TOKEN + b'data: {"error":"model runner has unexpectedly stopped"}\n\n') is ResponseEnd.FAILED


@pytest.mark.parametrize(
    ("route", "event", "is_told"),
    [
        ("chat", b'data: {"error":%b}\n\n', True),
        ("chat", b"error: %b\n\n", False),
        ("chat", b"event: error\ndata: %b\n\n", False),
        ("messages", b"event: error\ndata: %b\n\n", True),
        ("messages", b'event: error\ndata: {"type":"error","error":%b}\n\n', True),
        ("messages", b'data: {"error":%b}\n\n', False),
        ("responses", b'event: error\ndata: {"type":"error","error":%b}\n\n', True),
        ("responses", b"event: error\ndata: %b\n\n", False),
    ],
)
def test_error_event_that_clients_of_the_api_cannot_read_is_found(route: str, event: bytes, is_told: bool) -> None:
    stream = open_stream(route)
    assert stream.feed(event % COMPUTE) + stream.finish() == event % COMPUTE
    assert stream.unreadable_error == (b"" if is_told else COMPUTE)
    assert stream.break_off(errors.translate_engine_error(500, COMPUTE, "ns/chat")).count(b"Compute error.") >= 1


@pytest.mark.parametrize(
    ("error", "end"),
    [
        ({"code": 503}, ResponseEnd.FAILED),
        ({"code": 400}, ResponseEnd.REFUSED),
        ({"code": 399}, ResponseEnd.FAILED),
        ({"code": 200, "type": "invalid_request_error"}, ResponseEnd.REFUSED),
        ({"code": 500, "type": "invalid_request_error"}, ResponseEnd.FAILED),
        ({"code": 501, "type": "not_supported_error"}, ResponseEnd.REFUSED),
        ({"code": None, "type": "invalid_request_error"}, ResponseEnd.REFUSED),
        ({"code": "context_length_exceeded", "type": "invalid_request_error"}, ResponseEnd.REFUSED),
        ({"type": "server_error"}, ResponseEnd.FAILED),
        ({"type": ["server_error"]}, ResponseEnd.FAILED),
        ([], ResponseEnd.FAILED),
    ],
)
def test_error_is_judged_by_its_code_then_by_its_type(error: object, end: ResponseEnd) -> None:
    assert judge_error_in_body(json.dumps(error).encode()) is end


@pytest.mark.parametrize("last", [DONE, FINISH + DONE, b"data: [DONE]", b"data:[DONE]\n", DONE + b": ping\n\n" * 20])
def test_stream_with_its_last_event_is_complete(last: bytes) -> None:
    assert end_of(TOKEN + last) is ResponseEnd.COMPLETE


@pytest.mark.parametrize(
    ("route", "last", "mark"),
    [
        ("chat", FINISH, DONE),
        ("completions", FINISH.replace(b":", b" : "), DONE),
        ("chat", FINISH.rstrip(), b"\n\n" + DONE),
        ("messages", b'event: message_delta\ndata: {"delta":{"stop_reason":"end_turn"}}\n\n', STOP),
    ],
)
def test_stream_whose_text_is_whole_gets_the_mark_that_it_lacks(route: str, last: bytes, mark: bytes) -> None:
    stream = open_stream(route)
    assert stream.feed(TOKEN + last) + stream.finish() == TOKEN + last + mark
    assert stream.end is ResponseEnd.COMPLETE


def test_stream_of_which_one_of_two_choices_has_ended_is_cut_off() -> None:
    assert end_of(TOKEN + FINISH + TOKEN) is ResponseEnd.CUT_OFF


@pytest.mark.parametrize("sent", [b"", b": keepalive 1/1\n\n", TOKEN, TOKEN * 100, TOKEN[:-20]])
@pytest.mark.parametrize("route", ["chat", "completions", "messages", "responses"])
def test_stream_without_its_last_event_is_cut_off_and_the_client_told(sent: bytes, route: str) -> None:
    assert end_of(sent, route) is ResponseEnd.CUT_OFF
    stream = open_stream(route)
    got = stream.feed(sent) + stream.finish() + stream.break_off(BROKEN)
    passed_on = sent[: sent.rfind(b"\n") + 1]
    assert got.startswith(passed_on + TOLD[route])


@given(st.integers(0, 600), st.sampled_from(sorted(TOLD)))
def test_event_of_a_stream_that_breaks_off_anywhere_is_one_of_its_own(cut: int, route: str) -> None:
    """The lines before it are whole, and none of them joins it."""
    stream = open_stream(route)
    got = stream.feed((b"event: x\n" + TOKEN)[: cut % 120]) + stream.break_off(BROKEN)
    before, told, _ = got.partition(TOLD[route])
    assert told
    assert before.endswith((b"\n\n", b"event: x\n")) or not before


def test_name_of_an_event_whose_data_did_not_come_is_replaced() -> None:
    stream = open_stream("messages")
    got = stream.feed(b"event: content_block_delta\ndata: {") + stream.break_off(BROKEN)
    assert got.startswith(b"event: content_block_delta\nevent: error\ndata: {")


@pytest.mark.parametrize("text", ["data: [DONE]", '"finish_reason":"stop"', "event: message_stop", "message_stop"])
@pytest.mark.parametrize("route", ["chat", "completions", "messages", "responses"])
def test_generated_text_that_looks_like_an_end_mark_is_none(text: str, route: str) -> None:
    chunk = {"choices": [{"finish_reason": None, "delta": {"content": text}}], "delta": text}
    assert end_of(b"data: " + json.dumps(chunk).encode() + b"\n\n", route) is ResponseEnd.CUT_OFF


def test_end_of_messages_and_responses() -> None:
    assert end_of(STOP, "messages") is ResponseEnd.COMPLETE
    whole = json.dumps({"type": "response.completed", "response": {"error": None, "output": "x" * 10_000}}).encode()
    stream = open_stream("responses")
    stream.feed(b"event: response.completed\ndata: " + whole)
    stream.finish()
    assert stream.end is ResponseEnd.COMPLETE


def test_generated_text_that_looks_like_an_error_is_none() -> None:
    for text in ('{"error":{"code":500}}', "\nevent: error\ndata: {}", 'data: {"error":"x"}', "error: {}"):
        chunk = {"choices": [{"finish_reason": None, "delta": {"content": text}}], "error": None}
        assert end_of(b"data: " + json.dumps(chunk).encode() + b"\n\n" + DONE) is ResponseEnd.COMPLETE


@given(cuts=st.lists(st.integers(0, 300), max_size=8))
def test_end_does_not_depend_on_the_chunks(cuts: list[int]) -> None:
    sent = TOKEN + b"event: error\ndata: " + TOO_LONG + b"\n\n" + DONE
    stream = TokenStream("chat", route="chat")
    for start, stop in itertools.pairwise([0, *sorted(cuts), len(sent)]):
        stream.feed(sent[start:stop])
    stream.finish()
    assert stream.end is ResponseEnd.REFUSED


@given(st.binary(max_size=300), st.sampled_from(["chat", "responses"]))
def test_any_bytes_have_an_end(junk: bytes, route: str) -> None:
    for error in (b"", b"error", b"event: error\ndata:", b'data: {"error":'):
        assert isinstance(read_stream_end(error + junk, route), StreamEnd)


def test_long_stream_keeps_little() -> None:
    stream = TokenStream("chat", route="chat")
    for _ in range(100):
        stream.feed(TOKEN)
        stream.feed(b"data: %b\n\n" % (b"x" * (64 << 10)))
    kept = [value for value in vars(stream).values() if isinstance(value, bytes)]
    assert sum(map(len, kept)) < STREAM_END_BYTES + 100


@pytest.mark.parametrize("shift", range(14))
@pytest.mark.parametrize("words", ["error: ", "event: error "])
@pytest.mark.parametrize("route", ["chat", "completions", "messages"])
def test_text_of_a_long_event_is_no_error_wherever_the_end_begins(route: str, words: str, shift: int) -> None:
    """The rest of a line that is longer than the end that is kept begins in the middle of a client's text."""
    event = {"choices": [{"text": words * 1000 + "x" * shift, "finish_reason": "length"}]}
    end = STOP if route == "messages" else DONE
    assert end_of(b"data: %b\n\n" % json.dumps(event).encode() + end, route) is ResponseEnd.COMPLETE
