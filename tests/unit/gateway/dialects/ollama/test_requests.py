"""Requests of Ollama's API, and the requests of OpenAI's that are made of them."""

import base64
import contextlib
import json
import math
from collections.abc import Generator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.ollama.embed_request import MOST_TEXTS
from gateway.dialects.ollama.keep_alive_time import read_keep_alive
from gateway.dialects.ollama.message_translation import MOST_IMAGES
from gateway.dialects.ollama.request_fields import MOST_MESSAGES, read_fields
from gateway.dialects.ollama.request_translation import OllamaCall, OllamaRoute, read_call
from gateway.proxy.errors import RequestError
from gateway.proxy.request_body import SHORT_BODY_BYTES

T = TypeVar("T")
HI = [{"role": "user", "content": "hi"}]
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n0123").decode()
WITH_COUNTS = {"stream": True, "stream_options": {"include_usage": True}}


def run(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def read(route: OllamaRoute, content: bytes) -> OllamaCall:
    return read_call(route, run(read_fields(content)))


def translate(route: OllamaRoute, body: dict[str, Any], *, is_ollama: bool = False) -> dict[str, Any]:
    call = read(route, json.dumps(body).encode())
    translated: dict[str, Any] = json.loads(run(call.translate("served", is_ollama=is_ollama)))
    return translated


def refuse(route: OllamaRoute, body: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as refused:
        translate(route, body)
    assert refused.value.status == 400
    return str(refused.value)


def test_chat_streams_unless_it_is_told_otherwise() -> None:
    asked = {"model": "a:latest", "messages": HI}
    assert translate("chat", asked) == {"model": "served", "messages": HI, **WITH_COUNTS}
    assert translate("chat", asked | {"stream": None}) == {"model": "served", "messages": HI, **WITH_COUNTS}
    assert translate("chat", asked | {"stream": False}) == {"model": "served", "messages": HI}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        (
            {"format": {"type": "object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        ({"format": ""}, {}),
        ({"format": None, "options": None, "tools": None, "think": None, "keep_alive": None}, {}),
        ({"tools": []}, {}),
        ({"tools": [{"function": {"name": "f"}}]}, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ({"think": True}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"think": "low"},
            {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"}, "reasoning_effort": "low"},
        ),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"options": {"num_predict": 5, "seed": 0, "stop": "x"}}, {"max_tokens": 5, "seed": 0, "stop": ["x"]}),
        ({"options": {"num_predict": -1, "seed": -1, "num_ctx": 4096, "unknown": []}}, {}),
        (
            {"options": {"top_k": 3.7, "min_p": 0, "repeat_penalty": 1.1, "temperature": None}},
            {"top_k": 3, "min_p": 0, "repeat_penalty": 1.1, "repetition_penalty": 1.1},
        ),
        ({"truncate": True, "shift": False, "lora": [], "adapters": "x"}, {}),
    ],
)
def test_fields_of_a_chat_are_translated(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    asked = {"model": "a", "messages": HI, "stream": False}
    assert translate("chat", asked | fields) == {"model": "served", "messages": HI, **expected}


@pytest.mark.parametrize(("think", "effort"), [(True, "medium"), (False, "none"), ("high", "high")])
def test_an_ollama_behind_is_told_to_think_by_its_own_field(think: object, effort: str) -> None:
    asked = {"model": "a", "messages": HI, "stream": False, "think": think}
    assert translate("chat", asked, is_ollama=True) == {"model": "served", "messages": HI, "reasoning_effort": effort}


def test_results_of_tools_are_matched_with_their_calls() -> None:
    call = {"function": {"name": "f", "arguments": {"b": 1, "a": "é"}}}
    messages = [
        {"role": "User", "content": "hi"},
        {"role": "assistant", "content": "", "thinking": "so", "tool_calls": [call, {"function": {"name": "g"}}]},
        {"role": "tool", "content": "of g", "tool_name": "g"},
        {"role": "tool", "content": "of f"},
        {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": '{"a":2}'}}]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
    ]
    _, calls, of_g, of_f, with_id, of_id = translate("chat", {"model": "a", "messages": messages})["messages"]
    first, second = calls["tool_calls"]
    assert (first["type"], first["function"]["name"], second["function"]["arguments"]) == ("function", "f", "{}")
    assert list(json.loads(first["function"]["arguments"]).items()) == [("b", 1), ("a", "é")]
    assert calls["reasoning_content"] == "so"
    assert (of_g["tool_call_id"], of_f["tool_call_id"]) == (second["id"], first["id"])
    assert with_id["tool_calls"] == [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":2}'}}]
    assert (of_id["tool_call_id"], of_id["content"]) == ("x", "2")


@pytest.mark.parametrize("image", [PNG, f"data:image/gif;base64,{PNG}"], ids=["base64", "data URL"])
def test_images_become_parts(image: str) -> None:
    expected = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
    ]
    message = {"role": "user", "content": "see", "images": [image]}
    (chat,) = translate("chat", {"model": "a", "messages": [message]})["messages"]
    (generated,) = translate("generate", {"model": "a", "prompt": "see", "images": [image]})["messages"]
    assert chat["content"] == generated["content"] == expected


@pytest.mark.parametrize("image", ["http://x/y.png", "file:///etc/passwd", "data:nothing", "", "a b"])
def test_an_image_is_nothing_but_its_content(image: str) -> None:
    assert "images" in refuse("generate", {"model": "a", "prompt": "see", "images": [image]})


def test_generate_is_a_chat_of_one_message_or_a_raw_completion() -> None:
    asked = {"model": "a", "prompt": "hi", "system": "be brief", "context": [], "suffix": "", "template": ""}
    messages = [{"role": "system", "content": "be brief"}, *HI]
    assert translate("generate", asked) == {"model": "served", "messages": messages, **WITH_COUNTS}
    raw = {"model": "a", "prompt": "hi", "raw": True, "stream": False, "options": {"num_predict": 1}}
    assert translate("generate", raw) == {"model": "served", "prompt": "hi", "max_tokens": 1}
    assert read("generate", json.dumps(raw).encode()).engine_route == "completions"


@pytest.mark.parametrize(
    ("route", "fields", "names"),
    [
        ("generate", {"suffix": "x"}, "suffix"),
        ("generate", {"template": "x"}, "template"),
        ("generate", {"context": [1]}, "context"),
        ("generate", {"raw": True, "system": "x"}, "raw"),
        ("generate", {"prompt": 5}, "prompt"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content"),
        ("chat", {"messages": [{"role": "owner", "content": ""}]}, "role"),
        ("chat", {"messages": [5]}, "messages"),
        ("chat", {"messages": 5}, "JSON object"),
        ("chat", {"stream": "yes"}, "stream"),
        ("chat", {"think": "much"}, "think"),
        ("chat", {"think": 1}, "think"),
        ("chat", {"format": "yaml"}, "format"),
        ("chat", {"tools": {}}, "tools"),
        ("chat", {"options": []}, "options"),
        ("chat", {"options": {"num_predict": "5"}}, "options.num_predict"),
        ("chat", {"options": {"temperature": True}}, "options.temperature"),
        ("chat", {"options": {"stop": [1]}}, "options.stop"),
        ("chat", {"top_logprobs": 21}, "top_logprobs"),
        ("chat", {"keep_alive": "soon"}, "keep_alive"),
        ("chat", {"model": 5}, "model"),
        ("embed", {"input": [1]}, "input"),
        ("embed", {"input": {"a": "b"}}, "input"),
        ("embed", {"input": "x", "dimensions": -1}, "dimensions"),
        ("embeddings", {"prompt": None, "input": "x"}, "prompt"),
        ("embeddings", {"prompt": ""}, "prompt"),
    ],
)
def test_wrong_fields_are_refused_by_their_name(route: OllamaRoute, fields: dict[str, Any], names: str) -> None:
    assert names in refuse(route, {"model": "a", "messages": HI, "prompt": "hi"} | fields)


@pytest.mark.parametrize("content", [b"", b" \n", b"{", b"[]", b"null", b'{"model":"a"', b"\xff"])
def test_what_is_no_object_is_refused(content: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        read("chat", content)
    assert refused.value.status == 400


def test_embeddings_take_one_text_or_several() -> None:
    assert translate("embed", {"model": "a", "input": "x", "truncate": True, "dimensions": 2}) == {
        "model": "served",
        "input": "x",
    }
    assert translate("embed", {"model": "a", "input": ["x", ""]}) == {"model": "served", "input": ["x", ""]}
    assert translate("embeddings", {"name": "a", "prompt": "x"}) == {"model": "served", "input": "x"}


@pytest.mark.parametrize(
    ("route", "fields", "asks_engine"),
    [
        ("chat", {}, False),
        ("chat", {"messages": []}, False),
        ("chat", {"messages": HI}, True),
        ("generate", {"prompt": ""}, False),
        ("generate", {"prompt": "x"}, True),
        ("embed", {}, False),
        ("embed", {"input": []}, False),
        ("embed", {"input": ""}, False),
        ("embed", {"input": [""]}, True),
    ],
)
def test_a_request_without_input_only_loads_its_model(
    route: OllamaRoute, fields: dict[str, Any], asks_engine: bool
) -> None:
    assert read(route, json.dumps({"model": "a", **fields}).encode()).asks_engine == asks_engine


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", None),
        ("0", 0),
        ("300", 300),
        ("1.5", 1.5),
        ("-1", math.inf),
        ('"5m"', 300),
        ('"1h30m10s"', 5410),
        ('"1.5h"', 5400),
        ('"250ms"', 0.25),
        ('"-1m"', math.inf),
        ('"0"', 0),
        ('"0s"', 0),
        ('"-1"', math.inf),
        ('"600"', 600),
    ],
)
def test_keep_alive_is_a_duration_of_go(text: str, seconds: float | None) -> None:
    assert read_keep_alive(text.encode()) == seconds


@pytest.mark.parametrize("text", ["true", "[]", '"5 m"', '"5x"', '"m"', '""', '"1e3s"', "1e300", '"99999999999999h"'])
def test_keep_alive_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        read_keep_alive(text.encode())


@given(st.floats(0, 1e6), st.sampled_from(["ms", "s", "m", "h"]))
def test_every_plain_duration_is_read(number: float, unit: str) -> None:
    factor = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600}[unit]
    assert read_keep_alive(json.dumps(f"{number:.6f}{unit}").encode()) == pytest.approx(number * factor, abs=1e-2)


@given(st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text()}), min_size=1))
def test_long_requests_are_read_as_short_ones(messages: list[dict[str, str]]) -> None:
    short = {"model": "é", "messages": messages, "options": {"seed": 1}, "stream": False}
    long = short | {"padding": "x" * SHORT_BODY_BYTES}
    assert translate("chat", long) == translate("chat", short)


def test_what_others_send_is_bounded() -> None:
    many = [{"role": "user", "content": "x" * 20}] * (MOST_MESSAGES + 1)
    assert str(MOST_MESSAGES) in refuse("chat", {"model": "a", "messages": many})
    assert str(MOST_IMAGES) in refuse("generate", {"model": "a", "prompt": "x", "images": [PNG] * (MOST_IMAGES + 1)})
    assert str(MOST_TEXTS) in refuse("embed", {"model": "a", "input": [""] * (MOST_TEXTS + 1)})
    assert "KiB" in refuse("chat", {"model": "a", "messages": HI, "options": {"x": "y" * (1 << 20)}})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.just(PNG),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "images", "tool_calls", "function", "name"]), inner)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *("model", "name", "messages", "prompt", "system", "images", "input", "options", "tools", "format", "think"),
        *("stream", "raw", "context", "template", "suffix", "keep_alive", "dimensions", "logprobs", "top_logprobs"),
    ]
)
ROUTES: st.SearchStrategy[OllamaRoute] = st.sampled_from(["chat", "generate", "embed", "embeddings"])


@given(ROUTES, st.dictionaries(NAMES, VALUES), st.integers(0, 2))
def test_whatever_a_client_sends_is_translated_or_refused(
    route: OllamaRoute, fields: dict[str, Any], blanks: int
) -> None:
    message = {"role": "user", "content": "", "images": fields.get("images")}
    content = json.dumps({"messages": [message], **fields}, indent=blanks or None).encode()
    with contextlib.suppress(RequestError):
        call = read(route, content)
        if call.asks_engine:
            translated = run(call.translate("served", is_ollama=bool(blanks)))
            assert json.loads(translated)["model"] == "served"
