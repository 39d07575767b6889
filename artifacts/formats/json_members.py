"""Reader of the members of a JSON object one by one, so that millions of them take no more memory than their text.

An index names the file of every tensor, and a safetensors header describes all of them: decoded to a dict, 32 MiB of
short members take half a gigabyte. Values that have objects in objects, or lists beside objects, are in neither.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

_STRING: Final = rb'"(?:[^"\\]++|\\.)*+"'
_MEMBER: Final = re.compile(
    rb"\s*+(?P<name>%(string)s)\s*+:\s*+(?P<value>%(string)s|\{(?:[^{}\"]++|%(string)s)*+\}|[^{}\[\]\",\s]++)\s*+[,}]"
    % {b"string": _STRING},
    re.DOTALL,
)
"""One member and what follows it. Every repetition is possessive: a text of megabytes leaves nothing to go back to."""
_START: Final = re.compile(rb"\s*+\{(?:\s*+\})?")
_BLANK: Final = re.compile(rb"\s*+")


class _AnyObject(msgspec.Struct):
    """An object whose members are checked to be JSON and not kept."""


def read_members(text: bytes | memoryview) -> Iterator[tuple[str, bytes]]:
    """Yield name and undecoded value of each member of the JSON object `text`, without decoding all of them at once.

    A value is a string, a number, or an object of such.

    Raises:
        msgspec.DecodeError: `text` is no JSON object, or has other values.
    """
    msgspec.json.decode(text, type=_AnyObject)  # checks the syntax, and keeps nothing
    # _START matches the opening brace, or all of an empty object; _MEMBER a member and the sign behind it.
    start = _START.match(text)
    position = start.end() if start else 0
    while member := _MEMBER.match(text, position):
        yield msgspec.json.decode(member["name"], type=str), member["value"]
        position = member.end()

    # Where a member does not match, something other than blanks is left.
    if not _BLANK.fullmatch(text, position):
        raise msgspec.ValidationError("a value is no string, number or plain object")
