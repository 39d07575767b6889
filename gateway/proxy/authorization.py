"""Decide whether a client may use a listener: by its token or, without one, because it is a program of this machine."""

import hmac
import re
from typing import Final

from gateway.http.headers import Headers
from gateway.proxy import errors

_BEARER: Final = b"bearer "
_LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE | re.ASCII)


def authorize(headers: Headers, tokens: tuple[str, ...] | None) -> None:
    """Raise RequestError unless the request has a token or, without any, comes from a program of this machine.

    Args:
        headers: the request's.
        tokens: the valid tokens, which are several while one replaces another; None: none is needed.
    """
    if tokens is None:
        if not _is_local_program(headers):
            raise errors.foreign_origin()
    elif not _has_token(headers, tokens):
        raise errors.invalid_api_key()


def _has_token(headers: Headers, tokens: tuple[str, ...]) -> bool:
    """Compare the client's token, which is a bearer token or, as Anthropic's clients send it, in X-Api-Key."""
    credentials = headers.value(b"authorization") or b""
    if credentials[: len(_BEARER)].lower() == _BEARER:
        credentials = credentials[len(_BEARER) :]
    else:
        credentials = headers.value(b"x-api-key") or b""
    sent = credentials.strip()
    valid = False
    for token in tokens:
        # All are compared, so that the time does not show which one nearly matched.
        valid |= hmac.compare_digest(sent, token.encode())
    return valid


def _is_local_program(headers: Headers) -> bool:
    """Decide whether a program of this machine sent the request, and not a web page in a browser of this machine.

    A page of another origin sends that origin. A page whose own host name was made to resolve to this address (DNS
    rebinding) still sends that host name.
    """
    origin = headers.get("Origin").removeprefix("http://")
    return bool(_LOCAL.fullmatch(headers.get("Host"))) and (not origin or bool(_LOCAL.fullmatch(origin)))
