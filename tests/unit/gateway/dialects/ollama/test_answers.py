"""Answers of engines on their way to Ollama's clients: whole whatever the pieces in which they come."""

import itertools
import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.ollama.answer_lines import JSON_FIELDS, NDJSON_FIELDS
from gateway.dialects.ollama.request_fields import read_short_fields
from gateway.dialects.ollama.request_translation import OllamaRoute, read_call
from gateway.dialects.ollama.response_translation import OllamaTranslator
from gateway.proxy import errors
from gateway.proxy.response_body import LONGEST_LINE_BYTES, SHORT_JSON_BYTES, JsonResponse, ResponseBody
from gateway.proxy.response_end import ResponseEnd
from gateway.proxy.responses_stream import open_stream

ERROR = {"error": {"message": "no memory", "type": "server_error", "code": 500}}
TEXTS = st.text(min_size=1, max_size=20)
ARGUMENTS = st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=3)


class Times(NamedTuple):
    arrived: float = 0.0
    queued_seconds: float = 0.5


def begin(route: OllamaRoute = "chat", inner: ResponseBody | None = None, **fields: Any) -> tuple[ResponseBody, bytes]:
    asked = {"model": "tiny:latest", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"}
    call = read_call(route, read_short_fields(json.dumps(asked | fields).encode()))
    return OllamaTranslator(call).translate(inner or open_stream("chat", "served"), Times())


def events(*objects: object, mark: bool = True) -> bytes:
    data = b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in objects)
    return data + (b"data: [DONE]\n\n" if mark else b"")


def delta(**fields: Any) -> dict[str, Any]:
    reason = fields.pop("finish_reason", None)
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    bounds = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


def send(body: ResponseBody, pieces: Iterable[bytes]) -> bytes:
    return b"".join([*map(body.feed, pieces), body.finish()])


def read_lines(sent: bytes) -> list[dict[str, Any]]:
    assert sent.endswith(b"\n")
    return [json.loads(line) for line in sent.split(b"\n")[:-1]]


@given(
    texts=st.lists(TEXTS),
    thoughts=st.lists(TEXTS),
    calls=st.lists(st.tuples(TEXTS, ARGUMENTS), max_size=3),
    places=st.lists(st.integers(0, 1 << 20)),
    form=st.tuples(st.integers(1, 9), st.sampled_from([b"\n\n", b"\r\n\r\n"])),
)
def test_pieces_of_a_stream_make_the_whole_answer(
    texts: list[str],
    thoughts: list[str],
    calls: list[tuple[str, dict[str, Any]]],
    places: list[int],
    form: tuple[int, bytes],
) -> None:
    piece_bytes, separator = form
    parts = [delta(role="assistant", content=None), *(delta(reasoning_content=text) for text in thoughts)]
    parts += [delta(content=text) for text in texts]
    for index, (name, arguments) in enumerate(calls):
        parts.append(delta(tool_calls=[{"index": index, "id": f"c{index}", "function": {"name": name}}]))
        text = json.dumps(arguments)
        for start in range(0, len(text), piece_bytes):
            piece = {"index": index, "function": {"arguments": text[start : start + piece_bytes]}}
            parts.append(delta(tool_calls=[piece]))
    parts.append(delta(finish_reason="tool_calls" if calls else "stop"))
    parts.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})

    body, fields = begin()
    stream = events(*parts).replace(b"\n\n", separator)
    lines = read_lines(send(body, cut(stream, places)))
    assert (fields, body.end, body.tokens.prompt) == (NDJSON_FIELDS, ResponseEnd.COMPLETE, 7)
    messages = [line["message"] for line in lines]
    assert "".join(message["content"] for message in messages) == "".join(texts)
    assert "".join(message.get("thinking", "") for message in messages) == "".join(thoughts)
    sent = [call for message in messages for call in message.get("tool_calls", [])]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in sent] == calls
    assert [call["function"]["index"] for call in sent] == list(range(len(calls)))
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    last = lines[-1]
    assert (last["model"], last["done_reason"], last["eval_count"]) == ("tiny:latest", "stop", 5)
    assert {last["prompt_eval_count"], last["load_duration"]} == {7, 500_000_000}
    assert all(last[name] > 0 for name in ("total_duration", "prompt_eval_duration", "eval_duration"))


@given(st.lists(st.integers(0, 1 << 20)), st.integers(0, 400))
def test_half_a_stream_is_never_a_whole_one(places: list[int], end: int) -> None:
    stream = events(delta(content="one"), delta(content="two"), delta(finish_reason="stop"))
    whole = stream.index(b'"stop"') + len('"stop"')
    body, _ = begin()
    sent = send(body, cut(stream[: min(end, whole - 7)], places))
    assert body.end is ResponseEnd.CUT_OFF
    assert b'"done":true' not in sent
    assert json.loads(body.break_off(errors.response_broken_off("ns/tiny"))) == {
        "error": "service ns/tiny: its engine broke off the response, which is not complete"
    }


@pytest.mark.parametrize("route", ["chat", "generate"])
def test_the_forms_are_those_of_ollama(route: OllamaRoute) -> None:
    body, _ = begin(route)
    parts = events(delta(content="one"), delta(reasoning="so"), delta(finish_reason="length"))
    text, thought, last = read_lines(send(body, [parts]))
    ends = {"done", "done_reason", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"}
    content = {"message"} if route == "chat" else {"response"}
    assert set(last) == {"model", "created_at", *content, *ends, "eval_count", "eval_duration"}
    assert last["done_reason"] == "length"
    if route == "chat":
        assert text["message"] == {"role": "assistant", "content": "one"}
        assert thought["message"] == {"role": "assistant", "content": "", "thinking": "so"}
    else:
        assert (text["response"], thought["response"], thought["thinking"]) == ("one", "", "so")


def test_times_are_the_engines_own_where_it_has_measured_them() -> None:
    body, _ = begin()
    timings = {"timings": {"prompt_n": 3, "prompt_ms": 1.5, "predicted_n": 2, "predicted_ms": 4}}
    last = read_lines(send(body, [events(delta(content="x"), delta(finish_reason="stop") | timings)]))[-1]
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (1_500_000, 4_000_000)
    assert (last["prompt_eval_count"], last["eval_count"]) == (3, 2)


def test_an_error_of_an_engine_has_a_status_before_the_first_line_and_is_a_line_after_it() -> None:
    body, _ = begin()
    sent = send(body, [events(delta(role="assistant"), ERROR, mark=False)])
    assert (body.failed, body.end, json.loads(sent)) == (True, ResponseEnd.FAILED, ERROR)

    body, _ = begin()
    lines = read_lines(send(body, [events(delta(content="x"), ERROR)]))
    assert (body.failed, lines[1:]) == (False, [{"error": "no memory"}])


@pytest.mark.parametrize(
    "event", [b"data: {", b"data: 5", b'data: {"choices":[{"delta":{"content":5}}]}', b'data: {"choices":5}']
)
def test_an_event_that_cannot_be_read_ends_the_answer(event: bytes) -> None:
    body, _ = begin()
    stream = events(delta(content="x"), mark=False) + event + b"\n\n" + events(delta(finish_reason="stop"))
    assert len(read_lines(send(body, [stream]))) == 1
    assert body.end is ResponseEnd.CUT_OFF


def test_an_event_of_megabytes_is_whole() -> None:
    text = "x" * 3 * LONGEST_LINE_BYTES
    stream = events(delta(content=text), delta(finish_reason="stop"))
    body, _ = begin()
    lines = read_lines(send(body, [stream[start : start + 65536] for start in range(0, len(stream), 65536)]))
    assert lines[0]["message"]["content"] == text


def test_a_call_that_the_limit_of_tokens_has_cut_is_a_text() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a": "b'}}
    parts = events(delta(tool_calls=[call]), delta(finish_reason="length"))
    body, _ = begin()
    text, _last = read_lines(send(body, [parts]))
    assert text["message"] == {"role": "assistant", "content": '{"name": "f", "arguments": {"a": "b'}
    whole = {"choices": [{"message": {"content": "so: ", "tool_calls": [call]}, "finish_reason": "length"}]}
    body, _ = begin(inner=JsonResponse("served"), stream=False)
    assert json.loads(send(body, [json.dumps(whole).encode()]))["message"]["content"].startswith('so: {"name": "f"')


@given(TEXTS, ARGUMENTS, st.lists(st.integers(0, 1 << 20)))
def test_a_whole_answer_is_one_object(text: str, arguments: dict[str, Any], places: list[int]) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}]
    message = {"role": "assistant", "content": text, "reasoning_content": "so", "tool_calls": calls}
    answer = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": {"completion_tokens": 9}}
    body, fields = begin(inner=JsonResponse("served"), stream=False)
    sent = json.loads(send(body, cut(json.dumps(answer).encode(), places)))
    assert (fields, body.end, sent["done"], sent["eval_count"]) == (JSON_FIELDS, ResponseEnd.COMPLETE, True, 9)
    assert sent["message"] == {
        "role": "assistant",
        "content": text,
        "thinking": "so",
        "tool_calls": [{"id": "c", "function": {"index": 0, "name": "f", "arguments": arguments}}],
    }


def test_an_engine_without_streams_makes_a_stream_of_one_line() -> None:
    body, fields = begin("generate", JsonResponse("served"))
    (line,) = read_lines(send(body, [b'{"choices":[{"text":"hi","finish_reason":"stop"}]}']))
    assert (fields, line["response"], line["done"]) == (NDJSON_FIELDS, "hi", True)


@pytest.mark.parametrize("answer", [b"{}", b'{"choices":[]}', b"[]", b"nothing", b'{"choices":[{"message":5}]}'])
def test_an_answer_that_is_none_is_an_error(answer: bytes) -> None:
    body, _ = begin(inner=JsonResponse("served"), stream=False)
    sent = send(body, [answer])
    assert (body.failed, body.end) == (True, ResponseEnd.FAILED)
    assert "error" in json.loads(sent)


# Vectors


def embeddings(vectors: list[Any]) -> bytes:
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return json.dumps({"object": "list", "data": data, "usage": {"prompt_tokens": 4}}).encode()


@given(
    st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=5), min_size=1, max_size=9),
    st.integers(0, 6),
    st.lists(st.integers(0, 1 << 20)),
)
def test_vectors_are_whole_and_in_order(vectors: list[list[float]], dimensions: int, places: list[int]) -> None:
    body, fields = begin("embed", JsonResponse("served"), input=["x"] * len(vectors), dimensions=dimensions)
    sent = json.loads(send(body, cut(embeddings(vectors), places)))
    assert (fields, body.end) == (JSON_FIELDS, ResponseEnd.COMPLETE)
    assert (sent["model"], sent["prompt_eval_count"], len(sent["embeddings"])) == ("tiny:latest", 4, len(vectors))
    for vector, original in zip(sent["embeddings"], vectors, strict=True):
        if not 0 < dimensions < len(original):
            assert vector == original
        else:
            assert len(vector) == dimensions
            assert math.hypot(*vector) == pytest.approx(1) or math.hypot(*original[:dimensions]) < 1e-11


def test_the_older_path_has_one_vector() -> None:
    body, _ = begin("embeddings", JsonResponse("served"))
    assert json.loads(send(body, [embeddings([[0.5, -1.0]])])) == {"embedding": [0.5, -1.0]}


def test_thousands_of_vectors_pass_in_pieces() -> None:
    vectors = [[float(number), 0.25] * 50 for number in range(1000)]
    answer = embeddings(vectors)
    assert len(answer) > 2 * SHORT_JSON_BYTES
    body, _ = begin("embed", JsonResponse("served"), input=["x"] * len(vectors))
    sent = [*map(body.feed, cut(answer, range(0, len(answer), 65536))), body.finish()]
    assert json.loads(b"".join(sent))["embeddings"] == vectors
    assert max(map(len, sent)) < 2 * SHORT_JSON_BYTES


@pytest.mark.parametrize("vectors", [[], [[]], [[1.0], []], [[None]], [[1.0]], [[1.0], [1.0], [1.0]], [["x"], ["y"]]])
def test_vectors_that_nobody_can_use_are_an_error(vectors: list[Any]) -> None:
    body, _ = begin("embed", JsonResponse("served"), input=["x", "y"])
    sent = send(body, [embeddings(vectors)])
    assert (body.failed, body.end) == (True, ResponseEnd.FAILED)
    assert "error" in json.loads(sent)


def test_a_long_answer_that_lacks_vectors_is_broken_off() -> None:
    body, _ = begin("embed", JsonResponse("served"), input=["x"] * 1001)
    answer = embeddings([[0.25] * 200] * 1000)
    send(body, cut(answer, range(0, len(answer), 65536)))
    assert body.end is ResponseEnd.CUT_OFF
