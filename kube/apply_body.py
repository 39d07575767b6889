"""The body of a server-side apply: JSON that means the same when it is read as YAML, as the API server does.

YAML refuses some characters that JSON may have as they are, and takes others for ends of lines. Hosts, engines and
servers of weights write texts that messages quote: one such character would have the whole object refused.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

APPLY_TYPE: Final = "application/apply-patch+yaml"
_OTHERWISE_IN_YAML: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def encode_apply_body(obj: Mapping[str, Any]) -> bytes:
    """Return an object as JSON, with escapes for the characters that YAML reads in another way, or not at all."""
    body = msgspec.json.encode(obj)
    if body.isascii() and b"\x7f" not in body:
        return body
    # Such a character is within a string, where both formats know the escape.
    return _OTHERWISE_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", body.decode()).encode()
