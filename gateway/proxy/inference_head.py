"""The head of a request for inference: authorized, and made into the head that an engine gets.

The clients of one library send one head again and again, so all that follows from it is remembered with it.
"""

import functools
import re
from typing import Final, NamedTuple

from gateway.http.headers import HOP_BY_HOP
from gateway.http.request_head import RequestHead
from gateway.proxy import errors, paths
from gateway.proxy.authorization import authorize

REQUEST_ID: Final = "X-Request-Id"
_VALID_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
# The token is the proxy's, not the engine's; a compressed response could not be rewritten; the others belong to the
# connection with the client.
_NOT_TO_ENGINE: Final = HOP_BY_HOP | {
    *(b"content-length", b"authorization", b"x-api-key", b"host", b"expect", b"accept-encoding", b"x-request-id"),
}


class InferenceHead(NamedTuple):
    """The facts of the head of a request for inference, of a client that is authorized."""

    route: str
    """The name of the path in metrics and log."""
    request_id: str
    """The client's, if it is harmless in a log; else empty."""
    forwarded: bytes
    """The request line and the header fields that do not depend on the engine."""


@functools.lru_cache(maxsize=256)
def read_inference_head(head: RequestHead, tokens: tuple[str, ...] | None) -> InferenceHead | None:
    """Read the head of a POST; None if its path is not for inference. `authorize` says what `tokens` are.

    Only heads that are admitted are remembered, each with the tokens that admitted it. Raises RequestError.
    """
    authorize(head.headers, tokens)
    route = paths.INFERENCE.get(head.path)
    if route is None:
        return None
    if encoding := head.headers.get("Content-Encoding"):
        raise errors.unsupported_encoding(encoding)
    request_id = head.headers.get(REQUEST_ID)
    return InferenceHead(
        route,
        request_id if _VALID_REQUEST_ID.fullmatch(request_id) else "",
        b"POST %b HTTP/1.1\r\n%b" % (head.path.encode(), head.headers.encode_forwarded(_NOT_TO_ENGINE)),
    )
