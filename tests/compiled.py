"""The unit tests of the gateway on the compiled modules of the image: `python -m tests.compiled`, of `make test-long`.

The folder of tests is a link, so that Pomona itself comes from the image's root. Tests with the mark `interpreted` are
left out: they replace parts of these modules, or give them objects of other classes, which compiled code refuses.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.controlplane import pomona_image
from tests.controlplane.process import CHECKOUT


def main() -> None:
    """Run the tests, and exit as pytest does."""
    environment = {**os.environ, "PYTHONPATH": str(pomona_image.find_packages(pomona_image.ensure_root()))}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("pyproject.toml", "tests", "benchmarks", "examples"):
            (Path(folder) / name).symlink_to(CHECKOUT / name)
        check = "import gateway.proxy.service as module; assert module.__file__.endswith('.so'), module.__file__"
        subprocess.run([sys.executable, "-P", "-c", check], cwd=folder, env=environment, check=True)
        pytest = [sys.executable, "-P", "-m", "pytest", "--quiet", "--numprocesses", str(os.cpu_count())]
        command = [*pytest, "-m", "not interpreted", "tests/unit/gateway"]
        sys.exit(subprocess.run(command, cwd=folder, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
