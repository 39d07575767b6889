"""The lines of an engine's metrics that Prometheus can read, in its text format 0.0.4.

Prometheus discards a whole scrape because of one line that it cannot read, so a line of a broken engine would hide the
proxy's own series. Only lines that are valid are kept, as they are; their number and length are bounded. A line with a
time is dropped: no engine sends one, and Prometheus discards a scrape with one that is out of its range, too. The image
of an engine may be its tenant's, so only names of this engine are kept: others would pass for series of the cluster.
"""

import asyncio
import math
import re
from typing import Final, NamedTuple

MOST_LINES: Final = 5_000
"""vLLM and SGLang have about 600, TGI 2,000, and vLLM as many again for each engine of a group."""
_LONGEST_LINE_BYTES: Final = 16 << 10
_LINE_COST_BYTES: Final = 64
"""A line takes as long as so many of its bytes, beside them."""
_BYTES_PER_PASS: Final = 16 << 10
"""Bytes after which other work gets a turn: a fraction of a millisecond."""

_NAME: Final = rb"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_VALUE: Final = rb"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?|[+-]?Inf|NaN"
_LABEL_NAME: Final = rb"[a-zA-Z_][a-zA-Z0-9_]*+"
_LABEL_VALUE: Final = rb'"(?:[^"\\\n\x00]++|\\[\\"n])*+"'
_LABELS: Final = rb"(?:%b=%b(?:,|(?=\})))*+" % (_LABEL_NAME, _LABEL_VALUE)
_SAMPLE: Final = re.compile(rb"(%b)(?:\{(%b)\})?[ \t]++(%b)" % (_NAME, _LABELS, _VALUE))
_LABEL: Final = re.compile(rb"(%b)=%b" % (_LABEL_NAME, _LABEL_VALUE))
_HELP: Final = re.compile(rb"# HELP (%b)(?: (?:[^\\\n\x00]++|\\[\\n])*+)?" % _NAME)
_TYPE: Final = re.compile(rb"# TYPE (%b) (?:counter|gauge|histogram|summary|untyped)" % _NAME)
_SERIES_SUFFIXES: Final = frozenset({b"_bucket", b"_count", b"_sum"})
"""Ends of the names of the series of a histogram or a summary."""


class FilteredExposition(NamedTuple):
    """The lines that are kept, and whether the text was whole."""

    text: bytes
    is_whole: bool


async def filter_exposition(text: bytes, prefixes: tuple[bytes, ...], *, is_whole: bool) -> FilteredExposition:
    """Return the valid lines of `text`, and whether the text was whole; other work goes on meanwhile.

    Beyond `MOST_LINES` the text is cut, and then it is not whole, either.

    Args:
        text: the lines of an engine.
        prefixes: prefixes of the names that are kept, unless they are the proxy's own.
        is_whole: the text was not cut before. Of one that is cut, the last family (the lines of one metric) is dropped:
            half of a histogram would be taken for a whole one.
    """
    # 1. Split it. A last line without an end counts unless the text was cut, perhaps within it.
    lines = text.split(b"\n", MOST_LINES)
    remainder = lines.pop()  # a last line without an end, or all that is beyond the most lines
    if len(lines) == MOST_LINES and remainder:
        is_whole = False
    elif is_whole:
        lines.append(remainder)

    # 2. Keep the valid lines. After so much work, other work gets a turn.
    kept = _KeptLines(prefixes)
    cost = 0
    for line in lines:
        kept.add_line(line)
        cost += len(line) + _LINE_COST_BYTES
        if cost >= _BYTES_PER_PASS:
            cost = 0
            await asyncio.sleep(0)

    if not is_whole:
        kept.drop_last_family()
    return FilteredExposition(bytes(kept.text), is_whole)


class _KeptLines:
    """The lines that are kept so far."""

    def __init__(self, prefixes: tuple[bytes, ...]) -> None:
        self.text = bytearray()
        self._prefixes = prefixes
        """Prefixes of the names that the engine may use."""
        self._family = b""
        """The name of the last family: a metric with its comments and all its series."""
        self._family_start = 0
        """The begin of the last family in the text."""
        # Prometheus refuses a second HELP or TYPE of a name, and a TYPE behind a sample of it.
        self._names_with_help: set[bytes] = set()
        self._names_with_type: set[bytes] = set()
        """Names with a TYPE or a sample."""

    def add_line(self, line: bytes) -> None:
        """Keep a line that is valid here."""
        if len(line) > _LONGEST_LINE_BYTES or not (line.isascii() or _is_utf_8(line)):
            return
        if line.startswith(b"#"):
            self._add_comment(line)
            return
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            return
        name, labels, value = sample.groups()
        if not self._is_from_engine(name) or not _is_in_range(value) or (labels and not _are_valid_labels(labels)):
            return
        self._names_with_type.add(name)  # a TYPE line behind a sample of its name is dropped
        self._append(name, line)

    def drop_last_family(self) -> None:
        """Remove the lines of the last family."""
        del self.text[self._family_start :]

    def _add_comment(self, line: bytes) -> None:
        """Keep a HELP or TYPE line of the engine's own names, the first one for each name."""
        for pattern, names in ((_HELP, self._names_with_help), (_TYPE, self._names_with_type)):
            comment = pattern.fullmatch(line)
            if comment and comment[1] not in names and self._is_from_engine(comment[1]):
                names.add(comment[1])
                self._append(comment[1], line)

    def _is_from_engine(self, name: bytes) -> bool:
        return name.startswith(self._prefixes) and not _is_reserved(name)

    def _append(self, name: bytes, line: bytes) -> None:
        """Keep a line of the metric `name`, and note where its family begins.

        The line belongs to the family of the line before if it has its name, or that name with the suffix of a
        histogram's series, such as `_bucket`.
        """
        family = self._family
        is_of_family = name == family or (name.startswith(family) and name[len(family) :] in _SERIES_SUFFIXES)
        if not is_of_family:
            self._family, self._family_start = name, len(self.text)
        self.text += line
        self.text += b"\n"


def _is_reserved(name: bytes) -> bool:
    """Return whether a name is one of the proxy's own series, or of those that Prometheus adds to each scrape."""
    return name.startswith((b"pomona_", b"scrape_")) or name == b"up"


def _is_in_range(value: bytes) -> bool:
    """Decide whether Prometheus reads the number: one out of range, such as 1e999, is an error there."""
    return value.endswith(b"Inf") or not math.isinf(float(value))


def _are_valid_labels(labels: bytes) -> bool:
    """Decide whether no label is there twice, and none is the name of the series."""
    names = _LABEL.findall(labels)
    return len(set(names)) == len(names) and b"__name__" not in names


def _is_utf_8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
