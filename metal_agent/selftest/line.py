"""One line of the self test: what was found beside what is expected."""

from typing import Literal, NamedTuple

Verdict = Literal["ok", "unknown", "FAILED"]


class Line(NamedTuple):
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    expected: str


def known(name: str, found: object, expected: str, *, holds: bool = True, needed: bool = False) -> Line:
    """Judge `found`; None is unknown, and a failure where the agent cannot do without (`needed`)."""
    if found is None:
        return Line(name, "FAILED" if needed else "unknown", "nothing", expected)
    return Line(name, "ok" if holds else "FAILED", str(found), expected)


def same(name: str, found: object, other: object, source: str, *, needed: bool = False) -> Line:
    """Judge `found` by what `source` tells of the same; where that tells nothing, it is not proven."""
    if found is not None and other is None:
        return Line(name, "unknown", str(found), f"the same from {source}, which tells nothing")
    return known(name, found, f"{other} from {source}", holds=str(found) == str(other), needed=needed)
