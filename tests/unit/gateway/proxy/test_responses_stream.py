"""The events of /v1/responses: completed for clients' libraries, in the forms of llama.cpp and of others."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy import errors
from gateway.proxy.response_body import LONGEST_LINE_BYTES
from gateway.proxy.response_end import ResponseEnd
from gateway.proxy.responses_stream import ResponsesStream


def event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind} | fields, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def message_item(**fields: Any) -> dict[str, Any]:
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": []} | fields


CALL = {"type": "function_call", "call_id": "fc_2", "name": "weather", "arguments": ""}
"""As an earlier llama.cpp sends it: without an id."""
LLAMA = (
    event("response.created", response={"id": "resp_1", "object": "response", "status": "in_progress"})
    + event("response.output_item.added", item={"type": "reasoning", "id": "rs_1", "summary": [], "content": []})
    + event("response.reasoning_text.delta", delta="Hm", item_id="rs_1")
    + event("response.output_item.added", item=message_item())
    + event("response.content_part.added", item_id="msg_1", part={"type": "output_text", "text": ""})
    + event("response.output_text.delta", item_id="msg_1", delta='He said: "sequence_number":1')
    + event("response.output_item.added", item=CALL)
    + event("response.function_call_arguments.delta", delta="{}", item_id="fc_2")
    + event("response.output_item.done", item={"type": "reasoning", "id": "rs_1"})
    + event("response.output_text.done", item_id="msg_1", text="x")
    + event("response.output_item.done", item=message_item(status="completed"))
    + event("response.output_item.done", item=CALL | {"arguments": "{}"})
    + event("response.completed", response={"id": "resp_1", "model": "engine", "status": "completed", "error": None})
)
PLACES = [None, 0, (0, 0), 1, (1, 0), (1, 0), 2, 2, 0, (1, 0), 1, 2, None]


def read_events(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(b"data: ")) for line in stream.splitlines() if line.startswith(b"data: ")]


@given(cuts=st.lists(st.integers(0, len(LLAMA)), max_size=8))
def test_events_of_llama_cpp_get_their_places_whatever_the_chunks(cuts: list[int]) -> None:
    stream = ResponsesStream("chat")
    places = [0, *sorted(cuts), len(LLAMA)]
    got = b"".join(stream.feed(LLAMA[a:b]) for a, b in itertools.pairwise(places)) + stream.finish()
    sent, events = read_events(LLAMA), read_events(got)
    assert [event["sequence_number"] for event in events] == list(range(len(sent)))
    positions = [
        (event["output_index"], event["content_index"]) if "content_index" in event else event.get("output_index")
        for event in events
    ]
    assert positions == PLACES
    assert [event["logprobs"] for event in events if "output_text" in event["type"]] == [[], []]
    assert events[-1]["response"].pop("model") == "chat"
    sent[-1]["response"].pop("model")
    assert all(new.items() >= old.items() for new, old in zip(events, sent, strict=True)), "nothing else is changed"
    assert stream.end is ResponseEnd.COMPLETE


def test_stream_whose_events_are_complete_is_unchanged() -> None:
    sent = (
        event("response.created", response={"id": "resp_1"}, sequence_number=0)
        + event("response.output_item.added", item=message_item(), output_index=0, sequence_number=1)
        + event(
            "response.output_text.delta",
            item_id="msg_1",
            output_index=0,
            content_index=0,
            logprobs=[],
            sequence_number=2,
            delta="Hi",
        )
        + event("response.completed", response={"id": "resp_1", "error": None}, sequence_number=3)
    )
    stream = ResponsesStream("chat")
    assert stream.feed(sent) + stream.finish() == sent
    (told, failed) = read_events(stream.break_off(errors.response_broken_off("ns/chat")))
    assert (told["sequence_number"], failed["sequence_number"]) == (4, 5)


def test_stream_that_breaks_off_ends_as_a_failed_response() -> None:
    stream = ResponsesStream("chat")
    sent = LLAMA[: LLAMA.index(b'"response.completed"')]
    got = stream.feed(sent) + stream.finish()
    assert stream.end is ResponseEnd.CUT_OFF
    told, failed = read_events(stream.break_off(errors.response_broken_off("ns/chat")))
    assert told["error"]["message"] == failed["response"]["error"]["message"]
    assert told["error"]["message"] == "service ns/chat: its engine broke off the response, which is not complete"
    assert (failed["type"], failed["response"]["id"], failed["response"]["status"]) == (
        *("response.failed", "resp_1"),
        "failed",
    )
    numbers = [event["sequence_number"] for event in (*read_events(got), told, failed)]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize(
    ("last", "end"),
    [
        (event("response.failed", response={"error": {"code": "server_error", "message": "x"}}), ResponseEnd.FAILED),
        (event("response.failed", response={"error": {"type": "invalid_request_error"}}), ResponseEnd.REFUSED),
        (event("response.incomplete", response={"incomplete_details": {}}), ResponseEnd.COMPLETE),
        (event("response.completed", response={})[:-9], ResponseEnd.CUT_OFF),
        (b'data: {"error":{"code":500}}\n\n', ResponseEnd.FAILED),
        (b"data: [DONE]\n\n", ResponseEnd.CUT_OFF),
    ],
)
def test_last_event_says_how_the_response_has_ended(last: bytes, end: ResponseEnd) -> None:
    stream = ResponsesStream("chat")
    stream.feed(event("response.created", response={"id": "resp_1"}) + last)
    stream.finish()
    assert stream.end is end


def test_event_over_the_limit_of_a_line_is_numbered_and_ends_the_response() -> None:
    stream = ResponsesStream("chat")
    text = "x" * (2 * LONGEST_LINE_BYTES)  # so that some chunk over the limit has no end of a line
    sent = event("response.created", response={}) + event("response.completed", response={"output": text})
    places = [*range(0, len(sent), 100_000), len(sent)]
    got = b"".join(stream.feed(sent[a:b]) for a, b in itertools.pairwise(places)) + stream.finish()
    assert [event["sequence_number"] for event in read_events(got)] == [0, 1]
    assert stream.end is ResponseEnd.COMPLETE


def test_event_over_the_limit_of_an_engine_that_numbers_its_events_is_unchanged() -> None:
    stream = ResponsesStream("chat")
    sent = event("response.created", response={}, sequence_number=0) + event(
        "response.completed", response={"output": "x" * (2 * LONGEST_LINE_BYTES)}, sequence_number=1
    )
    places = [*range(0, len(sent), 100_000), len(sent)]
    assert b"".join(stream.feed(sent[a:b]) for a, b in itertools.pairwise(places)) + stream.finish() == sent


def test_first_piece_of_a_long_event_gets_shorter_by_the_name_of_the_model_and_is_numbered_all_the_same() -> None:
    stream = ResponsesStream("chat", "m" * 200)
    output = "x" * (2 * LONGEST_LINE_BYTES)
    sent = event("response.created", response={}) + event(
        "response.completed", response={"model": "m" * 200, "output": output}
    )
    data = sent.rindex(b"data: ")
    cuts = [0, data, data + LONGEST_LINE_BYTES, data + LONGEST_LINE_BYTES + 1, len(sent)]
    got = b"".join(stream.feed(sent[a:b]) for a, b in itertools.pairwise(cuts)) + stream.finish()
    assert [event["sequence_number"] for event in read_events(got)] == [0, 1]


@pytest.mark.parametrize("length", [400_000, 600_000, LONGEST_LINE_BYTES - 100])
def test_last_event_of_which_half_a_line_came_is_cut_off_however_long_it_is(length: int) -> None:
    stream = ResponsesStream("chat")
    stream.feed(event("response.created", response={"id": "resp_1"}))
    stream.feed(event("response.completed", response={"output": "x" * length})[:-10])
    assert (stream.finish(), stream.end) == (b"", ResponseEnd.CUT_OFF)


@pytest.mark.parametrize("kind", ["response.completed", "response.failed"])
@pytest.mark.parametrize("held_back", [0, 100_000])
def test_last_event_of_which_the_first_piece_was_passed_on_is_cut_off(kind: str, held_back: int) -> None:
    stream = ResponsesStream("chat")
    stream.feed(event("response.created", response={"id": "resp_1"}))
    stream.feed(event(kind, response={"output": "x" * (2 * LONGEST_LINE_BYTES)})[:-10])
    stream.feed(b"x" * held_back)
    assert (stream.finish(), stream.end) == (b"", ResponseEnd.CUT_OFF)


def test_event_of_an_item_that_was_not_added_belongs_to_the_last_one() -> None:
    stream = ResponsesStream("chat")
    stream.feed(LLAMA[: LLAMA.index(b"response.output_text.delta")] + b"\n\n")
    (found,) = read_events(stream.feed(event("response.output_text.delta", item_id="another", delta="x")))
    assert found["output_index"] == 1


def test_places_of_an_endless_stream_take_little_memory() -> None:
    stream = ResponsesStream("chat")
    for number in range(3000):
        stream.feed(event("response.output_item.added", item=message_item(id=f"msg_{number}")))
    assert len(stream._item_places) == 1000


@given(
    st.binary(max_size=300), st.sampled_from([b"", b"data:", b'data: {"type":"response.', b"event: response.x\ndata:"])
)
def test_any_bytes_of_a_stream_are_passed_on(junk: bytes, begin: bytes) -> None:
    stream = ResponsesStream("chat")
    got = stream.feed(begin + junk + b"\n")
    assert len(got) >= len(begin + junk) - junk.count(b"model") * 300
    assert stream.finish() == b""
