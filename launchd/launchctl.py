"""launchd as the service manager, by calls of launchctl, with the exit codes that an owner can meet.

launchctl answers before its work is done, and with errors for what is as it should be: bootout ends with 36 while it
unloads, with 3 when nothing was loaded, and bootstrap with 5 or 37 while the old job still ends. `load` and `unload`
are never used: they report errors with exit code 0.
"""

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, NamedTuple

from launchd.property_list import read_plist, render_plist
from launchd.service_definition import LABEL, ServiceDefinition
from launchd.service_manager import ServiceError, ServiceManager, ServicePhase, ServiceState, run_command


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


DAEMONS: Final = Path("/Library/LaunchDaemons")
SYSTEM_DOMAIN: Final = "system"
_EX_CONFIG: Final = 78
_SUCCESS: Final = 0  # a call that succeeded; of `print`: the job is loaded
_BOOTSTRAP_TRIES: Final = 6
_BOOTSTRAP_PAUSE_SECONDS: Final = 1.0
_GONE_TRIES: Final = 140
_GONE_PAUSE_SECONDS: Final = 0.5
"""The agent has 60 s to end."""
_VERIFY_TRIES: Final = 20
_VERIFY_PAUSE_SECONDS: Final = 1.0


class JobState(NamedTuple):
    """The state of a job of launchd; None for what is not printed."""

    state: str | None = None
    """running, not running, spawn scheduled, waiting, ..."""
    pid: int | None = None
    """Printed only while it runs."""
    runs: int | None = None
    last_exit: str | None = None
    """Such as `1`, `78: EX_CONFIG` or `(never exited)`; after a signal that one, such as `Killed: 9`."""

    @property
    def is_running(self) -> bool:
        """True while the job has a process."""
        return self.state == "running" and self.pid is not None


def read_job_state(output: str) -> JobState:
    """Return the state of the job in the output of `launchctl print`, whose form is no interface.

    A line is `key = value`, or `key = {` with lines up to `}`. The job itself is the outermost block, at depth 1: keys
    of blocks within it are not the job's, and are left out.
    """
    properties = dict[str, str]()
    # An output that does not begin with the job's own `... = {` is an excerpt from inside of the job.
    depth = 0 if output.split("\n", 1)[0].endswith("= {") else 1

    for line in map(str.strip, output.splitlines()):
        if line == "}":
            depth -= 1
        elif line.endswith("= {"):
            depth += 1
        elif depth == 1:
            key, equals, value = line.partition(" = ")
            if equals:
                properties.setdefault(key, value)

    # None: launchctl did not print it.
    return JobState(
        state=properties.get("state"),
        pid=_read_number(properties.get("pid")),
        runs=_read_number(properties.get("runs")),
        last_exit=properties.get("last terminating signal", properties.get("last exit code")),
    )


class _CallError(ServiceError):
    """A call of launchctl that ended with an exit code that no one expects."""

    def __init__(self, verb: str, code: int, message: str) -> None:
        """Keep the exit code, and whether it may mean that the domain does not exist."""
        super().__init__(message)
        self.code = code
        may_lack_session = verb == "bootstrap" and code in WRONG_SESSION  # perhaps nobody is logged in at the screen
        self.has_no_domain = code in NO_DOMAIN or may_lack_session
        """The domain (where launchd has jobs: `system`, gui/UID, user/UID) does not exist now: another one may."""


class Launchd(ServiceManager):
    """launchd with the agent as its job.

    Args:
        domains: the domain of the job, then those to fall back to.
        folder: the folder of the plist.
        program: launchctl.
        pause: waits for some seconds.
    """

    parse = staticmethod(read_plist)
    render = staticmethod(render_plist)

    def __init__(
        self,
        domains: tuple[str, ...],
        folder: Path,
        program: str = "launchctl",
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        needs_root = domains[0] == SYSTEM_DOMAIN
        super().__init__(folder / f"{LABEL}.plist", needs_root=needs_root)
        self._domains, self._program, self._pause = domains, program, pause

    def install(self, definition: ServiceDefinition) -> None:
        """Write the plist, and load and start the job, unless a job with this plist runs. Raises ServiceError.

        A job that was loaded before is unloaded first, from each domain: it may be in the first one or, after an
        install over ssh, in the last.
        """
        content = self.render(definition)
        if self.is_written(content) and self.read_state().phase == "running":
            return
        self._unload_everywhere()
        # The plist is written only now: if it were written first and the unloading failed, the next call would find it
        # and an old job that runs, and do nothing.
        self.write_definition(content)
        self._try_domains(self._load, self._domains)

    def uninstall(self) -> None:
        """Unload the job from each domain, and remove the plist. Raises ServiceError."""
        self._unload_everywhere()
        self.remove_definition()

    def restart(self) -> None:
        """End the agent and start it again; load the job if it is not loaded. Raises ServiceError."""
        domain, _ = self._find_job()
        self._try_domains(self._restart_job, (domain,) if domain else self._domains)

    def read_state(self) -> ServiceState:
        """Return launchd's view of the job. Raises ServiceError."""
        domain, job = self._find_job()
        return ServiceState(
            manager="launchd",
            job=f"{domain or self._domains[0]}/{LABEL}",
            definition=str(self.definition_path),
            phase=_find_phase(job) if domain else "absent",
            pid=job.pid,
            runs=job.runs,
            last_exit=job.last_exit,
        )

    def _find_job(self) -> tuple[str | None, JobState]:
        """Return the domain that has the job, and its state; None and an empty state if none has it.

        A domain that does not exist has no job. After a login by ssh and one at the screen both domains may have it.
        The one in which it runs is preferred: only one job can own the state folder. Raises ServiceError.
        """
        # The domains that have the job, with its state there.
        jobs = list[tuple[str, JobState]]()
        for domain in self._domains:
            code, output = run_command([self._program, "print", f"{domain}/{LABEL}"])
            if code == _SUCCESS:
                jobs.append((domain, read_job_state(output)))
            elif code not in NO_DOMAIN | {NOT_LOADED}:
                raise ServiceError(f"launchctl print {domain}/{LABEL}: {explain_code(code, output)}")

        # Prefer the job that runs.
        for domain, job in jobs:
            if job.is_running:
                return domain, job
        return jobs[0] if jobs else (None, JobState())

    def _try_domains(self, act: Callable[[str], None], domains: tuple[str, ...]) -> None:
        """Call `act` with the first domain that exists: gui/UID does only after a login at the screen."""
        for domain in domains[:-1]:
            try:
                return act(domain)
            except _CallError as error:
                if not error.has_no_domain:
                    raise
        return act(domains[-1])  # an error of the last one is raised

    def _load(self, domain: str) -> None:
        """Load and start the job in a domain, in the place of one that is loaded there; wait until it runs stably.

        launchctl's words: bootstrap loads a job, kickstart starts it, unless loading has done that already.
        """
        job = f"{domain}/{LABEL}"
        # A label that was disabled once cannot be bootstrapped, not even after a restart of the Mac.
        self._call("enable", job)
        self._unload(domain)
        plist = str(self.definition_path)
        tries, pause = _BOOTSTRAP_TRIES, _BOOTSTRAP_PAUSE_SECONDS
        self._call("bootstrap", domain, plist, retried_codes={IO_ERROR, IN_PROGRESS}, tries=tries, pause=pause)
        self._call("kickstart", job, accepted_codes={_SUCCESS, IN_PROGRESS})
        self._await_stable_run(job)

    def _restart_job(self, domain: str) -> None:
        """End the job and start it again; load it if it is not loaded."""
        job = f"{domain}/{LABEL}"
        try:
            # -k: kill the job first if it runs.
            self._call("kickstart", "-k", job, accepted_codes={_SUCCESS, IN_PROGRESS})
        except _CallError as error:
            if error.code != NOT_LOADED:
                raise
            return self._load(domain)
        return self._await_stable_run(job)

    def _unload_everywhere(self) -> None:
        """Unload the job from each domain that exists."""
        for domain in self._domains:
            try:
                self._unload(domain)
            except _CallError as error:
                if error.code not in NO_DOMAIN:
                    raise

    def _unload(self, domain: str) -> None:
        """Unload the job, if it is loaded, and wait until it has ended. Raises ServiceError if it does not end."""
        job = f"{domain}/{LABEL}"
        self._call("bootout", job, accepted_codes={_SUCCESS, NO_PROCESS, UNLOADING, NOT_LOADED})
        tries, pause = _GONE_TRIES, _GONE_PAUSE_SECONDS
        # bootout returns before the job has ended. So call `print` until it fails: it succeeds while the job is loaded.
        try:
            self._call("print", job, accepted_codes={NOT_LOADED}, retried_codes={_SUCCESS}, tries=tries, pause=pause)
        except _CallError as error:
            if error.code != _SUCCESS:
                raise
            raise ServiceError(f"{LABEL} is still loaded after {tries * pause:.0f} s: try again later") from error

    def _await_stable_run(self, job: str) -> None:
        """Wait until the job runs as the same process at two looks in a row; one that crashes at once never does.

        Raises ServiceError if it does not, with the way out: at once if the agent has ended itself without an error
        code, which launchd takes as final, else after the last look.
        """
        previous_pid, state = None, JobState()
        for tries in range(_VERIFY_TRIES):
            if tries:
                self._pause(_VERIFY_PAUSE_SECONDS)
            state = read_job_state(self._call("print", job))
            if state.is_running and state.pid == previous_pid:
                return

            # launchd does not start a job again that ended with 0, as an agent does whose error no restart mends.
            has_ended_for_good = state.state == "not running" and state.last_exit == "0"
            if tries and has_ended_for_good:
                break
            previous_pid = state.pid if state.is_running else None

        # The agent itself never ends with 78 under launchd: launchd has it when it cannot start a program.
        remedy = "see `pomona agent logs`"
        if (state.last_exit or "").startswith(f"{_EX_CONFIG}:"):
            remedy = (
                "launchd cannot start it: the program, the home folder or the folder of the log is missing or closed "
                "for its user; fix that, then install it again"
            )
        raise ServiceError(
            f"{LABEL} is loaded but does not stay running (state: {state.state}, last exit: "
            f"{state.last_exit or 'unknown'}): {remedy}"
        )

    def _call(
        self,
        verb: str,
        *words: str,
        accepted_codes: Collection[int] = (_SUCCESS,),
        retried_codes: Collection[int] = (),
        tries: int = 1,
        pause: float = 0.0,
    ) -> str:
        """Call launchctl, and return what it printed once its exit code is one of `accepted_codes`.

        After one of `retried_codes` it is called again, up to `tries` times in all, with a `pause` in seconds between.
        Raises _CallError: the last code is not accepted.
        """
        for earlier_tries in range(tries):
            if earlier_tries:
                self._pause(pause)
            code, output = run_command([self._program, verb, *words])
            if code in accepted_codes:
                return output
            if code not in retried_codes:
                break  # neither accepted nor worth another try

        raise _CallError(verb, code, f"launchctl {' '.join((verb, *words))}: {explain_code(code, output)}")


def system_launchd() -> Launchd:
    """Return launchd with a LaunchDaemon, which runs without a login."""
    return Launchd((SYSTEM_DOMAIN,), DAEMONS)


def user_launchd(home: Path) -> Launchd:
    """Return launchd with a LaunchAgent of this user: at the screen, else in the domain that any login makes."""
    uid = os.getuid()
    return Launchd((f"gui/{uid}", f"user/{uid}"), home / "Library" / "LaunchAgents")


def _find_phase(job: JobState) -> ServicePhase:
    """Return the phase of a job that is loaded."""
    if job.is_running:
        return "running"
    return "starting" if job.state in {"spawn scheduled", "xpcproxy", "spawning"} else "stopped"


def _read_number(text: str | None) -> int | None:
    """Return a printed number; None if there is none."""
    return int(text) if text and text.isdecimal() else None
