"""The previous version of Pomona: the files of one commit, whose agents and engines the new code takes over.

Its programs run with the packages of this virtual environment. Tests use them as a user does: by command line, state
folder, API objects and requests.
"""

import contextlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import psutil

from tests.controlplane.binaries import cache_folder, lock_folder
from tests.controlplane.go_build import BuildError
from tests.controlplane.members import SOURCES, MetalHost
from tests.controlplane.process import CHECKOUT, Process

PREVIOUS_COMMIT: Final = "a9aee2e5ec058e45a9329c872ebabffbc8fae497"
"""The version that updates start from. Until one is published, a change that would need compatibility code moves it
forward instead, to a commit before that change, with a line in the CHANGELOG."""


class PreviousVersion:
    """The files of the commit; `folder` has its packages, and is the working directory of its programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of `pomona ARGUMENTS` in this version."""
        return self._python("cli.main", *arguments)

    def agent(self, host: MetalHost, *options: str) -> Process:
        """Return this version's agent for `host`, not yet started; `options` override those of the current agent."""
        own = host.agent.argv[host.agent.argv.index("agent") :]
        argv = [*host.host.exec, *self._python("tests.support.agent_process", str(host.level), *own, *options)]
        return Process(f"previous {host.agent.name}", argv, host.agent.log.with_suffix(".previous.log"))

    def controller(self, current: Process) -> Process:
        """Return this version's controller with its image and the options of `current`, not yet started."""
        own = current.argv[current.argv.index("controller") :]
        argv = self.command(*own, "--image=ghcr.io/pomona-dev/pomona:previous")
        return Process("previous controller", argv, current.log, SOURCES)

    def runs(self, process: psutil.Process) -> bool:
        """Return whether `process` was started by this version; one that has ended meanwhile was not."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return Path(process.cwd()) == self.folder
        return False

    def _python(self, *module: str) -> list[str]:
        # Python looks for modules in its working directory first, which the agent's child processes inherit.
        return ["env", f"--chdir={self.folder}", f"PYTHONPATH={self.folder}", sys.executable, "-m", *module]


def unpack() -> PreviousVersion:
    """Return the previous version, which is unpacked into the user's cache once. Raises BuildError."""
    folder = cache_folder() / "previous-version" / PREVIOUS_COMMIT[:12]
    if not folder.exists():
        with lock_folder(folder.parent):
            if not folder.exists():
                aside = folder.parent / ".unpacking"
                shutil.rmtree(aside, ignore_errors=True)
                with tarfile.open(fileobj=io.BytesIO(_git("archive", PREVIOUS_COMMIT))) as archive:
                    archive.extractall(aside, filter="data")
                # An agent replaces a proxy of another build, which this one is also where the gateway has not changed.
                (aside / "gateway" / "previous_version.py").touch()
                aside.rename(folder)
    return PreviousVersion(folder)


def read_file(path: str) -> str:
    """Return a file of the previous version. Raises BuildError."""
    return _git("show", f"{PREVIOUS_COMMIT}:{path}").decode()


def _git(*arguments: str) -> bytes:
    """Return what git prints about the commit. Raises BuildError."""
    try:
        return subprocess.run(["git", *arguments], cwd=CHECKOUT, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"commit {PREVIOUS_COMMIT[:12]} is not in this clone, and tests of updates start from it: run "
            "`git fetch --unshallow`"
        ) from error


def marked(state_folder: Path) -> set[psutil.Process]:
    """Return the engines and the proxy that agents of this state folder started; a surviving process stays equal."""
    ours = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("POMONA_AGENT_STATE") == str(state_folder):
                ours.add(process)
    return ours


def running_engines(state_folder: Path) -> set[psutil.Process]:
    """Return those of `marked` that are no proxy, which a proxy of another version replaces."""
    return {process for process in marked(state_folder) if not _is_proxy(process)}


def _is_proxy(process: psutil.Process) -> bool:
    """Return whether the process is a proxy; one that has ended is no engine either."""
    try:
        return "proxy" in process.cmdline()
    except psutil.NoSuchProcess:
        return True


def state_files(state_folder: Path) -> set[str]:
    """Return the paths of all files in a state folder, with digests and uids replaced by `ID`.

    Temporary files, which an interrupted write leaves, are left out.
    """
    paths = (path for path in state_folder.rglob("*") if not path.is_dir() and not path.match(".*.new"))
    return {re.sub(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*", "ID", str(path.relative_to(state_folder))) for path in paths}
