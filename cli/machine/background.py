"""Start `pomona up` as a process of its own, which no terminal ends, and wait until its endpoint is open."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import click

from artifacts.durable import make_folder
from cli.machine.instance import Instance, find_instance
from crds.text import escape_controls

OUTPUT_LOG: Final = "up-output.log"
"""The name of the file, in the state folder, with what such a process prints."""
_PAUSE_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 10.0
"""Time for the Models to be looked at, so that a source that does not exist ends this command, too."""
_OPEN_SECONDS: Final = 60.0
"""Time for the endpoint to open, after the engines of an earlier run were found."""
_SHOWN_BYTES: Final = 64 << 10


def start_in_background(arguments: Sequence[str], folder: Path) -> Instance:
    """Start `pomona up` with these arguments and this state folder; return it once its endpoint is open.

    Raises:
        click.exceptions.Exit: it has ended, with its exit code; what it has printed was printed here.
        click.ClickException: its output cannot be written.
    """
    log_path = folder / OUTPUT_LOG
    try:
        make_folder(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
        with os.fdopen(os.open(log_path, flags, 0o600), "wb") as output:
            process = _spawn(arguments, output)
    except OSError as error:
        raise click.ClickException(f"cannot use --state-dir {folder}: {error}") from error

    began_at = time.monotonic()
    opened_at: float | None = None
    while (code := process.poll()) is None:
        instance = _find_started(folder, process.pid)
        if instance and instance.status.endpoint:
            opened_at = opened_at or time.monotonic()
            is_looked_at = all(service.phase != "Pending" for service in instance.status.services)
            if is_looked_at or time.monotonic() - opened_at > _LOOK_SECONDS:
                return instance
        if opened_at is None and time.monotonic() - began_at > _OPEN_SECONDS:
            problem = f"its endpoint is not open after {_OPEN_SECONDS:.0f} s: see {log_path}"
            raise click.ClickException(f"process {process.pid} runs, and {problem}")
        time.sleep(_PAUSE_SECONDS)
    with log_path.open("rb") as written:
        click.echo(escape_controls(written.read(_SHOWN_BYTES).decode(errors="replace")), nl=False, err=True)
    raise click.exceptions.Exit(code)


def _spawn(arguments: Sequence[str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start the process in a session of its own. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cli.main", "up", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def _find_started(folder: Path, pid: int) -> Instance | None:
    """Return the instance if it is that process; another one makes the new one end, which says why."""
    try:
        instance = find_instance(folder)
    except click.ClickException:
        return None
    return instance if instance and instance.status.pid == pid else None
