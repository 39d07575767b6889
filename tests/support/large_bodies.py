"""Large request bodies that are costly to read, each in another way."""

from collections.abc import Callable, Mapping
from typing import Final

_MODEL: Final = b'{"model":"tiny",'
_IMAGE: Final = b'"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,'


def _fill(unit: bytes, size_bytes: int) -> bytes:
    return unit * (size_bytes // len(unit))


def _numbered_keys(size_bytes: int) -> bytes:
    return b",".join(b'"%x":0' % number for number in range(size_bytes // 12))


def _nested(size_bytes: int) -> bytes:
    return b"[" * (size_bytes // 2) + b"]" * (size_bytes // 2)


KINDS: Final[Mapping[str, Callable[[int], bytes]]] = {
    "one image": lambda size: _MODEL + _IMAGE + _fill(b"iVBORw0KGgoAAAAN", size) + b'"}}]}]}',
    "one text": lambda size: _MODEL + b'"prompt":"' + _fill(b"a word ", size) + b'"}',
    "escapes": lambda size: _MODEL + b'"prompt":"' + _fill(rb"\n\"\\", size) + b'"}',
    "escaped letters": lambda size: _MODEL + b'"prompt":"' + _fill(rb"\u00e9", size) + b'"}',
    "letters of other scripts": lambda size: _MODEL + b'"prompt":"' + _fill("模型".encode(), size) + b'"}',
    "numbers": lambda size: _MODEL + b'"prompt":[' + _fill(b"12345,", size) + b"0]}",
    "short texts": lambda size: _MODEL + b'"input":[' + _fill(b'"a",', size) + b'"a"]}',
    "small keys": lambda size: _MODEL + _numbered_keys(size) + b"}",
    "one key": lambda size: _MODEL + b'"' + _fill(b"key", size) + b'":0}',
    "small keys inside": lambda size: _MODEL + b'"metadata":{' + _numbered_keys(size) + b"}}",
    "equal keys": lambda size: _MODEL + _fill(b'"a":0,', size) + b'"a":0}',
    "names of the model": lambda size: _MODEL + _fill(b'"model":"tiny",', size) + b'"a":0}',
    "a long name of the model": lambda size: b'{"model":"' + _fill(b"tiny", size) + b'"}',
    "nesting": lambda size: _MODEL + b'"prompt":' + _nested(size) + b"}",
    "nested messages": lambda size: _MODEL + b'"messages":' + _fill(b'[{"content":', size) + b"}",
    "empty arrays": lambda size: _MODEL + b'"messages":[' + _fill(b"[],", size) + b"[]]}",
    "empty objects": lambda size: _MODEL + b'"messages":[' + _fill(b"{},", size) + b"{}]}",
    "small images": lambda size: _MODEL + b'"input":[' + _fill(b'{"image_url":"data:,"},', size) + b"{}]}",
    "blanks": lambda size: _MODEL + _fill(b" \n", size) + b'"prompt":"a"}',
    "blanks at the end": lambda size: _MODEL + b'"prompt":"a"}' + _fill(b" \n", size),
    "not UTF-8 at the end": lambda size: _MODEL + b'"prompt":"' + _fill(b"a word ", size) + b'\xff"}',
    "no end": lambda size: _MODEL + b'"prompt":"' + _fill(b"a word ", size),
    "brackets without end": lambda size: _MODEL + b'"prompt":' + _fill(b"[", size),
    "nothing but quotation marks": lambda size: _fill(b'"', size),
}
"""For each kind a function from the size in bytes to such a body."""
