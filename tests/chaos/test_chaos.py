"""The chaos run as one test of the suite. `make chaos` runs it alone, and repeats a run."""

import subprocess
import sys

import pytest

SANDBOX = (sys.executable, "-m", "tests.controlplane.sandbox", "--")


@pytest.mark.timeout(600)
def test_everything_recovers_after_random_faults() -> None:
    """The output has the seed and each fault; pytest shows the output of a failed run."""
    assert subprocess.run([*SANDBOX, sys.executable, "-m", "tests.chaos"], check=False).returncode == 0
