"""Fixtures of the installation: a namespace with a file server, and the control plane as other tests need it."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.cluster.main_job.conftest import cluster, files
from tests.controlplane import members
from tests.controlplane.helm import run_helm
from tests.controlplane.plane import ControlPlane

__all__ = ["cluster", "files"]


@pytest_asyncio.fixture
async def installable(plane: ControlPlane) -> AsyncIterator[ControlPlane]:
    """The control plane, with Pomona's kinds and roles again after the test."""
    yield plane
    await plane.end_outage()
    await run_helm("uninstall", "pomona", "--ignore-not-found", "--wait", plane=plane)
    # A release may have left other schemas, of which Helm is the owner.
    await members.install(plane, "--force-conflicts")
