"""Media of a request must be in it: an engine fetches nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.errors import RequestError
from gateway.proxy.request_body import read_short_body
from tests.unit.gateway.proxy.test_request_body import read_scanned

URL = "http://169.254.169.254/latest"
DATA = "data:image/png;base64,iVBORw0KGgo="


def image(url: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": url}


def chat(*parts: object) -> dict[str, object]:
    return {"model": "x", "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}]}


def answer(*parts: object) -> dict[str, object]:
    return {"model": "x", "input": [{"role": "user", "content": list(parts)}]}


REMOTE = {
    "chat": chat(image({"detail": "low", "url": URL})),
    "after data": chat(image({"url": DATA}), image({"url": URL})),
    "text": chat(image(URL)),
    "upper case": chat(image({"url": URL.upper()})),
    "blanks": chat(image({"url": " " + URL})),
    "relative": chat(image({"url": "//10.0.0.1/x"})),
    "file": chat(image({"url": "file:///etc/passwd"})),
    "capitals": {"messages": [{"content": [{"IMAGE_URL": URL}]}]},
    "two": chat({"type": "image_url", "image_url": {"url": DATA}, "Image_URL": {"url": URL}}),
    "sound": chat({"type": "input_audio", "input_audio": {"data": URL, "format": "wav"}}),
    "sound's url": chat({"type": "audio_url", "audio_url": {"url": URL}}),
    "video": chat({"type": "video_url", "video_url": {"url": URL}}),
    "document": chat({"type": "file", "file": {"file_data": URL}}),
    "responses": answer({"type": "input_image", "image_url": URL}),
    "responses, file": answer({"type": "input_file", "file_url": URL}),
    "responses, tool": {"input": [{"type": "function_call_output", "output": [{"image_url": URL}]}]},
    "responses, screenshot": {"input": [{"type": "computer_call_output", "output": {"image_url": URL}}]},
    "messages": chat({"type": "image", "source": {"type": "url", "url": URL}}),
    "messages, tool": chat({"type": "tool_result", "content": [{"type": "image", "source": {"url": URL}}]}),
    "arrays": {"messages": [[[{"content": [[image(URL)]]}]]]},
    "rerank, document": {"query": "a", "documents": ["b", {"content": [image({"url": URL})]}]},
    "rerank, document alone": {"query": "a", "documents": {"content": [image({"url": URL})]}},
    "rerank, query": {"query": {"content": [image({"url": URL})]}, "documents": ["b"]},
    "message alone": {"messages": {"content": image(URL)}},
}
LOCAL = {
    "chat": chat(image({"url": DATA})),
    "upper case": chat(image({"url": DATA.upper()})),
    "sound": chat({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}),
    "document": chat({"type": "file", "file": {"file_data": DATA, "filename": "a.pdf"}}),
    "text": {"messages": [{"role": "user", "content": f'"image_url": {{"url": "{URL}"}} and image_url {URL}'}]},
    "part of text": chat({"type": "text", "text": URL}),
    "arguments": chat({"type": "tool_use", "name": "show", "input": {"image_url": URL, "content": [image(URL)]}}),
    "schema": {"tools": [{"function": {"parameters": {"properties": {"image_url": {"default": URL}}}}}]},
    "metadata": {"metadata": {"image_url": URL}, "image_url": URL},
    "citation": {"input": [{"content": [{"text": "a", "annotations": [{"type": "url_citation", "url": URL}]}]}]},
    "text with a URL": chat({"type": "document", "source": {"type": "text", "data": f"{URL} is a page"}}),
    "texts": {"input": [URL, "image_url"]},
    "rerank": {"query": "image_url", "documents": [URL, {"content": [image({"url": DATA})]}, {"text": URL}]},
    "no value": chat(image(None), image({}), image([])),
}


@pytest.mark.parametrize("name", REMOTE)
@pytest.mark.parametrize("escaped", [False, True])
def test_remote_media_is_refused(name: str, escaped: bool) -> None:
    content = json.dumps(REMOTE[name]).encode()
    if escaped:
        content = content.replace(b"_", b"\\u005f").replace(b"/", b"\\/").replace(b"source", b"\\u0073ource")
    assert read_short_body(content) is None
    with pytest.raises(RequestError, match="send it as a data: URL") as refused:
        read_scanned(content)
    assert refused.value.status == 400
    assert json.loads(refused.value.body)["error"]["code"] == "remote_media"
    assert "169" not in str(refused.value)


@pytest.mark.parametrize("name", LOCAL)
def test_media_in_the_request_passes(name: str) -> None:
    content = json.dumps(LOCAL[name]).encode()
    assert b"".join(read_scanned(content).render_for_engine(None)) == content


@pytest.mark.parametrize("name", ["text", "arguments", "schema", "metadata", "citation", "texts", "part of text"])
@pytest.mark.parametrize("mark", ["image_url", "\\u0073ource", "file"])
def test_words_about_media_are_no_reason_to_scan(name: str, mark: str) -> None:
    """Tools and texts of every agent have some."""
    assert read_short_body(json.dumps(LOCAL[name]).replace("image_url", mark).encode())


PLAIN_KEYS = ("role", "content", "output", "text", "type", "input", "arguments", "name", "data", "url", "Content", "x")
KEYS = st.sampled_from([*PLAIN_KEYS, "image_url", "Image_URL", "source", "input_audio", "file", "image"])
VALUES = st.recursive(
    st.sampled_from([URL, DATA, "hi", None, 1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["messages", "input", "system", "Prompt", "tools"]), VALUES), st.booleans())
def test_body_with_remote_media_is_never_read_at_once(fields: dict[str, object], escaped: bool) -> None:
    content = json.dumps(fields).encode()
    if escaped:
        content = content.replace(b"_", b"\\u005f").replace(b"source", b"\\u0073ource")
    try:
        read_scanned(content)
    except RequestError:
        assert read_short_body(content) is None


def test_contents_within_contents_are_limited() -> None:
    read_scanned(b'{"messages":' + b'[{"content":' * 10 + b"1" + b"}]" * 10 + b"}")
    with pytest.raises(RequestError, match="more than 16 levels"):
        read_scanned(b'{"messages":' + b'[{"content":' * 20 + b"1" + b"}]" * 20 + b"}")
