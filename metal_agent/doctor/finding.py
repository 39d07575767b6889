"""One finding of the doctor: the check, its verdict, what was found, and the way out."""

from typing import Literal, NamedTuple

from crds.size import size_text

FindingVerdict = Literal["ok", "unknown", "warning", "problem"]
"""warning: it serves, but may stop to. problem: it cannot serve, or the cluster cannot use it."""


class Finding(NamedTuple):
    """The outcome of one check."""

    name: str
    verdict: FindingVerdict
    found: str
    fix: str = ""
    """The way out, as a command where there is one; empty if nothing is to be done."""


def check_value(name: str, value: object, expected: str, *, holds: bool = True, needed: bool = True) -> Finding:
    """Check that a value `holds`; None is unknown, or a problem if the agent needs it."""
    if value is None:
        return Finding(name, "problem" if needed else "unknown", "nothing", f"expected: {expected}")
    return Finding(name, "ok", str(value)) if holds else Finding(name, "problem", str(value), f"expected: {expected}")


def check_same(name: str, value: object, other: object, source: str, *, needed: bool = True) -> Finding:
    """Check that a value is that of a second `source`; if the source has none, the result is unknown."""
    if value is not None and other is None:
        return Finding(name, "unknown", str(value), f"expected: the same from {source}, which reports nothing")
    return check_value(name, value, f"{other} from {source}", holds=str(value) == str(other), needed=needed)


def check_near(name: str, size: int | None, other: int | None, source: str, tolerance: int) -> Finding:
    """Check that a size in bytes, which the agent needs, differs from that of a second `source` by less than this."""
    holds = size is not None and other is not None and abs(size - other) < tolerance
    return check_value(name, size_or_none(size), f"about {size_or_none(other)} from {source}", holds=holds)


def size_or_none(size_bytes: int | None) -> str | None:
    """Return a size as text; None if it is not known."""
    return None if size_bytes is None else size_text(size_bytes)
