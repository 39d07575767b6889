"""Heads and chunked bodies that two servers could read in two ways are refused, and all others are read as they are."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.limits import HEAD_BYTES
from gateway.http.request_head import InvalidRequestError, RequestHead, RequestParser, read_cached_head

START = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def parse(head: bytes) -> RequestHead:
    return parse_sized(head)[0]


def parse_sized(head: bytes) -> tuple[RequestHead, int | None]:
    """Parse a head, in full and by what is known of others; both must say the same."""
    try:
        parsed, length = RequestParser().parse_head(head)
    except InvalidRequestError:
        for _ in range(2):
            try:
                assert read_cached_head(head) is None
            except InvalidRequestError:
                continue
        raise
    for reading in (read_cached_head(head), read_cached_head(head)):
        if reading:
            known_head, known_length = reading
            assert known_length == length
            for name in ("method", "path", "query", "is_http_1_0", "keep_alive"):
                assert getattr(known_head, name) == getattr(parsed, name), name
            others = [field for field in parsed.headers.fields if field[0].lower() != b"content-length"]
            assert [field for field in known_head.headers.fields if field[0].lower() != b"content-length"] == others
    return parsed, length


def test_head_that_differs_in_its_length_only_is_known() -> None:
    heads = [read_cached_head(START + b"Content-Length: %d\r\nX: 1\r\n\r\n" % length) for length in (7, 70)]
    assert [head and head[1] for head in heads] == [7, 70]
    assert len({id(head and head[0]) for head in heads}) == 1


@pytest.mark.parametrize(
    "fields",
    [
        b"X: Content-Length: 5\r\nContent-Length: 7\r\n",
        b"X-Content-Length: 5\r\nContent-Length: 7\r\n",
        b"content-length: 007\r\n",
        b"Content-Length: 7\r\nX-Content-Length: 9\r\n",
    ],
)
def test_length_of_a_known_head_is_that_of_its_content_length(fields: bytes) -> None:
    assert parse_sized(START + fields + b"\r\n")[1] == 7


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n",
        b"Content-Length: 1\r\nContent-Length: 1\r\n",
        b"Content-Length: 1\r\nContent-Length: 2\r\n",
        b"Content-Length: 1, 1\r\n",
        b"Content-Length: +1\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 1 1\r\n",
        b"Content-Length: \r\n",
        b"Content-Length: 0x1\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: chunked, gzip\r\n",
        b"Transfer-Encoding: chunked, chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"Transfer-Encoding: \r\n",
        b"X: a\r\n b\r\n",
        b"X: a\r\n\tContent-Length: 5\r\n",
        b"X: a\nY: b\r\n",
        b"X: a\rY: b\r\n",
        b"X : a\r\n",
        b" X: a\r\n",
        b"X: a\0b\r\n",
        b"X\0: a\r\n",
        b"X: a\x01b\r\n",
        b": b\r\n",
        b"Xyz\r\n",
        b"Host: y\r\n",
        b"Connection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n",
    ],
)
def test_ambiguous_header_field_is_refused(fields: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse(START + fields + b"\r\n")


@pytest.mark.parametrize(
    "line",
    [
        b"POST  / HTTP/1.1",
        b"POST / HTTP/1.1 ",
        b"POST\t/ HTTP/1.1",
        b" POST / HTTP/1.1",
        b"POST / HTTP/1.2",
        b"POST / HTTP/2.0",
        b"POST / HTTP/0.9",
        b"POST / HTTP/1.1\r",
        b"POST /",
        b"POST / ICE/1.0",
        b"DESCRIBE / RTSP/1.0",
        b"post / HTTP/1.1",
        b"NONSENSE / HTTP/1.1",
        b"PRI * HTTP/2.0",
        b"CONNECT x:80 HTTP/1.1",
        b"CONNECT http://x/ HTTP/1.1",
        b"POST x HTTP/1.1",
        b"POST ftp://x/ HTTP/1.1",
        b"POST * HTTP/1.1",
        b"POST /a#b HTTP/1.1",
        b"POST /\x01 HTTP/1.1",
        b"POST /\xff HTTP/1.1",
        b"POST /a b HTTP/1.1",
    ],
)
def test_odd_request_line_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse(line + b"\r\nHost: x\r\n\r\n")


@pytest.mark.parametrize("host", [b"", b"Host: a\r\nHost: a\r\n", b"Host: a b\r\n", b"Host: a/b\r\n", b"Host: a,b\r\n"])
def test_request_of_http_1_1_has_exactly_one_valid_host(host: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="Host"):
        parse(b"GET / HTTP/1.1\r\n" + host + b"\r\n")
    parse(b"GET / HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n")
    parse(b"GET / HTTP/1.0\r\n\r\n")


def test_chunks_in_http_1_0_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="Transfer-Encoding"):
        parse(b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")


def test_too_many_fields_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="more than 128"):
        parse(START + b"".join(b"X-%d: 1\r\n" % number for number in range(128)) + b"\r\n")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/v1/models?limit=1", "/v1/models"),
        (b"/v1/models/x%2Fchat", "/v1/models/x/chat"),
        (b"http://10.0.0.1/v1/completions?x", "/v1/completions"),
        (b"HTTPS://x", "/"),
        (b"//v1/completions", "//v1/completions"),
        (b"/v1/../secret", "/v1/../secret"),
    ],
)
def test_path_of_a_target(target: bytes, path: str) -> None:
    assert parse(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n").path == path


def test_head_is_read_as_it_is() -> None:
    head = parse(START + b"X-Empty:\r\nx-Case: \t a \xc3\xbc \t\r\nX-case: 2\r\nConnection: Close\r\n\r\n")
    assert (head.method, head.keep_alive, head.is_http_1_0) == ("POST", False, False)
    assert head.headers.get("X-CASE") == "a ü"
    assert head.headers.values(b"x-case") == [b"a \xc3\xbc", b"2"]
    assert head.headers.get("X-Empty", "absent") == ""
    assert head.headers.get("Other", "absent") == "absent"
    assert parse_sized(START + b"Content-Length: 7\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n")[1] == 7


def test_forwarded_fields_are_without_those_of_the_hop() -> None:
    head = parse(START + b"Connection: X-Hop, keep-alive\r\nX-Hop: 1\r\nX-Kept: 2\r\nTE: trailers\r\n\r\n")
    assert head.headers.encode_forwarded(frozenset({b"host", b"te", b"connection"})) == b"X-Kept: 2\r\n"


# Chunked bodies


def chunked_parser() -> RequestParser:
    parser = RequestParser()
    assert parser.parse_head(START + b"Transfer-Encoding: chunked\r\n\r\n")[1] is None
    return parser


@pytest.mark.parametrize(
    "chunks",
    [
        b"1\na\r\n0\r\n\r\n",
        b"1\r\na\n0\r\n\r\n",
        b"1\r\nab\r\n0\r\n\r\n",
        b"1 \r\na\r\n0\r\n\r\n",
        b"0x1\r\na\r\n0\r\n\r\n",
        b"-1\r\na\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\na\r\n0\r\n\r\n",
        b'1;a="b\nc"\r\na\r\n0\r\n\r\n',
        b"1;a\rb\r\na\r\n0\r\n\r\n",
        b"\r\n0\r\n\r\n",
        b"0\r\n\n",
        b"0\r\nContent-Length: 5\r\n\r\n",
        b"0\r\nX : 5\r\n\r\n",
        b"1;" + b"x" * (HEAD_BYTES + 1000),
        b"0\r\nX: " + b"x" * (HEAD_BYTES + 1000),
    ],
)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_odd_chunk_is_refused(chunks: bytes, step: int) -> None:
    parser = chunked_parser()

    def parse_all() -> None:
        for start in range(0, len(chunks), step):
            parser.parse_chunks(chunks[start : start + step])

    with pytest.raises(InvalidRequestError):
        parse_all()


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=50), max_size=20), cuts=st.lists(st.integers(0, 2000), max_size=10)
)
def test_chunked_body_is_read_wherever_it_is_cut(chunks: list[bytes], cuts: list[int]) -> None:
    sent = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nX-Trailer: 1\r\n\r\n"
    parser = chunked_parser()
    edges = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    read = b"".join(parser.parse_chunks(sent[start:end]) for start, end in itertools.pairwise(edges))
    assert read == b"".join(chunks)
    assert parser.is_body_complete
    assert not parser.has_excess


@pytest.mark.parametrize("more", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"G", b"\0"])
def test_data_behind_a_chunked_body_is_noticed_and_not_taken_for_body(more: bytes) -> None:
    parser = chunked_parser()
    assert parser.parse_chunks(b"1\r\na\r\n0\r\n\r\n" + more) == b"a"
    assert (parser.is_body_complete, parser.has_excess) == (True, True)
