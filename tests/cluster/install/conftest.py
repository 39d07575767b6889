"""Fixtures of the installation: a namespace with a file server, and the control plane as other tests need it."""

from collections.abc import AsyncIterator

import pytest_asyncio

from kube.resources import PODS
from tests.cluster.main_job.conftest import cluster, files
from tests.controlplane import members
from tests.controlplane.helm import CHART, run_helm
from tests.controlplane.members import CONTROLLER_NAMESPACE
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually

__all__ = ["cluster", "files"]


@pytest_asyncio.fixture
async def installable(plane: ControlPlane) -> AsyncIterator[ControlPlane]:
    """The control plane, with Pomona's kinds and roles again after the test."""
    yield plane
    await plane.end_outage()
    await run_helm("uninstall", "pomona", "--ignore-not-found", "--wait", plane=plane)
    await eventually(lambda: has_no_pods(plane, CONTROLLER_NAMESPACE))
    await members.delete_leadership(plane)
    await members.install(plane)


async def has_no_pods(plane: ControlPlane, namespace: str) -> bool:
    """Return whether the garbage collector has deleted the pods of a release, for which Helm does not wait."""
    return not (await plane.request("GET", PODS.path(namespace)))["items"]


@pytest_asyncio.fixture
async def uninstalled(installable: ControlPlane) -> ControlPlane:
    """The control plane as a release leaves it that was uninstalled: the kinds are there, and no controller."""
    taken = ("--take-ownership", "--force-conflicts", "--set=image.repository=pomona-test")
    await run_helm("install", "pomona", str(CHART), *taken, plane=installable)
    await run_helm("uninstall", "pomona", "--wait", plane=installable)
    # kubectl, which installed it first, would stay an owner of what it says.
    await installable.request("DELETE", "/api/v1/namespaces/pomona-system/configmaps/pomona-host-ports")
    return installable
