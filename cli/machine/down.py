"""`pomona down`: stop the running `pomona up`, and wait for its end."""

import time
from pathlib import Path
from typing import Final

import click
import psutil

from cli.cluster_access import INTERRUPTED_EXIT
from cli.machine.instance import Instance, find_instance, require_instance
from cli.machine.service_watch import describe_phase
from cli.options import state_folder_option
from cli.output import print_note

_PAUSE_SECONDS: Final = 0.1


@click.command("down")
@click.option("--now", is_flag=True, help="Abort running requests, also those that an earlier call waits for.")
@state_folder_option
def command(state_dir: Path | None, *, now: bool) -> None:
    """Stop the running `pomona up` of this machine, in the background or in a terminal, and wait until it has ended.

    Running requests end first. Ctrl-C ends the wait only.

    \b
    Examples:
      pomona down
      pomona down --now
    """
    instance = require_instance(state_dir)
    instance.say_asked()
    pid = instance.call(lambda client: client.stop(now=now))
    try:
        _await_end(instance, pid)
    except KeyboardInterrupt:
        print_note(f"process {pid} goes on stopping")
        click.get_current_context().exit(INTERRUPTED_EXIT)
    print("everything is stopped")


def _await_end(instance: Instance, pid: int) -> None:
    """Wait until the process has ended, and print what it waits for."""
    last_lines: list[str] = []
    while not _has_ended(pid):
        lines = _describe_rest(instance, pid)
        if lines != last_lines:
            last_lines = lines
            for line in lines:
                print_note(line)
        time.sleep(_PAUSE_SECONDS)


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended, also if nobody has noticed its end yet, such as the shell of its job."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _describe_rest(instance: Instance, pid: int) -> list[str]:
    """Return a line for each service that has not ended; none if the process does not answer any more."""
    try:
        running = find_instance(instance.folder)
    except click.ClickException:
        return []
    if running is None or running.status.pid != pid:
        return []
    return [describe_phase(service) for service in running.status.services if service.phase == "Stopping"]
