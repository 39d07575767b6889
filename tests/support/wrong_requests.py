"""Requests with a client's mistake, each of which a sound engine answers as such, or answers.

Bodies are bytes, because some of them are no JSON. `MODEL` stands for the name of the served model.
"""

import json
from typing import Any, Final, NamedTuple

import aiohttp

from gateway.proxy import paths

MODEL: Final = b"@MODEL@"
CHAT: Final = "/v1/chat/completions"
_USER: Final = {"role": "user", "content": "Hi"}
_PIXEL: Final = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_WORD: Final = {"type": "text", "text": "What is this?"}


class WrongRequest(NamedTuple):
    """A request that no sound engine of a text model can serve as its client means it."""

    name: str
    path: str
    body: bytes

    def encode_body(self, model: str) -> bytes:
        """Return the body for a service with this name of its model."""
        return self.body.replace(MODEL, model.encode())


def _encode(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL.decode(), "max_tokens": 3} | fields).encode()


def _chat(name: str, **fields: Any) -> WrongRequest:
    return WrongRequest(name, CHAT, _encode(**{"messages": [_USER]} | fields))


def _content(name: str, *parts: Any) -> WrongRequest:
    return _chat(name, messages=[{"role": "user", "content": [_WORD, *parts]}])


def _raw(name: str, body: bytes, path: str = CHAT) -> WrongRequest:
    return WrongRequest(name, path, body)


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}} | function}


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _items(**bounds: int) -> dict[str, Any]:
    return _object(a={"type": "array", "items": {"type": "null"}} | bounds)


def _text(**bounds: Any) -> dict[str, Any]:
    return _object(a={"type": "string"} | bounds)


_CHOICES: Final = {
    "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}},
    "$ref": "#/$defs/a",
}
_LARGE_INTEGER: Final = {"type": "integer", "minimum": 17 * 10**14}
_LOOP: Final = {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}
_LONG_ARRAYS: Final = {f"a{n}": {"type": "array", "items": {"type": "null"}, "maxItems": 2000} for n in range(1000)}
_NESTED: Final = 20_000
_HEAD: Final = b'{"model": "' + MODEL + b'", "max_tokens": 3, '

_MEDIA: Final = (
    _content("image", {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PIXEL}"}}),
    _content("broken image", {"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}),
    _content("image without a URL", {"type": "image_url"}),
    _content("image that is a number", {"type": "image_url", "image_url": {"url": 5}}),
    _content("audio", {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}),
    _content("audio without data", {"type": "input_audio"}),
    _content("file", {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERg=="}}),
    _content("unknown part", {"type": "hologram", "hologram": {}}),
    _content("part that is a number", 5),
)
_MESSAGES: Final = (
    _chat("no messages", messages=[]),
    _chat("messages that are a text", messages="Hi"),
    _chat("messages that are null", messages=None),
    _chat("message that is a text", messages=["Hi"]),
    _chat("message without role", messages=[{"content": "Hi"}]),
    _chat("message without content", messages=[{"role": "user"}]),
    _chat("role that is a number", messages=[{"role": 5, "content": "Hi"}]),
    _chat("unknown role", messages=[{"role": "prophet", "content": "Hi"}]),
    _chat("content that is a number", messages=[{"role": "user", "content": 5}]),
    _chat("content that is an object", messages=[{"role": "user", "content": {"text": "Hi"}}]),
    _chat("lone surrogate", messages=[{"role": "user", "content": "\ud800"}]),
    _chat("result of no call", messages=[_USER, {"role": "tool", "content": "5"}]),
    _chat(
        "call with broken arguments",
        messages=[
            _USER,
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "5"},
        ],
    ),
    _chat("calls that are a text", messages=[_USER, {"role": "assistant", "tool_calls": "f"}]),
    _chat("prompt above the context", messages=[{"role": "user", "content": "word " * 1_000}]),
)
_TOOLS: Final = (
    _chat("tool of another API", tools=[{"type": "web_search_preview"}]),
    _chat("tools that are a text", tools="look_up"),
    _chat("tool that is a number", tools=[5]),
    _chat("tool without a name", tools=[{"type": "function", "function": {}}]),
    _chat("tool that is null", tools=[{"type": "function", "function": None}]),
    _chat("parameters that are a text", tools=[_tool(parameters="none")]),
    _chat("parameters with an unknown type", tools=[_tool(parameters={"type": "banana"})], tool_choice="required"),
    _chat(
        "parameters that refer to nothing",
        tools=[_tool(parameters={"$ref": "#/$defs/nothing"})],
        tool_choice="required",
    ),
    _chat(
        "choice of an unknown tool", tools=[_tool()], tool_choice={"type": "function", "function": {"name": "nobody"}}
    ),
    _chat("choice that is a number", tools=[_tool()], tool_choice=5),
    _chat("choice without tools", tool_choice="required"),
)
_FORMATS: Final = (
    _chat("unknown format", response_format={"type": "poem"}),
    _chat("format that is a text", response_format="json"),
    _chat("schema that is missing", response_format={"type": "json_schema"}),
    _chat("schema that is a text", response_format=_schema("object")),
    _chat("schema with an unknown type", response_format=_schema({"type": "banana"})),
    _chat("schema that refers to nothing", response_format=_schema({"$ref": "#/$defs/nothing"})),
    _chat(
        "schema that refers to itself",
        response_format=_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ),
    _chat("schema with a broken pattern", response_format=_schema({"type": "string", "pattern": "^([a-z$"})),
    _chat(
        "schema with a huge repetition", response_format=_schema({"type": "string", "pattern": "^(a{1,9999}){1,9999}$"})
    ),
    _chat("schema of choices that refer to themselves", response_format=_schema(_CHOICES)),
    _chat("schema without a choice", response_format=_schema(_object(a={"anyOf": []}))),
    _chat("schema without a type", response_format=_schema(_object(a={"type": []}))),
    _chat("pattern that looks ahead", response_format=_schema(_text(pattern="^(?=a)b$"))),
    _chat("pattern of a sign", response_format=_schema(_text(pattern="^*$"))),
    _chat("pattern of classes", response_format=_schema(_text(pattern=r"^\D\W\S$"))),
    _chat("schema with a bound below zero", response_format=_schema(_items(maxItems=-5))),
    _chat("array of more items than it may have", response_format=_schema(_items(minItems=9, maxItems=3))),
    _chat("text that is longer than it may be", response_format=_schema(_text(minLength=9, maxLength=3))),
    _chat("pattern that ends before it begins", response_format=_schema(_text(pattern="^a{9,3}$"))),
    _chat("array of 3,000 items at least", response_format=_schema(_items(minItems=3000, maxItems=5000))),
    _chat("schema of a thousand long arrays", response_format=_schema(_object(**_LONG_ARRAYS))),
    _chat("schema of llama.cpp", json_schema=_items(minItems=9, maxItems=3)),
    _chat("schema beside a type", response_format={"type": "json_object", "schema": _items(minItems=9, maxItems=3)}),
    _chat("integers from 16 digits on", response_format=_schema(_object(a=_LARGE_INTEGER))),
    _chat("bound of more than 32 bits", response_format=_schema(_items(minItems=4, maxItems=(1 << 32) + 3))),
    _chat("grammar of nested repetitions", grammar='root ::= ((("a"?){200}){200}){200}'),
    _chat("grammar of chained repetitions", grammar='root ::= "a"{2000}{2000}{2000}'),
    _chat("tool without an end", tools=[_tool(parameters=_LOOP)], tool_choice="required"),
    _chat("grammar that ends before it begins", grammar='root ::= "a"{9,3}'),
    _chat("grammar with a comment in a repetition", grammar='root ::= "a"{9, # more\n3}'),
    _chat("broken grammar", grammar="root ::= ("),
    _chat("grammar that is a number", grammar=5),
)
_PARAMETERS: Final = (
    _chat("stop that is a number", stop=5),
    _chat("stop of numbers", stop=[5]),
    _chat("empty stop", stop=""),
    _chat("bias of a token out of the vocabulary", logit_bias={"99999999": 5}),
    _chat("bias of a negative token", logit_bias={"-5": 5}),
    _chat("bias of a word", logit_bias={"Hi": "much"}),
    _chat("bias that is a text", logit_bias="much"),
    _chat("bias that is a list", logit_bias=[["5", None]]),
    _chat("temperature that is a text", temperature="hot"),
    _chat("temperature below zero", temperature=-1),
    _chat("temperature that is a list", temperature=[1]),
    _chat("top_p that is a text", top_p="most"),
    _chat("top_p above one", top_p=5),
    _chat("top_k that is a text", top_k="most"),
    _chat("top_k below its least", top_k=-7),
    _chat("min_p that is a text", min_p="least"),
    _chat("top_k above the vocabulary", temperature=1, top_k=10**9),
    _chat("bias of the token after the last", logit_bias={"280": 5}),
    _chat("bias that is null", logit_bias={"5": None}),
    _chat("look back above 63 bits", repetition_penalty=2, repetition_context_size=1 << 80),
    _chat("xtc threshold above a half", temperature=1, xtc_probability=1.0, xtc_threshold=1.0),
    _chat("top_logprobs that are true", logprobs=True, top_logprobs=True),
    _chat("stop that is true", stop=True),
    _chat("seed below zero", seed=-1),
    _chat("seed that is a text", seed="random"),
    _chat("seed above 64 bits", seed=1 << 80),
    _chat("max_tokens that is a text", max_tokens="few"),
    _chat("max_tokens below zero", max_tokens=-5),
    _chat("max_tokens that is half a token", max_tokens=0.5),
    _chat("max_tokens above 64 bits", max_tokens=1 << 80),
    _chat("n that is a text", n="two"),
    _chat("n that is too large", n=100_000),
    _chat("n of none", n=0),
    _chat("stream that is a text", stream="yes"),
    _chat("stream options that are a text", stream=True, stream_options="usage"),
    _chat("logprobs that are a text", logprobs="yes"),
    _chat("top_logprobs that are too many", logprobs=True, top_logprobs=99_999),
    _chat("top_logprobs below zero", logprobs=True, top_logprobs=-1),
    _chat("penalties that are texts", frequency_penalty="a", presence_penalty="b", repetition_penalty="c"),
    _chat("template of the request's own", chat_template_kwargs={"chat_template": ""}),
    _chat("tensors instead of a prompt", chat_template_kwargs={"return_tensors": "np"}),
    _chat("arguments of a template that are a text", chat_template_kwargs="think"),
    _chat("samplers that are numbers", samplers=5),
    _chat("adapters that are a text", lora="x", adapters=5),
    _chat("model that is a number", model=5),
    _chat("slot that is a text", id_slot="x"),
)
_JSON: Final = (
    _raw("no body", b""),
    _raw("broken JSON", _HEAD + b'"messages": [{"role": "user", "content": "Hi"'),
    _raw("JSON that is a list", b"[" + _HEAD + b'"messages": []}]'),
    _raw("JSON that is null", b"null"),
    _raw("bytes that are no UTF-8", _HEAD + b'"messages": [{"role": "user", "content": "\xff\xfe"}]}'),
    _raw("number that is none", _HEAD + b'"temperature": NaN, "messages": [{"role": "user", "content": "Hi"}]}'),
    _raw("infinite number", _HEAD + b'"temperature": 1e999, "messages": [{"role": "user", "content": "Hi"}]}'),
    _raw(
        "deep JSON",
        _HEAD + b'"messages": [{"role": "user", "content": "Hi"}], "deep": ' + b"[" * _NESTED + b"]" * _NESTED + b"}",
    ),
    _raw("deep messages", _HEAD + b'"messages": ' + b'[{"content":' * 5000 + b"1" + b"}]" * 5000 + b"}"),
)
_OTHER_PATHS: Final = (
    WrongRequest("no prompt", "/v1/completions", _encode()),
    WrongRequest("empty prompt", "/v1/completions", _encode(prompt="")),
    WrongRequest("two prompts", "/v1/completions", _encode(prompt=["Hi", "Ho"])),
    WrongRequest("prompt that is an object", "/v1/completions", _encode(prompt={"a": 5})),
    WrongRequest("prompt of tokens out of the vocabulary", "/v1/completions", _encode(prompt=[99_999_999, -5])),
    WrongRequest("logprobs that are too many", "/v1/completions", _encode(prompt="Hi", logprobs=9999)),
    WrongRequest("stop of a completion that is a number", "/v1/completions", _encode(prompt="Hi", stop=5)),
    WrongRequest("embedding by a chat model", "/v1/embeddings", _encode(input="Hi")),
    WrongRequest("ranking by a chat model", "/v1/rerank", _encode(query="Hi", documents=["Hi"])),
    WrongRequest("response to nothing", "/v1/responses", _encode()),
    WrongRequest("response to a number", "/v1/responses", _encode(input=5)),
    WrongRequest(
        "image of a response",
        "/v1/responses",
        _encode(
            input=[
                {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{_PIXEL}"}]}
            ]
        ),
    ),
    WrongRequest("unknown item of a response", "/v1/responses", _encode(input=[{"type": "hologram"}])),
    WrongRequest("message of Anthropic's API without any", "/v1/messages", _encode()),
    WrongRequest("messages of Anthropic's API that are a text", "/v1/messages", _encode(messages="Hi")),
    WrongRequest(
        "image of Anthropic's API",
        "/v1/messages",
        _encode(
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PIXEL}}
                    ],
                }
            ]
        ),
    ),
    WrongRequest(
        "tool of Anthropic's API", "/v1/messages", _encode(messages=[_USER], tools=[{"type": "web_search_20250305"}])
    ),
    WrongRequest("tools of Anthropic's API that are a text", "/v1/messages", _encode(messages=[_USER], tools="x")),
)

WRONG_REQUESTS: Final[tuple[WrongRequest, ...]] = (
    *(*_MEDIA, *_MESSAGES, *_TOOLS, *_FORMATS, *_PARAMETERS, *_JSON, *_OTHER_PATHS),
)


def find_fault(request: WrongRequest, status: int, body: bytes) -> str:
    """Return in which way an answer to a wrong request is not one for its client to blame; empty if it is."""
    if status == 200:
        return ""  # the engine takes no notice of the mistake
    told = f"{request.name}: {status} {body[:300]!r}"
    if not 400 <= status < 500:
        return told
    answer = json.loads(body)
    if paths.route_name(request.path) in paths.ANTHROPIC_ROUTES:
        is_told = answer["type"] == "error" and set(answer["error"]) == {"type", "message"}
    else:
        is_told = set(answer["error"]) == {"message", "type", "param", "code"}
    is_blamed = answer["error"]["type"] in {"invalid_request_error", "not_found_error"} and answer["error"]["message"]
    return "" if is_told and is_blamed else told


async def send_wrong_requests(url: str, model: str, token: str = "") -> list[str]:
    """Send all of them in turn to the service of this name behind a proxy; return the answers that are not right."""
    problems = []
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=120)) as session:
        for request in WRONG_REQUESTS:
            body = request.encode_body(model)
            async with session.post(f"{url}{request.path}", data=body) as response:
                problems.append(find_fault(request, response.status, await response.read()))
    return [fault for fault in problems if fault]
