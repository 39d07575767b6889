"""The chaos run as one of all tests. `make chaos` runs it alone, and repeats one."""

import subprocess
import sys

import pytest

SANDBOX = (sys.executable, "-m", "tests.controlplane.sandbox", "--")


@pytest.mark.timeout(600)
def test_all_is_well_after_random_faults() -> None:
    """What is printed shows the seed and each fault; pytest shows it where the run failed."""
    assert subprocess.run([*SANDBOX, sys.executable, "-m", "tests.chaos"], check=False).returncode == 0
