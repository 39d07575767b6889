"""A control plane with Pomona's kinds and an audit log of the controller's calls, for benchmarks of the controller."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.audit_log import AuditLog
from kube import credentials
from kube.client import Client, connect
from tests.controlplane import members
from tests.controlplane.binaries import ensure_binaries
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.controlplane.network import Network
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process


@dataclass(frozen=True)
class MeasuredCluster:
    """A control plane, its audit log, and the controller, which is not yet started."""

    plane: ControlPlane
    audit: AuditLog
    controller: Process
    client: Client
    """The API, as cluster administrator."""
    folder: Path

    async def make_namespace(self, name: str) -> None:
        """Create a namespace."""
        await self.plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})


@contextlib.asynccontextmanager
async def measured_cluster(*controller_manager_options: str) -> AsyncIterator[MeasuredCluster]:
    """Start a control plane, and stop it and the controller in the end. Call it in a sandbox."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    user = f"system:serviceaccount:{CONTROLLER_NAMESPACE}:{CONTROLLER_ACCOUNT}"
    audit = AuditLog(folder, user)
    network, plane = Network(), ControlPlane(ensure_binaries(), folder / "plane", *audit.options)
    plane.controller_manager.argv += controller_manager_options
    await network.start()
    try:
        await plane.start()
        await members.install(plane)
        controller = await members.controller(plane, folder)
        async with connect(credentials.load(plane.kubeconfig())) as client:
            yield MeasuredCluster(plane, audit, controller, client, folder)
        if controller.running:
            await controller.stop()
    finally:
        await plane.stop()
