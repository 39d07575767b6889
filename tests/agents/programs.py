"""Claude Code, Codex and npm's `ai`, installed once into the user's cache: `python -m tests.agents.programs`.

`package-lock.json` is made by `npm install --package-lock-only --omit-lockfile-registry-resolved`.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.controlplane.binaries import cache_folder
from tests.controlplane.go_build import BuildError, report_build

_HERE: Final = Path(__file__).parent
_FILES: Final = (_HERE / "package.json", _HERE / "package-lock.json")
_DIGEST: Final = hashlib.sha256(_FILES[1].read_bytes()).hexdigest()[:12]
MODULES: Final = cache_folder() / "agents" / _DIGEST / "node_modules"
"""The folder of the packages, once they are installed."""


def ensure_agents() -> Path:
    """Return the folder of the packages; install them if they are absent: 830 MB, half a minute.

    Raises:
        BuildError: they cannot be installed here.
    """
    if MODULES.exists():
        return MODULES
    npm = shutil.which("npm")
    if npm is None:
        raise BuildError("npm is missing: install Node.js 20 or later")
    print(f"installing Claude Code and Codex into {MODULES.parent} (once, 830 MB)", file=sys.stderr, flush=True)
    aside = MODULES.parent.with_name(f"{_DIGEST}.installing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for path in _FILES:
        shutil.copy(path, aside)
    argv = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    if subprocess.run(argv, cwd=aside, check=False, stdout=sys.stderr).returncode:
        raise BuildError("the packages of npm cannot be installed: see above")
    aside.rename(MODULES.parent)
    return MODULES


def find_program(pattern: str) -> Path:
    """Return the program of a package that npm chose for this machine, by a pattern for its path."""
    (program,) = ensure_agents().glob(pattern)
    return program


if __name__ == "__main__":
    report_build(lambda: {"node_modules": ensure_agents()})
