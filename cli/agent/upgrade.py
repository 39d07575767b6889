"""`pomona agent upgrade`: install another version into this environment, restart the agent, and undo it if that fails.

The files of the environment are kept as hard links meanwhile: installers replace files and never change them in place.
An upgrade that was interrupted, even by a power failure, is undone by the next one.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

import click

from cli.agent.agent_service import AgentWait, find_folder, find_installed, find_managers
from cli.agent.restart import restart_agent
from launchd.service_manager import ServiceError, ServiceManager
from metal_agent.control.agent_status import AgentStatus
from runtimes.environment import PYTHON

_KEPT_SUFFIX: Final = ".version-before"
"""Suffix of a complete copy, which is there only while an upgrade is not finished."""
_COPY_SUFFIX: Final = ".copying"
_DISCARDED_SUFFIX: Final = ".discarded"
_INSTALL_SECONDS: Final = 1800.0
_UPGRADE_WAIT: Final = AgentWait(seconds=20.0, steady_seconds=3.0)
"""The version before must be back before the Lease of the host expires, 40 s after its last renewal."""


@click.command("upgrade")
@click.option(
    "--from",
    "source",
    required=True,
    metavar="SOURCE",
    help="The new version: a checkout or a wheel, with the extras that you use, such as '.[llama,mlx]'.",
)
@click.pass_context
def command(ctx: click.Context, source: str) -> None:
    """Install another version of Pomona for the installed agent, and restart the agent.

    Engines and requests go on. If the new agent is not ready within 20 s, the version before is brought back.

    \b
    Example:
      pomona agent upgrade --from '.[llama,mlx]'
    """
    manager = find_installed(ctx)
    packages = Path(sysconfig.get_path("purelib"))
    refuse_environment(packages)
    try:
        _refuse_other_environment(manager, find_managers(ctx).program)
        with _lock_environment(packages):
            status = _replace_version(manager, packages, source)
    except ServiceError as error:
        raise click.ClickException(str(error)) from error
    print(f"agent {status.host} runs as process {status.pid}, version {status.version}")


def _replace_version(manager: ServiceManager, packages: Path, source: str) -> AgentStatus:
    """Install a version and restart the agent; put the version before back if that fails or is interrupted.

    Raises click.ClickException and ServiceError.
    """
    folder = find_folder(manager, None)
    kept = keep_packages(packages)
    try:
        install_version(source)
    except click.ClickException as error:
        restore_packages(packages, kept)
        raise click.ClickException(f"{error.message}; the agent was not restarted") from error
    except BaseException:
        restore_packages(packages, kept)
        raise
    try:
        status = restart_agent(manager, folder, _UPGRADE_WAIT)
    except (click.ClickException, ServiceError) as error:
        restore_packages(packages, kept)
        raise click.ClickException(f"{_read_reason(error)}; {_bring_back(manager, folder)}") from error
    except BaseException:
        restore_packages(packages, kept)
        click.echo("the version before is installed again: `pomona agent restart` runs it", err=True)
        raise
    _discard_packages(kept, packages)
    return status


def _bring_back(manager: ServiceManager, folder: Path) -> str:
    """Restart the agent with the packages that are back; return what became of it."""
    try:
        before = restart_agent(manager, folder)
    except (click.ClickException, ServiceError) as error:
        return f"the version before is installed again, but does not run: {_read_reason(error)}"
    return f"version {before.version} is back, and runs as process {before.pid}"


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
            f"Pomona runs out of the checkout {origin.get('url', '')}: update that, then run `pomona agent restart`"
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


def keep_packages(packages: Path) -> Path:
    """Keep the packages of an environment as hard links beside them; return their folder.

    Packages that an interrupted upgrade has kept are put back first: what is in their place may be half of a version.

    Raises click.ClickException.
    """
    kept = packages.with_name(packages.name + _KEPT_SUFFIX)
    copied = packages.with_name(packages.name + _COPY_SUFFIX)
    try:
        if kept.exists():
            restore_packages(packages, kept)
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(packages, copied, symlinks=True, copy_function=os.link)
        copied.rename(kept)
    except OSError as error:
        raise click.ClickException(f"cannot keep the version before in {kept}: {error}") from error
    return kept


def restore_packages(packages: Path, kept: Path) -> None:
    """Put the packages that were kept back in their place. Raises OSError."""
    discarded = packages.with_name(packages.name + _DISCARDED_SUFFIX)
    shutil.rmtree(discarded, ignore_errors=True)
    packages.rename(discarded)
    kept.rename(packages)
    shutil.rmtree(discarded, ignore_errors=True)


def _discard_packages(kept: Path, packages: Path) -> None:
    """Remove the packages that were kept: under another name first, since half of them must never be put back."""
    discarded = packages.with_name(packages.name + _DISCARDED_SUFFIX)
    shutil.rmtree(discarded, ignore_errors=True)
    kept.rename(discarded)
    shutil.rmtree(discarded, ignore_errors=True)


def install_version(source: str) -> None:
    """Install a version into this environment. Raises click.ClickException with the last words of the installer."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")]))
    # Without a new version number, an installer takes another build of the same version for the one that is there.
    words = ["install", "--reinstall-package", "pomona"] if uv else ["install", "--force-reinstall", "--no-deps"]
    tool = [uv, "pip"] if uv else [*PYTHON, "pip", "--disable-pip-version-check"]
    target = ["--python", sys.prefix] if uv else []
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
