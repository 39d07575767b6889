"""The exit codes of launchctl that an owner can meet, and what to do about each."""

from typing import Final, NamedTuple


class Meaning(NamedTuple):
    """The meaning of an exit code, and the way out."""

    meaning: str
    remedy: str


NO_PROCESS: Final = 3
"""bootout: the job was not loaded."""

IO_ERROR: Final = 5
"""bootstrap: the old job still ends, or there is no such session."""

UNLOADING: Final = 36
"""bootout: the job is unloaded in the background."""

IN_PROGRESS: Final = 37
"""bootstrap: the old job still ends. kickstart: RunAtLoad has started the job already."""

NOT_LOADED: Final = 113
NO_DOMAIN: Final = frozenset({112, 125})
"""Codes for a domain that does not exist now, such as gui/UID without a login at the screen."""
WRONG_SESSION: Final = frozenset({5, 134})
"""Codes of bootstrap that may mean that nobody is logged in at the screen."""

CODES: Final[dict[int, Meaning]] = {
    1: Meaning("operation not permitted", "run the command with sudo"),
    3: Meaning("no such process: the job is not loaded", "nothing: it is gone already"),
    5: Meaning(
        "input/output error: the job is still loaded, ending or switched off, its file cannot be used, or there is no "
        "such session",
        "wait a minute and try again; if it stays, look at System Settings > General > Login Items, run `plutil -lint` "
        "on the file, and with sudo for a clearer error",
    ),
    13: Meaning("permission denied", "run the command with sudo"),
    36: Meaning("the job is being unloaded", "wait until it has ended"),
    37: Meaning("the job is being loaded or unloaded already", "wait a minute and try again"),
    107: Meaning("malformed bundle", "install it again: pomona agent install"),
    108: Meaning("invalid path", "install it again: pomona agent install"),
    109: Meaning("the file is no valid property list", "install it again: pomona agent install"),
    110: Meaning("the label is missing or invalid", "install it again: pomona agent install"),
    111: Meaning("the program is missing or invalid", "install Pomona again, then run: pomona agent install"),
    112: Meaning("the domain does not exist", "log in at the screen of the Mac, or install with sudo"),
    113: Meaning("the job is not loaded", "install it: pomona agent install"),
    114: Meaning("the user does not exist", "install it as a user of this Mac"),
    115: Meaning("the group does not exist", "install it as a user of this Mac"),
    118: Meaning("launchd gave no answer that can be read", "try again; if it stays, start the Mac again"),
    119: Meaning(
        "the job is disabled",
        "allow it in System Settings > General > Login Items, or ask who manages this Mac by a profile",
    ),
    122: Meaning(
        "the file has another owner or other rights than launchd demands",
        "give it to root, with mode 0644: install it again with sudo",
    ),
    124: Meaning("the domain is ending, as at a log-out", "log in and try again"),
    125: Meaning("the domain does not support this, as over ssh", "log in at the screen, or install with sudo"),
    133: Meaning("several errors at once", "look at the lines of launchctl; with sudo they are clearer"),
    134: Meaning("the job cannot be loaded in this session", "log in at the screen, or install with sudo"),
    139: Meaning("the job cannot run now", "look at `pomona agent logs`"),
    144: Meaning("the caller lacks an entitlement", "run the command with sudo, in a terminal"),
    146: Meaning("the job starts on demand only", "install it again: pomona agent install"),
    150: Meaning("System Integrity Protection forbids it", "choose another program than one of macOS"),
    155: Meaning("the program or the file is quarantined", "as root: xattr -d com.apple.quarantine FILE"),
}


def explain_code(code: int, output: str) -> str:
    """Return one sentence about a failed call: launchctl's own words, the meaning of its code, and the way out."""
    printed = "; ".join(line.strip() for line in output.splitlines() if line.strip())
    code_meaning = CODES.get(code)
    meaning = f"{code_meaning.meaning}: {code_meaning.remedy}" if code_meaning else "see `launchctl error`"
    return f"launchctl ended with {code} ({meaning}){f': {printed}' if printed else ''}"
