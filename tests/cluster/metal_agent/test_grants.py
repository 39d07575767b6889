"""A real agent under the policies: without grants it serves on and says why, and an update interrupts nothing."""

import json
from pathlib import Path

import aiohttp

from controller.hosts.grants import grants_name
from crds.meta import HOSTS_NAMESPACE, LABEL_MANAGED_BY, LABEL_SERVICE_NAME, LABEL_SLICE_MANAGED_BY
from kube.resources import ROLES
from tests.cluster.metal_agent.bound_process import BoundProcess, answers, bound_process, http
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.controlplane.process import CHECKOUT
from tests.support.eventually import eventually
from tests.support.host_grants import grant_host

__all__ = ["bound_process", "http"]

POLICY = CHECKOUT / "deploy" / "install" / "host-policy.yaml"


async def test_agent_without_grants_serves_on_and_says_why(
    bound_process: BoundProcess, http: aiohttp.ClientSession
) -> None:
    await bound_process.bind()
    url = await bound_process.ready()
    pid = await bound_process.pid()
    agent, client = bound_process.host.agent, bound_process.client
    await agent.kill()
    nothing = [{"op": "replace", "path": "/rules", "value": []}]
    await client.patch_json(ROLES, grants_name(bound_process.host.name), HOSTS_NAMESPACE, nothing)
    agent.start()
    status = await bound_process.phase("Ready", "NotExposed")
    assert "no process of service" in status.message
    assert await bound_process.url() == url, "its endpoint stays ready"
    assert await answers(http, url)
    await grant_host(client, bound_process.host.name, bound_process.addresses)
    assert (await bound_process.phase("Ready")).pid == pid
    assert await bound_process.url() == url


async def test_host_that_served_before_the_policy_goes_on(
    plane: ControlPlane, bound_process: BoundProcess, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await plane.kubectl("delete", "validatingadmissionpolicybinding", "pomona-host-slices")
    try:
        await eventually(lambda: not_refused(plane, bound_process, tmp_path))
        addresses, bound_process.addresses = bound_process.addresses, []
        await bound_process.bind()
        url = await bound_process.ready()
        pid = await bound_process.pid()
        # As a new controller does it for what runs already, before an administrator applies the policy.
        bound_process.addresses = addresses
        await grant_host(bound_process.client, bound_process.host.name, addresses)
    finally:
        await plane.apply(POLICY)
        await eventually(lambda: refused(plane, bound_process, tmp_path))
    await bound_process.host.agent.kill()
    bound_process.host.agent.start()
    assert (await bound_process.phase("Ready")).pid == pid
    assert await bound_process.url() == url
    assert await answers(http, url)
    await bound_process.bind("other-1", serviceName="other")
    await bound_process.phase("Ready", name="other-1")


async def refused(plane: ControlPlane, bound_process: BoundProcess, folder: Path) -> bool:
    """Return whether the policy refuses a slice that this host may never write."""
    host = bound_process.host.name
    labels = {LABEL_SERVICE_NAME: "foreign", LABEL_SLICE_MANAGED_BY: "thief", LABEL_MANAGED_BY: "thief"}
    metadata = {"namespace": bound_process.namespace, "name": "foreign", "labels": labels}
    foreign = folder / "foreign.json"
    foreign.write_text(
        json.dumps(
            {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata}
            | {"addressType": "IPv4", "endpoints": []}
        )
    )
    who = f"--as=system:serviceaccount:{HOSTS_NAMESPACE}:{host}"
    try:
        await plane.kubectl("create", "--dry-run=server", f"--filename={foreign}", who)
    except PlaneError as error:
        return "writes only EndpointSlices named" in str(error)
    return False


async def not_refused(plane: ControlPlane, bound_process: BoundProcess, folder: Path) -> bool:
    return not await refused(plane, bound_process, folder)
