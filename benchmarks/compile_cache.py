"""Starts of the real vLLM in a pod of the shortest service on the processor: the first one, and the next ones.

Arguments, variables, home and archive are those that the controller renders; each start has empty folders, as a new pod
has, and the time to unpack the archive is a part of it. The first start has no archive. The order is turned around in
every other round, since other work makes a machine slower and faster. `make test-vllm` installs vLLM.
"""

import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

from artifacts.compiled_code import find_archive, keep, restore
from benchmarks.report import Figure, print_figures
from tests.support.eventually import eventually
from tests.vllm.real_pod import RealPod

ROUNDS: Final = 3
GOAL: Final = 0.7


def measure_start(pod: RealPod, archive: Path) -> float:
    """Return the seconds from an empty pod to a healthy engine."""
    pod.empty()
    began = time.monotonic()
    print(f"  {restore(archive, pod.home)}", end="", flush=True)
    return time.monotonic() - began + pod.start()


def main() -> None:
    """Measure and print the starts."""
    folder = Path(tempfile.mkdtemp())
    try:
        pod = RealPod(folder)
        archive, missing = find_archive(pod.kept), folder / "missing"
        first: list[float] = []
        next_ones: list[float] = []
        for number in range(ROUNDS):
            for has_archive in sorted((False, True), reverse=bool(number % 2)):
                seconds = measure_start(pod, archive if has_archive else missing)
                (next_ones if has_archive else first).append(seconds)
                print(f": {seconds:.1f} s")
                if not archive.exists():
                    asyncio.run(eventually(lambda: keep(pod.home, archive), 90))
                    size_bytes = archive.stat().st_size
    finally:
        shutil.rmtree(folder)
    share = statistics.median(next_ones) / statistics.median(first)
    figures = (
        Figure("first start", statistics.median(first), None, None, "s"),
        Figure("next start", statistics.median(next_ones), None, None, "s"),
        Figure("next start, share of the first", share, None, GOAL, ""),
        Figure("archive", size_bytes / 1e6, None, None, "MB"),
    )
    print_figures(f"starts of vLLM in a pod, medians of {ROUNDS}", figures)


if __name__ == "__main__":
    main()
