"""The messages that all control APIs have: JSON, and a refusal in every response that is not 200."""

from typing import Final

import msgspec

JSON_FIELDS: Final = b"Content-Type: application/json\r\n"


class ControlRefusal(msgspec.Struct, frozen=True, rename="camel"):
    """Body of every response of a control API that is not 200."""

    error: str


def render_refusal(status: int, reason: str) -> tuple[bytes, bytes]:
    """Return the header fields and the body of a response to bytes that are no call."""
    del status
    return JSON_FIELDS, msgspec.json.encode(ControlRefusal(reason))
