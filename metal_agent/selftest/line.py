"""One line of the self test: the found value beside the expected one."""

from typing import Literal, NamedTuple

Verdict = Literal["ok", "unknown", "FAILED"]


class Line(NamedTuple):
    """One check and its result."""

    name: str
    verdict: Verdict
    found: str
    expected: str


def check_known(name: str, found: object, expected: str, *, holds: bool = True, needed: bool = False) -> Line:
    """Check `found`; None is unknown, or a failure if the agent depends on it (`needed`)."""
    if found is None:
        return Line(name, "FAILED" if needed else "unknown", "nothing", expected)
    return Line(name, "ok" if holds else "FAILED", str(found), expected)


def check_same(name: str, found: object, other: object, source: str, *, needed: bool = False) -> Line:
    """Check that `found` equals `other` from a second `source`; if that is None, the result is unknown."""
    if found is not None and other is None:
        return Line(name, "unknown", str(found), f"the same from {source}, which reports nothing")
    return check_known(name, found, f"{other} from {source}", holds=str(found) == str(other), needed=needed)
