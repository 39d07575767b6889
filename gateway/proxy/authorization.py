"""Decide whether a client may use a listener: by its token or, without one, because it is a program of this machine."""

import hmac
from typing import Final

from gateway.http.headers import Headers, is_from_local_program
from gateway.proxy import errors

_BEARER: Final = b"bearer "


def authorize(headers: Headers, tokens: tuple[str, ...] | None) -> None:
    """Raise RequestError unless the request has a token or, without any, comes from a program of this machine.

    Args:
        headers: the request's.
        tokens: the valid tokens, which are several while one replaces another; None: none is needed.
    """
    if tokens is None:
        if not is_from_local_program(headers):
            raise errors.foreign_origin()
    elif not _has_token(headers, tokens):
        raise errors.invalid_api_key()


def _has_token(headers: Headers, tokens: tuple[str, ...]) -> bool:
    """Decide whether the client sent a valid token: as a bearer token or, as Anthropic's clients do, in X-Api-Key."""
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
