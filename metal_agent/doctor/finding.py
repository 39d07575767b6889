"""One finding of the doctor: the check, its verdict, what was found, and the way out."""

from typing import Literal, NamedTuple

FindingVerdict = Literal["ok", "unknown", "warning", "problem"]
"""warning: it serves, but may stop to. problem: it cannot serve, or the cluster cannot use it."""


class Finding(NamedTuple):
    """The outcome of one check."""

    name: str
    verdict: FindingVerdict
    found: str
    fix: str = ""
    """The way out, as a command where there is one; empty if nothing is to be done."""
