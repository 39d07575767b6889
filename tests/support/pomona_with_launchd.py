"""`pomona` where launchd is a stand-in: `python -m tests.support.pomona_with_launchd FOLDER agent install ...`.

The job that it installs is the real agent, on loopback. FOLDER has the stand-in, the plists and the programs.
"""

import sys
from pathlib import Path

from cli.agent.agent_service import ServiceManagers
from cli.main import main
from launchd.launchctl import Launchd
from tests.controlplane.process import CHECKOUT
from tests.support.launchctl_stand_in import LaunchctlStandIn


def build_managers(folder: Path) -> ServiceManagers:
    """Return the service managers of a Mac that nobody has logged in to."""
    launchctl = LaunchctlStandIn(folder / "launchd")
    launchctl.be_headless()
    return ServiceManagers(
        Launchd(("system",), folder / "LaunchDaemons", str(launchctl.program)),
        Launchd(("gui/501", "user/501"), folder / "LaunchAgents", str(launchctl.program)),
        _write_program(folder / "agent", "tests.support.agent_on_loopback"),
    )


def write_pomona(path: Path, folder: Path) -> None:
    """Write `pomona` as a program, for tests that run commands in a shell."""
    _write_program(path, f"tests.support.pomona_with_launchd {folder}")


def _write_program(path: Path, module: str) -> Path:
    path.write_text(f'#!/bin/sh\ncd {CHECKOUT} && exec {sys.executable} -m {module} "$@"\n')
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    main(args=sys.argv[2:], obj=build_managers(Path(sys.argv[1])))
