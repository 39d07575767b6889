"""The previous version of Pomona: a wheel of one commit, whose agents and engines the new code takes over.

`make previous-version COMMIT=...` replaces the wheel. Its programs run with the packages of this virtual environment.
Tests use them as a user does: by command line, state folder, API objects and requests.
"""

import contextlib
import hashlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import psutil

from tests.controlplane.members import NO_BENCHMARKS, SOURCES, MetalHost
from tests.controlplane.process import CHECKOUT, Process

FOLDER = Path(__file__).parent


class PreviousVersion:
    """The unpacked wheel; `folder` has its packages, and is the working directory of its programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of `pomona ARGUMENTS` in this version."""
        return self._python("cli.main", *arguments)

    def agent(self, host: MetalHost, *options: str) -> Process:
        """Return this version's agent for `host`, not yet started; `options` override those of the current agent."""
        # That version measures nothing, and does not know the option.
        own = [each for each in host.agent.argv[host.agent.argv.index("agent") :] if each != NO_BENCHMARKS]
        argv = [*host.host.exec, *self._python("agent_process", str(host.level), *own, *options)]
        return Process(f"previous {host.agent.name}", argv, host.agent.log.with_suffix(".previous.log"))

    def controller(self, current: Process) -> Process:
        """Return this version's controller with the options of `current`, not yet started."""
        own = current.argv[current.argv.index("controller") :]
        return Process("previous controller", self.command(*own), current.log, SOURCES)

    def runs(self, process: psutil.Process) -> bool:
        """Return whether `process` was started by this version; one that has ended meanwhile was not."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return Path(process.cwd()) == self.folder
        return False

    def _python(self, *module: str) -> list[str]:
        # Python looks for modules in its working directory first, which the agent's child processes inherit.
        return ["env", f"--chdir={self.folder}", f"PYTHONPATH={self.folder}", sys.executable, "-m", *module]


def unpack() -> PreviousVersion:
    """Unpack the kept wheel below `build/`, only once, so that the next run finds Python's byte code there."""
    (wheel,) = FOLDER.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    folder = CHECKOUT / "build" / "previous-version" / digest[:12]
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        incomplete = Path(tempfile.mkdtemp(dir=folder.parent))
        with ZipFile(wheel) as contents:
            contents.extractall(incomplete)
        try:
            incomplete.rename(folder)
        except OSError:  # another worker was faster
            shutil.rmtree(incomplete)
    return PreviousVersion(folder)


def marked(state_folder: Path) -> set[psutil.Process]:
    """Return the engines and the proxy that agents of this state folder started; a surviving process stays equal."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("POMONA_AGENT_STATE") == str(state_folder):
                found.add(process)
    return found


def running_engines(state_folder: Path) -> set[psutil.Process]:
    """Return those of `marked` that are no proxy, which a proxy of another version replaces."""
    return {each for each in marked(state_folder) if not _is_proxy(each)}


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
    found = (path for path in state_folder.rglob("*") if not path.is_dir() and not path.match(".*.new"))
    return {re.sub(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*", "ID", str(path.relative_to(state_folder))) for path in found}
