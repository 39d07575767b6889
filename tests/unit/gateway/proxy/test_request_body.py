"""The request body: its model, what an engine gets of it, and the bound of the work that any body may cause."""

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import Callable, Generator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.proxy import json_scanner, request_body
from gateway.proxy.errors import RequestError
from gateway.proxy.json_scanner import JsonScanner
from gateway.proxy.request_body import (
    FIELDS_LIMIT,
    SHORT_BODY_BYTES,
    RequestBody,
    read_short_body,
    scan_body,
    scan_large_body,
)
from tests.support.large_bodies import KINDS

LONG = b'"padding":"' + b"x" * SHORT_BODY_BYTES + b'",'


def read_scanned(content: bytes | bytearray) -> RequestBody:
    """Read a body as a large one is read."""
    bodies: list[RequestBody] = []

    def drive() -> Generator[None, None, None]:
        bodies.append((yield from scan_body(content)))

    for _ in drive():
        pass
    return bodies[0]


def read_short(content: bytes) -> RequestBody:
    """Read a body as the reader does, which scans also a short one with escaped letters."""
    return read_short_body(content) or read_scanned(content)


WAYS = pytest.mark.parametrize("read", [read_short, read_scanned])


def rewrite(body: RequestBody, model: str | None) -> bytes:
    return b"".join(body.render_for_engine(model))


# JSON


@WAYS
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"model": 1}',
        b'{"model": {}}',
        b'{"model": "a"',
        b'{"model": "a"} {}',
        b'{"model": "a"}]',
        b'{"a": NaN}',
        b'{"a" 1}',
        b'{"a":1,}',
        b'{"a":1 "b":2}',
        b"{a:1}",
        b'{"a": "\xff"}',
        b'{"\xff": 1}',
        b'{"a": "x',
        b'{"a": "x\\',
        b'{"a": [1}}',
        b'{"a": ]}',
        b'{"a": ' + b"[" * 10_000,
        b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"messages": [{"a":1]}',
        b'{"\\x": 1}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
        b"\x1f\x8b gzip",
    ],
)
def test_body_that_is_no_json_object_is_refused(read: Callable[[bytes], RequestBody], content: bytes) -> None:
    with pytest.raises(RequestError, match="not the JSON object") as refused:
        read(content)
    assert refused.value.status == 400


@pytest.mark.parametrize("text", ["模型", "é", "\U0001f600x"])
@pytest.mark.parametrize("bad", [b"", b"\xff", b"\xe6\xa8", b"\xed\xa0\x80"])
@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("is_last", [False, True])
def test_long_text_of_any_script_is_checked(text: str, bad: bytes, shift: int, is_last: bool) -> None:
    """Characters and mistakes lie at the ends of the pieces that are decoded."""
    long = "a" * shift + text * 12_000
    content = b'{"a":"%b%b%b"}' % (long.encode(), bad, b"" if is_last else long.encode())
    with pytest.raises(RequestError, match="not the JSON object") if bad else contextlib.nullcontext():
        assert read_short_body(content)


@WAYS
def test_number_of_fields_is_limited(read: Callable[[bytes], RequestBody]) -> None:
    fields = [f'"{number}":0' for number in range(FIELDS_LIMIT + 1)]
    assert read(f"{{{','.join(fields[:-1])}}}".encode()).model is None
    with pytest.raises(RequestError, match=f"more than {FIELDS_LIMIT} fields"):
        read(f"{{{','.join(fields)}}}".encode())


def test_number_of_values_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_scanner, "VALUES_LIMIT", 100)
    read_scanned(b'{"input":["a"%s]}' % (b',"a"' * 1000))
    for value in (b'{"input":[{}%s]}' % (b",{}" * 100), b'{"prompt":%s}' % (b"[" * 99 + b"]" * 99)):
        with pytest.raises(RequestError, match="more than 100 strings, objects and arrays"):
            read_scanned(value)


def test_model_with_a_long_name_is_refused() -> None:
    with pytest.raises(RequestError, match="longer than 4096 bytes"):
        read_scanned(b'{"model":"' + b"x" * 5000 + b'"}')


# What an engine gets


@WAYS
@pytest.mark.parametrize(
    "keys",
    [
        '"model":"x"',
        '"model":"x","model":"chat"',
        '"Model":"x"',
        '"\\u006dodel":"x"',
        '"mod\\u0045l":"x"',
        '"MODEL":"x","model":"y"',
        '"model" : null , "model"\n:\t"x"',
    ],
)
def test_rewritten_request_has_one_model_and_loads_no_other_weights(
    read: Callable[[bytes], RequestBody], keys: str
) -> None:
    body = b'{ "n":1.50,' + keys.encode() + b',"draft_model": "evil", "Adapters": "/etc", "messages":[{"a":  1}]}'
    assert rewrite(read(body), "default_model") == b'{"model":"default_model","n":1.50,"messages":[{"a":  1}]}'


@WAYS
def test_fields_that_load_weights_are_removed_for_an_engine_that_takes_any_model(
    read: Callable[[bytes], RequestBody],
) -> None:
    body = read(b'{"adapters":"/etc","model":"x","lora":[{"id":0,"scale":0}],"DRAFT_model":"evil","n":1}')
    assert rewrite(body, None) == b'{"model":"x","n":1}'
    assert rewrite(read(b'{"adapters":"/etc"}'), None) == b"{}"


@WAYS
def test_added_fields_replace_those_that_load_weights_and_no_other(read: Callable[[bytes], RequestBody]) -> None:
    added = {"n": msgspec.Raw(b"2"), "lora": msgspec.Raw(b"[]")}
    for content, rendered in (
        (b'{"model":"x","lora":[1],"n":1}', {"model": "x", "n": 1, "lora": []}),
        (b'{"LORA":[1]}', {"n": 2, "lora": []}),
    ):
        assert json.loads(b"".join(read(content).render_for_engine(None, added))) == rendered


@pytest.mark.parametrize("content", [b'{ "a":1, "model": "x" }\n', b"{}", b' {"Model":"x"}'])
def test_large_body_for_an_engine_that_takes_any_model_stays_byte_by_byte(content: bytes) -> None:
    assert rewrite(read_scanned(content), None) == content


def test_values_of_a_short_body_for_an_engine_that_takes_any_model_stay_byte_by_byte() -> None:
    assert rewrite(read_short(b'{ "a": [1.50,  "\\u0041"], "model": "x" }'), None) == (
        b'{"model":"x","a":[1.50,  "\\u0041"]}'
    )
    assert rewrite(read_short(b'{"Model":"x"}'), None) == b"{}"


@WAYS
@pytest.mark.parametrize(
    "value",
    [
        b'"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://10.0.0.1/"}}]}]',
        b'"response_format":{"type":"json_schema","json_schema":{"schema":{"minItems":9,"maxItems":3}}}',
    ],
)
def test_first_of_two_equal_fields_is_checked_or_reaches_no_engine(
    read: Callable[[bytes], RequestBody], value: bytes
) -> None:
    key, _, _ = value.partition(b":")
    with contextlib.suppress(RequestError):
        body = read(b'{"model":"x",%b,%b:[]}' % (value, key))
        for model in ("engine", None):
            assert value not in rewrite(body, model)
            assert rewrite(body, model).count(key) == 1


def test_large_body_is_not_copied() -> None:
    content = bytearray(b'{"a":1,' + LONG * 100 + b'"model":"x","b":2}')
    before = bytes(content)
    tracemalloc.start()
    pieces = read_scanned(content).render_for_engine("engine")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert b"".join(pieces) == b'{"model":"engine",' + before[1:].replace(b'"model":"x",', b"")
    assert most_bytes < len(content) / 2


@WAYS
@given(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=5))
def test_other_fields_of_a_request_are_unchanged(
    read: Callable[[bytes], RequestBody], fields: dict[str, object]
) -> None:
    fields = {key: value for key, value in fields.items() if key.lower() != "model"}
    body = read(msgspec.json.encode(fields | {"model": "chat"}))
    assert body.model == "chat"
    assert msgspec.json.decode(rewrite(body, "x")) == fields | {"model": "x"}


# Any JSON, written in any way: Python's decoder is the oracle

BLANKS = st.text(" \t\n\r", max_size=2)
KEYS = st.sampled_from(
    ["model", "Model", "adapters", "lora", "messages", "content", "input", "a", 'a"b', "\\", "é", "模"]
)


@st.composite
def written(draw: st.DrawFn, value: object) -> str:
    """Write a value with random blanks, and with random letters escaped."""
    blank = draw(BLANKS)
    match value:
        case str():
            escaped = draw(st.sets(st.integers(0, 8)))
            plain = [json.dumps(letter, ensure_ascii=False)[1:-1] for letter in value]
            unicode = "".join
            letters = [
                unicode(f"\\u{unit:04x}" for unit in _utf16(letter)) if place in escaped else plain[place]
                for place, letter in enumerate(value)
            ]
            text = f'"{"".join(letters)}"'
        case list():
            text = f"[{','.join(draw(written(entry)) for entry in value) or blank}]"
        case Pairs():
            members = (f"{draw(written(key))}:{draw(written(pair))}" for key, pair in value.pairs)
            text = f"{{{','.join(members) or blank}}}"
        case _:
            text = json.dumps(value)
    return blank + text + draw(BLANKS)


class Pairs(msgspec.Struct):
    """An object whose keys may be equal."""

    pairs: list[tuple[str, Any]]


def _utf16(letter: str) -> list[int]:
    encoded = letter.encode("utf-16-be")
    return [int.from_bytes(encoded[place : place + 2]) for place in range(0, len(encoded), 2)]


TEXTS = st.text(max_size=8) | st.sampled_from(['"model":"x"', "\\", "}", '"', "{", '\\"', "data:,", "\U0001f600"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.builds(Pairs, st.lists(st.tuples(KEYS, inner), max_size=4)),
    max_leaves=20,
)
FIELDS = st.lists(st.tuples(KEYS | st.sampled_from(["model", "model"]), VALUES), max_size=6)
OBJECTS = FIELDS.map(Pairs).flatmap(written)


def without_models(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in pairs if key.lower() not in {"model", "adapters", "draft_model", "lora"}]


@given(OBJECTS)
def test_scanned_body_agrees_with_a_json_decoder(text: str) -> None:
    pairs: list[tuple[str, Any]] = json.JSONDecoder(object_pairs_hook=list).decode(text.strip(" \t\n\r"))
    models = [value for key, value in pairs if key == "model"]
    if not all(value is None or isinstance(value, str) for value in models):
        with pytest.raises(RequestError, match="model"):
            read_scanned(text.encode())
        return
    body = read_scanned(text.encode())
    assert body.model == (models[-1] if models else None)
    rewritten = json.JSONDecoder(object_pairs_hook=list).decode(rewrite(body, "engine").decode())
    assert rewritten == [("model", "engine"), *without_models(pairs)]
    unnamed = json.JSONDecoder(object_pairs_hook=list).decode(rewrite(body, None).decode().strip(" \t\n\r"))
    assert without_models(unnamed) == without_models(pairs)


@given(OBJECTS)
@example(text='{"a": [' + '"x", ' * 100 + "1] }")
def test_short_body_agrees_with_a_scanned_one(text: str) -> None:
    try:
        scanned = read_scanned(text.encode())
        short = read_short_body(text.encode())
    except RequestError:
        return
    if short is None:
        return
    assert short.model == scanned.model
    assert {key: bytes(value) for key, value in short.fields.items()} == {
        key: bytes(value) for key, value in scanned.fields.items()
    }
    for model in ("engine", None):
        whole = json.loads(rewrite(scanned, model))
        if short.model is None and model is None:  # other spellings of it stay in a text that is not changed
            whole = dict(without_models(list(whole.items())))
        assert json.loads(rewrite(short, model)) == whole


@given(OBJECTS, st.lists(st.integers(0, 200), min_size=1, max_size=3), st.binary(max_size=3))
def test_scanned_body_that_a_json_decoder_takes_after_a_change_is_seen_in_the_same_way(
    text: str, places: list[int], insert: bytes
) -> None:
    content = bytearray(text.encode())
    for place in places:
        at = place % (len(content) + 1)
        content[at : at + place % 3] = insert
    try:
        expected = json.loads(content.decode(), object_pairs_hook=list, parse_constant=_refuse_constant)
    except (ValueError, UnicodeDecodeError, RecursionError):
        return
    if not isinstance(expected, list) or not content.lstrip(b" \t\n\r").startswith(b"{"):
        return
    if any(key == "model" and not isinstance(value, str | None) for key, value in expected):
        return
    body = read_scanned(bytes(content))
    assert json.loads(rewrite(body, "engine"), object_pairs_hook=list) == [
        ("model", "engine"),
        *without_models(expected),
    ]


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


@pytest.mark.parametrize("piece", [8, 13])
@given(text=OBJECTS)
@example(text='{"a":"' + "\\\\" * 40 + '","model":"x","b":[[["' + '\\"' * 30 + '"]]]}')
def test_scanned_body_does_not_depend_on_the_pieces(piece: int, text: str) -> None:
    whole = outcome(text)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_PIECE_BYTES", "_DECODED_BYTES", "_SHORT_STRING_BYTES"):
            patch.setattr(json_scanner, name, piece)
        patch.setattr(json_scanner, "_LONGEST_KEY_BYTES", 4096)
        patch.setattr(json_scanner, "_FOUND_BYTES_PER_COST", 1)
        assert outcome(text) == whole


def outcome(text: str) -> bytes | None:
    try:
        return rewrite(read_scanned(text.encode()), "engine")
    except RequestError:
        return None


# The work of any body is bounded


class Recorded(JsonScanner):
    """A scanner that the test can look at."""

    last: "Recorded"

    def __init__(self, text: bytes | bytearray) -> None:
        super().__init__(text)
        Recorded.last = self


@pytest.mark.parametrize("kind", KINDS)
def test_work_between_two_pauses_is_bounded(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(request_body, "JsonScanner", Recorded)
    content = bytearray(KINDS[kind](1 << 19))
    scan = scan_body(content)
    with contextlib.suppress(StopIteration, RequestError):
        next(scan)
        while True:
            at, values = Recorded.last.position, Recorded.last._value_count
            next(scan)
            assert Recorded.last.position - at <= 17 * json_scanner._PIECE_BYTES
            assert Recorded.last._value_count - values <= 2 * json_scanner._PIECE_BYTES / json_scanner._VALUE_COST_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_a_scan_does_not_grow_with_the_body(kind: str) -> None:
    content = bytearray(KINDS[kind](80 << 10))
    tracemalloc.start()
    with contextlib.suppress(RequestError):
        read_scanned(content)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2 << 20


async def test_large_bodies_take_turns() -> None:
    """One turn of the event loop has one piece of work, however many bodies are read."""
    turns = asyncio.Lock()
    content = bytearray(KINDS["numbers"](1 << 20))
    running = 0
    most = 0
    original = json_scanner.check_encoding

    def counted(text: bytes) -> json_scanner.PausingWork:
        nonlocal running, most
        for pause in original(text):
            running += 1
            most = max(most, running)
            asyncio.get_running_loop().call_soon(end)
            yield pause

    def end() -> None:
        nonlocal running
        running -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.proxy.request_body.check_encoding", counted)
        bodies = await asyncio.gather(*(scan_large_body(content, turns) for _ in range(5)))
    assert [body.model for body in bodies] == ["tiny"] * 5
    assert most == 1
