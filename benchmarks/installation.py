"""From `helm install` to a ready controller, beside the same two pods without anything else.

Each round has a control plane of its own with one node, so that everything is installed for the first time, as by a
newcomer. The floor comes after it on the same control plane: the Deployment alone is applied again by `kubectl apply`,
and `kubectl rollout status` waits for it. What is between the two is Helm's: CRDs, roles, policies, its own waits.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.report import Figure, print_figures
from tests.controlplane import members, sandbox
from tests.controlplane.binaries import ensure_binaries
from tests.controlplane.helm import CHART, run_helm
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.controlplane.network import Network
from tests.controlplane.plane import ControlPlane

ROUNDS: Final = 3
MOST_SECONDS: Final = 10.0
DEPLOYMENT: Final = (f"deployment/{CONTROLLER_ACCOUNT}", f"--namespace={CONTROLLER_NAMESPACE}")
COMMAND: Final = ("install", "pomona", str(CHART), "--create-namespace", "--wait")


class Round(NamedTuple):
    """Seconds that each of the two took in one round."""

    install: float
    floor: float


async def measure_floor(plane: ControlPlane, manifest: Path) -> float:
    """Return the seconds that the Deployment of the controller takes alone; it is deleted first."""
    await plane.kubectl("delete", *DEPLOYMENT, "--cascade=foreground")
    started = time.monotonic()
    await plane.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={manifest}")
    await plane.kubectl("rollout", "status", *DEPLOYMENT, "--timeout=2m")
    return time.monotonic() - started


async def measure_round(folder: Path) -> Round:
    """Install on a new control plane, and measure the floor there."""
    plane = ControlPlane(ensure_binaries(), folder / "plane")
    manifest = folder / "controller.yaml"
    manifest.write_text(await run_helm("template", "pomona", str(CHART), "--show-only=templates/controller.yaml"))
    try:
        await plane.start()
        node = members.kubelet(plane, "cpu-1", folder)
        node.start()
        await plane.kubectl("wait", "--for=create", "--timeout=60s", "node/cpu-1")
        await plane.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "node/cpu-1")
        started = time.monotonic()
        await run_helm(*COMMAND, plane=plane)
        install = time.monotonic() - started
        result = Round(install, await measure_floor(plane, manifest))
        await node.kill()
    finally:
        await plane.stop()
    return result


async def run() -> None:
    """Measure all rounds, and print the medians."""
    load = os.getloadavg()[0]
    network = Network()
    await network.start()
    rounds = [await measure_round(Path(tempfile.mkdtemp(prefix="bench-"))) for _ in range(ROUNDS)]
    install, floor = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    print_figures(
        f"helm install, median of {ROUNDS}, load {load:.1f} before; the floor is its Deployment alone, by kubectl",
        [
            Figure("helm install to a ready controller", install, floor, MOST_SECONDS, "s"),
            Figure(
                "  slowest round",
                max(trial.install for trial in rounds),
                max(trial.floor for trial in rounds),
                None,
                "s",
            ),
            Figure("  CRDs, roles, policies and waits of Helm", install - floor, None, None, "s"),
        ],
    )


if __name__ == "__main__":
    if not sandbox.inside():
        sys.exit(sandbox.run([sys.executable, "-m", "benchmarks.installation"]))
    asyncio.run(run())
