"""The unit tests in parts at once: `python -m tests.parts`, which `make test-fast` runs.

Each part is a pytest with every n-th file, and prints its report when it has ended. pytest-xdist, with which the slow
tests run, collects all tests in each worker and sends five messages for each test: of 10,000 tests of some
milliseconds that is a quarter of the whole work.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final

UNIT_TESTS: Final = Path(__file__).with_name("unit")
PARTS_PER_CORE: Final = 4
"""Some tests wait, so that more parts than cores are quicker."""


def deal_files(number: int) -> list[list[Path]]:
    """Return the files of the unit tests in `number` parts; files of about one size, and so of one time, are apart."""
    files = sorted(UNIT_TESTS.rglob("test_*.py"), key=lambda path: -path.stat().st_size)
    return [files[first::number] for first in range(number)]


def run_part(files: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run the tests of these files in a pytest, and return its exit status and report."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *map(str, files)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def main() -> None:
    """Run all parts, and exit with 1 if one has failed."""
    # A pytest without a file would run all tests there are.
    parts = [files for files in deal_files(PARTS_PER_CORE * (os.cpu_count() or 1)) if files]
    has_failed = False
    with ThreadPoolExecutor(len(parts)) as executor:
        for ended in as_completed([executor.submit(run_part, files) for files in parts]):
            print(ended.result().stdout, end="", flush=True)
            has_failed |= ended.result().returncode != 0
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
