"""Forms with a file: the model is found, its part is rewritten, all else stays, and doubtful forms are refused."""

import gzip
import json
import tracemalloc
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp
import httpx
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.http.headers import Headers
from gateway.proxy import listeners, request_form
from gateway.proxy.config import ProxyConfig, RouterListener
from gateway.proxy.errors import RequestError
from gateway.proxy.request_body import BodyBudget
from gateway.proxy.request_form import FormBody, read_boundary, scan_form
from gateway.proxy.token_lanes import UNKNOWN, read_demand, read_limit
from tests.unit.gateway.proxy.recording_engine import RecordingEngine, recording_engine
from tests.unit.gateway.proxy.running_proxy import (
    AUTHORIZED,
    GatedEngine,
    ProxyProcess,
    error_code,
    fake_engine,
    make_service,
    proxy_in_process,
)

PATH = "/v1/audio/transcriptions"
BOUNDARY = b"----form-7MA4YWxk"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}


class Part(NamedTuple):
    """A part of a form: the rest of its Content-Disposition, its value, and its further header lines."""

    disposition: bytes
    value: bytes = b""
    more: bytes = b""


MODEL = Part(b'name="model"', b"whisper")
FILE = Part(b'name="file"; filename="a b.wav"', b"RIFF\r\n--not the boundary\r\n\0\xff", b"Content-Type: audio/wav\r\n")


def write(*parts: Part, end: bytes = b"--\r\n") -> bytes:
    written = b"".join(
        b"--%b\r\nContent-Disposition: form-data; %b\r\n%b\r\n%b\r\n" % (BOUNDARY, disposition, more, value)
        for disposition, value, more in parts
    )
    return written + b"--" + BOUNDARY + end


def read(content: bytes | bytearray) -> tuple[FormBody, int]:
    """Return the form, and the number of pauses."""
    scan, pauses = scan_form(content, BOUNDARY), 0
    while True:
        try:
            next(scan)
            pauses += 1
        except StopIteration as end:
            return end.value, pauses


def rewrite(content: bytes, model: str | None) -> bytes:
    return b"".join(read(content)[0].render_for_engine(model))


# The boundary


@pytest.mark.parametrize(
    ("value", "boundary"),
    [
        (b"multipart/form-data; boundary=x", b"x"),
        (b'Multipart/Form-Data ;boundary="a b:c"', b"a b:c"),
        (
            b"multipart/form-data; charset=utf-8; Boundary=----WebKitFormBoundary7MA4YWxkTrZu0gW",
            b"----WebKitFormBoundary7MA4YWxkTrZu0gW",
        ),
        (b"multipart/form-data; boundary=----=_Part_1_2.3", b"----=_Part_1_2.3"),
        (b"multipart/form-data; boundary=" + b"x" * 70, b"x" * 70),
    ],
)
def test_boundary_is_read(value: bytes, boundary: bytes) -> None:
    assert read_boundary(Headers([(b"content-type", value)])) == boundary


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b"multipart/form-data; a=" + b" " * 16_000 + b";@"],
        [b"application/json"],
        [b"multipart/mixed; boundary=x"],
        [b"multipart/form-data"],
        [b"multipart/form-data; boundary="],
        [b'multipart/form-data; boundary=""'],
        [b"multipart/form-data; boundary=x; boundary=y"],
        [b"multipart/form-data; boundary=x", b"multipart/form-data; boundary=y"],
        [b"multipart/form-data; boundary=" + b"x" * 71],
        [b'multipart/form-data; boundary="x "'],
        [b'multipart/form-data; boundary="a\\"b"'],
        [b"multipart/form-data; boundary*=utf-8''x"],
        [b"multipart/form-data; boundary=a\xc3\xa4"],
        [b"multipart/form-data, boundary=x"],
    ],
)
def test_other_content_types_are_refused(values: list[bytes]) -> None:
    with pytest.raises(RequestError, match=r"multipart/form-data with a boundary of 1 to 70") as refused:
        read_boundary(Headers((b"Content-Type", value) for value in values))
    assert refused.value.status == 400


# The form


@pytest.mark.parametrize("parts", [[MODEL, FILE], [FILE, MODEL]])
def test_model_is_found_wherever_it_is(parts: Sequence[Part]) -> None:
    body, _ = read(write(*parts))
    assert (body.model, body.streams) == ("whisper", False)


def test_part_of_the_model_is_replaced_and_all_else_stays_byte_by_byte() -> None:
    language = Part(b'name="language"', b"de", b"Content-Type: text/plain; charset=utf-8\r\n")
    for parts in ([MODEL, FILE, language], [FILE, MODEL, language], [FILE, language, MODEL], [FILE, language]):
        renamed = Part(b'name="model"', b"the engine's")
        assert rewrite(write(*parts), "the engine's") == write(renamed, FILE, language)


@pytest.mark.parametrize("end", [b"--\r\n", b"--"])
def test_form_for_an_engine_that_takes_any_model_stays_byte_by_byte(end: bytes) -> None:
    content = write(FILE, MODEL, end=end)
    assert rewrite(content, None) == content
    assert rewrite(write(end=end), None) == write(end=end)


def test_other_spellings_of_the_model_and_fields_that_load_weights_are_left_out() -> None:
    doubtful = [
        Part(b'name="Model"', b"evil"),
        Part(b"name=MODEL; filename=x", b"evil"),
        Part(b'name="adapters"', b"/etc"),
    ]
    content = write(doubtful[0], FILE, doubtful[1], MODEL, doubtful[2])
    assert read(content)[0].model == "whisper"
    assert rewrite(content, "x") == write(Part(b'name="model"', b"x"), FILE)
    assert rewrite(write(FILE, doubtful[2], MODEL), None) == write(MODEL, FILE)
    assert rewrite(write(FILE, doubtful[2]), None) == write(FILE)


def test_last_model_counts() -> None:
    assert read(write(MODEL, Part(b'name="model"', b"other"), FILE))[0].model == "other"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"preamble\r\n" + write(MODEL),
        write(MODEL).replace(b"\r\n", b"\n"),
        write(MODEL)[:-4],
        write(MODEL)[:-2] + b"-",
        write(MODEL)[: len(BOUNDARY) + 2],
        write(MODEL) + b"epilogue",
        write(MODEL) + write(FILE),
        write(MODEL, end=b" --\r\n"),
        write(MODEL, end=b"x--\r\n"),
        write(MODEL).replace(BOUNDARY + b"\r\n", BOUNDARY + b" \r\n", 1),
        write(Part(b'name="file"', b"a\r\n--" + BOUNDARY + b"b")),
        write(Part(b'name="file"', b"--" + BOUNDARY + b"\r\n\r\n")),
        write(Part(b'name="file"', b"", b"X: 1\r\n" * 2000)),
        b"--" + BOUNDARY + b"\r\n" + b"x" * 10_000,
        *(
            b"--%b\r\n%b\r\n\r\nvalue\r\n--%b--\r\n" % (BOUNDARY, head, BOUNDARY)
            for head in (
                b"",
                b"Content-Type: text/plain",
                b"Content-Disposition: form-data",
                b"Content-Disposition: form-data;",
                b'Content-Disposition: attachment; name="a"',
                b'Content-Disposition: form-data; name="a"; name="model"',
                b"Content-Disposition: form-data; name*=utf-8''model",
                b'Content-Disposition: form-data; name="a"; name*0="model"',
                b'Content-Disposition: form-data; name="mo\\del"',
                b'Content-Disposition: form-data; name="a\xff"',
                b'Content-Disposition: form-data; name="a" filename="b"',
                b'Content-Disposition: form-data; name="a',
                b'Content-Disposition: form-data; name="a"\r\nContent-Disposition: form-data; name="model"',
                b'Content-Disposition: form-data;\r\n name="model"',
                b'Content-Disposition : form-data; name="a"',
                b'Content-Disposition: form-data; name="a"\nX: 1',
                b'Content-Disposition: form-data; name="a"\r\nno field',
                b'Content-Disposition: form-data; name="a\0"',
            )
        ),
    ],
)
def test_form_that_engines_may_read_in_two_ways_is_refused(content: bytes) -> None:
    with pytest.raises(RequestError, match="the request body is not the form that this path takes: ") as refused:
        read(content)
    assert refused.value.status == 400


@pytest.mark.parametrize("value", [b"\xff", b"x" * 5000])
def test_name_of_the_model_is_a_short_text(value: bytes) -> None:
    with pytest.raises(RequestError, match="model") as refused:
        read(write(Part(b'name="model"', value), FILE))
    assert refused.value.status == 400


@pytest.mark.parametrize("name", ["grammar", "json_schema", "Tools", "structured_outputs", "guided_regex"])
def test_form_has_no_schema_for_the_answer(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}: a form takes no schema") as refused:
        read(write(MODEL, FILE, Part(b'name="%b"' % name.encode(), b'root ::= "a"')))
    assert (refused.value.status, error_code(json.loads(refused.value.body))) == (400, "invalid_schema")
    read(write(MODEL, FILE, Part(b'name="response_format"', b"verbose_json")))


def test_number_of_parts_is_limited() -> None:
    parts = [Part(b'name="a%d"' % number) for number in range(request_form.PARTS_LIMIT)]
    read(write(*parts))
    with pytest.raises(RequestError, match=f"more than {request_form.PARTS_LIMIT} parts"):
        read(write(*parts, MODEL))


# No control characters, which no client sends.
LETTERS = st.characters(codec="utf-8", exclude_characters='"\\', categories=("L", "N", "P", "S", "Zs"))
NAMES = st.text(LETTERS, max_size=8) | st.sampled_from(["model", "MODEL", "adapters"])
VALUES = st.binary(max_size=50) | st.sampled_from(
    [b"\r\n", b"--", b"\r\n--", b"\r\n--" + BOUNDARY[:-1], b"\r", b"\n--" + BOUNDARY]
)


@given(st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=6))
def test_any_form_is_rewritten_so_that_it_has_one_model(drawn: list[tuple[str, bytes, bool]]) -> None:
    parts = [
        Part(
            b'name="%b"' % name.encode() + b'; filename="f"' * is_file, b"any" if name.casefold() == "model" else value
        )
        for name, value, is_file in drawn
        if name.casefold() not in request_form.SCHEMA_NAMES
    ]
    kept = [part for part in parts if part.value != b"any" and b'"adapters"' not in part.disposition]
    assert rewrite(write(*parts), "m") == write(Part(b'name="model"', b"m"), *kept)


def test_boundary_that_lies_at_the_border_of_a_piece_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_form, "_PIECE_BYTES", 64)
    for size in range(200):
        content = write(MODEL, Part(b'name="file"', b"\r" * size), MODEL)
        assert rewrite(content, "m") == write(Part(b'name="model"', b"m"), Part(b'name="file"', b"\r" * size))


# What it costs


def test_large_file_is_not_copied_and_read_in_pieces() -> None:
    content = bytearray(write(Part(b'name="file"; filename="a"', bytes(16 << 20)), MODEL))
    tracemalloc.start()
    body, pauses = read(content)
    pieces = body.render_for_engine("engine")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(map(len, pieces)) == len(content) - len("whisper") + len("engine")
    assert most_bytes < 1 << 20
    assert pauses >= (16 << 20) // request_form._PIECE_BYTES


# Through the proxy


def fields(engine: RecordingEngine) -> tuple[bytes, list[bytes]]:
    (request,) = engine.requests
    assert engine.faults == []
    return request.body, request.values(b"content-type")


@pytest.mark.parametrize("path", [PATH, "/v1/audio/translations"])
async def test_engine_gets_the_form_with_its_own_name_of_the_model(http: aiohttp.ClientSession, path: str) -> None:
    async with recording_engine() as (engine, backend):
        named = structs.replace(backend, model="weights", engine="vllm", mode="chat")
        async with proxy_in_process(named) as (listeners_, url):
            async with http.post(url + path, data=write(FILE, MODEL), headers=AUTHORIZED | FORM) as response:
                assert response.status == 200
            assert not listeners_._shared.body_budget.held_bytes
    assert fields(engine) == (write(Part(b'name="model"', b"weights"), FILE), [FORM["Content-Type"].encode()])


async def test_compressed_form_is_decoded(http: aiohttp.ClientSession) -> None:
    async with recording_engine() as (engine, backend), proxy_in_process(backend) as (_, url):
        headers = AUTHORIZED | FORM | {"Content-Encoding": "gzip"}
        async with http.post(url + PATH, data=gzip.compress(write(MODEL, FILE)), headers=headers) as response:
            assert response.status == 200
    assert fields(engine)[0] == write(MODEL, FILE)


async def test_service_is_found_by_the_model_of_a_form(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    """Each form is written by another library, and read by aiohttp, which is strict."""

    async def transcribe(request: web.BaseRequest) -> web.StreamResponse:
        read = {}
        async for part in await request.multipart():
            assert isinstance(part, aiohttp.BodyPartReader)
            read[part.name] = [part.filename, (await part.read()).decode("latin-1")]
        return web.json_response(read)

    async with fake_engine(transcribe) as a, fake_engine(transcribe, "b") as b:
        services = (make_service(a, name="x/chat"), make_service(structs.replace(b, model="W"), name="x/whisper"))
        state = await proxy.client.configure(ProxyConfig(services, RouterListener("127.0.0.1", 0)))
        assert state.router
        url = f"http://127.0.0.1:{state.router.port}{PATH}"
        file = bytes(range(256)) * 1000
        seen = {"model": [None, "W"], "language": [None, "de"], "file": ["ä b.wav", file.decode("latin-1")]}

        form = aiohttp.FormData({"language": "de"}, quote_fields=False)
        form.add_field("file", file, filename="ä b.wav", content_type="audio/wav")
        form.add_field("model", "whisper")
        async with http.post(url, data=form) as response:
            assert await response.json() == seen

        async with httpx.AsyncClient() as client:
            answer = await client.post(
                url, data={"model": "x/whisper", "language": "de"}, files={"file": ("ä b.wav", file, "audio/wav")}
            )
        assert answer.json() == seen

        async with http.post(url, data=write(FILE), headers=FORM) as response:
            assert (response.status, error_code(await response.json())) == (400, "missing_model")


@pytest.mark.parametrize(
    ("engine", "path", "status"),
    [
        ("llama.cpp", PATH, 200),
        ("sglang", PATH, 200),
        ("ollama", PATH, 200),
        ("vllm", "/v1/audio/translations", 200),
        (None, PATH, 200),
        ("mlx-lm", PATH, 400),
        ("omlx", PATH, 400),
        ("llama.cpp", "/v1/audio/translations", 400),
    ],
)
async def test_form_reaches_only_an_engine_that_has_the_path(
    http: aiohttp.ClientSession, engine: str | None, path: str, status: int
) -> None:
    async with recording_engine() as (recorded, backend):
        async with (
            proxy_in_process(structs.replace(backend, engine=engine, mode="chat")) as (_, url),
            http.post(url + path, data=write(MODEL, FILE), headers=AUTHORIZED | FORM) as response,
        ):
            answer = await response.json()
            assert response.status == status
        assert len(recorded.requests) == (status == 200)
    if status == 400:
        assert error_code(answer) == "unsupported_path"
        assert f"does not serve {path}: use /v1/chat/completions, " in answer["error"]["message"]


@pytest.mark.parametrize(
    ("data", "headers", "status", "code"),
    [
        (b"{}", {"Content-Type": "application/json"}, 400, "bad_request"),
        (b"", FORM, 400, "bad_request"),
        (write(MODEL, FILE)[:-9], FORM, 400, "bad_request"),
        (write(Part(b'name="grammar"', b"x")), FORM, 400, "invalid_schema"),
    ],
)
async def test_refused_form_reaches_no_engine_and_holds_no_memory(
    http: aiohttp.ClientSession, data: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    never = GatedEngine()
    async with fake_engine(never) as backend, proxy_in_process(backend) as (listeners_, url):
        async with http.post(url + PATH, data=data, headers=AUTHORIZED | headers) as response:
            assert (response.status, error_code(await response.json())) == (status, code)
        assert not listeners_._shared.body_budget.held_bytes
    assert not never.arrived.is_set()


async def test_forms_share_the_budget_of_all_bodies(
    monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession
) -> None:
    monkeypatch.setattr(listeners, "BodyBudget", lambda: BodyBudget(200 << 10))
    async with recording_engine() as (_, backend), proxy_in_process(backend) as (_, url):

        async def ask(size: int) -> int:
            data = write(MODEL, Part(b'name="file"; filename="a"', bytes(size)))
            async with http.post(url + PATH, data=data, headers=AUTHORIZED | FORM) as response:
                return response.status

        assert [await ask(size) for size in (300 << 10, 80 << 10)] == [503, 200]


async def test_stream_and_text_of_a_transcription_are_passed_on(http: aiohttp.ClientSession) -> None:
    async def transcribe(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        return web.Response(body=answer, content_type=kind)

    delta = b'data: {"type":"transcript.text.delta","delta":"Hi"}\n\n'
    usage = b'{"type":"tokens","input_tokens":7,"output_tokens":2}'
    done = b'data: {"type":"transcript.text.done","text":"Hi","usage":%b}\n\n' % usage
    async with fake_engine(transcribe) as backend, proxy_in_process(backend) as (listeners_, url):
        for kind, answer in (
            ("text/event-stream", delta + done),
            ("text/event-stream", delta + done + b"data: [DONE]\n\n"),
            ("application/json", b'{"text":"Hi","usage":{"type":"duration","seconds":3}}'),
            ("text/plain", b"1\n00:00:00,000 --> 00:00:01,000\nHi\n"),
        ):
            async with http.post(url + PATH, data=write(MODEL, FILE), headers=AUTHORIZED | FORM) as response:
                assert (response.status, response.content_type, await response.read()) == (200, kind, answer)
        (state,) = listeners_.service_states()
        assert (state.stats.requests, state.stats.errors) == (4, 0)
        assert (state.stats.tokens_in, state.stats.tokens_out) == (14, 4)


def test_transcription_may_use_a_whole_context_where_slots_share_cells() -> None:
    assert read_demand("transcriptions", {}) == read_demand("translations", {}) == UNKNOWN
    assert read_limit("transcriptions", {}) == 0
