"""From `make demo` to the first answer, split by part, beside the control plane's own start.

The demo runs as its user runs it, and prints what the time consists of. The first run is not counted: it fills the
caches. The control plane (etcd, kube-apiserver, kube-controller-manager, kube-scheduler) is no part of Pomona, and
nothing of Pomona can begin before it: its start is the floor.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Final

from benchmarks.report import Figure, print_figures
from tests.controlplane.process import CHECKOUT

ROUNDS: Final = 3
MOST_SECONDS: Final = 20.0
ENTRANCE: Final = "make and sandbox"
FLOOR: Final = "control plane"
STARTED: Final = re.compile(r"\[ *([\d.]+) s\]")
MILESTONES: Final = re.compile(r"first answer [\d.]+ s after the start: (.+)")


def read_parts(milestones: str) -> dict[str, float]:
    """Return the seconds of each part, from the demo's list: `control plane 4.6, helm install 1.9`."""
    parts = (part.rpartition(" ") for part in milestones.split(", "))
    return {name: float(seconds) for name, _, seconds in parts}


def measure_demo() -> dict[str, float]:
    """Return the seconds of each part of one run of the demo.

    Raises:
        RuntimeError: the demo gave no answer; its output was printed.
    """
    asked = time.monotonic()
    entrance, parts, output = 0.0, dict[str, float](), list[str]()
    make = shutil.which("make") or "make"
    with subprocess.Popen([make, "demo"], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as demo:
        for line in demo.stdout or ():
            output.append(line)
            if not entrance and (match := STARTED.match(line)):
                entrance = time.monotonic() - asked - float(match[1])
            if match := MILESTONES.match(line):
                parts = read_parts(match[1])
    if demo.returncode != 0 or not parts:
        sys.stderr.write("".join(output))
        raise RuntimeError(f"make demo ended with {demo.returncode} and without its first answer")
    return {ENTRANCE: entrance, **parts}


def list_figures(parts: Mapping[str, float], total: float) -> list[Figure]:
    """Return the time of the first answer, and that of each part."""
    largest = max(parts, key=lambda name: parts[name])
    return [
        Figure("make demo to its first answer", total, parts[FLOOR], MOST_SECONDS, "s"),
        *(
            Figure(
                f"  {name}, {seconds / total:.0%}{': the largest' if name == largest else ''}", seconds, None, None, "s"
            )
            for name, seconds in parts.items()
        ),
    ]


def main() -> None:
    """Run the demo once for the caches, then measure, and print the medians."""
    load = os.getloadavg()[0]
    measure_demo()
    rounds = [measure_demo() for _ in range(ROUNDS)]
    parts = {name: statistics.median(durations[name] for durations in rounds) for name in rounds[0]}
    total = statistics.median(sum(durations.values()) for durations in rounds)
    print_figures(
        f"first answer of make demo, warm, median of {ROUNDS}, load {load:.1f} before; the floor is the control plane",
        list_figures(parts, total),
    )


if __name__ == "__main__":
    main()
