"""launchd as the service manager: it runs the calls that the ladder decides, and waits between them."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from launchd.launchctl_codes import NO_DOMAIN, NOT_LOADED, explain_code
from launchd.launchctl_ladder import Climb, ClimbFailed, Goal, GoalReached, begin_climb, next_step
from launchd.print_output import JobState, read_job_state
from launchd.property_list import read_plist, render_plist
from launchd.service_definition import LABEL, ServiceDefinition
from launchd.service_manager import (
    ServiceError,
    ServiceManager,
    ServicePhase,
    ServiceState,
    is_written,
    remove_definition,
    run_command,
    write_definition,
)

DAEMONS: Final = Path("/Library/LaunchDaemons")
SYSTEM_DOMAIN: Final = "system"


class Launchd(ServiceManager):
    """launchd with the agent as its job.

    Args:
        domains: the domain of the job, then those to fall back to.
        folder: the folder of the plist.
        program: launchctl.
        pause: waits for some seconds.
    """

    def __init__(
        self,
        domains: tuple[str, ...],
        folder: Path,
        program: str = "launchctl",
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        needs_root = domains[0] == SYSTEM_DOMAIN
        super().__init__(folder / f"{LABEL}.plist", needs_root=needs_root, parse=read_plist, render=render_plist)
        self._domains = domains
        self._program = program
        self._pause = pause

    def install(self, definition: ServiceDefinition) -> None:
        """Write the plist, and load and start the job. Raises ServiceError."""
        content = render_plist(definition)
        if is_written(self.definition_path, content) and self.read_state().phase == "running":
            return
        # Each domain may have it: LOAD takes the first, and an install over ssh found only the last.
        self._climb(Goal.UNLOAD, self._domains)
        # Not before: after an interruption in between, the next call would take the old job for this one.
        write_definition(self.definition_path, content)
        self._climb(Goal.LOAD, self._domains)

    def uninstall(self) -> None:
        """Unload the job from each domain, and remove the plist. Raises ServiceError."""
        self._climb(Goal.UNLOAD, self._domains)
        remove_definition(self.definition_path)

    def restart(self) -> None:
        """End the agent and start it again; load the job if it is not loaded. Raises ServiceError."""
        domain, _ = self._find_job()
        self._climb(Goal.RESTART, (domain,) if domain else self._domains)

    def read_state(self) -> ServiceState:
        """Return launchd's view of the job. Raises ServiceError."""
        domain, job = self._find_job()
        return ServiceState(
            manager="launchd",
            job=f"{domain or self._domains[0]}/{LABEL}",
            definition=str(self.definition_path),
            phase=_phase(job) if domain else "absent",
            pid=job.pid,
            runs=job.runs,
            last_exit=job.last_exit,
        )

    def _find_job(self) -> tuple[str | None, JobState]:
        """Return the domain that has the job, and its state; None if it is not loaded. Raises ServiceError.

        After a login by ssh and one at the screen both domains may have it. Only one of them owns the state folder.
        """
        found = list[tuple[str, JobState]]()
        for domain in self._domains:
            code, output = run_command([self._program, "print", f"{domain}/{LABEL}"])
            if code == 0:
                found.append((domain, read_job_state(output)))
            elif code not in NO_DOMAIN | {NOT_LOADED}:
                raise ServiceError(f"launchctl print {domain}/{LABEL}: {explain_code(code, output)}")
        running = (each for each in found if each[1].is_running)
        return next(running, found[0] if found else (None, JobState()))

    def _climb(self, goal: Goal, domains: tuple[str, ...]) -> None:
        step: Climb | GoalReached | ClimbFailed = begin_climb(goal, LABEL, self.definition_path, domains)
        while isinstance(step, Climb):
            if step.pause_seconds:
                self._pause(step.pause_seconds)
            step = next_step(step, *run_command([self._program, *step.arguments]))
        if isinstance(step, ClimbFailed):
            raise ServiceError(step.message)


def system_launchd() -> Launchd:
    """Return launchd with a LaunchDaemon, which runs without a login."""
    return Launchd((SYSTEM_DOMAIN,), DAEMONS)


def user_launchd(home: Path) -> Launchd:
    """Return launchd with a LaunchAgent of this user: at the screen, else in the domain that any login makes."""
    uid = os.getuid()
    return Launchd((f"gui/{uid}", f"user/{uid}"), home / "Library" / "LaunchAgents")


def _phase(job: JobState) -> ServicePhase:
    if job.is_running:
        return "running"
    return "starting" if job.state in {"spawn scheduled", "xpcproxy", "spawning"} else "stopped"
