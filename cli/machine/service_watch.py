"""Follow a service of a running `pomona up` until it is in a wanted state, and print its changes."""

import time
from collections.abc import Callable
from typing import Final

import click

from cli.fetch_progress import show_fetch_progress
from cli.machine.instance import Instance
from cli.output import print_note
from standalone.control.up_status import UpServiceStatus

_PAUSE_SECONDS: Final = 0.1


def watch_service(instance: Instance, name: str, is_done: Callable[[UpServiceStatus], bool]) -> UpServiceStatus:
    """Return the status of a service once `is_done` holds for it, or requests to it are refused.

    Its phases, and the progress of its download, are printed on standard error meanwhile.

    Raises click.ClickException: the instance has ended, or serves it no more.
    """
    last_line = ""
    with show_fetch_progress(name) as show:
        while True:
            service = instance.read_status().find_service(name)
            if service is None:
                raise click.ClickException(f"{name} is not served any more: its file has changed")
            if is_done(service) or service.problem:
                return service
            if service.fetched_bytes is not None:
                show(service.fetched_bytes, service.total_bytes)
            elif (line := describe_phase(service)) != last_line:
                last_line = line
                print_note(line)
            time.sleep(_PAUSE_SECONDS)


def describe_phase(service: UpServiceStatus) -> str:
    """Return what a service waits for."""
    match service.phase:
        case "Stopping":
            waits = f"waits for {service.running} running requests" if service.running else "its engine ends"
            return f"{service.name}: {waits}"
        case "Starting":
            return f"{service.name}: loading"
        case "Idle" | "Rejected":  # it was asked for
            return f"{service.name}: waits for memory that others use"
        case phase:
            return f"{service.name}: {phase}" + (f" - {service.detail}" if service.detail else "")
