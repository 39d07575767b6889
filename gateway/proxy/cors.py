"""CORS: the header fields by which a browser lets web pages of other origins ask a listener and read its answers.

A browser asks before it sends a request with a key or with JSON (a preflight), without the key. No answer admits
cookies or other credentials of the browser: a page has to have a key of its own, where one is needed.
"""

import re
from collections.abc import Collection
from typing import Final

from gateway.http.headers import Headers
from gateway.http.request_head import RequestHead
from gateway.proxy import errors
from gateway.proxy.config import EVERY_ORIGIN

_PREFLIGHT_SECONDS: Final = 600
"""Time for which a browser remembers the answer to a preflight."""
_FIELD_NAMES: Final = re.compile(rb"[\w!#$%&'*+.^`|~-]+(?:[ \t]*,[ \t]*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)
_REQUESTED_FIELDS: Final = b"access-control-request-headers"
_REQUESTED_METHOD: Final = b"access-control-request-method"
_REQUESTED_NETWORK: Final = b"access-control-request-private-network"


def render_cors_fields(headers: Headers, origins: Collection[str]) -> bytes:
    """Return the lines of the header fields for web pages, which each answer has.

    Args:
        headers: the request's.
        origins: those whose pages may ask, or `*` among them.
    """
    if not origins:
        return b""
    if EVERY_ORIGIN in origins:
        return b"Access-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: *\r\n"
    vary, origin = b"Vary: Origin\r\n", headers.get("Origin")
    if origin not in origins:
        return vary
    return b"%bAccess-Control-Allow-Origin: %b\r\nAccess-Control-Expose-Headers: *\r\n" % (vary, origin.encode())


def is_preflight(head: RequestHead) -> bool:
    """Decide whether a browser asks by this request whether a page may send another one."""
    is_from_page = head.headers.value(b"origin") is not None
    return head.method == "OPTIONS" and is_from_page and head.headers.value(_REQUESTED_METHOD) is not None


def render_preflight_fields(headers: Headers, origins: Collection[str]) -> bytes:
    """Return the lines of the header fields that only the answer to a preflight has.

    Libraries send fields of their own, such as `x-stainless-os`, so all that are requested are allowed. Raises
    RequestError: pages of this origin may not ask.
    """
    origin = headers.get("Origin")
    if origin not in origins and EVERY_ORIGIN not in origins:
        raise errors.foreign_origin("Origin", origin)
    lines = b"Access-Control-Allow-Methods: GET, POST, DELETE\r\nAccess-Control-Max-Age: %d\r\n" % _PREFLIGHT_SECONDS
    requested = (headers.value(_REQUESTED_FIELDS) or b"").strip()
    if _FIELD_NAMES.fullmatch(requested):
        lines += b"Access-Control-Allow-Headers: %b\r\n" % requested
    if (headers.value(_REQUESTED_NETWORK) or b"").lower() == b"true":  # from a page of a public address
        lines += b"Access-Control-Allow-Private-Network: true\r\n"
    return lines
