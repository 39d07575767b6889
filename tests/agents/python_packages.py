"""LangChain's adapter for Ollama, installed once into the user's cache: `python -m tests.agents.python_packages`.

`requirements.lock` is made by `uv pip compile --no-header --no-annotate --python-version 3.11 requirements.in -o
requirements.lock`. It has versions of its own of packages that Pomona uses, too.
"""

import hashlib
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

from tests.controlplane.binaries import cache_folder
from tests.controlplane.go_build import BuildError, report_build

_LOCK: Final = Path(__file__).with_name("requirements.lock")
_DIGEST: Final = hashlib.sha256(_LOCK.read_bytes()).hexdigest()[:12]
PYTHON: Final = cache_folder() / "agents" / f"python-{_DIGEST}" / "bin" / "python"
"""The interpreter of the environment, once it is made."""


def ensure_packages() -> Path:
    """Return the interpreter that has the packages; install them if they are absent: 100 MB, seconds.

    Raises:
        BuildError: they cannot be installed here.
    """
    folder = PYTHON.parent.parent
    stamp = folder / ".installed"
    if stamp.exists():
        return PYTHON
    print(f"installing langchain-ollama into {folder} (once, 100 MB)", file=sys.stderr, flush=True)
    venv.create(folder, clear=True)
    uv = Path(sys.executable).with_name("uv")
    argv = [str(uv), "pip", "install", "--quiet", "--python", str(PYTHON), "--no-deps", "-r", str(_LOCK)]
    if subprocess.run(argv, check=False, stdout=sys.stderr).returncode:
        raise BuildError("langchain-ollama cannot be installed: see above")
    stamp.touch()
    return PYTHON


if __name__ == "__main__":
    report_build(lambda: {"python": ensure_packages()})
