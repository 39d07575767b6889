"""`pomona agent upgrade`: install another version into this environment, restart the agent, and undo it if that fails.

The version is installed into a copy of the environment, which takes its place in one step: whenever this command is
killed, even by a power failure, one of both versions is there as a whole. The next upgrade undoes an interrupted one.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

import click

from cli.agent.agent_service import AgentWait, describe_agent, find_folder, find_installed, find_managers
from cli.agent.restart import explain_stopped, restart_agent, start_anew
from cli.agent.trial_environment import TrialEnvironment
from launchd.service_manager import ServiceError, ServiceManager
from runtimes.environment import PYTHON

_INSTALL_SECONDS: Final = 1800.0
_DEFINITION_SECONDS: Final = 300.0
"""Time for the ladder of launchctl, whose longest step is the end of the agent, and for the agent to be ready."""
_USAGE_ERROR: Final = 2
"""Exit code of a version that has no definition to update: its --from is required."""
_UPGRADE_WAIT: Final = AgentWait(seconds=20.0, steady_seconds=3.0)
"""The previous version must be back before the Lease of the host expires, 40 s after its last renewal."""


@click.command("upgrade")
@click.option(
    "--from",
    "source",
    metavar="SOURCE",
    help="The new version: a checkout or a wheel, with the extras that you use, such as '.[llama,mlx]'. Without it, "
    "only the definition of the service is brought to this version.",
)
@click.pass_context
def command(ctx: click.Context, source: str | None) -> None:
    """Install another version of Pomona for the installed agent, and restart the agent.

    Engines and requests go on. If the new agent is not ready within 20 s, the previous version is restored. Then the
    definition of the service, its plist or unit, is written as the new version does, with the same options.

    \b
    Examples:
      pomona agent upgrade --from '.[llama,mlx]'
      sudo ~/.pomona/bin/pomona agent upgrade
    """
    manager, program = find_installed(ctx), find_managers(ctx).program
    try:
        if source is None:
            _refuse_other_environment(manager, program)
            print(update_definition(manager, program) or "the definition of the service is up to date")
            return
        prefix, packages = find_environment()
        refuse_environment(packages)
        _refuse_other_environment(manager, program)
        with _lock_environment(packages), _survive_hang_up():
            print(_replace_version(manager, TrialEnvironment(prefix, packages), source))
            print(_update_definition_by(program), end="")
    except ServiceError as error:
        raise click.ClickException(str(error)) from error


def update_definition(manager: ServiceManager, program: Path) -> str:
    """Write the definition of the service as this version does, and start the agent with it; engines go on.

    Return the outcome, or the command for root; empty if nothing differs. Raises ServiceError and click.ClickException.
    """
    outdated = manager.find_outdated()
    if outdated is None:
        return ""
    if manager.needs_root and os.geteuid():
        return f"{manager.definition_path} is of another version of Pomona: run `sudo {program} agent upgrade`"
    status = start_anew(manager, outdated.folder, lambda: manager.install(outdated))
    return f"{manager.definition_path} is written anew: {describe_agent(status)}"


def _update_definition_by(program: Path) -> str:
    """Update the definition by the version that is installed now; return what it prints.

    Raises click.ClickException.
    """
    try:
        done = subprocess.run(
            [program, "agent", "upgrade"], capture_output=True, text=True, check=False, timeout=_DEFINITION_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise click.ClickException(
            f"the version is installed; its definition of the service is not: {error}"
        ) from error
    if done.returncode not in {0, _USAGE_ERROR}:
        said = done.stderr.strip().removeprefix("Error: ")
        raise click.ClickException(f"the version is installed; its definition of the service is not: {said}")
    return done.stdout


def find_environment() -> tuple[Path, Path]:
    """Return the folder of the environment that runs this, and that of its packages."""
    return Path(sys.prefix), Path(sysconfig.get_path("purelib"))


@contextlib.contextmanager
def _survive_hang_up() -> Iterator[None]:
    """Go on after the terminal was closed, as package managers do; treat SIGTERM as Ctrl-C, which undoes everything."""
    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.default_int_handler),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _replace_version(manager: ServiceManager, trial: TrialEnvironment, source: str) -> str:
    """Install a version and restart the agent; restore the previous one if that fails or is interrupted.

    An agent that is stopped, perhaps by an error of the previous version, and that root has to start, stays stopped.

    Return the outcome. Raises click.ClickException and ServiceError.
    """
    folder = find_folder(manager)
    stopped = explain_stopped(manager, folder)
    try:
        trial.undo()
        trial.make_copy()
        install_version(source, trial.copy)
        trial.take_copy()
    except click.ClickException as error:
        _undo(trial)
        raise click.ClickException(f"{error.message}; the agent was not restarted") from error
    except OSError as error:
        with contextlib.suppress(OSError):
            trial.undo()
        raise click.ClickException(f"cannot replace the version: {error}; the agent was not restarted") from error
    except BaseException:
        _undo(trial)
        raise
    try:
        outcome = (
            f"the version is installed: {stopped}"
            if stopped
            else describe_agent(restart_agent(manager, folder, _UPGRADE_WAIT))
        )
    except (click.ClickException, ServiceError) as error:
        _undo(trial)
        raise click.ClickException(f"{_read_reason(error)}; {_restart_previous(manager, folder)}") from error
    except BaseException:
        _undo(trial)
        click.echo("the previous version is installed again: `pomona agent restart` runs it", err=True)
        raise
    try:
        trial.confirm()
    except OSError as error:
        click.echo(
            f"the previous version stays in {trial.copy}, and the next upgrade begins with it: {error}", err=True
        )
    return outcome


def _undo(trial: TrialEnvironment) -> None:
    """Restore the previous version. Raises click.ClickException."""
    try:
        trial.undo()
    except OSError as error:
        raise click.ClickException(
            f"cannot restore the previous version: {error}; mend that, then run `pomona agent upgrade`, which restores "
            "it first"
        ) from error


def _restart_previous(manager: ServiceManager, folder: Path) -> str:
    """Restart the agent with the previous version, which is restored; return the outcome for a message."""
    try:
        before = restart_agent(manager, folder)
    except (click.ClickException, ServiceError) as error:
        return f"the previous version is installed again, but does not run: {_read_reason(error)}"
    return f"version {before.version} is restored, and runs as process {before.pid}"


def _read_reason(error: click.ClickException | ServiceError) -> str:
    return error.message if isinstance(error, click.ClickException) else str(error)


def refuse_environment(packages: Path) -> None:
    """Raise click.ClickException if no version can be installed into this environment."""
    if sys.prefix == sys.base_prefix:
        raise click.ClickException(f"{sys.prefix} is not an environment of Pomona's own: install it with `uv venv`")
    if not os.access(packages, os.W_OK) or packages.stat().st_uid != os.geteuid():
        raise click.ClickException(f"{packages} is {packages.owner()}'s: run this command as {packages.owner()}")
    origin = json.loads(metadata.distribution("pomona").read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        raise click.ClickException(
            f"Pomona runs out of the checkout {origin.get('url', '')}: update that, then run `pomona agent restart`, "
            "and `pomona agent upgrade` without --from"
        )


@contextlib.contextmanager
def _lock_environment(packages: Path) -> Iterator[None]:
    """Keep other upgrades of this environment out while the context lasts. Raises click.ClickException."""
    descriptor = os.open(packages.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise click.ClickException(f"another upgrade of {sys.prefix} runs: wait until it has ended") from error
    try:
        yield
    finally:
        os.close(descriptor)


def install_version(source: str, prefix: Path) -> None:
    """Install a version into an environment. Raises click.ClickException with the last words of the installer."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")]))
    # Without a new version number, an installer takes another build of the same version for the one that is there.
    words = ["install", "--reinstall-package", "pomona"] if uv else ["install", "--force-reinstall", "--no-deps"]
    python = str(prefix / "bin" / "python3")
    tool = [uv, "pip"] if uv else [python, *PYTHON[1:], "pip", "--disable-pip-version-check"]
    target = ["--python", str(prefix)] if uv else []
    runs = [[*tool, *words, *target, source]]
    if not uv:
        # Its dependencies, which must not be reinstalled.
        runs.append([*tool, "install", source])
    for argv in runs:
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_INSTALL_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise click.ClickException(f"cannot install {source}: {error}") from error
        if done.returncode:
            said = "\n".join(done.stderr.strip().splitlines()[-10:])
            raise click.ClickException(f"cannot install {source}: {said}")


def _refuse_other_environment(manager: ServiceManager, ours: Path) -> None:
    """Raise click.ClickException if the service runs another installation of Pomona. Raises ServiceError."""
    program = Path((manager.read_arguments() or ("",))[0])
    if program != ours:
        raise click.ClickException(f"the installed agent runs {program}: upgrade with `{program} agent upgrade`")
