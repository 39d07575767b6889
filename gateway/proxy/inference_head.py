"""The head of a request: authorized and, if it is for inference, made into the head that an engine gets.

The clients of one library send one head again and again, so what an engine gets of it is remembered with it.
"""

import functools
import hmac
import re
from typing import Final, NamedTuple

from crds.gatewaykey import digest_key
from gateway.http.headers import HOP_BY_HOP, Headers
from gateway.http.request_head import RequestHead
from gateway.proxy import errors, paths
from gateway.proxy.content_coding import read_coding
from gateway.proxy.request_form import read_boundary

REQUEST_ID: Final = "X-Request-Id"
_BEARER: Final = b"bearer "
_VALID_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
# The token is the proxy's, not the engine's; a compressed response could not be rewritten, and a compressed request is
# decoded; the others belong to the connection with the client. For a conversation with an id, llama-server goes on
# when the client is gone.
_NOT_TO_ENGINE: Final = HOP_BY_HOP | {
    *(b"content-length", b"authorization", b"x-api-key", b"host", b"expect", b"accept-encoding", b"x-request-id"),
    *(b"content-encoding", b"x-conversation-id"),
    # Whether a web page may ask is decided here; an engine such as Ollama would refuse its origin by rules of its own.
    b"origin",
    # Credentials for others, which a browser or a proxy in front of this one adds.
    *(b"cookie", b"api-key", b"x-forwarded-access-token", b"x-auth-request-access-token"),
}

_NOT_TRANSLATED: Final = _NOT_TO_ENGINE | {b"content-type", b"accept"}
"""Fields that say nothing of a translated body and its answer."""


class InferenceHead(NamedTuple):
    """The facts of the head of a request for inference."""

    route: str
    """The name of the path that an engine is asked."""
    label: str
    """The name of the client's path in metrics and log."""
    request_id: str
    """The client's, if it is harmless in a log; else empty."""
    forwarded: bytes
    """The request line and the header fields that do not depend on the engine."""
    coding: str
    """The coding of the body, which has to be decoded before it is read; empty: it has none."""
    boundary: bytes
    """The boundary of a body that is a form; empty: it is JSON."""
    is_plain: bool
    """The body is the JSON that an engine gets: not coded, no form, and of no other API."""


@functools.lru_cache(maxsize=256)
def read_inference_head(head: RequestHead) -> InferenceHead | None:
    """Read the head of a POST of an authorized client; None if its path is not for inference. Raises RequestError."""
    path = paths.resolve_alias(head.path)
    route = paths.INFERENCE.get(path)  # the name of the path
    if route is None:
        return None
    coding = read_coding(head.headers)
    boundary = read_boundary(head.headers) if route in paths.FORM_ROUTES else b""
    # `forwarded` has no end: the sender adds the fields that differ by backend and request, and the empty line.
    return InferenceHead(
        route=route,
        label=route,
        request_id=_read_request_id(head.headers),
        forwarded=b"POST %b HTTP/1.1\r\n%b" % (path.encode(), head.headers.encode_forwarded(_NOT_TO_ENGINE)),
        coding=coding,
        boundary=boundary,
        is_plain=not (coding or boundary),
    )


@functools.lru_cache(maxsize=256)
def read_translated_head(head: RequestHead, label: str, engine_path: str) -> InferenceHead:
    """Read the head of a POST of another API, whose body is translated for `engine_path`. Raises RequestError."""
    fields = head.headers.encode_forwarded(_NOT_TRANSLATED)
    line = b"POST %b HTTP/1.1\r\nContent-Type: application/json\r\n" % engine_path.encode()
    return InferenceHead(
        route=paths.INFERENCE[engine_path],
        label=label,
        request_id=_read_request_id(head.headers),
        forwarded=line + fields,
        coding=read_coding(head.headers),
        boundary=b"",
        is_plain=False,
    )


def _read_request_id(headers: Headers) -> str:
    """Return the client's id of a request, if it is harmless in a log; else an empty one."""
    request_id = headers.get(REQUEST_ID)
    return request_id if _VALID_REQUEST_ID.fullmatch(request_id) else ""


def authorize(headers: Headers, tokens: tuple[str, ...]) -> None:
    """Raise RequestError unless the request has a token; several are valid while one replaces another."""
    if not _has_token(headers, tokens):
        raise errors.invalid_api_key()


def read_credentials(headers: Headers) -> bytes:
    """Return what the client sent as a bearer token or, as Anthropic's clients do, in X-Api-Key; empty: neither."""
    credentials = headers.value(b"authorization") or b""
    if credentials[: len(_BEARER)].lower() == _BEARER:
        return credentials[len(_BEARER) :].strip()
    return (headers.value(b"x-api-key") or b"").strip()


@functools.lru_cache(maxsize=256)
def read_key_digest(headers: Headers) -> str:
    """Return the digest of the key in the header fields, which equal heads share."""
    return digest_key(read_credentials(headers).decode(errors="replace"))


def _has_token(headers: Headers, tokens: tuple[str, ...]) -> bool:
    """Decide whether the client sent a valid token."""
    sent = read_credentials(headers)
    valid = False
    for token in tokens:
        # All are compared, so that the time does not show which one nearly matched.
        valid |= hmac.compare_digest(sent, token.encode())
    return valid
