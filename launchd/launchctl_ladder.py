"""The calls of launchctl that load, restart or unload a job, each decided by the outcome of the one before.

launchctl answers before its work is done, and with errors for what is as it should be: bootout ends with 36 while it
unloads, with 3 when nothing was loaded, and bootstrap with 5 or 37 while the old job still ends. `load` and `unload`
are never used: they report errors with exit code 0.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Final, NamedTuple

from launchd.launchctl_codes import NO_DOMAIN, NOT_LOADED, WRONG_SESSION, explain_code
from launchd.print_output import read_job_state

_SUCCESS: Final = 0
_EX_CONFIG: Final = 78


class Rung(Enum):
    """One call of the ladder."""

    ENABLE = auto()
    BOOTOUT = auto()
    AWAIT_GONE = auto()
    BOOTSTRAP = auto()
    KICKSTART = auto()
    RESTART = auto()
    VERIFY = auto()


class Goal(Enum):
    """The purpose of a climb."""

    LOAD = Rung.ENABLE
    RESTART = Rung.RESTART
    UNLOAD = Rung.BOOTOUT


class Rule(NamedTuple):
    """The outcome of one rung by the exit code of launchctl; any other code is a failure."""

    passed: frozenset[int]
    following: Rung | None
    """The next rung after a code that passed; None: the goal is reached."""
    again: frozenset[int] = frozenset()
    """Codes after which the same call is made again, after a pause."""
    tries: int = 1
    pause_seconds: float = 0.0


RULES: Final[dict[Rung, Rule]] = {
    # A label that was disabled once cannot be bootstrapped, not even after a restart of the Mac.
    Rung.ENABLE: Rule(frozenset({_SUCCESS}), Rung.BOOTOUT),
    # 3 and 113: was not loaded; 36: goes on in the background.
    Rung.BOOTOUT: Rule(frozenset({_SUCCESS, 3, 36, NOT_LOADED}), Rung.AWAIT_GONE),
    # The agent has 60 s to end.
    Rung.AWAIT_GONE: Rule(frozenset({NOT_LOADED}), Rung.BOOTSTRAP, frozenset({_SUCCESS}), 140, 0.5),
    Rung.BOOTSTRAP: Rule(frozenset({_SUCCESS}), Rung.KICKSTART, frozenset({5, 37}), 6, 1.0),
    # 37: RunAtLoad has started it already.
    Rung.KICKSTART: Rule(frozenset({_SUCCESS, 37}), Rung.VERIFY),
    Rung.RESTART: Rule(frozenset({_SUCCESS, 37}), Rung.VERIFY),
    Rung.VERIFY: Rule(frozenset(), None, frozenset({_SUCCESS}), 20, 1.0),
}


@dataclass(frozen=True, slots=True)
class Climb:
    """The state between two calls."""

    goal: Goal
    label: str
    plist: Path
    domains: tuple[str, ...]
    """The domain that is tried, then those to fall back to: gui/UID exists only after a login at the screen."""
    rung: Rung
    tries: int = 0
    """Calls made on this rung."""
    seen_pid: int | None = None
    """The process of the job at the last look."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of launchctl for the next call."""
        domain = self.domains[0]
        job = f"{domain}/{self.label}"
        match self.rung:
            case Rung.ENABLE:
                return "enable", job
            case Rung.BOOTOUT:
                return "bootout", job
            case Rung.AWAIT_GONE | Rung.VERIFY:
                return "print", job
            case Rung.BOOTSTRAP:
                return "bootstrap", domain, str(self.plist)
            case Rung.KICKSTART:
                return "kickstart", job
            case Rung.RESTART:
                return "kickstart", "-k", job

    @property
    def pause_seconds(self) -> float:
        """The pause before the next call."""
        return RULES[self.rung].pause_seconds if self.tries else 0.0


class GoalReached(NamedTuple):
    """The goal is reached."""

    domain: str


class ClimbFailed(NamedTuple):
    """The goal is not reached; the message says why, and what to do."""

    message: str


def begin_climb(goal: Goal, label: str, plist: Path, domains: tuple[str, ...]) -> Climb:
    """Return the first call towards a goal."""
    return Climb(goal, label, plist, domains, goal.value)


def next_step(climb: Climb, code: int, output: str) -> Climb | GoalReached | ClimbFailed:
    """Return what follows a call of launchctl that ended with `code` and printed `output`."""
    rule, tries = RULES[climb.rung], climb.tries + 1
    if code in NO_DOMAIN and climb.domains[1:]:
        return begin_climb(climb.goal, climb.label, climb.plist, climb.domains[1:])
    if climb.rung is Rung.RESTART and code == NOT_LOADED:
        return replace(climb, rung=Rung.ENABLE, tries=0)
    if climb.goal is Goal.UNLOAD and code in NO_DOMAIN | {NOT_LOADED}:
        # The same job may be loaded in the other domain of the user.
        return (
            begin_climb(climb.goal, climb.label, climb.plist, climb.domains[1:]) if climb.domains[1:] else _end(climb)
        )
    if climb.rung is Rung.VERIFY and code == _SUCCESS:
        return _verify(climb, tries, output)
    if code in rule.passed:
        return replace(climb, rung=rule.following, tries=0) if rule.following else _end(climb)
    if code in rule.again and tries < rule.tries:
        return replace(climb, tries=tries)
    if climb.rung is Rung.BOOTSTRAP and code in WRONG_SESSION and climb.domains[1:]:
        return begin_climb(climb.goal, climb.label, climb.plist, climb.domains[1:])
    if climb.rung is Rung.AWAIT_GONE and code == _SUCCESS:
        return ClimbFailed(f"{climb.label} is still loaded after {tries * rule.pause_seconds:.0f} s: try again later")
    return ClimbFailed(f"launchctl {' '.join(climb.arguments)}: {explain_code(code, output)}")


def _verify(climb: Climb, tries: int, output: str) -> Climb | GoalReached | ClimbFailed:
    """Accept a job that runs as the same process at two looks: one that crashes at once is never the same."""
    job = read_job_state(output)
    if job.is_running and job.pid == climb.seen_pid:
        return _end(climb)
    # launchd does not start a job again that ended with 0, as an agent does whose error no restart mends.
    ended = climb.tries and job.state == "not running" and job.last_exit == "0"
    if tries < RULES[Rung.VERIFY].tries and not ended:
        return replace(climb, tries=tries, seen_pid=job.pid if job.is_running else None)
    # The agent itself never ends with 78 under launchd: launchd has it when it cannot start a program.
    is_startable = not (job.last_exit or "").startswith(f"{_EX_CONFIG}:")
    remedy = (
        "see `pomona agent logs`"
        if is_startable
        else "launchd cannot start it: the program, the home folder or the folder of the log is missing or closed for "
        "its user; mend that, and install it anew"
    )
    return ClimbFailed(
        f"{climb.label} is loaded but does not stay running (state: {job.state}, "
        f"last exit: {job.last_exit or 'unknown'}): {remedy}"
    )


def _end(climb: Climb) -> GoalReached:
    return GoalReached(climb.domains[0])
