"""Helm, built once from the Go module beside this file, and what it is run with here.

The module is separate from the control plane's, because Helm needs later versions of Kubernetes' libraries than the API
server that is tested.
"""

import asyncio
import os
from pathlib import Path

from tests.controlplane.binaries import ensure_module_programs
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.controlplane.process import CHECKOUT

MODULE = Path(__file__).parent
PACKAGES = {"helm": "helm.sh/helm/v4/cmd/helm"}
CHART = CHECKOUT / "deploy" / "chart"
NAMESPACE = "pomona-system"


class HelmError(PlaneError):
    """Helm failed; the message has its output."""


def ensure_helm() -> Path:
    """Return the program; build it if it is not in the cache.

    Raises:
        BuildError: it cannot be built here.
    """
    return ensure_module_programs(MODULE, PACKAGES, "helm")["helm"]


async def run_helm(*arguments: str, plane: ControlPlane | None = None, namespace: str = NAMESPACE) -> str:
    """Run Helm in a namespace, as administrator of `plane` if it is given, and return its output.

    Raises:
        HelmError: it failed.
    """
    process = await asyncio.create_subprocess_exec(
        ensure_helm(),
        *arguments,
        f"--namespace={namespace}",
        env={**os.environ, **(plane.environment if plane else {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise HelmError(f"helm {' '.join(arguments)}: {errors.decode().strip()}")
    return output.decode()
