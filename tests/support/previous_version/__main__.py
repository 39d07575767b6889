"""`python -m tests.support.previous_version COMMIT`: keep this commit's wheel as the previous version.

The wheel gets one additional module, `agent_process.py` of the same commit, with which a test sets the memory pressure
for an agent.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from zipfile import ZipFile

from tests.controlplane.process import CHECKOUT
from tests.support.previous_version import FOLDER


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout.strip()


def build(commit: str) -> Path:
    """Replace the kept wheel by that of `commit`, and return its path. Needs the history, uv and the package index."""
    name = _git("rev-parse", "--short=7", f"{commit}^{{commit}}")
    with tempfile.TemporaryDirectory() as temporary:
        source, built = Path(temporary) / "source", Path(temporary) / "built"
        _git("archive", f"--output={temporary}/source.tar", name)
        with tarfile.open(f"{temporary}/source.tar") as archive:
            archive.extractall(source, filter="data")
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "build", "--quiet", "--wheel", f"--out-dir={built}", source], check=True)
        (wheel,) = built.glob("*.whl")
        (agent_process,) = (source / "tests").rglob("agent_process.py")
        with ZipFile(wheel, "a") as contents:
            contents.write(agent_process, agent_process.name)
        for old in FOLDER.glob("*.whl"):
            old.unlink()
        return Path(shutil.copyfile(wheel, FOLDER / f"{name}.whl"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make previous-version COMMIT=...")
    print(build(sys.argv[1]))
