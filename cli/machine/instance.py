"""The running `pomona up` of this machine, which commands ask in preference to a cluster.

It is found by its control socket in the state folder. The socket of a process that was killed answers nobody, and
counts as none.
"""

import asyncio
import errno
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from cli.cluster_options import ClusterOptions
from cli.options import default_state_folder
from cli.output import print_asked

if TYPE_CHECKING:
    from standalone.control.up_client import UpClient
    from standalone.control.up_status import UpServiceStatus, UpStatus

T = TypeVar("T")

UP_SOCKET: Final = "up.sock"
"""The name of the socket; the module that serves it is not imported where there is none."""
_NOBODY_LISTENS: Final = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR})
START_HINT: Final = "start one by `pomona up` or `pomona run MODEL`"

OR_START: Final = f"; no `pomona up` runs on this machine either: {START_HINT}"
"""The end of the message that there is no cluster, for commands that ask a `pomona up` in preference."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A running `pomona up`."""

    folder: Path
    client: "UpClient"
    status: "UpStatus"
    """Its status when it was found."""

    def call(self, call: "Callable[[UpClient], Coroutine[Any, Any, T]]") -> T:
        """Return what it answers to a call. Raises click.ClickException: it refuses, or has ended."""
        return run_call(call(self.client))

    def read_status(self) -> "UpStatus":
        """Return its status now. Raises click.ClickException."""
        return self.call(lambda client: client.status())

    def find_service(self, name: str) -> "UpServiceStatus":
        """Return the status of a service when it was found. Raises click.ClickException: it has no such service."""
        from standalone.control.up_status import describe_missing_service  # noqa: PLC0415 - not needed for --help

        if service := self.status.find_service(name):
            return service
        raise click.ClickException(describe_missing_service(name, [service.name for service in self.status.services]))

    def say_asked(self) -> None:
        """Say on standard error that this instance was asked."""
        print_asked(f"`pomona up` on this machine (pid {self.status.pid})")


def choose_instance(target: ClusterOptions, state_dir: Path | None) -> Instance | None:
    """Return the instance that a command asks; None: it asks the cluster.

    An instance in the state folder is preferred, unless the user names a cluster.

    Raises:
        click.UsageError: the user names both.
        click.ClickException: an instance does not answer, or does not run where the user says.
    """
    if target != ClusterOptions():
        if state_dir is not None:
            raise click.UsageError(f"--state-dir is of `pomona up` on this machine, and{target.render()} of a cluster")
        return None
    return require_instance(state_dir) if state_dir else find_instance(None)


def require_instance(state_dir: Path | None) -> Instance:
    """Return the instance in the state folder. Raises click.ClickException: none runs there."""
    if instance := find_instance(state_dir):
        return instance
    folder = locate_state_folder(state_dir)
    raise click.ClickException(f"no `pomona up` runs in {folder}: {_describe_agent(folder) or START_HINT}")


def find_instance(state_dir: Path | None) -> Instance | None:
    """Return the instance in the state folder; None: none runs there.

    Raises click.ClickException: it does not answer, is another user's, or refuses.
    """
    folder = locate_state_folder(state_dir)
    try:
        if not (folder / UP_SOCKET).exists():  # the client would be imported for nothing
            return None
    except PermissionError as error:
        raise _explain_permission(folder) from error

    from gateway.http.control_client import ControlUnreachableError  # noqa: PLC0415 - not needed without one
    from standalone.control.up_client import UpClient  # noqa: PLC0415 - same

    client = UpClient(folder)
    try:
        return Instance(folder, client, asyncio.run(client.status()))
    except ControlUnreachableError as error:
        number = getattr(error.__cause__, "errno", None)
        if number in _NOBODY_LISTENS:
            return None
        if number == errno.EACCES:
            raise _explain_permission(folder) from error
        raise click.ClickException(f"{error}: end it by its pid, or name a cluster by --context") from error
    except Exception as error:
        raise _explain(error) from error


def run_call(call: Coroutine[Any, Any, T]) -> T:
    """Return the result of calls to an instance. Raises click.ClickException: it refuses, or has ended."""
    try:
        return asyncio.run(call)
    except Exception as error:
        raise _explain(error) from error


def _explain(error: Exception) -> Exception:
    """Return the error for the user: the words of a refusal alone, and any other error as it is."""
    from gateway.http.control_client import (  # noqa: PLC0415 - not needed for --help
        ControlRefusedError,
        ControlUnreachableError,
    )

    match error:
        case ControlRefusedError():
            return click.ClickException(error.refusal or str(error))
        case ControlUnreachableError():
            return click.ClickException(f"{error}: it has ended, or is being ended")
        case _:
            return error


def locate_state_folder(state_dir: Path | None) -> Path:
    """Return the state folder of --state-dir, or the default one."""
    return (state_dir or default_state_folder()).absolute()


def _explain_permission(folder: Path) -> click.ClickException:
    return click.ClickException(
        f"{folder} is another user's: run this command as its owner or with sudo, or name a cluster by --context"
    )


def _describe_agent(folder: Path) -> str:
    """Return that an agent runs in the folder, as after it has taken the engines over; "" if none does."""
    from devices.sockets import unix_listener  # noqa: PLC0415 - not needed for --help

    pid = unix_listener(folder / "agent.sock")
    return f"an agent (process {pid}) does, see `pomona agent status`" if pid else ""
