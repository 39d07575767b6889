"""The commands of a document, run word for word in a shell as an administrator of a control plane."""

import asyncio
import os
import subprocess
from pathlib import Path

from tests.controlplane import binaries
from tests.controlplane.helm import ensure_helm
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT

LIMIT_SECONDS = 180.0
"""Limit for the commands of one block, also on a busy machine: it is no claim about speed."""


class Shell:
    """A shell with kubectl and Helm, in a folder that has the checkout's `deploy` and `crds`.

    Args:
        plane: the control plane.
        folder: an empty folder, or one to be made.
    """

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        programs = f"{binaries.ensure_binaries().kubectl.parent}:{ensure_helm().parent}"
        self.environment = {
            **os.environ,
            **plane.environment,
            "HOME": str(folder),
            "PATH": f"{programs}:{os.environ['PATH']}",
        }
        for name in ("deploy", "crds"):
            (folder / name).symlink_to(CHECKOUT / name)

    async def run(self, commands: str) -> str:
        """Run commands until one fails, and return what they print. Raises AssertionError with the output."""
        done = await asyncio.to_thread(
            subprocess.run,
            ["sh", "-eu"],
            input=commands,
            text=True,
            check=False,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            timeout=LIMIT_SECONDS,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
        return done.stdout
