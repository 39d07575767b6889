"""The chaos run as one test of the suite, with a seed that has all faults. `make chaos` runs it with a random seed."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

SEED = 1
SANDBOX = (sys.executable, "-m", "tests.controlplane.sandbox", "--")


def test_everything_recovers_after_random_faults() -> None:
    """The output has each fault; pytest shows the output of a failed run."""
    chaos = [*SANDBOX, sys.executable, "-m", "tests.chaos", f"--seed={SEED}"]
    assert subprocess.run(chaos, check=False).returncode == 0
